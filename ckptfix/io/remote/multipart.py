"""An output as the parts of a multipart upload: bytes to upload, and ranges of objects that the store copies itself.

A part has at least `LEAST` bytes, except for the last one; an upload has at most `MOST_PARTS` parts. So the bytes
before a long range are uploaded together with enough of the range to make a part, and the rest is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from ckptfix.checkpoint import ByteRange, OutputFile, Segment
from ckptfix.checkpoint.byte_ranges import pieces_of, segment_length
from ckptfix.dataclass import dataclass

LEAST = 5 << 20
"""The fewest bytes of a part, except for the last one: the rule of S3."""

LONGEST = 5 << 30
"""The most bytes of a copied part: the rule of S3."""

COPIED = 512 << 20
"""The preferred size of a copied part, so that several are copied at a time."""

PART = 8 << 20
"""The preferred size of an uploaded part."""

MOST_PARTS = 10_000


@dataclass(frozen=True, slots=True)
class Upload:
    """Bytes to upload, in parts of these sizes. Each segment is read once, so that a stream is computed once."""

    segments: tuple[Segment, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """A range of an object, copied by the store: one part."""

    where: ByteRange


def parts_of(file: OutputFile, copied: Callable[[ByteRange], bool]) -> list[Upload | Copy]:
    """Return the parts of `file`, in their order.

    Args:
        copied: whether the store can copy a range.
    """
    size, least = PART, LEAST
    while True:
        size = max(size, -(-file.nbytes // (MOST_PARTS // 2)))
        made = list(_parts(file, copied, size, least))
        if sum(len(one.sizes) if isinstance(one, Upload) else 1 for one in made) <= MOST_PARTS:
            return made
        # Upload shorter ranges as well, instead of copying them.
        least *= 2


def _parts(file: OutputFile, copied: Callable[[ByteRange], bool], size: int, least: int) -> Iterator[Upload | Copy]:
    pending: list[Segment] = []
    count = 0
    for segment in file.segments:
        for piece in pieces_of(segment):
            if isinstance(piece, ByteRange) and piece.length >= least and copied(piece):
                fill = max(0, LEAST - count) if count else 0
                if piece.length - fill >= least:
                    if fill:
                        pending.append(piece.sub(0, fill))
                    yield from _uploads(pending, count + fill, size)
                    yield from _copies(piece.sub(fill, piece.length - fill), max(COPIED, size))
                    pending, count = [], 0
                    continue
            pending.append(piece)
            count += segment_length(piece)
    yield from _uploads(pending, count, size)


def _copies(where: ByteRange, size: int) -> Iterator[Copy]:
    number = -(-where.length // min(size, LONGEST))
    cuts = [where.length * index // number for index in range(number + 1)]
    for start, stop in pairwise(cuts):
        yield Copy(where.sub(start, stop - start))


def _uploads(segments: Sequence[Segment], nbytes: int, size: int) -> Iterator[Upload]:
    """Yield an upload in parts of about `size` bytes; no part is shorter unless there are fewer bytes in total."""
    if nbytes:
        number = max(nbytes // size, 1)
        stops = [nbytes * index // number for index in range(number + 1)]
        yield Upload(tuple(segments), tuple(stop - start for start, stop in pairwise(stops)))
