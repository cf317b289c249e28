"""The building blocks of `write`: the mode, the folder's sync, and the second name of a file that is replaced."""

from __future__ import annotations

import errno
import os
import signal
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from itertools import count
from typing import Any

from ckptfix import platform
from ckptfix.dataclass import dataclass
from ckptfix.errors import WriteFailed
from ckptfix.io.copy import Sink
from ckptfix.io.source import open_source
from ckptfix.io.system import write_failed

NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
"""Error numbers of a file system without hard links, or one that allows no more of them."""

_NO_FOLDER_SYNC = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EACCES, errno.EPERM}
COMPLETE = "the output is complete, but may not survive a power cut: "
"""The beginning of an error that occurred after the output was complete and had its name."""

TRIES = 200
"""The number of attempts for a clean-up step that runs out of memory."""

_DEFERRED = {*platform.STOP_SIGNALS}


@dataclass(slots=True)
class Kept:
    """A replaced file that is kept under a different name: ``NAME.~1~``, or the next unused number.

    Attributes:
        path: the file, as its user spells it.
        dest: the same without symbolic links.
        copy: a temporary name beside it, for file systems without links.
        name: the name under which it is kept.
    """

    path: str
    dest: str
    copy: str
    name: str | None = None
    identity: tuple[int, int] | None = None

    @property
    def spelled(self) -> str:
        """`name` in the spelling of `path`, unless that is a link to a different place."""
        assert self.name is not None
        return self.name if os.path.islink(self.path) else self.path + self.name.removeprefix(self.dest)

    @property
    def line(self) -> str:
        return kept_line(self.path, self.spelled)

    def keep(self, old: os.stat_result) -> None:
        """Make the second name: a hard link, or a complete copy that is on the disk before it gets the name.

        Raises:
            WriteFailed: the disk has no room for the copy or the name. Any other OSError comes from the system.
        """
        self.identity = identity(self.dest)
        for name in _numbered(self.dest):
            self.name = name
            try:
                os.link(self.dest, name)
                break
            except FileExistsError:
                continue
            except OSError as error:
                if error.errno == errno.ENAMETOOLONG:
                    message = f"the old file cannot be kept: the name {os.path.basename(name)} is too long"
                    raise WriteFailed(message, path=self.path, hint="use --force without --backup") from error
                if error.errno not in NO_LINKS:
                    raise
                self._copy(old)
                break
        sync_folder(os.path.dirname(self.dest))

    def _copy(self, old: os.stat_result) -> None:
        """Copy the file under a temporary name, then rename it over an empty file that reserves the name.

        In this way no other file is ever replaced.
        """
        self.name = None
        with open_source(self.dest) as source:
            fd = os.open(self.copy, platform.TO_CREATE, 0o600)
            with open(fd, "wb", buffering=0):
                sink = Sink(fd, lambda count: None)
                sink.copy(source, 0, source.size)
                sink.flush()
                adopt_mode(fd, old)
                platform.sync(fd)
                status = os.fstat(fd)
        self.identity = (status.st_dev, status.st_ino)
        with Undisturbed():
            self._take_name()

    def _take_name(self) -> None:
        for name in _numbered(self.dest):
            try:
                os.close(os.open(name, platform.TO_CREATE, 0o600))
            except FileExistsError:
                continue
            try:
                os.replace(self.copy, name)
            except BaseException:
                os.unlink(name)
                raise
            self.name = name
            return

    def undo(self, new: tuple[int, int] | None) -> None:
        """Restore the file under its old name, which may belong to `new` by now. Raises OSError if that fails."""
        # The name may belong to a file that existed before: in that case nothing was kept yet.
        if self.name is None or not os.path.lexists(self.name) or identity(self.name) != self.identity:
            return
        if identity(self.dest) == new:
            os.replace(self.name, self.dest)
        else:
            os.unlink(self.name)


def kept_line(path: str, name: str) -> str:
    """Return the line about a file at `path` that was replaced and is kept as `name`."""
    return f"kept the old {path} as {name}"


def _numbered(path: str) -> Iterator[str]:
    """Yield ``PATH.~1~``, ``PATH.~2~`` and so on, the names of GNU's numbered backups."""
    return (f"{path}.~{number}~" for number in count(1))


def identity(path: str) -> tuple[int, int]:
    """Return the device and inode, which identify the file at `path`."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


def adopt_mode(fd: int, old: os.stat_result | None, allowed: int = 0o666) -> None:
    """Set owner and mode to those of the replaced file, as far as permitted, or else to `allowed` minus the umask."""
    with suppress(PermissionError):
        if old is None:
            platform.set_mode(fd, allowed & ~_umask())
        else:
            with suppress(PermissionError):
                platform.set_owner(fd, old)
            platform.set_mode(fd, stat.S_IMODE(old.st_mode) & 0o777)


def _umask() -> int:
    # The umask cannot be read without setting it. For a moment, files of other threads become private, never public.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def persist(clean_up: Callable[[], None]) -> None:
    """Run a repeatable clean-up as far as possible, with retries if memory runs out: it returns while errors unwind."""
    for _ in range(TRIES):
        try:
            clean_up()
        except (MemoryError, SystemError):  # an enum's __new__ raises SystemError if memory runs out
            continue
        except OSError:
            pass
        return


class Undisturbed:
    """A context that delays signals until its end; then they take effect as usual.

    Create it before it is needed: it can be entered even when memory has run out.
    """

    def __init__(self) -> None:
        self._held: list[int] = []
        self._handlers: dict[int, Any] = {}
        self._mask: Collection[int] | None = None

    def __enter__(self) -> None:
        persist(self._hold)

    def _hold(self) -> None:
        if self._mask is None:
            self._mask = platform.block_signals(())
        platform.block_signals(_DEFERRED)
        # The mask applies to this thread only: if another thread gets the signal, the handler still runs in this one.
        if threading.current_thread() is threading.main_thread():
            for number in _DEFERRED - {*self._handlers}:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._arrived)

    def _arrived(self, number: int, frame: object) -> None:
        self._held.append(number)

    def __exit__(self, *error: object) -> None:
        persist(self._release)
        held, self._held = self._held, []
        for number in held:
            signal.raise_signal(number)

    def _release(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        mask, self._mask = self._mask, None
        self._handlers = {}
        platform.restore_signals(mask)


def sync_folder(folder: str) -> None:
    """Flush the names in `folder` to the disk, if its file system supports that.

    Raises:
        WriteFailed: the flush failed.
    """
    try:
        fd = platform.open_folder(folder)
        try:
            platform.sync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise write_failed(error, folder) from error
