"""The central directory of a zip archive, read from its end, as torch writes and reads it.

Layout (APPNOTE.TXT of the zip format, sections 4.3.6 to 4.3.16)::

    local header (30 bytes, name, extra)  data  [data descriptor]      once a record
    central directory: 46 bytes, name, extra, comment                  once a record
    [zip64 end record (56 bytes) and its locator (20)]                 torch always writes them
    end record (22 bytes, comment)

The standard zipfile module also opens 100,000 records, but it hides the spans that an edit needs, trusts local
headers without comparing them, and reads names of any size.
"""

from __future__ import annotations

import itertools
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import field
from typing import NamedTuple

from ckptfix.commands import command
from ckptfix.dataclass import dataclass
from ckptfix.errors import BadDirectory, Truncated, Unsupported
from ckptfix.io.source import Source, truncated_hint
from ckptfix.zips.records import CENTRAL as CENTRAL
from ckptfix.zips.records import FOLDER as FOLDER
from ckptfix.zips.records import MAX32 as MAX32
from ckptfix.zips.records import STORED as STORED
from ckptfix.zips.records import DirectoryRecord as DirectoryRecord
from ckptfix.zips.records import DirectoryRecords as DirectoryRecords
from ckptfix.zips.records import extra_fields as extra_fields
from ckptfix.zips.records import read_rows
from ckptfix.zips.records import zip64_fields as zip64_fields

END = struct.Struct("<4s4H2LH")
END64 = struct.Struct("<4sQ2H2L4Q")
LOCATOR = struct.Struct("<4sLQL")
LOCAL = struct.Struct("<4s5H3L2H")
MAX16 = 0xFFFF
DEFLATED = 8
ENCRYPTED = 0x1 | 0x40
DESCRIPTOR_FOLLOWS = 0x8
"""Flag bit: sizes and checksum follow the data, and can be missing from the local header."""
MAX_RECORDS = 5_000_000
MAX_DIRECTORY = 1 << 30


@dataclass(frozen=True, slots=True)
class Directory:
    """The records of an archive in directory order, and the place of the directory in the file.

    Attributes:
        raw: the directory's bytes; `offset` is where they begin in the file.
        comment: the archive comment.
        trailing: number of bytes after the end record.
        disputes: (how its end contradicts the directory, offset, whether torch refuses the file because of it).
    """

    path: str
    records: DirectoryRecords
    raw: bytes = field(repr=False)
    offset: int
    comment: bytes
    trailing: int
    disputes: tuple[tuple[str, int, bool], ...] = ()


def read_directory(reader: Source) -> Directory:
    """Find and read the central directory.

    Raises:
        Truncated: there is no end record, as in a file that was cut short while it was written.
        BadDirectory: the end record and the directory contradict each other, or records overlap.
        Unsupported: the archive is split over several disks, or is encrypted.
    """
    path = reader.name
    end = _find_end(reader)
    raw = reader.read(end.offset, end.size)
    records = read_rows(raw, end.records, path, end.offset)
    _refuse_overlaps(records, path, end.offset)
    return Directory(path, records, raw, end.offset, end.comment, end.trailing, end.disputes)


def raw_directory(reader: Source) -> bytes:
    """Return the bytes of the central directory, unparsed. Raises like `read_directory`."""
    end = _find_end(reader)
    return reader.read(end.offset, end.size)


class _End(NamedTuple):
    records: int
    offset: int
    size: int
    comment: bytes
    trailing: int
    disputes: tuple[tuple[str, int, bool], ...]


def _find_end(reader: Source) -> _End:
    """Find the last end record whose directory is right before it."""
    if reader.size >= END.size:
        # Nearly every archive ends without a comment. The bytes where a longer comment could be may be tensor data.
        last = reader.read(reader.size - END.size, END.size)
        if last.startswith(b"PK\x05\x06") and last.endswith(b"\0\0"):
            with suppress(BadDirectory):
                return _parse_end(reader, last, 0, reader.size - END.size)
    tail_start = max(0, reader.size - END.size - MAX16)
    tail = reader.read(tail_start, reader.size - tail_start)
    position = len(tail)
    wrong = ""
    last_at = 0
    while (position := tail.rfind(b"PK\x05\x06", 0, position)) >= 0:
        if position + END.size > len(tail):
            continue
        try:
            end = _parse_end(reader, tail, position, tail_start)
        except BadDirectory as error:
            wrong = wrong or error.message
            last_at = last_at or tail_start + position
            continue
        if wrong and reader.read(reader.size - end.trailing, min(end.trailing, 4)) != b"PK\x03\x04":
            # torch uses the last signature in the file, whatever follows it. If a second archive follows, as in a file
            # of a distributed checkpoint, the trailing bytes are the only fault to report.
            message = f"a second end record, after the right one, does not belong to this archive ({wrong})"
            end = end._replace(disputes=((message, last_at, True), *end.disputes))
        return end
    if wrong:
        raise BadDirectory(wrong, path=reader.name, hint=f"{command('repair', reader.name, 'OUT')} rebuilds it")
    raise Truncated(
        "no zip directory at the end: the file was cut short while it was written or copied",
        path=reader.name,
        offset=reader.size,
        hint=truncated_hint(reader.name),
    )


