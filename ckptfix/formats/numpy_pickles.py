"""Reader of numpy's pickles as bytes: dtypes, scalars and arrays, without numpy.

::

    dtype      numpy.dtype('f4', False, True), state (3, '<', subdtype, names, fields, itemsize, alignment, flags)
    scalar     numpy._core.multiarray.scalar(dtype, bytes); for objects the object itself
    array      numpy._core.multiarray._reconstruct(class, (0,), b'b'), state (1, shape, dtype, fortran, bytes or list)
    array      numpy._core.numeric._frombuffer(bytes, dtype, shape, 'C' or 'F'), of protocol 5

``numpy._core`` is ``numpy.core`` before numpy 2. Source: numpy/_core/src/multiarray/methods.c (array_reduce,
array_reduce_ex) and descriptor.c (arraydescr_reduce).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence

from ckptfix.dataclass import dataclass
from ckptfix.formats.torch.weights_only import canonical
from ckptfix.pickles import Call, Dict, Global, Text
from ckptfix.pickles.graph import Node, pairs


class BadValue(ValueError):
    """Error for an object with malformed arguments or state; the message gives the reason."""


@dataclass(frozen=True, slots=True)
class NumpyDtype:
    """A dtype: `kind` and `itemsize` are those of its code, ``('f', 4)``; `fields` are (name, dtype, byte offset)."""

    kind: str
    itemsize: int
    big: bool = False
    fields: tuple[tuple[str, NumpyDtype, int], ...] = ()

    @property
    def name(self) -> str:
        """Numpy's name of the dtype, such as ``float32``; its code if it has no name."""
        return _NAMES.get((self.kind, self.itemsize), f"{self.kind}{self.itemsize}")


@dataclass(frozen=True, slots=True)
class PickledArray:
    """An array: `data` is its bytes as they were pickled, or a list of nodes for objects."""

    dtype: NumpyDtype
    shape: tuple[int, ...]
    fortran: bool
    data: bytes | list[Node]


_NAMES = {
    ("b", 1): "bool",
    **{("i", size): f"int{8 * size}" for size in (1, 2, 4, 8)},
    **{("u", size): f"uint{8 * size}" for size in (1, 2, 4, 8)},
    **{("f", size): f"float{8 * size}" for size in (2, 4, 8)},
    **{("c", size): f"complex{8 * size}" for size in (8, 16)},
    ("M", 8): "datetime64",
    ("m", 8): "timedelta64",
}
"""(kind, itemsize) -> name; torch uses the same names for its dtypes."""

_STRUCT = {("f", 2): "e", ("f", 4): "f", ("f", 8): "d", ("c", 8): "ff", ("c", 16): "dd"}

SCALAR_TYPES = frozenset((*_NAMES.values(), "bool_", "str_", "bytes_", "float", "int", "half", "single", "double"))
"""Names of numpy's scalar types; such a class in a checkpoint names a dtype."""

SCALAR = "numpy.core.multiarray.scalar"
RECONSTRUCT = "numpy.core.multiarray._reconstruct"
FROM_BUFFER = "numpy.core.numeric._frombuffer"
DTYPE = "numpy.dtype"


def old_name(full: str) -> str:
    """Return a global's name in numpy 1."""
    return full.replace("numpy._core.", "numpy.core.", 1) if full.startswith("numpy._core.") else full


def raw_bytes(node: Node) -> bytes | None:
    """Return the bytes of a node: bytes, a bytearray, their form in protocol 2, or a str of Python 2."""
    if isinstance(node, (bytes, bytearray)):
        return bytes(node)
    if type(node) is Text:
        return node.encode("utf-8", "surrogatepass")
    if type(node) is Call and type(node.func) is Global and type(node.args) is tuple:
        name = canonical(node.func)
        if name == "_codecs.encode" and len(node.args) == 2 and str(node.args[1]) in ("latin1", "latin-1"):
            text = node.args[0]
            return text.encode("latin-1") if isinstance(text, str) and max(text, default="") < "\u0100" else None
        if name in ("builtins.bytes", "builtins.bytearray"):
            return raw_bytes(node.args[0]) if node.args else b""
    return None


def read_dtype(node: Node, depth: int = 0) -> NumpyDtype:
    """Return the dtype that a node describes.

    Raises:
        BadValue: it is not a dtype, or has subarrays.
    """
    if type(node) is not Call or not node.arguments or depth > 8:
        raise BadValue("not a dtype")
    code = node.arguments[0]
    if type(code) is Global:  # a dtype of another package, named by its scalar type
        raise BadValue(f"a dtype of {code.module}")
    if not isinstance(code, str):
        raise BadValue("a dtype without a code")
    state = node.state if type(node.state) is tuple and len(node.state) >= 8 else (3, "|", None, None, None, -1, -1, 0)
    _, order, subdtype, names, fields, size = state[:6]
    kind, digits = code[:1], code[1:]
    if subdtype is not None:
        raise BadValue("a dtype of subarrays")
    itemsize = size if type(size) is int and size >= 0 else int(digits) if digits.isdigit() else 1
    if code in ("?", "bool"):
        kind, itemsize = "b", 1
    big = str(order) == ">"
    if names is None:
        return NumpyDtype(kind, itemsize, big)
    described = {str(key): value for key, value in pairs(fields) or () if isinstance(key, str)}
    found = []
    for name in names if type(names) is tuple else ():
        row = described.get(str(name))
        if type(row) is not tuple or len(row) < 2 or type(row[1]) is not int or row[1] < 0:
            raise BadValue("a structured dtype without its fields")
        found.append((str(name), read_dtype(row[0], depth + 1), row[1]))
    return NumpyDtype("V", itemsize, False, tuple(found))


