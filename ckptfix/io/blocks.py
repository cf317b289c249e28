"""Blocks that two files share on the disk, and the layout that makes sharing possible.

XFS, btrfs and other file systems share blocks between files at no cost where a range begins and ends at a block
boundary in both (ioctl FICLONERANGE). To keep ranges of a planned file aligned, data is moved by whole blocks: then
only the ends of a range are copied. The kernel also copies such ranges faster where nothing can be shared.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Iterable

from ckptfix import platform
from ckptfix.checkpoint import ByteRange, OutputFile, Segment, segment_length
from ckptfix.io.source import open_source

PAGE = 4096
"""Bytes of a page. If source and destination are aligned differently, the kernel copies each page in two parts: on ext4
that takes a third longer than reading and writing (0.71 s a GiB against 0.52 s, synced)."""

SMALL = 128 << 10
"""Ranges below this are read and batched: a call to the kernel costs about as much as copying this many bytes."""

LARGE = 1 << 20
"""The least amount of moved data, in bytes, that is kept aligned to whole blocks."""

MOST = 1 << 17
"""The largest block size to believe (ZFS); some file systems state their preferred transfer size instead."""

CLONE_CHUNK = 256 << 20
"""Bytes that one call shares. It takes less than 0.1 ms, or as long as the disk does if the source is not yet on it."""

_FICLONERANGE = 0x4020940D
"""From ``linux/fs.h``; on some processors the number differs, and the call fails with ENOTTY."""


def whole_blocks(where: ByteRange, position: int, block: int) -> ByteRange | None:
    """Return the part of a range that fills whole blocks, both in its file and at `position` of an output."""
    if (where.offset - position) % block:
        return None
    head = -where.offset % block
    length = (where.length - head) // block * block
    return ByteRange(where.path, where.offset + head, length) if length >= SMALL else None


def share(out_fd: int, position: int, in_fd: int, offset: int, count: int) -> bool:
    """Make `count` bytes at `position` of one file share the blocks of those at `offset` of the other.

    Returns:
        Whether it worked. After any failure the bytes must be copied, and the copy reports the real cause.
    """
    if platform.fcntl is None:
        return False
    request = getattr(platform.fcntl, "FICLONERANGE", _FICLONERANGE)
    while True:
        try:
            platform.fcntl.ioctl(out_fd, request, struct.pack("=qQQQ", in_fd, offset, count, position))
        except InterruptedError:
            continue
        except OSError:
            return False
        return True


def block_of(place: str | int) -> int:
    """Return the block size, in bytes, of the file system that a folder or an open file is on."""
    try:
        size = platform.block_size(place)
    except OSError:
        return PAGE
    return size if size is not None and 512 <= size <= MOST and not size & (size - 1) else PAGE


def shift_for(dest: str) -> int:
    """Return the unit, in bytes, by which data moves in the new file `dest`: whole blocks and whole pages."""
    return max(PAGE, block_of(os.path.dirname(os.path.realpath(dest))))


def best_start(segments: Iterable[Segment], unit: int, alignment: int = 1, share: float = 0.0) -> int | None:
    """Return the start of `segments`, modulo `unit`, that aligns most of their bytes as in their own files.

    Args:
        segments: as `checkpoint.joined` yields them.
        alignment: of the start.
        share: the part of all bytes that must be aligned to make it worthwhile.

    Returns:
        None if less than `LARGE` bytes could be aligned.
    """
    alike: Counter[int] = Counter()
    position = 0
    for segment in segments:
        if isinstance(segment, ByteRange) and segment.length >= SMALL:
            alike[(segment.offset - position) % unit] += segment.length
        position += segment_length(segment)
    nbytes, start = max(((count, -start) for start, count in alike.items() if start % alignment == 0), default=(0, 0))
    return -start if nbytes >= max(LARGE, share * position) else None


def shareable(output: OutputFile, folder: str) -> int:
    """Return the number of bytes that a file in `folder` would share with its sources.

    One block of each source is tried.
    """
    block = block_of(folder)
    position = found = 0
    works: dict[str, bool] = {}
    for segment in output.segments:
        part = whole_blocks(segment, position, block) if isinstance(segment, ByteRange) else None
        if part is not None:
            if part.path not in works:
                works[part.path] = _works(part, folder, block)
            found += part.length if works[part.path] else 0
        position += segment_length(segment)
    return found


def _works(part: ByteRange, folder: str, block: int) -> bool:
    with open_source(part.path) as source:
        if source.fd is None:
            return False
        try:
            fd = platform.nameless_file(folder, os.O_WRONLY)
        except OSError:
            return False
        try:
            return share(fd, 0, source.fd, part.offset, block)
        finally:
            os.close(fd)
