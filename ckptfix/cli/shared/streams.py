"""``-`` in the place of a file: standard input and standard output.

A checkpoint is read at places all over it, and is complete before it has its name. So what comes from a pipe is put in
a file first, on a disk, and what goes to stdout is written to a file and copied out when it is whole. Standard input
that is a file itself (``< FILE``) is read as it is.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TextIO

import click

from ckptfix.cli.shared.console import Console, is_terminal
from ckptfix.errors import Unsupported, WriteFailed
from ckptfix.findings.message_names import MOST_TEXT

DASH = "-"
CHUNK = 1 << 20
LOOK = 0.25
"""Seconds after which a silent standard input is asked again."""


class Place(NamedTuple):
    """A parameter that takes ``-``, and what that is: standard input as a file or as text, or standard output."""

    name: str
    dash: Literal["input", "output", "text"]


@contextlib.contextmanager
def standing_in(params: dict[str, Any], places: Sequence[Place], console: Console) -> Iterator[None]:
    """Inside, files stand for the streams that `params` name; at the end stdout gets what was written to its file.

    Raises:
        click.UsageError: one of them is named twice, or is a terminal.
        Unsupported: the output is a folder.
        WriteFailed: there is no room for the file.
        BrokenPipeError: the reader of stdout has left.
    """
    named = [place for place in places for value in _values(params, place.name) if value == DASH]
    reads = [place for place in named if place.dash != "output"]
    writes = [place.name for place in named if place.dash == "output"]
    if len(reads) > 1:
        raise click.UsageError("- (standard input) is given twice, and can be read once: write it to a file first.")
    if len(writes) > 1:
        raise click.UsageError("- (standard output) is given twice: name a file for one of them.")
    if any(place.dash == "input" for place in reads) and is_terminal(sys.stdin):
        raise click.UsageError("- is standard input, and that is a terminal: give a file, or `... | ckptfix`.")
    if writes and is_terminal(sys.stdout):
        raise click.UsageError("- is standard output, and that is a terminal: give a file, or redirect it (> FILE).")
    with contextlib.ExitStack() as stack:
        folder = ""
        if any(place.dash != "text" for place in named):
            folder = tempfile.mkdtemp(prefix="ckptfix-", dir=on_disk())
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for name, dash in reads:
            if dash == "text":
                params[name] = sys.stdin.read(MOST_TEXT)
                continue
            path = f"{folder}/stdin"
            if (name_of_file := _regular()) is not None:
                Path(path).symlink_to(name_of_file)  # with a folder around it, for what a command writes on its way
            else:
                _spool(path)
            # A name beside it, which doctor proposes for an output, cannot begin with a dash.
            console.streams |= {f"{path}.": "stdin.", path: DASH}
            value = params[name]
            params[name] = path if value == DASH else tuple(path if one == DASH else one for one in value)
        made = f"{folder}/stdout"
        for name in writes:
            console.streams[made] = DASH
            console.aside = True
            params[name] = made
        yield
        if writes and Path(made).is_dir():
            raise Unsupported("the output is a folder", path=made, hint="give a name instead of -")
        if writes and Path(made).is_file():
            _copy_out(made)


def on_disk() -> str:
    """The folder for what may be large: ``TMPDIR``, or ``/var/tmp``, as ``/tmp`` may be memory."""
    if not os.environ.get("TMPDIR") and os.access("/var/tmp", os.W_OK | os.X_OK):
        return "/var/tmp"
    return tempfile.gettempdir()


def _values(params: dict[str, Any], name: str) -> tuple[str, ...]:
    value = params.get(name)
    return value if isinstance(value, tuple) else (value or "",)


def _binary(stream: TextIO | None, name: str) -> BinaryIO:
    if stream is None:
        raise click.UsageError(f"- is standard {name}, and that is closed.")
    return stream.buffer


def _regular() -> str | None:
    """A name of standard input, where that is a file that nothing has been read of, and the system names it."""
    try:
        fd = _binary(sys.stdin, "input").fileno()
        name = f"/proc/{os.getpid()}/fd/{fd}"
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or os.lseek(fd, 0, os.SEEK_CUR):
            return None
        with open(name, "rb") as again:
            return name if os.path.samestat(os.fstat(again.fileno()), status) else None
    except (OSError, ValueError):
        return None


def _spool(path: str) -> None:
    """Write what standard input has to `path`."""
    try:
        with open(path, "xb") as file:
            for data in _pieces(_binary(sys.stdin, "input")):
                file.write(data)
    except OSError as error:
        hint = f"it goes to a file in {on_disk()} first: make room, or set TMPDIR to a folder of a larger disk"
        raise WriteFailed(error.strerror or str(error), path=DASH, hint=hint) from error


def _pieces(stream: BinaryIO) -> Iterator[bytes]:
    """What a stream has, as it comes.

    It is never waited for without end: a signal that comes just before a read begins is seen by the interpreter only
    when that returns, which for a pipe whose writer is silent may be never.
    """
    try:
        fd = stream.fileno()
    except (OSError, ValueError):
        fd = -1  # not the system's
    while True:
        while fd >= 0 and not select.select([fd], [], [], LOOK)[0]:
            pass
        data = os.read(fd, CHUNK) if fd >= 0 else stream.read(CHUNK)
        if not data:
            return
        yield data


def _copy_out(path: str) -> None:
    """Write the file `path` to stdout: by the kernel where that can."""
    stream = _binary(sys.stdout, "output")
    stream.flush()
    done = 0
    with open(path, "rb") as file:
        try:
            while count := os.sendfile(stream.fileno(), file.fileno(), done, 1 << 30):
                done += count
            return
        except BrokenPipeError:
            raise
        except (OSError, ValueError, AttributeError):
            file.seek(done)
        shutil.copyfileobj(file, stream, CHUNK)
    stream.flush()
