"""Compaction of a folder's files: items of dropped keys are removed, and the items behind them move up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckptfix.checkpoint import ByteRange, Segment
from ckptfix.formats.dcp.metadata import Metadata, StorageInfo
from ckptfix.formats.dcp.pickled import EditedKey
from ckptfix.formats.dcp.read import ItemFiles


def compacted(
    said: Metadata, rows: Sequence[EditedKey], files: ItemFiles
) -> tuple[Mapping[str, Sequence[Segment]], Mapping[StorageInfo, StorageInfo]]:
    """Return name -> the new content of each file, and the new places of items that moved.

    A file without remaining items is dropped. A file in which items overlap, or extend beyond the end, is copied whole.
    All files are copied whole if keys could not be read.
    """
    whole = {name: [ByteRange(path, 0, files.sizes[name])] for name, path in files.paths.items()}
    if said.wrong or not any(row.gone or row.put is not None for row in rows):
        return whole, {}
    used = set(_used(said, rows))
    gone = {part.place.name for _, part in said.places() if part.place is not None and part.place not in used}
    kept: dict[str, list[StorageInfo]] = {name: [] for name in whole}
    for place in sorted(used):
        kept.setdefault(place.name, []).append(place)
    made: dict[str, Sequence[Segment]] = {}
    moved: dict[StorageInfo, StorageInfo] = {}
    for name, copy in whole.items():
        places = kept[name]
        if name not in gone or not _apart(places, files.sizes[name]):
            made[name] = copy
            continue
        cursor = 0
        for place in places:
            moved[place] = StorageInfo(name, cursor, place.length)
            cursor += place.length
        if places:
            made[name] = [files.range(place) for place in places]
    return made, moved


def _used(said: Metadata, rows: Sequence[EditedKey]) -> Iterator[StorageInfo]:
    """Yield the items that are neither dropped nor replaced; also those of rewritten values, which are small."""
    yield from (place for _, place in said.unused)
    for row in rows:
        if not row.gone and row.put is None:
            yield from (part.place for part in row.saved.parts if part.place is not None)


def _apart(places: Sequence[StorageInfo], size: int) -> bool:
    """Return whether sorted items do not overlap and fit in a file of `size` bytes."""
    at = 0
    for place in places:
        if place.offset < at:
            return False
        at = place.offset + place.length
    return at <= size
