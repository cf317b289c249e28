"""The calls of the operating system that Linux has, and that macOS, Windows or an old kernel may lack.

Other modules ask here for such a call, and never look for it themselves. Where a call is missing, a function here uses
a slower equivalent, returns that nothing was done, or raises an OSError with EOPNOTSUPP, as its docstring says.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subprocess import Popen

fcntl: ModuleType | None
resource: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
try:
    import resource
except ImportError:  # Windows
    resource = None

_BINARY: int = getattr(os, "O_BINARY", 0)
"""Windows turns each newline into two bytes in files without this flag."""

_NO_FOLLOW: int = getattr(os, "O_NOFOLLOW", 0)

TO_READ: int = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _BINARY
"""Flags to open a file for reading. Without O_NONBLOCK, opening a pipe would wait for its writer."""

TO_EDIT: int = os.O_RDWR | getattr(os, "O_NONBLOCK", 0) | _BINARY
"""Flags to open an existing file for changes."""

TO_CREATE: int = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW | _BINARY
"""Flags to create a file that must not exist."""

TO_LOCK: int = os.O_RDWR | os.O_CREAT | _NO_FOLLOW | _BINARY
"""Flags to open or create a file that only serves as a lock."""

NOT_A_LINK: int = _NO_FOLLOW
"""Flag that makes an open fail for a symbolic link; 0 where links cannot be told apart while opening."""

STOP_SIGNALS: tuple[signal.Signals, ...] = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""The signals that ask a process to end."""

SIGPIPE = 13
"""The number of SIGPIPE in POSIX; Windows has no such signal, but programs in a pipe end in the same way."""

HAS_LOCKS = fcntl is not None
"""True where a process can lock a file or a folder against others (flock(2))."""

FEW = 200
"""Files that a process can have open on any system."""

_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}

_position = Lock()
"""Held while the position of a descriptor is moved, on systems that cannot read at an offset."""


def unsupported() -> OSError:
    """Return the error of a call that this system lacks."""
    return OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def read_at(fd: int, length: int, offset: int) -> bytes:
    """Read at most `length` bytes at `offset`, as pread(2) does; threads may share the descriptor."""
    if hasattr(os, "pread"):
        return os.pread(fd, length, offset)
    with _position:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.read(fd, length)


def fill_at(fd: int, view: memoryview, offset: int) -> int:
    """Fill the beginning of `view` with the bytes at `offset`, and return their number, as preadv(2) does."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [view], offset)
    data = read_at(fd, len(view), offset)
    view[: len(data)] = data
    return len(data)


def write_at(fd: int, data: memoryview, offset: int) -> int:
    """Write the beginning of `data` at `offset`, and return the number of bytes, as pwrite(2) does."""
    if hasattr(os, "pwrite"):
        return os.pwrite(fd, data, offset)
    with _position:
        os.lseek(fd, offset, os.SEEK_SET)
        return os.write(fd, data)


def sync(fd: int) -> None:
    """Flush a file to the disk, past the cache of the drive: macOS's fsync(2) leaves data there."""
    if fcntl is not None and hasattr(fcntl, "F_FULLFSYNC"):
        with suppress(OSError):  # a file system of another machine has no such call
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
    os.fsync(fd)


