"""torch.save from 0.1.10 to 1.5, and later with ``_use_new_zipfile_serialization=False``.

::

    pickle  magic number 0x1950a86a20f9469cfc6c
    pickle  protocol version 1001
    pickle  sys_info: {'protocol_version', 'little_endian', 'type_sizes'}
    pickle  the object; storages are persistent ids ('storage', class, key, location, numel, view or None)
    pickle  list of storage keys
    then, for each key in that order: number of elements (8 bytes, little-endian), and the elements

A view is ``(key of the view, first element, elements)``: the storage that the object holds is that part of
the one stored under `key`. Source: torch/serialization.py (``_legacy_save``, ``_legacy_load``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptfix import dtypes
from ckptfix.checkpoint import ByteRange, Checkpoint, Data, Drop, Edit, Finding, OutputFile, Plan, Segment, TensorEntry
from ckptfix.errors import BadPickle, Truncated, TruncatedPickle, Unsupported, WouldLoseData
from ckptfix.fileio import Reader, truncated_hint
from ckptfix.formats import torch_common, torch_emit, trusted
from ckptfix.formats.torch_edit import patches
from ckptfix.formats.torch_tensors import DEVICE_TENSOR, BadTensor
from ckptfix.pickles import Dict, Graph, parse, splice
from ckptfix.pickles.emit import emit
from ckptfix.pickles.graph import pairs

NAME = "legacy"
TITLE = "PyTorch legacy"
SUFFIXES = torch_common.SUFFIXES
MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001
MAGIC_BYTES = MAGIC.to_bytes(10, "little")
FIRST_WINDOW = 4 << 20
MAX_PICKLE = 1 << 30


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a legacy file are.

    Attributes:
        object_start: offset of the object's pickle; it ends where the graph does, counted from there.
        storages: key -> (range of the elements, number of elements), in file order.
    """

    object_start: int
    object_end: int
    storages: Mapping[str, tuple[ByteRange, int]]


def score(path: str, head: bytes, size: int) -> int:
    """100 for a file that begins with the pickle of torch's magic number."""
    return 100 if MAGIC_BYTES in head[:24] or head.startswith(f"L{MAGIC}L\n".encode()) else 0


def read(path: str) -> Checkpoint:
    """Read names, shapes and places; see the contract in `base`."""
    findings: list[Finding] = []
    with Reader(path) as reader:
        graphs = read_pickles(reader, path)
        magic, protocol, info, graph, key_graph = graphs
        if magic.root != MAGIC or protocol.root != PROTOCOL:
            raise BadPickle("the magic number or protocol is computed, not written", path=path, where="header")
        for part, side in zip(PARTS, graphs, strict=True):
            if side is not graph:
                _note(side, part, graph)
        known = {str(key): value for key, value in pairs(info.root) or () if isinstance(key, str)}
        keys = [str(key) for key in key_graph.root] if type(key_graph.root) is list else []
        storages = read_storages(reader, path, graph, keys, key_graph.end, findings)
        size = reader.size
    layout = Layout(graph.start, graph.end, storages)
    return torch_common.build(
        path,
        format=NAME,
        size=size,
        graph=graph,
        container=layout,
        storages=torch_common.Storages(Places(layout)),
        traits={"storages": len(storages), "written on": f"{'little' if known.get('little_endian') else 'big'}-endian"},
        byteorder="little",
        findings=findings,
    )


def _note(side: Graph, part: str, graph: Graph) -> None:
    """Add to the object's `graph` what weights_only=True refuses of another pickle of the file, which it reads too."""
    graph.globals += (node for node in side.globals if not trusted.accepted(trusted.canonical(node)))
    refused = trusted.refused_opcode(side)
    if refused is not None:
        graph.misuses.append((refused[0], f"in the pickle of the {part}, {refused[1]}"))