def read_array(call: Call, name: str) -> PickledArray:
    """Return the array that a call of `name` (in numpy 1's form) makes.

    Raises:
        BadValue: it is not an array, or its bytes do not match its shape.
    """
    if name == FROM_BUFFER:
        if len(call.arguments) != 4:
            raise BadValue("an array without its arguments")
        data, dtype_node, shape_node, order = call.arguments
        fortran: Node = str(order) == "F"
    else:
        state = call.state
        if type(state) is not tuple or not 4 <= len(state) <= 5:
            raise BadValue("an array without its state")
        shape_node, dtype_node, fortran, data = state[-4:]
    dtype = read_dtype(dtype_node)
    sizes = shape_node if type(shape_node) is tuple else (shape_node,)
    shape = tuple(size for size in sizes if type(size) is int and size >= 0)
    if len(sizes) > 64 or len(shape) != len(sizes):
        raise BadValue("an array without a shape")
    count = math.prod(shape)
    if dtype.kind == "O":
        if type(data) is not list or len(data) != count:
            raise BadValue("an object array without its objects")
        return PickledArray(dtype, shape, bool(fortran), data)
    raw = raw_bytes(data)
    if raw is None or len(raw) != count * dtype.itemsize:
        raise BadValue(f"an array of {count} elements whose bytes have a different size")
    return PickledArray(dtype, shape, bool(fortran), raw)


def swapped(data: bytes, itemsize: int) -> bytes:
    """Return `data` with the bytes of each item reversed."""
    out = bytearray(len(data))
    for place in range(itemsize):
        out[place::itemsize] = data[itemsize - 1 - place :: itemsize]
    return bytes(out)


def ordered(array: PickledArray, *, big: bool = False) -> bytes:
    """Return the bytes of a numeric array in the requested byte order; a complex number is two units."""
    assert isinstance(array.data, bytes)
    unit = array.dtype.itemsize // (2 if array.dtype.kind == "c" else 1)
    return array.data if array.dtype.big == big or unit <= 1 else swapped(array.data, unit)


def columns(array: PickledArray) -> list[tuple[str, PickledArray]]:
    """Return the fields of a structured array, each as a separate array.

    Raises:
        BadValue: a field is outside the record.
    """
    assert isinstance(array.data, bytes)
    size = array.dtype.itemsize
    found = []
    for name, dtype, offset in array.dtype.fields:
        if offset + dtype.itemsize > size or dtype.kind == "O":
            raise BadValue(f"field {name!r} is outside the record's bytes")
        column = bytearray(len(array.data) // max(size, 1) * dtype.itemsize)
        for place in range(dtype.itemsize):
            column[place :: dtype.itemsize] = array.data[offset + place :: size]
        found.append((name, PickledArray(dtype, array.shape, array.fortran, bytes(column))))
    return found


def widened(data: bytes, size: int, *, big: bool = False) -> bytes:
    """Convert unsigned integers of `size` bytes to int64.

    Raises:
        BadValue: a number is too large for int64.
    """
    order = ">" if big else "<"
    try:
        numbers = struct.unpack(f"{order}{len(data) // size}{_UNSIGNED[size]}", data)
        return struct.pack(f"{order}{len(numbers)}q", *numbers)
    except struct.error:
        raise BadValue("a number is too large for the dtypes of the output") from None


_UNSIGNED = {1: "B", 2: "H", 4: "I", 8: "Q"}


def items(dtype: NumpyDtype, data: bytes) -> list[Node]:
    """Return elements as Python values: bool, int, float, str, bytes; a complex number as a call of ``complex``.

    Raises:
        BadValue: the kind has no such values (structured, longdouble).
    """
    size = dtype.itemsize
    pieces = [data[start : start + size] for start in range(0, len(data), size)] if size else []
    order = "big" if dtype.big else "little"
    if dtype.kind == "b" and size == 1:
        return [piece != b"\0" for piece in pieces]
    if dtype.kind in "iuMm" and size in _UNSIGNED:
        return [int.from_bytes(piece, order, signed=dtype.kind != "u") for piece in pieces]  # type: ignore[arg-type]
    form = _STRUCT.get((dtype.kind, size))
    if form is not None:
        numbers = [struct.unpack((">" if dtype.big else "<") + form, piece) for piece in pieces]
        return [number[0] if len(number) == 1 else complex_call(*number) for number in numbers]
    if dtype.kind == "U":
        return [piece.decode(f"utf-32-{order[0]}e", "surrogatepass").rstrip("\0") for piece in pieces]
    if dtype.kind == "S":
        return [piece.rstrip(b"\0") for piece in pieces]
    raise BadValue(f"Python and torch have no number for numpy's {dtype.name}")


def complex_call(real: float, imaginary: float) -> Call:
    """Return the call that protocol 2 writes for a complex number."""
    return Call(Global("__builtin__", "complex", 0), (real, imaginary), "REDUCE", 0)


def nested(shape: Sequence[int], flat: list[Node], fortran: bool) -> Node:
    """Return `flat` as nested lists of this shape; without dimensions, return its only element."""
    if not shape:
        return flat[0] if flat else None
    if not flat:
        return []
    if fortran:
        flat = _row_major(flat, shape)
    for size in reversed(shape[1:]):
        flat = [flat[start : start + size] for start in range(0, len(flat), size)]
    return flat


def _row_major(flat: list[Node], shape: Sequence[int]) -> list[Node]:
    places = [0]
    step = 1
    steps = []
    for size in shape:
        steps.append(step)
        step *= size
    for size, stride in zip(shape, steps, strict=True):
        places = [place + index * stride for place in places for index in range(size)]
    return [flat[place] for place in places]


def new_dict(rows: Iterable[tuple[Node, Node]]) -> Dict:
    made = Dict()
    made.items.extend(rows)
    return made
