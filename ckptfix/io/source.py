"""The one place where names are opened for reading.

A name is a path; a table lists the other kinds of names, by their scheme. An open name is a `Source`: exact reads at
offsets, and a descriptor if it has one. Reads use pread: if a file shrinks under a reader, the result is an error with
an offset, where a memory map would cause a SIGBUS.

A command opens each of its files once (`shares_open_files`): all its steps, and the threads that it starts, read
through the same descriptor, which is closed when the command ends. A descriptor pins the file that was read first: if a
different file takes its name meanwhile, no step reads half of the one and half of the other. `Source.mark`, taken from
the descriptor, shows at the end that the name now belongs to a different file. A checkpoint that outlives the command
that read it holds no descriptor: later reads open the file by name again.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Literal

from ckptfix import platform
from ckptfix.checkpoint import ByteRange
from ckptfix.checkpoint.file_version import FileStat, FileVersion
from ckptfix.commands import command
from ckptfix.errors import (
    ChangedFile,
    CkptfixError,
    DamagedFile,
    NoSuchFile,
    Truncated,
    UnknownFormat,
    WouldLoseData,
    WriteFailed,
)
from ckptfix.hooks import Hook
from ckptfix.io.open_files import OPEN_SOURCES, OpenFile, descriptor, first_seen, mark_of
from ckptfix.io.open_files import forget as forget
from ckptfix.io.open_files import shares_open_files as shares_open_files
from ckptfix.io.open_files import sums_of as sums_of
from ckptfix.io.open_files import threads as threads
from ckptfix.io.system import named
from ckptfix.urls import SCHEMES, STORES, Virtual, as_path, is_url, known, scheme_of

BATCH = 1 << 20
"""Bytes of small pieces that are combined into one write."""

BLOCK = 512 << 10
"""Bytes that are read to be used at once: they fit in a core's cache, and are a multiple of every element size.

