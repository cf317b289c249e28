"""Pickles of NumPy arrays: nested dicts and lists of arrays, as Detectron2, Caffe2 and many scripts write them.

::

    {"model": {NAME: ARRAY, ...}, "__author__": "..."}      Detectron2's model zoo
    {"blobs": {NAME: ARRAY, ...}}                           Caffe2

    array   numpy.core.multiarray._reconstruct(class, (0,), b'b'), state (1, shape, dtype, fortran, bytes)
    array   numpy.core.numeric._frombuffer(bytes, dtype, shape, 'C' or 'F'), of protocol 5
    dtype   numpy.dtype('f4', ...), state (3, '<', ...)

PaddlePaddle adds a table of names to a state dict, pickles any other tensor as ``tuple((NAME, ARRAY))``, stores
bfloat16 as uint16, and before protocol 4 cuts arrays of more than 1 GB (paddle/framework/io.py, io_utils.py)::

    {NAME: ARRAY, ..., "StructuredToParameterName@@": {NAME: name of the parameter}}
    {"NAME@@.0": ARRAY, "NAME@@.1": ARRAY, "UnpackBigParamInfor@@": {NAME: {"OriginShape": ..., "slices": [...]}}}

``numpy._core`` is ``numpy.core`` before numpy 2. The pickle is read as text and never run. A pickle whose root is an
object of a class, such as an estimator of scikit-learn, is not a checkpoint of this kind. Source:
numpy/_core/src/multiarray/methods.c (``array_reduce``) and descriptor.c (``arraydescr_reduce``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckptfix.checkpoint import ByteRange, Checkpoint, Data
from ckptfix.checkpoint.address import join
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, DamagedFile
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.arrays.common import Array, checkpoint_of, concatenated, numpy_kind, read_only
from ckptfix.formats.numpy_pickles import DTYPE, FROM_BUFFER, RECONSTRUCT, SCALAR, old_name
from ckptfix.formats.signs import Beginning, pickled
from ckptfix.formats.torch.readonly.storages import EncodedPart, encoded_text
from ckptfix.io.source import Source, open_source
from ckptfix.pickles import Call, Dict, Global
from ckptfix.pickles.graph import Node, pairs
from ckptfix.pickles.names import survey
from ckptfix.pickles.paged import UnreadBytes, parse_paged

NAME = "arrays"

MOST_OPCODES = 200_000
"""Most opcodes that are searched for the first array: a tenth of a second."""

MOST_LEVELS = 50

_MAPPINGS = frozenset({"collections.OrderedDict", "collections.defaultdict"})

_TUPLES = frozenset({"builtins.tuple", "__builtin__.tuple"})

_KNOWN = (
    _MAPPINGS
    | {RECONSTRUCT, FROM_BUFFER, SCALAR, DTYPE, "numpy.ndarray"}
    | {"_codecs.encode", "builtins.bytes", "builtins.bytearray", "__builtin__.bytearray", "__builtin__.bytes"}
    | {"builtins.dict", "builtins.list", "__builtin__.dict", "__builtin__.list"}
    | _TUPLES
)
"""The globals of such a pickle, as numpy 1 names its own; none of them runs code of the file."""

MOST_TEXT = 1 << 16
"""The limit in bytes of a name or another text."""

_CODE = re.compile(r"[biufcV]\d{1,4}")

PADDLE_NAMES = "StructuredToParameterName@@"
"""The key of Paddle's table of names."""

PADDLE_SLICES = "UnpackBigParamInfor@@"
"""The key under which Paddle says of what slices an array consists."""

_BFLOAT16_OF_PADDLE = re.compile(r"([<|=])u2")
"""NumPy's code for the numbers of 16 bits that Paddle has: it has no uint16 of its own."""


@dataclass(frozen=True, slots=True)
class _Pickled:
    """An array in a pickle: NumPy's code of its type, shape, order, and the node with its bytes.

    Attributes:
        named: Paddle pickled it as a tuple with the name of its tensor.
        slices: the arrays that it consists of, one after another, in place of its own bytes.
    """

    code: str
    shape: tuple[int, ...]
    columns: bool
    data: object
    named: bool = False
    slices: tuple[_Pickled, ...] = ()


