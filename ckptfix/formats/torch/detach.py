"""Detached tensors, as ``state_dict()`` returns them: ``Tensor.detach()`` for rebuild calls and entries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckptfix.checkpoint import TensorEntry
from ckptfix.formats.torch import calls
from ckptfix.pickles import Call, Global


def detached_entry(entry: TensorEntry, name: str) -> TensorEntry:
    """Return `entry` under `name`, as a plain tensor without gradient."""
    return replace(entry, key=name, at="", requires_grad=False, parameter=False)


def detached_call(node: Any) -> Any:
    """Return the call that rebuilds the tensor of `node` detached; a parameter becomes the tensor in it."""
    row = calls.of(node.func) if type(node) is Call else None
    while row is not None and row.kind == "parameter":
        if not node.arguments:
            return node
        node = node.arguments[0]
        row = calls.of(node.func) if type(node) is Call else None
    if row is None or type(node.args) is not tuple:
        return node
    if row is calls.FROM_TYPE and len(node.args) > 3 and type(node.args[2]) is tuple:
        func, cls, args, state = node.args[:4]
        inner = detached_call(Call(func, args, "REDUCE", node.position))
        if type(inner) is not Call:
            return node
        if type(cls) is Global and cls.full == "torch.nn.parameter.Parameter":
            return inner
        return Call(node.func, (inner.func, cls, inner.args, state), "REDUCE", node.position)
    place = row.requires_grad
    if place is None or len(node.args) <= place:
        return node
    args = (*node.args[:place], False, *node.args[place + 1 :])
    return Call(node.func, args, node.how, node.position)
