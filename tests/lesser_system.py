"""A system that lacks some of Linux's calls, made of this one: ``lesser_system.py NAME COMMANDS`` runs commands on it.

NAME is a row of `SYSTEMS`; COMMANDS is JSON, a list of command lines. The calls are hidden before the package is
imported, as they are on such a system. It prints JSON: for each command line its exit code, and what it wrote.
"""

# ruff: noqa: PTH112, PTH115, PTH119, PTH208 -- it replaces the calls of `os` that `pathlib` is made of

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from typing import Any

WINDOWS_OS = (
    *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_TMPFILE", "SEEK_HOLE", "SEEK_DATA"),
    *("chown", "copy_file_range", "fchmod", "fchown", "fdatasync", "fork", "geteuid", "getuid", "listxattr", "lchown"),
    *("mkfifo", "posix_fadvise", "pread", "preadv", "pwrite", "pwritev", "sched_getaffinity", "sendfile", "setxattr"),
    *("statvfs", "getxattr", "removexattr", "lockf", "posix_fallocate"),
)
MAC_OS = (
    *("O_TMPFILE", "copy_file_range", "fdatasync", "listxattr", "posix_fadvise", "posix_fallocate"),
    *("sched_getaffinity", "sendfile"),
)
WINDOWS_SIGNALS = (
    *("SIGHUP", "SIGPIPE", "SIGURG", "SIGVTALRM", "SIGALRM", "ITIMER_VIRTUAL", "ITIMER_REAL"),
    *("pthread_sigmask", "setitimer", "alarm"),
)
MODULES = ("fcntl", "resource", "termios", "pwd", "grp", "tty", "pty")
LEASES = ("F_SETLEASE", "F_GETLEASE", "F_SETSIG")
CLONES = ("FICLONE", "FICLONERANGE")

SPACE = shutil.disk_usage("/")

SYSTEMS: dict[str, dict[str, tuple[str, ...]]] = {
    "this one": {},
    "macOS": {"os": MAC_OS, "fcntl": (*LEASES, *CLONES)},
    "Windows": {"os": WINDOWS_OS, "signal": WINDOWS_SIGNALS, "modules": MODULES},
    **{f"no os.{name}": {"os": (name,)} for name in WINDOWS_OS},
    **{f"no signal.{name}": {"signal": (name,)} for name in WINDOWS_SIGNALS if name != "ITIMER_VIRTUAL"},
    **{f"no {name}": {"modules": (name,)} for name in ("fcntl", "resource")},
    "no leases": {"fcntl": LEASES},
}
"""Name -> module -> what it lacks."""

WHOLE = ("macOS", "Windows")
"""Those that exist; the others lack one thing."""


def hide(system: str) -> None:
    import fcntl

    lacks = SYSTEMS[system]
    for module, name in ((os, "os"), (signal, "signal"), (fcntl, "fcntl")):
        for attribute in lacks.get(name, ()):
            if hasattr(module, attribute):
                delattr(module, attribute)
    for name in lacks.get("modules", ()):
        sys.modules[name] = None  # type: ignore[assignment]
    if "statvfs" in lacks.get("os", ()):
        shutil.disk_usage = lambda path: SPACE
    if system != "this one":
        import ctypes

        ctypes.CDLL = _no_library  # type: ignore[misc, assignment]
    if system == "Windows":
        _act_as_windows()


def _no_library(*arguments: Any, **options: Any) -> Any:
    raise OSError(errno.ENOENT, "this system has no such library")


def _act_as_windows() -> None:
    """Refuse what Windows refuses: folders that are opened, names with a colon, changes of a file that is open."""
    shutil._use_fd_functions = False  # type: ignore[attr-defined]  # decided when shutil was imported
    if hasattr(shutil, "_rmtree_impl"):  # Python 3.13 and later
        shutil._rmtree_impl = shutil._rmtree_unsafe  # type: ignore[attr-defined]
    open_file = os.open

    def opened(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Windows opens no folders", path)
        if flags & os.O_CREAT:
            _check_name(path)
        return open_file(path, flags, *rest, **options)

    os.open = opened
    os.symlink = _refused  # only administrators can
    for name, taken in (("replace", (0, 1)), ("rename", (0, 1)), ("unlink", (0,)), ("remove", (0,)), ("rmdir", (0,))):
        setattr(os, name, _unless_open(getattr(os, name), taken))
    rename = os.rename

    def renamed(old: Any, new: Any, **options: Any) -> None:
        _check_name(new)
        if os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, "exists", new)
        rename(old, new, **options)

    os.rename = renamed  # type: ignore[assignment]
    mkdir = os.mkdir

    def made(path: Any, *rest: Any, **options: Any) -> None:
        _check_name(path)
        mkdir(path, *rest, **options)

    os.mkdir = made


def _refused(*arguments: Any, **options: Any) -> None:
    raise PermissionError(errno.EPERM, "not permitted")


def _check_name(path: Any) -> None:
    if ":" in os.path.basename(os.fsdecode(path)):
        raise OSError(errno.EINVAL, "a name has a colon", path)


def _unless_open(call: Callable[..., None], taken: tuple[int, ...]) -> Callable[..., None]:
    def checked(*paths: Any, **options: Any) -> None:
        if "dir_fd" not in options or options["dir_fd"] is None:
            held = _open_files()
            for number in taken:
                path = os.path.realpath(paths[number]) if number < len(paths) else ""
                if any(name == path or name.startswith(f"{path}/") for name in held):
                    raise PermissionError(errno.EACCES, "another program uses the file", path)
        call(*paths, **options)

    return checked


def _open_files() -> list[str]:
    """The paths of the files that this process has open or mapped."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    with open("/proc/self/maps", encoding="utf-8") as maps:
        names += [line.split(maxsplit=5)[5].rstrip("\n") for line in maps if line.count(" ") > 5 and "/" in line]
    return names


def main() -> None:
    system, commands = sys.argv[1], json.loads(sys.argv[2])
    hide(system)
    from ckptfix.cli import commands as program

    said = []
    for words in commands:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = program.main(words, standalone_mode=False)
        said.append({"words": words, "code": code, "out": out.getvalue(), "err": err.getvalue()})
    print(json.dumps(said))


if __name__ == "__main__":
    main()
