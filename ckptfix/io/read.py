"""Exact reads of a file, and copies of its ranges, inside the kernel where it can.

Reading is by pread: a file that shrinks under a reader is an error with an offset, where a memory map would be a
SIGBUS.
"""

from __future__ import annotations

import os
import stat
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import accumulate
from types import TracebackType

from ckptfix.checkpoint import ByteRange, Data, Derived, OutputFile, Segment, segment_length
from ckptfix.checkpoint.stamp import Mark, Stamp
from ckptfix.commands import command
from ckptfix.errors import DamagedFile, Truncated, Unsupported, WriteFailed
from ckptfix.io.system import kind_of, named

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all, at least once every `KERNEL_CHUNK` bytes."""

BATCH = 1 << 20
"""Bytes of small pieces that go out in one write."""


def stamp(path: str | os.PathLike[str]) -> Stamp:
    """What the file at `path` is now. Raises WriteFailed when it cannot be looked at."""
    with named(os.fspath(path)):
        status = os.stat(path)
    return Stamp(
        status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev, status.st_nlink
    )


def mark(path: str | os.PathLike[str]) -> Mark:
    """The file at `path` as it is now. Raises as `stamp`."""
    return Mark(os.fspath(path), stamp(path))


class PlannedFile(str):
    """The name of a file that is planned and not yet written. `Reader` reads it through its plan.

    Attributes:
        file: the plan.
        starts: offset of each of its segments.
    """

    file: OutputFile
    starts: tuple[int, ...]

    def __new__(cls, file: OutputFile) -> PlannedFile:
        name = super().__new__(cls, file.path)
        name.file = file
        name.starts = tuple(accumulate(map(segment_length, file.segments), initial=0))[:-1]
        return name

    def at(self, offset: int) -> tuple[Segment, int]:
        """The segment that holds the byte at `offset`, and where in it that byte is."""
        index = max(bisect_right(self.starts, offset) - 1, 0)
        return self.file.segments[index], offset - self.starts[index]

    def read(self, offset: int, length: int, readers: dict[str, Reader]) -> bytes:
        """`length` bytes at `offset` of what will be written. Checksums, which cost a pass over the data, are zeros.

        `readers` are the open sources by path; it is added to.
        """
        pieces: list[bytes] = []
        while length:
            segment, start = self.at(offset)
            count = min(length, segment_length(segment) - start)
            if isinstance(segment, bytes):
                pieces.append(segment[start : start + count])
            elif isinstance(segment, ByteRange):
                if segment.path not in readers:
                    readers[segment.path] = Reader(segment.path)
                pieces.append(readers[segment.path].read(segment.offset + start, count))
            else:
                pieces.append(_made(segment, start, count))
            offset += count
            length -= count
        return b"".join(pieces)


def read_from(segment: Segment) -> tuple[ByteRange, ...]:
    """The ranges of files that a segment is made of."""
    if isinstance(segment, bytes):
        return ()
    return (segment,) if isinstance(segment, ByteRange) else segment.sources


def cut(chunks: Iterable[bytes], start: int, count: int) -> Iterator[bytes]:
    """What of `chunks`, one behind another, are the `count` bytes from `start` on; all of them are asked for."""
    at = 0
    for chunk in chunks:
        piece = chunk[max(start - at, 0) : max(start + count - at, 0)]
        if piece:
            yield piece
        at += len(chunk)


CHECKSUM = "checksum"
"""`Derived.what` for a checksum of other bytes of the plan."""


def _made(segment: Derived, start: int, count: int) -> bytes:
    """`count` bytes at `start` of a stream that has to be made from its beginning."""
    if segment.what == CHECKSUM:
        return bytes(count)
    found = bytearray()
    for piece in cut(segment.chunks(), start, count):
        found += piece
        if len(found) == count:
            break
    return bytes(found).ljust(count, b"\0")


class Reader:
    """A regular file, opened once for many exact reads; safe to share between threads.

    Raises:
        WriteFailed: it cannot be opened.
        Unsupported: it is a folder, a pipe or a device.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.fd = -1
        self._sources: dict[str, Reader] = {}
        self._planned = path if isinstance(path, PlannedFile) else None
        if self._planned is not None:
            self.size = self._planned.file.nbytes
            return
        with named(self.path):
            # Without O_NONBLOCK, opening a FIFO waits for a writer.
            self.fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
            status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise Unsupported(f"is {kind_of(status.st_mode)}, not a file", path=self.path)
        self.size = status.st_size

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes at `offset`.

        Raises:
            Truncated: the file ends before; nothing is allocated for what it does not have.
            WriteFailed: an I/O error.
        """
        if not 0 <= offset <= offset + length <= self.size:
            raise truncated(ByteRange(self.path, offset, length), self.size)
        if self._planned is not None:
            return self._planned.read(offset, length, self._sources)
        pieces: list[bytes] = []
        have = 0
        while True:
            try:
                data = os.pread(self.fd, length - have, offset + have)
            except OSError as error:
                raise WriteFailed(f"cannot be read: {error.strerror}", path=self.path, offset=offset + have) from error
            have += len(data)
            if have == length:
                return b"".join((*pieces, data)) if pieces else data
            if not data:
                raise truncated(ByteRange(self.path, offset, length), offset + have)
            pieces.append(data)

    def chunks(self, offset: int, length: int, size: int = BATCH) -> Iterator[bytes]:
        """`length` bytes at `offset`, in pieces of `size`. Raises as `read`."""
        for place in range(offset, offset + length, size):
            yield self.read(place, min(size, offset + length - place))

    def close(self) -> None:
        for source in self._sources.values():
            source.close()
        self._sources.clear()
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            with suppress(OSError):  # nothing was written through it that could be lost
                os.close(fd)

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def truncated(where: ByteRange, size: int) -> Truncated:
    left = max(0, min(size - where.offset, where.length)) if where.offset >= 0 else 0
    message = f"{where.length} bytes promised, {left} left"
    return Truncated(message, path=where.path, offset=where.offset, hint=truncated_hint(where.path))


def truncated_hint(path: str | os.PathLike[str]) -> str:
    """What to do about a file that was cut short."""
    return f"copy or download it again, or `{command('repair', path, 'OUT')}` keeps what is intact"


def read_exact(where: ByteRange) -> bytes:
    """The bytes of a small range. Raises as `Reader` and `Reader.read`."""
    with Reader(where.path) as source:
        return source.read(where.offset, where.length)


def read_chunks(data: Data, size: int = BATCH) -> Iterator[bytes]:
    """The bytes of `data`, in pieces of `size` bytes (a Derived: in its own).

    Raises:
        DamagedFile: a Derived that yields more or fewer bytes than its length; Truncated for a range.
        WriteFailed: an I/O error.
    """
    if isinstance(data, ByteRange):
        with Reader(data.path) as source:
            yield from source.chunks(data.offset, data.length, size)
        return
    made = 0
    for chunk in data.chunks():
        made += len(chunk)
        if made > data.length:
            break
        yield chunk
    if made != data.length:
        found = "more came" if made > data.length else f"{made} came"
        raise DamagedFile(f"{data.length} bytes promised, {found}", where=data.what or None)


