"""Edits of a folder: keys are in the `.metadata`, which is rewritten; files of tensors are copied whole.

Names inside a value (an optimizer's ``params``) and replaced tensors are written as new items, to an additional
``.distcp`` file; an in-place edit appends them to a file of the folder.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

from ckptfix.checkpoint import (
    ByteRange,
    Checkpoint,
    Drop,
    Edit,
    OutputFile,
    Plan,
    Put,
    Rename,
    Segment,
    SetLocation,
    segment_length,
)
from ckptfix.checkpoint.address import is_inside, is_inside_any, join, keys_of, of_keys
from ckptfix.commands import command
from ckptfix.errors import KeyConflict, Unsupported
from ckptfix.formats.dcp import metadata as dcp_metadata
from ckptfix.formats.dcp.metadata import Metadata, SavedKey, StorageInfo
from ckptfix.formats.dcp.pickled import EditedKey, rewritten
from ckptfix.formats.dcp.planned import planned_metadata
from ckptfix.formats.dcp.read import RANKS, Folder, ItemFiles, folder_of
from ckptfix.formats.dcp.window import ItemWindow
from ckptfix.formats.dcp.write import tensor_items
from ckptfix.formats.folders.companions import beside
from ckptfix.formats.in_place import data_moves
from ckptfix.formats.torch import zip as torch_zip
from ckptfix.formats.torch.common import pickled_object
from ckptfix.formats.torch.object import NodeSite
from ckptfix.io.virtual_files import PlannedFile
from ckptfix.pickles import Text
from ckptfix.pickles.graph import Node, pairs
from ckptfix.pickles.places import node_at
from ckptfix.urls import as_path


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


def plan_edit(checkpoint: Checkpoint, edits: Sequence[Edit], dest: str) -> Plan:
    """Plan the folder with `edits` applied; every file that loses no item is copied whole."""
    folder = folder_of(checkpoint)
    said, files = folder.metadata, folder.files
    around = beside(checkpoint.path, [mark.path for mark in checkpoint.files])
    new: list[OutputFile] = []
    metadata: Segment = ByteRange(files.metadata, 0, checkpoint.size_of(files.metadata))
    kept: Mapping[str, Sequence[Segment]] = {
        name: [ByteRange(path, 0, files.sizes[name])] for name, path in files.paths.items()
    }
    if edits:
        rows = edited(said, edits)
        segments = _new_items(rows, files, _free_name(folder, around.files))
        if segments:
            name, pieces = segments
            new.append(OutputFile.of(as_path(dest, name), pieces))
        kept, moved = compacted(said, rows, files)
        metadata = rewritten(said, rows, moved)
    copies = [OutputFile.of(as_path(dest, name), segments) for name, segments in kept.items()]
    last = OutputFile.of(as_path(dest, dcp_metadata.NAME), [metadata])
    return Plan((*copies, *new, *around.copied_to(dest), last), around.findings())


def in_place(checkpoint: Checkpoint, plan: Plan, block: Callable[[], int]) -> Plan:
    """Plan an in-place edit (`Format.in_place`): the items of an additional file go to the end of a file of the folder.

    Raises:
        Unsupported: the edit removes or replaces items, which changes data too.
    """
    files = folder_of(checkpoint).files
    dest, said = os.path.dirname(plan.files[-1].path), planned_metadata(plan)  # noqa: PTH120 (a name, not a place)
    planned = {os.path.relpath(file.path, dest): file for file in plan.files}
    for name, path in files.paths.items():
        whole = OutputFile.of(path, [ByteRange(path, 0, files.sizes[name])])
        if name not in planned or planned[name].segments != whole.segments:
            raise data_moves(path)
    if said is None:
        return plan
    places = [*(part.place for _, part in said.places() if part.place), *(place for _, place in said.unused)]
    added = sorted({place.name for place in places} & planned.keys() - files.paths.keys())
    home = next((name for name in files.paths if _may_grow(name, files.sizes[name], places)), None)
    if not added or home is None:
        return plan
    segments = list(planned[home].segments)
    moved: dict[StorageInfo, StorageInfo] = {}
    for name in added:
        start = sum(map(segment_length, segments))
        for place in places:
            if place.name == name:
                moved[place] = StorageInfo(home, start + place.offset, place.length)
        segments += planned.pop(name).segments
    planned[home] = OutputFile.of(planned[home].path, segments)
    metadata = rewritten(said, [EditedKey(saved, saved.path) for saved in said.saved], moved)
    planned[dcp_metadata.NAME] = OutputFile.of(plan.files[-1].path, [metadata])
    return replace(plan, files=tuple(planned.values()))


def _may_grow(name: str, size: int, places: Iterable[StorageInfo]) -> bool:
    """Return whether items can be appended to a file: it is not empty, not in a subfolder, and not cut short."""
    return size > 0 and "/" not in name and all(row.offset + row.length <= size for row in places if row.name == name)


def edited(said: Metadata, edits: Iterable[Edit]) -> list[EditedKey]:
    """Return a row for each key, with the effect of the edits.

    Raises:
        KeyConflict: two keys would have the same name.
        Unsupported: a folder does not support an edit.
    """
    rows = [EditedKey(saved, saved.path) for saved in said.saved]
    below = _Below(rows)
    for edit in edits:
        if isinstance(edit, SetLocation):
            _moved(rows, edit)
        elif isinstance(edit, Rename):
            _renamed(below, edit)
        elif isinstance(edit, Drop):
            for row in below.named(edit.at, edit.names):
                row.gone = True
            for row, rest in below.around(edit.at):
                row.inner.append(Drop(rest, edit.names))
        elif isinstance(edit, Put):
            _put(below, edit)
        else:
            raise Unsupported("a distributed checkpoint has no metadata pairs to set")
    taken: dict[str, str] = {}
    for row in rows:
        name = row.fqn(said.nested)
        if not row.gone and taken.setdefault(name, row.saved.fqn) != row.saved.fqn:
            pair = (name, (taken[name], row.saved.fqn))
            raise KeyConflict(f"two keys would become {name}: {', '.join(pair[1])}", pairs=(pair,))
    return rows


def refuse_edit(checkpoint: Checkpoint, edits: Sequence[Edit], dest: str) -> Plan:
    """Refuse an edit of a folder without a single `.metadata`: it must be converted first.

    Raises:
        Unsupported: always.
    """
    ranks = checkpoint.format == RANKS
    message = "each rank has its own metadata" if ranks else "its tensors are in safetensors files, by name"
    hint = f"`{command('convert', checkpoint.path, 'OUT', to='dcp')}` writes a folder that can be edited"
    raise Unsupported(f"{message}: ckptfix reads it, but does not edit it", path=checkpoint.path, hint=hint)


class _Below:
    """The keys below each address of a dict."""

    def __init__(self, rows: Sequence[EditedKey]) -> None:
        self._rows: dict[str, dict[str, list[tuple[EditedKey, int]]]] = {}
        self._values: dict[str, EditedKey] = {}
        for row in rows:
            path = row.saved.path
            address = ""
            for depth, key in enumerate(path):
                self._rows.setdefault(address, {}).setdefault(str(key), []).append((row, depth))
                address = join(address, str(key))
            if row.saved.dtype is None:
                self._values[address] = row

    def places(self, at: str, name: str) -> list[tuple[EditedKey, int]]:
        """Return the keys under `name` of the dict `at`, and the position of the name in their paths."""
        return self._rows.get(at, {}).get(name, [])

    def named(self, at: str, names: Iterable[str]) -> Iterable[EditedKey]:
        return (row for name in names for row, _ in self.places(at, name))

    def around(self, at: str) -> Iterable[tuple[EditedKey, str]]:
        """Return the value that contains the address `at`, if there is one, and the rest of the address inside it."""
        found = [address for address in self._values if is_inside(at, address)]
        return [(self._values[address], of_keys(keys_of(at)[len(keys_of(address)) :])) for address in found]


def _renamed(below: _Below, edit: Rename) -> None:
    inside = list(below.around(edit.at))
    for row, rest in inside:
        row.inner.append(Rename(rest, edit.kind, edit.names))
    for old, new in edit.names.items():
        found = below.places(edit.at, old)
        if not found and not inside:
            message = "it is not a key of the distributed checkpoint, so it cannot be renamed"
            raise Unsupported(message, where=join(edit.at, old))
        for row, depth in found:
            row.path = (*row.path[:depth], new, *row.path[depth + 1 :])


def _put(below: _Below, edit: Put) -> None:
    for name, entry in edit.tensors.items():
        rows = [row for row, depth in below.places(edit.at, name) if depth == len(row.saved.path) - 1]
        if not rows or rows[0].saved.dtype is None:
            raise Unsupported("a tensor inside a value of a distributed checkpoint cannot be replaced", where=name)
        rows[0].put = entry


def _moved(rows: Iterable[EditedKey], edit: SetLocation) -> None:
    """Record a change of devices: tensors in a folder have no device, but tensors inside values do."""
    if "cpu" in edit.moves:
        raise Unsupported(
            "a distributed checkpoint states no device: torch loads its tensors to the model's device",
            hint="load it into a model on that device",
        )
    for row in rows:
        if row.saved.dtype is None:
            row.inner.append(edit)


def _free_name(folder: Folder, others: Iterable[str]) -> str:
    """Return an unused name for an additional file, in the form that a rank would use."""
    taken = {*folder.files.paths, *others, *(part.place.name for _, part in folder.metadata.places() if part.place)}
    return next(name for number in count() if (name := f"__0_{number}.distcp") not in taken)


def _new_items(rows: Sequence[EditedKey], files: ItemFiles, name: str) -> tuple[str, list[Segment]] | None:
    """Return the file of changed items, and record the new places in their rows."""
    segments: list[Segment] = []
    cursor = 0
    puts = [row for row in rows if row.put is not None and not row.gone]
    made = tensor_items([row.put for row in puts if row.put is not None])
    for row, item in [*zip(puts, made, strict=True), *_new_values(rows, files)]:
        length = sum(map(segment_length, item))
        row.place = StorageInfo(name, cursor, length)
        segments += item
        cursor += length
    return (name, segments) if segments else None


def _new_values(rows: Iterable[EditedKey], files: ItemFiles) -> Iterable[tuple[EditedKey, list[Segment]]]:
    for row in rows:
        place = row.saved.parts[0].place if row.saved.parts else None
        if row.inner and not row.gone and place is not None and files.has(place):
            window = ItemWindow(files.range(place))
            item = _edited_value(window, row.inner)
            if item != [window.where]:
                yield row, item


def _edited_value(window: ItemWindow, edits: Sequence[Edit]) -> list[Segment]:
    """Return the archive of a value with its content edited."""
    checkpoint = torch_zip.read(window)
    found = pickled_object(checkpoint).found
    known = {(site.at, site.kind) for site in found.sites}
    for edit in edits:
        if isinstance(edit, Rename) and (edit.at, edit.kind) not in known:
            # Only the context of the value tells that these are names.
            found.sites.append(NodeSite(edit.at, edit.kind, _uses(node_at(found.graph.root, edit.at, found.holders))))
    moves = [edit for edit in edits if not isinstance(edit, SetLocation) or set(edit.moves) & set(checkpoint.devices)]
    (file,) = torch_zip.plan_edit(checkpoint, moves, window).files
    return [_real(segment, window) for segment in file.segments]


def _uses(node: Node) -> list[Text]:
    """Return the names in a value: the keys of a dict, or the strings of a list."""
    rows = pairs(node)
    names: Iterable[Node] = [key for key, _ in rows] if rows is not None else ()
    if isinstance(node, list | tuple):
        names = node
    return [name for name in names if type(name) is Text]


def _real(segment: Segment, window: ItemWindow) -> Segment:
    if isinstance(segment, ByteRange) and segment.path == window:
        return window.real(segment)
    return segment


def keeps_all(checkpoint: Checkpoint, plan: Plan, but: Collection[str] = ()) -> bool:
    """Return whether a planned folder certainly holds each tensor except those at or below an address of `but`.

    The planned metadata is read again: each tensor must consist of the same items, copied from their original places.
    """
    folder = folder_of(checkpoint)
    found = planned_metadata(plan)
    if found is None:
        return False
    files = {file.path.rpartition("/")[2]: PlannedFile(file) for file in plan.files}
    sizes = {path: folder.files.sizes[name] for name, path in folder.files.paths.items()}
    now = _tensors(found.saved, lambda place: _origin(files.get(place.name), place, sizes), named=bool(but))
    left = [saved for saved in folder.metadata.saved if not is_inside_any(saved.address, but)]
    paths = folder.files.paths
    was = _tensors(left, lambda place: place._replace(name=paths.get(place.name, place.name)), named=bool(but))
    return now == was


def _origin(file: PlannedFile | None, place: StorageInfo, sizes: Mapping[str, int]) -> StorageInfo | None:
    """Return the source of the item at `place` of a planned file; None if it is not copied from one range."""
    if file is None:
        return place
    segment, start = file.at(place.offset)
    if not isinstance(segment, ByteRange):
        return None
    # A truncated file is copied unchanged: an item that extended beyond its end still does.
    is_whole = segment.offset == 0 and segment.length == file.size == sizes.get(segment.path)
    if start + place.length > segment.length and not is_whole:
        return None
    return StorageInfo(segment.path, segment.offset + start, place.length)


def _tensors(
    saved: Iterable[SavedKey], origin: Callable[[StorageInfo], StorageInfo | None], *, named: bool
) -> Counter[object]:
    """Count each distinct tensor by its dtype, shape and origin.

    Args:
        named: tensors with different names count separately, and values that are not tensors count too.
    """
    return Counter(
        (
            row.address if named else None,
            row.dtype,
            row.shape,
            tuple((*part[:2], part.place and (origin(part.place) or object())) for part in row.parts),
        )
        for row in saved
        if named or row.dtype is not None
    )
