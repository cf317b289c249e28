"""A comparison of bytes with the checksums that their file states for them, in the background while they are copied."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from threading import BoundedSemaphore
from typing import TYPE_CHECKING

from ckptfix.checkpoint import ByteRange, Data, Plan, RangeCheck
from ckptfix.checkpoint.byte_ranges import segment_length
from ckptfix.commands import quoted
from ckptfix.errors import DamagedFile
from ckptfix.io.checksums import PORTION, JoinedSums, crc32_on
from ckptfix.io.copy import by_kernel
from ckptfix.io.crc import checksum
from ckptfix.io.read import CHECKSUM, read_from, row_block
from ckptfix.io.source import open_source, source_key, sums_of, threads
from ckptfix.io.threads import OVERHEAD, Flag

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

WAITING = 16
"""Portions that the writer has read and that are not summed yet; at this limit, the writer waits for the oldest."""


class Checking:
    """The checks of a plan, one after the other, in other threads than the writer's.

    Bytes that the writer reads are summed right afterwards (`saw`, `sum`), and so are those that a checksum of the
    output covers: their checks come last, and join these sums. Other bytes are read here, in the same order as the
    kernel copies them: the later reader finds them in the page cache. CRC-32 takes 0.4 s per GB, and releases the
    interpreter for other threads.
    """

    def __init__(self, plan: Plan) -> None:
        self._stopped = Flag()
        self._pool: ThreadPoolExecutor | None = None
        self._running: list[Future[None]] = []
        self._wanted: dict[str, tuple[list[int], list[int]]] = {}
        """File -> the starts and the ends of the ranges that are summed as the writer reads them."""
        self._room = BoundedSemaphore(WAITING)
        self._last: list[RangeCheck] = []
        if not plan.checks:
            return
        made, summed, read = _summed(plan)
        now: list[RangeCheck] = []
        for check in sorted(plan.checks, key=_place):
            data = check.data
            if not isinstance(data, ByteRange) or data.length < PORTION:
                now.append(check)
            elif not (is_made := made.meet(data)) and summed.meet(data):
                self._last.append(check)
            elif is_made or read.meet(data):
                self._last.append(check)
                begins, ends = self._wanted.setdefault(data.path, ([], []))
                begins.append(data.offset)
                ends.append(data.end)
            else:
                now.append(check)
        self._pool = threads(2, "checks")
        self._running.append(self._pool.submit(run, now, self._stopped))

    def saw(self, name: str, offset: int, data: bytes | memoryview) -> None:
        """Sum bytes of the file that the writer has read, in another thread: they must not change any more."""
        if self._pool is None or not self._is_wanted(name, offset, len(data)):
            return
        self._room.acquire()
        try:
            self._pool.submit(self._sum, name, offset, data)
        except BaseException:
            self._room.release()
            raise

    def sum(self, name: str, offset: int, data: bytes | memoryview) -> None:
        """Sum bytes of the file that one of the writer's own threads has read, while they are in its cache."""
        if self._is_wanted(name, offset, len(data)):
            sums_of(name)[offset] = len(data), checksum(data)

    def _is_wanted(self, name: str, offset: int, length: int) -> bool:
        """Return whether a check that comes last covers these bytes, and they are worth remembering."""
        wanted = self._wanted.get(name)
        if wanted is None or length < PORTION:
            return False
        number = bisect_right(wanted[0], offset) - 1
        return number >= 0 and offset + length <= wanted[1][number]

    def finish(self) -> None:
        """Wait for all checks.

        Raises:
            DamagedFile: bytes do not match their checksum.
            CkptfixError: they cannot be read.
        """
        if self._pool is not None:
            for _ in range(WAITING):  # wait until all that was read is summed
                self._room.acquire()
            self._running.append(self._pool.submit(run, self._last, self._stopped, JoinedSums()))
        for running in self._running:
            running.result()

    def stop(self) -> None:
        """End the threads, whether they are done or not."""
        self._stopped.set()
        if self._pool is not None:
            self._pool.shutdown()

    def _sum(self, name: str, offset: int, data: bytes | memoryview) -> None:
        try:
            if not self._stopped.is_set():
                sums_of(name)[offset] = len(data), checksum(data)
        finally:
            self._room.release()


