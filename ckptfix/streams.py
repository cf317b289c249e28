"""Makers of derived segments: bytes that no file has as they must be written, in bounded memory.

Nothing is read when a segment is made, only when its chunks are asked for: planning reads no data.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING

from ckptfix.checkpoint import ByteRange, Data, Derived
from ckptfix.errors import DamagedFile
from ckptfix.fileio import CHECKSUM, Reader, read_chunks, read_from

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    import numpy

BLOCK = 4 << 20
"""Bytes of output that `gathered` makes at once; it holds at most twice as many of input."""

READ_COST = 4096
"""Bytes that could have been read in the time that one more pread takes: some 2 us at 2 GB/s."""

CRC_CHUNK = 256 << 10
"""Bytes per read while summing: they fit in the processor's cache."""

CRC_TASK = 16 << 20
"""Bytes that one background task sums."""

TASKS_AHEAD = 16
"""Tasks that may run ahead of the writer: few enough that it still finds what they read in the page cache."""


def inflated(data: ByteRange, length: int) -> Derived:
    """The `length` bytes that a raw deflate stream (RFC 1951, as in zip) expands to.

    Its chunks raise DamagedFile for a stream that is damaged or makes more or fewer bytes, whatever it would make:
    no byte beyond `length` is yielded. Bytes behind the end of the stream are not looked at.
    """

    def chunks() -> Iterator[bytes]:
        stream = zlib.decompressobj(-zlib.MAX_WBITS)
        left = length
        try:
            for packed in read_chunks(data, CRC_CHUNK):
                while True:
                    # One byte more than promised is asked for: it shows that a stream is too long.
                    chunk = stream.decompress(packed, min(left + 1, 1 << 20))
                    left -= len(chunk)
                    if left < 0:
                        raise _damaged(data, f"deflated data makes more than the {length} bytes promised")
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
            raise _damaged(data, f"deflated data makes {length - left} of the {length} bytes promised")

    return Derived(length, chunks, "inflated", (data,))


def _damaged(data: ByteRange, message: str) -> DamagedFile:
    return DamagedFile(message, path=data.path, offset=data.offset)


_UNSIGNED = {array(code).itemsize: code for code in "BHILQ"}


