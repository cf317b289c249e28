"""The rows of a central directory, stored in columns: a `DirectoryRecord` is created from a row only on request.

An archive of 100,000 tensors has as many rows, and most code needs only a number or two of each row. Names that torch
writes come in runs of the same length, so a column of a run is a slice of the directory's bytes with a step.
"""

from __future__ import annotations

import operator
import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

from ckptfix.errors import BadDirectory

CENTRAL = struct.Struct("<4s6H3L5H2L")
MAX32 = 0xFFFFFFFF
STORED = 0
FOLDER = 0x10
"""The bit of the external attributes that marks a folder in MS-DOS."""


class DirectoryRecord(NamedTuple):
    """A row of the central directory.

    Attributes:
        name: decoded as UTF-8, undecodable bytes as surrogates.
        header: offset of the local header in the file.
        stored: bytes that the data takes in the file.
        size: bytes of the data once decompressed.
        crc32: as stated; torch never checks it, and can be set not to compute it (0).
        method, flags: as stated.
        position: offset of this row in the directory.
        attributes: the external attributes; those of MS-DOS are the low byte.
    """

    name: str
    header: int
    stored: int
    size: int
    crc32: int
    method: int
    flags: int
    position: int
    attributes: int = 0

    @property
    def dispute(self) -> str | None:
        """The reason why readers disagree on the record's bytes, whatever its local header states; None if they agree.

        torch reads with miniz, which recognizes a folder by an attribute or by its name. For the bytes of a folder, or
        of a record with a stored size of 0, miniz returns memory that was never written to. It compares the two sizes
        of a stored record only if the row has no time of day.
        """
        if self.size and self.name.endswith("/"):
            return f"its name is a folder's, but it has {self.size:,} bytes: torch would return uninitialized memory"
        if self.size and self.attributes & FOLDER:
            return "its attributes mark it as a folder: torch would return uninitialized memory"
        if self.size and not self.stored:
            return f"its {self.size:,} bytes have a stored size of 0: torch would return uninitialized memory"
        if self.method == STORED and self.stored != self.size:
            return f"it is stored uncompressed in {self.stored} bytes, but its size is stated as {self.size}"
        return None


class RecordRun(NamedTuple):
    """Consecutive rows of equal length: `rows` rows of `length` bytes, from `position` of the directory on."""

    position: int
    length: int
    rows: int

    def slices(self, at: int, width: int) -> Iterator[slice]:
        """Yield one slice for each byte of a field of `width` bytes at `at` of each row."""
        end = self.position + self.length * self.rows
        for first in range(self.position + at, self.position + at + width):
            yield slice(first, end, self.length)


