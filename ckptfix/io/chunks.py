"""A tensor assembled from its chunks, which split it along any of its dimensions, in bounded memory.

A chunk is a box of the tensor whose elements are stored in row-major order in one range of a file. Rows that one chunk
holds whole are one range, which the kernel copies; where several chunks share rows, blocks of rows are assembled as
they stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from ckptfix.checkpoint import ByteRange, Derived, Segment
from ckptfix.dataclass import dataclass
from ckptfix.errors import DamagedFile
from ckptfix.io.crc import checksum
from ckptfix.io.derived import BLOCK
from ckptfix.io.read import ROWS, RowBlock, Saw, cut
from ckptfix.io.source import Readers
from ckptfix.io.system import keep_freed_memory
from ckptfix.urls import Virtual

MAX_WORK = 64
"""The most visits to a chunk, per chunk: the chunks of a mesh take one for each of its dimensions."""

PART = 128 << 10
"""Bytes of each chunk that a block has if rows of several chunks make it larger than `BLOCK`."""

MOST = 4 * BLOCK
"""The most bytes of such a block, unless one row has more."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor: its position, its sizes in elements, and its bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    data: ByteRange


def tiled(shape: Sequence[int], itemsize: int, chunks: Sequence[Chunk]) -> tuple[Segment, ...]:
    """Return the tensor of this `shape` in row-major order, assembled from its `chunks`.

    Args:
        itemsize: bytes of one element.

    Raises:
        DamagedFile: the chunks leave a hole, overlap, reach outside of the tensor, or have sizes that do not match
            their bytes. The message gives the position in elements.
    """
    for chunk in chunks:
        _check(shape, itemsize, chunk)
    own = [chunk for chunk in chunks if chunk.data.length]
    if not math.prod(shape):
        return ()
    if not own:
        raise DamagedFile(f"no chunk holds its {list(shape)}")
    if len(own) == 1 and own[0].sizes == tuple(shape):
        return (own[0].data,)
    return tuple(_Tiling(itemsize, len(own)).slabs(tuple(shape), own, ()))


def _check(shape: Sequence[int], itemsize: int, chunk: Chunk) -> None:
    what = f"a chunk of {list(chunk.sizes)} at {list(chunk.offsets)}"
    if len(chunk.sizes) != len(shape) or len(chunk.offsets) != len(shape):
        raise DamagedFile(f"{what} has the wrong number of dimensions for {list(shape)}")
    for first, count, size in zip(chunk.offsets, chunk.sizes, shape, strict=True):
        if first < 0 or count < 0 or first + count > size:
            raise DamagedFile(f"{what} reaches outside of {list(shape)}")
    if chunk.data.length != math.prod(chunk.sizes) * itemsize:
        raise DamagedFile(f"{what} needs {math.prod(chunk.sizes) * itemsize} bytes, but has {chunk.data.length}")


