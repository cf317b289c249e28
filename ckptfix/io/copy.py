"""Copies of ranges from one file to another: by shared blocks where the file system has them, or in the kernel."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from ckptfix import platform
from ckptfix.checkpoint import ByteRange
from ckptfix.io.blocks import CLONE_CHUNK, PAGE, SMALL, block_of, share, whole_blocks
from ckptfix.io.read import Saw
from ckptfix.io.source import BATCH, Source

KERNEL_CHUNK = 16 << 20
"""Bytes per call to the kernel: some 10 ms, so that progress advances and an interrupt is answered."""

WRITE = 64 << 10
"""Bytes per write: for longer ones, ext4 looks for large blocks of free memory in a row (Linux 6.18 has large folios),
which took up to six times as long on a machine whose memory was full."""

LONG = 256 << 10
"""Bytes of a piece that is too long to be worth joining with others."""

_OTHER_MEANS = {
    errno.EXDEV,  # two file systems
    errno.EINVAL,  # the file system has no such operation, or an append-only descriptor
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.ETXTBSY,
    errno.EPERM,  # a sandbox without this call, or an immutable file
    errno.EIO,  # pread and write then show which side has failed
}


def by_kernel(where: ByteRange, position: int) -> bool:
    """Return whether the kernel can copy a range to `position` of the output, so that it need not be read."""
    return where.length >= SMALL and (where.offset - position) % PAGE == 0


def _position(fd: int) -> int:
    try:
        return os.lseek(fd, 0, os.SEEK_CUR)
    except OSError:  # a pipe
        return 0


class Sink:
    """A descriptor that is written front to back; small pieces are joined into writes of `BATCH` bytes.

    Args:
        advance: called with the number of bytes after each write.
        saw: called with the data that is read.
        shared: called instead of `advance` for bytes that the file shares with its source.
    """

    def __init__(
        self,
        fd: int,
        advance: Callable[[int], None],
        saw: Saw | None = None,
        shared: Callable[[int], None] | None = None,
    ) -> None:
        self._fd = fd
        self._advance = advance
        self._saw = saw
        self._shared = advance if shared is None else shared
        self._means = platform.kernel_copies()
        self._block = block_of(fd)
        self._apart: set[int] = set()
        """File systems whose blocks this file cannot share: each is tried once."""
        self._position = _position(fd)
        self._pieces: list[bytes | memoryview] = []
        self._pending = 0

    def add(self, data: bytes | memoryview) -> None:
        self._pieces.append(data)
        self._pending += len(data)
        if self._pending >= BATCH or len(data) >= LONG:
            self.flush()

    def copy(self, source: Source, offset: int, length: int) -> None:
        end = offset + length
        source.expect(offset, length)
        if length >= SMALL:
            offset = self._share(source, ByteRange(source.name, offset, length))
        if end - offset < SMALL:
            self._read(source, offset, end - offset)
            return
        self.flush()
        aligned = by_kernel(ByteRange(source.name, offset, end - offset), self._position)
        while offset < end:
            count = self._send(source, offset, min(end - offset, KERNEL_CHUNK), aligned)
            offset += count
            self._position += count
            self._advance(count)

    def _share(self, source: Source, where: ByteRange) -> int:
        """Share as many blocks of a range as possible, and return the offset of the rest that must be copied.

        This is the end of the range if everything was shared or read.
        """
        if source.fd is None or source.mark.device in self._apart:
            return where.offset
        part = whole_blocks(where, self._position + self._pending, self._block)
        if part is None:
            return where.offset
        self._read(source, where.offset, part.offset - where.offset)
        self.flush()
        offset = part.offset
        while offset < part.end:
            count = min(part.end - offset, CLONE_CHUNK)
            if not share(self._fd, self._position, source.fd, offset, count):
                self._apart.add(source.mark.device)
                break
            offset += count
            self._position = os.lseek(self._fd, count, os.SEEK_CUR)
            self._shared(count)
        return offset

    def _read(self, source: Source, offset: int, length: int) -> None:
        if not length:
            return
        data = source.read(offset, length)
        if self._saw is not None:
            self._saw(source.name, offset, data)
        self.add(data)

    def _send(self, source: Source, offset: int, count: int, aligned: bool) -> int:
        while source.fd is not None and aligned and self._means:
            try:
                sent = self._means[0](self._fd, source.fd, offset, count)
            except OSError as error:
                if error.errno not in _OTHER_MEANS:
                    raise
                sent = 0
            if sent:
                return sent
            # Some file systems return 0 for "not supported": only an empty read proves that the file has ended.
            del self._means[0]
        data = source.read(offset, min(count, BATCH))
        if self._saw is not None:
            self._saw(source.name, offset, data)
        self._write(data)
        return len(data)

    def flush(self) -> None:
        if self._pending:
            pieces, count = self._pieces, self._pending
            self._pieces, self._pending = [], 0
            self._write(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            self._position += count
            self._advance(count)

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            written = os.write(self._fd, view[:WRITE])
            if not written:
                raise OSError(errno.EIO, "write accepted no bytes")
            view = view[written:]
