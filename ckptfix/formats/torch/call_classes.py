"""Names of the classes and functions of calls in a pickle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from ckptfix.checkpoint.address import join, keys_of
from ckptfix.formats.torch import weights_only
from ckptfix.pickles import Call, Dict, Global, PersId, Text
from ckptfix.pickles.graph import Node, children, pairs

RECONSTRUCT = "copyreg._reconstructor"
NEW = ("copyreg.__newobj__", "copyreg.__newobj_ex__")


PARAMETER, BUFFER = "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"


def is_tensor_class(node: Node) -> bool:
    """Return whether calling `node`, a class of torch, creates a tensor: ``torch.Tensor``, ``torch.nn.Parameter``."""
    if type(node) is not Global:
        return False
    return node.full in (PARAMETER, BUFFER) or (
        node.module in ("torch", "torch.cuda", "torch._tensor") and node.name.endswith("Tensor")
    )


UNINITIALIZED = ("torch.nn.parameter.UninitializedParameter", "torch.nn.parameter.UninitializedBuffer")
"""Classes that take the place of a lazy module's tensors before it has seen an input."""


def class_of(call: Call) -> Global | None:
    """Return the class or function of a call, also if a legacy file stores its source with it."""
    func = _named(call.func)
    if type(func) is PersId and type(func.pid) is tuple and len(func.pid) == 4 and func.pid[0] == "module":
        func = func.pid[1]
    if type(func) is not Global:
        return None
    if weights_only.canonical(func) in (RECONSTRUCT, *NEW) and type(call.args) is tuple and call.args:
        inner = _named(call.args[0])
        if type(inner) is PersId and type(inner.pid) is tuple and len(inner.pid) == 4:
            inner = inner.pid[1]
        return inner if type(inner) is Global else None
    return func


def _named(func: Any) -> Any:
    """Return ``Outer.Inner`` for ``getattr(Outer, 'Inner')``, which is how protocols before 4 write inner classes."""
    if (type(func) is Call and func.is_call_of("__builtin__", "getattr")) or (
        type(func) is Call and func.is_call_of("builtins", "getattr")
    ):
        args = func.args
        if type(args) is tuple and len(args) == 2 and type(args[0]) is Global and isinstance(args[1], str):
            return Global(args[0].module, f"{args[0].name}.{args[1]}", func.position)
    return func


def class_name(call: Call) -> str | None:
    """Return ``module.Name`` of a call's class or function; None if it is computed."""
    found = class_of(call)
    return None if found is None else weights_only.canonical(found)


def encoded_bytes(node: Node) -> bytes | None:
    """Return the bytes of ``_codecs.encode(text, 'latin1')``, the form in which protocols before 3 write bytes."""
    if type(node) is Call and node.is_call_of("_codecs", "encode") and type(node.args) is tuple and len(node.args) == 2:
        text, encoding = node.args
        if type(text) is Text and encoding == "latin1":
            with suppress(UnicodeEncodeError):
                return text.encode("latin-1")
    return None


_MAKERS = frozenset(("multiarray._reconstruct", "numeric._frombuffer"))
"""Functions of ``numpy.core`` (``numpy._core`` in NumPy 2) that create an array from its bytes."""

_HOLDERS = (tuple, list, Dict, Call)

_MOST, _DEEPEST = 1 << 20, 16
"""Most nodes that are searched for arrays, and their deepest nesting."""


def named_arrays(root: Node) -> Iterator[tuple[str, int]]:
    """Yield (address, number) of each mapping that holds NumPy arrays of floating-point numbers by name.

    Programs that do not use torch keep the weights of a model this way: ``{"model": {name: array}}``.
    """
    stack: list[tuple[str, Node]] = [("", root)]
    seen: set[int] = set()
    while stack and len(seen) < _MOST:
        at, node = stack.pop()
        if type(node) not in _HOLDERS or id(node) in seen or _is_array(node):
            continue
        seen.add(id(node))
        named = [value for key, value in pairs(node) or () if isinstance(key, str)]
        count = sum(_is_array(value) and _has_numbers(value) for value in named)
        if count:
            yield at, count
        if len(keys_of(at)) < _DEEPEST:
            stack += [(join(at, name), child) for name, child in reversed(list(children(node)))]


def _is_array(node: Node) -> bool:
    if type(node) is not Call or type(node.func) is not Global:
        return False
    front, _, name = weights_only.canonical(node.func).partition("core.")
    return front in ("numpy.", "numpy._") and name in _MAKERS


def _has_numbers(node: Node) -> bool:
    """Return whether the dtype of an array is real or complex, or comes from a different package, like bfloat16."""
    assert type(node) is Call
    state = node.state if type(node.state) is tuple else ()
    for part in (*node.arguments, *state):
        if type(part) is Call and type(part.func) is Global and weights_only.canonical(part.func) == "numpy.dtype":
            code = part.arguments[0] if part.arguments else None
            return type(code) is Global or (isinstance(code, str) and code.lstrip("<>=|")[:1] in ("f", "c"))
    return False
