"""CRC-32 of bytes that are read in the background, and of joined parts; a digest that identifies equal bytes.

An output needs a new checksum of its bytes, and an input states one that they must match. Both cover the same bytes, in
different portions: each portion is summed only once (`source.sums_of`), and the sums are joined.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from threading import Lock
from typing import TYPE_CHECKING

from ckptfix.checkpoint import ByteRange, Data, Derived, Segment
from ckptfix.checkpoint.byte_ranges import Spliced, pieces_of, segment_length
from ckptfix.errors import CkptfixError
from ckptfix.io.crc import checksum
from ckptfix.io.read import CHECKSUM, read_blocks, read_chunks, read_from, row_block
from ckptfix.io.source import Block, sums_of
from ckptfix.io.threads import Flag, RangeBlock, Workers, tasks
from ckptfix.urls import Virtual

if TYPE_CHECKING:
    from concurrent.futures import Future


PORTION = 64 << 10
"""The smallest range, in bytes, whose sum is remembered: joining a sum costs about as much as summing so many bytes
anew."""


class Checksums:
    """CRC-32 of many ranges, summed by threads shortly before the writer needs them.

    The zip format needs a checksum behind the data and again in the directory. Summing begins with the first request
    and reads a little ahead of the last one. Several threads sum the parts of a long range.
    """

    def __init__(self, ranges: Sequence[Data]) -> None:
        self._ranges = ranges
        self._made = {number: pieces for number, data in enumerate(ranges) if (pieces := _of_blocks(data))}
        """Ranges that are assembled: their blocks are summed while they are written, so that each is made once."""
        self._tasks = tasks(_nothing(data) if number in self._made else data for number, data in enumerate(ranges))
        self._places: list[tuple[int, int]] = [(0, 0)] * len(ranges)
        """For each range: the task that it begins in, and its position there."""
        for nth, task in enumerate(self._tasks):
            for position, part in enumerate(task):
                if not part.start:
                    self._places[part.number] = (nth, position)
        self._sums: list[Future[list[int | CkptfixError]]] = []
        self._begun = Workers().begun(_crc32_of, self._tasks)
        self._lock = Lock()

    def value(self, index: int) -> int:
        """Return the checksum of the range number `index`, and wait until it is known.

        Raises:
            CkptfixError: the range cannot be read, as in `read_chunks`.
        """
        if index in self._made:
            return crc32_of_pieces(self._made[index])
        first, position = self._places[index]
        crc = self._sum_of(first, position)
        for task in range(first + 1, len(self._tasks)):
            part = self._tasks[task][0]
            if part.number != index:
                break
            crc = crc32_joined(crc, self._sum_of(task, 0), part.data.length)
        return crc

    def close(self) -> None:
        """End the threads, also if not all checksums were requested."""
        self._begun.close()

    def segment(self, index: int, pack: Callable[[int], bytes], blank: bytes) -> Derived:
        """Return `pack(checksum)` of the range number `index` as a segment; `blank` is ``pack(0)``."""
        sources = read_from(self._ranges[index])
        return Derived(len(blank), lambda: (pack(self.value(index)),), CHECKSUM, sources, blank=blank)

    def _sum_of(self, task: int, position: int) -> int:
        with self._lock:
            self._sums += islice(self._begun, max(task + 1 - len(self._sums), 0))
        found = self._sums[task].result()[position]
        if isinstance(found, CkptfixError):
            raise found
        return found


class SummedStream:
    """A stream that is summed while it is written, so that a checksum behind it in the file needs no second pass."""

    def __init__(self, data: Derived) -> None:
        self._whole = data
        self._crc32: int | None = None
        self.data = replace(data, chunks=self._chunks, blank=b"")

    def _chunks(self) -> Iterator[bytes]:
        crc = 0
        for chunk in read_chunks(self._whole):
            crc = checksum(chunk, crc)
            yield chunk
        self._crc32 = crc

    def value(self) -> int:
        """Return the checksum; if the stream was not written yet, run it. Raises like `read_chunks`."""
        if self._crc32 is None:
            self._crc32 = crc32_on(self._whole)
        return self._crc32

    def segment(self, pack: Callable[[int], bytes], blank: bytes) -> Derived:
        """Return `pack(checksum)` as a segment, like `Checksums.segment`."""
        return Derived(len(blank), lambda: (pack(self.value()),), CHECKSUM, read_from(self._whole), blank=blank)


def _crc32_of(task: Sequence[RangeBlock]) -> list[int | CkptfixError]:
    return list(map(_sum_or_error, task))


def _sum_or_error(part: RangeBlock) -> int | CkptfixError:
    """Return an error instead of raising it, because it concerns only one of the ranges of its task."""
    try:
        return crc32_of_pieces(pieces_of(part.data))
    except CkptfixError as error:
        return error


def _of_blocks(data: Data) -> tuple[Segment, ...]:
    """Return the pieces of a range if there are blocks of rows among them, which are then summed when they are made."""
    if not isinstance(data, ByteRange) or not isinstance(data.path, Spliced):
        return ()
    pieces = tuple(pieces_of(data))
    blocks = [block for piece in pieces if (block := row_block(piece)) is not None]
    for block in blocks:
        block.is_summed = True
    return pieces if blocks else ()


def _nothing(data: Data) -> Data:
    return data.sub(0, 0) if isinstance(data, ByteRange) else data


def crc32_of_pieces(pieces: Iterable[Segment]) -> int:
    """Return the checksum of the concatenated pieces. Raises like `read_chunks`."""
    crc = 0
    for piece in pieces:
        block = row_block(piece)
        if block is not None and block.is_summed:
            if block.crc32 is None:
                block.made()
            assert block.crc32 is not None
            crc = crc32_joined(crc, block.crc32, segment_length(piece))
        elif isinstance(piece, ByteRange) and piece.length >= PORTION:
            own = crc32_on(piece)
            sums_of(piece.path)[piece.offset] = piece.length, own
            crc = crc32_joined(crc, own, piece.length) if crc else own
        else:
            crc = checksum(piece, crc) if isinstance(piece, bytes) else crc32_on(piece, crc)
    return crc


def crc32_on(data: Data, crc: int = 0, stopped: Flag | None = None) -> int:
    """Return the checksum `crc` extended by `data`, which is read. Raises like `read_chunks`."""
    for block in read_blocks(data):
        if stopped is not None and stopped.is_set():
            break
        crc = checksum(block, crc)
    return crc


class JoinedSums:
    """Checksums of ranges, joined from the sums that this command has made. Create it when all summing is done."""

    def __init__(self) -> None:
        self._starts: dict[str, list[int]] = {}

    def crc32(self, where: ByteRange, stopped: Flag | None = None) -> int:
        """Return the checksum of a range; parts that were not summed are read. Raises like `read_chunks`."""
        if isinstance(where.path, Virtual):
            return crc32_on(where, stopped=stopped)
        known = sums_of(where.path)
        starts = self._starts.get(where.path)
        if starts is None:
            starts = self._starts[where.path] = sorted(known)
        crc, at = 0, where.offset
        for start in starts[bisect_left(starts, where.offset) : bisect_left(starts, where.end)]:
            length, own = known[start]
            if start < at or start + length > where.end:
                continue
            crc = crc32_on(ByteRange(where.path, at, start - at), crc, stopped)
            crc = crc32_joined(crc, own, length)
            at = start + length
        return crc32_on(ByteRange(where.path, at, where.end - at), crc, stopped)


def digest(blocks: Iterable[Block], size: int = 32) -> bytes:
    """Return a value that is equal only for equal strings of bytes: BLAKE2b of `size` bytes."""
    from hashlib import blake2b

    state = blake2b(digest_size=size)
    for block in blocks:
        state.update(block)
    return state.digest()


_CRC32 = 0xEDB88320
"""The polynomial of zip (APPNOTE 4.4.7) with its bits reversed: the coefficient of x**0 is the highest bit."""


def crc32_joined(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two concatenated byte strings from the CRC-32 of each.

    Appending n bytes multiplies the polynomial of the first string by x**8n.

    Args:
        length: bytes of the second string.
    """
    return _product(first, _shift(length)) ^ second


@lru_cache(maxsize=1024)
def _shift(length: int) -> int:
    """Return x**(8 * length) modulo the polynomial."""
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
