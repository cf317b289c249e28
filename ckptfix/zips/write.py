"""Writing of zip archives in torch's layout, and replacement of one record of an existing archive.

torch's own layout (caffe2/serialize/inline_container.cc, ``getPadding``; files of torch 2.13 have the same bytes):
every record is stored; an ``FB`` extra field in the local header aligns its data to a multiple of 64 bytes; sizes and
CRC-32 are in a data descriptor and in the directory; the flags are 0x808; there is always a zip64 end record.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

from ckptfix.checkpoint import ByteRange, Data, Derived, Segment, segment_length
from ckptfix.checkpoint.byte_ranges import pieces_of
from ckptfix.commands import command
from ckptfix.dataclass import dataclass
from ckptfix.errors import BadDirectory
from ckptfix.io.blocks import LARGE, PAGE
from ckptfix.io.checksums import Checksums, SummedStream
from ckptfix.io.crc import checksum
from ckptfix.io.read import CHECKSUM
from ckptfix.io.source import Source
from ckptfix.zips.local import ALIGNMENT as ALIGNMENT
from ckptfix.zips.local import LocalHeader, local_extra, read_local
from ckptfix.zips.read import (
    CENTRAL,
    DESCRIPTOR_FOLLOWS,
    END,
    END64,
    LOCAL,
    LOCATOR,
    MAX16,
    MAX32,
    Directory,
    DirectoryRecord,
    extra_fields,
)

FLAGS = 0x0808
FB = 0x4246

DESCRIPTOR = b"PK\x07\x08"

CRC_IN_ROW, CRC_IN_DESCRIPTOR = 16, len(DESCRIPTOR)
"""The offset of the four bytes of a checksum in a row of the directory, and in a data descriptor."""


@dataclass(frozen=True, slots=True)
class NewRecord:
    """A record to be written; with `crc32` None it is checksummed while the file is written."""

    name: str
    data: bytes | Data
    crc32: int | None = None

    @property
    def size(self) -> int:
        return len(self.data) if isinstance(self.data, bytes) else self.data.length


def padding(cursor: int, fixed: int, like: int | None = None) -> bytes:
    """Return the ``FB`` extra field that aligns the data after `fixed` bytes of a local header at `cursor`.

    Args:
        like: a multiple of 64; the data's offset will be congruent to it, modulo a page.
    """
    start = cursor + fixed + 4
    fill = -start % ALIGNMENT if like is None else (like - start) % PAGE
    return b"FB" + fill.to_bytes(2, "little") + b"Z" * fill


def _like(data: bytes | Data) -> int | None:
    """Return the offset of large aligned data in its own file; an output with the same page alignment can share it."""
    first = next(iter(pieces_of(data)), b"")
    if isinstance(first, ByteRange) and first.length >= LARGE and first.offset % ALIGNMENT == 0:
        return first.offset
    return None


class ArchiveTemplate:
    """Archives that differ only in the bytes of one record, and in its checksum.

    Args:
        records: those of one of the archives.
        varying: the position of the record that differs: ranges of files, all of the same size, which is not 0.
    """

    __slots__ = ("_between", "_blank", "_end", "_head")

    def __init__(self, records: Sequence[NewRecord], varying: int) -> None:
        known = [*records]
        known[varying] = replace(records[varying], crc32=0)
        segments, rows, cursor = laid_out(known, Checksums(()), iter(()))
        literal = cast("list[bytes]", [b"" if segment is known[varying].data else segment for segment in segments])
        # Each record has three segments: its header, its data, its descriptor.
        self._head = b"".join(literal[: 3 * varying + 1])
        behind = b"".join(literal[3 * varying + 2 :])
        before = sum(map(len, rows.blank[:varying]))
        directory = b"".join(rows.blank)
        row = len(behind) + before + CRC_IN_ROW
        tail = behind + directory + end_records(len(records), len(directory), cursor)
        # The checksum of the record is in its descriptor, and in its row of the directory.
        self._between, self._end = tail[CRC_IN_DESCRIPTOR + 4 : row], tail[row + 4 :]
        self._blank = self._joined_tail(0)

    def tail(self, crc32: int) -> tuple[bytes, ...]:
        """Return the pieces behind the data of the record, with its checksum; long ones are the same for all."""
        crc = crc32.to_bytes(4, "little")
        return DESCRIPTOR + crc, self._between, crc, self._end

    def _joined_tail(self, crc32: int) -> bytes:
        return b"".join(self.tail(crc32))

    def segments(self, made: TemplatedArchive, sums: Checksums, numbers: Iterator[int]) -> list[Segment]:
        """Return the segments of the archive `made`; arguments as for `_archive`."""
        if made.crc32 is not None:
            return [self._head, made.data, *self.tail(made.crc32)]
        nth = next(numbers)
        return [self._head, made.data, sums.segment(nth, self._joined_tail, self._blank)]


class TemplatedArchive(NamedTuple):
    """An archive in the form of a template: the data of the record that differs, and its checksum if it is known."""

    template: ArchiveTemplate
    data: ByteRange
    crc32: int | None


NewArchive = Sequence[NewRecord] | TemplatedArchive


def fresh_archive(records: Sequence[NewRecord]) -> list[Segment]:
    """Return the segments of a new archive with these records, in order."""
    return fresh_archives([records], alone=True)[0]


def fresh_archives(archives: Sequence[NewArchive], *, alone: bool = False) -> list[list[Segment]]:
    """Return the segments of several new archives, to be written in this order, with unknown checksums read together.

    Args:
        alone: each archive is a file of its own, in which large records keep their alignment to pages.
    """
    unknown = [data for archive in archives for data in _unknown(archive)]
    sums = Checksums(unknown)
    numbers = iter(range(len(unknown)))
    return [
        archive.template.segments(archive, sums, numbers)
        if isinstance(archive, TemplatedArchive)
        else _archive(archive, sums, numbers, alone)
        for archive in archives
    ]


def _unknown(archive: NewArchive) -> Iterator[ByteRange]:
    """Yield the ranges in an archive whose checksums must be read."""
    if isinstance(archive, TemplatedArchive):
        if archive.crc32 is None:
            yield archive.data
        return
    for record in archive:
        if record.crc32 is None and record.size and isinstance(record.data, ByteRange):
            yield record.data


def _archive(records: Sequence[NewRecord], sums: Checksums, numbers: Iterator[int], alone: bool) -> list[Segment]:
    """Return the segments of one archive; the next of `numbers` belongs to its first record without a checksum."""
    segments, rows, cursor = laid_out(records, sums, numbers, alone=alone)
    directory = directory_of(rows)
    return [*segments, directory, end_records(len(records), segment_length(directory), cursor)]


@dataclass(frozen=True, slots=True)
class DirectoryRows:
    """Rows of a directory that is to be written.

    Attributes:
        made: make the rows, once all data before them is written.
        blank: the same rows, with zeros for the checksums that are not known yet.
        waits: whether a checksum is not known yet.
    """

    made: Sequence[Callable[[], bytes]]
    blank: Sequence[bytes]
    waits: bool


def directory_of(rows: DirectoryRows, before: bytes = b"") -> Segment:
    """Return a directory of the rows `before` and `rows`."""
    if not rows.waits:
        return before + b"".join(rows.blank)
    made = lambda: (before + b"".join(row() for row in rows.made),)  # noqa: E731 (writing waits for the checksums)
    blank = before + b"".join(rows.blank)
    return Derived(len(blank), made, CHECKSUM, blank=blank)


def laid_out(
    records: Sequence[NewRecord], sums: Checksums, numbers: Iterator[int], *, cursor: int = 0, alone: bool = False
) -> tuple[list[Segment], DirectoryRows, int]:
    """Return the segments of records that are written from the offset `cursor`, their rows, and the offset behind them.

    Args:
        sums, numbers: as in `_archive`.
        alone: as in `fresh_archives`.
    """
    segments: list[Segment] = []
    rows: list[Callable[[], bytes]] = []
    blank: list[bytes] = []
    waits = False
    for record in records:
        name = record.name.encode("utf-8", "surrogateescape")
        large = record.size >= MAX32 or cursor >= MAX32
        zip64 = _local_zip64(record.size, cursor) if large else b""
        like = _like(record.data) if alone else None
        extra = zip64 + padding(cursor, LOCAL.size + len(name) + len(zip64), like)
        # An empty record needs no descriptor: the zeros in its header are right.
        flags = FLAGS if record.size else FLAGS & ~DESCRIPTOR_FOLLOWS
        descriptor = _descriptor_maker(record.size, large)
        header = LOCAL.pack(b"PK\x03\x04", 45 if large else 0, flags, 0, 0, 0, 0, 0, 0, len(name), len(extra))
        row = _row_maker(name, record.size, cursor, flags)
        if record.crc32 is None and record.size and isinstance(record.data, Derived):
            waits = True
            summed = SummedStream(record.data)
            segments += (header + name + extra, summed.data, summed.segment(descriptor, descriptor(0)))
            rows.append(lambda summed=summed, row=row: row(summed.value()))  # type: ignore[misc]
            blank.append(row(0))
            cursor += len(header) + len(name) + len(extra) + record.size + len(descriptor(0))
            continue
        segments += (header + name + extra, record.data)
        if record.crc32 is None and record.size and not isinstance(record.data, bytes):
            nth = next(numbers)
            waits = True
            segments.append(sums.segment(nth, descriptor, descriptor(0)))
            rows.append(lambda nth=nth, row=row: row(sums.value(nth)))  # type: ignore[misc]
            blank.append(row(0))
        else:
            crc32 = record.crc32 if record.crc32 is not None else _crc32(record.data)
            segments.append(descriptor(crc32))
            rows.append(lambda crc32=crc32, row=row: row(crc32))  # type: ignore[misc]
            blank.append(row(crc32))
        cursor += len(header) + len(name) + len(extra) + record.size + len(descriptor(0))
    return segments, DirectoryRows(rows, blank, waits), cursor


def _crc32(data: bytes | Data) -> int:
    """Return the CRC-32 of literal bytes, or 0 for other data, which is empty here."""
    return checksum(data) if isinstance(data, bytes) else 0


def _local_zip64(size: int, cursor: int) -> bytes:
    """Return the zip64 field of a local header; like miniz, with sizes only if the record itself is large."""
    fields = [size, size] if size >= MAX32 else []
    if cursor >= MAX32:
        fields.append(cursor)
    return struct.pack(f"<2H{len(fields)}Q", 1, 8 * len(fields), *fields)


def _descriptor_maker(size: int, large: bool) -> Callable[[int], bytes]:
    """Return a function that makes the data descriptor for a CRC-32; it is empty for an empty record."""
    if not size:
        return lambda crc32: b""
    form = "<4sL2Q" if large else "<4s3L"
    return lambda crc32: struct.pack(form, DESCRIPTOR, crc32, size, size)


def _row_maker(name: bytes, size: int, header: int, flags: int) -> Callable[[int], bytes]:
    """Return a function that makes the directory row for a CRC-32."""
    wide = [value for value in (size, size, header) if value >= MAX32]
    extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    short = min(size, MAX32)

    def row(crc32: int) -> bytes:
        fields = (0, 45 if wide else 0, flags, 0, 0, 0, crc32, short, short, len(name), len(extra))
        return CENTRAL.pack(b"PK\x01\x02", *fields, 0, 0, 0, 0, min(header, MAX32)) + name + extra

    return row


def end_records(count: int, size: int, offset: int, comment: bytes = b"") -> bytes:
    """Return the zip64 end record, its locator and the end record, for a directory of `size` bytes at `offset`."""
    return b"".join(
        (
            END64.pack(b"PK\x06\x06", END64.size - 12, 0x031E, 45, 0, 0, count, count, size, offset),
            LOCATOR.pack(b"PK\x06\x07", 0, offset + size, 1),
            END.pack(
                b"PK\x05\x06",
                *(0, 0, min(count, MAX16), min(count, MAX16), min(size, MAX32), min(offset, MAX32), len(comment)),
            ),
            comment,
        )
    )


def replace_record(
    reader: Source, directory: Directory, record: DirectoryRecord, new: bytes, unit: int = PAGE
) -> list[Segment]:
    """Return the segments of the archive with `new` as the data of `record`; everything else keeps its bytes.

    Bytes after the record move by a multiple of 64 bytes, so that every tensor keeps its alignment and one range copies
    them all. If these bytes are large, they move by a multiple of `unit`, or of a page if the header has no room for
    that. The record after the replaced one gets a local header whose padding takes up the difference. For the other
    records, only the offsets in the directory change.

    Raises:
        BadDirectory: a local header disagrees with the directory, or a record begins within the bytes of another
            one and one of the two changes.
    """
    path = directory.path
    local = read_local(reader, record)
    crc32 = checksum(new)
    head, tail = rewritten_header(reader, local, record.flags, crc32, len(new))
    headers = directory.records.headers
    behind_it = min((header for header in headers if header > record.header), default=None)
    index = None if behind_it is None else headers.index(behind_it)
    following = None if index is None else directory.records[index]
    cursor = record.header + len(head) + len(new) + len(tail)
    segments: list[Segment] = [ByteRange(path, 0, record.header), head, new, tail]
    if following is None:
        shift = cursor - directory.offset
    else:
        _refuse_within(directory, following, record, local.data + record.stored)
        behind = read_local(reader, following)
        inside = [header for header in headers if following.header < header < behind.data]
        if inside:
            _refuse_within(directory, directory.records[headers.index(inside[0])], following, behind.data)
        rest = directory.offset - behind.data
        old = reader.read(behind.header, behind.data - behind.header)
        header = repadded(old, local_extra(reader, behind), cursor, behind.data, unit if rest >= LARGE else ALIGNMENT)
        segments += (header, ByteRange(path, behind.data, rest))
        shift = cursor + len(header) - behind.data
    now = (at if at <= record.header else cursor if at == behind_it else at + shift for at in headers)
    moved = array("Q", now)
    raw = patched_directory(directory, record, moved, crc32, len(new))
    segments += (raw, end_records(len(directory.records), len(raw), directory.offset + shift, directory.comment))
    return segments


def _refuse_within(directory: Directory, record: DirectoryRecord, other: DirectoryRecord, end: int) -> None:
    """Raise `BadDirectory` if `record` begins before `other` has ended."""
    if record.header < end:
        raise BadDirectory(
            f"it begins within the bytes of {other.name!r}",
            path=directory.path,
            where=record.name,
            offset=record.header,
            hint=f"{command('repair', directory.path, 'OUT')} recovers the intact records",
        )


def rewritten_header(reader: Source, local: LocalHeader, flags: int, crc32: int, size: int) -> tuple[bytes, bytes]:
    """Return the local header and data descriptor of a record that is now stored with `size` bytes."""
    head = bytearray(reader.read(local.header, local.data - local.header))
    wide = any(kind == 1 for kind, _ in extra_fields(local_extra(reader, local)))
    struct.pack_into("<H", head, 8, 0)
    if flags & DESCRIPTOR_FOLLOWS:
        if not wide and (local.crc32 or local.stored or local.size):
            struct.pack_into("<3L", head, 14, crc32, size, size)
        return bytes(head), struct.pack("<4sL2Q" if wide else "<4s3L", DESCRIPTOR, crc32, size, size)
    struct.pack_into("<3L", head, 14, crc32, size, size)
    if wide:
        raise BadDirectory("a pickle record has zip64 sizes in its local header")
    return bytes(head), b""


def repadded(raw: bytes, extra: bytes, cursor: int, data: int, unit: int) -> bytes:
    """Pad the local header `raw` at `cursor` so that its data moves by a multiple of `unit` from `data`."""
    kept = b"".join(
        struct.pack("<2H", kind, len(payload)) + payload
        for kind, payload in extra_fields(extra)
        if kind not in (-1, FB)
    )
    fixed = raw[: len(raw) - len(extra)]
    start = cursor + len(fixed) + len(kept) + 4
    fill = (data - start) % unit
    if len(kept) + 4 + fill > MAX16:
        fill = (data - start) % PAGE
    header = bytearray(fixed)
    struct.pack_into("<H", header, 28, len(kept) + 4 + fill)
    return bytes(header) + kept + b"FB" + fill.to_bytes(2, "little") + b"Z" * fill


def patched_directory(
    directory: Directory, record: DirectoryRecord, headers: array[int], crc32: int, size: int
) -> bytes:
    """Return the directory with the offsets `headers`, and with new sizes for the replaced `record`."""
    records = directory.records
    stated = records.headers_in(directory.raw)
    wide: dict[int, int] = {}
    if max(headers, default=0) < MAX32 and MAX32 not in stated:
        raw = records.with_headers(directory.raw, array("I", headers))
    else:
        raw = bytearray(directory.raw)
        put = struct.Struct("<L").pack_into
        for position, old, header, short in zip(records.positions, records.headers, headers, stated, strict=True):
            # The zip64 field of the record has the old sizes before the offset, but the row no longer uses them.
            if short == MAX32 and position == record.position:
                wide[position] = header
            elif old == header:
                continue
            elif header < MAX32 and short != MAX32:
                put(raw, position + 42, header)
            else:
                wide[position] = header
    struct.pack_into("<3L", raw, record.position + 16, crc32, size, size)
    struct.pack_into("<H", raw, record.position + 10, 0)
    return _widened(bytes(raw), wide) if wide else bytes(raw)


def _widened(raw: bytes, rows: Mapping[int, int]) -> bytes:
    """Return `raw` with 64-bit header offsets in the directory rows at these positions."""
    pieces: list[bytes] = []
    done = 0
    for position, header in sorted(rows.items()):
        fields = list(CENTRAL.unpack_from(raw, position))
        stored, size, name_length, extra_length = fields[8], fields[9], fields[10], fields[11]
        first = position + CENTRAL.size
        extra = raw[first + name_length : first + name_length + extra_length]
        others = b"".join(
            struct.pack("<2H", kind, len(payload)) + payload for kind, payload in extra_fields(extra) if kind > 1
        )
        old = next((payload for kind, payload in extra_fields(extra) if kind == 1), b"")
        sizes = old[: 8 * ((stored == MAX32) + (size == MAX32))]
        payload = sizes + struct.pack("<Q", header)
        extra = struct.pack("<2H", 1, len(payload)) + payload + others
        fields[11] = len(extra)
        fields[16] = MAX32
        pieces += (raw[done:position], CENTRAL.pack(*fields), raw[first : first + name_length], extra)
        done = first + name_length + extra_length
    pieces.append(raw[done:])
    return b"".join(pieces)
