"""A place in a file that is read from front to back, and leaves long runs of bytes unread."""

from __future__ import annotations

import struct
from typing import Any

from ckptfix.checkpoint import ByteRange
from ckptfix.errors import Truncated
from ckptfix.io.source import Source, truncated_hint

WINDOW = 1 << 16
"""Bytes that are read at once."""


class Cursor:
    """A place in a file.

    Attributes:
        at: the offset of the next byte.
        end: the offset at which the readable part ends; that of the file by default.
    """

    def __init__(self, source: Source, at: int = 0, end: int | None = None) -> None:
        self.source = source
        self.at = at
        self.end = source.size if end is None else end
        self._start = 0
        self._window = b""

    def take(self, length: int) -> bytes:
        """Read `length` bytes. Raises Truncated if the file ends before."""
        self._check(length)
        start = self.at - self._start
        if start < 0 or start + length > len(self._window):
            self._start = self.at
            self._window = self.source.read(self.at, min(max(WINDOW, length), self.source.size - self.at))
            start = 0
        self.at += length
        return self._window[start : start + length]

    def skip(self, length: int) -> ByteRange:
        """Return the place of the next `length` bytes, which are not read. Raises Truncated like `take`."""
        self._check(length)
        made = ByteRange(self.source.name, self.at, length)
        self.at += length
        return made

    def number(self, code: str) -> Any:
        """Read a number of this code of the module struct, with its byte order. Raises Truncated like `take`."""
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def _check(self, length: int) -> None:
        beyond = self.at + length - self.end
        if beyond > 0:
            message = f"a value ends {beyond} bytes beyond the end of the file"
            hint = truncated_hint(self.source.name)
            raise Truncated(message, path=self.source.name, offset=self.at, hint=hint)
