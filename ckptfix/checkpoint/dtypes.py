"""One table of dtypes: the names of the same elements in torch, its storage classes, safetensors and numpy.

Sources: torch/storage.py (``_dtype_to_storage_type_map``, ``_new_dtypes``), c10/core/ScalarType.h for sizes,
the safetensors format description for its codes. The package ml_dtypes provides the numpy dtypes that numpy lacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ckptfix.dataclass import dataclass
from ckptfix.errors import Unsupported

if TYPE_CHECKING:
    import numpy


@dataclass(frozen=True, slots=True)
class Dtype:
    """A row of the table.

    Attributes:
        name: torch's name, without ``torch.``.
        itemsize: bytes of one element, as torch counts them.
        storage_class: class in ``torch`` that a pickle uses for it; None if it is saved as UntypedStorage.
        safetensors: code in a safetensors header; None if there is no code for it.
        numpy: dtype name to view the bytes with; None when no package can compute with them.
        family: the kind of arithmetic that applies to it.
        packed: elements that the format counts where torch counts one (float4 pairs).
        per_item: elements that torch counts in one item of `itemsize` bytes.
    """

    name: str
    itemsize: int
    storage_class: str | None
    safetensors: str | None
    numpy: str | None
    family: Literal["float", "int", "bool", "complex", "quantized", "bits"]
    packed: int = 1
    per_item: int = 1

    def nbytes(self, elements: int) -> int:
        """Return the number of bytes that hold this many elements, as torch counts them."""
        return -(-elements // self.per_item) * self.itemsize

    @property
    def is_complex(self) -> bool:
        """True if an element consists of two numbers, even if no package computes with them."""
        return self.family == "complex" or self.name == "complex32"

    @property
    def unit(self) -> int:
        """Bytes of the number whose byte order matters; a complex element consists of two such numbers."""
        return self.itemsize // 2 if self.is_complex else self.itemsize


TABLE: tuple[Dtype, ...] = (
    Dtype("float64", 8, "DoubleStorage", "F64", "float64", "float"),
    Dtype("float32", 4, "FloatStorage", "F32", "float32", "float"),
    Dtype("float16", 2, "HalfStorage", "F16", "float16", "float"),
    Dtype("bfloat16", 2, "BFloat16Storage", "BF16", "bfloat16", "float"),
    Dtype("int64", 8, "LongStorage", "I64", "int64", "int"),
    Dtype("int32", 4, "IntStorage", "I32", "int32", "int"),
    Dtype("int16", 2, "ShortStorage", "I16", "int16", "int"),
    Dtype("int8", 1, "CharStorage", "I8", "int8", "int"),
    Dtype("uint8", 1, "ByteStorage", "U8", "uint8", "int"),
    Dtype("bool", 1, "BoolStorage", "BOOL", "bool", "bool"),
    Dtype("complex128", 16, "ComplexDoubleStorage", None, "complex128", "complex"),
    Dtype("complex64", 8, "ComplexFloatStorage", "C64", "complex64", "complex"),
    Dtype("qint8", 1, "QInt8Storage", None, "int8", "quantized"),
    Dtype("qint32", 4, "QInt32Storage", None, "int32", "quantized"),
    Dtype("quint8", 1, "QUInt8Storage", None, "uint8", "quantized"),
    Dtype("quint4x2", 1, "QUInt4x2Storage", None, "uint8", "quantized", per_item=2),
    Dtype("quint2x4", 1, "QUInt2x4Storage", None, "uint8", "quantized", per_item=4),
    Dtype("uint16", 2, None, "U16", "uint16", "int"),
    Dtype("uint32", 4, None, "U32", "uint32", "int"),
    Dtype("uint64", 8, None, "U64", "uint64", "int"),
    Dtype("float8_e5m2", 1, None, "F8_E5M2", "float8_e5m2", "float"),
    Dtype("float8_e4m3fn", 1, None, "F8_E4M3", "float8_e4m3fn", "float"),
    Dtype("float8_e5m2fnuz", 1, None, "F8_E5M2FNUZ", "float8_e5m2fnuz", "float"),
    Dtype("float8_e4m3fnuz", 1, None, "F8_E4M3FNUZ", "float8_e4m3fnuz", "float"),
    Dtype("float8_e8m0fnu", 1, None, "F8_E8M0", "float8_e8m0fnu", "float"),
    Dtype("float4_e2m1fn_x2", 1, None, "F4", "uint8", "bits", packed=2),
    Dtype("complex32", 4, None, None, None, "bits"),
    Dtype("bits8", 1, None, None, "uint8", "bits"),
    Dtype("bits16", 2, None, None, "uint16", "bits"),
    Dtype("bits1x8", 1, None, None, "uint8", "bits"),
    Dtype("bits2x4", 1, None, None, "uint8", "bits"),
    Dtype("bits4x2", 1, None, None, "uint8", "bits"),
)

ALIASES = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "cdouble": "complex128",
    "cfloat": "complex64",
    "chalf": "complex32",
}

_BY_NAME = {row.name: row for row in TABLE}
_BY_NAME |= {alias: _BY_NAME[name] for alias, name in ALIASES.items()}
_BY_STORAGE = {row.storage_class: row for row in TABLE if row.storage_class}
_BY_STORAGE["UntypedStorage"] = _BY_NAME["uint8"]
_BY_SAFETENSORS = {row.safetensors: row for row in TABLE if row.safetensors}


def by_name(name: str) -> Dtype:
    """Return the row for torch's `name`, with or without ``torch.``. Raises Unsupported for an unknown name."""
    row = _BY_NAME.get(name.removeprefix("torch."))
    if row is None:
        raise Unsupported(f"the dtype {name!r} is unknown")
    return row


def find(name: str) -> Dtype | None:
    """Return the row for `name` like `by_name`, but None for an unknown name."""
    return _BY_NAME.get(name)


def by_storage_class(name: str) -> Dtype | None:
    """Return the row for a storage class of torch, such as ``"HalfStorage"``; an untyped storage counts bytes."""
    return _BY_STORAGE.get(name)


def by_safetensors(code: str) -> Dtype | None:
    """Return the row for a code of a safetensors header, such as ``"BF16"``."""
    return _BY_SAFETENSORS.get(code)


def numpy_dtype(name: str) -> numpy.dtype[numpy.generic] | None:
    """Return the numpy dtype that views bytes of the torch dtype `name`, or None; imports numpy."""
    import numpy

    view = by_name(name).numpy
    if view is None:
        return None
    if view == "bfloat16" or view.startswith("float8"):
        import ml_dtypes

        extended: numpy.dtype[numpy.generic] = numpy.dtype(getattr(ml_dtypes, view))
        return extended
    return numpy.dtype(view)
