"""The pieces of a tensor's bytes: compared between the input and the planned output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptfix.checkpoint import ByteRange, Data, Segment, TensorEntry, segment_length
from ckptfix.checkpoint.byte_ranges import Spliced, pieces_of
from ckptfix.io.virtual_files import PlannedFile

Trail = tuple[tuple[object, int, int], ...]
"""The pieces in order: (file, or another origin; first byte; end, the byte after the last)."""


def in_pieces(data: Data | None) -> bool:
    """Return whether these bytes are in several pieces in other files."""
    return isinstance(data, ByteRange) and isinstance(data.path, Spliced)


def trail(data: Data, start: int, length: int) -> Trail:
    """Return the pieces of `length` bytes from `start` on, of data that is in several pieces."""
    assert isinstance(data, ByteRange)
    return _joined((piece, 0, segment_length(piece)) for piece in pieces_of(data.sub(start, length)))


def planned_trail(entry: TensorEntry, start: int, length: int) -> Trail | None:
    """Return the pieces of a tensor of a planned file; None if its bytes are not copied unchanged."""
    data = None if entry.storage is None else entry.storage.data
    if not isinstance(data, ByteRange):
        return None
    rows: list[tuple[Segment, int, int]] = []
    for piece in pieces_of(data.sub(start, length)):
        if isinstance(piece, ByteRange) and isinstance(piece.path, PlannedFile):
            rows += piece.path.between(piece.offset, piece.length)
        elif isinstance(data.path, Spliced):
            rows.append((piece, 0, segment_length(piece)))
        else:
            return None
    return _joined(rows)


def _joined(pieces: Iterable[tuple[Segment, int, int]]) -> Trail:
    rows: list[tuple[object, int, int]] = []
    for whole, start, count in _each(pieces):
        if rows and rows[-1][0] == whole and rows[-1][2] == start:
            rows[-1] = (whole, rows[-1][1], start + count)
        else:
            rows.append((whole, start, start + count))
    return tuple(rows)


def _each(pieces: Iterable[tuple[Segment, int, int]]) -> Iterator[tuple[object, int, int]]:
    for segment, start, count in pieces:
        if isinstance(segment, ByteRange):
            yield segment.path, segment.offset + start, count
        elif isinstance(segment, bytes):
            yield segment, start, count
        else:
            yield (segment.what, tuple(_origins(segment.sources))), start, count


def _origins(sources: Iterable[ByteRange]) -> Iterator[Segment]:
    """Replace ranges of planned files by the ranges of the input that they copy."""
    for source in sources:
        if isinstance(source.path, PlannedFile):
            for inner, first, count in source.path.between(source.offset, source.length):
                yield inner.sub(first, count) if isinstance(inner, ByteRange) else inner
        else:
            yield source
