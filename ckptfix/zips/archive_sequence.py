"""Several torch archives end to end in one file, as torch.distributed.checkpoint writes them.

::

    archive  [raw bytes]  archive  [raw bytes]  ...     each intact: data.pkl first, offsets counted from its own start

A reader that starts at the last end record, or at the first header, sees only one of the archives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from ckptfix.io.source import Source
from ckptfix.zips.read import END, END64, LOCAL, LOCATOR, MAX16

WINDOW = 1 << 27
"""Bytes at the front that are searched for the end of the first archive, and before the last archive for the others."""

BEHIND = END.size + MAX16
"""Bytes at the end of the file that readers search for an end record."""

MAX_NAME = 1024
"""Bytes of a name ``ROOT/data.pkl``."""

_BLOCK = 1 << 22


class ArchiveSpan(NamedTuple):
    """A whole archive: its first byte, and the byte after its end record."""

    start: int
    end: int


def is_archive(head: bytes) -> bool:
    """Return whether `head` begins a torch archive, with the local header of a ``ROOT/data.pkl``."""
    if len(head) < LOCAL.size or not head.startswith(b"PK\x03\x04"):
        return False
    name_length = int.from_bytes(head[26:28], "little")
    return head[30 : 30 + name_length].endswith(b"/data.pkl")


def several(reader: Source, behind: int = BEHIND) -> tuple[ArchiveSpan, ArchiveSpan] | None:
    """Return two of the archives that the file holds end to end, or None if it holds fewer than two.

    An archive inside a tensor of another archive is a part of that archive. Bytes before or after an archive do not
    count if they are not an archive themselves.

    Args:
        behind: the last archive must end within this number of bytes from the end of the file.
    """
    size = reader.size
    last = _last(reader, END.size)
    if last is not None and last.start == 0:
        return None
    if _is_torch(reader, 0):
        first = next((span for span in _archives(reader, 0, min(size, WINDOW)) if span.start == 0), None)
        if first is None:
            return None
        following = _archives(reader, first.end, min(size, first.end + WINDOW))
        second = next((span for span in following if span.start >= first.end), None)
        if second is None and last is not None and last.start >= first.end:
            second = last
        return None if second is None else (first, second)
    last = last or _last(reader, behind)
    if last is None:
        return None
    before = [span for span in _archives(reader, max(0, last.start - WINDOW), last.start) if span.end <= last.start]
    return (before[0], last) if before else None


def _last(reader: Source, room: int) -> ArchiveSpan | None:
    """Return the archive that ends last, within the last `room` bytes; None if it is not a torch archive."""
    start = max(0, reader.size - room)
    last = deque(_zips(reader, start, reader.size), maxlen=1)
    return last[0] if last and _is_torch(reader, last[0].start) else None


def _archives(reader: Source, start: int, stop: int) -> Iterator[ArchiveSpan]:
    """Yield the whole torch archives whose end records begin between `start` and `stop`, in order."""
    return (span for span in _zips(reader, start, stop) if _is_torch(reader, span.start))


def _is_torch(reader: Source, start: int) -> bool:
    """Return whether a torch archive begins at `start`."""
    return is_archive(_read(reader, start, LOCAL.size + MAX_NAME))


def _zips(reader: Source, start: int, stop: int) -> Iterator[ArchiveSpan]:
    """Yield the archives of any kind whose end records begin between `start` and `stop`, in order."""
    position = start
    while position < stop:
        length = min(_BLOCK, stop - position)
        block = _read(reader, position, length + 3)
        place = block.find(b"PK\x05\x06")
        while 0 <= place < length:
            span = _ended(reader, position + place)
            if span is not None:
                yield span
            place = block.find(b"PK\x05\x06", place + 1)
        position += length


def _ended(reader: Source, at: int) -> ArchiveSpan | None:
    """Return the archive that the end record at `at` closes, if its directory is where the record states."""
    raw = _read(reader, at, END.size)
    if len(raw) < END.size:
        return None
    *_, size, offset, comment = END.unpack(raw)
    closing = at
    locator = _read(reader, max(0, at - LOCATOR.size), LOCATOR.size)
    if at >= LOCATOR.size + END64.size and locator.startswith(b"PK\x06\x07"):
        closing = at - LOCATOR.size - END64.size
        wide = _read(reader, closing, END64.size)
        if not wide.startswith(b"PK\x06\x06"):
            return None
        size, offset = END64.unpack(wide)[8:]
    start = closing - size - offset
    if start >= 0:
        reader.expect(start + offset, size)
    whole = start >= 0 and size and at + END.size + comment <= reader.size
    if not whole or _read(reader, start + offset, 4) != b"PK\x01\x02":
        return None
    return ArchiveSpan(start, at + END.size + comment)


def _read(reader: Source, offset: int, length: int) -> bytes:
    """Read up to `length` bytes at `offset`."""
    return reader.read(offset, max(0, min(length, reader.size - offset)))
