"""The `.metadata` of a distributed checkpoint: the parts of each key, and their locations.

::

    Metadata
      state_dict_metadata   {fqn: TensorStorageMetadata(properties, size, chunks) or BytesStorageMetadata()}
      planner_data          {fqn: (key or list index, ...)}: the path of the value in the nested object; None if flat
      storage_data          {MetadataIndex(fqn, offset, index): _StorageInfo(relative_path, offset, length,
                            transform_descriptors)}
      storage_meta          StorageMeta(checkpoint_id, save_id, load_id, modules), since torch 2.4
      version               "1.0.0", since torch 2.10

It is a pickle, and read as text. Classes are recognized by their fields alone: torch 2.1 and 2.2 have TensorProperties
in another module, and OLMo-core and Megatron have their own classes. Source: torch/distributed/checkpoint/metadata.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import NamedTuple, cast

from ckptfix.checkpoint import dtypes
from ckptfix.checkpoint.address import of_keys
from ckptfix.dataclass import dataclass
from ckptfix.errors import DamagedFile, Unsupported, about
from ckptfix.formats.dcp.skim import MAX_PARTS, MAX_SIZE, Boxes, Sizes, Skimmed, StoredItem, skim
from ckptfix.formats.torch.tensors import BadTensor, dtype_name
from ckptfix.pickles import Call, Dict, Graph, parse
from ckptfix.pickles.graph import Node, attributes, pairs

NAME = ".metadata"

Path = tuple[str | int, ...]

UNDO_ZSTD = (
    "undo it with `python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER OUT.pth`, where zstandard "
    "is installed; ckptfix reads the output"
)
UNDO = (
    "load it with FileSystemReader(FOLDER, _extension_registry=...) of torch.distributed.checkpoint, where the "
    "registry has the extension, and save it again without the extension"
)


class StorageInfo(NamedTuple):
    """The location of an item as a ``_StorageInfo`` states it: `length` bytes at `offset` of the file `name`."""

    name: str
    offset: int
    length: int


class SavedChunk(NamedTuple):
    """A chunk of a tensor: its box, and the item that holds its elements; None if the metadata lists no item."""

    offsets: Sizes
    sizes: Sizes
    place: StorageInfo | None

    @property
    def is_lost(self) -> bool:
        """True if it has elements but no item for them."""
        return self.place is None and 0 not in self.sizes


@dataclass(slots=True)
class SavedKey:
    """A key of the flattened object.

    Attributes:
        fqn: its name, ``optim.state.fc.weight.exp_avg``.
        path: the path of its value in the nested object.
        dtype: the dtype of a tensor; None for a value.
        shape: the shape of the whole tensor.
        parts: the chunks of a tensor, or the single item of a value.
    """

    fqn: str
    path: Path
    dtype: str | None
    shape: Sizes
    parts: tuple[SavedChunk, ...]

    @property
    def address(self) -> str:
        return of_keys(tuple(map(str, self.path)))

    @property
    def nbytes(self) -> int:
        """The number of bytes of a tensor's elements."""
        return 0 if self.dtype is None else dtypes.by_name(self.dtype).nbytes(math.prod(self.shape))


@dataclass(slots=True)
class Metadata:
    """The content of a `.metadata`.

    Attributes:
        source: the pickle; its bytes until its nodes are needed.
        saved: the keys, in order.
        nested: the paths come from the file; otherwise, each path is only the name.
        version: the stated version; None before torch 2.10.
        saved_at: the folder that it was saved to, under its name at that time.
        unused: (fqn, place) of items that belong to no chunk.
        wrong: (address, message) of keys that cannot be read.
    """

    source: Graph | bytes
    saved: list[SavedKey] = field(default_factory=list)
    nested: bool = False
    version: str | None = None
    saved_at: str | None = None
    unused: list[tuple[str, StorageInfo]] = field(default_factory=list)
    wrong: list[tuple[str, str]] = field(default_factory=list)

    @property
    def graph(self) -> Graph:
        """The parsed pickle, for edits."""
        if isinstance(self.source, bytes):
            self.source = parse(self.source, frames=False, uses=False)
        return self.source

    @property
    def size(self) -> int:
        """The size of the pickle in bytes."""
        return len(self.source if isinstance(self.source, bytes) else self.source.data)

    def places(self) -> Iterator[tuple[SavedKey, SavedChunk]]:
        """Yield every part that has an item, with its key."""
        for saved in self.saved:
            for part in saved.parts:
                if part.place is not None:
                    yield saved, part


