"""The records of a damaged zip archive, each kept only if it is complete and its own size and CRC-32 agree.

Every record is described up to three times: by its local header, by the descriptor behind its data, and by its row of
the directory. One description that agrees with the bytes is enough, so a file may lack its directory, its end, or
single headers. If no description has a CRC-32, the size alone decides, and the record is reported as unverified.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ckptfix.checkpoint import ByteRange, Data
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError
from ckptfix.io.crc import checksum
from ckptfix.io.derived import inflated
from ckptfix.io.read import read_chunks
from ckptfix.io.source import BLOCK, Source
from ckptfix.zips import scan as zip_scan
from ckptfix.zips.local import local_header
from ckptfix.zips.read import DEFLATED, ENCRYPTED, LOCAL, STORED, DirectoryRecord

Expected = Callable[[str], int | None]
"""Function from the name of a record to its required length in bytes; None if that is unknown."""

MOST_DESCRIPTIONS = 16
"""Number of descriptions of one record that are tried.

A file that is full of signatures must not take time that grows with the square of its size.
"""

MOST_SUMMED = 16
"""Bytes that are checksummed at most, as a multiple of the file's size.

Rows that overlap must not take time that grows with the square of their number.
"""

MAX_EXTRA = 0xFFFF

TORCH_NAME = re.compile(
    r"(?:[^/]*/)*(?:data\.pkl|data/[^/]+|byteorder|version|\.format_version|\.storage_alignment|\.data/serialization_id)"
)


class Salvaged(NamedTuple):
    """An intact record: its data, and its extent from `header` to `end`; `verified` by a CRC-32."""

    name: str
    data: Data
    size: int
    crc32: int
    verified: bool
    header: int
    end: int


class Damaged(NamedTuple):
    """A damaged record, and the reason; `kind` is "cut", "checksum", "twice" or "other"."""

    name: str
    header: int
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The records that could be recovered from a zip archive, and the damage.

    Attributes:
        records: the intact records, in the order of the file, each name once.
        damaged: the other records that had a header or a row.
        directory: whether rows of a directory were found.
        misread: names of intact records for which the directory leads to other bytes; torch loads those unchecked.
        first, last: where the first intact record begins and the last one ends.
        unread: (offset, length) of each range that the disk could not read.
    """

    records: tuple[Salvaged, ...]
    damaged: tuple[Damaged, ...]
    directory: bool
    misread: tuple[str, ...] = ()
    first: int = 0
    last: int = 0
    unread: tuple[tuple[int, int], ...] = ()


class _Fault(NamedTuple):
    """The reason why a record is not intact, and where the next one can begin."""

    kind: str
    reason: str
    follows: int


class _Way(NamedTuple):
    """One description of a record's data."""

    data: int
    stored: int
    size: int
    crc32: int
    method: int
    end: int


