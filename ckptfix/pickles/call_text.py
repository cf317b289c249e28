"""Calls of a pickle as text for a person: ``os.system('touch /tmp/x')``. Nothing is resolved, and the text is short."""

from __future__ import annotations

from ckptfix.errors import printable
from ckptfix.pickles.graph import Call, Dict, Global, Node, PersId, Set

MOST = 200
"""Most characters of a call's text; a hostile argument may have millions."""

_DEEPEST = 4
_WIDEST = 8

_KNOWN_AS = {"posix": "os", "nt": "os", "__builtin__": "builtins"}
"""Module that a pickle names -> the module under which its functions are documented."""


def call_text(call: Call, most: int = MOST) -> str:
    """Return the call with its arguments, escaped for a terminal and cut at `most` characters."""
    text = printable(_call(call, _DEEPEST, most))
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _call(call: Call, depth: int, most: int) -> str:
    args = call.peek()
    items = args if isinstance(args, tuple | list) else (args,)
    return f"{_text(call.func, depth, most)}({_listed(items, depth, most)})"


def _text(node: Node, depth: int, most: int) -> str:
    if isinstance(node, str):
        return repr(str(node[: most + 1]))
    if isinstance(node, bytes | bytearray):
        return repr(bytes(node[: most + 1]))
    if isinstance(node, Global):
        return f"{_KNOWN_AS.get(node.module, node.module)}.{node.name}"[: most + 1]
    if isinstance(node, int) and not isinstance(node, bool) and node.bit_length() > 128:
        return hex(node >> max(node.bit_length() - 128, 0)) + "..."
    if not isinstance(node, Call | Dict | Set | PersId | tuple | list):
        return repr(node)
    if depth == 0 or isinstance(node, PersId):
        return "..."
    if isinstance(node, Call):
        return _call(node, depth - 1, most)
    if isinstance(node, Dict):
        # Rows that are not nodes yet hold tensors; they are not read for a text.
        return "{...}" if node.rows is not None or node.items else "{}"
    elements = node.elements if isinstance(node, Set) else node
    left, right = ("[", "]") if isinstance(node, list) else ("(", ")") if isinstance(node, tuple) else ("{", "}")
    return f"{left}{_listed(elements, depth - 1, most)}{right}"


def _listed(nodes: tuple[Node, ...] | list[Node], depth: int, most: int) -> str:
    parts = [_text(node, depth, most) for node in nodes[:_WIDEST]]
    return ", ".join([*parts, *(["..."] if len(nodes) > _WIDEST else [])])
