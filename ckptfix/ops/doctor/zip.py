"""Faults of a zip container: everything that two readers could read differently, or that is unaccounted for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ckptfix.findings.row import Finding, Severity
from ckptfix.findings.table import found
from ckptfix.io.source import Source
from ckptfix.zips.check import examine
from ckptfix.zips.names import leads_out
from ckptfix.zips.read import DEFLATED, ENCRYPTED, STORED, Directory, DirectoryRecord

ALIGNMENT = 64
"""Bytes that torch aligns storages to (caffe2/serialize/inline_container.h, ``kFieldAlignment``)."""

_TORCH_RECORDS = ("data.pkl", "version", "byteorder", ".format_version", ".storage_alignment", ".data/serialization_id")

LISTED = 20
"""Findings of one kind before the rest are counted."""


def scan(reader: Source, directory: Directory, root: str, *, local_headers: bool = True) -> Iterator[Finding]:
    """Yield findings about the records of `directory`; of the data, only the bytes between records are read.

    Args:
        root: the folder that data.pkl is in.
        local_headers: False examines only the directory.
    """
    records = directory.records
    yield from _names(records)
    yield from _fields(records, root)
    yield from _layout(reader, directory, root, local_headers)
    if not any(record.name == f"{root}/version" for record in records):
        yield found("no-version", where=f"{root}/version")
    if records and not any(record.crc32 for record in records if record.size):
        yield found("no-checksums")


def _names(records: Sequence[DirectoryRecord]) -> Iterator[Finding]:
    groups: dict[str, list[DirectoryRecord]] = defaultdict(list)
    for record in records:
        groups[record.name.lower()].append(record)
        name = record.name
        if leads_out(name):
            yield found("odd-name", where=name, offset=record.header)
    for group in groups.values():
        if len(group) < 2:
            continue
        places = ", ".join(hex(record.header) for record in group[:5])
        names = {record.name for record in group}
        id = "duplicate-record" if len(names) < len(group) else "case-variant"
        message = f"{len(group)} records are called {' and '.join(sorted(names)[:3])}, at {places}"
        yield found(id, message, where=group[0].name, offset=group[0].header)


def _fields(records: Sequence[DirectoryRecord], root: str) -> Iterator[Finding]:
    deflated = [record for record in records if record.method == DEFLATED]
    for record in records:
        if record.flags & ENCRYPTED:
            yield found("encrypted-record", where=record.name, offset=record.header)
        if record.method not in (STORED, DEFLATED):
            message = f"compressed by method {record.method}, which torch does not read"
            yield found("unknown-compression", message, where=record.name, offset=record.header)
    if deflated:
        saved = sum(record.size - record.stored for record in deflated)
        message = f"{len(deflated)} records are compressed, by {max(saved, 0):,} bytes: torch cannot map them"
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


def _layout(reader: Source, directory: Directory, root: str, local_headers: bool) -> Iterator[Finding]:
    """Yield findings about contradicting headers, bytes between the records, and misaligned storages."""
    spans, disputes = examine(reader, directory, local_headers=local_headers)
    kinds: dict[tuple[str, bool], list[Finding]] = defaultdict(list)
    for id, where, offset, message, serious in disputes:
        severity: Severity = "error" if serious else "warning"
        kinds[id, serious].append(found(id, message, where=where, offset=offset, severity=severity))
    for findings in kinds.values():
        yield from _capped(findings)
    unaligned = [
        span
        for span in spans
        if span.data % ALIGNMENT
        and span.record.name.startswith(f"{root}/data/")
        and span.record.size
        and span.record.method == STORED
    ]
    if unaligned:
        message = f"the data of {len(unaligned)} storages is not aligned to {ALIGNMENT} bytes"
        yield found("misaligned-storage", message, where=unaligned[0].record.name, offset=unaligned[0].data)


def _capped(findings: Iterator[Finding] | Sequence[Finding]) -> Iterator[Finding]:
    """Yield the first findings of a kind, and one that counts the others."""
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