def is_metadata(root: Node) -> bool:
    """Return whether the object of a pickle is a Metadata."""
    return type(root) is Call and "state_dict_metadata" in fields_of(root)


def understood(data: bytes, path: str, *, whole: bool = True) -> Metadata:
    """Return the content of the pickle `data`, the metadata at `path`.

    Args:
        whole: it lists all chunks of each tensor; False for the metadata of one rank.

    Raises:
        BadPickle: it is not a complete pickle.
        DamagedFile: it is a different object.
        Unsupported: its items are compressed or encrypted.
    """
    rows = skim(data)
    source: Graph | bytes = data
    if rows is None:
        source = parse(data, path=path, frames=False, uses=False)
    with about(path):
        return _understood(_said(source) if isinstance(source, Graph) else rows or Skimmed(), Metadata(source), whole)


def _said(graph: Graph) -> Skimmed:
    """Return the fields of the object of `graph`."""
    if not is_metadata(graph.root):
        raise DamagedFile("not the metadata of a distributed checkpoint: it has no state_dict_metadata")
    fields = dict(fields_of(graph.root))
    keys = pairs(fields.pop("state_dict_metadata"))
    if keys is None:
        raise DamagedFile("its state_dict_metadata is not a mapping")
    planner, storage = fields.pop("planner_data", None), fields.pop("storage_data", None)
    paths = None if planner is None else pairs(planner)
    if planner is not None and paths is None:
        raise DamagedFile("its planner_data is not a mapping")
    items = [] if storage is None else pairs(storage)
    if items is None:
        raise DamagedFile("its storage_data is not a mapping")
    return Skimmed([*keys], paths, [*items], fields)


def _understood(said: Skimmed, made: Metadata, whole: bool) -> Metadata:
    bad: dict[str, str] = {}
    paths = _paths(said.paths, bad)
    made.nested = paths is not None
    version = said.rest.get("version")
    made.version = str(version) if isinstance(version, str) else None
    made.saved_at = _saved_at(said.rest.get("storage_meta"))
    items = _items(said.items, bad)
    known = Sizer(made.size)
    for fqn, node in said.keys:
        if not isinstance(fqn, str):
            raise DamagedFile(f"a key of state_dict_metadata is a {type(fqn).__name__}, not a name")
        name = str(fqn)
        path = paths.get(name) if paths is not None else None
        if name in bad:
            made.wrong.append(("/".join(map(str, (name,) if path is None else path)), bad[name]))
            items.pop(name, None)
            continue
        saved = _saved(name, (name,) if path is None else path, node, items.pop(name, {}), known, made, whole)
        if saved is not None:
            made.saved.append(saved)
    made.unused += [(name, place) for name, rows in items.items() for place in rows.values()]
    return made


def fields_of(node: Node) -> Mapping[str, Node]:
    """Return the attributes that BUILD sets on an object."""
    if type(node) is not Call:
        return {}
    state = node.state
    rows = state.items if type(state) is Dict else attributes(state)
    return {name: value for name, value in rows if isinstance(name, str)}


class Sizer:
    """Sizes by node: the same ``torch.Size`` appears in many places, and a hostile one can be long.

    Args:
        most: the number of chunks that all tensors together may have.
    """

    def __init__(self, most: int) -> None:
        self._known: dict[int, Sizes] = {}
        self._left = most

    def count(self, chunks: int) -> None:
        """Count the chunks of a tensor. Raises DamagedFile if there are more chunks than bytes."""
        self._left -= chunks
        if self._left < 0:
            raise DamagedFile("its keys have more chunks than it has bytes: they refer to the same list repeatedly")

    def __call__(self, node: Node) -> Sizes:
        """Return the sizes in a ``torch.Size``. Raises BadTensor for anything else."""
        inner = node.args[0] if type(node) is Call and type(node.args) is tuple and node.args else None
        if type(inner) is tuple and len(inner) < 8 and _INT.issuperset(map(type, inner)):
            short = cast(Sizes, inner)
            if not short or 0 <= min(short) <= max(short) < MAX_SIZE:
                return short
        known = self._known.get(id(node))
        if known is None:
            known = self._known[id(node)] = _sizes(node)
        return known


