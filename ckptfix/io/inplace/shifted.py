"""Data that a file system has moved, perhaps incompletely: the position of the gap, and how to close it.

fallocate inserts blocks into a file, and removes them, in several transactions. If it is interrupted, it leaves the
file at its larger size, with a gap of the blocks somewhere in it: the data before the gap has not moved, the data
behind it has. (ext4 grows the file first, then moves extents from the last to the first; removal goes the other way,
and the file shrinks last. Source: fs/ext4/extents.c, ext4_insert_range and ext4_collapse_range.)
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptfix.errors import DamagedFile
from ckptfix.io.inplace.disk import EditedFile
from ckptfix.io.inplace.record import LONGEST_PROBE, FileChange, Probe, digest

PROBES = 256

MOST_HOLES = 10_000
LOOK = 64 << 20
"""The most bytes that are read to see whether two positions of a gap give the same result."""


def probes_of(file: EditedFile, start: int, size: int, block: int) -> tuple[Probe, ...]:
    """Return probes of the data from `start` on, each inside one block: the first, the last, and some between."""
    if start >= size:
        return ()
    first, last = start // block, (size - 1) // block
    step = max((last - first) // PROBES, 1)
    numbers = dict.fromkeys((*range(first, last + 1, step), last))
    return tuple(_probe(file, number, start, size, block) for number in numbers)


def _probe(file: EditedFile, number: int, start: int, size: int, block: int) -> Probe:
    begin = max(number * block, start)
    length = min((number + 1) * block, size, begin + LONGEST_PROBE) - begin
    return Probe(begin, length, digest(file.read(begin, length)))


def holes_of(file: EditedFile, start: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return the first holes of the data."""
    found = []
    for hole in file.holes(start, size):
        found.append(hole)
        if len(found) == MOST_HOLES:
            break
    return tuple(found)


def close_gap(file: EditedFile, change: FileChange, start: int) -> None:
    """Move the data back to its position before the edit, wherever the gap is; the bytes before it are not kept.

    Args:
        start: the beginning of the data, before the edit.

    Raises:
        DamagedFile: the file matches neither its state before the edit nor any state that the edit can leave.
    """
    if file.size == change.before:
        _verify(file, change)
        return
    if file.size != change.before + change.shift:
        raise _changed(file, change)
    gap = _gap(file, change, start)
    if gap >= change.before:
        file.resize(change.before)
    else:
        file.remove(gap, change.shift)
    file.sync()
    _verify(file, change)


def _verify(file: EditedFile, change: FileChange) -> None:
    for probe in change.probes:
        if not probe.fits(file.read(probe.offset, probe.length)):
            raise _changed(file, change, probe.offset)


def _changed(file: EditedFile, change: FileChange, offset: int | None = None) -> DamagedFile:
    sizes = " or ".join(f"{size:,}" for size in sorted({change.before, change.after}))
    was = "its data has changed" if offset else f"it has {file.size:,} bytes, but the edit expects {sizes}"
    return DamagedFile(
        f"another program wrote to it since it was edited: {was}",
        path=file.name,
        offset=offset,
        hint="it was left unchanged; use a backup to restore it",
    )


def _gap(file: EditedFile, change: FileChange, start: int) -> int:
    """Return the position of the gap: 0 if all data has moved, the old size if no data has moved."""
    low, high = 0, change.before + change.shift
    moved = False
    for probe in change.probes:
        stays = probe.fits(file.read(probe.offset, probe.length))
        moves = probe.fits(file.read(probe.offset + change.shift, probe.length))
        if not stays and not moves:
            raise _changed(file, change, probe.offset)
        if stays and not moves:
            if moved:
                raise _changed(file, change, probe.offset)
            low = probe.offset + probe.length
        elif moves and not stays and not moved:
            moved, high = True, probe.offset
    places = list(dict.fromkeys(_places(file, change, low, high, moved)))
    if len(places) > 1:
        places = [place for place in places if _like(file, change, place, start)] or places
    if not places or not all(_same(file, change, start, (places[0], place)) for place in places[1:]):
        raise _changed(file, change, low)
    return places[0]


def _places(file: EditedFile, change: FileChange, low: int, high: int, moved: bool) -> Iterator[int]:
    """Yield possible positions of the gap, between data that surely has not moved and data that surely has."""
    if not low:
        yield 0
    for begin, end in file.holes(low, min(high + change.shift, file.size)):
        if end - begin >= change.shift:
            yield begin
    if not moved:
        yield change.before


def _like(file: EditedFile, change: FileChange, gap: int, start: int) -> bool:
    """Return whether the data, with the gap there, has the same holes as before."""
    if len(change.holes) >= MOST_HOLES:
        return True
    expected = []
    for begin, end in change.holes:
        # A hole that contains or touches the gap merges with it.
        if end <= gap:
            expected.append((begin, end))
        elif begin < gap:
            expected += [(begin, gap), (gap, end + change.shift)]
        else:
            expected.append((begin + change.shift, end + change.shift))
    expected.append((gap, gap + change.shift))
    first = start + change.shift if not gap else start
    return _merged(expected, first) == _merged(file.holes(first, file.size), first)


def _merged(spans: Iterator[tuple[int, int]] | list[tuple[int, int]], first: int) -> list[tuple[int, int]]:
    made: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        begin = max(begin, first)
        if begin >= end:
            continue
        if made and begin <= made[-1][1]:
            made[-1] = made[-1][0], max(made[-1][1], end)
        else:
            made.append((begin, end))
    return made


def _same(file: EditedFile, change: FileChange, start: int, places: tuple[int, int]) -> bool:
    """Return whether the data, from `start` on, is the same for both positions of the gap."""
    low, high = max(min(places), start), max(places)
    if high - low > LOOK:
        return False
    return file.read(low, high - low) == file.read(low + change.shift, high - low)