def _parse_end(reader: Source, tail: bytes, position: int, base: int) -> _End:
    _, disk, start_disk, here, count, size, offset, comment_length = END.unpack_from(tail, position)
    at = base + position
    comment = tail[position + END.size : position + END.size + comment_length]
    if len(comment) < comment_length:
        raise BadDirectory(f"the archive comment at {at:#x} runs past the end of the file")
    first = at
    disputes: list[tuple[str, int, bool]] = []
    if at >= LOCATOR.size:
        signature, disk64, at64, disks = LOCATOR.unpack(reader.read(at - LOCATOR.size, LOCATOR.size))
        if signature == b"PK\x06\x07":
            if at64 + END64.size > at - LOCATOR.size:
                raise BadDirectory(f"the zip64 locator points at {at64:#x}, behind itself")
            fields = END64.unpack(reader.read(at64, END64.size))
            if fields[0] != b"PK\x06\x06":
                raise BadDirectory(f"no zip64 end record at {at64:#x}, where the locator points")
            disputes = list(_end_disputes(fields, (disk, start_disk, here, count, size, offset), at64, at))
            if disks != 1 or disk64:
                message = f"the zip64 locator states {disks} disks, and the directory on disk {disk64}"
                disputes.append((message, at - LOCATOR.size, disks != 1))
            _, _, _, _, disk, start_disk, here, count, size, offset = fields
            first = at64
    if disk or start_disk or here != count:
        raise Unsupported("the zip archive is split over several files", path=reader.name)
    if offset + size != first:
        raise BadDirectory(
            f"the end record at {at:#x} states a directory of {size} bytes at {offset:#x}, "
            f"which would end at {offset + size:#x} instead of {first:#x}"
        )
    if count > MAX_RECORDS or size > MAX_DIRECTORY or count * CENTRAL.size > size:
        raise BadDirectory(f"the end record states {count} records in {size} bytes, which is impossible")
    trailing = reader.size - at - END.size - comment_length
    return _End(count, offset, size, comment, trailing, tuple(disputes))


def _end_disputes(
    fields: Sequence[int], short: Sequence[int], at64: int, at: int
) -> Iterator[tuple[str, int, bool]]:
    """Yield the contradictions between the zip64 end record and the end record; the latter may defer to the former."""
    length, room = fields[1] + 12, at - LOCATOR.size - at64
    if length != room:
        message = f"the zip64 end record states a length of {length} bytes, and has {room}"
        yield message, at64, length < END64.size
    elif room != END64.size:
        yield f"the zip64 end record has {room - END64.size} bytes more than its fields need", at64, False
    for name, long, value in zip(_END_FIELDS, fields[4:], short, strict=True):
        most = MAX32 if name in ("size", "offset") else MAX16
        if value not in (long, most):
            yield f"the end record states {value} as its {name}, the zip64 end record {long}", at, False


_END_FIELDS = ("disk", "disk of the directory", "records on this disk", "records", "size", "offset")


def same_rows(reader: Source, old: Directory, changed: DirectoryRecord) -> tuple[array[int], DirectoryRecord] | None:
    """Return the offsets of an archive's records, in directory order, and its row for `changed`, a record of `old`.

    Return None if its directory differs from `old` in any other record, or if the comparison would need more than the
    directory's bytes. Raises like `read_directory`.
    """
    end = _find_end(reader)
    raw = reader.read(end.offset, end.size)
    if len(raw) != len(old.raw) or end.records != len(old.records):
        return None
    headers = old.records.headers_in(raw)
    after = bisect_right(old.records.positions, changed.position)
    stop = old.records.positions[after] if after < end.records else len(raw)
    (row,) = read_rows(raw[changed.position : stop], 1, reader.name, end.offset)
    row = row._replace(position=changed.position)
    others = old.records.with_headers(raw, old.records.headers_in(old.raw))
    others[changed.position : stop] = old.raw[changed.position : stop]
    if others != old.raw or MAX32 in headers or row.name != changed.name:
        return None
    return headers, row


def _refuse_overlaps(records: DirectoryRecords, path: str, directory: int) -> None:
    """Raise `BadDirectory` if records share bytes: such a file is a bomb, or an attack on readers that disagree.

    Nothing is read from the records.
    """
    if records.in_order(directory):
        return
    # A name has at most as many characters as bytes, so this check never refuses a sound file.
    ordered = sorted((record.header, record.stored, len(record.name), record.name) for record in records)
    ordered.append((directory, 0, 0, ""))
    for (header, stored, name_length, name), (following, *_) in itertools.pairwise(ordered):
        if header + LOCAL.size + name_length + stored > following:
            raise BadDirectory(
                f"the record of {stored} bytes runs into what begins at {following:#x}",
                path=path,
                where=name,
                offset=header,
            )