_INT = {int}


def _sizes(node: Node) -> Sizes:
    inner = node.arguments[0] if type(node) is Call and node.arguments else node
    if type(node) is Call and not node.arguments:
        inner = ()
    if not isinstance(inner, tuple | list) or not all(type(size) is int for size in inner):
        raise BadTensor("its sizes are not a tuple of numbers")
    sizes = tuple(size for size in inner if type(size) is int)
    if any(not 0 <= size < MAX_SIZE for size in sizes):
        raise BadTensor(f"its sizes are out of range: {list(sizes)[:8]}")
    return sizes


def _saved(
    fqn: str, path: Path, node: Node | Boxes, items: Mapping[Sizes | None, StorageInfo], known: Sizer, made: Metadata,
    whole: bool,
) -> SavedKey | None:
    """Return the key `fqn`; None if its metadata cannot be understood, which is recorded."""
    if not isinstance(node, Boxes) and _is_value(node):
        made.unused += [(fqn, place) for offsets, place in items.items() if offsets is not None]
        return SavedKey(fqn, path, None, (), (SavedChunk((), (), items.get(None)),))
    where = "/".join(map(str, path))
    try:
        dtype, shape, boxes = node if isinstance(node, Boxes) else _boxes(node, known)
        row = dtypes.by_name(dtype)
        if row.nbytes(math.prod(shape)) >= MAX_SIZE:
            raise BadTensor(f"its shape {list(shape)} is over the limit of 2**63 bytes")
        # Older versions list a replicated chunk once for each rank, although it is one item.
        distinct = dict.fromkeys(boxes) if len(boxes) > 1 else boxes
        parts = tuple(SavedChunk(*box, items.get(box[0])) for box in distinct)
        check_volume(row, shape, parts, whole=whole)
    except (BadTensor, Unsupported) as error:
        made.wrong.append((where, error.message))
        return None
    if len(items) > len(parts):
        listed = {part.offsets for part in parts}
        made.unused += [(fqn, place) for offsets, place in items.items() if offsets is None or offsets not in listed]
    return SavedKey(fqn, path, dtype, shape, parts)


def _is_value(node: Node) -> bool:
    fields = fields_of(node)
    return type(node) is Call and "chunks" not in fields and "size" not in fields


def _boxes(node: Node, known: Sizer) -> Boxes:
    """Return the metadata of a tensor. Raises BadTensor."""
    fields = fields_of(node)
    dtype, shape = _dtype(fields.get("properties")), known(fields.get("size"))
    chunks = fields.get("chunks")
    if not isinstance(chunks, list | tuple):
        raise BadTensor("its chunks are not a list")
    known.count(len(chunks))
    rows = (fields_of(chunk) for chunk in chunks)
    return Boxes(dtype, shape, tuple((known(row.get("offsets")), known(row.get("sizes"))) for row in rows))


def check_volume(row: dtypes.Dtype, shape: Sizes, parts: Sequence[SavedChunk], *, whole: bool = True) -> None:
    """Refuse sizes that the items cannot have: if they were believed, outputs could get any length.

    Args:
        whole: the chunks are all of the tensor.

    Raises:
        BadTensor: the chunks have more or fewer elements than the tensor, need more bytes than their items have, or
            differ in their number of dimensions.
    """
    volume = 0
    for offsets, sizes, place in parts:
        if not len(offsets) == len(sizes) == len(shape):
            raise BadTensor(f"a chunk of {list(sizes)} at {list(offsets)} does not fit a tensor of {list(shape)}")
        count = math.prod(sizes)
        volume += count
        if place is not None and row.nbytes(count) > place.length:
            raise BadTensor(
                f"a chunk of {list(sizes)} needs {row.nbytes(count)} bytes, but its item has {place.length}"
            )
    if whole and volume != math.prod(shape):
        raise BadTensor(f"its chunks have {volume} elements, but its shape {list(shape)} has {math.prod(shape)}")


