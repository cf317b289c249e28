"""What a run has written so far: what ends it early, an error or a signal, has to report it truthfully."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_notes: ContextVar[list[str] | None] = ContextVar("notes", default=None)
_record: ContextVar[list[str] | None] = ContextVar("written", default=None)


@contextmanager
def recorded() -> Iterator[list[str]]:
    """A list that grows by a sentence with each file that is written inside."""
    lines: list[str] = []
    token = _record.set(lines)
    try:
        yield lines
    finally:
        _record.reset(token)


def record(line: str) -> None:
    """Say of a file what is true whatever comes now."""
    lines = _record.get()
    if lines is not None:
        lines.append(line)


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
