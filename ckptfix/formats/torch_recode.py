"""zip <-> legacy for the whole object: persistent ids gain or lose their sixth field, storages move.

A legacy storage may be a view of another one, which a zip cannot say. Tensors on a view get the storage
below it and a larger offset, so they stay tied; a view that stands by itself becomes a storage of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ckptfix import dtypes
from ckptfix.checkpoint import Checkpoint, Data, Finding, OutputFile, Plan
from ckptfix.errors import DamagedFile, Unsupported
from ckptfix.formats import torch_legacy, torch_zip
from ckptfix.formats.torch_common import element_sizes, fields, little_endian, parts_of
from ckptfix.formats.torch_tensors import BadTensor
from ckptfix.pickles import Graph, Patch, PersId, Text, parse, splice
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.patch import Item, int_opcode, items_pushed, string_opcode


@dataclass(slots=True)
class _Recoding:
    """Patches of the pickle, and the storages of the new file: key -> (data, CRC-32, bytes of an element)."""

    patches: dict[int, Patch] = field(default_factory=dict)
    storages: dict[str, tuple[Data, int | None, int]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def patch(self, new: Patch) -> None:
        self.patches[new.start] = new


def to_legacy(checkpoint: Checkpoint, dest: str) -> Plan:
    """A zip checkpoint as a legacy file, the object unchanged.

    Raises:
        WouldLoseData: it holds dtypes that torch reads from no legacy file.
    """
    parts = parts_of(checkpoint)
    torch_legacy.refuse_untyped(checkpoint.entries, checkpoint.path)
    units = element_sizes(checkpoint) if checkpoint.byteorder == "big" else {}
    out = _Recoding()
    for persid, key, itemsize, data, crc32 in _references(checkpoint):
        _beside(persid, checkpoint.path)
        out.patch(Patch(persid.tuple_end, persid.tuple_end, b"N"))
        data = little_endian(data, checkpoint.byteorder, units.get(key, itemsize))
        out.storages.setdefault(key, (data, crc32, itemsize))
    pickle = splice(parts.graph, out.patches.values())
    storages = [(key, data, itemsize) for key, (data, _, itemsize) in out.storages.items()]
    return Plan((OutputFile.of(dest, torch_legacy.fresh(pickle, storages)),), tuple(out.findings))


def to_zip(checkpoint: Checkpoint, dest: str) -> Plan:
    """A legacy checkpoint as a zip file, the object unchanged."""
    torch_legacy.refuse_truncated(checkpoint)
    parts = parts_of(checkpoint)
    graph = parts.graph
    out = _Recoding()
    for persid in graph.persids:
        if _is_source(persid):
            _drop_source(out, graph, persid, checkpoint.path)
    for persid, key, itemsize, data, crc32 in _references(checkpoint):
        pid = persid.pid
        if len(pid) == 6:
            _beside(persid, checkpoint.path)
            items = _fields_pushed(graph, persid)
            out.patch(Patch(items[5].start, items[5].end, b""))
            if pid[5] is not None:
                _resolve_view(out, graph, persid, items, itemsize, data)
                continue
        out.storages.setdefault(key, (data, crc32, itemsize))
    pickle = splice(graph, out.patches.values())
    if out.findings:
        # What went may have defined a memo entry that something else fetches: read the result once more.
        parse(pickle, path=checkpoint.path, where="recoded pickle")
    storages = [(key, data, crc32) for key, (data, crc32, _) in out.storages.items()]
    return Plan((OutputFile.of(dest, torch_zip.fresh(pickle, storages)),), tuple(out.findings))


def _references(checkpoint: Checkpoint) -> Iterator[tuple[PersId, str, int, Data, int | None]]:
    """Each storage reference with its key, bytes of an element, data and CRC-32."""
    parts = parts_of(checkpoint)
    places = parts.storages.place
    for persid in parts.graph.persids:
        if _is_source(persid):
            continue
        try:
            key, kind, _, _ = fields(persid)
        except BadTensor as error:
            raise _unmovable(str(error), checkpoint.path, persid) from None
        data, _, crc32 = places(key)
        if data is None:
            raise DamagedFile(f"the file has no storage {key!r}", path=checkpoint.path)
        yield persid, key, dtypes.by_name(kind).itemsize, data, crc32


def _is_source(persid: PersId) -> bool:
    """Whether this is a class with its source, ``('module', class, file, text)``, which only legacy files have."""
    pid = persid.pid
    return type(pid) is tuple and len(pid) == 4 and pid[0] == "module" and type(pid[0]) is Text


def _drop_source(out: _Recoding, graph: Graph, persid: PersId, path: str) -> None:
    """Leave of a class with its source the class alone, as a zip has it."""
    _beside(persid, path)
    items = _fields_pushed(graph, persid)
    start = items[0].start - 1
    if graph.data[start] != op.MARK:
        raise _unmovable("a class whose reference is not written out", path, persid)
    out.patch(Patch(start, persid.position + 1, graph.data[items[1].start : items[1].end]))
    name = getattr(persid.pid[1], "full", "a class")
    message = f"the source text of {name}, which a zip checkpoint has no place for"
    out.findings.append(Finding("left-behind", "info", name, message))


def _unmovable(reason: str, path: str, persid: PersId) -> Unsupported:
    message = f"a reference that can not be recoded: {reason}"
    return Unsupported(message, path=path, where="pickle", offset=persid.position)


def _beside(persid: PersId, path: str) -> None:
    if persid.tuple_end < 0:
        raise _unmovable("its tuple is not written beside it", path, persid)


def _fields_pushed(graph: Graph, persid: PersId) -> list[Item]:
    """The spans of the fields of a reference."""
    first = persid.pid[0]
    items = items_pushed(graph.data, first.start, persid.tuple_end)
    if len(items) != len(persid.pid):
        raise Unsupported("a storage reference that is not written out", offset=persid.position)
    return items


def _resolve_view(
    out: _Recoding, graph: Graph, persid: PersId, items: list[Item], itemsize: int, data: Data
) -> None:
    """Replace a view by the storage below it and a larger tensor offset, or by a storage of its own."""
    view_key, first, count = persid.pid[5]
    key = persid.pid[2]
    after = persid.position + 1
    owners = _offset_after(graph, after)
    if owners is not None:
        # The tensor's own offset is pushed right after the reference.
        start, end, offset = owners
        out.patch(Patch(start, end, int_opcode(offset + first)))
        out.storages.setdefault(str(key), (data, None, itemsize))
        return
    new_key = f"{view_key}"
    part = data.sub(first * itemsize, count * itemsize) if hasattr(data, "sub") else data
    assert isinstance(key, Text)
    out.patch(Patch(items[2].start, items[2].end, string_opcode(new_key, graph.protocol, graph.data[key.start])))
    out.patch(Patch(items[4].start, items[4].end, int_opcode(count)))
    out.storages.setdefault(new_key, (part, None, itemsize))
    message = f"the storage view {view_key!r} is stored apart from the storage {str(key)!r} that it viewed"
    out.findings.append(Finding("tie-lost", "warning", new_key, message))


def _offset_after(graph: Graph, position: int) -> tuple[int, int, int] | None:
    """(start, end, value) of the int pushed at `position`, where a rebuild call has the tensor's offset."""
    opcode = next(op.walk(graph.data, position, graph.end))
    raw = graph.data[opcode.arg : opcode.end]
    if opcode.code in (op.BININT, op.BININT1, op.BININT2):
        return opcode.start, opcode.end, int.from_bytes(raw, "little", signed=opcode.code == op.BININT)
    if opcode.code == op.LONG1:
        return opcode.start, opcode.end, int.from_bytes(raw[1:], "little", signed=True)
    return None
