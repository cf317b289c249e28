"""Reading the bytes of a checkpoint for the loaders, all from one version of its files.

Bytes are checked in the same read in which they are used: they go to the caller's memory and are summed there. At the
end, the stat of each file is compared with the one taken when it was opened. If a file was written to just before it
was opened, its writer may still be at work, and its times do not show that. Data in such a file that no checksum covers
is read a second time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ckptfix import platform
from ckptfix.checkpoint import ByteRange, Checkpoint, Data, RangeCheck
from ckptfix.checkpoint.byte_ranges import pieces_of, segment_length
from ckptfix.checkpoint.file_version import FileStat
from ckptfix.errors import ChangedFile, CkptfixError, IsFolder
from ckptfix.io import background_checks
from ckptfix.io.checksums import Checksums, crc32_joined
from ckptfix.io.crc import checksum
from ckptfix.io.read import read_chunks
from ckptfix.io.source import (
    BLOCK,
    Source,
    blames_changes,
    change_of,
    is_local,
    open_source,
    refuse_changed,
    threads,
    truncated,
    was_changed,
)
from ckptfix.io.threads import WORKERS

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

RECENT = 2_000_000_000
"""Nanoseconds after the last write to a file during which its writer may still be at work."""

TWICE = 4 << 20
"""Bytes from which on two threads read. Starting a thread takes as long as copying a few hundred kilobytes."""

SHARE = 4 << 20
"""The most bytes that a thread takes at once. Two threads that touch neighboring pages of fresh memory wait for each
other, so shares are large; at the end, one thread waits for the last share of the other, so they are not larger."""


class Differs(Exception):
    """Raised for bytes that do not match the checksum stored for them.

    Attributes:
        number: number of the fill that they belong to.
    """

    def __init__(self, number: int, check: RangeCheck, crc32: int) -> None:
        super().__init__(number, check, crc32)
        self.number = number
        self.check = check
        self.crc32 = crc32


class Fill(NamedTuple):
    """Memory, and the data to fill it with.

    Attributes:
        checks: checksums of `data`, or of pieces of it.
        all_of_them: also verify, in separate reads, the pieces that are read only in part.
        where: the tensor that errors name.
    """

    data: Data
    view: memoryview
    checks: Sequence[RangeCheck] = ()
    all_of_them: bool = True
    where: str | None = None


class Progress:
    """The progress of a call with its fills, by their numbers: a call that fails leaves some of them partly filled.

    Attributes:
        begun: fills whose memory may have been written to.
        filled: fills whose memory has all of its data.
    """

    def __init__(self) -> None:
        self.begun: set[int] = set()
        self.filled: set[int] = set()


class Reading:
    """The reads from the files of one checkpoint, from when it was opened.

    Attributes:
        marks: path -> stat of the file when it was opened.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.marks = {file.path: file.stamp for file in checkpoint.files if file.stamp != FileStat()}
        self._opened = time.time_ns()
        self._again: list[tuple[ByteRange, int]] = []
        self._pool: ThreadPoolExecutor | None = None

    def fill(self, fills: Sequence[Fill], progress: Progress | None = None) -> None:
        """Fill memory with data of the files. If there are many bytes, two threads do it, in any order.

        Args:
            progress: is kept up to date, for the case of an error.

        Raises:
            Differs: bytes do not match their checksum.
            DamagedFile: a file is too short, or was written to since it was opened.
            CkptfixError: the bytes cannot be read.
        """
        progress = Progress() if progress is None else progress
        rows: list[_Row] = []
        rest: list[RangeCheck] = []
        for number, (data, view, checks, all_of_them, where) in enumerate(fills):
            due = {check.data: check for check in checks}
            at = 0
            for piece in pieces_of(data):
                part = view[at : at + segment_length(piece)]
                at += len(part)
                check = None if isinstance(piece, bytes) else due.pop(piece, None)
                if isinstance(piece, ByteRange):
                    rows.append(_Row(number, piece, part, check, where))
                    continue
                progress.begun.add(number)
                crc = _copied((piece,) if isinstance(piece, bytes) else read_chunks(piece), part, summed=bool(check))
                if check is not None and crc != check.crc32:
                    raise Differs(number, check, crc)
            rest += due.values() if all_of_them else ()
        sums = self._read(rows, progress)
        progress.filled.update(range(len(fills)))
        for row, crc in zip(rows, sums, strict=True):
            if row.check is not None and crc != row.check.crc32:
                progress.filled.remove(row.number)
                raise Differs(row.number, row.check, crc)
        background_checks.run(rest)

    def refuse_changes(self) -> None:
        """Raise `ChangedFile` unless everything read so far came from one version of the files.

        An open file keeps its content when a different file takes its name. So a replaced file matters only if the
        checkpoint has several files: then one could be of a different version than the rest.

        Raises:
            ChangedFile: a file was written to since it was opened, or one of several files was replaced.
        """
        self._end_pool()
        with blames_changes():
            self._refuse_changes()

    def _end_pool(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def _refuse_changes(self) -> None:
        for path, before in self.marks.items():
            try:
                change = change_of(path, before, by_name=len(self.marks) > 1)
            except IsFolder:  # the files in it have their own marks
                continue
            if change is not None:
                raise change
        again = self._again
        sums = Checksums([piece for piece, _ in again])
        for number, (piece, crc) in enumerate(again):
            if sums.value(number) != crc:
                raise was_changed(piece.path, "a second reading gave different bytes")

    def _open(self, path: str) -> Source:
        source = open_source(path)
        try:
            refuse_changed(path, source.mark, self.marks.setdefault(path, source.mark))
        except BaseException:
            source.close()
            raise
        return source

    def refuse_short(self, data: Data) -> None:
        """Raise `DamagedFile` if a file is too short to hold `data`."""
        for piece in pieces_of(data):
            if isinstance(piece, ByteRange):
                with self._open(piece.path) as source:
                    _refuse_short(source, piece)

    def _is_recent(self, path: str) -> bool:
        stamp = self.marks[path]
        return not stamp.tag and 0 <= self._opened - stamp.ctime_ns < RECENT

    def _read(self, rows: Sequence[_Row], progress: Progress) -> list[int]:
        """Fill views with ranges of files, and return the checksums of the ranges that are checked or read again.

        If there are many bytes, two threads read: the first touch of fresh memory takes longer than the copy.
        """
        total = sum(len(row.view) for row in rows)
        two = WORKERS > 1 and total >= TWICE and all(map(is_local, {row.piece.path for row in rows}))
        sums = self._in_shares(rows, min(-(-total // 2), SHARE) if two else max(total, 1), progress)
        for row, crc in zip(rows, sums, strict=True):
            if row.check is None and self._is_recent(row.piece.path):
                self._again.append((row.piece, crc))
        return sums

    def _in_shares(self, rows: Sequence[_Row], most: int, progress: Progress) -> list[int]:
        """Fill the views, in shares of at most `most` bytes. If they are several, two threads take them in turn."""
        shares = [(number, share) for number, row in enumerate(rows) for share in row.shares(most)]
        made: list[int | None] = [None] * len(shares)
        left = deque(range(len(shares)))

        def work() -> None:
            while True:
                try:
                    nth = left.popleft()
                except IndexError:
                    return
                share = shares[nth][1]
                progress.begun.add(share.number)
                try:
                    made[nth] = self._filled(share)
                except BaseException as error:
                    left.clear()
                    if isinstance(error, CkptfixError) and not isinstance(error, ChangedFile):
                        error.where = error.where or share.where
                    raise

        other: Future[None] | None = None
        try:
            if sum(len(row.view) for row in rows) > most:
                self._pool = self._pool or threads(1)
                other = self._pool.submit(work)
            work()
            if other is not None:
                other.result()
        except BaseException:
            left.clear()
            self._end_pool()  # from here on, nothing writes to the views
            unfilled = {share.number for (_, share), crc in zip(shares, made, strict=True) if crc is None}
            progress.filled.update(progress.begun - unfilled)
            raise
        sums = [0] * len(rows)
        for (number, share), crc in zip(shares, made, strict=True):
            assert crc is not None
            sums[number] = crc32_joined(sums[number], crc, len(share.view)) if sums[number] else crc
        return sums

    def _filled(self, row: _Row) -> int:
        """Fill the view of a row, and return its checksum: 0 unless it is checked or read again.

        Each block is summed while it is still in a cache, and so are the pages in which the kernel zeroes fresh memory.
        """
        piece, view = row.piece, row.view
        with self._open(piece.path) as source:
            _refuse_short(source, piece)
            source.expect(piece.offset, piece.length)
            summed = row.check is not None or self._is_recent(piece.path)
            fresh = len(view) >= BLOCK and platform.is_untouched(view)
            crc = 0
            size = BLOCK if fresh or summed else max(len(view), 1)
            for at in range(0, len(view), size):
                block = view[at : at + size]
                if fresh:
                    platform.touch(block)
                source.read_into(piece.offset + at, block)
                if summed:
                    crc = checksum(block, crc)
            return crc


class _Row(NamedTuple):
    """A range of a file, the memory that it fills, and the checksum of the range or of one that it is a part of.

    Attributes:
        number: number of the fill that it belongs to.
    """

    number: int
    piece: ByteRange
    view: memoryview
    check: RangeCheck | None
    where: str | None

    def shares(self, most: int) -> Iterator[_Row]:
        """Yield parts of at most `most` bytes."""
        for at in range(0, len(self.view), most):
            view = self.view[at : at + most]
            yield _Row(self.number, self.piece.sub(at, len(view)), view, self.check, self.where)


def _refuse_short(source: Source, piece: ByteRange) -> None:
    if piece.end > source.size:
        raise truncated(piece, source.size)


def _copied(chunks: Iterable[bytes], view: memoryview, *, summed: bool) -> int:
    at = crc = 0
    for chunk in chunks:
        view[at : at + len(chunk)] = chunk
        if summed:
            crc = checksum(chunk, crc)
        at += len(chunk)
    return crc
