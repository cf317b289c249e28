"""The elements of a tensor: the values of its bytes, for every kind of view that a file can have.

A tensor is its values. Only a range of its file is moved; strides, and the bits that torch sets when it negates or
conjugates a tensor without touching its memory (``tensor.conj()``, ``z.conj().imag``), only describe how to read that
range. All code that compares, hashes, sums or writes elements uses this module. `same_place` shows without reading that
two tensors are one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckptfix.checkpoint import ByteRange, Data, Derived, Storage, TensorEntry, contiguous_stride, dtypes
from ckptfix.checkpoint.dtypes import Dtype
from ckptfix.dataclass import dataclass
from ckptfix.errors import Unsupported
from ckptfix.io.derived import gathered
from ckptfix.io.read import cut, read_chunks, read_from, whole_items

NEGATED = frozenset({"float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"})
"""The real dtypes that torch can negate; ``resolve_neg`` of any other fails."""


@dataclass(frozen=True, slots=True)
class Resolve:
    """A function that computes the values of a tensor with lazy marks from its bytes, for whole elements at a time.

    Attributes:
        dtype: of the elements.
        lazy: the marks.
        byteorder: of the file.
    """

    dtype: Dtype
    lazy: tuple[str, ...]
    byteorder: str

    def __call__(self, chunk: bytes | memoryview) -> bytes:
        """Return the values of the bytes `chunk`, in the same byte order."""
        import numpy

        order = ">" if self.byteorder == "big" else "<"
        unit = self.dtype.unit
        if self.dtype.family == "int":
            numbers = numpy.frombuffer(chunk, f"{order}i{unit}").copy()
            numpy.negative(numbers, out=numbers)
            return numbers.tobytes()
        # The sign of a floating-point number is a separate bit, also for NaN and zero.
        signs = numpy.frombuffer(chunk, f"{order}u{unit}").copy()
        flip = signs.dtype.type(1 << (8 * unit - 1))
        negative, conjugate = "neg" in self.lazy, "conj" in self.lazy
        if not self.dtype.is_complex:
            signs ^= flip
            return signs.tobytes()
        if negative:
            signs[0::2] ^= flip
        if negative != conjugate:
            signs[1::2] ^= flip
        return signs.tobytes()


def why_unresolved(entry: TensorEntry) -> str | None:
    """Return why torch cannot compute the values that a tensor's marks stand for; None if it can, or without marks."""
    if not entry.lazy:
        return None
    row = dtypes.find(entry.dtype)
    if row is None or not row.is_complex:
        if row is None or "conj" in entry.lazy:
            return f"torch has no conjugate of {entry.dtype}"
        if entry.dtype not in NEGATED:
            return f"torch has no negative of {entry.dtype}"
    return None


def resolve(entry: TensorEntry, byteorder: str) -> Resolve | None:
    """Return the function that computes a tensor's values from its bytes; None if the bytes are the values.

    Args:
        byteorder: of the tensor's file.

    Raises:
        Unsupported: torch cannot compute the values.
    """
    if not entry.lazy:
        return None
    if (why := why_unresolved(entry)) is not None:
        raise Unsupported(why, where=entry.name)
    return Resolve(dtypes.by_name(entry.dtype), entry.lazy, byteorder)


def row_major(entry: TensorEntry, byteorder: str) -> Data:
    """Return the elements of a dense tensor in row-major order, in the byte order of its file.

    Raises:
        Unsupported: a strided view of bytes that are not stored in a file directly, or values that torch cannot
            compute.
        DamagedFile: it reaches outside its storage.
    """
    if entry.lazy:
        values = resolve(entry, byteorder)
        assert values is not None
        return _resolved(_stored(replace(entry, detail="")), values)
    return _stored(entry)


def _stored(entry: TensorEntry) -> Data:
    data = entry.storage.data if entry.storage is not None else None
    if isinstance(data, Derived):
        if not entry.is_contiguous:
            raise Unsupported("it is a strided view of a compressed or big-endian record", where=entry.name)
        return _part(data, entry.offset * entry.itemsize, entry.nbytes)
    if isinstance(data, ByteRange) and not entry.is_contiguous:
        return gathered(data, entry.itemsize, entry.shape, entry.stride, entry.offset)
    return entry.data


def _part(data: Derived, offset: int, length: int) -> Derived:
    """Return `length` bytes that begin `offset` bytes into `data`."""
    if (offset, length) == (0, data.length):
        return data
    return replace(data, length=length, chunks=lambda: cut(read_chunks(data), offset, length), blank=b"")


def _resolved(data: Data, values: Resolve) -> Derived:
    size = values.dtype.itemsize

    def chunks() -> Iterator[bytes]:
        return map(values, whole_items(read_chunks(data), size))

    return Derived(data.length, chunks, f"resolved {', '.join(values.lazy)}", read_from(data), lazy=values.lazy)


def resolved(entry: TensorEntry, byteorder: str) -> TensorEntry:
    """Return a dense tensor whose bytes are its values: `entry` itself, or one without marks over a stream of its own.

    Two keys of one tensor remain keys of one tensor.

    Raises:
        Unsupported: as in `row_major`.
    """
    storage = entry.storage
    if not entry.lazy or storage is None or storage.data is None:
        return entry
    if not entry.numel:
        return replace(entry, detail="")
    key = f"{storage.key} {entry.dtype} {entry.offset} {entry.shape} {entry.stride} {entry.detail}"
    own = Storage(key, entry.dtype, entry.nbytes, storage.location, row_major(entry, byteorder))
    return replace(entry, storage=own, offset=0, stride=contiguous_stride(entry.shape), detail="")
