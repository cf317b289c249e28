"""The pickle of a `.metadata` that was read, with changed keys and everything else kept.

The classes and the order of their fields are those of torch (torch/distributed/checkpoint/metadata.py, 2.10 to 2.14);
readers since torch 2.1 accept it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import cast

from ckptfix.checkpoint import Edit, TensorEntry, dtypes
from ckptfix.dataclass import dataclass
from ckptfix.formats.dcp.cut import without
from ckptfix.formats.dcp.fresh import METADATA
from ckptfix.formats.dcp.metadata import Metadata, Path, SavedKey, StorageInfo, fields_of
from ckptfix.formats.dcp.respell import Moves, respelled
from ckptfix.formats.dcp.skim import Sizes
from ckptfix.pickles import Call, Dict, Global, Graph
from ckptfix.pickles.graph import Node, pairs
from ckptfix.pickles.reemit import reemit

_SIZE = Global("torch", "Size", 0)
_KINDS = {
    name: Global(METADATA, name, 0)
    for name in ("TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")
}


@dataclass(slots=True)
class EditedKey:
    """A key during an edit.

    Attributes:
        saved: the key as the folder has it.
        path: its new path.
        gone: it is dropped.
        inner: edits of its value.
        put: the tensor that replaces it.
        place: the location of its new item.
    """

    saved: SavedKey
    path: Path
    gone: bool = False
    inner: list[Edit] = field(default_factory=list)
    put: TensorEntry | None = None
    place: StorageInfo | None = None

    def fqn(self, nested: bool) -> str:
        """Return its new name; a name that is not derived from its path is kept as long as the path is."""
        if self.path == self.saved.path:
            return self.saved.fqn
        return ".".join(map(str, self.path)) if nested else str(self.path[0])


def rewritten(said: Metadata, rows: Sequence[EditedKey], moved: Mapping[StorageInfo, StorageInfo]) -> bytes:
    """Return the pickle of the metadata that was read, with its keys as in `rows` and its items where they `moved`."""
    if isinstance(said.source, bytes) and not any(row.put is not None for row in rows):
        made = _edited_text(said.source, rows, moved, said.nested)
        if made is not None:
            return made
    by_fqn = {row.saved.fqn: row for row in rows}
    make = _Nodes()
    root = said.graph.root
    assert type(root) is Call
    fields = fields_of(root)
    new: dict[str, Node] = {}
    keys, items, planner = Dict(), Dict(), Dict()
    for fqn, node in pairs(fields["state_dict_metadata"]) or ():
        row = by_fqn.get(str(fqn))
        if row is None:
            keys.items.append((fqn, node))
        elif not row.gone:
            put = row.put
            kept = node if put is None else make.tensor(put.dtype, put.shape)
            keys.items.append((row.fqn(said.nested), kept))
    new["state_dict_metadata"] = keys
    for index, info in pairs(fields.get("storage_data")) or ():
        row = by_fqn.get(str(fields_of(index).get("fqn")))
        if row is None:
            to = moved.get(_place(info))
            items.items.append((index, info if to is None else _with(info, **make.place(to))))
        elif not row.gone:
            name = row.fqn(said.nested)
            if row.put is None:
                place = row.place or moved.get(_place(info))
                changed = info if place is None else _with(info, **make.place(place))
                items.items.append((index if name == row.saved.fqn else _with(index, fqn=name), changed))
            elif row.place is not None:
                offset = make.size((0,) * len(row.put.shape))
                new_index = _with(index, fqn=name, offset=offset, index=0)
                items.items.append((new_index, _with(info, **make.place(row.place))))
                row.place = None
    new["storage_data"] = items
    if said.nested:
        for fqn, path in pairs(fields.get("planner_data")) or ():
            row = by_fqn.get(str(fqn))
            if row is None:
                planner.items.append((fqn, path))
            elif not row.gone:
                planner.items.append((row.fqn(True), path if row.path == row.saved.path else tuple(row.path)))
        new["planner_data"] = planner
    return _written(_with(root, **new), Graph(said.graph.data, said.graph.start), said.graph.protocol)


def _edited_text(
    text: bytes, rows: Sequence[EditedKey], moved: Mapping[StorageInfo, StorageInfo], nested: bool
) -> bytes | None:
    """Return the same by editing the text, if no tensor is replaced; None if the nodes must be edited."""
    gone = {row.saved.fqn for row in rows if row.gone}
    kept = without(text, gone) if gone else text
    left = [row for row in rows if not row.gone]
    names = {row.saved.fqn: (row.fqn(nested), row.path) for row in left if row.path != row.saved.path}
    moves = Moves({row.saved.fqn: row.place for row in left if row.place is not None}, moved)
    return kept if kept is None or not (names or moves) else respelled(kept, names, moves)


def _place(info: Node) -> StorageInfo:
    """Return the location in a ``_StorageInfo``, which is known to be valid."""
    said = fields_of(info)
    return StorageInfo(str(said.get("relative_path")), cast("int", said.get("offset")), cast("int", said.get("length")))


def _written(root: Node, graph: Graph, protocol: int) -> bytes:
    graph.protocol = protocol
    graph.root = root
    return reemit(graph).pickle


def _with(node: Node, **fields: Node) -> Call:
    """Return a copy of the object with different values of some attributes."""
    assert type(node) is Call
    made = Call(node.func, node.args, node.how, 0, node.kwargs)
    made.items, made.elements = node.items, node.elements
    state = Dict()
    rest = dict(fields)
    state.items = [(name, rest.pop(str(name), value)) for name, value in _rows(node)]
    state.items += rest.items()
    made.state = state
    return made


def _rows(node: Call) -> Iterable[tuple[Node, Node]]:
    return node.state.items if type(node.state) is Dict else fields_of(node).items()


class _Nodes:
    """Factory of the objects; equal sizes, dtypes and layouts share one object, as in torch's own pickles."""

    def __init__(self) -> None:
        self._sizes: dict[Sizes, Call] = {}
        self._properties: dict[str, Call] = {}

    def object(self, kind: str, fields: Mapping[str, Node] | None) -> Call:
        made = Call(_KINDS[kind], (), "NEWOBJ", 0)
        if fields is not None:
            state = Dict()
            state.items = list(fields.items())
            made.state = state
        return made

    def size(self, sizes: Sizes) -> Call:
        made = self._sizes.get(sizes)
        if made is None:
            made = self._sizes[sizes] = Call(_SIZE, (sizes,), "REDUCE", 0)
        return made

    def tensor(self, dtype: str, shape: Sizes) -> Call:
        """Return the entry of a tensor in one chunk."""
        chunk = self.object(
            "ChunkStorageMetadata", {"offsets": self.size((0,) * len(shape)), "sizes": self.size(shape)}
        )
        fields: dict[str, Node] = {"properties": self.properties(dtype), "size": self.size(shape), "chunks": [chunk]}
        return self.object("TensorStorageMetadata", fields)

    def properties(self, dtype: str) -> Call:
        made = self._properties.get(dtype)
        if made is None:
            made = self._properties[dtype] = self.object("TensorProperties", None)
            layout = Call(Global("torch.serialization", "_get_layout", 0), ("torch.strided",), "REDUCE", 0)
            contiguous = Call(_KINDS["_MEM_FORMAT_ENCODING"], (0,), "REDUCE", 0)
            made.state = (Global("torch", dtypes.by_name(dtype).name, 0), layout, False, contiguous, False)
        return made

    def place(self, place: StorageInfo) -> dict[str, Node]:
        return {"relative_path": place.name, "offset": place.offset, "length": place.length}
