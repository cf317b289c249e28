"""Contradictions in a zip archive, judged as strictly as by the strictest of its readers.

torch reads with miniz, which trusts the central directory, takes the end of each local header from the header itself,
and refuses or misreads a few fields that other readers skip. zipfile refuses because of other fields, and libzip
compares both descriptions of a record. `Dispute.serious` says which readers a contradiction concerns: if it is true,
torch refuses the file or reads wrong bytes; if not, torch reads the right bytes, but a different reader may not.

Sources: ``mz_zip_reader_read_central_dir`` and ``mz_zip_reader_extract_to_mem_no_alloc1`` of miniz 3.0.2,
``_RealGetContents`` and ``open`` of CPython's Lib/zipfile, and the errors of zip_open(3) with ``ZIP_CHECKCONS``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from ckptfix.io.source import Source
from ckptfix.pickles.collector import gc_paused
from ckptfix.zips.append import earlier
from ckptfix.zips.local import LocalHeader, local_extra, local_header, local_sizes
from ckptfix.zips.read import CENTRAL, DESCRIPTOR_FOLLOWS, ENCRYPTED, LOCAL, Directory, DirectoryRecord, extra_fields

PATCHED, MASKED = 0x20, 0x2000
"""Flag bits for which miniz refuses a record, and the whole archive."""

NEWEST = 63
"""The newest version of the format, in tenths, that zipfile reads."""

FILE_TYPE, FOLDER_MODE = 0o170000 << 16, 0o040000 << 16
"""The Unix file type in the external attributes, and a folder's mode."""

UNIX = 3
USUAL = 72
"""Length in bytes of the longest extra field that torch usually writes."""

_ROW = struct.Struct("<4x3H18x2H2xH10x").unpack_from
"""Fields of a directory row: made by, needed, flags, lengths of the name and of the extra field, disk."""

_SHORT, _LONG = struct.Struct("<3L"), struct.Struct("<L2Q")


class Dispute(NamedTuple):
    """A fact that the archive states twice, in two different ways.

    Attributes:
        id: id of the finding: ``"bad-directory"`` for the directory and its end, ``"bad-local-header"`` for the headers
            and descriptors around the data, ``"hidden-bytes"`` and ``"junk-before"`` for bytes that belong to no
            record.
        serious: torch refuses the file, or reads other bytes than the directory means.
    """

    id: str
    where: str
    offset: int
    message: str
    serious: bool


class RecordSpan(NamedTuple):
    """The extent of a record: where its data begins by its local header, and where the next structure can begin."""

    record: DirectoryRecord
    data: int
    end: int


@gc_paused
def examine(
    reader: Source, directory: Directory, *, local_headers: bool = True
) -> tuple[list[RecordSpan], list[Dispute]]:
    """Return the extents of the records by their local headers, and every contradiction, without reading any data.

    Args:
        local_headers: False checks only the directory, and returns no extents.
    """
    found = [Dispute("bad-directory", "", offset, message, serious) for message, offset, serious in directory.disputes]
    spans: list[RecordSpan] = []
    for record in directory.records:
        odd = _row(directory.raw, record)
        if odd:
            found.append(_joined("bad-directory", record, directory.offset + record.position, odd))
        if not local_headers:
            continue
        local = local_header(reader, record.header, len(record.name) + USUAL)
        if local is None:
            message = "the directory does not point to a local header"
            found.append(Dispute("bad-local-header", record.name, record.header, message, True))
            data = record.header + LOCAL.size + len(record.name.encode("utf-8", "surrogateescape"))
            spans.append(RecordSpan(record, data, data + record.stored))
            continue
        data = local.data
        said = _local(reader, local, data, record)
        end, message = _behind(reader, record, data + record.stored, directory.offset)
        if message:
            said.append((message, False))
        if said:
            found.append(_joined("bad-local-header", record, record.header, said))
        spans.append(RecordSpan(record, data, end))
    if not local_headers:
        return spans, found
    spans.sort(key=lambda span: span.record.header)
    found += _between(sorted([*spans, *_former(reader, directory)], key=_place), directory.offset)
    return spans, found


def _place(span: RecordSpan) -> int:
    return span.record.header


def _former(reader: Source, directory: Directory) -> Iterator[RecordSpan]:
    """Yield what in-place edits left behind: records that the directory no longer lists, and former directories."""
    for name, before, record in earlier(reader.name, directory):
        local = local_header(reader, record.header, len(record.name) + USUAL)
        if local is not None:
            end, _ = _behind(reader, record, local.data + record.stored, before.offset)
            yield RecordSpan(record, local.data, end)
        listing = DirectoryRecord("a former directory", before.offset, 0, 0, 0, 0, 0, 0)
        yield RecordSpan(listing, before.offset, name.length)


def _joined(id: str, record: DirectoryRecord, offset: int, said: list[tuple[str, bool]]) -> Dispute:
    """Join all messages in `said` about one place into one dispute, those that torch minds first."""
    said.sort(key=lambda what: not what[1])
    return Dispute(id, record.name, offset, "; ".join(message for message, _ in said), said[0][1])


