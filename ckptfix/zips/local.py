"""Local headers, which precede the data of each record of a zip archive and state where the data begins.

Edits, repairs and diagnoses use this one reader, so that all see the same header. Layout: see `read`.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ckptfix.checkpoint import ByteRange, Data
from ckptfix.errors import BadDirectory, Truncated, Unsupported
from ckptfix.io.derived import inflated
from ckptfix.io.source import Source, truncated_hint
from ckptfix.zips.read import (
    DEFLATED,
    DESCRIPTOR_FOLLOWS,
    ENCRYPTED,
    LOCAL,
    MAX32,
    STORED,
    Directory,
    DirectoryRecord,
    DirectoryRecords,
    extra_fields,
)

ALIGNMENT = 64
"""torch aligns data to multiples of this number of bytes."""

MOST_EXTRA = 4096 + 64
"""Length in bytes of the longest extra field that aligns data, which is to a page."""

_DESCRIPTORS = (16, 24)
"""Lengths in bytes of a data descriptor, which states the checksum and the sizes after the data of a record."""


class LocalHeader(NamedTuple):
    """A local header as the file has it: `name` undecoded, sizes of four bytes, `extra` the length of the extra field.

    Attributes:
        header: where it begins in the file.
        needed: the version of the format that a reader must support, in tenths.
        behind: bytes after the name that were read with it; they may hold the whole extra field.
    """

    header: int
    name: bytes
    needed: int
    flags: int
    method: int
    crc32: int
    stored: int
    size: int
    extra: int
    behind: bytes = b""

    @property
    def data(self) -> int:
        """The offset in the file at which the data begins."""
        return self.header + LOCAL.size + len(self.name) + self.extra


def local_header(reader: Source, header: int, expected: int = 64) -> LocalHeader | None:
    """Read the local header at `header`; return None if the bytes there cannot be one.

    Args:
        expected: likely length in bytes of its name, or of its name and extra field, so that one read is enough.
    """
    left = reader.size - header
    if header < 0 or left < LOCAL.size:
        return None
    raw = reader.read(header, min(LOCAL.size + expected, left))
    signature, needed, flags, method, _, _, crc32, stored, size, name_length, extra = LOCAL.unpack_from(raw)
    if signature != b"PK\x03\x04" or LOCAL.size + name_length > left:
        return None
    if LOCAL.size + name_length > len(raw):
        raw = reader.read(header, LOCAL.size + name_length)
    first = LOCAL.size + name_length
    return LocalHeader(header, raw[LOCAL.size : first], needed, flags, method, crc32, stored, size, extra, raw[first:])


def local_extra(reader: Source, local: LocalHeader) -> bytes:
    """Return the extra field of `local`, or the part of it that the file has."""
    if len(local.behind) >= local.extra:
        return local.behind[: local.extra]
    start = local.data - local.extra
    return reader.read(start, min(local.extra, reader.size - start))


def local_sizes(reader: Source, local: LocalHeader) -> tuple[int, int]:
    """Return (bytes in the file, bytes of the data) as `local` states them, using its zip64 field if it names one."""
    if MAX32 in (local.stored, local.size):
        wide = next((payload for kind, payload in extra_fields(local_extra(reader, local)) if kind == 1), b"")
        if len(wide) >= 16:
            size, stored = struct.unpack_from("<2Q", wide)
            return stored, size
    return local.stored, local.size


def read_local(reader: Source, record: DirectoryRecord) -> LocalHeader:
    """Read the local header of `record` and compare it with the directory; no byte of the data is read.

    Raises:
        BadDirectory: the local header is missing, or has a different name.
        Unsupported: the record is encrypted.
        Truncated: the file ends inside the data.
    """
    name = record.name.encode("utf-8", "surrogateescape")
    local = local_header(reader, record.header, len(name))
    if local is None:
        raise BadDirectory(
            "the directory does not point to a local header", path=reader.name, where=record.name, offset=record.header
        )
    if local.name != name:
        raise BadDirectory(
            f"the local header calls this record {local.name.decode('utf-8', 'replace')!r}",
            path=reader.name,
            where=record.name,
            offset=record.header,
        )
    if record.flags & ENCRYPTED:
        raise Unsupported("the record is encrypted", path=reader.name, where=record.name)
    start = local.data
    if start + record.stored > reader.size:
        raise Truncated(
            f"{record.stored} bytes are expected, but only {max(reader.size - start, 0)} are left",
            path=reader.name,
            where=record.name,
            offset=start,
            hint=truncated_hint(reader.name),
        )
    return local


def plain_start(reader: Source, records: DirectoryRecords, index: int) -> int | None:
    """Return where the data of an undisputed record begins; None if `record_data` has to examine it more closely.

    The local header of nearly every record has the name of the directory, and this takes a quarter of the time.
    """
    if records.methods[index] != STORED or records.flags[index] & ENCRYPTED:
        return None
    name, header = records.raw_name(index), records.headers[index]
    first = LOCAL.size + len(name)
    if header + first > reader.size:
        return None
    raw = reader.read(header, first)
    if raw[:4] != b"PK\x03\x04" or raw[LOCAL.size :] != name or raw[26] | raw[27] << 8 != len(name):
        return None
    start = header + first + (raw[28] | raw[29] << 8)
    return start if start + records.stored[index] <= reader.size else None


def starts(directory: Directory) -> dict[int, int]:
    """Return the data offsets that the directory alone proves, by the offset of the record's local header.

    torch and ckptfix align data to multiples of 64 bytes, at most a page after the name, and write nothing but a
    descriptor between the data and the next record. So the end of a record determines where its data begins. One
    request for the directory then replaces one request for each record.
    """
    found: dict[int, int] = {}
    rows = sorted(directory.records, key=lambda record: record.header)
    ends = [*(row.header for row in rows[1:]), directory.offset]
    for record, end in zip(rows, ends, strict=True):
        if record.method != STORED or record.dispute is not None:
            continue
        first = record.header + LOCAL.size + len(record.name.encode("utf-8", "surrogateescape"))
        for descriptor in _DESCRIPTORS if record.flags & DESCRIPTOR_FOLLOWS else (0,):
            start = end - descriptor - record.stored
            if not start % ALIGNMENT and first <= start <= first + MOST_EXTRA:
                found[record.header] = start
    return found


def record_data(reader: Source, record: DirectoryRecord, start: int | None = None) -> Data:
    """Return the bytes of `record`: a range of the file, or a stream that inflates one.

    Raises like `read_local`, and as below.

    Args:
        start: where its data begins, if known; its local header is then not read.

    Raises:
        BadDirectory: readers disagree on its bytes (see `DirectoryRecord.dispute`).
        Unsupported: its compression method is not deflate.
    """
    if start is None:
        start = read_local(reader, record).data
    dispute = record.dispute
    if dispute is not None:
        raise BadDirectory(dispute, path=reader.name, where=record.name, offset=record.header)
    if record.method == STORED:
        return ByteRange(reader.name, start, record.size)
    if record.method == DEFLATED:
        return inflated(ByteRange(reader.name, start, record.stored), record.size)
    raise Unsupported(f"compression method {record.method}", path=reader.name, where=record.name, offset=record.header)
