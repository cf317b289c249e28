"""The tree of values in a pickled object: each class here reads one kind of node, and only when code asks.

Nothing is copied and nothing is kept: a view holds a node and the storages of its file, and a leaf is the node itself.
Text knows the bytes that push it (`pickles.graph.Text`), so an edit can still replace them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, cast

from ckptfix.checkpoint import TensorEntry, tree
from ckptfix.checkpoint.tree import Item, Pairs
from ckptfix.formats.torch import calls, weights_only
from ckptfix.formats.torch.attributes import tensor_attributes
from ckptfix.formats.torch.call_classes import class_of, encoded_bytes
from ckptfix.formats.torch.state import fields
from ckptfix.formats.torch.tensors import StorageOf, is_tensor, sizes, storage_entry, tensor_entry
from ckptfix.pickles import Call, Dict, Global, PersId, Set, graph
from ckptfix.pickles.graph import Node
from ckptfix.pickles.places import NodesByAddress


def value_of(node: Node, storages: StorageOf | None = None) -> Item:
    """Return the item of `node`; `storages` is only needed to ask a tensor for its entry."""
    kind = type(node)
    if kind is Call:
        call = cast("Call", node)
        return _Tensor(call, storages) if is_tensor(call) else _Object(call, storages)
    view = _VIEWS.get(kind)
    return view(node, storages) if view is not None else cast("Item", node)


def node_of(item: Item | Node) -> Node:
    """Return the node of `item`: the inverse of `value_of`. A node is returned unchanged."""
    return item.node if isinstance(item, _View) else cast("Node", item)


def like(item: Item | Node, node: Node) -> Item:
    """Return the item of `node`, in the file of `item`."""
    return value_of(node, item.storages if isinstance(item, _View) else None)


def sizes_of(item: Item) -> tuple[int, ...]:
    """Return a shape: a tuple of sizes, or a ``torch.Size``. Raises BadTensor for anything else."""
    return sizes(node_of(item))


class _View:
    """A view of a node."""

    __slots__ = ("node", "storages")
    node: Node
    storages: StorageOf | None

    def __init__(self, node: Node, storages: StorageOf | None) -> None:
        self.node = node
        self.storages = storages

    @property
    def identity(self) -> int:
        return id(self.node)

    @property
    def offset(self) -> int | None:
        return getattr(self.node, "position", None)

    @property
    def label(self) -> str:
        return graph.label(self.node)

    @property
    def fields(self) -> Mapping[str, Item]:
        return _Fields(fields(self.node), self.storages)

    def children(self) -> Iterator[tuple[str, Item]]:
        storages = self.storages
        return ((name, value_of(child, storages)) for name, child in graph.children(self.node))

    def parts(self) -> Iterable[Item]:
        from ckptfix.pickles.reemit import children_to_write

        return self._all(children_to_write(self.node))

    def _all(self, nodes: Iterable[Node]) -> list[Item]:
        storages = self.storages
        return [value_of(node, storages) for node in nodes]

    def _pairs(self, rows: Iterable[tuple[Node, Node]] | None) -> Pairs | None:
        if rows is None:
            return None
        storages = self.storages
        return [(value_of(key, storages), value_of(node, storages)) for key, node in rows]


class _Fields(Mapping[str, Item]):
    """The fields of a value: an item is created when code asks for it."""

    __slots__ = ("_nodes", "_storages")

    def __init__(self, nodes: Mapping[str, Node], storages: StorageOf | None) -> None:
        self._nodes = nodes
        self._storages = storages

    def __getitem__(self, name: str) -> Item:
        return value_of(self._nodes[name], self._storages)

    def __contains__(self, name: object) -> bool:
        return name in self._nodes

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)


class _List(_View, tree.ListValue):
    __slots__ = ()

    @property
    def kind(self) -> Literal["list", "tuple", "set", "frozenset"]:
        if type(self.node) is Set:
            return self.node.kind
        return "tuple" if type(self.node) is tuple else "list"

    @property
    def count(self) -> int:
        return len(self._nodes())

    def __iter__(self) -> Iterator[Item]:
        storages = self.storages
        return (value_of(node, storages) for node in self._nodes())

    def _nodes(self) -> Sequence[Node]:
        return self.node.elements if type(self.node) is Set else cast("Sequence[Node]", self.node)


class _Map(_View, tree.MapValue):
    __slots__ = ()
    node: Dict

    @property
    def pairs(self) -> Pairs:
        return self._pairs(graph.pairs(self.node)) or ()

    def written(self) -> Iterator[tuple[Item, Item]]:
        storages = self.storages
        return ((value_of(key, storages), value_of(node, storages)) for key, node in self.node.items)


class _Name(_View, tree.NameValue):
    __slots__ = ()
    node: Global

    @property
    def offset(self) -> int | None:
        return self.node.start

    @property
    def module(self) -> str:
        return self.node.module

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def canonical(self) -> str:
        return weights_only.canonical(self.node)


class _Object(_View, tree.ObjectValue):
    __slots__ = ()
    node: Call

    @property
    def maker(self) -> Item:
        return value_of(self.node.func, self.storages)

    @property
    def args(self) -> Item:
        return value_of(self.node.args, self.storages)

    @property
    def arguments(self) -> Sequence[Item]:
        return self._all(self.node.arguments)

    @property
    def kwargs(self) -> Item:
        return value_of(self.node.kwargs, self.storages)

    @property
    def pairs(self) -> Pairs | None:
        return self._pairs(graph.pairs(self.node))

    @property
    def items(self) -> Pairs | None:
        return self._pairs(self.node.items)

    @property
    def elements(self) -> Sequence[Item] | None:
        return None if self.node.elements is None else self._all(self.node.elements)

    @property
    def state(self) -> Item:
        return value_of(self.node.state, self.storages)

    @property
    def attributes(self) -> Pairs:
        return self._pairs(graph.attributes(self.node.state)) or ()

    @property
    def payload(self) -> frozenset[int]:
        return graph.payload_of(self.node)

    @property
    def encoded(self) -> bytes | None:
        return encoded_bytes(self.node)

    @property
    def cls(self) -> tree.NameValue | None:
        found = class_of(self.node)
        return None if found is None else _Name(found, None)


class _Tensor(_View, tree.TensorValue):
    __slots__ = ()
    node: Call

    def entry(self, key: str, at: str) -> TensorEntry:
        assert self.storages is not None
        return tensor_entry(self.node, key, at, self.storages)

    @property
    def call(self) -> tree.ObjectValue:
        return _Object(self.node, self.storages)

    @property
    def cls(self) -> tree.NameValue | None:
        row = calls.of(self.node.func)
        place = None if row is None else {"subclass": 1, "wrapper": 0}.get(row.kind or "")
        given = self.node.arguments if place is not None else ()
        cls = given[place] if place is not None and len(given) > place else None
        return _Name(cls, None) if type(cls) is Global else None

    @property
    def is_plain(self) -> bool:
        node = self.node
        return node.folded is not None and node.items is node.elements is node.state is None

    @property
    def by_torch(self) -> bool:
        row = calls.of(self.node.func)
        inner = self.node.arguments[0] if row is calls.FROM_TYPE and self.node.arguments else None
        if type(inner) is Global:
            row = calls.of(inner)
            return row is not None and row.kind is not None and row.torch_alone
        return row is None or row.torch_alone

    def children(self) -> Iterator[tuple[str, Item]]:
        return tree.TensorValue.children(self)

    @property
    def attributes(self) -> Pairs:
        if self.node.folded is not None and self.node.state is None:
            return ()  # its arguments need not become nodes to see that
        return self._pairs(tensor_attributes(self.node)) or ()


class _Storage(_View, tree.StorageValue):
    __slots__ = ()
    node: PersId

    @property
    def untyped(self) -> bool:
        return getattr(self.node.fields[1], "name", "") == "UntypedStorage"

    def entry(self, key: str, at: str) -> TensorEntry:
        assert self.storages is not None
        return storage_entry(self.node, key, at, self.storages)


class _Reference(_View, tree.ReferenceValue):
    __slots__ = ()
    node: PersId

    @property
    def target(self) -> Item:
        return value_of(self.node.pid, self.storages)


def _of_persid(node: PersId, storages: StorageOf | None) -> Item:
    is_storage = len(node.fields) >= 5 and node.fields[0] == "storage"
    return _Storage(node, storages) if is_storage else _Reference(node, storages)


_VIEWS: dict[type, Callable[..., Item]] = {
    tuple: _List,
    list: _List,
    Set: _List,
    Dict: _Map,
    Global: _Name,
    PersId: _of_persid,
}


class PickledTree(tree.ValueTree):
    """The tree of a pickled object.

    Args:
        known: the nodes that the walk of the object found, by the addresses that it gave them.
    """

    __slots__ = ("_find", "_root", "_storages")

    def __init__(self, root: Node, storages: StorageOf, known: Mapping[str, Node]) -> None:
        self._root = root
        self._storages = storages
        self._find = NodesByAddress(root, known)

    @property
    def root(self) -> Item:
        return value_of(self._root, self._storages)

    def at(self, address: str) -> Item:
        return value_of(self._find(address), self._storages)
