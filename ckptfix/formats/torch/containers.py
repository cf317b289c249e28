"""Conversion of the whole object between zip and legacy: persistent ids gain or lose a sixth field, storages move.

A legacy storage may be a view of another one, which a zip cannot express. Tensors on a view get the underlying storage
and a larger offset, so they are still tied; a free-standing view becomes a separate storage.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import field

from ckptfix.checkpoint import ByteRange, Checkpoint, Data, OutputFile, Plan, dtypes, file_of
from ckptfix.dataclass import dataclass
from ckptfix.errors import DamagedFile, Unsupported
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.base import refuse_truncated
from ckptfix.formats.torch import legacy_layout, zip_layout
from ckptfix.formats.torch.common import element_sizes, fields, little_endian, pickled_object, view_of
from ckptfix.formats.torch.tensors import BadTensor, viewed
from ckptfix.io.virtual_files import crc32_of
from ckptfix.pickles import Call, Graph, Patch, PersId, Text, parse, splice
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.graph import Node
from ckptfix.pickles.patch import PushedValue, int_opcode, items_pushed, string_opcode
from ckptfix.pickles.reemit import reemit
from ckptfix.pickles.unwritten import UnwrittenGraph


@dataclass(slots=True)
class _Recoding:
    """Patches of the pickle, and the storages of the new file: key -> (data, CRC-32, bytes of an element)."""

    patches: dict[int, Patch] = field(default_factory=dict)
    storages: dict[str, tuple[Data, int | None, int]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def patch(self, new: Patch) -> None:
        """Add a patch, which replaces an earlier one at the same offset."""
        self.patches[new.start] = new


    def leave_source(self, persid: PersId) -> None:
        """Add the finding for a class whose source is left out."""
        name = getattr(persid.fields[1], "full", "a class")
        message = f"the source text of {name} is left out: a zip checkpoint has no place for it"
        self.findings.append(found("left-behind", message, where=name))


def to_legacy(checkpoint: Checkpoint, dest: str) -> Plan:
    """Plan a legacy file from a zip checkpoint, with the same object.

    Raises:
        WouldLoseData: it holds tensors that torch cannot load from a legacy file.
    """
    parts = pickled_object(checkpoint)
    legacy_layout.refuse_unloadable(checkpoint.entries, checkpoint.path)
    pids = (persid.pid for persid in parts.graph.persids)
    if any(type(pid) is tuple and len(pid) > 1 and getattr(pid[1], "name", "") == "UntypedStorage" for pid in pids):
        raise legacy_layout.untyped_refusal(checkpoint.path, "an untyped storage")
    units = element_sizes(checkpoint) if checkpoint.byteorder == "big" else {}
    out = _Recoding()
    new = isinstance(parts.graph, UnwrittenGraph)
    replaced: dict[int, Node] = {}
    for persid, key, itemsize, data, crc32 in _references(checkpoint):
        if new:
            replaced[id(persid)] = PersId((*persid.fields, None), persid.position, -1)
        else:
            _beside(persid, checkpoint.path)
            out.patch(Patch(persid.tuple_end, persid.tuple_end, b"N"))
        data = little_endian(data, checkpoint.byteorder, units.get((file_of(data), key), itemsize))
        out.storages.setdefault(key, (data, crc32, itemsize))
    pickle = reemit(parts.graph, replaced=replaced).pickle if new else splice(parts.graph, out.patches.values())
    storages = [(key, data, itemsize) for key, (data, _, itemsize) in out.storages.items()]
    return Plan((OutputFile.of(dest, legacy_layout.fresh(pickle, storages, dest)),), tuple(out.findings))


def to_zip(checkpoint: Checkpoint, dest: str) -> Plan:
    """Plan a zip file from a legacy checkpoint, with the same object."""
    refuse_truncated(checkpoint)
    parts = pickled_object(checkpoint)
    graph = parts.graph
    out = _Recoding()
    new = isinstance(graph, UnwrittenGraph)
    replaced = _without_sources(out, graph) if new else {}
    if not new:
        _drop_sources(out, graph, checkpoint.path)
    owners = {} if new else _owners(checkpoint)
    for persid, key, itemsize, data, crc32 in _references(checkpoint, in_place=not new):
        pid = persid.fields
        if len(pid) > 5:
            _beside(persid, checkpoint.path)
            items = _fields_pushed(graph, persid)
            out.patch(Patch(items[5].start, items[5].end, b""))
            if pid[5] is not None:
                _resolve_view(out, checkpoint, persid, items, owners, itemsize)
                continue
        out.storages.setdefault(key, (data, crc32, itemsize))
    pickle = reemit(graph, replaced=replaced).pickle if new else splice(graph, out.patches.values())
    if out.findings:
        # A dropped string may have defined a memo entry that other opcodes fetch: check by parsing the result.
        parse(pickle, path=checkpoint.path, where="recoded pickle")
    storages = [(key, data, crc32) for key, (data, crc32, _) in out.storages.items()]
    return Plan((OutputFile.of(dest, zip_layout.fresh(pickle, storages)),), tuple(out.findings))


def _references(
    checkpoint: Checkpoint, *, in_place: bool = True
) -> Iterator[tuple[PersId, str, int, Data, int | None]]:
    """Yield each storage reference with its key, bytes of an element, data and CRC-32; copies unless `in_place`."""
    parts = pickled_object(checkpoint)
    places = parts.storages.place
    for persid in parts.graph.persids if in_place else parts.graph.references():
        if _is_source(persid):
            continue
        try:
            key, kind, _, _ = fields(persid)
        except BadTensor as error:
            raise _unmovable(str(error), checkpoint.path, persid) from None
        data, _, crc32 = places(key)
        if data is None:
            raise DamagedFile(f"the file has no storage {key!r}", path=checkpoint.path)
        if crc32 is None:
            crc32 = crc32_of(data)
        yield persid, key, dtypes.by_name(kind).itemsize, data, crc32


def _is_source(persid: PersId) -> bool:
    """Return whether this is a class with its source, ``('module', class, file, text)``, as in legacy files."""
    pid = persid.pid
    return type(pid) is tuple and len(pid) == 4 and pid[0] == "module" and type(pid[0]) is Text


def _without_sources(out: _Recoding, graph: Graph) -> dict[int, Node]:
    """Return the class alone for each class with its source, in an object that no stream holds."""
    sources = list(filter(_is_source, graph.loose_persids))
    for persid in sources:
        out.leave_source(persid)
    return {id(persid): persid.fields[1] for persid in sources}


def _drop_sources(out: _Recoding, graph: Graph, path: str) -> None:
    """Replace each class with its source by the class alone, as in a zip.

    Strings that are dropped with the source but fetched elsewhere are written out there.
    """
    gone: list[tuple[int, int]] = []
    for persid in filter(_is_source, graph.persids):
        if graph.protocol >= 4:
            raise _unmovable("it is a class with its source under protocol 4, which counts memo entries", path, persid)
        _beside(persid, path)
        items = _fields_pushed(graph, persid)
        start, kept = items[0].start - 1, items[1]
        if graph.data[start] != op.MARK:
            raise _unmovable("it is a class whose reference is not written out", path, persid)
        out.patch(Patch(start, persid.position + 1, graph.data[kept.start : kept.end]))
        gone += [(start, kept.start), (kept.end, persid.position + 1)]
        out.leave_source(persid)
    if not gone:
        return
    starts = [start for start, _ in gone]

    def dropped(position: int) -> bool:
        index = bisect_right(starts, position) - 1
        return index >= 0 and position < gone[index][1]

    for use in graph.gets:
        if use.origin is not None and dropped(use.origin.start) and not dropped(use.start):
            new = string_opcode(use, graph.protocol, graph.data[use.origin.start], graph.rare)
            out.patch(Patch(use.start, use.end, new))


def _unmovable(reason: str, path: str, persid: PersId) -> Unsupported:
    """Return the error for a reference that cannot be converted."""
    message = f"a reference cannot be converted: {reason}"
    return Unsupported(message, path=path, where="pickle", offset=persid.position)


def _beside(persid: PersId, path: str) -> None:
    """Raise `Unsupported` unless the tuple of a reference is written right before its opcode."""
    if persid.tuple_end < 0:
        raise _unmovable("its tuple is not written next to it", path, persid)


def _fields_pushed(graph: Graph, persid: PersId) -> list[PushedValue]:
    """Return the spans of the fields of a reference."""
    first = persid.fields[0]
    assert type(first) is Text
    items = items_pushed(graph.data, first.start, persid.tuple_end)
    if len(items) != len(persid.fields):
        raise Unsupported("a storage reference is not written out", offset=persid.position)
    return items


def _resolve_view(
    out: _Recoding,
    checkpoint: Checkpoint,
    persid: PersId,
    items: list[PushedValue],
    owners: Mapping[int, int],
    itemsize: int,
) -> None:
    """Replace a view by the underlying storage and a larger tensor offset, or by a separate storage."""
    parts = pickled_object(checkpoint)
    graph = parts.graph
    try:
        storage = parts.storages(persid)
        first, count = viewed(persid, storage)
    except BadTensor as error:
        raise _unmovable(str(error), checkpoint.path, persid) from None
    data = storage.data
    key, view = persid.fields[2], view_of(persid)
    assert isinstance(data, ByteRange) and isinstance(key, Text) and type(view) is tuple
    view_key = str(view[0])
    tensors = owners.get(id(persid), 0)
    if tensors > 1:
        raise _unmovable("several tensors fetch its storage view from the memo", checkpoint.path, persid)
    if tensors:
        # A rebuild call pushes the tensor's own offset right after the reference.
        start, end, offset = _int_at(graph, persid.position + 1)
        out.patch(Patch(start, end, int_opcode(offset + first)))
        out.storages.setdefault(str(key), (data, None, itemsize))
        return
    part = data.sub(first * itemsize, count * itemsize)
    new_key, others = view_key, graph.storages()
    while new_key in others or out.storages.get(new_key, (part,))[0] != part:
        new_key += "-view"
    pushed = string_opcode(new_key, graph.protocol, graph.data[key.start], graph.rare)
    out.patch(Patch(items[2].start, items[2].end, pushed))
    out.patch(Patch(items[4].start, items[4].end, int_opcode(count)))
    out.storages.setdefault(new_key, (part, None, itemsize))
    message = f"the storage view {view_key!r} is stored separately from the storage {str(key)!r} that it viewed"
    out.findings.append(found("tie-lost", message, where=view_key))


def _owners(checkpoint: Checkpoint) -> dict[int, int]:
    """Return the ``id`` of each storage reference -> the number of rebuild calls with it as their first argument."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    stack: list[Node] = [node for _, _, node in pickled_object(checkpoint).found.tensors]
    while stack:
        node = stack.pop()
        if type(node) not in (Call, tuple) or id(node) in seen:
            continue
        seen.add(id(node))
        if type(node) is tuple:
            stack += node
        elif type(node) is Call and node.arguments:
            first = node.arguments[0]
            if type(first) is PersId:
                found[id(first)] = found.get(id(first), 0) + 1
            stack += node.arguments
    return found


def _int_at(graph: Graph, position: int) -> tuple[int, int, int]:
    """Return (start, end, value) of the int that is pushed at `position`.

    Raises:
        Unsupported: something else is pushed there.
    """
    opcode = next(op.walk(graph.data, position, graph.end))
    raw = graph.data[opcode.arg : opcode.end]
    if opcode.code in (op.BININT, op.BININT1, op.BININT2):
        return opcode.start, opcode.end, int.from_bytes(raw, "little", signed=opcode.code == op.BININT)
    if opcode.code == op.LONG1:
        return opcode.start, opcode.end, int.from_bytes(raw[1:], "little", signed=True)
    raise Unsupported("the offset of a tensor is not written out", where="pickle", offset=position)