def score(path: str, head: bytes, size: int) -> int:
    """Return 50 for a pickle of plain values and arrays, with an array of numbers.

    A pickle with any other global is not of this format: doctor says what unpickling it would run.
    """
    if not pickled(Beginning(path, head, size)) or b"joblib" in head or b"torch" in head:
        return 0
    try:
        with open_source(path) as source:
            seen = survey(source.read, 0, source.size, MOST_OPCODES).seen
            if not any(old_name(f"{row.module}.{row.name}") in (RECONSTRUCT, FROM_BUFFER) for row in seen):
                return 0
            values = _Values(source)
            if any(old_name(row.full) not in _KNOWN for row in values.graph.globals):
                return 0
            return 50 if any(type(value) is _Pickled for _, value in values.leaves()) else 0
    except CkptfixError:
        return 0


class _Values:
    """The values of a pickle, whose byte strings stay in the file."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.graph = parse_paged(source.read, source.size, stays=None, path=source.name, where="pickle")

    def leaves(self) -> Iterator[tuple[tuple[str, ...], object]]:
        """Yield the path and the value of everything that is not a dict or a list: arrays as `_Pickled`.

        Raises:
            DamagedFile: the values are nested too deeply.
        """
        yield from self._below(self.graph.root, ())

    def _below(self, node: Node, where: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
        if len(where) > MOST_LEVELS:
            raise DamagedFile(f"its values are nested more than {MOST_LEVELS} levels deep", path=self.source.name)
        named = old_name(node.func.full) if type(node) is Call and type(node.func) is Global else ""
        inside = pairs(node) if type(node) is Dict or named in _MAPPINGS else None
        if inside is not None:
            for key, value in inside:
                yield from self._below(value, (*where, self.text(key)))
        elif (array := self._of_paddle(node)) is not None:
            yield where, array
        elif isinstance(node, (list, tuple)):
            for place, value in enumerate(node):
                yield from self._below(value, (*where, str(place)))
        else:
            yield where, self._array(node, named) or node

    def _of_paddle(self, node: Node) -> _Pickled | None:
        """Return the array of a tensor as PaddlePaddle pickles it: a tuple of its own name and the array."""
        pair = node
        called = type(node) is Call and type(node.func) is Global and old_name(node.func.full) in _TUPLES
        if type(node) is Call:
            pair = node.arguments[0] if called and len(node.arguments) == 1 else None
        if type(pair) is not tuple or len(pair) != 2 or not isinstance(pair[0], str):
            return None
        array = pair[1]
        named = old_name(array.func.full) if type(array) is Call and type(array.func) is Global else ""
        found = self._array(array, named)
        return None if found is None else replace(found, named=called)

    def text(self, node: object) -> str:
        """Return a text, which may be a str of Python 2; empty for bytes that are too long to be one."""
        if type(node) is not UnreadBytes:
            return str(node)
        if node.length > MOST_TEXT:
            return ""
        return self.source.read(node.offset, node.length).decode("utf-8", "backslashreplace")

    def _array(self, node: Node, named: str) -> _Pickled | None:
        """Return the array that a call makes; None for anything else."""
        if type(node) is not Call:
            return None
        if named == RECONSTRUCT and type(node.state) is tuple and 4 <= len(node.state) <= 5:
            shape, dtype, columns, data = node.state[-4:]
        elif named == FROM_BUFFER and len(node.arguments) == 4:
            data, dtype, shape, order = node.arguments
            columns = self.text(order) == "F"
        else:
            return None
        code = self._code(dtype)
        sizes = shape if type(shape) is tuple else (shape,)
        if code is None or not all(type(size) is int and 0 <= size < 1 << 62 for size in sizes):
            return None
        return _Pickled(code, tuple(size for size in sizes if type(size) is int), columns is True, data)

    def _code(self, dtype: Node) -> str | None:
        """Return NumPy's code of a type of numbers, such as ``"<f4"``; None for other types."""
        if type(dtype) is not Call or not dtype.arguments or type(dtype.arguments[0]) is Global:
            return None
        letter, state = self.text(dtype.arguments[0]), dtype.state
        order = self.text(state[1]) if type(state) is tuple and len(state) > 1 else "|"
        if not _CODE.fullmatch(letter) or (type(state) is tuple and len(state) > 3 and state[3] is not None):
            return None
        return f"{order if order in ('<', '>', '|', '=') else '|'}{letter}"

    def data_of(self, array: _Pickled) -> Data:
        """Return the bytes of an array, as `data`."""
        return concatenated([self.data(part.data) for part in array.slices or (array,)])

    def data(self, node: object) -> Data:
        """Return the bytes of an array.

        Raises:
            DamagedFile: they are not stored as bytes.
        """
        path = self.source.name
        if type(node) is UnreadBytes:
            return ByteRange(path, node.offset, node.length)
        text = encoded_text(node)
        if text is not None:
            written = text.origin or text
            part = EncodedPart.of(path, text, self.graph.data[written.start])
            return part.in_whole(ByteRange(part, 0, part.length))
        if type(node) is Call and type(node.func) is Global and node.func.name in ("bytes", "bytearray"):
            return self.data(node.arguments[0]) if node.arguments else ByteRange(path, 0, 0)
        raise DamagedFile("the bytes of an array are not stored as bytes", path=path)


