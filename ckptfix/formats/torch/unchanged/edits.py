"""A fast weight audit for edits of keys and devices: the same calls over the same bytes, at a tenth of the cost.

An edit copies every byte outside the pickle. So each storage is at the place of the input that it was at, as the
directory of the output shows, and the object is the same. The pickles are compared opcode by opcode if only keys and
location tags differ (`strings`), otherwise node by node, without strings and devices. If this comparison fails, it
proves nothing: the audit then checks each tensor.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptfix.checkpoint import ByteRange, Checkpoint, Plan
from ckptfix.errors import CkptfixError
from ckptfix.formats.torch.common import pickled_object
from ckptfix.formats.torch.unchanged import strings
from ckptfix.formats.torch.zip_layout import ZipCheckpoint
from ckptfix.io.read import read_chunks
from ckptfix.io.source import Source, open_source
from ckptfix.io.virtual_files import PlannedFile
from ckptfix.pickles import Call, Dict, Global, Graph, PersId, Set, Text, parse
from ckptfix.zips.local import record_data
from ckptfix.zips.read import DirectoryRecord, same_rows

if TYPE_CHECKING:
    from ckptfix.formats.torch.legacy_layout import LegacyLayout

ReadStream: TypeAlias = Callable[[str], tuple[Any, bytes]]
"""Function from a file to its container and the unparsed pickle of its object."""

MOST_MOVED = 8
"""The most records with a new local header: an edit pads the record behind the pickle."""


def keeps_all(source: Checkpoint, plan: Plan, but: Collection[str], read_stream: ReadStream) -> bool:
    """Return whether `plan` certainly is an edit of `source` that keeps all its tensors; False proves nothing.

    Args:
        but: addresses that need not be kept; with any, the answer is False.
        read_stream: returns the container and the unparsed pickle of a planned file.
    """
    if but or len(plan.files) != 1:
        return False
    parts = pickled_object(source)
    name = PlannedFile(plan.files[0])
    if plan.files[0].segments == (ByteRange(source.path, 0, source.size),):
        return True
    try:
        stream = _pickle_beside_the_same(parts.container, name) if isinstance(parts.container, ZipCheckpoint) else None
        if stream is None:
            container, stream = read_stream(name)
            if not _same_places(parts.container, container, name):
                return False
        return strings.differ_alone(parts.found, stream) or _same_object(parts.graph, parse(stream))
    except CkptfixError:
        return False


def _pickle_beside_the_same(old: ZipCheckpoint, name: PlannedFile) -> bytes | None:
    """Return the pickle of a planned archive whose other records are unchanged; None if a quick check cannot tell.

    Most edits move a run of records as one, and their directory rows differ only in their offsets.
    """
    directory = old.directory
    was = directory.records.headers
    if old.ambiguous or any(map(operator.ge, was, was[1:])):
        return None
    with open_source(name) as planned:
        found = same_rows(planned, directory, old.pickle)
        if found is None:
            return None
        now, pickle = found
        if not all(map(operator.lt, now, now[1:])):
            return None
        if not _move_together(old, now, planned, name):
            return None
        return b"".join(read_chunks(record_data(planned, pickle)))


def _move_together(old: ZipCheckpoint, now: Sequence[int], planned: Source, name: PlannedFile) -> bool:
    """Return whether each record but the pickle is copied, with its header or a new one, to its offset in `now`."""
    directory = old.directory
    was = [*directory.records.headers, directory.offset]
    at = headers = 0
    pickle = directory.records.positions.index(old.pickle.position)
    while at < len(now):
        segment, start = name.at(now[at])
        if at == pickle:
            at += 1
        elif isinstance(segment, ByteRange) and (segment.path, segment.offset + start) == (directory.path, was[at]):
            # All records that begin in this range are copied with it.
            end = bisect_left(now, now[at] + segment.length - start, at)
            if len(set(map(operator.sub, now[at:end], was[at:end]))) != 1 or was[end] > segment.end:
                return False
            at = end
        else:
            headers += 1
            if headers > MOST_MOVED:
                return False
            record = directory.records[at]
            with open_source(directory.path) as reader:
                if not _same_data(reader, record, planned, record._replace(header=now[at]), name):
                    return False
            at += 1
    return True


def _same_places(old: ZipCheckpoint | LegacyLayout, new: ZipCheckpoint | LegacyLayout, name: PlannedFile) -> bool:
    """Return whether each storage of the planned file is a copy of the storage with the same key."""
    if isinstance(old, ZipCheckpoint) and isinstance(new, ZipCheckpoint):
        return _same_records(old, new, name)
    from ckptfix.formats.torch.legacy_layout import LegacyLayout

    if (
        not isinstance(old, LegacyLayout)
        or not isinstance(new, LegacyLayout)
        or list(old.storages) != list(new.storages)
    ):
        return False
    return all(
        count == new.storages[key][1] and _comes_from(name, new.storages[key][0].offset, data)
        for key, (data, count) in old.storages.items()
    )


def _same_records(old: ZipCheckpoint, new: ZipCheckpoint, name: PlannedFile) -> bool:
    """Return whether each record but the pickle has its old directory row, and data copied from its old place."""
    rows, now_rows = old.directory.records, new.directory.records
    if old.root != new.root or old.ambiguous or len(rows) != len(now_rows):
        return False
    path = old.directory.path
    ends = dict(pairwise([*sorted(record.header for record in rows), old.directory.offset]))
    others: list[tuple[DirectoryRecord, DirectoryRecord]] = []
    for was, now in zip(rows, now_rows, strict=True):
        if was.name != now.name:
            return False
        if was.name == old.pickle.name:
            continue
        if (was.stored, was.size, was.crc32, was.method) != (now.stored, now.size, now.crc32, now.method):
            return False
        segment, start = name.at(now.header)
        if not isinstance(segment, ByteRange) or segment.path != path or segment.offset + start != was.header:
            others.append((was, now))
        elif segment.end < ends[was.header]:
            return False
    if len(others) > MOST_MOVED:
        return False
    with open_source(path) as reader, open_source(name) as planned:
        return all(_same_data(reader, was, planned, now, name) for was, now in others)


def _same_data(reader: Source, was: DirectoryRecord, planned: Source, now: DirectoryRecord, name: PlannedFile) -> bool:
    """Return whether a record with a new header has its old data."""
    data = record_data(reader, was)
    made = record_data(planned, now)
    return isinstance(data, ByteRange) and isinstance(made, ByteRange) and _comes_from(name, made.offset, data)


def _comes_from(name: PlannedFile, offset: int, data: ByteRange) -> bool:
    """Return whether the bytes at `offset` of the planned file are copied from `data`."""
    if not data.length:
        return True
    segment, start = name.at(offset)
    return (
        isinstance(segment, ByteRange)
        and segment.path == data.path
        and segment.offset + start == data.offset
        and segment.length - start >= data.length
    )


def _same_object(old: Graph, new: Graph) -> bool:
    """Return whether two objects have the same structure, storages and numbers; strings and devices may differ."""
    if len(old.persids) != len(new.persids):
        return False
    seen: set[int] = set()
    stack: list[tuple[Sequence[object], Sequence[object]]] = [((old.root,), (new.root,))]
    while stack:
        ones, others = stack.pop()
        if len(ones) != len(others):
            return False
        for one, other in zip(ones, others, strict=True):
            if one is other:
                continue
            kind = type(one)
            if kind is not type(other):
                return False
            if kind is Text:
                continue
            if kind not in _HOLDERS:
                if one != other and one == one:  # unless it is NaN
                    return False
            elif id(one) not in seen:
                seen.add(id(one))
                parts = _HOLDERS[kind](one), _HOLDERS[kind](other)
                if kind is PersId and not _same_reference(*parts):
                    return False
                if kind is not PersId and not (type(one) is Call and one.is_call_of("torch", "device")):
                    stack.append(parts)
    return True


def _parts_of_call(call: Call) -> tuple[object, ...]:
    if call.items is call.state is call.elements is call.kwargs is None:
        return call.func, call.args
    return call.func, call.args, call.items, call.state, call.elements, call.kwargs


_HOLDERS: Mapping[type, Callable[..., Sequence[object]]] = {
    tuple: lambda node: node,
    list: lambda node: node,
    Call: _parts_of_call,
    Dict: lambda node: node.items,
    Set: lambda node: node.elements,
    Global: lambda node: (node.full,),
    PersId: lambda node: node.pid,
}
"""Functions that return the content of a node, in order."""


def _same_reference(one: object, other: object) -> bool:
    """Return whether two references are to the same storage, on any device; False for forms that torch never wrote."""
    if type(one) is not tuple or type(other) is not tuple or len(one) != len(other) or not 5 <= len(one) <= 6:
        return False
    kinds = getattr(one[1], "full", None), getattr(other[1], "full", None)
    rest = _numbers(one[4:])
    if type(one[2]) is not Text or rest is None:
        return False
    return bool(kinds[0] == kinds[1] and one[2] == other[2] and rest == _numbers(other[4:]))


def _numbers(fields: tuple[object, ...]) -> tuple[object, ...] | None:
    """Return the numbers of a reference, and its view (key, first, count); None for anything else."""
    plain = (int, Text, type(None))
    flat = [part for value in fields for part in (value if type(value) is tuple else (value,))]
    return tuple(flat) if all(type(part) in plain for part in flat) else None
