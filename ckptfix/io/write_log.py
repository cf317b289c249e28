"""A record of what a run has written so far: an error or a signal that ends it early must report it truthfully."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_notes: ContextVar[list[str] | None] = ContextVar("notes", default=None)
_record: ContextVar[tuple[list[str], ...]] = ContextVar("written", default=())


@contextmanager
def recorded(*, inside: bool = False) -> Iterator[list[str]]:
    """Collect a sentence about each file that is written inside.

    Args:
        inside: the enclosing list gets the sentences too, until `reported` removes them: no signal comes between.
    """
    lines: list[str] = []
    token = _record.set((*_record.get(), lines) if inside else (lines,))
    try:
        yield lines
    finally:
        _record.reset(token)


def record(line: str) -> None:
    """Record a statement about a file that remains true whatever happens next."""
    for lines in _record.get():
        lines.append(line)


def reported(written: Iterable[str]) -> None:
    """Remove statements that have been reported."""
    for line in written:
        for lines in _record.get():
            if line in lines:
                lines.remove(line)


@contextmanager
def noted() -> Iterator[list[str]]:
    """Collect a sentence about each notable fact of how files are written inside."""
    lines: list[str] = []
    token = _notes.set(lines)
    try:
        yield lines
    finally:
        _notes.reset(token)


def note(line: str) -> None:
    """Note a fact about how a file is written that a reader may not expect."""
    lines = _notes.get()
    if lines is not None:
        lines.append(line)
