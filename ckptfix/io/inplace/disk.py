"""The system operations of an in-place edit: each change of a disk is a method that a test can replace."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Protocol

from ckptfix import platform
from ckptfix.commands import quoted
from ckptfix.errors import DamagedFile, Refused, Unsupported
from ckptfix.io.durable import sync_folder
from ckptfix.io.inplace.record import MAGIC, MOST
from ckptfix.io.system import kind_of, named, open_regular
from ckptfix.io.unfinished_edits import busy

COLLAPSE_RANGE, INSERT_RANGE = 0x08, 0x20
"""Modes of fallocate(2) on Linux, which remove blocks from a file and insert them."""

_NO_LOCKS = frozenset((errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP))

CHUNK = 1 << 20


class EditedFile(Protocol):
    """A file that is open for changes, which reach the disk with `sync`."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    def read(self, offset: int, length: int) -> bytes:
        """Read at most `length` bytes: fewer if the file ends before."""

    def write(self, offset: int, data: bytes) -> None: ...
    def resize(self, size: int) -> None: ...
    def insert(self, length: int) -> None:
        """Move the content by `length` bytes, a multiple of the block size, and leave a hole before it."""

    def remove(self, offset: int, length: int) -> None:
        """Remove `length` bytes at `offset`; both are multiples of the block size."""

    def holes(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of the ranges without blocks between the two offsets."""

    def alone(self) -> None:
        """Refuse if a different program has the file open or mapped; otherwise, make others wait until it is closed."""

    def sync(self) -> None: ...
    def close(self) -> None: ...


class Closable(Protocol):
    """An object that is closed in the end."""

    def close(self) -> None: ...


class Disk(Protocol):
    """Access to files. The effects of `create`, `replace` and `delete` are on the disk when they return."""

    def open(self, path: str) -> EditedFile: ...
    def lock(self, folder: str) -> Closable:
        """Keep others from editing the folder until it is closed. Raises Refused if another program does."""

    def load(self, path: str) -> bytes | None:
        """Return the records in a file, or the start of another file; None if it does not exist.

        Raises:
            DamagedFile: the file is larger than records can be.
        """

    def create(self, path: str, data: bytes, like: str) -> None:
        """Create a file with the owner and mode of `like`. Raises FileExistsError if it already exists."""

    def replace(self, path: str, data: bytes, like: str) -> None: ...
    def delete(self, path: str) -> None: ...


class RealFile:
    """A regular file, locked against a second writer; or open only for reading, which no other program notices.

    Raises:
        WriteFailed: it cannot be opened.
        Refused: a different in-place edit of it is running.
        Unsupported: it is not a regular file.
    """

    def __init__(self, path: str, *, change: bool = True) -> None:
        self.name = path
        try:
            self.fd = open_regular(path, platform.TO_EDIT if change else platform.TO_READ)
        except BlockingIOError as error:
            raise busy(path) from error
        try:
            if change:
                _lock(self.fd, path)
        except BaseException:
            os.close(self.fd)
            raise

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def read(self, offset: int, length: int) -> bytes:
        pieces: list[bytes] = []
        while length:
            data = platform.read_at(self.fd, length, offset)
            if not data:
                break
            pieces.append(data)
            offset += len(data)
            length -= len(data)
        return b"".join(pieces)

    def write(self, offset: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            count = platform.write_at(self.fd, view[:CHUNK], offset)
            view = view[count:]
            offset += count

    def resize(self, size: int) -> None:
        os.ftruncate(self.fd, size)

    def insert(self, length: int) -> None:
        platform.fallocate(self.fd, INSERT_RANGE, 0, length)

    def remove(self, offset: int, length: int) -> None:
        platform.fallocate(self.fd, COLLAPSE_RANGE, offset, length)

    def holes(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        size = self.size
        end = min(end, size)
        while start < end:
            hole = os.lseek(self.fd, start, os.SEEK_HOLE)
            if hole >= end:
                return
            try:
                start = os.lseek(self.fd, hole, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                start = size
            yield hole, min(start, end)

    def alone(self) -> None:
        try:
            platform.take_lease(self.fd)
        except OSError as error:
            raise self._not_alone(error.errno or 0) from error

    def _not_alone(self, number: int) -> Refused:
        if number == errno.EAGAIN:
            message = "another program has it open or mapped, and would read shifted weights"
            return Refused(message, path=self.name, hint="end that program, or write a copy")
        why = "only its owner can check" if number == errno.EACCES else os.strerror(number)
        message = f"its data must move, but ckptfix cannot find out whether another program has it open: {why}"
        return Refused(message, path=self.name, hint="write a copy to OUT")

    def sync(self) -> None:
        platform.sync(self.fd)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            platform.end_lease(fd)
            os.close(fd)


def _lock(fd: int, path: str, without: frozenset[int] = _NO_LOCKS) -> None:
    try:
        platform.lock(fd)
    except OSError as error:
        if error.errno not in without:
            raise busy(path) from error


class _RealFolder:
    """A folder, locked against a second writer where the system has locks."""

    def __init__(self, path: str) -> None:
        self._fd = -1
        if not platform.HAS_LOCKS:
            return
        with named(path):
            self._fd = platform.open_folder(path)
        try:
            _lock(self._fd, path, _NO_LOCKS | {errno.EBADF})  # NFS locks only files that are open for writing
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class RealDisk:
    """The files of this machine."""

    def open(self, path: str) -> EditedFile:
        return RealFile(path)

    def lock(self, folder: str) -> Closable:
        return _RealFolder(folder)

    def load(self, path: str) -> bytes | None:
        with named(path):
            try:
                mode = os.lstat(path).st_mode
                if not stat.S_ISREG(mode):
                    what = "a link" if stat.S_ISLNK(mode) else kind_of(mode)
                    raise Unsupported(f"is {what}, which no in-place edit creates", path=path, hint="remove it")
                fd = os.open(path, platform.TO_READ | platform.NOT_A_LINK)
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG:  # no file can have this name
                    return None
                raise
            with open(fd, "rb") as file:
                if (start := file.read(len(MAGIC))) != MAGIC:
                    return start  # no record: what follows may be endless
                size = os.fstat(fd).st_size
                if size > MOST:
                    message = f"it has {size:,} bytes, and records of in-place edits have at most {MOST:,}"
                    raise DamagedFile(message, path=path, hint=f"no in-place edit left it: `rm {quoted(path)}`")
                return start + file.read(size)  # a larger number would allocate as many bytes first

    def create(self, path: str, data: bytes, like: str) -> None:
        status = os.stat(like)
        fd = os.open(path, platform.TO_CREATE, 0o600)
        try:
            with open(fd, "wb", buffering=0) as file:
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
                with suppress(OSError):  # only root can
                    platform.set_owner(fd, status)
                with suppress(OSError):
                    platform.set_mode(fd, status.st_mode & 0o666)
                platform.sync(fd)
            sync_folder(os.path.dirname(path))
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            raise

    def replace(self, path: str, data: bytes, like: str) -> None:
        aside = f"{path}.new"
        with named(aside):
            with suppress(FileNotFoundError):
                os.unlink(aside)  # an interrupted edit left it
            self.create(aside, data, like)
        try:
            os.replace(aside, path)
        except BaseException:
            os.unlink(aside)
            raise
        sync_folder(os.path.dirname(path))

    def delete(self, path: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(path)
        sync_folder(os.path.dirname(path))


DISK: Disk = RealDisk()


class OpenedFiles:
    """Files that are opened for changes, and closed together."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._held: list[Closable] = []
        self.files: list[EditedFile] = []

    def hold(self, target: str) -> None:
        """Keep others from editing a file, which becomes the first of `files`, or a folder."""
        if os.path.isdir(target):
            self._held.append(self._disk.lock(target))
        else:
            self.add(target)

    def add(self, path: str) -> EditedFile:
        """Open a file, possibly one of thousands in a folder."""
        if len(self.files) == platform.FEW:
            platform.raise_open_file_limit()
        self.files.append(self._disk.open(path))
        return self.files[-1]

    def __enter__(self) -> OpenedFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self.files:
            self.files.pop().close()
        while self._held:
            self._held.pop().close()


def insertable(folder: str) -> int:
    """Return the block size of the file system of `folder`, in bytes, if it can insert blocks; otherwise 0.

    This is tried on a file without a name.
    """
    try:
        block = platform.block_size(folder, preferred=True)
        fd = platform.nameless_file(folder, os.O_RDWR)
    except OSError:
        return 0
    assert block is not None, "a system with nameless files has statvfs"
    try:
        os.ftruncate(fd, 2 * block)
        platform.fallocate(fd, INSERT_RANGE, 0, block)
    except OSError:
        return 0
    finally:
        os.close(fd)
    return block
