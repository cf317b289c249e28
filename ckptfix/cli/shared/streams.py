"""``-`` in place of a file: standard input and standard output.

A checkpoint is read in random order, and gets its name only when it is complete. So data from a pipe first goes to a
file on a disk, and output for stdout is written to a file and copied when it is complete. If standard input is a file
itself (``< FILE``), it is read directly.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TextIO

import click

from ckptfix import platform
from ckptfix.cli.shared.console import Console, is_terminal
from ckptfix.errors import Unsupported, WriteFailed
from ckptfix.findings.message_names import MOST_TEXT

DASH = "-"
CHUNK = 1 << 20
LOOK = 0.25
"""Seconds between polls of a silent standard input."""


class StreamParameter(NamedTuple):
    """A parameter that accepts ``-``, and its meaning: standard input as a file or as text, or standard output."""

    name: str
    dash: Literal["input", "output", "text"]


@contextlib.contextmanager
def standing_in(params: dict[str, Any], places: Sequence[StreamParameter], console: Console) -> Iterator[None]:
    """Replace the streams that `params` name with files; at the end, copy the output file to stdout.

    Raises:
        click.UsageError: a stream is named twice, or is a terminal.
        Unsupported: the output is a folder.
        WriteFailed: there is no room for the file.
        BrokenPipeError: the reader of stdout has left.
    """
    named = [place for place in places for value in _values(params, place.name) if value == DASH]
    reads = [place for place in named if place.dash != "output"]
    writes = [place.name for place in named if place.dash == "output"]
    if len(reads) > 1:
        raise click.UsageError("- (standard input) is given twice, but can be read once: write it to a file first.")
    if len(writes) > 1:
        raise click.UsageError("- (standard output) is given twice: name a file for one of them.")
    if any(place.dash == "input" for place in reads) and is_terminal(sys.stdin):
        raise click.UsageError("- is standard input, but that is a terminal: give a file, or `... | ckptfix`.")
    if writes and is_terminal(sys.stdout):
        raise click.UsageError("- is standard output, but that is a terminal: give a file, or redirect it (> FILE).")
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
                Path(path).symlink_to(name_of_file)  # in its own folder, for files that a command writes on the way
            else:
                _spool(path)
            # The name beside it that doctor proposes for an output cannot begin with a dash.
            # A line of Python cannot read the stream again, so its file is a placeholder.
            console.streams |= {repr(path): "FILE", f"{path}.": "stdin.", path: DASH}
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
    """Return the folder for large temporary files: ``TMPDIR``, or ``/var/tmp``, as ``/tmp`` may be in memory."""
    if not os.environ.get("TMPDIR") and os.access("/var/tmp", os.W_OK | os.X_OK):
        return "/var/tmp"
    return tempfile.gettempdir()


def _values(params: dict[str, Any], name: str) -> tuple[str, ...]:
    value = params.get(name)
    return value if isinstance(value, tuple) else (value or "",)


def _binary(stream: TextIO | None, name: str) -> BinaryIO:
    if stream is None:
        raise click.UsageError(f"- is standard {name}, but that is closed.")
    return stream.buffer


def _regular() -> str | None:
    """Return a name of standard input, if it is an unread file that the system can name; else None."""
    try:
        fd = _binary(sys.stdin, "input").fileno()
        name = platform.name_of(fd)
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or os.lseek(fd, 0, os.SEEK_CUR):
            return None
        with open(name, "rb") as again:
            return name if os.path.samestat(os.fstat(again.fileno()), status) else None
    except (OSError, ValueError):
        return None


def _spool(path: str) -> None:
    """Write the data of standard input to `path`."""
    try:
        with open(path, "xb") as file:
            for data in _pieces(_binary(sys.stdin, "input")):
                file.write(data)
    except OSError as error:
        hint = f"it goes to a file in {on_disk()} first: free some space, or set TMPDIR to a folder on a larger disk"
        raise WriteFailed(error.strerror or str(error), path=DASH, hint=hint) from error


def _pieces(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the data of a stream as it arrives.

    Never wait without a limit: if a signal comes just before a read begins, the interpreter sees it only when the read
    returns, which may be never for a pipe whose writer is silent.
    """
    try:
        fd = stream.fileno()
    except (OSError, ValueError):
        fd = -1  # not a file of the system
    while True:
        while fd >= 0 and not platform.can_read(fd, LOOK):
            pass
        data = os.read(fd, CHUNK) if fd >= 0 else stream.read(CHUNK)
        if not data:
            return
        yield data


def _copy_out(path: str) -> None:
    """Write the file `path` to stdout, through the kernel if possible."""
    stream = _binary(sys.stdout, "output")
    stream.flush()
    done = 0
    with open(path, "rb") as file:
        try:
            while count := platform.send(stream.fileno(), file.fileno(), done, 1 << 30):
                done += count
            return
        except BrokenPipeError:
            raise
        except (OSError, ValueError):
            file.seek(done)
        shutil.copyfileobj(file, stream, CHUNK)
    stream.flush()