def sync_data(fd: int) -> None:
    """Begin to bring the data of a growing file to the disk; `sync` completes it."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        os.fsync(fd)


def open_folder(path: str) -> int:
    """Open a folder, to sync or lock it. Raises OSError, with EACCES on Windows, which opens only files."""
    return os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))


def set_mode(fd: int, mode: int) -> None:
    """Set the permissions of an open file, where files have such permissions. Raises OSError."""
    if hasattr(os, "fchmod"):
        os.fchmod(fd, mode)


def set_owner(fd: int, status: os.stat_result) -> None:
    """Set the owner of an open file to that in `status`, where files have owners of this kind. Raises OSError."""
    if hasattr(os, "fchown"):
        os.fchown(fd, status.st_uid, status.st_gid)


def space(folder: str) -> int | None:
    """Return the bytes that can be written to `folder`; None if its file system does not report them."""
    try:
        if hasattr(os, "statvfs"):
            status = os.statvfs(folder)
            return status.f_bavail * status.f_frsize if status.f_blocks else None
        import shutil

        return shutil.disk_usage(folder).free
    except OSError:
        return None


def block_size(place: str | int, *, preferred: bool = False) -> int | None:
    """Return the block size, in bytes, of the file system of a folder or an open file; None if it is not known.

    Args:
        preferred: return the size of a block for input and output, which some file systems state differently.

    Raises:
        OSError: the system does not answer.
    """
    if not hasattr(os, "statvfs"):
        return None
    status = os.statvfs(place)
    return status.f_bsize if preferred else status.f_frsize


def nameless_file(folder: str, flags: int) -> int:
    """Open a new file in `folder` that has no name, and return its descriptor. Raises OSError if that is impossible."""
    if not hasattr(os, "O_TMPFILE"):
        raise unsupported()
    return os.open(folder, os.O_TMPFILE | flags, 0o600)


KernelCopy = Callable[[int, int, int, int], int]
"""(out_fd, in_fd, offset, count) -> bytes copied to the current position of out_fd."""


def kernel_copies() -> list[KernelCopy]:
    """Return the calls that copy from file to file without passing the bytes through the process, best first."""
    calls: list[KernelCopy] = []
    if hasattr(os, "copy_file_range"):
        calls.append(lambda out_fd, in_fd, offset, count: os.copy_file_range(in_fd, out_fd, count, offset))
    if sys.platform == "linux" and hasattr(os, "sendfile"):  # elsewhere sendfile writes to sockets only
        calls.append(os.sendfile)
    return calls


def send(out_fd: int, in_fd: int, offset: int, count: int) -> int:
    """Copy bytes of a file to a pipe or a file, as sendfile(2) does. Raises OSError where the call is missing."""
    if not hasattr(os, "sendfile"):
        raise unsupported()
    return os.sendfile(out_fd, in_fd, offset, count)


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """Call fallocate(2) of Linux. Raises OSError, also where the call is missing."""
    import ctypes

    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate
    except (OSError, AttributeError, TypeError) as error:
        raise unsupported() from error
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while call(fd, mode, offset, length):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


_AT_FDCWD = -100
NO_REPLACE, EXCHANGE = 1, 2
"""Flags of renameat2(2), from ``linux/fs.h``."""


def renamed(old: str, new: str, flags: int) -> bool:
    """Call renameat2(2) of Linux with these flags; return False where the system or the file system lacks it.

    Raises:
        OSError: the call exists, and it failed.
    """
    if sys.platform != "linux":
        return False
    import ctypes

    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if call(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number))


_POPULATE_WRITE = 23
"""Advice of madvise(2) since Linux 5.14, from ``asm-generic/mman-common.h``."""


@cache
def _memory_calls() -> tuple[int, Callable[..., int], Callable[..., int]] | None:
    """Return the size of a page, mincore(2) and madvise(2) of Linux; None elsewhere."""
    if sys.platform != "linux":
        return None
    import ctypes

    try:
        library = ctypes.CDLL(None)
        resident, advise = library.mincore, library.madvise
    except (OSError, AttributeError):
        return None
    resident.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return os.sysconf("SC_PAGE_SIZE"), resident, advise


def _whole_pages(view: memoryview, page: int) -> tuple[int, int]:
    """Return the addresses at which the whole pages inside `view`, which is writable, begin and end."""
    from ctypes import addressof, c_char

    start = addressof(c_char.from_buffer(view)) if len(view) else 0
    return -(-start // page) * page, (start + len(view)) // page * page


def is_untouched(view: memoryview) -> bool:
    """Return whether the kernel still has to provide the pages of `view`, judging by the first whole one."""
    calls = _memory_calls()
    if calls is None:
        return False
    page, resident, _ = calls
    start, end = _whole_pages(view, page)
    state = bytes(1)
    return start < end and resident(start, page, state) == 0 and not state[0] & 1


def touch(view: memoryview) -> None:
    """Make the kernel provide all whole pages of `view`, unchanged, in one call rather than one interrupt for each.

    Where the kernel lacks such a call, nothing is done.
    """
    calls = _memory_calls()
    if calls is not None:
        page, _, advise = calls
        start, end = _whole_pages(view, page)
        if start < end:
            advise(start, end - start, _POPULATE_WRITE)


def lock(fd: int, *, shared: bool = False) -> None:
    """Lock an open file or folder against other processes, without waiting.

    Raises:
        OSError: another process has the lock, or the file system has no locks (EOPNOTSUPP if the system has none).
    """
    if fcntl is None:
        raise unsupported()
    fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


def take_lease(fd: int) -> None:
    """Make sure that only this process has the file open, and that a program that opens it meanwhile waits.

    Raises:
        OSError: EAGAIN if another program has it open; EOPNOTSUPP if this system has no leases (only Linux does).
    """
    if fcntl is None or not hasattr(fcntl, "F_SETLEASE"):
        raise unsupported()
    # The signal that reports the other program must not be SIGIO, which would end the process.
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)


def end_lease(fd: int) -> None:
    """Let other programs open the file again; do nothing if there is no lease."""
    if fcntl is not None and hasattr(fcntl, "F_SETLEASE"):
        with suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def open_file_limit() -> int:
    """Return the number of files that this process can have open."""
    return FEW if resource is None else int(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def raise_open_file_limit() -> None:
    """Raise the limit of this process's open files as far as the system permits."""
    if resource is not None:
        with suppress(OSError, ValueError):
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def block_signals(numbers: Iterable[int]) -> Collection[int] | None:
    """Hold back these signals in this thread, and return those that were held back before; None where it is impossible.

    Windows cannot hold back signals; Python runs their handlers between two steps of the main thread.
    """
    if not hasattr(signal, "pthread_sigmask"):
        return None
    return {*signal.pthread_sigmask(signal.SIG_BLOCK, numbers)}