class _Ranges:
    """Ranges of files."""

    def __init__(self) -> None:
        self._starts: dict[str, list[tuple[int, int]]] = {}

    def add(self, where: ByteRange) -> None:
        self._starts.setdefault(where.path, []).append((where.offset, where.end))

    def sort(self) -> None:
        for places in self._starts.values():
            places.sort()

    def meet(self, where: ByteRange) -> bool:
        """Return whether one of the ranges begins in `where`, or contains its beginning."""
        places = self._starts.get(where.path, ())
        number = bisect_right(places, (where.offset, where.end))
        before = number > 0 and places[number - 1][1] > where.offset
        return before or (number < len(places) and places[number][0] < where.end)


def _summed(plan: Plan) -> tuple[_Ranges, _Ranges, _Ranges]:
    """Return the ranges in blocks of rows, those that checksums of the output cover, and those that the writer reads.

    The checksum of a block is that of its rows, and not of the ranges.
    """
    made, summed, read = _Ranges(), _Ranges(), _Ranges()
    for file in plan.files:
        position = 0
        for segment in file.segments:
            if isinstance(segment, ByteRange):
                if segment.length >= PORTION and not by_kernel(segment, position):
                    read.add(segment)
            elif not isinstance(segment, bytes) and (segment.what == CHECKSUM or row_block(segment) is not None):
                for where in read_from(segment):
                    if where.length >= PORTION:
                        (summed if segment.what == CHECKSUM else made).add(where)
            position += segment_length(segment)
    for ranges in (made, summed, read):
        ranges.sort()
    return made, summed, read


def run(checks: Iterable[RangeCheck], stopped: Flag | None = None, joined: JoinedSums | None = None) -> None:
    """Compare bytes with their checksums, until `stopped`.

    Args:
        joined: the sums of bytes that were already read; without it, all bytes are read.

    Raises:
        DamagedFile: bytes do not match their checksum.
        CkptfixError: they cannot be read.
    """
    for near in _near(checks):
        sums = _sums(near, joined, stopped)
        if stopped is not None and stopped.is_set():
            return
        for check, crc in zip(near, sums, strict=True):
            if crc != check.crc32:
                raise differs(check)


def _near(checks: Iterable[RangeCheck]) -> Iterator[list[RangeCheck]]:
    """Group the checks, in order: those of small ranges that follow each other closely are one group."""
    group: list[RangeCheck] = []
    for check in checks:
        if group and not _is_near(group[0].data, group[-1].data, check.data):
            yield group
            group = []
        group.append(check)
    if group:
        yield group


def _is_near(first: Data, last: Data, data: Data) -> bool:
    """Return whether one short read serves `data` and the ranges from `first` to `last`."""
    if not (isinstance(first, ByteRange) and isinstance(last, ByteRange) and isinstance(data, ByteRange)):
        return False
    close = 0 <= data.offset - last.end <= OVERHEAD and data.end - first.offset <= PORTION
    return close and source_key(data.path) == source_key(first.path)


def _sums(near: Sequence[RangeCheck], joined: JoinedSums | None, stopped: Flag | None) -> list[int]:
    """Return the checksums of the ranges of a group."""
    first, last = near[0].data, near[-1].data
    if len(near) > 1 and isinstance(first, ByteRange) and isinstance(last, ByteRange):
        with open_source(first.path) as source:
            read = memoryview(source.read(first.offset, last.end - first.offset))
        places = (data for check in near if isinstance(data := check.data, ByteRange))
        return [checksum(read[data.offset - first.offset : data.end - first.offset]) for data in places]
    if joined is not None and isinstance(first, ByteRange):
        return [joined.crc32(first, stopped)]
    return [crc32_on(first, stopped=stopped)]


def _place(check: RangeCheck) -> tuple[str, int]:
    first = next(iter(read_from(check.data)), None)
    return (first.path, first.offset) if first is not None else ("", 0)


def differs(check: RangeCheck) -> DamagedFile:
    """Return an error about bytes that do not match their checksum."""
    path, offset = _place(check)
    return DamagedFile(
        "its bytes do not match the CRC-32 that the file states: they are damaged",
        path=path or None,
        where=f"storage {check.where}",
        offset=offset,
        hint=f"keep the intact tensors with `ckptfix repair {quoted(path)} OUT`",
    )
