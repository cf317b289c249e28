"""CRC-32 of bytes that are read in the background, and of two parts joined."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING

from ckptfix.checkpoint import ByteRange, Data, Derived
from ckptfix.io.read import CHECKSUM, read_chunks, read_from
from ckptfix.io.source import Readers, threads

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor


CRC_CHUNK = 256 << 10
"""Bytes per read while summing: they fit in the processor's cache."""

CRC_TASK = 16 << 20
"""Bytes that one background task sums."""

TASKS_AHEAD = 16
"""Tasks that may run ahead of the writer: few enough that it still finds what they read in the page cache."""


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
                self._pool = threads(2, "crc32")
            for task in self._tasks[len(self._sums) : needed + TASKS_AHEAD]:
                self._sums.append(self._pool.submit(_crc32_of, task))


def _crc32_of(task: Sequence[Data]) -> list[int]:
    sums = []
    with Readers() as readers:
        for data in task:
            crc = 0
            if isinstance(data, ByteRange):
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