class _Tiling:
    """The slabs of a tensor, which are runs of rows that the same chunks hold."""

    def __init__(self, itemsize: int, chunks: int) -> None:
        self._itemsize = itemsize
        self._left = MAX_WORK * chunks + 1024

    def slabs(self, shape: tuple[int, ...], chunks: list[Chunk], at: tuple[int, ...]) -> Iterator[Segment]:
        """Yield the segments of the sub-tensor of this shape at the index `at` of the tensor."""
        self._count(len(chunks), at)
        if not shape:
            if len(chunks) > 1:
                raise DamagedFile(f"{len(chunks)} chunks hold the element at {list(at)}")
            yield chunks[0].data
            return
        for first, last, inside in self._cut(shape[0], chunks, at, 0):
            alone = inside[0] if len(inside) == 1 else None
            if alone is not None and alone.sizes[1:] == shape[1:]:
                row = math.prod(shape[1:]) * self._itemsize
                yield alone.data.sub((first - alone.offsets[0]) * row, (last - first) * row)
                continue
            rows = [_rows(chunk, first, last) for chunk in inside]
            inner = shape[1:]
            if not inner:
                raise DamagedFile(f"{len(inside)} chunks hold the elements at {[*at, first]}")
            if math.prod(inner) * self._itemsize > BLOCK:
                for index in range(last - first):
                    below = [_row(chunk, index) for chunk in rows]
                    yield from self.slabs(inner, below, (*at, first + index))
                continue
            self._check_row([_row(chunk, 0) for chunk in rows], inner, (*at, first))
            yield from self._blocks(inner, rows, last - first)

    def _count(self, looks: int, at: tuple[int, ...]) -> None:
        self._left -= looks
        if self._left < 0:
            raise DamagedFile(f"too many chunks share the rows at {list(at)}: no mesh has such chunks")

    def _cut(
        self, size: int, chunks: list[Chunk], at: tuple[int, ...], axis: int
    ) -> Iterator[tuple[int, int, list[Chunk]]]:
        """Yield the slabs along the dimension `axis`, with the chunks that each of them crosses."""
        ordered = sorted(chunks, key=lambda chunk: chunk.offsets[axis])
        cuts = sorted({0, size, *(edge for chunk in chunks for edge in _edges(chunk, axis))})
        active: list[Chunk] = []
        coming = iter(ordered)
        following = next(coming, None)
        for first, last in pairwise(cuts):
            active = [chunk for chunk in active if _edges(chunk, axis)[1] > first]
            while following is not None and following.offsets[axis] <= first:
                active.append(following)
                following = next(coming, None)
            self._count(len(active), at)
            if not active:
                raise DamagedFile(f"no chunk holds rows {first} to {last - 1}" + (f" at {list(at)}" if at else ""))
            yield first, last, list(active)

    def _check_row(self, chunks: list[Chunk], shape: tuple[int, ...], at: tuple[int, ...]) -> None:
        """Refuse chunks that do not form one whole row."""
        self._count(len(chunks), at)
        if not shape:
            if len(chunks) > 1:
                raise DamagedFile(f"{len(chunks)} chunks hold the element at {list(at)}")
            return
        for first, _, inside in self._cut(shape[0], chunks, at, 0):
            if len(inside) > 1 or inside[0].sizes[1:] != shape[1:]:
                below = [_row(chunk, first - chunk.offsets[0]) for chunk in inside]
                self._check_row(below, shape[1:], (*at, first))

    def _blocks(self, inner: tuple[int, ...], chunks: list[Chunk], rows: int) -> Iterator[Segment]:
        """Yield rows that several chunks share, in streams of about `BLOCK` bytes."""
        row = math.prod(inner) * self._itemsize
        height = max(1, min(max(BLOCK, len(chunks) * PART), MOST) // row)
        for first in range(0, rows, height):
            count = min(height, rows - first)
            inside = [_rows(chunk, first, first + count, 0) for chunk in chunks]
            yield _Rows((count, *inner), self._itemsize, inside).all()


class _Rows(RowBlock):
    """A block of rows of the sizes `shape`, which these chunks share."""

    __slots__ = ("_chunks", "_itemsize", "_shape")

    def __init__(self, shape: tuple[int, ...], itemsize: int, chunks: Sequence[Chunk]) -> None:
        super().__init__()
        self._shape = shape
        self._itemsize = itemsize
        self._chunks = chunks

    def all(self) -> Derived:
        """Return all bytes of the block."""
        nbytes = math.prod(self._shape) * self._itemsize
        return Derived(nbytes, self, ROWS, tuple(chunk.data for chunk in self._chunks))

    def part(self, first: int, count: int) -> Derived:
        inner = self._shape[1:]
        row = math.prod(inner) * self._itemsize
        top, bottom = first // row, -(-(first + count) // row)
        inside = [_rows(chunk, top, bottom, 0) for chunk in self._chunks]
        rows = _Rows((bottom - top, *inner), self._itemsize, inside).all()
        first -= top * row
        if count == rows.length:
            return rows
        return replace(rows, length=count, chunks=lambda: cut(rows.chunks(), first, count))

    def made(self, saw: Saw | None = None) -> memoryview:
        import numpy

        keep_freed_memory()
        # numpy copies numbers several times as fast as elements without a type: the widest that no chunk divides.
        edges = (self._shape[-1], *(edge for chunk in self._chunks for edge in _edges(chunk, -1)))
        width = math.gcd(8, *(edge * self._itemsize for edge in edges))
        kind = numpy.dtype(f"u{width}")
        block = numpy.empty((*self._shape[:-1], self._shape[-1] * self._itemsize // width), kind)
        read = numpy.empty(max(chunk.data.length for chunk in self._chunks), numpy.uint8)
        with Readers() as readers:
            for chunk in self._chunks:
                own = read[: chunk.data.length]
                readers[chunk.data.path].read_into(chunk.data.offset, own.data)
                if saw is not None and not isinstance(chunk.data.path, Virtual):
                    saw(chunk.data.path, chunk.data.offset, own.data)
                *outer, inner = zip(chunk.offsets, chunk.sizes, strict=True)
                first, size = (number * self._itemsize // width for number in inner)
                box = (*(slice(at, at + count) for at, count in outer), slice(first, first + size))
                block[box] = own.view(kind).reshape(*chunk.sizes[:-1], size)
        made = block.reshape(-1).view(numpy.uint8).data
        if self.is_summed:
            self.crc32 = checksum(made)
        return made


def _edges(chunk: Chunk, axis: int) -> tuple[int, int]:
    first = chunk.offsets[axis]
    return first, first + chunk.sizes[axis]


def _rows(chunk: Chunk, first: int, last: int, base: int | None = None) -> Chunk:
    """Return rows `first` to `last` of a chunk, counted in the tensor, or from `base`, the row that it begins with."""
    start = chunk.offsets[0] if base is None else base
    sizes = chunk.sizes[1:]
    row = chunk.data.length // chunk.sizes[0]
    data = chunk.data.sub((first - start) * row, (last - first) * row)
    return Chunk((0, *chunk.offsets[1:]), (last - first, *sizes), data)


def _row(chunk: Chunk, index: int) -> Chunk:
    """Return row `index` of a chunk as a chunk with one dimension less."""
    row = chunk.data.length // chunk.sizes[0]
    return Chunk(chunk.offsets[1:], chunk.sizes[1:], chunk.data.sub(index * row, row))
