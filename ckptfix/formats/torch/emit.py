"""The pickle of a fresh state dict: an OrderedDict of rebuild calls, as torch.save writes it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any, Protocol

from ckptfix.checkpoint import Checkpoint, Data, Storage, TensorEntry, dtypes
from ckptfix.dataclass import dataclass
from ckptfix.errors import Unsupported, WouldLoseData
from ckptfix.formats.torch import calls as rebuild
from ckptfix.formats.torch.calls import detached_call
from ckptfix.formats.torch.common import pickled_object
from ckptfix.formats.torch.tensors import BadTensor, StorageOf
from ckptfix.pickles import Call, Dict, Global, Graph, PersId, Set
from ckptfix.pickles.emit import emit
from ckptfix.pickles.graph import Node
from ckptfix.pickles.reemit import reemit

if TYPE_CHECKING:
    from ckptfix.checkpoint.tree import Item

_ORDERED_DICT = Global("collections", "OrderedDict", 0)
_UNTYPED = Global("torch.storage", "UntypedStorage", 0)

Versions = Mapping[str, Mapping[str, Any]]
MAX_PARTS = 64
"""Deepest nesting of the calls of one tensor; torch's own are at most four deep."""


@dataclass(frozen=True, slots=True)
class Calls:
    """Rebuild calls of the tensors that are not dense, by key, to be written unchanged.

    Attributes:
        graph: the pickle that they come from.
        storage_of: returns the storage of a reference in them.
    """

    graph: Graph
    storage_of: StorageOf
    nodes: Mapping[str, Any]

    def items(self) -> dict[str, Item]:
        """Return the tensors by key."""
        from ckptfix.formats.torch.tree import value_of

        return {key: value_of(node, self.storage_of) for key, node in self.nodes.items()}

    def without(self, keys: Collection[str]) -> Calls:
        """Return the calls of all other keys."""
        return replace(self, nodes={key: node for key, node in self.nodes.items() if key not in keys})


@dataclass(slots=True)
class _Storages:
    """The storages of the new file, under new keys in the order of first use."""

    legacy: bool
    keys: dict[tuple[str, str], str] = field(default_factory=dict)
    rows: list[tuple[str, Data, int | None]] = field(default_factory=list)
    itemsizes: dict[str, int] = field(default_factory=dict)

    def key(self, storage: Storage, where: str) -> str:
        """Return the new key of `storage`, for the tensor `where`."""
        if storage.data is None:
            raise WouldLoseData("its data is not in the file (a tensor on the meta device)", where=where)
        known = self.keys.get(storage.identity)
        if known is None:
            known = self.keys[storage.identity] = str(len(self.keys))
            self.rows.append((known, storage.data, storage.crc32))
        return known

    def reference(self, kind: Global, storage: Storage, count: int, where: str) -> PersId:
        """Return a reference to `storage`; see `References`."""
        key = self.key(storage, where)
        row = dtypes.by_storage_class(kind.name)
        self.itemsizes.setdefault(key, row.itemsize if row is not None else 1)
        return reference(kind, key, storage.location, count, legacy=self.legacy)


@dataclass(frozen=True, slots=True)
class NewPickle:
    """The pickle of a fresh state dict.

    Attributes:
        storages: (key, data, CRC-32) of each storage, in the order of first use.
        itemsizes: key -> bytes of one element, as the first reference counts them.
    """

    pickle: bytes
    storages: list[tuple[str, Data, int | None]]
    itemsizes: Mapping[str, int]


def state_dict_pickle(
    entries: Sequence[TensorEntry], *, legacy: bool = False
) -> tuple[bytes, list[tuple[str, Data, int | None]]]:
    """Return the pickle of a state dict with these dense tensors, and (key, data, CRC-32) of each storage.

    Arguments as for `fresh`.
    """
    made = fresh(entries, legacy=legacy)
    return made.pickle, made.storages