def _row(raw: bytes, record: DirectoryRecord) -> list[tuple[str, bool]]:
    """Return the faults of a directory row, as (message, whether torch minds)."""
    made, needed, flags, name_length, extra_length, disk = _ROW(raw, record.position)
    needed &= 0xFF
    said: list[tuple[str, bool]] = []
    dispute = record.dispute
    if dispute is not None:
        said.append((dispute, True))
    elif record.attributes & FILE_TYPE == FOLDER_MODE and made >> 8 == UNIX and record.size:
        said.append(("marked as a folder by its Unix mode", False))
    if disk:
        # miniz accepts 1 as the number of the only disk.
        said.append((f"the directory puts it on disk {disk}, but there is only one file", disk > 1))
    if flags & (PATCHED | MASKED):
        said.append((f"flags {flags:#x} mark a patch or a masked header: torch refuses it", True))
    if needed > NEWEST:
        said.append((f"it requires version {needed / 10} of the zip format, which zipfile refuses", False))
    if extra_length:
        first = record.position + CENTRAL.size + name_length
        kinds = [kind for kind, _ in extra_fields(raw[first : first + extra_length])]
        if -1 in kinds:
            said.append(("an extra field in the directory does not match its length", False))
        if kinds.count(1) > 1:
            said.append(("it has two zip64 fields in the directory", False))
    return said


def _local(reader: Source, local: LocalHeader, data: int, record: DirectoryRecord) -> list[tuple[str, bool]]:
    """Return the contradictions between a local header and the directory, as (message, whether torch minds)."""
    said: list[tuple[str, bool]] = []
    if local.name != record.name.encode("utf-8", "surrogateescape"):
        said.append(("its local header has a different name", True))
    if local.method != record.method:
        message = f"compression method {local.method} in the local header, {record.method} in the directory"
        said.append((message, True))
    odd = local.flags ^ record.flags
    if odd & ENCRYPTED:
        said.append(("only one of its two headers marks it as encrypted", True))
    elif odd:
        said.append((f"flags {local.flags:#x} in the local header, {record.flags:#x} in the directory", False))
    if local.needed & 0xFF > NEWEST:
        said.append((f"it requires version {(local.needed & 0xFF) / 10} of the zip format", False))
    if data + record.stored > reader.size:
        said.append(("its local header pushes its data beyond the end of the file", True))
        return said
    extra = local_extra(reader, local)
    # torch writes one field, which fills it.
    single = not extra or (len(extra) > 3 and extra[2] + (extra[3] << 8) + 4 == len(extra))
    if not single and any(kind < 0 for kind, _ in extra_fields(extra)):
        said.append(("an extra field in its local header does not match its length", False))
    deferred = local.flags & DESCRIPTOR_FOLLOWS
    if deferred and not (local.stored or local.size or local.crc32):
        return said
    stored, size = local_sizes(reader, local)
    if (stored or size or not deferred) and (stored, size) != (record.stored, record.size):
        here = f"{size:,} bytes, {stored:,} stored, in the local header"
        said.append((f"{here}; {record.size:,} and {record.stored:,} in the directory", True))
    if (local.crc32 or not deferred) and local.crc32 != record.crc32:
        said.append((f"CRC-32 {local.crc32:08x} in the local header, {record.crc32:08x} in the directory", True))
    return said


def _behind(reader: Source, record: DirectoryRecord, end: int, directory: int) -> tuple[int, str]:
    """Return the offset after a record's data and its descriptor, and how the descriptor contradicts the directory.

    A descriptor is the CRC-32 and two sizes of 4 or 8 bytes, with or without a signature (APPNOTE 4.3.9).
    """
    if not record.flags & DESCRIPTOR_FOLLOWS:
        return end, ""
    raw = reader.read(end, max(min(24, directory - end, reader.size - end), 0))
    skip = 4 if raw.startswith(b"PK\x07\x08") else 0
    stated = (record.stored, record.size)
    if skip and len(raw) >= 16 and _SHORT.unpack_from(raw, 4) == (record.crc32, *stated):
        return end + 16, ""
    for form in (_SHORT, _LONG):
        if len(raw) >= skip + form.size:
            crc32, *sizes = form.unpack_from(raw, skip)
            if tuple(sizes) == stated and (crc32 == record.crc32 or skip):
                wrong = crc32 != record.crc32
                message = f"CRC-32 {crc32:08x} after the data, {record.crc32:08x} in the directory" if wrong else ""
                return end + skip + form.size, message
    if not skip:
        # miniz writes no descriptor after a record without data.
        return end, "" if not record.size else "no data descriptor follows its data, although its flags announce one"
    return end + 16, "its data descriptor and the directory state different sizes"


def _between(spans: list[RecordSpan], directory: int) -> Iterator[Dispute]:
    """Yield the data that runs into the next structure, and the bytes that belong to no record."""
    end = 0
    before: RecordSpan | None = None
    for span in spans:
        header = span.record.header
        if header > end and before is None:
            yield Dispute("junk-before", "", 0, f"{header:,} other bytes precede the archive", True)
        elif header > end:
            yield _gap(end, header, f"before {span.record.name}")
        elif before is not None and before.data + before.record.stored > header:
            yield _overlap(before, header)
        end, before = span.end, span
    if directory > end:
        yield _gap(end, directory, "before the directory")
    elif before is not None and before.data + before.record.stored > directory:
        yield _overlap(before, directory)


def _gap(start: int, end: int, place: str) -> Dispute:
    return Dispute("hidden-bytes", place, start, f"{end - start:,} bytes up to {end:#x} belong to no record", False)


def _overlap(span: RecordSpan, following: int) -> Dispute:
    message = f"its data, from {span.data:#x} on, overlaps the bytes that begin at {following:#x}"
    return Dispute("bad-local-header", span.record.name, span.record.header, message, True)
