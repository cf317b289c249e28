"""Virtual files, read through the segments that they consist of: a planned file, or one that is stored in pieces."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeGuard

from ckptfix.checkpoint import ByteRange, Data, Derived, OutputFile, RangeCheck, Segment, segment_length
from ckptfix.checkpoint.byte_ranges import Spliced, pieces_of
from ckptfix.dataclass import dataclass
from ckptfix.errors import DamagedFile
from ckptfix.io.checksums import crc32_joined
from ckptfix.io.read import CHECKSUM, cut, row_block
from ckptfix.io.source import BATCH, Block, Name, Readers, Source, is_local


class VirtualFile(Name):
    """The name of a virtual file."""

    size: int

    @abstractmethod
    def at(self, offset: int) -> tuple[Segment, int]:
        """Return the segment that holds the byte at `offset`, and the position of that byte in it."""

    def opened(self) -> Source:
        return _MadeSource(self)


class PlannedFile(VirtualFile):
    """The name of a file that is planned and not yet written.

    Attributes:
        file: the plan.
        starts: offset of each of its segments.
        far: whether a file that it is copied from is remote.
    """

    file: OutputFile
    starts: array[int]
    far: bool

    def __new__(cls, file: OutputFile) -> PlannedFile:
        name = super().__new__(cls, file.path)
        name.file = file
        name.size = file.nbytes
        name.starts = array("Q", accumulate(map(segment_length, file.segments), initial=0))[:-1]
        # Compute this only once: the file is opened for each of its tensors, and has several segments for each.
        paths = {segment.path for segment in file.segments if isinstance(segment, ByteRange)}
        name.far = not all(map(is_local, paths))
        return name

    def at(self, offset: int) -> tuple[Segment, int]:
        index = max(bisect_right(self.starts, offset) - 1, 0)
        return self.file.segments[index], offset - self.starts[index]

    def around(self, whole: ByteRange, data: int, nbytes: int) -> bytes | None:
        """Return the bytes of the range `whole` except the `nbytes` bytes at the offset `data` in it.

        A checksum that is not known yet is that of no data.

        Returns:
            None if these bytes are not one segment, or if others are copied or computed.
        """
        segments, starts = self.file.segments, self.starts
        index, at, end = bisect_left(starts, whole.offset), whole.offset, whole.end
        if index == len(starts) or starts[index] != at:
            return None
        data += at
        pieces: list[bytes] = []
        while at < end and index < len(segments):
            segment = segments[index]
            index += 1
            if at == data and segment_length(segment) == nbytes:
                at += nbytes
                continue
            if isinstance(segment, Derived) and segment.what == CHECKSUM:
                segment = segment.blank
            if not isinstance(segment, bytes):
                return None
            pieces.append(segment)
            at += len(segment)
        return b"".join(pieces) if at == end else None

    def between(self, offset: int, length: int) -> Iterator[tuple[Segment, int, int]]:
        """Yield the parts of the `length` bytes at `offset`: (segment, first byte in it, number of bytes)."""
        while length:
            segment, start = self.at(offset)
            count = min(length, segment_length(segment) - start)
            yield segment, start, count
            offset += count
            length -= count


@dataclass(frozen=True, slots=True)
class SplicedPiece:
    """Bytes of a `SplicedFile` that belong together: their segments, and the checksums that their files state."""

    segments: tuple[Segment, ...]
    checks: tuple[RangeCheck, ...] = ()


class SplicedFile(VirtualFile, Spliced):
    """The name of a virtual file that is stored in pieces in other files. A piece is looked up when it is first needed.

    Attributes:
        starts: offset of each piece, followed by the size.
        origin: the file that the user named, if this is what commands make of it; else empty.
    """

    starts: tuple[int, ...]
    origin: str
    _make: Callable[[int], SplicedPiece]
    _pieces: dict[int, SplicedPiece]

    def __new__(
        cls, name: str, lengths: Sequence[int], make: Callable[[int], SplicedPiece], origin: str = ""
    ) -> SplicedFile:
        """Create a file of pieces of these `lengths`; `make` returns the piece of a number, or raises if it is bad."""
        made = super().__new__(cls, name)
        made.origin = origin
        made.starts = tuple(accumulate(lengths, initial=0))
        made.size = made.starts[-1]
        made._make = make
        made._pieces = {}
        return made

    def place(self, index: int) -> ByteRange:
        """Return the range of the piece number `index`."""
        return ByteRange(self, self.starts[index], self.starts[index + 1] - self.starts[index])

    def piece(self, index: int) -> SplicedPiece:
        """Return the piece number `index`.

        Raises:
            CkptfixError: its file does not have it, or contradicts it.
        """
        found = self._pieces.get(index)
        if found is None:
            found = self._make(index)
            have, expected = sum(map(segment_length, found.segments)), self.place(index).length
            if have != expected:
                raise DamagedFile(f"{expected} bytes are expected, but {have} were found", path=str(self))
            self._pieces[index] = found
        return found

    def checks(self, where: ByteRange) -> Iterator[RangeCheck]:
        """Yield the checksums that the files state of the pieces in this range."""
        for index in self._indices(where.offset, where.length):
            yield from self.piece(index).checks

    def crc32(self, where: ByteRange) -> int | None:
        """Return the checksum of a whole piece, joined from those that its files state; None if that is impossible."""
        if not where.length:
            return None
        index = self._index(where.offset)
        piece = self.piece(index)
        if where != self.place(index) or tuple(check.data for check in piece.checks) != piece.segments:
            return None
        crc = 0
        for check in piece.checks:
            crc = crc32_joined(crc, check.crc32, check.data.length)
        return crc

    def pieces(self, offset: int, length: int) -> Iterator[Segment]:
        end = offset + length
        for index in self._indices(offset, length):
            at = self.starts[index]
            for segment in self.piece(index).segments:
                size = segment_length(segment)
                first, last = max(offset - at, 0), min(end - at, size)
                if first < last:
                    yield from pieces_of(part_of(segment, first, last - first))
                at += size

    def at(self, offset: int) -> tuple[Segment, int]:
        index = self._index(offset)
        offset -= self.starts[index]
        for segment in self.piece(index).segments:
            if offset < segment_length(segment):
                return segment, offset
            offset -= segment_length(segment)
        raise DamagedFile(f"it has no byte at {offset}", path=str(self))

    def _index(self, offset: int) -> int:
        return min(bisect_right(self.starts, offset), len(self.starts) - 1) - 1

    def _indices(self, offset: int, length: int) -> range:
        if not length:
            return range(0)
        return range(self._index(offset), self._index(offset + length - 1) + 1)


def part_of(segment: Segment, first: int, count: int) -> Segment:
    """Return `count` bytes of `segment` from `first` on."""
    if count == segment_length(segment):
        return segment
    if isinstance(segment, bytes):
        return segment[first : first + count]
    if isinstance(segment, ByteRange):
        return segment.sub(first, count)
    block = row_block(segment)
    if block is not None:
        return block.part(first, count)
    chunks = segment.chunks
    return replace(segment, length=count, chunks=lambda: cut(chunks(), first, count), blank=b"")


def is_spliced(data: Data | None) -> TypeGuard[ByteRange]:
    """Return whether these bytes are a range of a `SplicedFile`."""
    return isinstance(data, ByteRange) and isinstance(data.path, SplicedFile)


def checks_of(data: Data) -> Iterator[RangeCheck]:
    """Yield the checksums that files state of bytes that are stored in pieces; nothing for other bytes."""
    if isinstance(data, ByteRange) and isinstance(data.path, SplicedFile):
        yield from data.path.checks(data)


def crc32_of(data: Data) -> int | None:
    """Return the joined checksum of bytes that are stored in pieces; None for other bytes, or if joining fails."""
    return data.path.crc32(data) if isinstance(data, ByteRange) and isinstance(data.path, SplicedFile) else None


class _MadeSource(Source):
    """The bytes of a virtual file. Checksums, which would cost a pass over the data, are those of no data."""

    def __init__(self, made: VirtualFile) -> None:
        super().__init__(made, made.size)
        self._made = made
        self._sources = Readers()
        # The last segment that was copied: where it is in this file, its source, and the distance to its bytes there.
        self._last: tuple[int, int, Source, int] | None = None
        if isinstance(made, PlannedFile):
            self.far = made.far

    def _read(self, offset: int, length: int) -> bytes:
        last = self._last
        if last is not None and last[0] <= offset <= offset + length <= last[1]:
            return last[2].read(offset + last[3], length)
        pieces: list[bytes] = []
        while length:
            segment, start = self._made.at(offset)
            count = min(length, segment_length(segment) - start)
            if isinstance(segment, bytes):
                pieces.append(segment[start : start + count])
            elif isinstance(segment, ByteRange):
                source, first = self._sources[segment.path], offset - start
                self._last = first, first + segment.length, source, segment.offset - first
                pieces.append(source.read(segment.offset + start, count))
            else:
                pieces.append(_made(segment, start, count))
            offset += count
            length -= count
        return b"".join(pieces)

    def chunks(self, offset: int, length: int, size: int = BATCH) -> Iterator[bytes]:
        """Yield `length` bytes at `offset` in pieces of `size`; a stream has its own pieces. Raises like `read`.

        A stream is run only once.
        """
        while length:
            segment, start = self._made.at(offset)
            count = min(length, segment_length(segment) - start)
            if isinstance(segment, Derived) and segment.what != CHECKSUM:
                part = part_of(segment, start, count)
                assert isinstance(part, Derived)
                yield from part.chunks()
            else:
                yield from super().chunks(offset, count, size)
            offset += count
            length -= count

    def blocks(self, offset: int, length: int, size: int = 0) -> Iterator[Block]:
        while length:
            segment, start = self._made.at(offset)
            count = min(length, segment_length(segment) - start)
            if isinstance(segment, ByteRange):
                yield from self._sources[segment.path].blocks(segment.offset + start, count, size)
            else:
                yield from self.chunks(offset, count)
            offset += count
            length -= count

    def close(self) -> None:
        self._sources.close()


def _made(segment: Derived, start: int, count: int) -> bytes:
    """Return `count` bytes at `start` of a stream that must be run from its beginning."""
    if segment.what == CHECKSUM:
        return segment.blank[start : start + count]
    block = row_block(segment)
    if block is not None and count:
        return b"".join(block.part(start, count).chunks())
    found = bytearray()
    for piece in cut(segment.chunks(), start, count):
        found += piece
        if len(found) == count:
            break
    return bytes(found).ljust(count, b"\0")
