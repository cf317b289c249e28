"""Local headers, which stand before the data of each record of a zip archive, and state where the data begins.

One reader for all: edits, repairs and diagnoses see the same header. Layout: see `read`.
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
    Record,
    extra_fields,
)

ALIGNMENT = 64
"""torch puts data at multiples of so many bytes."""

MOST_EXTRA = 4096 + 64
"""Bytes of the longest extra field that aligns data, to a page."""

_DESCRIPTORS = (16, 24)
"""Bytes behind the data of a record that state its checksum and sizes."""


class Local(NamedTuple):
    """A local header as it stands: `name` undecoded, sizes of four bytes, `extra` the length of the extra field.

    Attributes:
        header: where it begins in the file.
        needed: the version of the format that a reader must know, in tenths.
        behind: bytes behind the name that came with it, perhaps the whole extra field.
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
        """Where the data begins in the file."""
        return self.header + LOCAL.size + len(self.name) + self.extra


def local_header(reader: Source, header: int, expected: int = 64) -> Local | None:
    """The local header at `header`; None if what stands there could be none.

    Args:
        expected: bytes that its name, or name and extra field, are likely to have, for a single read.
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
    return Local(header, raw[LOCAL.size : first], needed, flags, method, crc32, stored, size, extra, raw[first:])


def local_extra(reader: Source, local: Local) -> bytes:
    """The extra field of `local`, or what the file has of it."""
    if len(local.behind) >= local.extra:
        return local.behind[: local.extra]
    start = local.data - local.extra
    return reader.read(start, min(local.extra, reader.size - start))


def local_sizes(reader: Source, local: Local) -> tuple[int, int]:
    """(bytes in the file, bytes of the data) that `local` states, from the zip64 field where it refers to one."""
    if MAX32 in (local.stored, local.size):
        wide = next((payload for kind, payload in extra_fields(local_extra(reader, local)) if kind == 1), b"")
        if len(wide) >= 16:
            size, stored = struct.unpack_from("<2Q", wide)
            return stored, size
    return local.stored, local.size


def read_local(reader: Source, record: Record) -> Local:
    """The local header of `record`, compared with the directory; not a byte of the data is read.

    Raises:
        BadDirectory: the local header is missing, or it has another name.
        Unsupported: the record is encrypted.
        Truncated: the file ends inside the data.
    """
    name = record.name.encode("utf-8", "surrogateescape")
    local = local_header(reader, record.header, len(name))
    if local is None:
        raise BadDirectory(
            "no local header where the directory points", path=reader.name, where=record.name, offset=record.header
        )
    if local.name != name:
        raise BadDirectory(
            f"the local header calls this record {local.name.decode('utf-8', 'replace')!r}",
            path=reader.name,
            where=record.name,
            offset=record.header,
        )
    if record.flags & ENCRYPTED:
        raise Unsupported("an encrypted record", path=reader.name, where=record.name)
    start = local.data
    if start + record.stored > reader.size:
        raise Truncated(
            f"{record.stored} bytes promised, {max(reader.size - start, 0)} left",
            path=reader.name,
            where=record.name,
            offset=start,
            hint=truncated_hint(reader.name),
        )
    return local


def starts(directory: Directory) -> dict[int, int]:
    """Where the data of records begins, by their header, where the directory alone leaves no doubt.

    torch and ckptfix put data at multiples of 64 bytes, at most a page behind the name, and nothing but a descriptor
    between data and the next record: so where a record ends says where its data begins. One request for the directory
    then does what takes one for each record otherwise.
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


def record_data(reader: Source, record: Record, start: int | None = None) -> Data:
    """Where the bytes of `record` are: a range, or a stream that inflates them. Raises as `read_local`, and

    Args:
        start: where its data begins, if that is known: its local header is not read.

    Raises:
        BadDirectory: readers disagree on what its bytes are (see `Record.dispute`).
        Unsupported: compressed by another method than deflate.
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
