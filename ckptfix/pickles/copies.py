"""Copies of nodes: parts of pickles that become an object of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckptfix.errors import Unsupported
from ckptfix.pickles.graph import Call, Dict, Global, Node, PersId, Set, Text, new_text
from ckptfix.pickles.new_tensors import NewTensorArguments

MAX_TUPLES = 200
"""The limit of the depth of nested tuples; real programs nest only a few."""


def grafted(
    root: Node,
    reference: Callable[[PersId], tuple[Node, ...] | None],
    replaced: Mapping[int, Node] | None = None,
    instead: Mapping[int, Node] | None = None,
    *,
    text: Callable[[str], Text] = new_text,
) -> Node:
    """Return a copy of `root` whose strings no longer refer to another pickle, and with one node for equal globals.

    Args:
        reference: a reference to a storage -> its new fields, or None to keep its fields.
        replaced: ``id`` of nodes -> the nodes that replace them, as they are.
        instead: ``id`` of nodes -> the nodes that are copied in their place.
        text: returns the new use of a string.

    Raises:
        Unsupported: tuples are nested too deeply.
    """
    made: dict[int, Node] = dict(replaced or {})
    instead = instead or {}
    kept: list[Node] = []
    names: dict[tuple[str, str], Global] = {}
    unfilled: list[tuple[Node, Node]] = []

    def copy(node: Node, depth: int = 0) -> Node:
        if instead:
            node = instead.get(id(node), node)
        kind = type(node)
        if isinstance(node, str):
            return text(node)
        if type(node) is Global:
            return names.setdefault((node.module, node.name), node)
        if kind not in _HOLDERS:
            return node
        if id(node) in made:
            return made[id(node)]
        new: Node
        if isinstance(node, tuple):
            if depth > MAX_TUPLES:
                raise Unsupported("the object has tuples nested too deeply")
            new = tuple(copy(part, depth + 1) for part in node)
        elif type(node) is Call and node.folded is not None:
            new = _refolded(node, reference)
            unfilled.append((node, new))
        else:
            new = _empty(node)
            unfilled.append((node, new))
        made[id(node)] = new
        kept.append(node)
        return new

    top = copy(root)
    while unfilled:
        node, new = unfilled.pop()
        if isinstance(node, list) and isinstance(new, list):
            new += [copy(part) for part in node]
        elif isinstance(node, Dict) and isinstance(new, Dict):
            new.items = [(copy(key), copy(value)) for key, value in node.items]
        elif isinstance(node, Set) and isinstance(new, Set):
            new.elements = [copy(part) for part in node.elements]
        elif isinstance(node, PersId) and isinstance(new, PersId):
            fields = reference(node)
            new.pid = copy(node.pid) if fields is None else tuple(copy(field) for field in fields)
        elif isinstance(node, Call) and isinstance(new, Call):
            if new.folded is None:
                new.func, new.args, new.kwargs = map(copy, (node.func, node.args, node.kwargs))
            new.state = copy(node.state)
            new.items = None if node.items is None else [(copy(key), copy(value)) for key, value in node.items]
            new.elements = None if node.elements is None else [copy(part) for part in node.elements]
    return top


_HOLDERS = frozenset((tuple, list, Dict, Set, Call, PersId))


def _refolded(node: Call, reference: Callable[[PersId], tuple[Node, ...] | None]) -> Call:
    """Return a copy of a call that rebuilds a plain tensor, without making nodes of its arguments."""
    assert node.folded is not None
    made = node.folded.plain(node)
    assert isinstance(made, NewTensorArguments)
    fields = reference(made.reference())
    if fields is not None:
        key, location = str(fields[2]), str(fields[3])
        layout = made.offset, made.shape, made.stride
        made = NewTensorArguments(_global(fields[1]), key, location, made.numel, layout, made.requires_grad, made.hooks)
    return Call.folded_at(node.func, node.position, made)


def _global(node: Node) -> Global:
    assert type(node) is Global
    return node


def _empty(node: Node) -> Node:
    if isinstance(node, Set):
        return Set(node.kind, [])
    if isinstance(node, PersId):
        return PersId(None, 0, -1)
    if isinstance(node, Call):
        return Call(None, (), node.how, node.position)
    return Dict() if isinstance(node, Dict) else []
