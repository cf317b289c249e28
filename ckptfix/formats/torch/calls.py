"""Torch's rebuild calls: one table of their names, the positions of their arguments, and the kind of tensor of each.

A kind of tensor is a row, too: all that distinguishes it from a dense one. The rows are `KINDS` in
`formats.torch.tensors`. No row says what all kinds but dense have in common: their parts are dense tensors, which are
listed, compared, hashed and copied one by one, and a format that only holds dense tensors refuses them.

Sources: torch/_utils.py (``_rebuild_*``), torch/_tensor.py (``_reduce_ex_internal`` and ``_rebuild_from_type_v2``);
argument orders checked against torch 2.13. No value of `since` was run against an old torch: each row names the
source of the fact. If a thread shows only that one version has a name and an earlier one lacks it, the later version
counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ckptfix.checkpoint import Storage, TensorEntry
from ckptfix.dataclass import dataclass
from ckptfix.pickles import Call, Global, PersId
from ckptfix.pickles.graph import Node

Number = tuple[int, int]
"""A version of torch: major, minor."""

UNSTATED = "no public statement of the version was found; this is the version of the feature it serves, or a later one"
_UTILS, _TENSOR = "torch._utils", "torch._tensor"


@dataclass(frozen=True, slots=True)
class RebuildCall:
    """A function of torch that creates a tensor. The numbers are argument indices; None if the call lacks the argument.

    Attributes:
        module, name: of the function.
        kind: a `TensorKind`; or ``"parameter"``, ``"subclass"`` or ``"device"``, for a call that takes a
            tensor of any kind; None for a known call that is not read as a tensor.
        since: the torch version with which it appeared; `source` is the source of that fact.
        accepted: ``weights_only=True`` accepts it.
        older: the name of its form in earlier versions.
        storage, offset, size, stride: the elements.
        dtype, device: the dtype and the device, if the call states them.
        requires_grad, hooks: of the tensor; a dict of hooks is empty in every file that torch itself wrote.
        marks: the dict of conjugate and negative views, which only newer versions of torch write.
        tensor: the inner tensor.
        state: attributes that are set on the result.
        takes: the fewest and the most arguments that it accepts; None if they are not known.
        torch_alone: torch's own functions create the tensor, without the class or the device that the call names.
    """

    module: str
    name: str
    kind: str | None
    since: Number | None
    source: str = UNSTATED
    accepted: bool = True
    older: str | None = None
    storage: int | None = None
    offset: int | None = None
    size: int | None = None
    stride: int | None = None
    dtype: int | None = None
    device: int | None = None
    requires_grad: int | None = None
    hooks: int | None = None
    marks: int | None = None
    tensor: int | None = None
    state: int | None = None
    takes: tuple[int, int] | None = None
    torch_alone: bool = True

    @property
    def full(self) -> str:
        """The dotted name of the function."""
        return f"{self.module}.{self.name}"

    @property
    def on_storage(self) -> bool:
        """True if the arguments begin with storage, offset, size and stride."""
        return self.storage is not None

    @property
    def dense(self) -> bool:
        """True if the call creates a dense tensor."""
        return self.kind == "dense"

    def call(self, *args: Node, position: int = 0) -> Call:
        """Return the node of a call with these arguments."""
        return Call(Global(self.module, self.name, 0), args, "REDUCE", position)


StorageOf = Callable[[PersId], Storage]
Args = tuple[Any, ...]
Reader = Callable[[RebuildCall, Args, str, str, StorageOf], TensorEntry]
"""(row of the call, its arguments, key, address, storages) -> the tensor. Raises BadTensor, or what a bad argument
causes: IndexError, TypeError, ValueError, AttributeError, OverflowError.
"""


def builds(entry: TensorEntry) -> str:
    """Return no reason: torch builds every tensor of the kind whose call was read."""
    return ""


def fits(entry: TensorEntry, tensor: Any) -> str | None:
    """Return no reason: such a tensor can be copied into any tensor of the same shape."""
    return None


@dataclass(frozen=True, slots=True, eq=False)
class TensorKind:
    """A kind of tensor.

    Attributes:
        name: `TensorEntry.kind`.
        read: the reader of its rebuild calls.
        load: (`loaders.tensors.TensorMaker`, tensor) -> the tensor of torch; None if only its own library rebuilds it.
        misfit: (tensor, tensor of a model) -> why it cannot be copied there.
        refused: why torch cannot build a tensor with these arguments; empty if it can.
        from_tensors: its call takes tensors, which may have attributes of their own.
        computed: the description of a tensor whose call reads values, which a legacy file has only afterwards; empty
            for other kinds.
        codes: its elements represent other numbers, so that a mean of them has no meaning.
        whole: False if it may be one rank's part, or a wrapper whose parts are elsewhere.
    """

    name: str
    read: Reader
    load: Callable[[Any, TensorEntry], Any] | None = None
    misfit: Callable[[TensorEntry, Any], str | None] = fits
    refused: Callable[[TensorEntry], str] = builds
    from_tensors: bool = False
    computed: str = ""
    codes: bool = False
    whole: bool = True


def _on_storage(name: str, kind: str, since: Number, source: str = UNSTATED, **known: Any) -> RebuildCall:
    return RebuildCall(_UTILS, name, kind, since, source, storage=0, offset=1, size=2, stride=3, **known)


def _around(name: str, since: Number, source: str, **known: Any) -> RebuildCall:
    return RebuildCall(_UTILS, name, "parameter", since, source, tensor=0, requires_grad=1, hooks=2, **known)


def _on_device(name: str, kind: str | None, since: Number | None, **known: Any) -> RebuildCall:
    return RebuildCall(
        _UTILS, name, kind, since, tensor=0, dtype=1, device=2, requires_grad=3, torch_alone=False, **known
    )


TENSOR = _on_storage("_rebuild_tensor", "dense", (0, 2), "pytorch/pytorch#1050", takes=(4, 4))
TENSOR_V2 = _on_storage(
    "_rebuild_tensor_v2",
    "dense",
    (0, 4),
    "pytorch/pytorch#5729, #7219: new after 0.3.1, in 0.4.0",
    requires_grad=4,
    hooks=5,
    marks=6,
    takes=(6, 7),
)
TENSOR_V3 = _on_storage(
    "_rebuild_tensor_v3",
    "dense",
    (2, 1),
    older="_rebuild_tensor_v2",
    requires_grad=4,
    hooks=5,
    dtype=6,
    marks=7,
    takes=(7, 8),
)
QUANTIZED = _on_storage(
    "_rebuild_qtensor",
    "quantized",
    (1, 3),
    "quantized tensors came with 1.3",
    requires_grad=5,
    hooks=6,
    takes=(7, 7),
)
PARAMETER = _around(
    "_rebuild_parameter",
    (1, 0),
    "pytorch/pytorch#15375: saved by 1.0, unknown to 0.4; microsoft/MMdnn#677",
    takes=(3, 3),
)
PARAMETER_WITH_STATE = _around(
    "_rebuild_parameter_with_state",
    (2, 0),
    "pytorch/pytorch#81616, of November 2022",
    older="_rebuild_parameter",
    state=3,
    takes=(4, 4),
)
FROM_TYPE = RebuildCall(_TENSOR, "_rebuild_from_type_v2", "subclass", (1, 12), state=3, takes=(4, 4))
"""``(func, type, args, state)``: ``func(*args)`` is a tensor, and becomes one of the class `type`."""

SPARSE = RebuildCall(_UTILS, "_rebuild_sparse_tensor", "sparse", (1, 2), takes=(2, 2))
"""``(layout, (parts ..., size, flags))``."""

SPARSE_CSR = RebuildCall(
    _UTILS, "_rebuild_sparse_csr_tensor", "sparse", None, accepted=False, older="_rebuild_sparse_tensor"
)
META = RebuildCall(
    _UTILS, "_rebuild_meta_tensor_no_storage", "meta", (1, 12), dtype=0, size=1, stride=2, requires_grad=3, takes=(4, 4)
)
WRAPPER = RebuildCall(
    _UTILS,
    "_rebuild_wrapper_subclass",
    "wrapper",
    (1, 12),
    "pytorch/pytorch#73078, of February 2022, the month before 1.11",
    dtype=1,
    size=2,
    stride=3,
    offset=4,
    device=6,
    requires_grad=7,
    takes=(8, 8),
    torch_alone=False,
)
"""``(class, dtype, size, stride, offset, layout, device, requires_grad)``; its parts are in its state."""

NESTED = RebuildCall(_UTILS, "_rebuild_nested_tensor", "nested", (2, 0), takes=(4, 4), torch_alone=False)
"""Four tensors: values, sizes, strides, offsets."""

FROM_NUMPY = _on_device("_rebuild_device_tensor_from_numpy", "device", (2, 1), takes=(4, 4))
FROM_CPU_TENSOR = _on_device("_rebuild_device_tensor_from_cpu_tensor", "device", (2, 5), takes=(4, 4))
FROM_TYPE_V1 = RebuildCall(_TENSOR, "_rebuild_from_type", None, None, accepted=False)
XLA = _on_device("_rebuild_xla_tensor", None, None, accepted=False)

TABLE: tuple[RebuildCall, ...] = (
    *(TENSOR, TENSOR_V2, TENSOR_V3, QUANTIZED, PARAMETER, PARAMETER_WITH_STATE, FROM_TYPE, SPARSE, SPARSE_CSR),
    *(META, WRAPPER, NESTED, FROM_NUMPY, FROM_CPU_TENSOR, FROM_TYPE_V1, XLA),
)
BY_NAME = {(row.module, row.name): row for row in TABLE}

MARKS_SINCE: Number = (2, 0)
"""First version with the seventh argument of ``_rebuild_tensor_v2``, the marks of conjugate and negative views."""


def of(func: Node) -> RebuildCall | None:
    """Return the row of the function `func` of a call; None for any other node."""
    return BY_NAME.get((func.module, func.name)) if type(func) is Global else None


def detached_entry(entry: TensorEntry, name: str) -> TensorEntry:
    """Return `entry` under `name`, as a plain tensor without gradient, as ``state_dict()`` returns it."""
    return replace(entry, key=name, at="", requires_grad=False, parameter=False)


def detached_call(node: Any) -> Any:
    """Return the call that rebuilds the tensor of `node` detached; a parameter becomes the tensor in it."""
    row = of(node.func) if type(node) is Call else None
    while row is not None and row.kind == "parameter":
        if not node.arguments:
            return node
        node = node.arguments[0]
        row = of(node.func) if type(node) is Call else None
    if row is None or type(node.args) is not tuple:
        return node
    if row is FROM_TYPE and len(node.args) > 3 and type(node.args[2]) is tuple:
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
