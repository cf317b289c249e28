"""What a rebuilt tensor carries beside its data: attributes, hooks, and state of a subclass that is not part of it."""

from __future__ import annotations

from ckptfix.formats.torch.state import apart, state_rows
from ckptfix.formats.torch.tensors import Args, BadTensor, is_old_tensor, is_tensor, is_wrapper, split_state
from ckptfix.pickles import Call, Dict, Global
from ckptfix.pickles.graph import Node, attributes

_STATE_AT = {
    ("torch._tensor", "_rebuild_from_type_v2"): 3,
    ("torch._utils", "_rebuild_parameter_with_state"): 3,
}

_AROUND = ("_rebuild_parameter", "_rebuild_parameter_with_state")
"""Calls around another tensor, whose attributes are listed as their own."""

_HOOKS_AT = {"_rebuild_tensor_v2": 5, "_rebuild_tensor_v3": 5, "_rebuild_qtensor": 6, "_rebuild_parameter": 2}
"""Argument index of the hooks in rebuild calls: a dict, and empty in every file that torch itself wrote."""


def tensor_attributes(node: Call) -> list[tuple[Node, Node]]:
    """The (name, value) pairs that ``torch.load`` sets as attributes on the tensor of a rebuild call."""
    func = node.func
    place = _STATE_AT.get((func.module, func.name)) if type(func) is Global else None
    return [] if place is None or len(node.arguments) <= place else attributes(node.arguments[place])


MAX_AROUND = 16
"""Calls around calls around a tensor that are looked through; what is deeper is listed as one value."""


def tensor_state(node: Node, depth: int = 0) -> list[tuple[str, Node]] | None:
    """The (name, value) attributes that a tensor carries, without those that are its parts; None if it has none."""
    if type(node) is not Call or type(node.func) is not Global or type(node.args) is not tuple:
        return None
    args = node.args
    found: list[tuple[str, Node]] = []
    place = _STATE_AT.get((node.func.module, node.func.name))
    if place is not None and len(args) > place:
        cls = args[1] if place == 3 and type(args[1]) is Global else None
        found = state_rows(cls, args[place])
        if node.func.name == "_rebuild_from_type_v2":
            found = _beside_parts(args, found, depth)
    if node.func.name in _AROUND and args and is_tensor(args[0]):
        found = apart([*found, *_below(args[0], depth)])
    if not is_old_tensor(node) and node.state is not None:
        found = apart([*found, *state_rows(None, node.state)])
    return [*found, *_apart_from_data(node)] or None


def _below(node: Node, depth: int) -> list[tuple[str, Node]]:
    return [("()inner", node)] if depth > MAX_AROUND else tensor_state(node, depth + 1) or []


def _beside_parts(args: Args, rows: list[tuple[str, Node]], depth: int) -> list[tuple[str, Node]]:
    """What in the state of ``_rebuild_from_type_v2(*args)`` is not part of its tensor."""
    func, inner_args = args[0], args[2]
    inner = Call(func, inner_args, "REDUCE", 0)
    try:
        if not is_tensor(inner):
            return split_state([("args", inner_args), *rows])[1]
        if is_wrapper(func):
            return split_state(rows)[1]
    except BadTensor:
        return [("args", inner_args), *rows]
    return apart([*rows, *_below(inner, depth)])


def _apart_from_data(node: Call) -> list[tuple[str, Node]]:
    """Arguments of a rebuild call that are not the tensor's data and yet may hold some: hooks, an array."""
    name = node.func.name if type(node.func) is Global else ""
    args = node.arguments
    place = _HOOKS_AT.get(name)
    if place is not None and len(args) > place:
        hooks = args[place]
        if type(hooks) is Call:
            empty = not (hooks.items or hooks.elements or hooks.state or hooks.args)
        else:
            empty = hooks is None or (type(hooks) is Dict and not hooks.items)
        return [] if empty else [("()hooks", hooks)]
    if name.startswith("_rebuild_device_tensor") and args and not is_tensor(args[0]):
        return [("()data", args[0])]
    return []
