"""A checkpoint as a folder that torch.distributed.checkpoint loads: a `.metadata`, and ``.distcp`` files.

The object is flattened as by torch: dicts by their keys, and lists that contain a tensor or a dict by their indices.
Anything else is a value, which is pickled separately. As in torch, keys become text, and the type of each dict is lost.
Identical tensors share an item. Source: torch/distributed/checkpoint/_traverse.py, since 2.4.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from itertools import chain

from ckptfix.checkpoint import (
    ByteRange,
    Checkpoint,
    Data,
    OutputFile,
    Plan,
    Segment,
    Storage,
    TensorEntry,
    dtypes,
    segment_length,
)
from ckptfix.checkpoint.address import join
from ckptfix.checkpoint.tensors import NO_DATA, NO_DATA_HINT, contiguous_stride
from ckptfix.dataclass import dataclass
from ckptfix.errors import DamagedFile, KeyConflict, Unsupported
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.base import PlanWrite
from ckptfix.formats.dcp import metadata as dcp_metadata
from ckptfix.formats.dcp.fresh import fresh
from ckptfix.formats.dcp.metadata import SavedChunk, SavedKey, StorageInfo
from ckptfix.formats.dcp.skim import MAX_PARTS, Sizes
from ckptfix.formats.torch.attributes import tensor_state
from ckptfix.formats.torch.common import PickledObject, fields, little_endian, pickled_object, view_of
from ckptfix.formats.torch.emit import tensor_call
from ckptfix.formats.torch.tensors import KINDS, BadTensor, is_tensor
from ckptfix.formats.torch.zip_layout import fresh_records
from ckptfix.io.elements import row_major, why_unresolved
from ckptfix.io.virtual_files import crc32_of
from ckptfix.pickles import Call, Global, Graph, PersId
from ckptfix.pickles.copies import grafted
from ckptfix.pickles.emit import emit
from ckptfix.pickles.graph import Node, holds_objects, label, pairs
from ckptfix.pickles.reemit import every_node, reemit
from ckptfix.urls import as_path
from ckptfix.zips.write import ArchiveTemplate, NewArchive, NewRecord, TemplatedArchive, fresh_archives

DATA_SIZE = 5_000_000_000
"""The size of a data file in bytes, unless an item is larger; the files can be written and read in parallel."""


REPEATED = 1 << 30
"""The size in bytes from which a tensor is refused if it is a view that repeats its storage a thousand times."""


def file_name(number: int) -> str:
    """Return the name that torch gives the `number`-th data file of a rank."""
    return f"__0_{number}.distcp"


@dataclass(slots=True)
class _Flat:
    """The keys of a flattened object, in order.

    Attributes:
        written: ``id`` of the nodes of `tensors`.
        attributed: one of them, or a dict around them, has attributes, which a folder cannot store.
    """

    tensors: list[tuple[dcp_metadata.Path, TensorEntry]] = field(default_factory=list)
    values: list[tuple[dcp_metadata.Path, Node]] = field(default_factory=list)
    order: list[dcp_metadata.Path] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    written: set[int] = field(default_factory=set)
    attributed: bool = False


def plan_write(
    entries: Sequence[TensorEntry],
    dest: str,
    *,
    metadata: Mapping[str, str] | None = None,
    size: int = DATA_SIZE,
) -> Plan:
    """Plan a new folder that holds a flat state dict.

    Args:
        size: bytes of a data file.
    """
    flat = _Flat([((entry.key,), entry) for entry in entries], order=[(entry.key,) for entry in entries])
    return _planned(flat, None, dest, size)


def sized(size: int) -> PlanWrite:
    """Return a `plan_write` whose data files hold `size` bytes."""
    return partial(plan_write, size=size)


def sized_recode(size: int) -> Callable[[Checkpoint, str], Plan]:
    """Return a `recode` whose data files hold `size` bytes."""
    return partial(recode, size=size)


def recode(checkpoint: Checkpoint, dest: str, *, size: int = DATA_SIZE) -> Plan:
    """Plan the whole object of a checkpoint as a folder.

    Args:
        size: bytes of a data file.

    Raises:
        KeyConflict: two keys have the same name after flattening.
        Unsupported: a tensor cannot be stored in chunks.
    """
    parts = pickled_object(checkpoint)
    entries = dict(zip(map(id, (node for _, _, node in parts.found.tensors)), checkpoint.entries, strict=True))
    flat = _Flat()
    root = parts.graph.root
    if pairs(root) is None:
        raise Unsupported("a distributed checkpoint holds a dict, but this object is not a dict", path=checkpoint.path)
    _flatten(root, entries, flat)
    lost = _unreached(parts, flat)
    plan = _planned(flat, checkpoint, dest, size)
    return replace(plan, findings=(*plan.findings, *(_lost(where) for where in lost)))


def _unreached(parts: PickledObject, flat: _Flat) -> list[str]:
    """Return addresses of tensors of the object that neither an item nor a value of the folder holds."""
    if not flat.attributed:
        return []
    held = {id(node) for _, value in flat.values for node in every_node(value)} | flat.written
    return [join(at, key) for at, key, node in parts.found.tensors if id(node) not in held]


def _lost(where: str) -> Finding:
    return found("lost", "a distributed checkpoint cannot store attributes of a tensor or a dict", where=where)


def _flatten(root: Node, entries: Mapping[int, TensorEntry], flat: _Flat) -> None:
    stack: list[tuple[dcp_metadata.Path, Node]] = [((), root)]
    while stack:
        path, node = stack.pop()
        rows = pairs(node)
        below: list[tuple[dcp_metadata.Path, Node]] = []
        if len(path) > MAX_PARTS:
            raise Unsupported(
                "the object is nested too deeply for a distributed checkpoint", where="/".join(map(str, path[:4]))
            )
        if rows:
            if type(node) is Call and node.state is not None:
                flat.findings.append(
                    found("left-behind", "attributes of a dict were left out", where=_shown((*path, "_metadata")))
                )
                flat.attributed = True
            if any(holds_objects(key) for key, _ in rows):
                raise Unsupported(
                    "a key is an object; keys of a distributed checkpoint must be names", where=_shown(path)
                )
            names = [label(key) for key, _ in rows]
            if len(set(names)) < len(names):
                name = _shown((*path, Counter(names).most_common(1)[0][0]))
                raise KeyConflict(f"two keys would become {name}", pairs=((name, (name, name)),))
            below = [((*path, name), value) for name, (_, value) in zip(names, rows, strict=True)]
        elif isinstance(node, list) and not _is_value(node):
            below = [((*path, number), value) for number, value in enumerate(node)]
        elif path:
            flat.order.append(path)
            entry = entries.get(id(node)) if is_tensor(node) else None
            if entry is not None and not KINDS[entry.kind].whole:
                raise Unsupported("the tensor is one rank's part, or wrapped", where=entry.name)
            if entry is not None and not entry.has_data:
                raise Unsupported(NO_DATA, where=entry.name, hint=NO_DATA_HINT)
            if entry is not None and _is_plain(entry):
                _refuse_impossible(entry)
                flat.tensors.append((path, entry))
                flat.written.add(id(node))
                flat.attributed = flat.attributed or tensor_state(node) is not None
            else:
                flat.values.append((path, node))
        stack += reversed(below)


def _is_plain(entry: TensorEntry) -> bool:
    """Return whether the metadata describes a tensor completely: its shape and its elements."""
    return entry.kind == "dense" and (not entry.detail or (bool(entry.lazy) and why_unresolved(entry) is None))


def _refuse_impossible(entry: TensorEntry) -> None:
    """Refuse sizes that no program can count, and views that repeat a few bytes."""
    if math.prod(max(size, 1) for size in entry.shape) * entry.itemsize >= 1 << 63:
        raise Unsupported("too many elements (2**63 bytes is the limit)", where=entry.name)
    if entry.storage is not None and entry.nbytes >= max(REPEATED, 1000 * entry.storage.nbytes):
        message = (
            f"it is a view of {entry.nbytes:,} bytes that repeats the {entry.storage.nbytes:,} bytes of its storage"
        )
        raise Unsupported(message, where=entry.name)


def _is_value(node: list[Node]) -> bool:
    """Return whether a list is pickled whole: it contains no tensor or dict, at any depth of nested lists."""
    stack, seen = [node], {id(node)}
    while stack:
        for part in stack.pop():
            if is_tensor(part) or pairs(part) is not None:
                return False
            if isinstance(part, list) and id(part) not in seen:
                seen.add(id(part))
                stack.append(part)
    return True


def _shown(path: dcp_metadata.Path) -> str:
    return "/".join(map(str, path))


def _planned(flat: _Flat, checkpoint: Checkpoint | None, dest: str, size: int) -> Plan:
    names: dict[str, dcp_metadata.Path] = {}
    for path in flat.order:
        name = ".".join(map(str, path))
        if name in names:
            pair = (name, (_shown(names[name]), _shown(path)))
            raise KeyConflict(f"two keys would become {name}: {' and '.join(pair[1])}", pairs=(pair,))
        names[name] = path
    byteorder = "little" if checkpoint is None else checkpoint.byteorder
    archives: list[NewArchive] = []
    if checkpoint is not None:
        archives += [_value_records(node, pickled_object(checkpoint), byteorder, path) for path, node in flat.values]
    kept, shared = _distinct(entry for _, entry in flat.tensors)
    files, places = _filled(chain(archives, _tensor_archives(kept, byteorder)), dest, size)
    metadata = OutputFile.of(as_path(dest, dcp_metadata.NAME), [fresh([*_saved(flat, names, places, shared)], names)])
    return Plan((*files, metadata), tuple(flat.findings))


def _distinct(entries: Iterable[TensorEntry]) -> tuple[list[TensorEntry], list[int]]:
    """Return the entries that are different tensors, and for each entry the position of its tensor among them."""
    unique: dict[object, int] = {}
    kept: list[TensorEntry] = []
    shared: list[int] = []
    for entry in entries:
        assert entry.storage is not None
        same = entry.storage.identity, entry.offset, entry.dtype, entry.shape, entry.stride, entry.lazy
        if same not in unique:
            unique[same] = len(kept)
            kept.append(entry)
        shared.append(unique[same])
    return kept, shared


def _filled(archives: Iterable[NewArchive], dest: str, size: int) -> tuple[list[OutputFile], list[StorageInfo]]:
    """Return data files of these archives, of `size` bytes or of one larger archive, and the place of each archive."""
    files: list[list[Segment]] = [[]]
    places: list[StorageInfo] = []
    name, cursor = file_name(0), 0
    for item in fresh_archives([*archives]):
        length = sum(map(segment_length, item))
        if cursor and cursor + length > size:
            name, cursor = file_name(len(files)), 0
            files.append([])
        places.append(StorageInfo(name, cursor, length))
        files[-1] += item
        cursor += length
    made = (OutputFile.of(as_path(dest, file_name(at)), segments, join=False) for at, segments in enumerate(files))
    return list(made), places


def _saved(
    flat: _Flat, names: Mapping[str, dcp_metadata.Path], places: Sequence[StorageInfo], shared: Iterable[int]
) -> Iterator[SavedKey]:
    """Yield the keys in order; `places` are those of the values, and of the tensors, whose numbers are `shared`."""
    values, tensors = iter(places), zip(flat.tensors, shared, strict=True)
    are_values = {path for path, _ in flat.values}
    origins: dict[int, Sizes] = {}
    for name, path in names.items():
        if path in are_values:
            yield SavedKey(name, path, None, (), (SavedChunk((), (), next(values)),))
            continue
        (_, entry), number = next(tensors)
        rank = len(entry.shape)
        origin = origins.setdefault(rank, (0,) * rank)
        part = SavedChunk(origin, entry.shape, places[len(are_values) + number])
        yield SavedKey(name, path, entry.dtype, entry.shape, (part,))


def tensor_items(entries: Sequence[TensorEntry]) -> list[list[Segment]]:
    """Return the items of tensors, each as the segments of the archive that torch.save writes for it."""
    return fresh_archives(_tensor_archives(entries, "little"))


def _tensor_archives(entries: Iterable[TensorEntry], byteorder: str) -> list[NewArchive]:
    """Return the archives of tensors; those of one dtype and shape are made from one template."""
    templates: dict[tuple[str, tuple[int, ...]], ArchiveTemplate] = {}
    archives: list[NewArchive] = []
    for entry in entries:
        data, crc32 = _elements(entry, byteorder)
        if not data.length or not isinstance(data, ByteRange):
            archives.append(_tensor_records(entry, data, crc32))
            continue
        form = entry.dtype, entry.shape
        template = templates.get(form)
        if template is None:
            records = _tensor_records(entry, data, crc32)
            varying = next(nth for nth, record in enumerate(records) if record.data is data)
            template = templates[form] = ArchiveTemplate(records, varying)
        archives.append(TemplatedArchive(template, data, crc32))
    return archives


def _elements(entry: TensorEntry, byteorder: str) -> tuple[Data, int | None]:
    """Return the elements of a tensor in row-major order, and their checksum if it is known."""
    storage = entry.storage
    if storage is None or storage.data is None:
        raise Unsupported("its data is not in the file (a tensor on the meta device)", where=entry.name)
    whole = entry.is_contiguous and not entry.offset and entry.nbytes == storage.nbytes and not entry.lazy
    data = storage.data if whole else row_major(entry, byteorder)
    if byteorder == "big":
        return little_endian(data, "big", dtypes.by_name(entry.dtype).unit), None
    if not whole:
        return data, None
    return data, crc32_of(data) if storage.crc32 is None else storage.crc32


def _tensor_records(entry: TensorEntry, data: Data, crc32: int | None) -> list[NewRecord]:
    alone = Storage("0", entry.dtype, entry.nbytes, "cpu", data)
    plain = TensorEntry(entry.key, "", alone, entry.dtype, entry.shape, contiguous_stride(entry.shape))
    return fresh_records(emit(tensor_call(plain, _Zero())), [("0", data, crc32)])


class _Zero:
    """References to the single storage of an item."""

    def reference(self, kind: Global, storage: Storage, count: int, where: str) -> PersId:
        return PersId(("storage", kind, "0", "cpu", count), 0, -1)


def _value_records(node: Node, parts: PickledObject, byteorder: str, path: dcp_metadata.Path) -> list[NewRecord]:
    """Return the archive of a value: its pickle, and the storages of tensors in it."""
    storages: dict[str, tuple[str, Data, int | None]] = {}

    def reference(persid: PersId) -> tuple[Node, ...] | None:
        try:
            key, _, _, _ = fields(persid)
        except BadTensor as error:
            raise DamagedFile(str(error), where=_shown(path)) from None
        if view_of(persid) is not None:
            raise Unsupported("the value has a tensor that uses a view of a storage", where=_shown(path))
        data, _, crc32 = parts.storages.place(key)
        if data is None:
            raise DamagedFile(f"the file has no storage {key!r}", where=_shown(path))
        if byteorder == "big":
            raise Unsupported("the value has a big-endian tensor", where=_shown(path))
        name, _, _ = storages.setdefault(key, (str(len(storages)), data, crc32))
        return (*persid.fields[:2], name, *persid.fields[3:5])

    source = parts.graph
    graph = Graph(bytes((0x80, max(source.protocol, 2))), 0)
    graph.protocol = source.protocol
    graph.root = grafted(node, reference)
    pickle = reemit(graph).pickle
    return fresh_records(pickle, list(storages.values()))
