"""NumPy arrays in a pickle, where other programs keep the weights of a model: ``{"model": {name: array}}``."""

from __future__ import annotations

from collections.abc import Iterator

from ckptfix.checkpoint.address import join
from ckptfix.formats.torch.tensors import is_tensor
from ckptfix.formats.torch.weights_only import canonical
from ckptfix.pickles import Call, Dict, Global
from ckptfix.pickles.graph import Node, children, pairs

_MAKERS = frozenset(("multiarray._reconstruct", "numeric._frombuffer"))
"""What makes an array of its bytes: functions of ``numpy.core``, which NumPy 2 calls ``numpy._core``."""

_HOLDERS = (tuple, list, Dict, Call)

MOST = 1 << 20
"""Nodes that are looked at."""


def named_arrays(root: Node) -> Iterator[tuple[str, int]]:
    """(address, how many) of each mapping that holds arrays of floating-point numbers by name."""
    stack: list[tuple[str, Node]] = [("", root)]
    seen: set[int] = set()
    while stack and len(seen) < MOST:
        at, node = stack.pop()
        if type(node) not in _HOLDERS or id(node) in seen or is_tensor(node) or _is_array(node):
            continue
        seen.add(id(node))
        named = [value for key, value in pairs(node) or () if isinstance(key, str)]
        count = sum(_is_array(value) and _has_numbers(value) for value in named)
        if count:
            yield at, count
        stack += [(join(at, name), child) for name, child in reversed(list(children(node)))]


def _is_array(node: Node) -> bool:
    if type(node) is not Call or type(node.func) is not Global:
        return False
    front, _, name = canonical(node.func).partition("core.")
    return front in ("numpy.", "numpy._") and name in _MAKERS


def _has_numbers(node: Node) -> bool:
    """Whether the dtype of an array is one of real or complex numbers, or one of another package, as bfloat16."""
    assert type(node) is Call
    state = node.state if type(node.state) is tuple else ()
    for part in (*node.arguments, *state):
        if type(part) is Call and type(part.func) is Global and canonical(part.func) == "numpy.dtype":
            code = part.arguments[0] if part.arguments else None
            return type(code) is Global or (isinstance(code, str) and code.lstrip("<>=|")[:1] in ("f", "c"))
    return False
