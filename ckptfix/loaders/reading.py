"""The bytes of a checkpoint as loaders give them out: all of one version of its files.

A check of bytes and their use are one reading: bytes go to the memory that the caller gets, and are summed there. What
a file was when it was opened is compared with what it is when everything has been given out. A file that was written
to just before it was opened may be in the middle of being written, which its times do not show: what no checksum covers
is read a second time then.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from ckptfix.checkpoint import ByteRange, Check, Checkpoint, Data
from ckptfix.checkpoint.places import pieces_of, segment_length
from ckptfix.checkpoint.stamp import Stamp
from ckptfix.errors import IsFolder
from ckptfix.io import checking
from ckptfix.io.crc import checksum
from ckptfix.io.read import read_chunks
from ckptfix.io.source import (
    BATCH,
    Source,
    blames_changes,
    change_of,
    open_source,
    refuse_changed,
    threads,
    truncated,
    was_changed,
)
from ckptfix.io.sums import Checksums, crc32_joined
from ckptfix.io.threads import WORKERS

RECENT = 2_000_000_000
"""Nanoseconds since a file was last written to in which its writer may still be at it."""

TWICE = 4 << 20
"""Bytes that two threads read; to start one takes as long as to copy some hundred kilobytes."""


class Differs(Exception):
    """Bytes that do not have the checksum that is stated for them."""

    def __init__(self, check: Check, crc32: int) -> None:
        super().__init__(check, crc32)
        self.check = check
        self.crc32 = crc32


class Reading:
    """What is read of the files of one checkpoint, from when it was opened on.

    Attributes:
        marks: the files, as they were when they were opened.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.marks = {file.path: file.stamp for file in checkpoint.files if file.stamp != Stamp()}
        self._opened = time.time_ns()
        self._again: list[tuple[ByteRange, int]] = []

    def fill(self, data: Data, view: memoryview, checks: Iterable[Check] = (), *, all_of_them: bool = True) -> None:
        """Fill `view` with the bytes of `data`.

        Args:
            checks: checksums of `data`, or of pieces of it.
            all_of_them: those of which only a part is read here are compared too, in a reading of their own.

        Raises:
            Differs: bytes have another checksum.
            DamagedFile: a file is too short, or was written to meanwhile.
            CkptfixError: they cannot be read.
        """
        due = {check.data: check for check in checks}
        at = 0
        for piece in pieces_of(data):
            part = view[at : at + segment_length(piece)]
            at += len(part)
            if isinstance(piece, bytes):
                part[:] = piece
                continue
            check = due.pop(piece, None)
            if isinstance(piece, ByteRange):
                crc = self._read(piece, part, summed=check is not None)
            else:
                crc = _copied(read_chunks(piece), part, summed=check is not None)
            if check is not None and crc != check.crc32:
                raise Differs(check, crc)
        if all_of_them:
            checking.run(due.values())

    def refuse_changes(self) -> None:
        """Refuse what was given out if it is not of one version of its files.

        One file that is open stays what it was where another one takes its name: only of several files one may be of
        another version than the others then.

        Raises:
            ChangedFile: a file was written to since it was opened, or another one of several has its name.
        """
        with blames_changes():
            self._refuse_changes()

    def _refuse_changes(self) -> None:
        for path, before in self.marks.items():
            try:
                change = change_of(path, before, by_name=len(self.marks) > 1)
            except IsFolder:  # what is in it are its files
                continue
            if change is not None:
                raise change
        again = self._again
        sums = Checksums([piece for piece, _ in again])
        for number, (piece, crc) in enumerate(again):
            if sums.value(number) != crc:
                raise was_changed(piece.path, "a second reading gave other bytes")

    def _open(self, path: str) -> Source:
        source = open_source(path)
        try:
            refuse_changed(path, source.mark, self.marks.setdefault(path, source.mark))
        except BaseException:
            source.close()
            raise
        return source

    def refuse_short(self, data: Data) -> None:
        """Refuse bytes that a file is too short for. Raises DamagedFile."""
        for piece in pieces_of(data):
            if isinstance(piece, ByteRange):
                with self._open(piece.path) as source:
                    _refuse_short(source, piece)

    def _is_recent(self, path: str) -> bool:
        stamp = self.marks[path]
        return not stamp.tag and 0 <= self._opened - stamp.ctime_ns < RECENT

    def _read(self, piece: ByteRange, view: memoryview, *, summed: bool) -> int:
        """Fill `view`; a large one by two threads: the first touch of fresh memory takes longer than the copy."""
        with self._open(piece.path) as source:
            _refuse_short(source, piece)
            source.expect(piece.offset, piece.length)
            again = not summed and self._is_recent(piece.path)
            crc = 0
            if len(view) < TWICE or WORKERS < 2 or source.far:
                crc = _part(source, piece.offset, view, summed or again)
            else:
                half = len(view) // 2
                with threads(1) as pool:
                    other = pool.submit(_part, source, piece.offset + half, view[half:], summed or again)
                    crc = _part(source, piece.offset, view[:half], summed or again)
                    crc = crc32_joined(crc, other.result(), len(view) - half)
        if again:
            self._again.append((piece, crc))
        return crc


def _refuse_short(source: Source, piece: ByteRange) -> None:
    if piece.end > source.size:
        raise truncated(piece, source.size)


def _part(source: Source, offset: int, view: memoryview, summed: bool) -> int:
    """Fill `view`; the checksum is of what is there then, block by block, while a block is in the cache."""
    if not summed:
        source.read_into(offset, view)
        return 0
    crc = 0
    for at in range(0, len(view), BATCH):
        block = view[at : at + BATCH]
        source.read_into(offset + at, block)
        crc = checksum(block, crc)
    return crc


def _copied(chunks: Iterator[bytes], view: memoryview, *, summed: bool) -> int:
    at = crc = 0
    for chunk in chunks:
        view[at : at + len(chunk)] = chunk
        if summed:
            crc = checksum(chunk, crc)
        at += len(chunk)
    return crc
