"""The bytes of ranges and streams, in pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator

from ckptfix.checkpoint import ByteRange, Data, Derived, Segment
from ckptfix.checkpoint.byte_ranges import Spliced, pieces_of
from ckptfix.errors import DamagedFile
from ckptfix.io.source import BATCH, Block, open_source

Progress = Callable[[int, int], None]
"""Called with the bytes done and the total bytes, at least once every `KERNEL_CHUNK` bytes."""

CHECKSUM = "checksum"
"""`Derived.what` for a checksum of other bytes of the plan."""

ROWS = "rows of several chunks"
"""`Derived.what` for a `RowBlock`, or a part of one."""

Saw = Callable[[str, int, bytes | memoryview], None]
"""Called with the data that is read: name of the source, offset, bytes. Data that the kernel copies is not included."""


class RowBlock(ABC):
    """The `Derived.chunks` of a block of rows that is read from several ranges, and can be made before it is needed.

    Attributes:
        is_summed: the output needs the checksum of the block, so it is summed when it is made.
        crc32: that checksum; None until it is known.
    """

    __slots__ = ("crc32", "is_summed")

    def __init__(self) -> None:
        self.is_summed = False
        self.crc32: int | None = None

    @abstractmethod
    def made(self, saw: Saw | None = None) -> memoryview:
        """Return the bytes of the block, in memory that nothing else uses. Raises like `read_chunks`."""

    @abstractmethod
    def part(self, first: int, count: int) -> Derived:
        """Return `count` bytes of the block from `first` on; only the rows that have them are read."""

    def __call__(self) -> Iterator[bytes]:
        yield bytes(self.made())


def row_block(segment: Segment) -> RowBlock | None:
    """Return the block of rows that a segment is; None for anything else, such as a part of a block."""
    return segment.chunks if isinstance(segment, Derived) and isinstance(segment.chunks, RowBlock) else None


def read_from(segment: Segment) -> tuple[ByteRange, ...]:
    """Return the ranges of real files that a segment consists of."""
    if isinstance(segment, bytes):
        return ()
    if isinstance(segment, ByteRange) and not isinstance(segment.path, Spliced):
        return (segment,)
    inner = segment.sources if isinstance(segment, Derived) else pieces_of(segment)
    return tuple(place for piece in inner for place in read_from(piece))


def cut(chunks: Iterable[bytes], start: int, count: int) -> Iterator[bytes]:
    """Yield the `count` bytes from `start` on of the concatenated `chunks`; all chunks are consumed."""
    at = 0
    for chunk in chunks:
        piece = chunk[max(start - at, 0) : max(start + count - at, 0)]
        if piece:
            yield piece
        at += len(chunk)


def whole_items(chunks: Iterable[Block], size: int) -> Iterator[Block]:
    """Yield the same bytes in chunks of whole items of `size` bytes; what is left at the end comes last."""
    rest = b""
    for chunk in chunks:
        if rest:
            chunk = rest + chunk
        whole = len(chunk) - len(chunk) % size
        if whole == len(chunk):
            rest = b""
            yield chunk
            continue
        rest = bytes(chunk[whole:])
        if whole:
            yield chunk[:whole]
    if rest:
        yield rest


def read_chunks(data: Data, size: int = BATCH) -> Iterator[bytes]:
    """Yield the bytes of `data`, in pieces of `size` bytes (a Derived has its own pieces).

    Raises:
        DamagedFile: a Derived yields more or fewer bytes than its length; Truncated for a range.
        WriteFailed: an I/O error.
    """
    if isinstance(data, ByteRange):
        with open_source(data.path) as source:
            yield from source.chunks(data.offset, data.length, size)
        return
    made = 0
    for chunk in data.chunks():
        made += len(chunk)
        if made > data.length:
            break
        yield chunk
    if made != data.length:
        found = "more arrived" if made > data.length else f"{made} arrived"
        raise DamagedFile(f"{data.length} bytes are expected, but {found}", where=data.what or None)


def read_blocks(data: Data) -> Iterator[Block]:
    """Yield the bytes of `data` like `read_chunks`, in blocks for use at once: the next one may overwrite a block."""
    if isinstance(data, ByteRange):
        with open_source(data.path) as source:
            yield from source.blocks(data.offset, data.length)
        return
    yield from read_chunks(data)
