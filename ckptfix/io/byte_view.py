"""Tensors cut, joined and transposed by their positions: creating one reads no data, and few bytes are held at once.

An `ByteView` is a strided view of bytes. Cutting, permuting and narrowing only change the view. Arrays that are joined
along their first dimension become a file of pieces (`planned.SplicedFile`), which the kernel copies. Arrays that are
joined along a different dimension, and views that must be row-major for the next step, become streams that can be read
anywhere (`Turned`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from ckptfix.checkpoint import ByteRange, Data, Derived, Segment, contiguous_stride, dtypes
from ckptfix.checkpoint.byte_ranges import Spliced, in_one_piece
from ckptfix.checkpoint.tensors import is_contiguous
from ckptfix.dataclass import dataclass
from ckptfix.errors import Refused, about
from ckptfix.io.checksums import crc32_joined
from ckptfix.io.chunks import Chunk, tiled
from ckptfix.io.derived import block_of, gathered
from ckptfix.io.read import cut, read_chunks
from ckptfix.io.source import Block
from ckptfix.io.virtual_files import SplicedFile, SplicedPiece, VirtualFile

_NUMBERS = count()
ZEROS = 1 << 20


@dataclass(frozen=True, slots=True)
class ByteView:
    """A strided view of bytes.

    Attributes:
        data: the bytes that it is a view of.
        itemsize: bytes of an element.
        shape, stride, offset: in elements.
        crc32: the checksum that files state of its elements in row-major order; None if they do not state one.
    """

    data: ByteRange
    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    crc32: int | None = None

    @classmethod
    def whole(cls, data: ByteRange, itemsize: int, shape: tuple[int, ...], crc32: int | None = None) -> ByteView:
        """Return `data` as a row-major tensor."""
        return cls(data, itemsize, shape, contiguous_stride(shape), 0, crc32)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        return not self.numel or is_contiguous(self.shape, self.stride)


def bytes_of(array: ByteView) -> Data:
    """Return the elements in row-major order, ready to be written."""
    return in_one_piece(_run(array)) if array.is_contiguous else _gathered(array)


def _run(array: ByteView) -> ByteRange:
    start = array.offset * array.itemsize if array.numel else 0
    return array.data.sub(start, array.nbytes)


def _gathered(array: ByteView) -> Derived:
    return gathered(array.data, array.itemsize, array.shape, array.stride, array.offset)


def row_major(array: ByteView) -> ByteView:
    """Return the same tensor as one run of bytes."""
    if array.is_contiguous:
        return ByteView.whole(_run(array), array.itemsize, array.shape, array.crc32)
    return ByteView.whole(ByteRange(Turned(array), 0, array.nbytes), array.itemsize, array.shape)


def permuted(array: ByteView, dims: Sequence[int]) -> ByteView:
    """Return the array with its dimensions in this order."""
    shape, stride = (tuple(sizes[dim] for dim in dims) for sizes in (array.shape, array.stride))
    return replace(array, shape=shape, stride=stride, crc32=None)


def narrowed(array: ByteView, dim: int, start: int, size: int) -> ByteView:
    """Return `size` rows from `start` on along `dim`."""
    if size == array.shape[dim]:
        return array
    shape = (*array.shape[:dim], size, *array.shape[dim + 1 :])
    return replace(array, shape=shape, offset=array.offset + start * array.stride[dim], crc32=None)


def selected(array: ByteView, dim: int, index: int) -> ByteView:
    """Return one row along `dim`, without that dimension."""
    row = narrowed(array, dim, index, 1)
    shape, stride = ((*sizes[:dim], *sizes[dim + 1 :]) for sizes in (row.shape, row.stride))
    return replace(row, shape=shape, stride=stride)


def reshaped(array: ByteView, shape: tuple[int, ...]) -> ByteView:
    """Return the same elements in the same order, with a different shape of the same size."""
    if array.is_contiguous:
        return replace(array, shape=shape, stride=contiguous_stride(shape))
    stride = _stride_of(array, shape)
    if stride is None:
        return ByteView.whole(row_major(array).data, array.itemsize, shape)
    return replace(array, shape=shape, stride=stride)


def _stride_of(array: ByteView, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the stride of a view of `array` with the shape `shape`; None if such a view does not exist."""
    old = [(size, step) for size, step in zip(array.shape, array.stride, strict=True) if size != 1]
    made: list[int] = []
    sizes = list(shape)
    while old:
        # Join the innermost dimensions that can be walked as one, and split them into the new dimensions.
        size, step = old.pop()
        base = step
        while old and old[-1][1] == step * size and old[-1][0]:
            outer, _ = old.pop()
            size *= outer
        while size > 1:
            if not sizes or size % sizes[-1]:
                return None
            made.append(base)
            base *= sizes[-1]
            size //= sizes.pop()
    made += [1] * len(sizes)
    return tuple(reversed(made)) if all(size == 1 for size in sizes) else None


