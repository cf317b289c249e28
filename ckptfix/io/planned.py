"""A file that is planned and not yet written, read through its plan."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from ckptfix.checkpoint import ByteRange, Derived, OutputFile, Segment, segment_length
from ckptfix.io.read import CHECKSUM, cut
from ckptfix.io.source import Name, Readers, Source


class PlannedFile(Name):
    """The name of a file that is planned and not yet written.

    Attributes:
        file: the plan.
        starts: offset of each of its segments.
    """

    file: OutputFile
    starts: tuple[int, ...]

    def __new__(cls, file: OutputFile) -> PlannedFile:
        name = super().__new__(cls, file.path)
        name.file = file
        name.starts = tuple(accumulate(map(segment_length, file.segments), initial=0))[:-1]
        return name

    def at(self, offset: int) -> tuple[Segment, int]:
        """The segment that holds the byte at `offset`, and where in it that byte is."""
        index = max(bisect_right(self.starts, offset) - 1, 0)
        return self.file.segments[index], offset - self.starts[index]

    def opened(self) -> Source:
        return Planned(self)


class Planned(Source):
    """What will be written. Checksums, which cost a pass over the data, are zeros."""

    def __init__(self, planned: PlannedFile) -> None:
        super().__init__(planned, planned.file.nbytes)
        self._planned = planned
        self._sources = Readers()

    def _read(self, offset: int, length: int) -> bytes:
        pieces: list[bytes] = []
        while length:
            segment, start = self._planned.at(offset)
            count = min(length, segment_length(segment) - start)
            if isinstance(segment, bytes):
                pieces.append(segment[start : start + count])
            elif isinstance(segment, ByteRange):
                pieces.append(self._sources[segment.path].read(segment.offset + start, count))
            else:
                pieces.append(_made(segment, start, count))
            offset += count
            length -= count
        return b"".join(pieces)

    def close(self) -> None:
        self._sources.close()


def _made(segment: Derived, start: int, count: int) -> bytes:
    """`count` bytes at `start` of a stream that has to be made from its beginning."""
    if segment.what == CHECKSUM:
        return bytes(count)
    found = bytearray()
    for piece in cut(segment.chunks(), start, count):
        found += piece
        if len(found) == count:
            break
    return bytes(found).ljust(count, b"\0")
