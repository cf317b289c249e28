"""Exact reads of a file, and copies of its ranges, inside the kernel where it can.

Reading is by pread: a file that shrinks under a reader is an error with an offset, where a memory map would be a
SIGBUS.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from types import TracebackType

from ckptfix.checkpoint import ByteRange, Data, Derived, OutputFile, Segment, segment_length
from ckptfix.commands import command
from ckptfix.errors import DamagedFile, Truncated, Unsupported, WriteFailed
from ckptfix.stamps import Stamp

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all, at least once every `KERNEL_CHUNK` bytes."""

BATCH = 1 << 20
"""Bytes of small pieces that go out in one write."""

SMALL = 128 << 10
"""Ranges below this are read and batched: one copy_file_range costs about as much as copying so many bytes."""

KERNEL_CHUNK = 16 << 20
"""Bytes of one call to the kernel: some 10 ms, so that progress moves and an interrupt is answered."""

PAGE = 4096
"""Bytes of a page. Where source and destination lie differently in theirs, the kernel copies each page in two parts:
on ext4 that takes a third longer than reading and writing (0.71 s a GiB against 0.52 s, synced)."""

_OTHER_MEANS = {
    errno.EXDEV,  # two file systems
    errno.EINVAL,  # the file system has no such operation, or an append-only descriptor
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ETXTBSY,
    errno.EPERM,  # a sandbox that knows no such call, or an immutable file
    errno.EIO,  # pread and write then show which side it was
}


def write_failed(error: OSError, path: str, needed: int = 0) -> WriteFailed:
    """What the operating system said, about `path`; `needed` is the size the file was to have."""
    hint = None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = free_space(os.path.dirname(os.path.realpath(path)))
        left = "" if free is None else f", {free:,} are free"
        hint = f"{needed:,} bytes are needed{left}: make room, or write to another disk"
    elif error.errno == errno.EFBIG:
        hint = f"the file system, or ulimit -f, does not allow a file of {needed:,} bytes"
    return WriteFailed(error.strerror or str(error), path=path, hint=hint)


def free_space(folder: str) -> int | None:
    """Bytes that may be written to `folder`; None when its file system does not say."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize if status.f_blocks else None


@contextmanager
def named(path: str, needed: int = 0) -> Iterator[None]:
    """OSError inside becomes WriteFailed about `path`."""
    try:
        yield
    except OSError as error:
        raise write_failed(error, path, needed) from error


def stamp(path: str | os.PathLike[str]) -> Stamp:
    """What the file at `path` is now. Raises WriteFailed when it cannot be looked at."""
    with named(os.fspath(path)):
        status = os.stat(path)
    return Stamp(
        status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev, status.st_nlink
    )


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


def kind_of(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    if stat.S_ISFIFO(mode):
        return "a pipe"
    return "a socket" if stat.S_ISSOCK(mode) else "a device"


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


def copy_range(where: ByteRange, out_fd: int, progress: Progress | None = None) -> None:
    """Append `where` to `out_fd` at its current position, inside the kernel where it can.

    Raises:
        Truncated: the file ends before; what it had has been written.
        WriteFailed: the source cannot be read.
        OSError: `out_fd` cannot be written.
    """
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, where.length)

    with Reader(where.path) as source:
        sink = Sink(out_fd, advance)
        sink.copy(source, where.offset, where.length)
        sink.flush()


Means = Callable[[int, int, int, int], int]
"""(out_fd, in_fd, offset, count) -> bytes copied to the current position of out_fd."""


def _copy_file_range(out_fd: int, in_fd: int, offset: int, count: int) -> int:
    return os.copy_file_range(in_fd, out_fd, count, offset)


def _position(fd: int) -> int:
    try:
        return os.lseek(fd, 0, os.SEEK_CUR)
    except OSError:  # a pipe
        return 0


def _kernel_means() -> list[Means]:
    """The ways this system can copy without passing the bytes through the process, best first."""
    means: list[Means] = []
    if hasattr(os, "copy_file_range"):
        means.append(_copy_file_range)
    if sys.platform == "linux":  # elsewhere sendfile writes to sockets only
        means.append(os.sendfile)
    return means


class Sink:
    """A descriptor that is written front to back; small pieces are joined into writes of `BATCH` bytes."""

    def __init__(self, fd: int, advance: Callable[[int], None]) -> None:
        self._fd = fd
        self._advance = advance
        self._means = _kernel_means()
        self._position = _position(fd)
        self._pieces: list[bytes] = []
        self._pending = 0

    def add(self, data: bytes) -> None:
        self._pieces.append(data)
        self._pending += len(data)
        if self._pending >= BATCH:
            self.flush()

    def copy(self, source: Reader, offset: int, length: int) -> None:
        if length < SMALL:
            self.add(source.read(offset, length))
            return
        self.flush()
        aligned = (offset - self._position) % PAGE == 0
        end = offset + length
        while offset < end:
            count = self._send(source, offset, min(end - offset, KERNEL_CHUNK), aligned)
            offset += count
            self._position += count
            self._advance(count)

    def _send(self, source: Reader, offset: int, count: int, aligned: bool) -> int:
        while aligned and self._means:
            try:
                sent = self._means[0](self._fd, source.fd, offset, count)
            except OSError as error:
                if error.errno not in _OTHER_MEANS:
                    raise
                sent = 0
            if sent:
                return sent
            # Some file systems answer 0 for "not here": only a read of nothing says that the file has ended.
            del self._means[0]
        data = source.read(offset, min(count, BATCH))
        self._write(data)
        return len(data)

    def flush(self) -> None:
        if self._pending:
            pieces, count = self._pieces, self._pending
            self._pieces, self._pending = [], 0
            self._write(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            self._position += count
            self._advance(count)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.write(self._fd, view)
            if not written:
                raise OSError(errno.EIO, "write took no bytes")
            view = view[written:]
