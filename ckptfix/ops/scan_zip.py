"""What is odd about a zip container: everything on which two readers could disagree, or that is not accounted for."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ckptfix.checkpoint import Finding
from ckptfix.containers.zip_read import DEFLATED, ENCRYPTED, LOCAL, MAX32, STORED, Directory, Record, extra_fields
from ckptfix.fileio import Reader
from ckptfix.ops.catalogue import found

ALIGNMENT = 64
"""Bytes that torch aligns storages to (caffe2/serialize/inline_container.h, ``kFieldAlignment``)."""

_TORCH_RECORDS = ("data.pkl", "version", "byteorder", ".format_version", ".storage_alignment", ".data/serialization_id")

_CENTRAL_ONLY = 0x8
"""Flag bit: sizes and checksum stand behind the data, and not in the local header."""

LISTED = 20
"""Findings of one kind before the rest are counted."""


def scan(reader: Reader, directory: Directory, root: str) -> Iterator[Finding]:
    """Findings about the records of `directory`; of their data only what stands between them is looked at.

    Args:
        root: the folder that data.pkl is in.
    """
    records = directory.records
    yield from _names(records)
    yield from _fields(records, root)
    yield from _headers(reader, directory, root)
    if not any(record.name == f"{root}/version" for record in records):
        yield found("no-version", where=f"{root}/version")
    if records and not any(record.crc32 for record in records if record.size):
        yield found("no-checksums")


def _names(records: Sequence[Record]) -> Iterator[Finding]:
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[record.name.lower()].append(record)
        name = record.name
        parts = name.replace("\\", "/").split("/")
        if ".." in parts or name.startswith("/") or "\\" in name or "\0" in name or name[1:2] == ":":
            yield found("odd-name", where=name, offset=record.header)
    for group in groups.values():
        if len(group) < 2:
            continue
        places = ", ".join(hex(record.header) for record in group[:5])
        names = {record.name for record in group}
        id = "duplicate-record" if len(names) < len(group) else "case-variant"
        message = f"{len(group)} records are called {' and '.join(sorted(names)[:3])}, at {places}"
        yield found(id, message, where=group[0].name, offset=group[0].header)


def _fields(records: Sequence[Record], root: str) -> Iterator[Finding]:
    deflated = [record for record in records if record.method == DEFLATED]
    for record in records:
        if record.flags & ENCRYPTED:
            yield found("encrypted-record", where=record.name, offset=record.header)
        if record.method not in (STORED, DEFLATED):
            message = f"compressed by method {record.method}, which torch does not read"
            yield found("unknown-compression", message, where=record.name, offset=record.header)
    if deflated:
        saved = sum(record.size - record.stored for record in deflated)
        message = f"{len(deflated)} records are compressed, by {max(saved, 0):,} bytes: torch can not map them"
        yield found("deflated", message, where=deflated[0].name, offset=deflated[0].header)
    known = {f"{root}/{name}" for name in _TORCH_RECORDS}
    stray = [
        record for record in records if record.name not in known and not record.name.startswith(f"{root}/data/")
    ]
    yield from _capped(
        found("stray-record", f"a record of {record.size:,} bytes that torch does not write", where=record.name,
              offset=record.header)
        for record in stray
        if not record.name.endswith("/")
    )  # fmt: skip


def _headers(reader: Reader, directory: Directory, root: str) -> Iterator[Finding]:
    """Local headers that disagree with the directory, and bytes between the records."""
    wrong: list[Finding] = []
    hidden: list[Finding] = []
    unaligned: list[tuple[Record, int]] = []
    end = 0
    for record in sorted(directory.records, key=lambda record: record.header):
        if record.header > end and not end:
            message = f"{record.header:,} other bytes stand before the archive"
            yield found("junk-before", message, offset=0)
        elif record.header > end:
            hidden.append(_gap(end, record.header, f"before {record.name}"))
        start, why = _local(reader, record)
        if why:
            wrong.append(found("bad-local-header", why, where=record.name, offset=record.header))
        if start % ALIGNMENT and record.name.startswith(f"{root}/data/") and record.size and record.method == STORED:
            unaligned.append((record, start))
        end = _behind(reader, record, start + record.stored, directory.offset)
    if directory.offset > end:
        hidden.append(_gap(end, directory.offset, "before the directory"))
    yield from _capped(wrong)
    yield from _capped(hidden)
    if unaligned:
        record, start = unaligned[0]
        message = f"the data of {len(unaligned)} storages begins at no multiple of {ALIGNMENT} bytes"
        yield found("misaligned-storage", message, where=record.name, offset=start)


def _gap(start: int, end: int, place: str) -> Finding:
    return found("hidden-bytes", f"{end - start:,} bytes up to {end:#x} belong to no record", where=place, offset=start)


def _local(reader: Reader, record: Record) -> tuple[int, str]:
    """(where the data of `record` begins, in what its local header disagrees with the directory)."""
    name = record.name.encode("utf-8", "surrogateescape")
    least = record.header + LOCAL.size + len(name)
    length = min(LOCAL.size + len(name), max(reader.size - record.header, 0))
    raw = reader.read(record.header, length) if length else b""
    if len(raw) < LOCAL.size or raw[:4] != b"PK\x03\x04":
        return least, "no local header where the directory points"
    _, _, flags, method, _, _, crc32, stored, size, name_length, extra_length = LOCAL.unpack_from(raw)
    start = record.header + LOCAL.size + name_length + extra_length
    if name_length != len(name) or raw[LOCAL.size :] != name:
        return start, "its local header has another name"
    if method != record.method:
        return start, f"compression method {method} in the local header, {record.method} in the directory"
    if (flags ^ record.flags) & ENCRYPTED:
        return start, "one of its two headers says that it is encrypted"
    if MAX32 in (stored, size):
        extra = dict(extra_fields(reader.read(start - extra_length, min(extra_length, reader.size - start))))
        wide = extra.get(1, b"")
        if len(wide) >= 16:
            size, stored = struct.unpack_from("<2Q", wide)
    if (stored or size or not flags & _CENTRAL_ONLY) and (stored, size) != (record.stored, record.size):
        told = f"{size:,} bytes, {stored:,} stored, in the local header"
        return start, f"{told}; {record.size:,} and {record.stored:,} in the directory"
    if crc32 and crc32 != record.crc32:
        return start, f"CRC-32 {crc32:08x} in the local header, {record.crc32:08x} in the directory"
    return start, ""


def _behind(reader: Reader, record: Record, end: int, directory: int) -> int:
    """Where the next record may begin: behind the data and its descriptor, if it has one (APPNOTE 4.3.9)."""
    if end + 12 > min(directory, reader.size) or not record.flags & _CENTRAL_ONLY:
        return end
    raw = reader.read(end, min(24, reader.size - end))
    if not raw.startswith(b"PK\x07\x08"):
        return end + 12
    wide = len(raw) == 24 and struct.unpack_from("<2Q", raw, 8) == (record.stored, record.size)
    return end + (24 if wide else 16)


def _capped(findings: Iterator[Finding] | Sequence[Finding]) -> Iterator[Finding]:
    """The first findings of a kind, and one that counts the others."""
    left = 0
    last: Finding | None = None
    for index, finding in enumerate(findings):
        last = finding
        if index < LISTED:
            yield finding
        else:
            left += 1
    if left and last is not None:
        yield found(last.id, f"{left:,} more like it", severity=last.severity)
