"""What a run has written so far: what ends it early, an error or a signal, has to report it truthfully."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_notes: ContextVar[list[str] | None] = ContextVar("notes", default=None)
_record: ContextVar[tuple[list[str], ...]] = ContextVar("written", default=())


@contextmanager
def recorded(*, inside: bool = False) -> Iterator[list[str]]:
    """A list that grows by a sentence with each file that is written inside.

    Args:
        inside: the list around it grows too, until `reported` takes the sentences out: no signal comes between.
    """
    lines: list[str] = []
    token = _record.set((*_record.get(), lines) if inside else (lines,))
    try:
        yield lines
    finally:
        _record.reset(token)


def record(line: str) -> None:
    """Say of a file what is true whatever comes now."""
    for lines in _record.get():
        lines.append(line)


def reported(written: Iterable[str]) -> None:
    """Take out what has been reported."""
    for line in written:
        for lines in _record.get():
            if line in lines:
                lines.remove(line)


@contextmanager
def noted() -> Iterator[list[str]]:
    """A list that grows by a sentence with each thing that is worth saying of how files are written inside."""
    lines: list[str] = []
    token = _notes.set(lines)
    try:
        yield lines
    finally:
        _notes.reset(token)


def note(line: str) -> None:
    """Say how a file is written, where that is not as one may expect."""
    lines = _notes.get()
    if lines is not None:
        lines.append(line)