Between two reads, a thread waits for the interpreter if another one has it: with 256 KiB, doctor takes a fifth longer
on two cores.
"""

MOST_SPARE = 8
"""Blocks of memory that are kept for later reads."""

_SPARE: list[bytearray] = []

Block = bytes | memoryview
"""Bytes that are read; a view may be of memory that the next read overwrites."""


def stamp(path: str | os.PathLike[str]) -> FileStat:
    """Return the state of the file that now has the name `path`. Raises WriteFailed if it cannot be examined."""
    name = os.fspath(path)
    if not is_local(name):
        return _far_stamp(name)
    with named(name):
        return mark_of(os.stat(name))


def _far_stamp(name: str) -> FileStat:
    try:
        with open_source(name) as source:
            return source.mark
    except NoSuchFile:
        if found_as(name) == "folder":
            return FileStat()  # a folder of a store has no state apart from its files
        raise


def now(path: str) -> FileStat:
    """Return the state like `stamp`, but without using anything that this command already knows."""
    if is_local(path):
        return stamp(path)
    with open_source(path) as source:
        return source.now()


def mark(path: str | os.PathLike[str]) -> FileVersion:
    """Return the file called `path` with its current state. Raises like `stamp`."""
    return FileVersion(os.fspath(path), stamp(path))


def refuse_changed(path: str, now: FileStat, before: FileStat) -> None:
    """Refuse a file that has changed since it was first looked at.

    Raises:
        ChangedFile: a different file has its name by now, or it was written to.
    """
    if not now.same(before):
        raise was_changed(path, before.difference(now))


def was_changed(path: str, how: str) -> ChangedFile:
    """Return an error about a file that has changed; `how` describes the change."""
    return ChangedFile(f"it changed while it was read: {how}", path=path, hint="wait until its writer is done")


def change_of(path: str, before: FileStat, *, by_name: bool = True) -> ChangedFile | None:
    """Return an error that describes how the file has changed since it was `before`; None if it has not changed.

    Args:
        by_name: count a file that was renamed over it as a change; otherwise, only look at the file that this command
            has open.

    Raises:
        CkptfixError: the file cannot be examined.
    """
    with open_source(path) as source:
        seen = source.now()
    if by_name and seen.same(before) and is_local(path):
        seen = stamp(path)
    return None if seen.same(before) else was_changed(path, before.difference(seen))


@contextmanager
def blames_changes() -> Iterator[None]:
    """Turn apparent damage inside into an error about the file that changed while it was read, if one did."""
    try:
        yield
    except (DamagedFile, UnknownFormat, WouldLoseData) as error:
        cause = cause_of(error)
        if cause is error:
            raise
        raise cause from error


def refuse_changes() -> None:
    """Raise ChangedFile if a local file has changed since this command opened it."""
    for path, before in first_seen().items():
        if is_local(path) and (change := change_of(path, before)) is not None:
            raise change


def cause_of(error: CkptfixError) -> CkptfixError:
    """Return the error about the first file of this command that changed since it was opened, or `error` itself."""
    if isinstance(error, ChangedFile):
        return error
    for path, before in first_seen().items():
        with suppress(CkptfixError):  # a file that was removed since then is not the cause
            change = change_of(path, before)
            if change is not None:
                return change
    return error


class Source(ABC):
    """Bytes that can be read at any offset, opened once for many reads; safe to share between threads.

    Attributes:
        name: the name that it was opened by, and the `path` of its ranges.
        size: bytes.
        mark: the state of its file when it was opened; only a size if there is no file.
        fd: a descriptor that the kernel can copy from, at the same offsets; None if there is no such descriptor.
        base: position of its first byte in its file, or in the memory that it was unpacked to.
        far: every read that is not near an earlier one is a request to a different machine.
    """

    far = False

    def __init__(
        self, name: str, size: int, mark: FileStat | None = None, fd: int | None = None, base: int = 0
    ) -> None:
        self.name = name
        self.size = size
        self.mark = FileStat(size) if mark is None else mark
        self.fd = fd
        self.base = base

    @abstractmethod
    def _read(self, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes at `offset`, which are inside."""

    def read(self, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes at `offset`.

        Raises:
            Truncated: the source ends before; nothing is allocated for the missing bytes.
            WriteFailed: an I/O error.
        """
        if not 0 <= offset <= offset + length <= self.size:
            raise truncated(ByteRange(self.name, offset, length), self.size)
        return self._read(offset, length)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view`, a view of bytes, with those at `offset`. Raises like `read`."""
        at = 0
        for piece in self.chunks(offset, len(view)):
            view[at : at + len(piece)] = piece
            at += len(piece)

    def chunks(self, offset: int, length: int, size: int = BATCH) -> Iterator[bytes]:
        """Yield `length` bytes at `offset`, in pieces of `size`. Raises like `read`."""
        self.expect(offset, length)
        for place in range(offset, offset + length, size):
            yield self.read(place, min(size, offset + length - place))

    def blocks(self, offset: int, length: int, size: int = 0) -> Iterator[Block]:
        """Yield `length` bytes at `offset` in pieces. A piece may overwrite the one before it.

        Use this for bytes that are summed or computed with at once: fresh memory for each piece costs page faults, and
        space in the cache. Raises like `read`.

        Args:
            size: bytes of a piece of a local file; `BLOCK` by default.
        """
        return self.chunks(offset, length)

    def expect(self, offset: int, length: int) -> None:  # noqa: B027 -- most have nothing to prepare
        """Prepare to read these bytes from front to back: a remote source may begin to fetch them."""

    def now(self) -> FileStat:
        """Return the current state of the file, unless reading itself would have revealed a different file."""
        return self.mark

    def close(self) -> None:  # noqa: B027 -- most have nothing to let go of
        """Close it; a second call has no effect."""

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Name(Virtual):
    """The name of a source that only its own class can open."""

    def opened(self) -> Source:
        """Open it."""
        raise NotImplementedError


def truncated(where: ByteRange, size: int) -> Truncated:
    left = max(0, min(size - where.offset, where.length)) if where.offset >= 0 else 0
    message = f"{where.length} bytes are expected, but only {left} are left"
    return Truncated(message, path=where.path, offset=where.offset, hint=truncated_hint(where.path))


def truncated_hint(path: str | os.PathLike[str]) -> str:
    """Return the hint for a file that was cut short."""
    return f"copy or download it again, or `{command('repair', path, 'OUT')}` keeps what is intact"


class LocalFile(Source):
    """A regular file of this machine.

    Raises:
        WriteFailed: it cannot be opened.
        Unsupported: it is a folder, a pipe or a device.
    """

    def __init__(self, name: str) -> None:
        self._descriptor: OpenFile | None = descriptor(name)
        super().__init__(name, self._descriptor.mark.size, self._descriptor.mark, self._descriptor.fd)

    def _read(self, offset: int, length: int) -> bytes:
        if self.fd is None:
            raise ValueError("the source was closed, and cannot be read")
        pieces: list[bytes] = []
        have = 0
        while True:
            try:
                data = platform.read_at(self.fd, length - have, offset + have)
            except OSError as error:
                raise WriteFailed(f"cannot be read: {error.strerror}", path=self.name, offset=offset + have) from error
            have += len(data)
            if have == length:
                return b"".join((*pieces, data)) if pieces else data
            if not data:
                raise truncated(ByteRange(self.name, offset, length), offset + have)
            pieces.append(data)

    def read_into(self, offset: int, view: memoryview) -> None:
        if self.fd is None:
            raise ValueError("the source was closed, and cannot be read")
        at = 0
        while at < len(view):
            try:
                count = platform.fill_at(self.fd, view[at : at + BATCH], offset + at)
            except OSError as error:
                raise WriteFailed(f"cannot be read: {error.strerror}", path=self.name, offset=offset + at) from error
            if not count:
                raise truncated(ByteRange(self.name, offset, len(view)), offset + at)
            at += count

    def blocks(self, offset: int, length: int, size: int = 0) -> Iterator[Block]:
        try:
            memory = _SPARE.pop()
        except IndexError:
            memory = bytearray(size or BLOCK)
        if len(memory) < size:
            memory = bytearray(size)
        whole = memoryview(memory)[: size or BLOCK]
        try:
            for place in range(offset, offset + length, len(whole)):
                block = whole[: offset + length - place]
                if not 0 <= place <= place + len(block) <= self.size:
                    raise truncated(ByteRange(self.name, place, len(block)), self.size)
                self.read_into(place, block)
                yield block
        finally:
            if len(_SPARE) < MOST_SPARE:
                _SPARE.append(memory)

    def now(self) -> FileStat:
        if self.fd is None:
            raise ValueError("the source was closed, and has no state")
        with named(self.name):
            return mark_of(os.fstat(self.fd))

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            self.close()

    def close(self) -> None:
        descriptor, self._descriptor, self.fd = self._descriptor, None, None
        if descriptor is not None:
            descriptor.release()


REMOTE: Hook[Callable[[str], Source]] = Hook("io.remote")
"""The function that opens URLs, which the package `io` registers."""


def _far(name: str) -> Source:
    return REMOTE.get()(name)


KINDS: dict[str, Callable[[str], Source]] = {
    "": LocalFile,
    **dict.fromkeys(sorted(SCHEMES), _far),
}
"""Scheme, such as ``https`` -> the function that opens its names. An unknown scheme is the beginning of a path."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def _kind(name: str) -> Callable[[str], Source]:
    scheme = _SCHEME.match(name)
    return KINDS.get(scheme[1] if scheme else "", LocalFile)


def is_local(name: str) -> bool:
    """Return whether `name` is a path."""
    return not isinstance(name, Name) and _kind(name) is LocalFile


def is_place(name: str) -> bool:
    """Return whether `name` is a path or a URL, so that a disk or a store knows it."""
    return not isinstance(name, Name) and (_kind(name) is LocalFile or is_url(name))


def found_as(name: str) -> Literal["file", "folder", "other", ""]:
    """Return the kind of object that has the name now.

    The disk knows about paths, and a store about its URLs.

    Returns:
        "" if there is nothing, and "other" for a pipe, a socket or a device.

    Raises:
        WriteFailed: the disk does not answer: a folder on the way cannot be entered, or links form a cycle.
    """
    if isinstance(name, Name):
        return "file"
    if not is_local(name):
        return STORES.get().kind(name) if scheme_of(name) else "file"
    with named(name):
        try:
            mode = os.stat(name).st_mode
        except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: the name has a NUL
            return ""
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"


def is_file(name: str | os.PathLike[str]) -> bool:
    """Return whether there is a regular file of this name; see `is_folder`."""
    with named(os.fspath(name)):
        return as_path(name).is_file()


def is_folder(name: str | os.PathLike[str]) -> bool:
    """Return whether there is a folder of this name. A cycle of links, and a name that no file can have, is nothing.

    Raises:
        WriteFailed: the disk does not answer, as for a name in a folder that cannot be entered.
    """
    with named(os.fspath(name)):
        return as_path(name).is_dir()


def open_source(name: str | os.PathLike[str]) -> Source:
    """Open `name`, or share it if this command already has it open.

    Raises:
        WriteFailed: it cannot be opened.
        Unsupported: it is a folder, a pipe or a device.
        Refused: an in-place edit of it did not finish.
    """
    if isinstance(name, Name):
        return name.opened()
    text = known(os.fspath(name))
    return _kind(text)(text)


def source_key(name: str) -> object:
    """Return what tells sources apart while their names are in use: two planned files may have equal names."""
    return id(name) if isinstance(name, Name) else name


class Readers:
    """Open sources by name, which threads can share; they are closed together.

    If there are very many, the least recently used one is released, and closes when nothing uses it any more.
    """

    def __init__(self) -> None:
        self._open: dict[object, Source] = {}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> Source:
        key = source_key(name)  # an open source keeps its name, and so the number
        with self._lock:
            source = self._open[key] = self._open.pop(key) if key in self._open else open_source(name)
            if len(self._open) > OPEN_SOURCES:
                self._open.pop(next(iter(self._open)))
            return source

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
