"""Edits in place: all or nothing, and taken back later.

The order of things, each on the disk before the next begins: a journal that holds what was there and what comes; the
blocks that are put in front of the data; the bytes; the record of the edit among those that `undo` takes back; the
journal gone, which is what makes the edit count. A file whose journal is there is in between, and no command reads it.
`take_back` brings it to what it was before the edit, from any state: an edit that did not finish is taken back, an undo
that did not finish is completed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress

from ckptfix.commands import quoted
from ckptfix.errors import CkptfixError, DamagedFile, Refused, Unsupported, WriteFailed
from ckptfix.io.durable import Undisturbed
from ckptfix.io.inplace.disk import DISK, Disk, File, Opened, RealFile
from ckptfix.io.inplace.record import MOST, Change, Record, decoded
from ckptfix.io.inplace.shifted import close_gap
from ckptfix.io.system import named
from ckptfix.io.unfinished import JOURNAL, UNDO, beside, refuse_long_name, unfinished

SECTOR = 512
"""Bytes that a disk writes whole or not at all."""


def carry_out(target: str, record: Record, *, keep: bool = True, disk: Disk = DISK) -> None:
    """Make the changes of `record` to the file or folder `target`: all of them, or none.

    Args:
        target: its real path.
        keep: remember the edit, beside the file; not needed where the file itself shows what it was.

    Raises:
        Refused: an edit of it has not finished, or another program has it open or edits it.
        DamagedFile: it is not what the record was made of.
        WriteFailed: the system could not; it is as it was, unless the error says that `undo` is needed.
    """
    refuse_long_name(target)
    if len(record.encoded()) > MOST:
        message = f"the edit would keep more than {MOST:,} bytes of what it replaces"
        raise Unsupported(message, path=target, hint="write a copy: give OUT")
    journal = beside(target, JOURNAL)
    with _opened(target, record, disk) as pairs:
        for file, change in pairs:
            _expect(file, change.before, change.old)
        _alone(pairs)
        # Now, while nothing is done: it may be unreadable. What led to another file is of no use any more.
        records = _leading(past(target, disk), {change.name: file for file, change in pairs})
        with Undisturbed():
            _begin(disk, journal, record, target)
            try:
                with named(target):
                    for file, change in pairs:
                        _apply(file, change)
                    if keep:
                        _remember(disk, target, (*records, record))
                    disk.delete(journal)
            except BaseException as error:
                _give_up(error, disk, target, record, pairs)
                raise


def take_back(target: str, record: Record, *, disk: Disk = DISK) -> None:
    """Bring the file or folder `target` to what it was before the edit `record`, which is done. All or nothing.

    Raises:
        DamagedFile: it is not what the edit made.
        CkptfixError: as `carry_out`.
    """
    journal = beside(target, JOURNAL)
    with _opened(target, record, disk) as pairs:
        for file, change in pairs:
            _expect(file, change.after, change.new)
        _alone(pairs)
        with Undisturbed():
            _begin(disk, journal, record, target)
            with _stuck(target):
                _end(disk, target, record, pairs)


def finish(target: str, *, disk: Disk = DISK) -> Record | None:
    """Bring `target`, whose journal is there, to what it was before the edit that did not finish.

    Returns:
        The record of the edit; None where it had not begun.

    Raises:
        DamagedFile: another program wrote to it since.
        WriteFailed: the system could not; it can be tried again.
    """
    journal = beside(target, JOURNAL)
    with _way_out(journal), Opened(disk) as opened:
        opened.hold(target)
        # Only now: until it is held, an edit that goes on may be writing its journal, or be done with it.
        data = disk.load(journal)
        if data is None:
            hint = "see what it is now, with --list"
            raise Refused("the edit of another program has just ended", path=target, hint=hint)
        record = next(decoded(data), None)
        if record is None or data != record.encoded():
            with named(target):
                disk.delete(journal)  # it was not whole when the edit was cut off, so nothing was done
            return None
        pairs = _files(opened, target, record)
        _alone(pairs)
        with Undisturbed(), _stuck(target):
            if disk.load(aside := f"{beside(target, UNDO)}.new") is not None:
                disk.delete(aside)
            _end(disk, target, record, pairs)
    return record


@contextmanager
def _way_out(journal: str) -> Iterator[None]:
    """A file that a journal does not fit is not lost: the error says how it is used as it is."""
    try:
        yield
    except DamagedFile as error:
        keep = f"to keep it as it is, remove the journal: `rm {quoted(journal)}`"
        error.hint = f"{error.hint}; {keep}" if error.hint else keep
        raise


def discard_foreign(target: str, *, disk: Disk = DISK) -> bool:
    """Remove the journal of `target` where that is about another file: nothing of the edit is in this one.

    A file that was written anew since has neither the bytes that the edit replaced nor those that it wrote. Where any
    of them is there, or the journal is not whole, it is left to `finish`.

    Returns:
        Whether it was so; nothing was done to the file.
    """
    journal = beside(target, JOURNAL)
    with _way_out(journal), Opened(disk) as opened:
        opened.hold(target)
        data = disk.load(journal)
        record = next(decoded(data), None) if data is not None else None
        if record is None or data != record.encoded() or not record.changes:
            return False
        folder = os.path.isdir(target)
        if not folder and [change.name for change in record.changes] != [os.path.basename(target)]:
            return False  # the name says so, and the bytes may fit all the same
        for change in record.changes:
            if folder and not os.path.exists(os.path.join(target, change.name)):
                continue
            file = opened.add(_inside(target, change.name)) if folder else opened.files[0]
            if not _is_other(file, change):
                return False
        with named(target):
            disk.delete(journal)
    return True


def _is_other(file: File, change: Change) -> bool:
    """Whether nothing that the edit replaced, moved or wrote is in the file."""
    if change.shift and change.probes:
        places = [(probe, probe.offset + moved) for probe in change.probes for moved in (0, change.shift)]
        return not any(probe.fits(file.read(at, probe.length)) for probe, at in places)
    low, high = sorted((change.before, change.after))
    possible = low <= file.size <= high
    for offset, data in (*change.old, *change.new):
        now = file.read(offset, len(data))
        for start in range(0, len(data), SECTOR):
            was = data[start : start + SECTOR]
            here = now[start : start + SECTOR]
            # One byte over and over, such as padding, is in any file. What a disk lost is zeros.
            if (here == was and len({*was}) > 1) or (possible and not any(here)):
                return False
    return bool(change.old or change.new) or not possible


def past(target: str, disk: Disk = DISK) -> tuple[Record, ...]:
    """The edits of `target` that are remembered beside it, the first one first."""
    return tuple(decoded(disk.load(beside(target, UNDO)) or b""))


def remembered(target: str) -> tuple[Record, ...]:
    """The edits remembered beside `target` that can have led to what it is now, the first one first.

    A record says what the last edit left: one that does not fit the file is about another, which had its name.
    """
    records = past(target)
    if not records:
        return ()
    files: dict[str, File] = {}
    folder = target if os.path.isdir(target) else os.path.dirname(target)
    with ExitStack() as stack:
        for name in {change.name for record in records for change in record.changes}:
            with suppress(CkptfixError, OSError):
                files[name] = stack.enter_context(closing(RealFile(_inside(folder, name), change=False)))
        if folder != target:
            records = tuple(record for record in records if _names(record) == [os.path.basename(target)])
        there = [record for record in records if all(name in files for name in _names(record))]
        return _leading(there, files)


def refuse_changed(target: str, record: Record) -> None:
    """Refuse a file or folder that is not what the edit `record` made; nothing is done to it.

    Raises:
        DamagedFile: it is not.
    """
    with _opened(target, record, DISK) as pairs:
        for file, change in pairs:
            _expect(file, change.after, change.new)


def _names(record: Record) -> list[str]:
    return [change.name for change in record.changes]


def _leading(records: Sequence[Record], files: Mapping[str, File]) -> tuple[Record, ...]:
    """Of `records`, those up to the latest that fits the files; before it, as far as sizes follow one another."""
    found: list[Record] = []
    sizes: dict[str, int] = {}
    for record in reversed(records):
        if not found:
            if not all(_left(files[change.name], change) for change in record.changes if change.name in files):
                continue
        elif any(sizes.get(change.name, change.after) != change.after for change in record.changes):
            break
        found.append(record)
        sizes |= {change.name: change.before for change in record.changes}
    return tuple(reversed(found))


def _left(file: File, change: Change) -> bool:
    """Whether the file is what the edit made."""
    return file.size == change.after and all(file.read(offset, len(data)) == data for offset, data in change.new)


def _remember(disk: Disk, target: str, records: Sequence[Record]) -> None:
    place = beside(target, UNDO)
    kept = [record.encoded() for record in records]
    while sum(map(len, kept)) > MOST:
        del kept[0]  # the oldest edit is forgotten
    if kept:
        disk.replace(place, b"".join(kept), target)
    elif disk.load(place) is not None:
        disk.delete(place)


@contextmanager
def _opened(target: str, record: Record, disk: Disk) -> Iterator[list[tuple[File, Change]]]:
    with Opened(disk) as opened:
        opened.hold(target)
        yield _files(opened, target, record)


def _files(opened: Opened, target: str, record: Record) -> list[tuple[File, Change]]:
    """The files of a record, opened; its target is held already."""
    if not os.path.isdir(target):
        names = [change.name for change in record.changes]
        if names != [os.path.basename(target)]:
            raise DamagedFile("its record of an edit is about another file", path=target, where=", ".join(names))
        return [(opened.files[0], record.changes[0])]
    return [(opened.add(_inside(target, change.name)), change) for change in record.changes]


def _inside(folder: str, name: str) -> str:
    """The path of a file that a journal names. Refuses what is not in the folder of the journal."""
    path = os.path.join(folder, name)
    if os.path.dirname(os.path.realpath(path)) != os.path.realpath(folder) or os.path.basename(name) != name:
        raise DamagedFile("its record of an edit names a file elsewhere", path=folder, where=name)
    return path


def _expect(file: File, size: int, content: Sequence[tuple[int, bytes]]) -> None:
    for offset, data in ((0, b""), *content):
        if file.size != size or file.read(offset, len(data)) != data:
            raise DamagedFile(
                "it changed since: its bytes are not what the edit made or was made of", path=file.name, offset=offset,
                hint="nothing was done to it",
            )  # fmt: skip


def _alone(pairs: Sequence[tuple[File, Change]]) -> None:
    for file, change in pairs:
        if change.shift:
            file.alone()


def _begin(disk: Disk, journal: str, record: Record, target: str) -> None:
    try:
        with named(journal):
            disk.create(journal, record.encoded(), target)
    except WriteFailed as error:
        if isinstance(error.__cause__, FileExistsError):
            raise unfinished(target) from error
        raise


def _apply(file: File, change: Change) -> None:
    if change.shift:
        file.insert(change.shift)
        file.sync()
    for offset, data in change.new:
        file.write(offset, data)
    if change.after < change.before:
        file.resize(change.after)
    file.sync()
    if file.size != change.after:
        raise DamagedFile("another program wrote to it while it was edited", path=file.name)


def _restore(file: File, change: Change) -> None:
    if change.shift:
        close_gap(file, change, len(change.old[0][1]))
    for offset, data in change.old:
        file.write(offset, data)
    if change.before != change.after and file.size != change.before:
        file.resize(change.before)
    file.sync()


def _refuse_other(file: File, change: Change) -> None:
    """Refuse a file that the edit cannot have left: what another program wrote would be lost.

    Of an edit that moves nothing, each sector is as before or as after; one behind the end that the file had may not
    have come to the disk, and is zeros then.
    """
    low, high = sorted((change.before, change.after))
    if file.size < low or (low < high < file.size):
        raise _others(file, f"it has {file.size:,} bytes, not {low:,} to {high:,}")
    before, after = dict(change.old), dict(change.new)
    for offset in before.keys() | after.keys():
        one, other = before.get(offset, b""), after.get(offset, b"")
        # A shorter one stands over the longer one until the size has changed.
        known = (one + other[len(one) :], other + one[len(other) :], one, other)
        now = file.read(offset, max(map(len, known)))
        start = 0
        while start < len(now) and now not in known:
            end = (offset + start) // SECTOR * SECTOR + SECTOR - offset
            new = offset + start + len(now[start:end]) > change.before and not any(now[start:end])
            if not new and not any(_may_be(now[start:end], data[start:end]) for data in known):
                raise _others(file, f"what stands at {offset + start:#x} is neither what was there nor what it wrote")
            start = end


def _may_be(now: bytes, known: bytes) -> bool:
    """Whether a sector is this one, of which the end may lie behind the end that the file had."""
    return now == known.ljust(len(now), b"\0") or now == known[: len(now)]


def _others(file: File, what: str) -> DamagedFile:
    return DamagedFile(
        f"another program wrote to it while it was edited: {what}", path=file.name,
        hint="nothing was done to it; a backup has what it was",
    )  # fmt: skip


def _end(disk: Disk, target: str, record: Record, pairs: Sequence[tuple[File, Change]]) -> None:
    for file, change in pairs:
        if not change.shift:
            _refuse_other(file, change)
    for file, change in pairs:
        _restore(file, change)
    records = past(target, disk)
    kept = tuple(other for other in records if other.id != record.id)
    if kept != records:
        _remember(disk, target, kept)
    disk.delete(beside(target, JOURNAL))


def _give_up(
    error: BaseException, disk: Disk, target: str, record: Record, pairs: Sequence[tuple[File, Change]]
) -> None:
    """Take back what was done of an edit; where that fails too, say what helps."""
    try:
        _end(disk, target, record, pairs)
    except (CkptfixError, OSError) as second:
        if isinstance(error, CkptfixError):
            reason = second.message if isinstance(second, CkptfixError) else second.strerror
            error.message += f"; taking the edit back failed too: {reason}"
            error.hint = unfinished(target).hint


@contextmanager
def _stuck(target: str) -> Iterator[None]:
    """An error inside says that the same can be tried again."""
    try:
        with named(target):
            yield
    except WriteFailed as error:
        error.hint = unfinished(target).hint
        raise
