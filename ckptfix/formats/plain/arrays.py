"""Numpy arrays and scalars as tensors and plain values."""

from __future__ import annotations

from ckptfix.checkpoint import contiguous_stride, dtypes
from ckptfix.formats import numpy_pickles
from ckptfix.formats.numpy_pickles import BadValue, PickledArray, new_dict
from ckptfix.formats.plain.output import ConvertedObject
from ckptfix.formats.plain.report import Steps
from ckptfix.formats.torch.call_classes import class_name
from ckptfix.formats.torch.rewrite import NewStorage, literal, new_tensor
from ckptfix.pickles import Call
from ckptfix.pickles.graph import Node


def array(out: ConvertedObject, call: Call, args: tuple[Node, ...]) -> Steps:
    name = numpy_pickles.old_name(class_name(call) or "")
    found = numpy_pickles.read_array(call, name)
    if found.dtype.kind == "O":
        assert isinstance(found.data, list)
        flat: list[Node] = []
        yield from out.listed(flat, found.data)
        out.changed("numpy array of objects", "list")
        return numpy_pickles.nested(found.shape, flat, found.fortran)
    if found.dtype.fields:
        out.changed("structured numpy array", "dict of its fields")
        return new_dict([(field, _plain_array(out, column)) for field, column in numpy_pickles.columns(found)])
    return _plain_array(out, found)


def _plain_array(out: ConvertedObject, array: PickledArray) -> Node:
    """Return a numeric array as a tensor with its own storage, and text as nested lists."""
    assert isinstance(array.data, bytes)
    dtype, shape = array.dtype, array.shape
    name = {"M": "int64", "m": "int64"}.get(dtype.kind, dtype.name)
    row = dtypes.find(name)
    if dtype.fields or row is None or dtype.kind not in "biufcMm":
        flat: list[Node] = []
        for item in numpy_pickles.items(dtype, array.data):
            flat.append(out.raw(item) if isinstance(item, bytes) else item)
        out.changed(f"numpy array of {dtype.name}", "list")
        return numpy_pickles.nested(shape, flat, array.fortran)
    big = out.settings.big
    data = numpy_pickles.ordered(array, big=big)
    target = out.settings.target
    if row.storage_class is None and (out.settings.legacy or (target and not target.has_dtype(name))):
        data = numpy_pickles.widened(data, dtype.itemsize, big=big)
        name = "int64"
    out.changed(f"numpy array of {dtype.name}", f"{name} tensor")
    stride = tuple(reversed(contiguous_stride(shape[::-1]))) if array.fortran else None
    key = out.new_key()
    itemsize = dtypes.by_name(name).itemsize if dtypes.by_name(name).storage_class else 1
    out.report.storages[key] = NewStorage(literal(data, "an array of the pickle"), itemsize)
    made = new_tensor(key, name, shape, stride, legacy=out.settings.legacy)
    return out.older(made)


def scalar(out: ConvertedObject, call: Call, args: tuple[Node, ...]) -> Steps:
    if len(args) != 2:
        raise BadValue("a scalar without its bytes")
    dtype = numpy_pickles.read_dtype(args[0])
    if dtype.kind == "O":
        out.changed("numpy scalar", "value")
        return (yield None, args[1])
    raw = numpy_pickles.raw_bytes(args[1])
    if raw is None or len(raw) != dtype.itemsize:
        raise BadValue("a scalar whose bytes do not fit its dtype")
    found = numpy_pickles.items(dtype, raw) or ["" if dtype.kind == "U" else b""]
    value = found[0]
    out.changed("numpy scalar", "complex" if type(value) is Call else type(value).__name__)
    return out.raw(value) if isinstance(value, bytes) else value


def dtype_(out: ConvertedObject, call: Call, args: tuple[Node, ...]) -> Steps:
    name = numpy_pickles.read_dtype(call).name
    out.changed("numpy dtype", "str")
    return name
    yield