def read(path: str) -> Checkpoint:
    """Read names, shapes and places; see the contract in `base`.

    Raises:
        BadPickle: it is not a pickle.
    """
    with open_source(path) as source:
        size = source.size
        values = _Values(source)
        return _checkpoint(path, size, values, _whole(values, list(values.leaves())))


_Leaf = tuple[tuple[str, ...], object]


def _whole(pickle: _Values, leaves: list[_Leaf]) -> list[_Leaf]:
    """Return the leaves with an array in place of the slices that Paddle cut it into.

    Raises:
        DamagedFile: a slice is missing.
    """
    shapes: dict[str, list[int]] = {}
    names: dict[str, list[str]] = {}
    for where, value in leaves:
        if len(where) == 4 and where[0] == PADDLE_SLICES:
            if where[2] == "slices":
                names.setdefault(where[1], []).append(pickle.text(value))
            elif isinstance(value, int):
                shapes.setdefault(where[1], []).append(value)
    if not names:
        return leaves
    arrays = {where[0]: value for where, value in leaves if len(where) == 1 and type(value) is _Pickled}
    made: dict[str, _Pickled] = {}
    for key, parts in names.items():
        found = tuple(arrays[part] for part in parts if part in arrays)
        if len(found) < len(parts):
            missing = next(part for part in parts if part not in arrays)
            raise DamagedFile(f"the slice {missing!r} of {key!r} is missing", path=pickle.source.name)
        made[key] = replace(found[0], shape=tuple(shapes.get(key, ())), columns=False, slices=found)
    gone = {part for parts in names.values() for part in parts}
    kept = [(where, value) for where, value in leaves if where[0] not in {*gone, PADDLE_SLICES}]
    return [*kept, *(((key,), value) for key, value in made.items())]


def _checkpoint(path: str, size: int, pickle: _Values, leaves: Sequence[_Leaf]) -> Checkpoint:
    # Flat dicts in a dict are state dicts, as in a torch checkpoint. Anything else is one, with joined names.
    flat = all(len(where) == 2 and not where[1].isdecimal() for where, value in leaves if type(value) is _Pickled)
    holders = {where[0] for where, value in leaves if type(value) is _Pickled} if flat else set()
    arrays: list[Array] = []
    values: dict[str, object] = {}
    findings: list[Finding] = []
    is_paddle = any(PADDLE_NAMES in where or (type(value) is _Pickled and value.named) for where, value in leaves)
    for where, value in leaves:
        at = where[0] if len(where) > 1 and where[0] in holders else ""
        key = ".".join(where[1:] if at else where)
        if type(value) is not _Pickled:
            values[join(at, key)] = _described(pickle, value)
            continue
        code = _BFLOAT16_OF_PADDLE.sub(r"\1V2", value.code) if is_paddle else value.code
        kind = numpy_kind(code)
        try:
            data = pickle.data_of(value)
        except CkptfixError as error:
            findings.append(found("bad-tensor", error.message, where=join(at, key)))
            continue
        if kind is None or kind.dtype is None:
            arrays.append(Array(key, None, (data.length,), data, kind=f"NumPy's {value.code}", at=at))
        else:
            arrays.append(Array(key, kind.dtype, value.shape, data, kind.itemsize, value.columns, kind.big, at=at))
    if pickle.graph.end < size:
        message = f"{size - pickle.graph.end} bytes follow the pickle"
        findings.append(found("trailing-bytes", message, offset=pickle.graph.end))
    return checkpoint_of(path, NAME, size, arrays, traits={}, values=values, findings=findings)


def _described(pickle: _Values, value: object) -> object:
    """Return a plain value, or the class of an object that is not made."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (str, UnreadBytes)):
        return pickle.text(value)
    return value.func.full if type(value) is Call and type(value.func) is Global else type(value).__name__


FORMAT = read_only(NAME, "pickle of NumPy arrays", score, read, finding="plain-pickle", models=False)
