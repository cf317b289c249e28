"""Readers of torch's rebuild calls: one for each kind in the table `calls`. No function of a pickle is ever called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from ckptfix.checkpoint import Storage, TensorEntry, contiguous_stride, dtypes
from ckptfix.checkpoint.tensors import LAZY, reach
from ckptfix.errors import DamagedFile
from ckptfix.formats.torch import calls
from ckptfix.formats.torch.call_classes import PARAMETER, is_tensor_class
from ckptfix.formats.torch.calls import Args, Reader, RebuildCall, TensorKind
from ckptfix.formats.torch.calls import StorageOf as StorageOf
from ckptfix.formats.torch.state import TooManyParts, split, state_rows
from ckptfix.pickles import Call, Global, PersId
from ckptfix.pickles.graph import Node, attributes, pairs

Rows = list[tuple[str, Node]]


class BadTensor(DamagedFile, ValueError):
    """A rebuild call whose arguments do not describe a tensor; the message states the reason."""


class UnknownTensor(BadTensor):
    """A rebuild call that contains an unknown name, which a later torch may know."""


def is_tensor(node: object) -> TypeGuard[Call]:
    """Return whether `node` is a call that torch would turn into a tensor."""
    return type(node) is Call and (
        node.folded is not None or (type(node.func) is Global and (_is_rebuilt(node) or is_of_class(node)))
    )


def _is_rebuilt(node: Call) -> bool:
    row = calls.of(node.func)
    return (row is not None and row.kind is not None) or is_old_tensor(node)


def is_of_class(node: Call) -> bool:
    """Return whether the call is ``torch.Tensor(t)`` or ``torch.nn.Parameter(t)`` of a tensor, whose data it shares."""
    if not is_tensor_class(node.func) or type(node.args) is not tuple or not 1 <= len(node.args) <= 2:
        return False
    inner = node.args[0]
    if type(inner) is not Call or type(inner.func) is not Global or not _is_rebuilt(inner):
        return False
    return node.state is None and not node.items and not node.elements and not node.kwargs


def is_old_tensor(node: Call) -> bool:
    """Return whether `node` is a ``torch.FloatTensor`` object with its state set, as torch 0.1 wrote them."""
    func = node.func
    return (
        type(func) is Global
        and func.module in ("torch", "torch.cuda", "torch._tensor")
        and func.name.endswith("Tensor")
        and type(node.state) is tuple
        and len(node.state) >= 4
    )


def tensor_entry(node: Node, key: str, at: str, storage_of: StorageOf) -> TensorEntry:
    """Return the entry of the tensor, or of the storage, that `node` represents.

    Raises:
        BadTensor: it is neither, or its arguments do not describe a tensor.
    """
    if type(node) is PersId:
        return storage_entry(node, key, at, storage_of)
    if type(node) is not Call:
        raise BadTensor("the value is not a tensor")
    if type(func := node.func) is not Global:
        raise BadTensor("the called function has no name")
    row = calls.of(func)
    if is_of_class(node):
        return _of_class(func, node.arguments, key, at, storage_of)
    args = node.state if row is None or row.kind is None else node.peek()
    if type(args) is not tuple:
        raise BadTensor(f"{func.name} has arguments that are not a tuple")
    try:
        if row is None or row.kind is None:
            return _dense(args, key, at, storage_of)
        if node.state is not None:
            raise BadTensor(f"{func.name} replaces the data of its tensor")
        if row.state is not None and any(name == "data" for name, _ in attributes(args[row.state])):
            raise BadTensor(f"{func.name} replaces the data of its tensor")
        own = KINDS.get(row.kind)
        return (_AROUND[row.kind] if own is None else own.read)(row, args, key, at, storage_of)
    except (IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, BadTensor):
            raise
        why = str(error) or "too few"
        raise BadTensor(f"{func.name} has unusable arguments ({why})") from None


def _of_class(cls: Global, args: Args, key: str, at: str, storage_of: StorageOf) -> TensorEntry:
    entry = _inner(args[0], key, at, storage_of)
    if cls.full == PARAMETER:
        return replace(entry, requires_grad=len(args) < 2 or bool(args[1]), parameter=True)
    row = dtypes.by_storage_class(f"{cls.name.removesuffix('Tensor')}Storage")
    if row is not None and row.name != entry.dtype:
        raise BadTensor(f"{cls.full} is called on a tensor of {entry.dtype}")
    return entry


def storage_entry(node: PersId, key: str, at: str, storage_of: StorageOf) -> TensorEntry:
    """Return a free-standing storage of the checkpoint as a flat tensor over all of it."""
    storage = storage_of(node)
    first, count = viewed(node, storage)
    return TensorEntry(key, at, storage, storage.dtype, (count,), (1,), first, detail="storage")


def viewed(persid: PersId, storage: Storage) -> tuple[int, int]:
    """Return (first element, elements) of the part of `storage` that a reference views: all of it, or a legacy view.

    Raises:
        BadTensor: the view is not inside the storage.
    """
    elements = storage.nbytes // dtypes.by_name(storage.dtype).itemsize
    view = persid.fields[5] if len(persid.fields) > 5 else None
    if view is None:
        return 0, elements
    if type(view) is tuple and len(view) == 3 and isinstance(view[0], str):
        _, first, count = view
        if type(first) is int and type(count) is int and 0 <= first <= first + count <= elements:
            return first, count
    raise BadTensor("a storage view is not inside its storage")


def storage_dtype(node: Node) -> str:
    """Return the dtype of a storage class.

    Raises:
        BadTensor: torch never had such a storage class.
    """
    row = dtypes.by_storage_class(node.name) if type(node) is Global else None
    if row is None:
        what = node.full if type(node) is Global else repr(node)
        raise (UnknownTensor if what.startswith("torch.") else BadTensor)(f"unknown storage class {what}")
    return row.name


def dtype_name(node: Node) -> str:
    """Return the dtype of a global such as ``torch.float32``."""
    if type(node) is Global and node.module == "torch":
        row = dtypes.find(node.name)
        if row is not None:
            return row.name
        return node.name
    raise (UnknownTensor if type(node) is Global and node.module == "torch" else BadTensor)(f"unknown dtype {node!r}")


def sizes(node: Node) -> tuple[int, ...]:
    """Return a shape or stride: a tuple of ints, or the one in a ``torch.Size``."""
    if type(node) is Call and node.arguments:
        node = node.arguments[0]
    if not _are_sizes(node):
        raise BadTensor("a shape or stride is not a tuple of sizes")
    # A tuple stays the same object, so that a pickle that is written has it once.
    return tuple(node)


def _are_sizes(node: Node) -> TypeGuard[Sequence[int]]:
    return isinstance(node, (tuple, list)) and all(type(value) is int and 0 <= value < 1 << 63 for value in node)


def _dense(
    args: Args, key: str, at: str, storage_of: StorageOf, dtype: str | None = None, requires_grad: Any = False
) -> TensorEntry:
    persid, offset, shape, stride = args[:4]
    if type(persid) is not PersId:
        raise BadTensor("the tensor has no storage")
    storage = storage_of(persid)
    shape, stride = _matching(shape, stride)
    if type(offset) is not int or not 0 <= offset < 1 << 63:
        raise BadTensor("the offset is not a valid count")
    if len(persid.fields) > 5:
        offset += viewed(persid, storage)[0]
    entry = TensorEntry(key, at, storage, dtype or storage.dtype, shape, stride, offset, bool(requires_grad))
    row = dtypes.find(entry.dtype)
    if row is None:
        raise UnknownTensor(f"unknown dtype {entry.dtype}")
    if 0 not in shape:
        needed = row.nbytes(offset + reach(shape, stride))
        if needed > storage.nbytes:
            raise BadTensor(f"the tensor needs {needed} bytes of storage {storage.key}, which has {storage.nbytes}")
    return entry


def _plain(row: RebuildCall, args: Args, key: str, at: str, storage_of: StorageOf) -> TensorEntry:
    dtype = None if row.dtype is None else dtype_name(args[row.dtype])
    if row.requires_grad is None:
        return _dense(args, key, at, storage_of, dtype)
    entry = _dense(args, key, at, storage_of, dtype, args[row.requires_grad])
    return entry if row.marks is None else _marked(entry, args[row.marks :])


def _marked(entry: TensorEntry, rest: Args) -> TensorEntry:
    given = [key for key, value in pairs(rest[0]) or () if value is True] if rest else []
    marks = [mark for mark in LAZY if mark in given]
    return replace(entry, detail=", ".join(marks)) if marks else entry


def _parameter(row: RebuildCall, args: Args, key: str, at: str, storage_of: StorageOf) -> TensorEntry:
    return replace(_inner(args[0], key, at, storage_of), requires_grad=bool(args[1]), parameter=True)


def _inner(node: Node, key: str, at: str, storage_of: StorageOf) -> TensorEntry:
    if not is_tensor(node):
        raise BadTensor("a part is not a tensor")
    _refuse_bottomless(node)
    return tensor_entry(node, key, at, storage_of)


MAX_DEPTH = 32
MAX_PARTS = 100_000
"""Most parts of a tensor, including arguments and tuples: far more than any real tensor has."""


def _refuse_bottomless(node: Call) -> None:
    """Raise BadTensor for a parameter of a wrapper of a parameter and so on, or for parts that share parts without end.

    A hostile depth must not become recursion in Python, and a shared part is unfolded for each of its uses.
    """
    left = MAX_PARTS
    stack: list[tuple[Node, int]] = [(node, 0)]
    while stack:
        part, depth = stack.pop()
        inside: Sequence[Node] = part if isinstance(part, (tuple, list)) else ()
        if type(part) is Call:
            inside = part.arguments
            inside = (*inside, *(value for _, value in attributes(inside[3]))) if len(inside) > 3 else inside
        left -= len(inside)
        if depth > MAX_DEPTH or left < 0:
            raise BadTensor("tensors are nested too deeply")
        stack += [(child, depth + 1) for child in inside if type(child) in (tuple, list) or is_tensor(child)]


QUANTIZERS: dict[str, tuple[Any, ...]] = {
    "per_tensor_affine": ((float, int), (int,)),
    "per_channel_affine": (Call, Call, (int,)),
    "per_channel_affine_float_qparams": (Call, Call, (int,)),
}
"""Scheme -> types of its parameters (``torch._utils._rebuild_qtensor``): scale, zero point, axis; Call is a tensor.