def joined(arrays: Sequence[ByteView], dim: int, name: str) -> ByteView:
    """Return the concatenation of the arrays along `dim`.

    Args:
        name: the name of the file of their pieces in messages.
    """
    first = arrays[0]
    if len(arrays) == 1:
        return first
    total = sum(array.shape[dim] for array in arrays)
    shape = (*first.shape[:dim], total, *first.shape[dim + 1 :])
    if math.prod(shape[:dim]) == 1:
        return _spliced([row_major(array) for array in arrays], first.itemsize, shape, name)
    chunks = []
    at = 0
    for array in arrays:
        offsets = (0,) * dim + (at,) + (0,) * (len(shape) - dim - 1)
        chunks.append(Chunk(offsets, array.shape, row_major(array).data))
        at += array.shape[dim]

    def make(_: int) -> SplicedPiece:
        return SplicedPiece(tiled(shape, first.itemsize, chunks))

    nbytes = math.prod(shape) * first.itemsize
    return ByteView.whole(SplicedFile(_named(name), [nbytes], make).place(0), first.itemsize, shape)


def _spliced(arrays: Sequence[ByteView], itemsize: int, shape: tuple[int, ...], name: str) -> ByteView:
    def make(index: int) -> SplicedPiece:
        return SplicedPiece((arrays[index].data,))

    file = SplicedFile(_named(name), [array.nbytes for array in arrays], make)
    crc: int | None = 0
    for array in arrays:
        crc = None if crc is None or array.crc32 is None else crc32_joined(crc, array.crc32, array.nbytes)
    return ByteView.whole(ByteRange(file, 0, file.size), itemsize, shape, crc)


def stacked(arrays: Sequence[ByteView], dim: int, name: str) -> ByteView:
    """Return arrays of one shape as the rows of a new dimension."""
    shape = arrays[0].shape
    return joined([reshaped(array, (*shape[:dim], 1, *shape[dim:])) for array in arrays], dim, name)


def padded(array: ByteView, dim: int, size: int, name: str) -> ByteView:
    """Return the array with rows of zeros appended along `dim` until there are `size` rows."""
    shape = (*array.shape[:dim], size - array.shape[dim], *array.shape[dim + 1 :])
    nbytes = math.prod(shape) * array.itemsize
    zeros = Derived(nbytes, lambda: _zeros(nbytes), f"{nbytes} zeros")

    def make(_: int) -> SplicedPiece:
        return SplicedPiece((zeros,))

    file = SplicedFile(_named(f"{name} (padding)"), [nbytes], make)
    return joined([array, ByteView.whole(file.place(0), array.itemsize, shape)], dim, name)


FLOAT_BITS: dict[str, tuple[int, int, int]] = {
    "float16": (0x8000, 0x7C00, 0x3C00),
    "bfloat16": (0x8000, 0x7F80, 0x3F80),
    "float32": (0x8000_0000, 0x7F80_0000, 0x3F80_0000),
    "float64": (0x8000_0000_0000_0000, 0x7FF0_0000_0000_0000, 0x3FF0_0000_0000_0000),
}
"""dtype -> its bit of the sign, its bits of the exponent, and the number one (IEEE 754; bfloat16 is half a float32)."""


def masked(array: ByteView, mask: ByteView, dtype: str, name: str) -> ByteView:
    """Return the product of an array and a mask of 0 and 1, both of the same shape and of a dtype in `FLOAT_BITS`.

    Its bytes raise Refused where the mask has a different number, or hides one that is infinite or not a number.

    Args:
        name: the name of the file of its bytes in messages.
    """
    return _computed(partial(_product, dtype), (array, mask), name)


def added(array: ByteView, number: int, dtype: str, name: str) -> ByteView:
    """Return the sums of the elements and a number, rounded to their own dtype, which is in `FLOAT_BITS`."""
    return _computed(partial(_sums, dtype, number), (array,), name)


