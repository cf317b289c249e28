"""ONNX models: the initializers of the graph, which are its weights.

::

    ModelProto   1 ir_version, 2 producer_name, 7 graph
    GraphProto   1 node, 5 initializer, 15 sparse_initializer
    TensorProto  1 dims, 2 data_type, 8 name, and the data in one of: 9 raw_data, 4 float_data, 5 int32_data,
                 7 int64_data, 10 double_data, 11 uint64_data; or 14 data_location = 1 and 13 external_data, pairs of
                 location (a file in the folder of the model), offset and length

The program is not read: an initializer has the name that the exporter gave it, which is not that in torch if the
exporter changed the weight. Source: onnx/onnx.proto.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import NamedTuple

from ckptfix.checkpoint import ByteRange, Checkpoint, Data, Derived, FileVersion, dtypes
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, DamagedFile, Unsupported
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.arrays.common import Array, checkpoint_of, concatenated, read_only
from ckptfix.formats.arrays.protobuf import fields, signed, text_of, varints
from ckptfix.formats.folders.safe_paths import file_inside
from ckptfix.formats.signs import Beginning, model_proto
from ckptfix.io.source import Source, open_source
from ckptfix.urls import as_path

NAME = "onnx"

_MODEL = frozenset({1, 2, 3, 4, 5, 6, 7, 8, 14, 20, 25, 26})
"""Numbers of the fields of a ModelProto."""

MOST_TENSORS = 1 << 20

MOST_PACKED = 1 << 28
"""The limit in bytes of numbers that are stored as varints and decoded."""

LARGE = 1024
"""Bytes from which on a tensor in a node of the program is named as not taken."""


class OnnxType(NamedTuple):
    """A type of elements: torch's name, or ONNX's name alone where torch has none."""

    dtype: str | None
    name: str


TYPES: Mapping[int, OnnxType] = {
    number: OnnxType(dtype, dtype)
    for number, dtype in {
        1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool",
        10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128",
        16: "bfloat16", 17: "float8_e4m3fn", 18: "float8_e4m3fnuz", 19: "float8_e5m2", 20: "float8_e5m2fnuz",
        24: "float8_e8m0fnu",
    }.items()
} | {21: OnnxType(None, "UINT4"), 22: OnnxType(None, "INT4"), 23: OnnxType(None, "FLOAT4E2M1")}
"""Number of a type -> the type. Those of four bits hold two elements in a byte."""

_TEXT = 8


@dataclass(slots=True)
class _Tensor:
    """The fields of a TensorProto."""

    name: str = ""
    type: int = 0
    shape: list[int] = field(default_factory=list)
    data: list[tuple[int, int | ByteRange, int]] = field(default_factory=list)
    outside: bool = False
    external: dict[str, str] = field(default_factory=dict)


def _tensor(source: Source, place: ByteRange) -> _Tensor:
    made = _Tensor()
    for number, value, packed in fields(source, place):
        if number == 1:
            made.shape += [signed(value)] if isinstance(value, int) else varints(_bytes(source, value))
        elif number == 2:
            made.type = signed(value)
        elif number == 8:
            made.name = text_of(source, value)
        elif number == 14:
            made.outside = value == 1
        elif number == 13 and isinstance(value, ByteRange):
            pair = {row.number: text_of(source, row.value) for row in fields(source, value)}
            made.external[pair.get(1, "")] = pair.get(2, "")
        elif number in (4, 5, 7, 9, 10, 11):
            made.data.append((number, value, packed))
    return made


def _bytes(source: Source, place: ByteRange) -> bytes:
    if place.length > MOST_PACKED:
        message = f"{place.length:,} bytes of packed numbers are too many"
        raise Unsupported(message, path=source.name, offset=place.offset)
    return source.read(place.offset, place.length)


class _Files:
    """The files of external data, each opened once."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.opened: dict[str, FileVersion] = {}

    def place(self, stated: Mapping[str, str], length: int) -> ByteRange:
        """Return the place that the pairs of ``external_data`` state.

        Args:
            length: bytes of the tensor, which the pairs may leave out.

        Raises:
            DamagedFile: the file is outside the folder of the model, or a number is not one.
            NoSuchFile: it is missing.
        """
        folder = str(as_path(self.path).parent)
        name = file_inside(folder, stated.get("location", ""), where=self.path)
        if name not in self.opened:
            with open_source(name) as source:
                self.opened[name] = FileVersion(source.name, source.mark)
        numbers = [stated.get("offset", "0"), stated.get("length", str(length))]
        if not all(number.isdecimal() and len(number) < 20 for number in numbers):
            raise DamagedFile("offset or length of its external data is not a number", path=self.path)
        return ByteRange(name, int(numbers[0]), int(numbers[1]))