These are all quantizers of torch. It has no others since 1.7, and refuses its own symmetric schemes, so any other name,
under ``torch`` too, is not one that a later torch may know.
"""


def _scheme_name(scheme: Node) -> str:
    return scheme.full if type(scheme) is Global else repr(scheme)[:80]


def _quantized(row: RebuildCall, args: Args, key: str, at: str, storage_of: StorageOf) -> TensorEntry:
    entry = _dense(args, key, at, storage_of, requires_grad=args[5])
    scheme, *rest = args[4]
    name = scheme.name if type(scheme) is Global and scheme.module == "torch" else ""
    expected = QUANTIZERS.get(name)
    if expected is None:
        raise BadTensor(f"torch cannot rebuild a quantized tensor of the scheme {_scheme_name(scheme)}")
    if len(rest) != len(expected):
        raise BadTensor(f"the quantizer {name} has {len(rest)} parameters instead of {len(expected)}")
    for value, types in zip(rest, expected, strict=True):
        if not (is_tensor(value) if types is Call else type(value) in types):
            raise BadTensor(f"the quantizer {name} has unusable parameters")
    parts = tuple(
        _inner(part, f"{key}.{name}", at, storage_of)
        for part, name in zip(rest, ("scale", "zero_point"), strict=False)
        if is_tensor(part)
    )
    plain = [repr(value) for value in rest if not is_tensor(value)]
    return replace(entry, kind="quantized", parts=parts, detail=", ".join([name, *plain]))


LAYOUTS = {"sparse_coo": 2, **dict.fromkeys(("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"), 3)}
"""Sparse layout -> number of its tensors: indices and values, in compressed layouts preceded by compressed indices."""


def _sparse(row: RebuildCall, args: Args, key: str, at: str, storage_of: StorageOf) -> TensorEntry:
    layout, data = args[:2]
    name = str(layout.arguments[0] if type(layout) is Call and layout.args else layout).removeprefix("torch.")
    parts = tuple(part for part in data if is_tensor(part))
    if LAYOUTS.get(name) != len(parts):
        raise BadTensor("torch has no such sparse layout, or its parts are wrong")
    names = ("indices", "values") if len(parts) == 2 else ("compressed_indices", "plain_indices", "values")
    entries = tuple(
        _inner(part, f"{key}.{label}", at, storage_of) for part, label in zip(parts, names, strict=True)
    )
    shape = sizes(next((value for value in data if not is_tensor(value)), None))
    flags = [str(value) for value in data if type(value) is bool]
    detail = name + "".join(f", coalesced={flag}" for flag in flags)
    dtype = entries[-1].dtype
    stride = contiguous_stride(shape)
    return TensorEntry(key, at, None, dtype, shape, stride, kind="sparse", parts=entries, detail=detail)


def _meta(row: RebuildCall, args: Args, key: str, at: str, storage_of: StorageOf) -> TensorEntry:
    dtype, shape, stride, requires_grad = args[:4]
    shape, stride = _matching(shape, stride)
    return TensorEntry(key, at, None, dtype_name(dtype), shape, stride, 0, bool(requires_grad), kind="meta")


def _matching(shape: Node, stride: Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape, stride = sizes(shape), sizes(stride)
    if len(shape) != len(stride):
        raise BadTensor(f"shape {shape} and stride {stride} differ in length")
    return shape, stride


def _wrapper(row: RebuildCall, args: Args, key: str, at: str, storage_of: StorageOf) -> TensorEntry:
    cls, dtype, shape, stride, offset, _, _, requires_grad = args[:8]
    name = cls.full if type(cls) is Global else "tensor subclass"
    shape, stride = _matching(shape, stride)
    return TensorEntry(
        *(key, at, None, dtype_name(dtype), shape, stride, int(offset), bool(requires_grad)),
        kind="wrapper",
        detail=name,
    )


def _from_type(row: RebuildCall, args: Args, key: str, at: str, storage_of: StorageOf) -> TensorEntry:
    """Read ``_rebuild_from_type_v2(func, type, args, state)``: a subclass, or a tensor with attributes."""
    func, cls, inner_args, state = args[:4]
    call = Call(func, inner_args, "REDUCE", 0)
    if not is_tensor(call):
        return _of_other_function(args, key, at, storage_of)
    entry = _inner(call, key, at, storage_of)
    if entry.kind == "wrapper" and is_wrapper(func):
        entry = replace(entry, parts=_parts(state_rows(cls, state), key, at, storage_of))
    if type(cls) is Global and cls.full not in ("torch.Tensor", "torch._tensor.Tensor", entry.detail):
        parameter = cls.full == "torch.nn.parameter.Parameter"
        entry = replace(entry, parameter=entry.parameter or parameter, detail=entry.detail or cls.full)
    return entry


def _of_other_function(args: Args, key: str, at: str, storage_of: StorageOf) -> TensorEntry:
    """Read a tensor that a library's own function creates, such as a nested tensor; it gets the shape of its first
    part.
    """
    cls, inner_args, state = args[1:4]
    rows = [("args", inner_args), *state_rows(cls, state)]
    parts = _parts(rows, key, at, storage_of)
    if not parts:
        raise BadTensor("a part is not a tensor")
    first = parts[0]
    name = cls.full if type(cls) is Global else "tensor subclass"
    return TensorEntry(
        key, at, None, first.dtype, first.shape, first.stride, kind="wrapper", parts=parts, detail=name
    )


def split_state(rows: Rows) -> tuple[Rows, Rows]:
    """Split the rows of a state into tensors and other values; see `split`."""
    try:
        return split(rows, is_tensor)
    except TooManyParts as error:
        raise BadTensor(str(error)) from None


def _parts(rows: Rows, key: str, at: str, storage_of: StorageOf) -> tuple[TensorEntry, ...]:
    return tuple(_inner(node, f"{key}.{name}", at, storage_of) for name, node in split_state(rows)[0])


def is_wrapper(func: Node) -> bool:
    """Return whether `func` rebuilds a wrapper subclass."""
    row = calls.of(func)
    return row is not None and row.kind == "wrapper"


def _nested(row: RebuildCall, args: Args, key: str, at: str, storage_of: StorageOf) -> TensorEntry:
    names = ("values", "sizes", "strides", "offsets")
    parts = tuple(_inner(part, f"{key}.{name}", at, storage_of) for part, name in zip(args, names, strict=True))
    shape = parts[0].shape
    return TensorEntry(
        key, at, None, parts[0].dtype, shape, contiguous_stride(shape), kind="nested", parts=parts, detail="nested"
    )


DEVICE_TENSOR = "device tensor on"
"""First words of `TensorEntry.detail` for a tensor that copies the values of a different tensor or of an array."""


def _device_tensor(row: RebuildCall, args: Args, key: str, at: str, storage_of: StorageOf) -> TensorEntry:
    data, dtype, device, requires_grad = args[:4]
    # Otherwise the data is a numpy array inside the pickle, whose shape is not worth interpreting.
    parts = (_inner(data, f"{key}.data", at, storage_of),) if is_tensor(data) else ()
    shape, stride = (parts[0].shape, parts[0].stride) if parts else ((), ())
    return TensorEntry(
        *(key, at, None, dtype_name(dtype), shape, stride, 0, bool(requires_grad)),
        kind="wrapper",
        parts=parts,
        detail=f"{DEVICE_TENSOR} {device}",
    )


def _quantized_refused(entry: TensorEntry) -> str:
    """Return why torch cannot build a quantized tensor: its axis or its zero point."""
    values = entry.detail.split(", ")
    if values[0].startswith("per_channel"):
        if not values[-1].isdecimal() or int(values[-1]) >= len(entry.shape):
            return f"the tensor is quantized along axis {values[-1]}, but has {len(entry.shape)} axes"
    elif not -(1 << 63) <= int(values[-1]) < 1 << 63:
        return f"the zero point {values[-1]} is out of range"
    return ""


def _quantized_misfit(entry: TensorEntry, tensor: Any) -> str | None:
    """Return why a quantized tensor cannot be copied into `tensor`: one that is not quantized in the same way."""
    dtype = _short(tensor.dtype)
    if not tensor.is_quantized:
        return f"quantized in the file ({entry.dtype}), {dtype} in the model"
    scheme, own = entry.detail.partition(", ")[0], _short(tensor.qscheme())
    if (entry.dtype, scheme) != (dtype, own):
        return f"quantized as {entry.dtype}, {scheme} in the file, as {dtype}, {own} in the model"
    return None


def _sparse_refused(entry: TensorEntry) -> str:
    """Return why torch cannot build a sparse tensor: the shape of its indices."""
    if len(entry.parts) == 2:
        indices, held = (part.shape for part in entry.parts)
        if len(indices) != 2 or not held or indices[0] + len(held) - 1 != len(entry.shape):
            return f"a sparse tensor of {len(entry.shape)} dimensions cannot have indices of shape {list(indices)}"
    return ""


def _sparse_misfit(entry: TensorEntry, tensor: Any) -> str | None:
    """Return why a sparse tensor cannot be copied into `tensor`: one of a different layout or number of values."""
    layout, own = entry.detail.partition(",")[0], _short(tensor.layout)
    if own == "strided":
        return f"{entry.detail} in the file, dense in the model"
    if layout != own:
        return f"{layout} in the file, {own} in the model"
    found = entry.parts[-1].shape
    if len(entry.parts) == 3 and found != (held := tuple(tensor.values().shape)):
        return f"{layout} with values of shape {list(found)} in the file, {list(held)} in the model"
    return None


def _plain_misfit(entry: TensorEntry, tensor: Any) -> str | None:
    """Return why a plain tensor cannot be copied into `tensor`: a sparse or a quantized one."""
    if tensor.is_quantized and entry.dtype != "float32":
        return f"{entry.dtype} in the file, quantized in the model, where torch copies only float32"
    layout = _short(tensor.layout)
    return f"dense in the file, {layout} in the model" if layout.startswith("sparse") else None


def _short(value: object) -> str:
    return str(value).removeprefix("torch.")


def _nested_refused(entry: TensorEntry) -> str:
    """Return why torch cannot build a nested tensor: the shape of its values."""
    return "the values of a nested tensor have several dimensions" if len(entry.parts[0].shape) != 1 else ""


def _meta_misfit(entry: TensorEntry, tensor: Any) -> str:
    """Return why a tensor on the meta device cannot be copied into any tensor."""
    return "the file has no data for it (meta device)"


KINDS = {
    row.name: row
    for row in (
        TensorKind("dense", _plain, load=lambda maker, entry: maker.dense(entry), misfit=_plain_misfit),
        TensorKind(
            "quantized",
            _quantized,
            load=lambda maker, entry: maker.quantized(entry),
            misfit=_quantized_misfit,
            refused=_quantized_refused,
            from_tensors=True,
            codes=True,
        ),
        TensorKind(
            "sparse",
            _sparse,
            load=lambda maker, entry: maker.sparse(entry),
            misfit=_sparse_misfit,
            refused=_sparse_refused,
            from_tensors=True,
        ),
        TensorKind("meta", _meta, load=lambda maker, entry: maker.meta(entry), misfit=_meta_misfit),
        TensorKind(
            "nested", _nested, refused=_nested_refused, from_tensors=True, computed="a nested tensor"
        ),
        TensorKind("wrapper", _wrapper, whole=False),
    )
}
"""Name -> kind of tensor."""

_AROUND: dict[str, Reader] = {"parameter": _parameter, "subclass": _from_type, "device": _device_tensor}
"""Kinds of calls that change a tensor, or copy it; the result is a tensor of one of `KINDS`."""