def read_object(path: str) -> tuple[Layout, Graph]:
    """Where the parts are, and the parsed pickle of the object, and nothing made of them. Raises as `read`."""
    with Reader(path) as reader:
        *_, graph, key_graph = read_pickles(reader, path)
        keys = [str(key) for key in key_graph.root] if type(key_graph.root) is list else []
        storages = read_storages(reader, path, graph, keys, key_graph.end, [])
    return Layout(graph.start, graph.end, storages), graph


def read_pickles(reader: Reader, path: str) -> list[Graph]:
    """The five pickles; their spans are offsets in the file.

    The size of the object's pickle is stated nowhere: a window from the start of the file is parsed, and
    a larger one if the pickle runs out of it.
    """
    window = FIRST_WINDOW
    while True:
        data = reader.read(0, min(window, reader.size))
        graphs: list[Graph] = []
        position = 0
        try:
            for _ in range(5):
                graphs.append(parse(data, start=position, path=path, where=PARTS[len(graphs)]))
                position = graphs[-1].end
            return graphs
        except TruncatedPickle:
            if len(data) == reader.size:
                raise
            if window >= MAX_PICKLE:
                raise Unsupported(f"a pickle of over {MAX_PICKLE} bytes", path=path) from None
            window *= 4


PARTS = ("magic number", "protocol", "sys_info", "object", "storage keys")


def read_storages(
    reader: Reader, path: str, graph: Graph, keys: list[str], position: int, findings: list[Finding]
) -> dict[str, tuple[ByteRange, int]]:
    """The place of each storage; those beyond the end of the file keep their promised place."""
    itemsizes: dict[str, int] = {}
    for persid in graph.persids:
        try:
            key, kind, _, _ = torch_common.fields(persid)
        except BadTensor:
            continue
        itemsizes.setdefault(key, dtypes.by_name(kind).itemsize)
    found: dict[str, tuple[ByteRange, int]] = {}
    for key in keys:
        if position + 8 > reader.size:
            break
        count = int.from_bytes(reader.read(position, 8), "little", signed=True)
        nbytes = count * itemsizes.get(key, 1)
        if count < 0:
            findings.append(Finding("bad-storage", "error", key, f"a storage of {count} elements", position))
            break
        found[key] = (ByteRange(path, position + 8, nbytes), count)
        position += 8 + nbytes
    missing = [key for key in keys if key not in found]
    if position > reader.size or missing:
        message = f"the file ends at {reader.size}, {max(position - reader.size, 0)} bytes early"
        if missing:
            message += f"; {len(missing)} of {len(keys)} storages are absent"
        findings.append(Finding("truncated", "error", "", message, reader.size))
    elif position < reader.size:
        message = f"{reader.size - position} bytes follow the last storage"
        findings.append(Finding("trailing-bytes", "warning", "", message, position))
    return found


class Places:
    def __init__(self, layout: Layout) -> None:
        self.read_storages = layout.storages

    def __call__(self, key: str) -> tuple[Data | None, int, int | None]:
        found = self.read_storages.get(key)
        return (None, -1, None) if found is None else (found[0], found[0].length, None)


def check(path: str) -> Iterator[Finding]:
    """What is wrong with the file as it stands; tensor bytes are not read."""
    yield from torch_common.all_findings(read(path))


def plan_edit(checkpoint: Checkpoint, edits: Sequence[Edit], dest: str) -> Plan:
    """The checkpoint with `edits` applied to its object; every other byte is copied; with a Drop the layout is new.

    Raises:
        Truncated: the file is cut short; an edit would give a copy as broken.
    """
    if any(isinstance(edit, Drop) for edit in edits):
        from ckptfix.formats import torch_rewrite

        return torch_rewrite.plan_drops(checkpoint, edits, dest)
    parts = torch_common.parts_of(checkpoint)
    layout: Layout = parts.container
    path, size = checkpoint.path, checkpoint.size
    changes = patches(parts.found, edits)
    if not changes:
        return Plan((OutputFile.of(dest, (ByteRange(path, 0, size),)),))
    refuse_truncated(checkpoint)
    segments: tuple[Segment, ...] = (
        ByteRange(path, 0, layout.object_start),
        splice(parts.graph, changes),
        ByteRange(path, layout.object_end, size - layout.object_end),
    )
    return Plan((OutputFile.of(dest, segments),))


