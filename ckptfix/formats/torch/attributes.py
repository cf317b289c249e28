"""Attributes, hooks and other state that a rebuilt tensor carries besides its data."""

from __future__ import annotations

from contextlib import suppress

from ckptfix.formats.torch import calls
from ckptfix.formats.torch.calls import Args
from ckptfix.formats.torch.state import apart, state_rows
from ckptfix.formats.torch.tensors import KINDS, BadTensor, is_old_tensor, is_tensor, is_wrapper, split_state
from ckptfix.pickles import Call, Dict, Global
from ckptfix.pickles.graph import Node, attributes


def tensor_attributes(node: Call) -> list[tuple[Node, Node]]:
    """Return the (name, value) pairs that ``torch.load`` sets as attributes on the tensor of a rebuild call."""
    row = calls.of(node.func)
    place = row.state if row is not None else None
    return [] if place is None or len(node.arguments) <= place else attributes(node.arguments[place])


MAX_AROUND = 16
"""Deepest nesting of calls around a tensor that is examined; anything deeper is listed as one value."""


def _takes_tensors(kind: str | None) -> bool:
    """Return whether calls of a kind build a tensor from other tensors, which may have attributes of their own."""
    own = KINDS.get(kind or "")
    return kind == "device" if own is None else own.from_tensors


def tensor_state(node: Node) -> list[tuple[str, Node]] | None:
    """Return the (name, value) attributes of a tensor, without those that are its parts; None without attributes."""
    return _state_of(node, 0, set())


def _state_of(node: Node, depth: int, seen: set[int]) -> list[tuple[str, Node]] | None:
    """Return the attributes of a tensor that is `depth` calls inside another.

    The ``id`` of each of its parts is added to `seen`.
    """
    if type(node) is not Call or type(node.func) is not Global:
        return None
    if node.folded is not None and node.state is None:
        return None  # a tensor without any attributes
    args = node.args
    if type(args) is not tuple:
        return None
    found: list[tuple[str, Node]] = []
    row = calls.of(node.func)
    place = row.state if row is not None else None
    if place is not None and len(args) > place:
        cls = args[1] if type(args[1]) is Global else None
        found = state_rows(cls, args[place])
        if row is calls.FROM_TYPE:
            found = _beside_parts(args, found, depth, seen)
    if row is not None and row.kind == "parameter" and args and is_tensor(args[0]):
        # The attributes of the tensor inside are listed as those of the parameter.
        found = apart([*found, *_below(args[0], depth, seen)])
    elif row is not None and _takes_tensors(row.kind):
        with suppress(BadTensor):
            found = apart([*found, *_of_parts(split_state([("args", args)])[0], depth, seen)])
    if not is_old_tensor(node) and node.state is not None:
        found = apart([*found, *state_rows(None, node.state)])
    return [*found, *_apart_from_data(row, args)] or None


def _below(node: Node, depth: int, seen: set[int]) -> list[tuple[str, Node]]:
    """Return the attributes of a tensor inside another; the tensor itself if it is too deep to be examined."""
    return [("()inner", node)] if depth > MAX_AROUND else _state_of(node, depth + 1, seen) or []


def _beside_parts(
    args: Args, rows: list[tuple[str, Node]], depth: int, seen: set[int]
) -> list[tuple[str, Node]]:
    """Return the entries of the state of ``_rebuild_from_type_v2(*args)`` that are not parts of its tensor."""
    func, inner_args = args[0], args[2]
    inner = Call(func, inner_args, "REDUCE", 0)
    if is_tensor(inner) and not is_wrapper(func):
        return apart([*rows, *_below(inner, depth, seen)])
    try:
        parts, rest = split_state(rows if is_tensor(inner) else [("args", inner_args), *rows])
    except BadTensor:
        return [("args", inner_args), *rows]
    return apart([*rest, *_of_parts(parts, depth, seen)])


def _of_parts(parts: list[tuple[str, Node]], depth: int, seen: set[int]) -> list[tuple[str, Node]]:
    """Return the attributes of part tensors, under the names of the parts; a repeated tensor is listed once."""
    found: list[tuple[str, Node]] = []
    for part, node in parts:
        if id(node) not in seen:
            seen.add(id(node))
            found += ((f"{part}.{name}", value) for name, value in _below(node, depth, seen))
    return found


def _apart_from_data(row: calls.RebuildCall | None, args: Args) -> list[tuple[str, Node]]:
    """Return the arguments of a rebuild call that may hold values besides the tensor's data: hooks, an array."""
    if row is None:
        return []
    if row.hooks is not None and len(args) > row.hooks:
        hooks = args[row.hooks]
        if type(hooks) is Call:
            empty = not (hooks.items or hooks.elements or hooks.state or hooks.args)
        else:
            empty = hooks is None or (type(hooks) is Dict and not hooks.items)
        return [] if empty else [("()hooks", hooks)]
    if row.kind == "device" and args and not is_tensor(args[0]):
        return [("()data", args[0])]
    return []
