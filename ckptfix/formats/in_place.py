"""Plans whose output is their input, laid out so that data stays where it is; see `Format.in_place`."""

from __future__ import annotations

from collections.abc import Callable

from ckptfix.checkpoint import ByteRange, Checkpoint, OutputFile, Plan
from ckptfix.errors import Unsupported
from ckptfix.io.planned import PlannedFile
from ckptfix.io.source import open_source

A_COPY = "write a copy: give OUT"


def as_planned(checkpoint: Checkpoint, plan: Plan, block: Callable[[], int]) -> Plan:
    """`Format.in_place` of a format whose plans leave data where it is."""
    return plan


def unchanged(file: OutputFile) -> bool:
    """Whether the plan is a copy of the whole file."""
    return all(isinstance(segment, ByteRange) for segment in file.segments) and len(file.segments) < 2


def head_of(file: OutputFile, size: int) -> tuple[bytes, ByteRange]:
    """What stands before the data of a planned file, and its data, which is the end of a file of `size` bytes.

    Raises:
        Unsupported: data changes too.
    """
    data = file.segments[-1]
    if not isinstance(data, ByteRange) or data.end != size:
        # A file of empty tensors ends where its header does.
        data = ByteRange(file.path, size, 0)
    length = file.nbytes - data.length
    before = file.segments[:-1] if data.length else file.segments
    if any(isinstance(segment, ByteRange) and segment.length > data.offset for segment in before):
        raise data_moves(file.path)
    with open_source(PlannedFile(file)) as reader:
        return reader.read(0, length), data


def data_moves(path: str) -> Unsupported:
    """The error for an edit that changes more than what stands before the data."""
    message = "the edit changes data too, and in place only names and devices can change"
    return Unsupported(message, path=path, hint=A_COPY)


def room_for(size: int, room: int, block: Callable[[], int], path: str) -> int:
    """The bytes that a header of `size` gets where `room` bytes stand before the data: so many, or whole blocks more.

    Raises:
        Unsupported: it does not fit, and the file system cannot put blocks in front of the data.
    """
    if size <= room:
        return room
    unit = block()
    if not unit:
        raise Unsupported(
            f"the new header needs {size - room:,} bytes more than stand before the data, and this file system cannot "
            "put blocks in front of it",
            path=path,
            hint=A_COPY,
        )
    return room + -(-(size - room) // unit) * unit