class DirectoryRecords(Sequence[DirectoryRecord]):
    """All rows of the directory `raw`, in its order.

    Attributes:
        headers, stored, sizes, sums, attributes, flags, methods: columns, like the fields of a `DirectoryRecord`.
        positions: the position of each row in the directory.
        runs: runs of consecutive rows of equal length.
    """

    __slots__ = (
        *("_names", "_texts", "attributes", "flags", "headers", "methods", "positions", "raw", "runs", "sizes"),
        *("stored", "sums"),
    )  # fmt: skip

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._texts: list[str] = []
        self.runs: list[RecordRun] = []
        self.positions = array("I")
        self._names = array("H")
        self.flags = array("H")
        self.methods = array("H")
        self.sums = array("I")
        self.attributes = array("I")
        self.stored = array("Q")
        self.sizes = array("Q")
        self.headers = array("Q")

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, index: int) -> DirectoryRecord: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[DirectoryRecord, ...]: ...

    def __getitem__(self, index: int | slice) -> DirectoryRecord | tuple[DirectoryRecord, ...]:
        if isinstance(index, slice):
            return tuple(map(self.__getitem__, range(*index.indices(len(self)))))
        return DirectoryRecord(
            self.name(index),
            self.headers[index],
            self.stored[index],
            self.sizes[index],
            self.sums[index],
            self.methods[index],
            self.flags[index],
            self.positions[index],
            self.attributes[index],
        )

    def __iter__(self) -> Iterator[DirectoryRecord]:
        columns = self.headers, self.stored, self.sizes, self.sums, self.methods, self.flags, self.positions
        return map(DirectoryRecord, self.names(), *columns, self.attributes)

    def name(self, index: int) -> str:
        """Return the name of the record at `index`."""
        return self.raw_name(index).decode("utf-8", "surrogateescape")

    def raw_name(self, index: int) -> bytes:
        """Return the name of the record at `index` as the directory has it, undecoded."""
        first = self.positions[index] + CENTRAL.size
        return self.raw[first : first + self._names[index]]

    def names(self) -> list[str]:
        """Return the names of all records; always the same list."""
        if not self._texts:
            raw, head = self.raw, CENTRAL.size
            self._texts = [
                raw[at + head : at + head + length].decode("utf-8", "surrogateescape")
                for at, length in zip(self.positions, self._names, strict=True)
            ]
        return self._texts

    def with_ending(self, ending: str) -> list[int]:
        """Return the indices of the records whose names end with `ending`."""
        found = []
        wanted = ending.encode("utf-8", "surrogateescape")
        at = self.raw.find(wanted)
        while at >= 0:
            # Each row is examined once, however often the text occurs in its name, its extra field or its comment.
            index = bisect_right(self.positions, at) - 1
            if self.name(index).endswith(ending):
                found.append(index)
            following = index + 1
            at = self.raw.find(wanted, self.positions[following]) if following < len(self) else -1
        return found

    def named(self, name: str) -> DirectoryRecord | None:
        """Return the first record called `name`, or None."""
        return next((self[index] for index in self.with_ending(name) if self.name(index) == name), None)

    def disputed(self) -> Iterator[DirectoryRecord]:
        """Yield the records on whose bytes readers disagree; see `DirectoryRecord.dispute`."""
        if self.stored == self.sizes and not any(self.methods) and not any(self.attributes):
            # Then only its name can make a record a folder.
            raw, last = self.raw, CENTRAL.size - 1
            ends = zip(self.positions, self._names, strict=True)
            indices: Sequence[int] = [n for n, (at, length) in enumerate(ends) if raw[at + last + length] == 0x2F]
        else:
            indices = range(len(self))
        for index in indices:
            record = self[index]
            if record.dispute is not None:
                yield record

    def in_order(self, end: int) -> bool:
        """Return whether each record provably ends before the next one begins, and the last one before `end`."""
        heads = map(operator.add, self.headers, self._names)
        ends = map(operator.add, heads, self.stored)
        starts = [*self.headers[1:], end]
        return all(map(operator.le, ends, (start - LOCAL_SIZE for start in starts)))

    def headers_in(self, raw: bytes) -> array[int]:
        """Return the 32-bit local header offsets in `raw`, a directory with the same rows."""
        found = array("I")
        for run in self.runs:
            found.frombytes(_column(raw, run, _HEADER, 4))
        return _native(found)

    def with_headers(self, raw: bytes | bytearray, headers: array[int]) -> bytearray:
        """Return a copy of `raw`, a directory with the same rows, with `headers` as the 32-bit local header offsets."""
        made = bytearray(raw)
        stated = _native(headers[:]).tobytes()
        first = 0
        for run in self.runs:
            part = stated[first : first + 4 * run.rows]
            for nth, place in enumerate(run.slices(_HEADER, 4)):
                made[place] = part[nth::4]
            first += 4 * run.rows
        return made

    def add(self, record: DirectoryRecord, length: int, name_length: int) -> None:
        """Add a row of `length` bytes that was read alone."""
        self._note(RecordRun(record.position, length, 1))
        self.positions.append(record.position)
        self._names.append(name_length)
        self.flags.append(record.flags)
        self.methods.append(record.method)
        self.sums.append(record.crc32)
        self.attributes.append(record.attributes)
        self.stored.append(record.stored)
        self.sizes.append(record.size)
        self.headers.append(record.header)

    def add_run(self, run: RecordRun) -> bool:
        """Add rows that may be equal in length to the row before them; return False, and add none, if they are not.

        None of them may have a field that needs 64 bits.
        """
        raw = self.raw
        before = run.position - run.length
        for at, width in ((0, 4), (28, 6)):
            for nth, place in enumerate(run.slices(at, width)):
                if raw[place] != raw[before + at + nth : before + at + nth + 1] * run.rows:
                    return False
        # A number that does not fit in four bytes is written as 0xFFFFFFFF, so its last byte is 0xFF.
        if any(b"\xff" in raw[next(run.slices(at + 3, 1))] for at in (20, 24, _HEADER)):
            return False
        self._note(run)
        self.positions.extend(range(run.position, run.position + run.length * run.rows, run.length))
        self._names.extend(self._names[-1:] * run.rows)
        for narrow, at in ((self.flags, 8), (self.methods, 10), (self.sums, 16), (self.attributes, 38)):
            found = array(narrow.typecode)
            found.frombytes(_column(raw, run, at, found.itemsize))
            narrow += _native(found)
        for wide, at in ((self.stored, 20), (self.sizes, 24), (self.headers, _HEADER)):
            found = array("Q")
            found.frombytes(_column(raw, run, at, 4, 8))
            wide += _native(found)
        return True

    def _note(self, run: RecordRun) -> None:
        """Add `run` to the runs, merged with the last one if it continues that."""
        last = self.runs[-1] if self.runs else None
        if last is not None and last.length == run.length and last.position + last.length * last.rows == run.position:
            self.runs[-1] = last._replace(rows=last.rows + run.rows)
        else:
            self.runs.append(run)