class Stopped(SystemExit):
    """The arrival of a signal. It is a SystemExit, so every ``finally`` runs, and only the entry points catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


@contextmanager
def repeated_signals(forget: Callable[[], None]) -> Iterator[None]:
    """Send a signal again if its exception was dropped.

    No exception leaves a finalizer or a callback of the garbage collector or of imports: Python prints it and goes on.

    Args:
        forget: is called before, so that the handler raises `Stopped` once more.
    """

    def dropped(unraisable: sys.UnraisableHookArgs) -> None:
        error = unraisable.exc_value
        if isinstance(error, Stopped):
            from threading import Timer

            forget()
            Timer(0.01, os.kill, (os.getpid(), error.number)).start()
        else:
            shown(unraisable)

    shown, sys.unraisablehook = sys.unraisablehook, dropped
    try:
        yield
    finally:
        sys.unraisablehook = shown


def restore_signals(mask: Collection[int] | None) -> None:
    """Hold back the signals that `block_signals` returned, and no others."""
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def processors() -> int:
    """Return the number of processors that this process can use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def name_of(fd: int) -> str:
    """Return a path that opens the file of a descriptor again. Raises OSError where the system has no such path."""
    name = f"/proc/{os.getpid()}/fd/{fd}"
    if not os.path.lexists(name):
        raise unsupported()
    return name


def environment_of_parent() -> list[bytes]:
    """Return the environment of the process that started this one, as ``NAME=VALUE``. Raises OSError."""
    with open(f"/proc/{os.getppid()}/environ", "rb") as file:
        return file.read().split(b"\0")


def can_read(fd: int, seconds: float) -> bool:
    """Wait until a descriptor has data, at most for `seconds`; return True at once where the system cannot wait."""
    if sys.platform == "win32":  # select waits for sockets only
        return True
    import select

    return bool(select.select([fd], [], [], seconds)[0])


def limit_memory(most: int) -> None:
    """Limit the bytes of address space of this process, which also writes no core file, where the system can."""
    if resource is None:
        return
    for kind, limit in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, most)):
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (limit, limit))


def end_after(seconds: float) -> None:
    """End this process after so many seconds of computing; 0 stops that. Code that never returns to Python ends too."""
    import faulthandler

    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    elif seconds:
        faulthandler.dump_traceback_later(seconds, exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()


ENDED = -int(getattr(signal, "SIGVTALRM", 0)) or 1
"""The status of a process that `end_after` ended."""


def end_process(child: Popen[bytes]) -> None:
    """End a process that this one started, and close its pipes."""
    child.kill()
    child.communicate()