def _array(source: Source, tensor: _Tensor, files: _Files) -> Array:
    kind = TYPES.get(tensor.type)
    if kind is None:
        what = "text" if tensor.type == _TEXT else f"elements of the unknown type {tensor.type}"
        raise Unsupported(f"it holds {what}", path=source.name)
    shape = tuple(tensor.shape)
    if any(size < 0 for size in shape):
        raise DamagedFile("it states a negative size", path=source.name)
    count = math.prod(shape)
    if kind.dtype is None:
        count = -(-count // 2)
    itemsize = dtypes.by_name(kind.dtype).itemsize if kind.dtype else 1
    if tensor.outside:
        data: Data = files.place(tensor.external, count * itemsize)
    else:
        data = _own_data(source, tensor, kind, count, itemsize)
    if kind.dtype is None:
        return Array(tensor.name, None, (data.length,), data, kind=f"{kind.name} {list(shape)}")
    return Array(tensor.name, kind.dtype, shape, data)


def _own_data(source: Source, tensor: _Tensor, kind: OnnxType, count: int, itemsize: int) -> Data:
    """Return the data of a tensor that the model itself holds, `count` elements of so many bytes.

    Raises:
        DamagedFile: it is in a field that its type does not have.
    """
    if not tensor.data:
        return ByteRange(source.name, 0, 0)
    number = tensor.data[0][0]
    values = [value for _, value, _ in tensor.data]
    ranges = [value for value in values if isinstance(value, ByteRange)]
    if number == 9 or (number, itemsize) in ((4, 4), (10, 8), (4, 8), (10, 16)):
        return concatenated(ranges)
    if number not in (5, 7, 11):
        raise DamagedFile(f"its numbers are in field {number}, where {kind.name} has none", path=source.name)
    encode = _encoder(itemsize)
    if not ranges:
        data = encode([signed(value) for value in values])
        return Derived(len(data), lambda: iter([data]), "numbers", ())

    def chunks() -> Iterator[bytes]:
        for value in values:
            yield encode(varints(_read(value)) if isinstance(value, ByteRange) else [signed(value)])

    return Derived(count * itemsize, chunks, "packed", tuple(ranges))


def _encoder(itemsize: int) -> Callable[[list[int]], bytes]:
    """Return the function that writes numbers as little-endian elements of so many bytes."""
    code = {1: "B", 2: "H", 4: "I", 8: "Q"}[itemsize]
    mask = (1 << 8 * itemsize) - 1
    return lambda numbers: struct.pack(f"<{len(numbers)}{code}", *(number & mask for number in numbers))


def _read(place: ByteRange) -> bytes:
    with open_source(place.path) as source:
        return _bytes(source, place)


def score(path: str, head: bytes, size: int) -> int:
    """Return 70 for a file that consists of the fields of a ModelProto, a graph among them."""
    if not model_proto(Beginning(path, head, size)):
        return 0
    seen = set()
    try:
        with open_source(path) as source:
            for row in fields(source, ByteRange(path, 0, size)):
                if row.number not in _MODEL or (row.number == 7 and not isinstance(row.value, ByteRange)):
                    return 0
                seen.add(row.number)
    except CkptfixError:
        return 60 if 7 in seen else 0
    return 70 if {1, 7} <= seen else 0


def read(path: str) -> Checkpoint:
    """Read names, shapes and places of the initializers; see the contract in `base`.

    Raises:
        DamagedFile: the graph is not a message.
        Truncated: the file ends inside the graph.
    """
    findings: list[Finding] = []
    arrays: list[Array] = []
    files = _Files(path)
    traits: dict[str, object] = {}
    with open_source(path) as source:
        size = source.size
        for model in fields(source, ByteRange(path, 0, size)):
            if model.number == 1:
                traits["IR version"] = model.value
            elif model.number == 2:
                traits["producer"] = text_of(source, model.value)[:80]
            elif model.number == 7 and isinstance(model.value, ByteRange):
                for tensor in _tensors(source, model.value, findings):
                    try:
                        arrays.append(_array(source, tensor, files))
                    except Unsupported as error:
                        findings.append(found("not-taken", error.message, where=tensor.name))
                    except CkptfixError as error:
                        findings.append(found("bad-tensor", error.message, where=tensor.name))
    return checkpoint_of(
        path, NAME, size, arrays, traits=traits, findings=findings, others=tuple(files.opened.values())
    )


def _tensors(source: Source, graph: ByteRange, findings: list[Finding]) -> Iterator[_Tensor]:
    """Yield the initializers of a graph."""
    count = 0
    for number, value, _ in fields(source, graph):
        if number == 5 and isinstance(value, ByteRange):
            count += 1
            if count > MOST_TENSORS:
                raise Unsupported(f"the graph has more than {MOST_TENSORS:,} initializers", path=source.name)
            yield _tensor(source, value)
        elif number == 15:
            message = "a sparse initializer is not read"
            findings.append(found("not-taken", message, where=f"sparse initializer {len(findings)}"))
        elif number == 1 and isinstance(value, ByteRange) and value.length > LARGE:
            message = f"a node of the program holds {value.length:,} bytes, which are not read: they may be a constant"
            findings.append(found("not-taken", message, where=f"node at {value.offset}", offset=value.offset))


FORMAT = read_only(NAME, "ONNX model", score, read)