def _computed(compute: Callable[..., bytes], arrays: Sequence[ByteView], name: str) -> ByteView:
    file = Computed(compute, [row_major(array) for array in arrays], name)
    return ByteView.whole(ByteRange(file, 0, file.size), arrays[0].itemsize, arrays[0].shape)


def _product(dtype: str, value: Block, mask: Block) -> bytes:
    import numpy

    sign, exponent, one = FLOAT_BITS[dtype]
    numbers, kept = (numpy.frombuffer(data, f"<u{dtypes.by_name(dtype).itemsize}") for data in (value, mask))
    hidden = kept & ~numpy.array(sign, kept.dtype) == 0
    odd = ~hidden & (kept != one)
    if odd.any() or (numbers[hidden] & exponent == exponent).any():
        why = "a mask has numbers other than 0 and 1" if odd.any() else "a mask hides numbers that are not finite"
        raise Refused(why, hint="call torch.nn.utils.prune.remove in the script that pruned the model")
    return bytes(numpy.where(hidden, numbers & sign, numbers).tobytes())


def _sums(dtype: str, number: int, value: Block) -> bytes:
    import numpy

    kind = dtypes.numpy_dtype(dtype)
    assert kind is not None
    little = kind if dtype == "bfloat16" else kind.newbyteorder("<")
    numbers: Any = numpy.frombuffer(value, little)
    with numpy.errstate(over="ignore", invalid="ignore"):
        return bytes((numbers + kind.type(number)).astype(little, copy=False).tobytes())


def _zeros(nbytes: int) -> Iterator[bytes]:
    for start in range(0, nbytes, ZEROS):
        yield bytes(min(ZEROS, nbytes - start))


def _named(name: str) -> str:
    """Return a unique name for a file of pieces: equal ranges of files with equal names count as the same bytes."""
    return f"{name} #{next(_NUMBERS)}"


class Turned(VirtualFile, Spliced):
    """The name of a virtual file that holds a view in row-major order, computed in blocks when it is read."""

    _array: ByteView
    _block: tuple[int, bytes]

    def __new__(cls, array: ByteView) -> Turned:
        made = super().__new__(cls, _named(str(array.data.path)))
        made._array = array
        made.size = array.nbytes
        made._block = (0, b"")
        return made

    def pieces(self, offset: int, length: int) -> Iterator[Segment]:
        whole = _gathered(self._array)
        if length == self.size:
            yield whole
        else:
            yield replace(whole, length=length, chunks=lambda: cut(whole.chunks(), offset, length))

    def at(self, offset: int) -> tuple[Segment, int]:
        start, block = self._block
        if not start <= offset < start + len(block):
            array = self._array
            start, block = block_of(array.data, array.itemsize, array.shape, array.stride, array.offset, offset)
            self._block = (start, block)
        return block, offset - start


class Computed(VirtualFile, Spliced):
    """The name of a virtual file that holds numbers computed from views of equal size, in blocks when it is read."""

    _data: tuple[ByteRange, ...]
    _compute: Callable[..., bytes]
    _block: tuple[int, bytes]

    def __new__(cls, compute: Callable[..., bytes], arrays: Sequence[ByteView], name: str) -> Computed:
        made = super().__new__(cls, _named(name))
        made._data = tuple(map(_run, arrays))
        made._compute = compute
        made.size = arrays[0].nbytes
        made._block = (0, b"")
        return made

    def pieces(self, offset: int, length: int) -> Iterator[Segment]:
        whole = Derived(self.size, self._chunks, "computed", self._data)
        if length == self.size:
            yield whole
        else:
            yield replace(whole, length=length, chunks=lambda: cut(whole.chunks(), offset, length))

    def _chunks(self) -> Iterator[bytes]:
        for blocks in zip(*(read_chunks(data, ZEROS) for data in self._data), strict=True):
            yield self._made(*blocks)

    def _made(self, *blocks: Block) -> bytes:
        with about(str(self)):
            return self._compute(*blocks)

    def at(self, offset: int) -> tuple[Segment, int]:
        start, block = self._block
        if not start <= offset < start + len(block):
            start = offset - offset % ZEROS
            length = min(ZEROS, self.size - start)
            block = self._made(*(b"".join(read_chunks(data.sub(start, length), ZEROS)) for data in self._data))
            self._block = (start, block)
        return block, offset - start