def _dtype(node: Node) -> str:
    """Return the dtype of a ``TensorProperties``: the first of the five fields of its state."""
    state = node.state if type(node) is Call else None
    if type(state) is tuple and state:
        return dtype_name(state[0])
    return dtype_name(fields_of(node).get("dtype"))


def _paths(rows: Sequence[tuple[Node, Node]] | None, bad: dict[str, str]) -> dict[str, Path] | None:
    """Return the paths of ``planner_data``; None without it. `bad` gets the keys whose path is invalid."""
    if rows is None:
        return None
    paths: dict[str, Path] = {}
    for fqn, path in rows:
        if not isinstance(fqn, str):
            continue
        keys = _path(path)
        if keys is None:
            bad[str(fqn)] = "planner_data has an invalid path"
        else:
            paths[str(fqn)] = keys
    return paths


def _path(node: Node) -> Path | None:
    """Return the path in a node; None for anything else."""
    if not isinstance(node, tuple | list) or not node or len(node) > MAX_PARTS:
        return None
    if not all(isinstance(key, str) or (type(key) is int and key >= 0) for key in node):
        return None
    return tuple(str(key) if isinstance(key, str) else cast(int, key) for key in node)


def _items(
    rows: Sequence[StoredItem | tuple[Node, Node]], bad: dict[str, str]
) -> dict[str, dict[Sizes | None, StorageInfo]]:
    """Return fqn -> offsets of a chunk (None for a value) -> location; `bad` gets the keys of invalid entries."""
    found: dict[str, dict[Sizes | None, StorageInfo]] = {}
    known = Sizer(0)
    files: dict[str, str] = {}
    for row in rows:
        if isinstance(row, StoredItem):
            if row.offset < 0 or row.length < 0 or row.offset + row.length >= MAX_SIZE:
                bad[row.fqn] = _no_place(row.offset, row.length)
                continue
            # As in a dict, the last one of equal keys counts.
            file = files.setdefault(row.name, row.name)
            found.setdefault(row.fqn, {})[row.box] = StorageInfo(file, row.offset, row.length)
            continue
        index, info = row
        key, said = fields_of(index), fields_of(info)
        fqn, offsets = key.get("fqn"), key.get("offset")
        name, offset, length = said.get("relative_path"), said.get("offset"), said.get("length")
        if not isinstance(fqn, str):
            raise DamagedFile("an entry of its storage_data has no key")
        if said.get("transform_descriptors"):
            transforms = said["transform_descriptors"]
            names = [str(one) for one in transforms] if isinstance(transforms, list | tuple) else ["an extension"]
            message = f"its items are transformed by {', '.join(names)}, which ckptfix cannot undo"
            zstd = all(name.startswith("stream.zstd/") for name in names)
            raise Unsupported(message, where=str(fqn), hint=UNDO_ZSTD if zstd else UNDO)
        if not isinstance(name, str) or type(offset) is not int or type(length) is not int:
            bad[str(fqn)] = "an entry of its storage_data states no location in a file"
            continue
        if offset < 0 or length < 0 or offset + length >= MAX_SIZE:
            bad[str(fqn)] = _no_place(offset, length)
            continue
        try:
            box = None if offsets is None else known(offsets)
        except BadTensor as error:
            bad[str(fqn)] = f"an entry of its storage_data is invalid: {error.message}"
            continue
        file = files.setdefault(name, str(name))
        found.setdefault(str(fqn), {})[box] = StorageInfo(file, offset, length)
    return found


def _no_place(offset: int, length: int) -> str:
    return f"it has an item of {length} bytes at {offset}, which is out of range"


def _saved_at(node: Node) -> str | None:
    """Return the ``checkpoint_id`` of a ``StorageMeta``: text, or a ``PosixPath(*parts)``."""
    value = fields_of(node).get("checkpoint_id")
    if isinstance(value, str):
        return str(value)
    parts = [str(part) for part in value.arguments if isinstance(part, str)] if type(value) is Call else []
    if not parts:
        return None
    head = parts[0].rstrip("/\\")
    return "/".join([head, *parts[1:]]) if len(parts) > 1 else parts[0]