_HEADER = 42
"""Offset, within a row, of the local header's offset."""

LOCAL_SIZE = 30
"""Length in bytes of a local header without its name."""

_FEWEST, _MOST = 16, 1 << 14
"""The fewest and the most rows that are tried as a run."""


def _column(raw: bytes, run: RecordRun, at: int, width: int, wide: int = 0) -> bytearray:
    """Return the field of `width` bytes at `at` of all rows, one after the other, each in `wide` bytes."""
    wide = wide or width
    column = bytearray(wide * run.rows)
    for nth, place in enumerate(run.slices(at, width)):
        column[nth::wide] = raw[place]
    return column


def _native(numbers: array[int]) -> array[int]:
    """Convert numbers between the little-endian order of files and the byte order of this machine."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def read_rows(raw: bytes, count: int, path: str, offset: int) -> DirectoryRecords:
    """Read `count` rows of the directory `raw`, which is at `offset` of the file.

    Raises:
        BadDirectory: it does not consist of exactly `count` rows.
    """
    rows = DirectoryRecords(raw)
    position = before = 0
    limit = len(raw)
    unpack = CENTRAL.unpack_from
    likely = _FEWEST
    while len(rows) < count:
        if position + CENTRAL.size > limit:
            message = f"the directory ends after {len(rows)} of {count} records"
            raise BadDirectory(message, path=path, offset=offset + position)
        # fmt: off
        (signature, _, _, flags, method, _, _, crc32, stored, size,
         name_length, extra_length, comment_length, _, _, attributes, header) = unpack(raw, position)
        # fmt: on
        if signature != b"PK\x01\x02":
            raise BadDirectory("there is no directory record here", path=path, offset=offset + position)
        first = position + CENTRAL.size
        length = CENTRAL.size + name_length + extra_length + comment_length
        if stored == MAX32 or size == MAX32 or header == MAX32:
            extra = raw[first + name_length : first + name_length + extra_length]
            try:
                size, stored, header = zip64_fields(extra, size, stored, header)
            except ValueError as error:
                name = raw[first : first + name_length].decode("utf-8", "surrogateescape")
                raise BadDirectory(str(error), path=path, where=name, offset=offset + position) from None
        rows.add(
            DirectoryRecord("", header, stored, size, crc32, method, flags, position, attributes), length, name_length
        )
        position += length
        while length == before:
            run = RecordRun(position, length, min(likely, count - len(rows), (limit - position) // length))
            if run.rows < _FEWEST or not rows.add_run(run):
                if likely == _FEWEST:
                    break
                likely = max(likely // 4, _FEWEST)
                continue
            position += length * run.rows
            likely = min(likely * 4, _MOST)
        before = length
    if position != limit:
        raise BadDirectory(
            f"the directory holds {limit - position} bytes more than its {count} records",
            path=path,
            offset=offset + position,
        )
    return rows


def extra_fields(extra: bytes) -> list[tuple[int, bytes]]:
    """Return the (id, payload) pairs of an extra field; a malformed rest has the id -1."""
    fields = []
    position = 0
    while position < len(extra):
        if position + 4 > len(extra):
            fields.append((-1, extra[position:]))
            break
        kind, length = struct.unpack_from("<2H", extra, position)
        if position + 4 + length > len(extra):
            fields.append((-1, extra[position:]))
            break
        fields.append((kind, extra[position + 4 : position + 4 + length]))
        position += 4 + length
    return fields


def zip64_fields(extra: bytes, size: int, stored: int, header: int) -> tuple[int, int, int]:
    """Return `size`, `stored` and `header`, with each value of 0xFFFFFFFF replaced from the zip64 extra field.

    Raises:
        ValueError: the field is absent, too short or present twice.
    """
    found = [payload for kind, payload in extra_fields(extra) if kind == 1]
    wanted = [value == MAX32 for value in (size, stored, header)]
    if len(found) != 1 or len(found[0]) < 8 * sum(wanted):
        raise ValueError("a zip64 record must have exactly one whole zip64 field")
    values = iter(struct.unpack_from(f"<{sum(wanted)}Q", found[0]))
    size, stored, header = (
        next(values) if large else value for large, value in zip(wanted, (size, stored, header), strict=True)
    )
    return size, stored, header