def fresh(
    entries: Sequence[TensorEntry],
    *,
    legacy: bool = False,
    versions: Versions | None = None,
    calls: Calls | None = None,
    dicts: Sequence[str] = (),
) -> NewPickle:
    """Return the pickle of a state dict with these tensors.

    Entries whose storages have the same identity share a storage; keys are new, in the order of first use.

    Args:
        versions: the ``_metadata`` of the state dict; None to write no metadata.
        calls: the rebuild calls of tensors that are not dense.
        dicts: first components of keys; the tensors under each become a state dict of its own under that name.

    Raises:
        WouldLoseData: an entry is not dense and has no call, or its data is not in the file.
    """
    nodes = calls.nodes if calls is not None else {}
    bytewise = _read_apart(entries)
    odd = [entry.name for entry in entries if entry.kind != "dense" and entry.key not in nodes]
    if odd:
        raise WouldLoseData(f"only dense tensors can be written; not {', '.join(odd[:8])}")
    storages = _Storages(legacy)
    root = Call(_ORDERED_DICT, (), "REDUCE", 0)
    copied: dict[int, Any] = {}
    top: list[tuple[Any, Any]] = []
    root.items = top
    inner: dict[str, list[tuple[Any, Any]]] = {name: [] for name in dicts}
    for entry in entries:
        front, _, rest = entry.key.partition(".")
        rows, key = (inner[front], rest) if rest and front in inner else (top, entry.key)
        if entry.kind == "dense":
            untyped = entry.storage is not None and entry.storage.identity in bytewise
            rows.append((key, tensor_call(entry, storages, untyped=untyped)))
        else:
            assert calls is not None
            rows.append((key, _copied(nodes[entry.key], calls, storages, copied, entry.key)))
    for name, rows in inner.items():
        one = Call(_ORDERED_DICT, (), "REDUCE", 0)
        one.items = rows
        top.append((name, one))
    if versions is not None and not dicts:
        root.state = _metadata(versions)
    if not copied:
        return NewPickle(emit(root), storages.rows, storages.itemsizes)
    assert calls is not None
    return NewPickle(reemit(calls.graph.around(root)).pickle, storages.rows, storages.itemsizes)


def _read_apart(entries: Iterable[TensorEntry]) -> frozenset[tuple[str, str]]:
    """Return the ``identity`` of storages that tensors read as several dtypes: a storage has one class in a pickle."""
    kinds: dict[tuple[str, str], set[str]] = {}
    for entry in entries:
        row = dtypes.find(entry.dtype)
        if entry.kind == "dense" and entry.storage is not None and row is not None:
            # torch treats an UntypedStorage as a storage of bytes.
            kinds.setdefault(entry.storage.identity, set()).add(row.storage_class or "ByteStorage")
    return frozenset(key for key, found in kinds.items() if len(found) > 1)


FEW = 8
"""Most dimensions of a tensor whose size tuples are written for it alone, even if others have the same."""


class References(Protocol):
    """Factory of references to the storages of a new file."""

    def reference(self, kind: Global, storage: Storage, count: int, where: str) -> PersId:
        """Return a reference to `storage`, as `count` elements of the class `kind`, for the tensor `where`."""


def reference(kind: Global, key: str, location: str, count: int, *, legacy: bool) -> PersId:
    """Return the persistent id of a storage; in a legacy file it has a sixth field, for a view of the storage."""
    pid = ("storage", kind, key, location, count)
    return PersId((*pid, None) if legacy else pid, 0, -1)


def dense_call(
    dtype: str,
    nbytes: int,
    refer: Callable[[Global, int], PersId],
    layout: tuple[int, tuple[int, ...], tuple[int, ...]],
    *,
    requires_grad: bool = False,
    marks: Sequence[str] = (),
    untyped: bool = False,
) -> Call:
    """Return the rebuild call of a dense tensor that is not a parameter, as torch.save writes it.

    Args:
        dtype: torch's name of the dtype.
        nbytes: length of the storage in bytes.
        refer: returns the reference to the storage, as a number of elements of a storage class.
        layout: offset, shape and stride, in elements.
        marks: the names of its lazy operations (conj, neg).
        untyped: the storage is one of bytes, because other tensors read it as a different dtype.
    """
    row = dtypes.by_name(dtype)
    typed = row.storage_class is not None and not untyped
    kind = _UNTYPED if row.storage_class is None or untyped else Global("torch", row.storage_class, 0)
    offset, shape, stride = layout
    if len(shape) <= FEW:
        # Tuples of its own, as in torch.save: a reader takes such calls in one piece.
        shape, stride = (*shape,), (*stride,)
    count = nbytes // row.itemsize if typed else nbytes
    args: tuple[Any, ...] = (refer(kind, count), offset, shape, stride, requires_grad, _hooks())
    if not typed:
        args += (Global("torch", row.name, 0),)
    if marks:
        lazy = Dict()
        lazy.items = [(mark, True) for mark in marks]
        args += (lazy,)
    return (rebuild.TENSOR_V2 if typed else rebuild.TENSOR_V3).call(*args)


