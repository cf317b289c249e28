"""Factories of derived segments: bytes that are computed from files, in bounded memory.

Creating a segment reads nothing, so planning reads no data. The chunks are computed when they are requested.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptfix.checkpoint import ByteRange, Data, Derived
from ckptfix.checkpoint.tensors import reach
from ckptfix.errors import DamagedFile
from ckptfix.io.read import read_blocks, read_chunks, read_from
from ckptfix.io.source import BATCH, Block, Source, open_source
from ckptfix.io.system import keep_freed_memory
from ckptfix.io.threads import Workers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Elements: TypeAlias = NDArray[Any]

BLOCK = 4 << 20
"""Bytes of output that `gathered` makes at once; it holds at most twice as many bytes of input."""

TURNED = 16 << 20
"""The block size if the innermost dimension is not contiguous: each pread of a transposed matrix then covers more
columns."""

AHEAD = 6
"""Pieces of a block that can wait to be written."""

TILE = 128
"""Elements of a row that are transposed at once."""

READ_COST = 4096
"""Bytes that can be read in the time of one more pread: some 2 us at 2 GB/s."""


def inflated(data: ByteRange, length: int) -> Derived:
    """Return the `length` bytes that a raw deflate stream (RFC 1951, as in zip) expands to.

    Its chunks raise DamagedFile if the stream is damaged, or expands to more or fewer bytes. No byte beyond `length` is
    yielded, however long the stream is. Bytes behind the end of the stream are ignored.
    """

    def chunks() -> Iterator[bytes]:
        stream = zlib.decompressobj(-zlib.MAX_WBITS)
        left = length
        try:
            for block in read_blocks(data):
                packed: Block = block
                while True:
                    # Request one byte more than promised, to detect a stream that is too long.
                    chunk = stream.decompress(packed, min(left + 1, 1 << 20))
                    left -= len(chunk)
                    if left < 0:
                        raise _damaged(data, f"deflated data expands to more than the promised {length} bytes")
                    if chunk:
                        yield chunk
                    packed = stream.unconsumed_tail
                    if stream.eof or not (packed or chunk):
                        break
                if stream.eof:
                    break
        except zlib.error as error:
            raise _damaged(data, f"deflated data is damaged: {error}") from error
        if left or not stream.eof:
            raise _damaged(data, f"deflated data expands to {length - left} of the promised {length} bytes")

    return Derived(length, chunks, "inflated", (data,))


def _damaged(data: ByteRange, message: str) -> DamagedFile:
    return DamagedFile(message, path=data.path, offset=data.offset)


_UNSIGNED = {array(code).itemsize: code for code in "BHILQ"}


def byteswapped(data: Data, itemsize: int) -> Derived:
    """Return `data` with the bytes of each number reversed.

    Args:
        itemsize: bytes of one number: 1, 2, 4 or 8; for a complex number, bytes of one component.

    Raises:
        DamagedFile: the length of `data` is not a multiple of `itemsize`.
    """
    code = _UNSIGNED[itemsize]
    if data.length % itemsize:
        raise DamagedFile(f"{data.length} bytes are not a whole number of {itemsize}-byte elements")

    def chunks() -> Iterator[bytes]:
        rest = b""
        for chunk in read_chunks(data):
            chunk = rest + chunk
            whole = len(chunk) - len(chunk) % itemsize
            numbers = array(code, chunk[:whole])
            numbers.byteswap()
            rest = chunk[whole:]
            yield numbers.tobytes()

    lazy = data.lazy if isinstance(data, Derived) else ()
    return Derived(data.length, chunks, "byteswapped", read_from(data), lazy=lazy)


def gathered(data: ByteRange, itemsize: int, shape: Sequence[int], stride: Sequence[int], offset: int) -> Derived:
    """Return the elements of a strided view of the storage `data`, in row-major order.

    The view is made in blocks of `BLOCK` bytes, each read in storage order: a transposed matrix costs one pread for a
    run of a column rather than for each element.

    Args:
        itemsize: bytes of one element.
        shape: sizes in elements.
        stride: steps in elements, never negative (torch has no negative strides).
        offset: first element, counted in elements.

    Raises:
        DamagedFile: the view reaches outside the storage.
    """
    count = math.prod(shape)
    if count:
        last = offset + reach(shape, stride) - 1
        if offset < 0 or min(stride, default=0) < 0 or (last + 1) * itemsize > data.length:
            raise _damaged(data, f"a view needs elements {offset} to {last} of a storage of {data.length // itemsize}")
    sizes, steps = _merged(shape, stride)

    def chunks() -> Iterator[bytes]:
        with open_source(data.path) as source:

            def read(block: tuple[int, list[int]]) -> Elements:
                first, box = block
                return _read(source, data.offset + (offset + first) * itemsize, itemsize, box, steps)

            blocks = _boxes(sizes, steps, itemsize)
            if count * itemsize <= BLOCK:
                yield from (_row_major(read(block)) for block in blocks)
                return
            keep_freed_memory()
            # Other threads reorder the elements, while this one reads and writes.
            with closing(Workers(AHEAD).run(_row_major, _cut(map(read, blocks)))) as made:
                yield from made

    return Derived(count * itemsize, chunks if count else tuple, "contiguous copy of a view", (data,))


def _merged(shape: Sequence[int], stride: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the shape and stride with the fewest dimensions that have the same elements in the same order."""
    sizes: list[int] = []
    steps: list[int] = []
    for size, step in zip(shape, stride, strict=True):
        if size == 1:
            continue
        if steps and steps[-1] == step * size:
            sizes[-1] *= size
            steps[-1] = step
        else:
            sizes.append(size)
            steps.append(step)
    return sizes, steps


