"""In-place plans: the output is the input, laid out so that data stays where it is; see `Format.in_place`."""

from __future__ import annotations

from collections.abc import Callable

from ckptfix.checkpoint import ByteRange, Derived, OutputFile
from ckptfix.errors import Unsupported
from ckptfix.io.source import open_source
from ckptfix.io.virtual_files import PlannedFile

A_COPY = "write a copy: give OUT"


def unchanged(file: OutputFile) -> bool:
    """Return whether the plan is a copy of the whole file."""
    return all(isinstance(segment, ByteRange) for segment in file.segments) and len(file.segments) < 2


def head_of(file: OutputFile, size: int, start: int) -> tuple[bytes, ByteRange]:
    """Return the bytes before the data of a planned file, and its data, which ends a file of `size` bytes.

    Args:
        start: offset of the data in the existing file.

    Raises:
        Unsupported: the edit changes data too.
    """
    data = file.segments[-1]
    if not isinstance(data, ByteRange) or data.end != size:
        # A file of empty tensors ends where its header does.
        data = ByteRange(file.path, size, 0)
    length = file.nbytes - data.length
    before = file.segments[:-1] if data.length else file.segments
    if any(isinstance(one, Derived) or (isinstance(one, ByteRange) and one.end > start) for one in before):
        raise data_moves(file.path)
    with open_source(PlannedFile(file)) as reader:
        return reader.read(0, length), data


def data_moves(path: str) -> Unsupported:
    """Return the error for an edit that changes more than the bytes before the data."""
    message = "the edit changes data too, and only a torch zip can take that in place"
    return Unsupported(message, path=path, hint=A_COPY)


def room_for(size: int, room: int, block: Callable[[], int], path: str) -> int:
    """Return the bytes for a header of `size` if `room` bytes are before the data: `room`, or whole blocks more.

    Raises:
        Unsupported: it does not fit, and the file system cannot insert blocks before the data.
    """
    if size <= room:
        return room
    unit = block()
    if not unit:
        raise Unsupported(
            f"the new header needs {size - room:,} bytes more than there are before the data, and this file "
            "system cannot insert blocks there",
            path=path,
            hint=A_COPY,
        )
    return room + -(-(size - room) // unit) * unit