def byteswapped(data: Data, itemsize: int) -> Derived:
    """`data` with the bytes of each number reversed.

    Args:
        itemsize: bytes of one number: 1, 2, 4 or 8; of one component for a complex number.

    Raises:
        DamagedFile: `data` does not hold whole numbers.
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

    return Derived(data.length, chunks, "byteswapped", read_from(data))


def gathered(data: ByteRange, itemsize: int, shape: Sequence[int], stride: Sequence[int], offset: int) -> Derived:
    """The elements of a strided view of the storage `data`, in row-major order.

    The view is made in blocks of `BLOCK` bytes, each read in storage order: a transposed matrix costs a pread
    for a run of a column, not one for an element.

    Args:
        itemsize: bytes of one element.
        shape: sizes in elements.
        stride: steps in elements, none negative (torch has no such).
        offset: first element, counted in elements.

    Raises:
        DamagedFile: the view reaches outside the storage.
    """
    count = math.prod(shape)
    if count:
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if offset < 0 or min(stride, default=0) < 0 or (last + 1) * itemsize > data.length:
            raise _damaged(data, f"a view of elements {offset} to {last} in a storage of {data.length // itemsize}")
    sizes, steps = _merged(shape, stride)

    def chunks() -> Iterator[bytes]:
        with Reader(data.path) as source:
            for first, box in _boxes(sizes, steps, itemsize):
                yield _gather(source, data.offset + (offset + first) * itemsize, itemsize, box, steps)

    return Derived(count * itemsize, chunks if count else tuple, "contiguous copy of a view", (data,))


def _merged(shape: Sequence[int], stride: Sequence[int]) -> tuple[list[int], list[int]]:
    """The same elements in the same order with the fewest dimensions."""
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


def _boxes(sizes: Sequence[int], steps: Sequence[int], itemsize: int) -> Iterator[tuple[int, list[int]]]:
    """The view cut into blocks that follow each other in row-major order: (first element, sizes).

    Sizes stand for the last dimensions; those before are one element wide.
    """
    cut = len(sizes)
    inner = itemsize
    while cut and inner * sizes[cut - 1] <= BLOCK:
        cut -= 1
        inner *= sizes[cut]
    if not cut:
        yield 0, list(sizes)
        return
    outer = cut - 1
    height = max(1, BLOCK // inner)
    for base in _positions(sizes[:outer], steps[:outer]):
        for row in range(0, sizes[outer], height):
            yield base + row * steps[outer], [min(height, sizes[outer] - row), *sizes[cut:]]


def _positions(sizes: Sequence[int], steps: Sequence[int], base: int = 0) -> Iterator[int]:
    """Where the elements of a view are, in row-major order."""
    if not sizes:
        yield base
        return
    for index in range(sizes[0]):
        yield from _positions(sizes[1:], steps[1:], base + index * steps[0])


def _gather(source: Reader, start: int, itemsize: int, box: Sequence[int], all_steps: Sequence[int]) -> bytes:
    """The elements of one block, whose first is at byte `start`."""
    import numpy
    from numpy.lib.stride_tricks import as_strided

    steps = [step * itemsize for step in all_steps[len(all_steps) - len(box) :]]
    order = sorted(range(len(box)), key=lambda axis: steps[axis])
    spanned = _spanned(order, itemsize, box, steps)
    span = itemsize + sum((box[axis] - 1) * steps[axis] for axis in order[:spanned])
    outer = order[spanned:]
    buffer = bytearray(span * math.prod(box[axis] for axis in outer))
    runs = _positions([box[axis] for axis in outer], [steps[axis] for axis in outer], start)
    for place, run in zip(range(0, len(buffer), span), runs, strict=True):
        buffer[place : place + span] = source.read(run, span)
    packed = list(steps)
    step = span
    for axis in reversed(outer):
        packed[axis] = step
        step *= box[axis]
    elements: numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.void]] = numpy.ndarray(
        (span // itemsize,), f"V{itemsize}", buffer
    )
    return as_strided(elements, tuple(box), packed, writeable=False).tobytes()


def _spanned(order: Sequence[int], itemsize: int, box: Sequence[int], steps: Sequence[int]) -> int:
    """How many dimensions, smallest step first, one read should span; gaps are read where that is cheaper."""
    runs = math.prod(box[axis] for axis in order if steps[axis])
    span = itemsize
    best, least = 0, runs * (READ_COST + span)
    for count, axis in enumerate(order, 1):
        if steps[axis]:
            runs //= box[axis]
            span += (box[axis] - 1) * steps[axis]
        cost = runs * (READ_COST + span)
        if runs * span <= 2 * BLOCK and cost <= least:
            best, least = count, cost
    return best


class Checksums:
    """CRC-32 of many ranges, summed by two threads shortly before the writer needs them.

    The zip format wants a checksum behind the data and again in the directory. Summing starts with the first
    question and reads a little ahead of the last one. A long range is summed in parts, by both threads.
    """

    def __init__(self, ranges: Sequence[Data]) -> None:
        self._ranges = ranges
        self._tasks: list[list[Data]] = []
        self._places: list[tuple[int, int, int]] = []
        """For each range: its first task, its position there, and how many tasks share it."""
        room = 0
        for data in ranges:
            if isinstance(data, ByteRange) and data.length > CRC_TASK:
                offsets = range(0, data.length, CRC_TASK)
                self._places.append((len(self._tasks), 0, len(offsets)))
                self._tasks += [[data.sub(offset, min(CRC_TASK, data.length - offset))] for offset in offsets]
                room = 0
                continue
            if room < data.length or not self._tasks:
                self._tasks.append([])
                room = CRC_TASK
            self._places.append((len(self._tasks) - 1, len(self._tasks[-1]), 1))
            self._tasks[-1].append(data)
            room -= data.length
        self._sums: list[Future[list[int]]] = []
        self._lock = Lock()
        self._pool: ThreadPoolExecutor | None = None

    def value(self, index: int) -> int:
        """The checksum of the range number `index`; waits until it is known.

        Raises:
            CkptfixError: the range cannot be read, as `read_chunks`.
        """
        first, position, count = self._places[index]
        self._summon(first + count)
        crc = self._sums[first].result()[position]
        for task in range(first + 1, first + count):
            crc = crc32_joined(crc, self._sums[task].result()[0], self._tasks[task][0].length)
        return crc

    def segment(self, index: int, pack: Callable[[int], bytes], length: int) -> Derived:
        """`pack(checksum)` of the range number `index`, as a segment of `length` bytes."""
        return Derived(length, lambda: (pack(self.value(index)),), CHECKSUM, read_from(self._ranges[index]))

    def _summon(self, needed: int) -> None:
        """Have the first `needed` tasks begun, and some after them."""
        if len(self._sums) >= min(needed + TASKS_AHEAD // 2, len(self._tasks)):
            return
        with self._lock:
            if self._pool is None:
                from concurrent.futures import ThreadPoolExecutor

                self._pool = ThreadPoolExecutor(2, "crc32")
            for task in self._tasks[len(self._sums) : needed + TASKS_AHEAD]:
                self._sums.append(self._pool.submit(_crc32_of, task))


def _crc32_of(task: Sequence[Data]) -> list[int]:
    sums = []
    with ExitStack() as stack:
        readers: dict[str, Reader] = {}
        for data in task:
            crc = 0
            if isinstance(data, ByteRange):
                if data.path not in readers:
                    readers[data.path] = stack.enter_context(Reader(data.path))
                for chunk in readers[data.path].chunks(data.offset, data.length, CRC_CHUNK):
                    crc = zlib.crc32(chunk, crc)
            else:
                for chunk in read_chunks(data):
                    crc = zlib.crc32(chunk, crc)
            sums.append(crc)
    return sums


_CRC32 = 0xEDB88320
"""The polynomial of zip (APPNOTE 4.4.7) with its bits reversed: the coefficient of x**0 is the highest bit."""


def crc32_joined(first: int, second: int, length: int) -> int:
    """The CRC-32 of two byte strings one after the other, from theirs; `length` is the second one's.

    Appending n bytes multiplies the polynomial that the first stands for by x**8n.
    """
    return _product(first, _shift(length)) ^ second


@lru_cache(maxsize=64)
def _shift(length: int) -> int:
    """x**(8 * length) modulo the polynomial."""
    power, square = 1 << 31, 1 << 23
    while length:
        if length & 1:
            power = _product(power, square)
        square = _product(square, square)
        length >>= 1
    return power


def _product(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_CRC32 if b & 1 else 0)
    return product