class RebuiltArchive:
    """A file read once for its signatures, so that `rebuild` can be called more than once."""

    def __init__(self, reader: Source) -> None:
        self.reader = reader
        found = zip_scan.signatures(reader)
        self.unread = tuple(found.unread)
        self.descriptors = zip_scan.descriptors(reader, found.descriptors)
        self._starts = sorted(self.descriptors)
        self.locals = zip_scan.locals_at(reader, found.locals)
        directory = zip_scan.rows(reader, found.rows)
        self.shift = zip_scan.shift(directory, self.locals)
        self.listed = directory
        self.rows = {record.header + self.shift: record for record in directory}
        other = sum(self.locals[place].name != row.name for place, row in self.rows.items() if place in self.locals)
        if 2 * other > len(self.rows):
            # The rows belong to a different archive, such as one in a tensor's bytes.
            self.rows = {}
        self._sums: dict[tuple[int, int, int, int], int | None] = {}
        self._left = MOST_SUMMED * reader.size + (1 << 20)
        self._rows_at = sorted(self.rows)
        self._intact: dict[int, Salvaged] = {}
        self._before: tuple[list[Salvaged], list[Damaged], Rebuilt] | None = None
        self.checksums = any(self._stated())

    def _stated(self) -> Iterator[int]:
        """Yield the checksums of the directory if there is one, else those of the headers, which data can imitate."""
        if self.rows:
            yield from (record.crc32 for record in self.rows.values())
            return
        for local in self.locals.values():
            yield from (one.crc32 for one in self.descriptors.get(local.data, ()))
            if local.stored and local.data + local.stored <= self.reader.size:
                yield local.crc32 or 0

    def rebuild(self, expected: Expected = lambda name: None) -> Rebuilt:
        """Return every intact record. Bytes inside a record are that record's data, whatever they look like."""
        whole: list[Salvaged] = []
        damaged: list[Damaged] = []
        position = 0
        for header in sorted({*self.locals, *self.rows}):
            if header < position or header >= self.reader.size:
                if header >= self.reader.size and header in self.rows:
                    damaged.append(Damaged(self.rows[header].name, header, "cut", "the file ends before it"))
                continue
            known = self._intact.get(header)
            if known is not None and known.name and expected(known.name) in (None, known.size):
                # The first description that agrees with the bytes has this size: it is the first of this size, too.
                whole.append(known)
                position = known.end
                continue
            name, sure = self._name(header)
            found = self._whole(header, name, expected(name))
            if isinstance(found, Salvaged):
                found = self._intact[header] = found if sure else found._replace(name="")
                whole.append(found)
                position = found.end
            else:
                damaged.append(Damaged(name, header, found.kind, found.reason))
                position = found.follows
        before = self._before
        if before is not None and before[:2] == (whole, damaged) and all(record.name for record in whole):
            return before[2]
        faults = list(damaged)
        records, twice = _each_once(list(self._settled(whole, damaged, expected)), self.rows)
        rebuilt = Rebuilt(
            records,
            (*damaged, *twice),
            bool(self.rows),
            tuple(self._misread(records)),
            min((record.header for record in whole), default=0),
            max((record.end for record in whole), default=0),
            self.unread,
        )
        self._before = whole, faults, rebuilt
        return rebuilt

    def _misread(self, records: Iterable[Salvaged]) -> Iterator[str]:
        """Yield the names for which the directory, followed literally as torch does, leads to other bytes."""
        sums = {record.name: record.crc32 for record in records}
        for row in self.listed:
            local = self.locals.get(row.header) or local_header(self.reader, row.header)
            if local is None or row.name not in sums:
                # torch refuses a record without a local header, and one whose bytes cannot be read or inflated.
                continue
            way = _Way(local.data, row.stored, row.size, row.crc32, row.method, local.data + row.stored)
            found = self._crc32(way) if way.end <= self.reader.size else None
            if found != sums[row.name] and (found is not None or self._left < 0):
                yield row.name

    def _name(self, header: int) -> tuple[str, bool]:
        """Return the name of the record, and whether its header and its row leave no doubt about it."""
        local, row = self.locals.get(header), self.rows.get(header)
        if local is None or row is None or local.name == row.name:
            one = row or local
            assert one is not None
            return one.name, True
        sound = [name for name in (local.name, row.name) if TORCH_NAME.fullmatch(name)]
        return (sound[0], True) if len(sound) == 1 else (row.name, False)

    def _settled(self, whole: list[Salvaged], damaged: list[Damaged], expected: Expected) -> Iterator[Salvaged]:
        """Yield the records, each with one name; a record that keeps two names becomes a damaged one.

        Of two names, the one that no other record has is used, preferably under the root of the other records.
        """
        taken = {record.name for record in whole if record.name}
        roots = Counter(name.partition("/")[0] for name in taken).most_common(1)
        for record in whole:
            if not record.name:
                names = sorted({self.locals[record.header].name, self.rows[record.header].name})
                left = [name for name in names if name not in taken]
                left = [name for name in left if roots and name.partition("/")[0] == roots[0][0]] or left
                left = [name for name in left if expected(name) is not None] or left
                if len(left) != 1:
                    reason = f"it has two names: {' and '.join(names)}"
                    damaged.append(Damaged(names[0], record.header, "other", reason))
                    continue
                record = record._replace(name=left[0])
            yield record

    def _whole(self, header: int, name: str, expected: int | None) -> Salvaged | _Fault:
        """Return the record at `header`, or the reason why it is not intact and where to continue."""
        local, row = self.locals.get(header), self.rows.get(header)
        if all(one.flags & ENCRYPTED for one in (local, row) if one is not None):
            return _Fault("other", "it is encrypted", header + 1)
        begins = local.data if local else header + LOCAL.size
        fault = _Fault("cut", "the file ends before the record's size and CRC-32", header + LOCAL.size)
        tried = False
        intact = 0
        for way in self._ways(header, expected):
            if expected is not None and way.size != expected:
                fits = way.data + way.stored <= self.reader.size
                if not intact and way.crc32 and fits and self._crc32(way) == way.crc32:
                    intact = way.end
                wrong = _Fault("other", f"it has {way.size} bytes instead of {expected}", fault.follows)
                fault, tried = (fault, tried) if tried else (wrong, True)
                continue
            if way.data + way.stored > self.reader.size:
                cut = _Fault("cut", self._short(way.data, way.stored), fault.follows)
                fault, tried = (fault, tried) if tried and fault.kind == "checksum" else (cut, True)
                continue
            crc32 = self._crc32(way)
            if crc32 is not None and (crc32 == way.crc32 or not (self.checksums or way.crc32)):
                where = ByteRange(self.reader.name, way.data, way.stored)
                data: Data = where if way.method == STORED else inflated(where, way.size)
                return Salvaged(name, data, way.size, crc32, crc32 == way.crc32, header, way.end)
            reason = "its bytes cannot be read or inflated" if crc32 is None else "its bytes do not match their CRC-32"
            if self._left < 0:
                reason = "its bytes were not examined: too many of the records before it overlap"
            ends = way.end if expected is not None else min(way.end, self._next_after(way.data))
            fault, tried = _Fault("checksum", reason, max(fault.follows, ends)), True
        if intact:
            # The record is as it was written, with a different size: the bytes after it are not part of it.
            return fault._replace(follows=intact)
        if expected is not None:
            if begins + expected > self.reader.size and fault.kind != "checksum":
                return _Fault("cut", self._short(begins, expected), self.reader.size)
            return fault._replace(follows=max(fault.follows, begins + expected))
        if begins in self.locals and not tried:
            # An archive that begins at the data of an unfinished record is that record's data.
            return fault._replace(follows=self.reader.size)
        return fault

    def _short(self, data: int, length: int) -> str:
        return f"{length} bytes are expected, but only {max(self.reader.size - data, 0)} are left"

    def _next_after(self, data: int) -> int:
        """Return the offset of the first record after `data` by the directory rows."""
        index = bisect_left(self._rows_at, data + 1)
        return self._rows_at[index] if index < len(self._rows_at) else self.reader.size

    def _ways(self, header: int, expected: int | None) -> Iterator[_Way]:
        """Yield the descriptions of the record at `header`, the most trustworthy first, each once."""
        seen: set[_Way] = set()
        for way in self._all_ways(header, expected):
            if way not in seen and way.data > header and len(seen) < MOST_DESCRIPTIONS:
                seen.add(way)
                yield way

    def _all_ways(self, header: int, expected: int | None) -> Iterator[_Way]:
        local, row = self.locals.get(header), self.rows.get(header)
        starts = [local.data] if local else []
        if row is not None:
            # The header is damaged: torch pads it so that the data begins at a multiple of 64.
            least = header + LOCAL.size + len(row.name.encode("utf-8", "surrogateescape"))
            starts += [-(-(least + 4 - self.shift) // 64) * 64 + self.shift, least]
        low = bisect_left(self._starts, header + LOCAL.size)
        reach = header + LOCAL.size + zip_scan.MAX_NAME + MAX_EXTRA
        near = [start for start in self._starts[low : low + MOST_DESCRIPTIONS] if start <= reach]
        for start in [*starts[:1], *near]:
            for one in self.descriptors.get(start, ()):
                agrees = row is not None and (one.size, one.crc32) == (row.size, row.crc32)
                if agrees or (local is not None and start == local.data):
                    for method in self._methods(header, one.stored == one.size):
                        yield _Way(start, one.stored, one.size, one.crc32, method, one.end)
        for start in starts:
            if row is not None:
                for method in self._methods(header, row.stored == row.size):
                    yield _Way(start, row.stored, row.size, row.crc32, method, start + row.stored)
        if local is not None and local.stored is not None and local.size is not None and local.crc32 is not None:
            end = local.data + local.stored
            # An empty record matches a header of zeros anywhere: it counts only if a header follows, or the file ends.
            if local.size or end == self.reader.size or self.reader.read(end, min(2, self.reader.size - end)) == b"PK":
                for method in self._methods(header, local.stored == local.size):
                    yield _Way(local.data, local.stored, local.size, local.crc32, method, end)
        if local is not None and expected == 0:
            yield _Way(local.data, 0, 0, 0, STORED, local.data)

    def _methods(self, header: int, even: bool) -> Iterator[int]:
        """Yield the likely compression methods of the record; `even` if its stored size equals its size."""
        row, local = self.rows.get(header), self.locals.get(header)
        stated = [one.method for one in (row, local) if one is not None]
        likely = [method for method in stated if method in (STORED, DEFLATED)]
        yield from dict.fromkeys(
            method for method in (*likely, STORED if even else DEFLATED) if even or method != STORED
        )

    def _crc32(self, way: _Way) -> int | None:
        """Return the CRC-32 of the data; None if it cannot be read, or does not inflate to its size."""
        place = (way.data, way.stored, way.size, way.method)
        if place not in self._sums:
            self._sums[place] = self._sum(way)
        return self._sums[place]

    def _sum(self, way: _Way) -> int | None:
        if way.method not in (STORED, DEFLATED) or (way.method == STORED and way.stored != way.size):
            return None
        self._left -= way.stored
        if self._left < 0:
            return None
        crc32 = 0
        try:
            if way.method == STORED:
                for chunk in self.reader.chunks(way.data, way.stored, BLOCK):
                    crc32 = checksum(chunk, crc32)
            else:
                for chunk in read_chunks(inflated(ByteRange(self.reader.name, way.data, way.stored), way.size)):
                    crc32 = checksum(chunk, crc32)
        except CkptfixError:
            return None
        return crc32


def _each_once(records: list[Salvaged], rows: dict[int, DirectoryRecord]) -> tuple[tuple[Salvaged, ...], list[Damaged]]:
    """Return the records with a unique name, and the damaged ones whose name belongs to several different records.

    Of several equal records the first is kept; of different ones the one that the directory lists.
    """
    by_name: dict[str, list[Salvaged]] = {}
    for record in records:
        by_name.setdefault(record.name, []).append(record)
    kept: list[Salvaged] = []
    twice: list[Damaged] = []
    for name, several in by_name.items():
        listed = [record for record in several if record.header in rows] or several
        if len({(record.size, record.crc32, record.verified) for record in listed}) == 1:
            kept.append(listed[0])
        else:
            places = ", ".join(f"{record.header:#x}" for record in listed[:4])
            reason = f"{len(listed)} different records have this name, at {places}"
            twice.append(Damaged(name, listed[0].header, "twice", reason))
    return tuple(sorted(kept, key=lambda record: record.header)), twice
