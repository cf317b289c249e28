"""Errors of the operating system, turned into errors of ckptfix."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from ckptfix import platform
from ckptfix.errors import CkptfixError, IsFolder, NoFile, NotPermitted, Unsupported, WriteFailed


def write_failed(error: OSError, path: str, needed: int = 0) -> WriteFailed:
    """Return an error about `path` with the operating system's message.

    Args:
        needed: the size that the file should have.
    """
    hint = None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = free_space(os.path.dirname(os.path.realpath(path)))
        left = "" if free is None else f", {free:,} are free"
        # This function does not know the size that an in-place edit needs.
        said = f"{needed:,} bytes are needed{left}: " if needed else ""
        hint = f"{said}free some space, or write to a different disk"
    elif error.errno == errno.EFBIG:
        hint = f"the file system, or ulimit -f, does not allow a file of {needed:,} bytes"
    kind = NotPermitted if isinstance(error, PermissionError) else WriteFailed
    return kind(error.strerror or str(error), path=path, hint=hint, number=error.errno)


def free_space(folder: str) -> int | None:
    """Return the bytes that can be written to `folder`; None if its file system does not report them."""
    return platform.space(folder)


@contextmanager
def named(path: str, needed: int = 0) -> Iterator[None]:
    """Turn an OSError raised inside into a WriteFailed about `path`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CkptfixError):
            raise
        raise write_failed(error, path, needed) from error


def kind_of(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    if stat.S_ISREG(mode):
        return "a file"
    if stat.S_ISFIFO(mode):
        return "a pipe"
    return "a socket" if stat.S_ISSOCK(mode) else "a device"


def refuse_other_kinds(mode: int, path: str) -> None:
    """Refuse anything but a regular file.

    Raises:
        IsFolder, NoFile: it is a different kind of file.
    """
    if not stat.S_ISREG(mode):
        kind = IsFolder if stat.S_ISDIR(mode) else NoFile
        hint = "write the stream to a file first" if stat.S_ISFIFO(mode) else None
        raise kind(f"is {kind_of(mode)}, not a file", path=path, hint=hint)


def open_regular(path: str, flags: int = platform.TO_READ) -> int:
    """Open a regular file and return its descriptor.

    The kind is checked before the file is opened, because opening a device may have effects.

    Raises:
        IsFolder, NoFile: it is a different kind of file.
        BlockingIOError: a different program holds a lease on it.
        WriteFailed: it cannot be opened.
    """
    with named(path):
        refuse_other_kinds(os.stat(path).st_mode, path)
    try:
        fd = os.open(path, flags)
    except BlockingIOError:
        raise
    except OSError as error:
        raise write_failed(error, path) from error
    try:
        with named(path):
            refuse_other_kinds(os.fstat(fd).st_mode, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


MOST_TEXT = 256 << 20
"""The largest text, in bytes, that is read whole: enough for rules with some million names."""


def text_of(path: str, **how: str) -> str:
    """Read the whole text of a file or a pipe; `how` holds the arguments of `open`.

    Raises:
        Unsupported: it is a folder or a device, or larger than `MOST_TEXT`.
        OSError, UnicodeDecodeError: it cannot be read.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISFIFO(mode):
        refuse_other_kinds(mode, path)
    with open(path, **how) as file:  # type: ignore[call-overload]
        text: str = file.read(MOST_TEXT)
        if file.read(1):
            raise Unsupported(f"has more than {MOST_TEXT:,} characters, too many for a text", path=path)
    return text


KEPT = 31 << 20
"""Bytes of the largest block that glibc can learn to keep: it always maps blocks above 32 MiB separately."""


@cache
def keep_freed_memory() -> None:
    """Make this process keep the memory that it frees, up to 62 MiB, instead of asking the system again each time.

    Fresh memory costs a page fault every 4 KiB: for blocks of a megabyte, more than reading the file. glibc returns
    free memory beyond twice the largest block that was mapped separately and freed (mallopt(3), M_TRIM_THRESHOLD). So
    one large block is enough, and none of its pages is touched. With other C libraries this has no effect.
    """
    bytes(KEPT)
