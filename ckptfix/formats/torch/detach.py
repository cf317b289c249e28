"""Tensors as ``state_dict()`` gives them: what ``Tensor.detach()`` leaves of a rebuild call and of an entry."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ckptfix.checkpoint import TensorEntry
from ckptfix.pickles import Call, Global

_GRAD_AT = {
    "_rebuild_tensor_v2": 4,
    "_rebuild_tensor_v3": 4,
    "_rebuild_qtensor": 5,
    "_rebuild_meta_tensor_no_storage": 3,
    "_rebuild_wrapper_subclass": 7,
    "_rebuild_device_tensor_from_numpy": 3,
    "_rebuild_device_tensor_from_cpu_tensor": 3,
}
"""Argument index of ``requires_grad`` in rebuild calls (torch/_utils.py)."""

_PARAMETERS = frozenset(("_rebuild_parameter", "_rebuild_parameter_with_state"))


def detached_entry(entry: TensorEntry, name: str) -> TensorEntry:
    """`entry` under `name`, no parameter and without gradient."""
    return replace(entry, key=name, at="", requires_grad=False, parameter=False)


def detached_call(node: Any) -> Any:
    """The call that rebuilds the tensor of `node` detached; a parameter becomes the tensor in it."""
    while type(node) is Call and type(node.func) is Global and node.func.name in _PARAMETERS:
        if not node.arguments:
            return node
        node = node.arguments[0]
    if type(node) is not Call or type(node.func) is not Global or type(node.args) is not tuple:
        return node
    name = node.func.name
    if name == "_rebuild_from_type_v2" and len(node.args) > 3 and type(node.args[2]) is tuple:
        func, cls, args, state = node.args[:4]
        inner = detached_call(Call(func, args, "REDUCE", node.position))
        if type(inner) is not Call:
            return node
        if type(cls) is Global and cls.full == "torch.nn.parameter.Parameter":
            return inner
        return Call(node.func, (inner.func, cls, inner.args, state), "REDUCE", node.position)
    place = _GRAD_AT.get(name)
    if place is None or len(node.args) <= place:
        return node
    args = (*node.args[:place], False, *node.args[place + 1 :])
    return Call(node.func, args, node.how, node.position)
