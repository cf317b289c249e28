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
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ckptfix.checkpoint import ByteRange, Checkpoint, Data, RangeCheck
from ckptfix.checkpoint.byte_ranges import pieces_of, segment_length
from ckptfix.checkpoint.file_version import FileStat
from ckptfix.errors import IsFolder
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
    from concurrent.futures import ThreadPoolExecutor

RECENT = 2_000_000_000
"""Nanoseconds after the last write to a file during which its writer may still be at work."""

TWICE = 4 << 20
"""Bytes from which on two threads read. Starting a thread takes as long as copying a few hundred kilobytes."""


class Differs(Exception):
    """Raised for bytes that do not match the checksum stored for them."""

    def __init__(self, check: RangeCheck, crc32: int) -> None:
        super().__init__(check, crc32)
        self.check = check
        self.crc32 = crc32


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

    def fill(
        self, data: Data, view: memoryview, checks: Iterable[RangeCheck] = (), *, all_of_them: bool = True
    ) -> None:
        """Fill `view` with the bytes of `data`.

        Args:
            checks: checksums of `data`, or of pieces of it.
            all_of_them: also verify, in separate reads, the pieces that this call reads only in part.

        Raises:
            Differs: bytes do not match their checksum.
            DamagedFile: a file is too short, or was written to since it was opened.
            CkptfixError: the bytes cannot be read.
        """
        due = {check.data: check for check in checks}
        rows: list[_Row] = []
        at = 0
        for piece in pieces_of(data):
            part = view[at : at + segment_length(piece)]
            at += len(part)
            if isinstance(piece, bytes):
                part[:] = piece
                continue
            check = due.pop(piece, None)
            if isinstance(piece, ByteRange):
                rows.append(_Row(piece, part, check))
                continue
            crc = _copied(read_chunks(piece), part, summed=check is not None)
            if check is not None and crc != check.crc32:
                raise Differs(check, crc)
        for row, crc in zip(rows, self._read(rows), strict=True):
            if row.check is not None and crc != row.check.crc32:
                raise Differs(row.check, crc)
        if all_of_them:
            background_checks.run(due.values())

    def refuse_changes(self) -> None:
        """Raise `ChangedFile` unless everything read so far came from one version of the files.

        An open file keeps its content when a different file takes its name. So a replaced file matters only if the
        checkpoint has several files: then one could be of a different version than the rest.

        Raises:
            ChangedFile: a file was written to since it was opened, or one of several files was replaced.
        """
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        with blames_changes():
            self._refuse_changes()

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

    def _read(self, rows: Sequence[_Row]) -> list[int]:
        """Fill views with ranges of files, and return the checksums of the ranges that are checked or read again.

        If there are many bytes, two threads read: the first touch of fresh memory takes longer than the copy.
        """
        total = sum(len(row.view) for row in rows)
        if WORKERS > 1 and total >= TWICE and all(is_local(row.piece.path) for row in rows):
            sums = self._on_two_threads(rows, -(-total // 2))
        else:
            sums = [self._filled(row) for row in rows]
        for row, crc in zip(rows, sums, strict=True):
            if row.check is None and self._is_recent(row.piece.path):
                self._again.append((row.piece, crc))
        return sums

    def _on_two_threads(self, rows: Sequence[_Row], most: int) -> list[int]:
        """Fill the views, in shares of at most `most` bytes that each thread takes in turn."""
        # Large shares: two threads that touch neighboring pages for the first time wait for each other.
        shares = [(number, share) for number, row in enumerate(rows) for share in row.shares(most)]
        made = [0] * len(shares)
        left = deque(range(len(shares)))

        def work() -> None:
            with suppress(IndexError):
                while True:
                    nth = left.popleft()
                    made[nth] = self._filled(shares[nth][1])

        pool = self._pool = self._pool or threads(1)
        try:
            other = pool.submit(work)
            work()
            other.result()
        except BaseException:
            left.clear()
            self._pool = None
            pool.shutdown()  # from here on, nothing writes to the views
            raise
        sums = [0] * len(rows)
        for (number, share), crc in zip(shares, made, strict=True):
            sums[number] = crc32_joined(sums[number], crc, len(share.view))
        return sums

    def _filled(self, row: _Row) -> int:
        """Fill the view of a row, and return its checksum: 0 unless it is checked or read again.

        Each block is summed while it is still in a cache.
        """
        piece, view = row.piece, row.view
        with self._open(piece.path) as source:
            _refuse_short(source, piece)
            source.expect(piece.offset, piece.length)
            if row.check is None and not self._is_recent(piece.path):
                source.read_into(piece.offset, view)
                return 0
            crc = 0
            for at in range(0, len(view), BLOCK):
                block = view[at : at + BLOCK]
                source.read_into(piece.offset + at, block)
                crc = checksum(block, crc)
            return crc


class _Row(NamedTuple):
    """A range of a file, the memory that it fills, and the checksum of the range or of one that it is a part of."""

    piece: ByteRange
    view: memoryview
    check: RangeCheck | None

    def shares(self, most: int) -> Iterator[_Row]:
        """Yield parts of at most `most` bytes."""
        for at in range(0, len(self.view), most):
            view = self.view[at : at + most]
            yield _Row(self.piece.sub(at, len(view)), view, self.check)


def _refuse_short(source: Source, piece: ByteRange) -> None:
    if piece.end > source.size:
        raise truncated(piece, source.size)


def _copied(chunks: Iterator[bytes], view: memoryview, *, summed: bool) -> int:
    at = crc = 0
    for chunk in chunks:
        view[at : at + len(chunk)] = chunk
        if summed:
            crc = checksum(chunk, crc)
        at += len(chunk)
    return crc
