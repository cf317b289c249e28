"""A progress line for a terminal: the phase, bytes, rate, time left."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TextIO

from ckptfix.cli.shared.tables import duration, size

PATIENCE = 1.0
"""Seconds from the first call to the first drawing: a line that is gone at once only flickers."""

SETTLED = 1.0
"""Seconds of a phase before its rate and the time left show: a rate of fewer is mostly start-up."""

INTERVAL = 0.1
"""Seconds between two drawings."""

WINDOW = 5.0
"""Seconds over which the rate is measured, so that it adapts when the page cache is full."""


class Progress:
    """A line on `stream` that shows (bytes done, total bytes), redrawn in place.

    Where the count begins again, so does the next of `phases`; the last one stays.

    It uses only carriage returns and spaces, which work on every terminal, even with ``TERM=dumb``.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        at_end: str = "",
        phases: Sequence[str] = ("",),
        clock: Callable[[], float] = time.monotonic,
        columns: int | None = None,
    ) -> None:
        self._stream = stream
        self._at_end = at_end
        self._clock = clock
        self._columns = _columns(stream) if columns is None else columns
        self._next: float | None = None
        self._marks: deque[tuple[float, int]] = deque()
        self._began = 0.0
        self._last = 0
        self._phases = [*phases]
        self._width = 0

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if self._next is None:  # imports and headers before the first byte are no work on bytes
            self._next = now + PATIENCE
        if done < self._last:
            del self._phases[: len(self._phases) > 1]
            self._marks.clear()
        self._last = done
        if not self._marks:
            self._began = now
            self._marks.append((now, done))
        finished = done >= total and bool(self._width) and bool(self._at_end)
        if now < self._next and not finished:
            return
        self._next = now + INTERVAL
        self._marks.append((now, done))
        while len(self._marks) > 2 and self._marks[0][0] < now - WINDOW:
            self._marks.popleft()
        self._draw(self._line(done, total))

    def clear(self) -> None:
        """Remove the line, and leave the cursor where it was before."""
        if self._width:
            # Two more columns than were drawn: a terminal echoes ^C after the line.
            width = min(self._width + 2, max(self._columns - 1, 1))
            self._stream.write("\r" + " " * width + "\r")
            self._stream.flush()
            self._width = 0

    def _line(self, done: int, total: int) -> str:
        share = f"{100 * done // total:3d} %" if total else "100 %"
        parts = [*filter(None, self._phases[:1]), f"{size(done)} of {size(total)}", share]
        if done >= total:
            return "  ".join([*parts, self._at_end]).rstrip()
        (since, before), (now, _) = self._marks[0], self._marks[-1]
        if now - self._began >= SETTLED and now > since and done > before:
            rate = (done - before) / (now - since)
            parts += [f"{size(rate)}/s", f"{duration((total - done) / rate)} left"]
        return "  ".join(parts)

    def _draw(self, line: str) -> None:
        line = line[: max(self._columns - 1, 1)]
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = max(self._width, len(line))


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80