def tensor_call(entry: TensorEntry, storages: References, *, untyped: bool = False) -> Call:
    """Return the rebuild call of a dense tensor or parameter, as torch.save writes it; `untyped` as in `dense_call`."""
    storage = entry.storage
    assert storage is not None
    call = dense_call(
        entry.dtype,
        storage.nbytes,
        lambda kind, count: storages.reference(kind, storage, count, entry.name),
        (entry.offset, entry.shape, entry.stride),
        requires_grad=entry.requires_grad and not entry.parameter,
        marks=list(entry.lazy),
        untyped=untyped,
    )
    return rebuild.PARAMETER.call(call, entry.requires_grad, _hooks()) if entry.parameter else call


def _hooks() -> Call:
    """Return an empty OrderedDict: every tensor is pickled with its own."""
    return Call(_ORDERED_DICT, (), "REDUCE", 0)


def _metadata(versions: Versions) -> Dict:
    """Return the state of an OrderedDict with this ``_metadata`` attribute."""
    rows = Call(_ORDERED_DICT, (), "REDUCE", 0)
    rows.items = [(path, _node_of_plain(own)) for path, own in versions.items()]
    state = Dict()
    state.items = [("_metadata", rows)]
    return state


def _node_of_plain(value: Any) -> Node:
    """Return the node for a plain value, such as the versions of a module."""
    return _node_of(value, {})


def _node_of(value: Any, made: dict[int, Node]) -> Node:
    if isinstance(value, bytes):
        return Call(Global("_codecs", "encode", 0), (value.decode("latin-1"), "latin1"), "REDUCE", 0)
    if not isinstance(value, Mapping | tuple | list | set | frozenset):
        return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
    if id(value) not in made:
        node: Node
        if isinstance(value, Mapping):
            node = Dict()
            node.items = [(_node_of(key, made), _node_of(part, made)) for key, part in value.items()]
        elif isinstance(value, set | frozenset):
            kind = Global("__builtin__", "frozenset" if isinstance(value, frozenset) else "set", 0)
            node = Call(kind, ([_node_of(part, made) for part in value],), "REDUCE", 0)
        else:
            parts = [_node_of(part, made) for part in value]
            node = tuple(parts) if isinstance(value, tuple) else parts
        made[id(value)] = node
    return made[id(value)]


def calls_of(checkpoint: Checkpoint, tensors: Iterable[tuple[str, Item]]) -> Calls | None:
    """Return the calls that rebuild these tensors of a checkpoint detached, as a state dict has them; None for none."""
    from ckptfix.formats.torch.tree import node_of

    nodes = {name: detached_call(node_of(item)) for name, item in tensors}
    parts = pickled_object(checkpoint)
    return Calls(parts.graph, parts.storages, nodes) if nodes else None


def _copied(node: Any, calls: Calls, storages: _Storages, done: dict[int, Any], where: str, depth: int = 0) -> Any:
    """Return `node` with references to the storages of the new file; shared nodes stay shared."""
    kind = type(node)
    if kind not in (tuple, list, Dict, Set, Call, PersId):
        return node
    if id(node) in done:
        return done[id(node)]
    if depth > MAX_PARTS:
        raise Unsupported("the parts of the tensor are nested too deeply", where=where)

    def copy(part: Any) -> Any:
        return _copied(part, calls, storages, done, where, depth + 1)

    made: Any
    if kind is PersId:
        made = _reference(node, calls, storages, where)
    elif kind is tuple or kind is list:
        made = kind(copy(part) for part in node)
    elif kind is Dict:
        made = Dict()
        made.items = [(copy(key), copy(value)) for key, value in node.items]
    elif kind is Set:
        made = Set(node.kind, [copy(part) for part in node.elements])
    else:
        made = Call(copy(node.func), copy(node.args), node.how, node.position, copy(node.kwargs))
        made.items = None if node.items is None else [(copy(key), copy(value)) for key, value in node.items]
        made.elements = None if node.elements is None else [copy(part) for part in node.elements]
        made.state = copy(node.state)
    done[id(node)] = made
    return made


def _reference(node: PersId, calls: Calls, storages: _Storages, where: str) -> PersId:
    try:
        storage = calls.storage_of(node)
    except BadTensor as error:
        error.where = where
        raise
    _, kind, _, _, count, *view = node.fields
    assert type(kind) is Global and type(count) is int
    if view and view[0] is not None:
        raise Unsupported("a tensor that is not dense has a storage view", where=where, offset=node.position)
    return storages.reference(kind, storage, count, where)
