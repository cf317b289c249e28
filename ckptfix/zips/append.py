"""An archive that grows at its end: the existing bytes stay, and new records and a new directory follow.

A zip is read from its end, so the new directory is the one that counts. The old archive, with its directory, is a
prefix of the new one: to undo the edit, cut the file where the new data.pkl, the first of the new records, begins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from ckptfix.checkpoint import ByteRange, Segment, segment_length
from ckptfix.errors import CkptfixError, Unsupported
from ckptfix.io.checksums import Checksums
from ckptfix.io.crc import checksum
from ckptfix.io.layers import WindowName
from ckptfix.io.source import Source, open_source
from ckptfix.zips.local import local_extra, read_local
from ckptfix.zips.read import Directory, DirectoryRecord, read_directory
from ckptfix.zips.write import (
    ALIGNMENT,
    NewRecord,
    directory_of,
    end_records,
    laid_out,
    patched_directory,
    repadded,
    rewritten_header,
)

MOST_EDITS = 10_000


def append_records(
    reader: Source, directory: Directory, record: DirectoryRecord, new: bytes, added: Sequence[NewRecord] = ()
) -> list[Segment]:
    """Return the segments of the archive with new data appended at its end; existing bytes stay.

    Args:
        new: the data of `record`.
        added: records that the archive lacks; their data is computed while they are written, or is in memory.

    Raises:
        BadDirectory: a local header disagrees with the directory.
        Unsupported: bytes follow the archive.
    """
    if directory.trailing:
        raise Unsupported(
            f"{directory.trailing} bytes follow the archive, and would end up inside it", path=directory.path,
            hint="write a copy: give OUT",
        )  # fmt: skip
    size = reader.size
    local = read_local(reader, record)
    crc32 = checksum(new)
    head, tail = rewritten_header(reader, local, record.flags, crc32, len(new))
    head = repadded(head, local_extra(reader, local), size, 0, ALIGNMENT)
    headers = directory.records.headers[:]
    headers[bisect_left(directory.records.positions, record.position)] = size
    raw = patched_directory(directory, record, headers, crc32, len(new))
    offset = size + len(head) + len(new) + len(tail)
    segments, rows, offset = laid_out(added, Checksums([]), iter(()), cursor=offset)
    listing = directory_of(rows, raw)
    count = len(directory.records) + len(added)
    end = end_records(count, segment_length(listing), offset, directory.comment)
    return [ByteRange(directory.path, 0, size), head, new, tail, *segments, listing, end]


def earlier(path: str, directory: Directory) -> Iterator[tuple[WindowName, Directory, DirectoryRecord]]:
    """Yield the archive before each edit at its end, the latest first, with the record that the edit changed."""
    if directory.trailing or not directory.records:
        return
    pickles = [directory.records[index] for index in directory.records.with_ending("/data.pkl")]
    record = max(pickles, key=lambda record: record.header, default=None)
    for _ in range(MOST_EDITS):
        if record is None or (found := _before(path, record)) is None:
            return
        yield found
        record = found[2]


def _before(path: str, record: DirectoryRecord) -> tuple[WindowName, Directory, DirectoryRecord] | None:
    """Return the archive that ends where `record` begins, or None if there is not exactly one such record in it."""
    name = WindowName(f"{path}[:{record.header:#x}]", path, 0, record.header)
    try:
        with open_source(name) as reader:
            before = read_directory(reader)
    except CkptfixError:
        return None
    same = [other for other in before.records if other.name == record.name]
    return (name, before, same[0]) if len(same) == 1 and not before.trailing else None
