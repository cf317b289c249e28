"""Arrays in a file of joblib.dump: their bytes follow the opcode that builds their wrapper.

::

    joblib.numpy_pickle.NumpyArrayWrapper, built with {subclass, shape, order, dtype, allow_mmap,
        numpy_array_alignment_bytes}, then
    n       one byte, and n bytes of 0xff, if the wrapper states an alignment (joblib 1.1 and later)
    bytes   of the elements, row by row, or column by column for the order 'F'

or, for an array of objects, a separate pickle. Source: joblib/numpy_pickle.py (``NumpyArrayWrapper``).

An array is represented by the call with which NumPy pickles it, so that it is a value like any other.
"""

from __future__ import annotations

import math
import re

from ckptfix.errors import BadPickle, Unsupported
from ckptfix.formats.torch.readonly.storages import begins_stream
from ckptfix.io.source import Source
from ckptfix.pickles import Call, Global, Text
from ckptfix.pickles.graph import Node, attributes
from ckptfix.pickles.machine import MAX_BYTES
from ckptfix.pickles.paged import parse_paged

_WRAPPER = "NumpyArrayWrapper"
_MODULES = ("joblib.numpy_pickle", "sklearn.externals.joblib.numpy_pickle")
WRAPPERS = tuple(f"{module}.{_WRAPPER}" for module in _MODULES)

_DTYPE = re.compile(r"[<>|=]?([?biufcmMSUVO])(\d*)")


class Arrays:
    """Reader of arrays, which `paged.parse_paged` calls after each object that is built.

    Attributes:
        seen: number of arrays so far.
        globals: globals of the nodes that represent the arrays.
    """

    def __init__(self, reader: Source) -> None:
        self.reader = reader
        self.seen = 0
        self.globals: list[Global] = []
        self.left = MAX_BYTES

    def __call__(self, node: Node, offset: int) -> tuple[Node, int] | None:
        if type(node) is not Call or type(node.func) is not Global or node.func.full not in WRAPPERS:
            return None
        self.seen += 1
        stated = {str(key): value for key, value in attributes(node.state) if isinstance(key, str)}
        shape, dtype, order = stated.get("shape"), stated.get("dtype"), stated.get("order")
        if type(shape) is not tuple or not all(type(size) is int and 0 <= size < 1 << 63 for size in shape):
            raise BadPickle("a joblib array has no shape")
        kind = _kind(dtype)
        if kind is None:
            graph = parse_paged(self.reader.read, self.reader.size, start=offset, stays=begins_stream, where="array")
            self.globals += graph.globals
            return graph.root, graph.end
        if stated.get("numpy_array_alignment_bytes") is not None:
            offset += 1 + self.reader.read(offset, 1)[0]
        length = kind * math.prod(size for size in shape if type(size) is int)
        self.left -= length
        if self.left < 0:
            raise Unsupported(f"the arrays besides the tensors have over {MAX_BYTES} bytes")
        data = self.reader.read(offset, length)
        start = node.func.start
        rebuild, ndarray = Global("numpy.core.multiarray", "_reconstruct", start), Global("numpy", "ndarray", start)
        self.globals.append(rebuild)
        made = Call(rebuild, (ndarray, (0,), b"b"), "REDUCE", node.position)
        made.state = (1, shape, dtype, order == "F", data)
        return made, offset + length


def _kind(dtype: Node) -> int | None:
    """Return the length of an element in bytes; None for objects.

    Raises:
        Unsupported: the dtype is not written as NumPy writes one.
    """
    name = dtype.arguments[0] if type(dtype) is Call and dtype.arguments else None
    match = _DTYPE.fullmatch(name) if type(name) is Text else None
    if match is None:
        raise Unsupported("a joblib array has an unknown dtype")
    letter, digits = match.groups()
    assert type(dtype) is Call
    if letter == "O" or (letter == "V" and _holds_objects(dtype)):
        return None
    if letter == "?":
        return 1
    if not digits or len(digits) > 9:
        raise Unsupported("a joblib array has an unknown dtype")
    return int(digits) * (4 if letter == "U" else 1)


def _holds_objects(dtype: Call) -> bool:
    """Return whether a structured dtype has objects: bit 0 of the flags in its state (``NPY_ITEM_HASOBJECT``)."""
    state = dtype.state
    return type(state) is tuple and len(state) > 7 and type(state[7]) is int and bool(state[7] & 1)