def block_of(
    data: ByteRange, itemsize: int, shape: Sequence[int], stride: Sequence[int], offset: int, at: int
) -> tuple[int, bytes]:
    """Return the block of `gathered` that holds the byte `at` of the view, and the position of its first byte."""
    sizes, steps = _merged(shape, stride)
    outer, inner, height = _layout(sizes, itemsize, steps)
    base, start, box = 0, 0, list(sizes)
    if outer is not None:
        group, within = divmod(at, sizes[outer] * inner)
        row = within // (height * inner) * height
        start = group * sizes[outer] * inner + row * inner
        base = row * steps[outer]
        for size, step in zip(reversed(sizes[:outer]), reversed(steps[:outer]), strict=True):
            group, index = divmod(group, size)
            base += index * step
        box = [min(height, sizes[outer] - row), *sizes[outer + 1 :]]
    with open_source(data.path) as source:
        return start, _row_major(_read(source, data.offset + (offset + base) * itemsize, itemsize, box, steps))


def _layout(sizes: Sequence[int], itemsize: int, steps: Sequence[int]) -> tuple[int | None, int, int]:
    """Return the split of a view into blocks: its dimension, the bytes of one of its rows, and the rows in a block."""
    cut = len(sizes)
    inner = itemsize
    block = TURNED if steps and steps[-1] > 1 else BLOCK
    while cut and inner * sizes[cut - 1] <= block:
        cut -= 1
        inner *= sizes[cut]
    return (cut - 1 if cut else None), inner, max(1, block // inner)


def _boxes(sizes: Sequence[int], steps: Sequence[int], itemsize: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the view in blocks that follow each other in row-major order: (first element, sizes).

    The sizes belong to the last dimensions; the block is one element wide in the dimensions before.
    """
    outer, _, height = _layout(sizes, itemsize, steps)
    if outer is None:
        yield 0, list(sizes)
        return
    for base in _positions(sizes[:outer], steps[:outer]):
        for row in range(0, sizes[outer], height):
            yield base + row * steps[outer], [min(height, sizes[outer] - row), *sizes[outer + 1 :]]


def _positions(sizes: Sequence[int], steps: Sequence[int], base: int = 0) -> Iterator[int]:
    """Yield the positions of a view's elements in row-major order."""
    if not sizes:
        yield base
        return
    for index in range(sizes[0]):
        yield from _positions(sizes[1:], steps[1:], base + index * steps[0])


def _read(source: Source, first: int, itemsize: int, box: Sequence[int], all_steps: Sequence[int]) -> Elements:
    """Read the elements of one block, whose first is at byte `first`, and return a view of the buffer."""
    import numpy
    from numpy.lib.stride_tricks import as_strided

    steps = [step * itemsize for step in all_steps[len(all_steps) - len(box) :]]
    order = sorted(range(len(box)), key=lambda axis: steps[axis])
    spanned = _spanned(order, itemsize, box, steps)
    span = itemsize + sum((box[axis] - 1) * steps[axis] for axis in order[:spanned])
    outer = order[spanned:]
    # numpy copies elements with a numeric type several times as fast as elements without a type.
    kind = f"u{itemsize}" if itemsize in (1, 2, 4, 8) else f"V{itemsize}"
    elements: Elements = numpy.empty(span * math.prod(box[axis] for axis in outer) // itemsize, kind)
    buffer = elements.view(numpy.uint8).data
    runs = _positions([box[axis] for axis in outer], [steps[axis] for axis in outer], first)
    for place, run in zip(range(0, len(buffer), span), runs, strict=True):
        source.read_into(run, buffer[place : place + span])
    packed = list(steps)
    step = span
    for axis in reversed(outer):
        packed[axis] = step
        step *= box[axis]
    return as_strided(elements, tuple(box), packed, writeable=False)


def _cut(blocks: Iterable[Elements]) -> Iterator[Elements]:
    """Yield the blocks in pieces of at most `BATCH` bytes, or one row, to write each piece while it is in a cache."""
    for block in blocks:
        rows = max(BATCH * block.shape[0] // block.nbytes, 1)
        for row in range(0, block.shape[0], rows):
            yield block[row : row + rows]


def _row_major(view: Elements) -> bytes:
    """Return the bytes of a view's elements in row-major order."""
    import numpy

    if not view.strides or view.strides[-1] == min(view.strides):
        return view.tobytes()
    # Tiles use each line of the processor's cache completely before it is evicted.
    made = numpy.empty(view.shape, view.dtype)
    for start in range(0, view.shape[-1], TILE):
        made[..., start : start + TILE] = view[..., start : start + TILE]
    return made.tobytes()


def _spanned(order: Sequence[int], itemsize: int, box: Sequence[int], steps: Sequence[int]) -> int:
    """Return how many dimensions one read should span, smallest step first; gaps are read where that is cheaper."""
    runs = math.prod(box[axis] for axis in order if steps[axis])
    span = itemsize
    best, least = 0, runs * (READ_COST + span)
    most = max(BLOCK, runs * itemsize)
    for count, axis in enumerate(order, 1):
        if steps[axis]:
            runs //= box[axis]
            span += (box[axis] - 1) * steps[axis]
        cost = runs * (READ_COST + span)
        if runs * span <= 2 * most and cost <= least:
            best, least = count, cost
    return best
