"""Positions of bytes: a range of a file, a stream computed from ranges, or literal bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import field
from itertools import chain

from ckptfix.dataclass import dataclass
from ckptfix.urls import Virtual


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`length` bytes at `offset` of the file `path`."""

    path: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length

    def sub(self, offset: int, length: int) -> ByteRange:
        """Return the range of `length` bytes that begins `offset` bytes into this one.

        Raises:
            ValueError: the part is not inside this range.
        """
        if offset < 0 or length < 0 or offset + length > self.length:
            raise ValueError(f"{length} bytes at {offset} are not inside a range of {self.length}")
        return ByteRange(self.path, self.offset + offset, length)


@dataclass(frozen=True, slots=True)
class Derived:
    """`length` bytes that `chunks()` yields in small pieces; `sources` are the ranges that they are computed from.

    `blank` replaces them in a plan that is read back, if computing them would need a pass over the data: a checksum of
    0. `lazy` are the marks of a tensor (conj, neg) whose values these bytes are.
    """

    length: int
    chunks: Callable[[], Iterable[bytes]] = field(compare=False, repr=False)
    what: str = ""
    sources: tuple[ByteRange, ...] = ()
    blank: bytes = field(default=b"", compare=False, repr=False)
    lazy: tuple[str, ...] = ()


Data = ByteRange | Derived

Segment = bytes | ByteRange | Derived


class Spliced(Virtual):
    """The name of a virtual file: a concatenation of pieces of other files.

    A tensor that is stored in pieces is a range of such a file, so all code that reads ranges can read it. A plan holds
    the pieces themselves (`pieces_of`), so that the kernel copies them.

    Attributes:
        size: bytes.
    """

    size: int

    def pieces(self, offset: int, length: int) -> Iterator[Segment]:
        """Return the segments that make up the `length` bytes at `offset`."""
        raise NotImplementedError


def pieces_of(segment: Segment) -> Iterable[Segment]:
    """Return the same bytes as ranges of real files."""
    if isinstance(segment, ByteRange) and isinstance(segment.path, Spliced):
        return segment.path.pieces(segment.offset, segment.length)
    return (segment,)


def in_one_piece(data: Data) -> Data:
    """Return the range of a real file if the data is in one piece; otherwise `data` itself."""
    pieces = tuple(pieces_of(data))
    if len(pieces) == 1 and isinstance(pieces[0], ByteRange):
        return pieces[0]
    return data


def segment_length(segment: Segment) -> int:
    """Return the number of bytes that `segment` has in the output."""
    return len(segment) if isinstance(segment, bytes) else segment.length


def split(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Yield the same bytes without empty segments; every range among them is of a real file."""
    return filter(segment_length, chain.from_iterable(map(pieces_of, segments)))


def joined(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Yield the same bytes in fewer segments; every range among them is of a real file."""
    last: Segment = b""
    literal: list[bytes] = []
    for segment in split(segments):
        if isinstance(segment, bytes):
            if not isinstance(last, bytes):
                yield last
                last = b""
            literal.append(segment)
            continue
        if literal:
            yield b"".join(literal)
            literal.clear()
        if isinstance(last, ByteRange):
            if isinstance(segment, ByteRange) and segment.path == last.path and segment.offset == last.end:
                last = ByteRange(last.path, last.offset, last.length + segment.length)
                continue
            yield last
        elif isinstance(last, Derived):
            yield last
        last = segment
    if not isinstance(last, bytes):
        yield last
    if literal:
        yield b"".join(literal)
