"""The open files of a command: each is opened once, and closed at the end or when others need the room."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

from ckptfix import platform
from ckptfix.checkpoint.file_version import FileStat
from ckptfix.io.system import named, open_regular
from ckptfix.io.unfinished_edits import busy, refuse_unfinished
from ckptfix.urls import Virtual

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

OPEN_SOURCES = min(256, max(16, platform.open_file_limit() // 4))
"""The most files that a command keeps open besides those in use: the files of many ranks are read in turns, one tensor
at a time."""


class KnownRemote(Protocol):
    """The data that a command keeps about a remote file: its identity, and the parts that were read."""

    def close(self) -> None: ...


def mark_of(status: os.stat_result) -> FileStat:
    """Return the state of a file from its status."""
    return FileStat(
        status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev, status.st_nlink
    )


class OpenFile:
    """An open regular file, and the number of its users."""

    def __init__(self, name: str) -> None:
        refuse_unfinished(name)
        try:
            self.fd = open_regular(name)
        except BlockingIOError as error:
            raise busy(name) from error
        self.users = 1
        try:
            with named(name):
                self.mark = mark_of(os.fstat(self.fd))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        with _lock:
            self.users -= 1
            if self.users:
                return
        with suppress(OSError):  # nothing was written through it, so nothing can be lost
            os.close(self.fd)


_lock = threading.RLock()
"""The lock of all descriptors; one is enough, because opening a file takes only microseconds."""

if hasattr(os, "register_at_fork"):  # no other thread would release it in the child
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class Pool:
    """The open files of a command, by name; the least recently used one is closed first."""

    def __init__(self) -> None:
        self._open: dict[str, OpenFile] = {}
        self._ended = False
        self.first: dict[str, FileStat] = {}
        self.sums: dict[str, dict[int, tuple[int, int]]] = {}
        self.far: dict[str, KnownRemote] = {}
        self.far_lock = threading.RLock()
        self.making: dict[str, threading.RLock] = {}

    def get(self, name: str) -> OpenFile:
        with _lock:
            if self._ended:
                return OpenFile(name)
            found = self._open.pop(name, None) or OpenFile(name)
            self._open[name] = found
            self.first.setdefault(name, found.mark)
            found.users += 1
            if len(self._open) > OPEN_SOURCES:
                self._open.pop(next(iter(self._open))).release()
            return found

    def forget(self, name: str) -> None:
        with _lock:
            self.sums.pop(name, None)
            self.first.pop(name, None)
            self.far.pop(name, None)
            found = self._open.pop(name, None)
            if found is not None:
                found.release()

    def inside(self, folder: str) -> list[str]:
        with _lock:
            return [name for name in self._open if name.startswith(os.path.join(folder, ""))]

    def close(self) -> None:
        with _lock:
            self._ended = True
            while self._open:
                self._open.popitem()[1].release()
        while self.far:
            self.far.popitem()[1].close()


class _Command(threading.local):
    """The command that this thread works for."""

    pool: Pool | None = None


COMMAND = _Command()


@contextmanager
def shares_open_files() -> Iterator[None]:
    """Open each file only once inside, however often it is requested by name, and close all of them at the end.

    Decorate any function that reads a file in several steps. Only the outermost call counts.
    """
    if COMMAND.pool is not None:
        yield
        return
    pool = Pool()
    try:
        COMMAND.pool = pool
        yield
    finally:
        COMMAND.pool = None
        pool.close()


def descriptor(name: str) -> OpenFile:
    """Return the open file `name` of this command, or open it."""
    pool = COMMAND.pool
    return OpenFile(name) if pool is None else pool.get(name)


def far(name: str, make: Callable[[], KnownRemote]) -> KnownRemote:
    """Return the data of this command about the remote file `name`; outside a command, the result of `make`."""
    pool = COMMAND.pool
    if pool is None:
        return make()
    with pool.far_lock:
        found = pool.far.get(name)
        if found is not None:
            return found
        making = pool.making.setdefault(name, threading.RLock())
    with making:  # only one thread makes it; meanwhile, other threads can request other files
        found = pool.far.get(name)
        if found is None:
            found = pool.far[name] = make()
        return found


def known_far(name: str) -> KnownRemote | None:
    """Return the data that `far` has already made for the name in this command, or None."""
    pool = COMMAND.pool
    return None if pool is None else pool.far.get(name)


def forget(name: str) -> None:
    """Forget the open file `name`: a different file has this name from now on."""
    if COMMAND.pool is not None:
        COMMAND.pool.forget(name)


def forget_inside(folder: str) -> None:
    """Forget the open files in `folder`, which is about to be renamed or removed."""
    if COMMAND.pool is not None:
        for name in COMMAND.pool.inside(folder):
            COMMAND.pool.forget(name)


def first_seen() -> dict[str, FileStat]:
    """Return the local files that this command has opened, with their state at that time."""
    return {} if COMMAND.pool is None else dict(COMMAND.pool.first)


def sums_of(name: str) -> dict[int, tuple[int, int]]:
    """Return the sums that this command has made of the file: offset -> (bytes, their CRC-32).

    It keeps none of planned files: two of them may have equal names.
    """
    if COMMAND.pool is None or isinstance(name, Virtual):
        return {}
    return COMMAND.pool.sums.setdefault(name, {})


def threads(count: int, name: str = "") -> ThreadPoolExecutor:
    """Create a pool of threads that share the open files of the current command."""
    from ckptfix.pool import Threads

    return Threads(count, name, initializer=_join, initargs=(COMMAND.pool,))


def _join(pool: Pool | None) -> None:
    COMMAND.pool = pool
