"""The difference between a planned file and the file that it would replace, as a few changes."""

from __future__ import annotations

import os

from ckptfix.checkpoint import ByteRange, OutputFile, Segment, segment_length
from ckptfix.errors import Unsupported
from ckptfix.io.inplace.disk import EditedFile
from ckptfix.io.inplace.record import MOST, Bytes, FileChange
from ckptfix.io.inplace.shifted import holes_of, probes_of
from ckptfix.io.read import read_chunks

BLOCK = 4096
"""The block size of probes, if nothing moves by blocks."""


def change_of(file: EditedFile, planned: OutputFile, block: int = BLOCK) -> FileChange | None:
    """Return the change that turns `file` into `planned`; None if they are equal.

    Args:
        block: of the file system.

    Raises:
        Unsupported: data would have to move in other ways than as a whole, by whole blocks, toward the end of the file.
    """
    size = file.size
    writes, shift, moved_from = _writes(planned, size)
    if not writes and planned.nbytes == size:
        return None
    name = os.path.basename(planned.path)
    if shift:
        start = moved_from
        if shift % block:
            raise _moves(planned)
        old: tuple[Bytes, ...] = ((0, file.read(0, start)),)
        new: tuple[Bytes, ...] = ((0, b"".join(data for _, data in writes)),)
        probes, holes = probes_of(file, start, size, block), holes_of(file, start, size)
        return FileChange(name, size, planned.nbytes, old, new, shift, probes, holes)
    places = [(offset, min(offset + len(data), size)) for offset, data in writes]
    if planned.nbytes < size:
        places.append((planned.nbytes, size))
    old = tuple((start, file.read(start, end - start)) for start, end in places if start < end)
    return FileChange(name, size, planned.nbytes, old, tuple(writes))


def _writes(planned: OutputFile, size: int) -> tuple[list[Bytes], int, int]:
    """Return the literal bytes with their offsets, the distance by which the data moves, and its old beginning."""
    writes: list[Bytes] = []
    shift = moved_from = position = 0
    grows = _grows(planned, size)
    for number, segment in enumerate(planned.segments):
        if not isinstance(segment, ByteRange) or (grows and number):
            writes.append((position, _literal(segment)))
        elif not _same_file(segment.path, planned.path):
            raise _moves(planned)
        elif segment.offset != position:
            shift, moved_from = position - segment.offset, segment.offset
            last = number == len(planned.segments) - 1 and segment.end == size
            whole = sum(len(data) for _, data in writes) == position
            if not last or not whole or shift < 0:
                raise _moves(planned)
        position += segment_length(segment)
    return writes, shift, moved_from


def _grows(planned: OutputFile, size: int) -> bool:
    """Return whether the plan is the whole file of `size` bytes and what follows it: copies of ranges, or new bytes.

    Raises:
        Unsupported: a record cannot hold what follows.
    """
    first = planned.segments[0] if planned.segments else b""
    if not isinstance(first, ByteRange) or not _same_file(first.path, planned.path):
        return False
    if (first.offset, first.length) != (0, size):
        return False
    if planned.nbytes - size > MOST:
        message = f"the edit would append more than {MOST:,} bytes"
        raise Unsupported(message, path=planned.path, hint="write a copy: give OUT")
    return True


def _same_file(one: str, other: str) -> bool:
    return one == other or os.path.realpath(one) == os.path.realpath(other)


def _literal(segment: Segment) -> bytes:
    return segment if isinstance(segment, bytes) else b"".join(read_chunks(segment))


def _moves(planned: OutputFile) -> Unsupported:
    return Unsupported(
        "the edit moves data within the file, which cannot be undone in place", path=planned.path,
        hint="write a copy to OUT",
    )  # fmt: skip
