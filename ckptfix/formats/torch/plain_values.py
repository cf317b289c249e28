"""Nodes of a pickle as plain values and text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from ckptfix.pickles import Call, Dict, Global, PersId, Set, Text
from ckptfix.pickles.graph import Node, label, pairs


def is_container(node: Node) -> bool:
    """Return whether `node` holds other nodes."""
    return type(node) in CONTAINERS


CONTAINERS = frozenset((tuple, list, Dict, Call, Set, PersId))


def described(node: Node) -> str:
    """Return the kind of a node: the function of a call, or the name of a type."""
    if type(node) is Call and type(node.func) is Global:
        return node.func.full
    return "dict" if type(node) is Dict else type(node).__name__


MAX_BITS = 4096
"""Longest int, in bits, that is shown in decimal; longer ones are hexadecimal.

Python converts no int of more than 4,300 digits to decimal text.
"""

MAX_NODES = 1000
"""Most arguments of a foreign object that are shown: shared nodes can unfold without end."""


def plain(node: Node) -> Node:
    """Return a leaf as a plain value: a foreign object becomes a string that names its class and arguments."""
    # A sequence of plain values is returned whole, because a comparison of values must see all of it.
    if type(node) is tuple:
        return tuple(_scalar(value) for value in node)
    if type(node) is list:
        return [_scalar(value) for value in node]
    return _scalar(node)


def _scalar(node: Node) -> Node:
    """Return a value that holds no other values unchanged, and everything else as text."""
    if type(node) is Text:
        return str(node)
    if type(node) is int and node.bit_length() > MAX_BITS:
        return hex(node)
    if type(node) in CONTAINERS or type(node) is Global:
        return "".join(_in_words(node, [MAX_NODES]))
    return node


def _in_words(node: Node, left: list[int], depth: int = 0) -> Iterator[str]:
    """Yield the pieces of a description of `node`; `left` is how many more nodes may be shown."""
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


MAX_DEPTH = 16
"""Deepest nesting of containers that `structured` keeps; anything deeper becomes text."""

_KEYS = (str, int, float, bytes, type(None))


def structured(node: Node) -> Any:
    """Return a value with its structure: mappings and sequences of plain values, of any depth.

    Other values are as in `plain`.
    """
    return _structured(node, 0, {})


def _structured(node: Node, depth: int, made: dict[int, Any]) -> Any:
    """Return the value for `structured`; `made` caches the results of nodes, so that sharing does not unfold."""
    kind = type(node)
    if kind not in CONTAINERS or depth > MAX_DEPTH:
        return plain(node)
    if id(node) in made:
        return made[id(node)]
    made[id(node)] = "..."  # shown where a cycle returns to this node
    rows = pairs(node)

    def inner(part: Node) -> Any:
        return _structured(part, depth + 1, made)

    value: Any
    if rows is not None:
        value = {key_of(key): inner(part) for key, part in rows}
    elif isinstance(node, (tuple, list)):
        parts = [inner(part) for part in node]
        value = tuple(parts) if isinstance(node, tuple) else parts
    elif (literal := encoded_bytes(node)) is not None:
        value = literal
    elif (elements := _elements(node)) is not None:
        value = elements
    else:
        value = plain(node)
    made[id(node)] = value
    return value


def encoded_bytes(node: Node) -> bytes | None:
    """Return the bytes of ``_codecs.encode(text, 'latin1')``, the form in which protocols before 3 write bytes."""
    if type(node) is Call and node.is_call_of("_codecs", "encode") and type(node.args) is tuple and len(node.args) == 2:
        text, encoding = node.args
        if type(text) is Text and encoding == "latin1":
            with suppress(UnicodeEncodeError):
                return text.encode("latin-1")
    return None


_SETS = {"set": set, "frozenset": frozenset}


def _elements(node: Node) -> Any:
    """Return a set of plain values, written as an opcode or, before protocol 4, as a call; None for any other node."""
    kind, parts = "", cast("Node", None)
    if type(node) is Set:
        kind, parts = node.kind, node.elements
    elif type(node) is Call and type(node.func) is Global and node.func.module in ("__builtin__", "builtins"):
        kind, parts = node.func.name, node.arguments[0] if len(node.arguments) == 1 else None
    if kind not in _SETS or type(parts) is not list or not all(isinstance(part, _KEYS) for part in parts):
        return None
    return _SETS[kind](map(key_of, parts))


def key_of(node: Node) -> Any:
    """Return a key of a mapping as a plain value; for an object, its label in addresses."""
    if type(node) is tuple and all(isinstance(part, _KEYS) for part in node):
        return tuple(map(key_of, node))
    return plain(node) if isinstance(node, _KEYS) else label(node)


def node_of(value: Any) -> Node:
    """Return the node for a value as `structured` returns it, or for any value of the same types."""
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


def versions_of(metadata: Node) -> dict[str, dict[str, Any]] | None:
    """Return the ``_metadata`` of a state dict: module path -> the entries of the module; None without metadata."""
    if metadata is None:
        return None
    made: dict[int, Any] = {}
    return {
        label(path): {label(key): _structured(value, 0, made) for key, value in pairs(own) or ()}
        for path, own in pairs(metadata) or ()
    }
