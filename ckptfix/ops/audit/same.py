"""Bytes that an operation replaces by equal ones."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from ckptfix.checkpoint import ByteRange, Data
from ckptfix.io.read import read_from
from ckptfix.ops.audit.pieces import in_pieces

Place = tuple[str, int, int]
"""The start of a tensor's bytes: a file, an offset in it, and an offset in the data that is made of the bytes there."""


class Same:
    """Index of input bytes that are replaced by equal bytes, by their place."""

    def __init__(self, same: Sequence[tuple[Data, Data]]) -> None:
        rows = [(old, new) for old, new in same if isinstance(old, ByteRange) and isinstance(new, ByteRange)]
        self._rows = sorted(rows, key=lambda row: (row[0].path, row[0].offset))
        self._starts = [(old.path, old.offset) for old, _ in self._rows]
        others = [(read_from(old), read_from(new)) for old, new in same if not (_is_plain(old) and _is_plain(new))]
        self._made = sorted(
            ((source.path, source.offset, source.end, new) for old, new in others for source in old),
            key=_begin,
        )

    def instead(self, place: Place) -> tuple[Place, ...]:
        """Return the place that replaces `place`, or nothing."""
        path, offset, inner = place
        index = bisect_right(self._starts, (path, offset)) - 1
        if index < 0:
            return ()
        old, new = self._rows[index]
        if path != old.path or offset >= old.end:
            return ()
        return ((new.path, new.offset + offset - old.offset, inner),)

    def made(self, spans: Sequence[ByteRange]) -> Iterator[tuple[ByteRange, ...]]:
        """Yield the sources of the bytes that replace these, where either are unpacked, gathered or joined."""
        for span in spans:
            first = bisect_right(self._made, (span.path, span.offset), key=_begin) - 1
            last = bisect_left(self._made, (span.path, span.end), key=_begin)
            for path, _, end, new in self._made[max(first, 0) : last]:
                if path == span.path and end > span.offset:
                    yield new


def _begin(row: tuple[str, int, int, object]) -> tuple[str, int]:
    return row[:2]


def _is_plain(data: Data) -> bool:
    """Return whether these bytes are one unchanged range of a file."""
    return isinstance(data, ByteRange) and not in_pieces(data)
