"""A terminal that a process writes to."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread


class Terminal:
    """A terminal, and the bytes that were written to it.

    Attributes:
        fd: the end that processes write to and read from.
        shown: what it got; complete when the terminal is closed.
    """

    def __init__(self, columns: int | None) -> None:
        self._ours, self.fd = pty.openpty()
        if columns is not None:
            fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        self.shown = b""

    def read(self) -> None:
        """Read until no process has the other end any more."""
        with suppress(OSError):  # EIO: the other end is closed
            while piece := os.read(self._ours, 65536):
                self.shown += piece
        os.close(self._ours)


@contextmanager
def real_terminal(columns: int | None = None) -> Iterator[Terminal]:
    """Open a terminal of so many columns, which is read while processes write to it."""
    made = Terminal(columns)
    reader = Thread(target=made.read)
    reader.start()
    try:
        yield made
    finally:
        os.close(made.fd)
        reader.join()
