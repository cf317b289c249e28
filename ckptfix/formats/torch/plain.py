"""Nodes of a pickle as plain values and text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptfix.pickles import Call, Dict, Global, PersId, Set, Text
from ckptfix.pickles.graph import Node


def is_container(node: Node) -> bool:
    return type(node) in CONTAINERS


CONTAINERS = frozenset((tuple, list, Dict, Call, Set, PersId))


def described(node: Node) -> str:
    if type(node) is Call and type(node.func) is Global:
        return node.func.full
    return "dict" if type(node) is Dict else type(node).__name__


MAX_BITS = 4096
"""Python turns no int of more than 4,300 digits into text; beyond this, hexadecimal stands for it."""

MAX_NODES = 1000
"""How much of a foreign object's arguments is shown: nodes may be shared so that they unfold without end."""


def plain(node: Node) -> Node:
    """A leaf as a plain value: a foreign object becomes a string that names its class and arguments."""
    # A sequence that is a value itself is given whole: a comparison of values must see all of it.
    if type(node) is tuple:
        return tuple(_scalar(value) for value in node)
    if type(node) is list:
        return [_scalar(value) for value in node]
    return _scalar(node)


def _scalar(node: Node) -> Node:
    """A value that holds no others as itself, everything else as a text."""
    if type(node) is Text:
        return str(node)
    if type(node) is int and node.bit_length() > MAX_BITS:
        return hex(node)
    if type(node) in CONTAINERS or type(node) is Global:
        return "".join(_in_words(node, [MAX_NODES]))
    return node


def _in_words(node: Node, left: list[int], depth: int = 0) -> Iterator[str]:
    """`node` in words, in pieces; `left` is how many more nodes may be shown."""
    left[0] -= 1
    if left[0] < 0 or depth > 4:
        yield "..."
    elif type(node) is Global:
        yield f"<{node.full}>"
    elif type(node) is PersId:
        yield "<persistent id>"
    elif type(node) is Call:
        yield f"<{described(node)}("
        yield from _listed(node.arguments, left, depth)
        yield ")>"
    elif isinstance(node, (tuple, list)):
        yield "(" if isinstance(node, tuple) else "["
        yield from _listed(node, left, depth)
        yield ")" if isinstance(node, tuple) else "]"
    elif type(node) is Dict:
        yield "{"
        yield from _listed([part for pair in node.items[: max(left[0], 0)] for part in pair], left, depth)
        yield "}"
    elif type(node) is Set:
        yield f"<{node.kind} of {len(node.elements)}>"
    else:
        text = repr(_scalar(node))
        yield text if len(text) <= 80 else text[:77] + "..."


def _listed(nodes: Sequence[Node], left: list[int], depth: int) -> Iterator[str]:
    for index, node in enumerate(nodes):
        if left[0] < 0:
            return
        if index:
            yield ", "
        yield from _in_words(node, left, depth + 1)
