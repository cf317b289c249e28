"""The record of an in-place edit: enough to undo it, byte for byte, from any state that it can leave.

A record is the content of a journal, and one of the records in the undo file::

    line     "ckptfix edit 1\\n"
    8 bytes  length of the JSON that follows, little-endian
    JSON     a description, and for each file: sizes, shift, positions of the bytes below, probes, holes
    bytes    the old and the new bytes, in the order of the JSON
    32 bytes BLAKE2b of everything above
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Any

from ckptfix.dataclass import dataclass
from ckptfix.io import checksums
from ckptfix.numbers import whole_number

MAGIC = b"ckptfix edit 1\n"
_DIGEST = 32

MOST = 256 << 20
"""Bytes that records beside a file have at most. A header of safetensors has 100 MB, and a record holds it twice."""

LONGEST_PROBE = 4096
"""The longest probe, in bytes, unless its block is shorter."""

Bytes = tuple[int, bytes]
"""An offset, and the bytes there."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A sample of the data as it was before the edit, which shows how far the data has moved."""

    offset: int
    length: int
    digest: str

    def fits(self, data: bytes) -> bool:
        return len(data) == self.length and digest(data) == self.digest


@dataclass(frozen=True, slots=True)
class FileChange:
    """The changes that an edit makes to one file.

    Attributes:
        name: in the folder of the record.
        before, after: the old and the new size.
        old: the bytes that the edit replaces, at their old offsets.
        new: the bytes that it writes, at their new offsets.
        shift: bytes that are inserted before the content, a multiple of the block size; then `old` is everything before
            the data.
        probes, holes: of the data, before the edit; only with a shift.
    """

    name: str
    before: int
    after: int
    old: tuple[Bytes, ...] = field(repr=False)
    new: tuple[Bytes, ...] = field(repr=False)
    shift: int = 0
    probes: tuple[Probe, ...] = field(default=(), repr=False)
    holes: tuple[tuple[int, int], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class EditRecord:
    """An in-place edit.

    Attributes:
        id: distinguishes it from other edits.
        what: a description of the edit, in a sentence.
        when: the time, in UTC.
    """

    id: str
    what: str
    when: str
    changes: tuple[FileChange, ...]

    def encoded(self) -> bytes:
        """Encode the record as bytes."""
        files = [
            {
                "name": change.name,
                "before": change.before,
                "after": change.after,
                "shift": change.shift,
                "old": [(offset, len(data)) for offset, data in change.old],
                "new": [(offset, len(data)) for offset, data in change.new],
                "probes": [(probe.offset, probe.length, probe.digest) for probe in change.probes],
                "holes": change.holes,
            }
            for change in self.changes
        ]
        said = json.dumps({"id": self.id, "what": self.what, "when": self.when, "files": files}).encode()
        blobs = [data for change in self.changes for _, data in (*change.old, *change.new)]
        body = b"".join((MAGIC, len(said).to_bytes(8, "little"), said, *blobs))
        return body + checksums.digest((body,), _DIGEST)


def decoded(data: bytes) -> Iterator[EditRecord]:
    """Yield the records that follow each other in `data`, up to the first incomplete one."""
    at = 0
    while at < len(data):
        found = _one(data, at)
        if found is None:
            return
        record, at = found
        yield record


def _one(data: bytes, start: int) -> tuple[EditRecord, int] | None:
    at = start + len(MAGIC)
    if data[start:at] != MAGIC:
        return None
    length = int.from_bytes(data[at : at + 8], "little")
    at += 8
    try:
        said = json.loads(data[at : at + length])
        at += length
        changes = []
        for file in said["files"]:
            old, at = _blobs(data, at, file["old"])
            new, at = _blobs(data, at, file["new"])
            changes.append(_change(file, old, new))
        record = EditRecord(_text(said["id"]), _text(said["what"]), _text(said["when"]), tuple(changes))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if checksums.digest((data[start:at],), _DIGEST) != data[at : at + _DIGEST]:
        return None
    return record, at + _DIGEST


def _change(said: dict[str, Any], old: tuple[Bytes, ...], new: tuple[Bytes, ...]) -> FileChange:
    """Return the change to a file. Raises ValueError if no edit can have made it: the checksum is not a signature."""
    name, before, after, shift = _text(said["name"]), *(_count(said[key]) for key in ("before", "after", "shift"))
    probes = tuple(Probe(_count(offset), _count(length), _text(text)) for offset, length, text in said["probes"])
    holes = tuple((_count(begin), _count(end)) for begin, end in said["holes"])
    inside = (
        all(offset + len(data) <= before for offset, data in old),
        all(offset + len(data) <= after for offset, data in new),
        all(probe.length <= LONGEST_PROBE and probe.offset + probe.length <= before for probe in probes),
        all(begin <= end <= before for begin, end in holes),
        not shift or (after == before + shift and [offset for offset, _ in (*old, *new)] == [0, 0]),
        # An edit keeps the bytes that it cuts off, and writes the bytes that it adds: no other size can result.
        bool(shift) or (_covers(old, after, before) and _covers(new, before, after)),
        # A change that leaves no trace in the file would fit any file.
        any(data for _, data in (*old, *new)) and bool(not shift or probes or len(old[0][1]) == before),
        # No edit begins or ends with an empty file.
        before > 0 < after,
        "\0" not in name and os.fsencode(name) not in (b"", b".", b".."),
    )
    if not all(inside):
        raise ValueError(name)
    return FileChange(name, before, after, old, new, shift, probes, holes)


def _covers(places: Sequence[Bytes], start: int, end: int) -> bool:
    """Return whether `places` contain all bytes from `start` to `end`."""
    for offset, data in sorted(places):
        if offset <= start < offset + len(data):
            start = offset + len(data)
    return start >= end


def _count(value: object) -> int:
    number = whole_number(value) if not isinstance(value, str) else None
    if number is None:
        raise ValueError("not a number of bytes")
    return number


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value


def _blobs(data: bytes, at: int, places: Sequence[Sequence[int]]) -> tuple[tuple[Bytes, ...], int]:
    found = []
    for offset, length in places:
        blob = data[at : at + _count(length)]
        if len(blob) != length:
            raise ValueError(length)
        found.append((_count(offset), blob))
        at += length
    return tuple(found), at


def digest(data: bytes) -> str:
    """Return a short digest, for a probe."""
    return checksums.digest((data,), 8).hex()