def refuse_truncated(checkpoint: Checkpoint) -> None:
    """Raise Truncated for a checkpoint of any format that ends before its last tensor does."""
    for finding in checkpoint.findings:
        if finding.id == "truncated":
            hint = truncated_hint(checkpoint.path)
            raise Truncated(finding.message, path=checkpoint.path, offset=finding.offset, hint=hint)


CANNOT_LOAD = "from a legacy file torch cannot load"


def refuse_unloadable(entries: Sequence[TensorEntry], path: str) -> None:
    """Refuse tensors that torch saves to a legacy file and does not load from it.

    - Storages of UntypedStorage (up to 2.13): ``_legacy_load`` asks the storage class for a dtype, and it has none.
    - Those whose rebuild call reads values, such as the sizes of a nested tensor's parts: a legacy file has its bytes
      behind the pickle, so while the calls run every storage holds whatever was in memory.
    """
    untyped = [entry for entry in entries if entry.storage and dtypes.by_name(entry.dtype).storage_class is None]
    if untyped:
        kinds = ", ".join(sorted({entry.dtype for entry in untyped}))
        raise untyped_refusal(path, f"{kinds} ({len(untyped)} tensors)", untyped[0].name)
    stack = list(entries)
    while stack:
        entry = stack.pop()
        if entry.kind == "nested" or (entry.detail.startswith(DEVICE_TENSOR) and entry.parts):
            what = "a nested tensor" if entry.kind == "nested" else f"a {entry.detail}"
            raise WouldLoseData(f"{CANNOT_LOAD} {what}", path=path, where=entry.name, hint="keep the zip format")
        stack += entry.parts


def untyped_refusal(path: str, what: str, where: str | None = None) -> WouldLoseData:
    hint = "keep the zip format, or convert to safetensors"
    return WouldLoseData(f"{CANNOT_LOAD} {what}", path=path, where=where, hint=hint)


def plan_write(entries: Sequence[TensorEntry], dest: str, *, metadata: Mapping[str, str] | None = None) -> Plan:
    """A fresh file that holds the state dict of `entries` as an OrderedDict."""
    refuse_unloadable(entries, dest)
    pickle, storages = torch_emit.state_dict_pickle(entries, legacy=True)
    itemsizes: dict[str, int] = {}
    for entry in entries:
        row = dtypes.by_name(entry.dtype)
        assert entry.storage is not None
        itemsizes.setdefault(entry.storage.key, row.itemsize if row.storage_class else 1)
    sized = [(key, data, size) for (key, data, _), size in zip(storages, itemsizes.values(), strict=True)]
    return Plan((OutputFile.of(dest, fresh(pickle, sized)),))


def fresh(pickle: bytes, storages: Sequence[tuple[str, Data, int]]) -> list[Segment]:
    """The segments of a legacy file as torch 2.13 lays it out.

    Args:
        pickle: the object, with legacy persistent ids.
        storages: (key, data, bytes of an element) in any order; they are written sorted by key, as torch does.
    """
    sizes = Dict()
    sizes.items += [("short", 2), ("int", 4), ("long", 4)]
    info = Dict()
    info.items += [("protocol_version", PROTOCOL), ("little_endian", True), ("type_sizes", sizes)]
    ordered = sorted(storages, key=lambda storage: storage[0])
    segments: list[Segment] = [emit(MAGIC), emit(PROTOCOL), emit(info), pickle, emit([key for key, _, _ in ordered])]
    for _, data, itemsize in ordered:
        segments += ((data.length // itemsize).to_bytes(8, "little"), data)
    return segments
