"""A range of a file that is read as a separate file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ckptfix.checkpoint import ByteRange
from ckptfix.errors import CkptfixError
from ckptfix.io.source import Name, Source, open_source

SMALL = 8192
"""The largest item in bytes that is read at once."""

HEAD, TAIL = 1024, 2048
"""The bytes at the ends of a larger item that are read at once: its pickle, its directory."""


class ItemWindow(Name):
    """The name of a range of a file that is read as a separate file.

    Attributes:
        where: the range.
    """

    where: ByteRange

    def __new__(cls, where: ByteRange) -> ItemWindow:
        name = super().__new__(cls, f"{where.path}[{where.offset:#x}:{where.end:#x}]")
        name.where = where
        return name

    def opened(self) -> Source:
        return _WindowSource(self)

    def real(self, data: ByteRange) -> ByteRange:
        """Convert a range of the window to a range of the file."""
        return self.where.sub(data.offset, data.length)


class _WindowSource(Source):
    """A reader of a window; reads at its ends are answered from data that was read when it was opened."""

    def __init__(self, window: ItemWindow) -> None:
        where = window.where
        self._file = open_source(where.path)
        try:
            self._head = self._file.read(where.offset, where.length if where.length <= SMALL else HEAD)
            self._tail_at = max(0, where.length - TAIL)
            self._tail = b"" if where.length <= SMALL else self._file.read(where.offset + self._tail_at, TAIL)
        except BaseException:
            self._file.close()
            raise
        super().__init__(window, where.length, base=self._file.base + where.offset)
        self._start = where.offset

    def _read(self, offset: int, length: int) -> bytes:
        if offset + length <= len(self._head):
            return self._head[offset : offset + length]
        if offset >= self._tail_at and self._tail:
            return self._tail[offset - self._tail_at : offset - self._tail_at + length]
        return self._file.read(self._start + offset, length)

    def close(self) -> None:
        self._file.close()


@contextmanager
def in_file(window: ItemWindow, name: str) -> Iterator[None]:
    """Report errors about the window as errors about the item `name` of its file."""
    try:
        yield
    except CkptfixError as error:
        tell(error, window, name)
        raise


def tell(error: CkptfixError, window: ItemWindow, name: str) -> None:
    """Turn an error about the window into one about the item `name` of its file."""
    if error.path is None or error.path == window:
        error.path = str(window.where.path)
        error.offset = window.where.offset + (error.offset or 0)
        error.where = name
        error.hint = None
