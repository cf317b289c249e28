"""Search for every place in a file that could be a zip header, by its signature; the signature alone proves nothing.

::

    PK 03 04  local header    30 bytes, name, extra; torch writes flags 0x808, zero sizes, and pads the extra field
    PK 07 08  descriptor      CRC-32, stored size, size (4 bytes each, 8 in zip64), right after the data
    PK 01 02  directory row   46 bytes, name, extra, comment

(APPNOTE.TXT of the zip format, 4.3.7, 4.3.9 and 4.3.12.) A descriptor shows where its data begins: at its own offset
minus the stored size. Tensor bytes can contain any of these, so `rebuild` trusts them only with a matching CRC-32.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import field
from typing import NamedTuple

from ckptfix.dataclass import dataclass
from ckptfix.errors import Unsupported, WriteFailed
from ckptfix.io.blocks import PAGE
from ckptfix.io.source import Source
from ckptfix.zips.local import local_header, local_sizes
from ckptfix.zips.read import CENTRAL, LOCAL, MAX32, DirectoryRecord, zip64_fields

WINDOW = 4 << 20
MAX_SIGNATURES = 4_000_000
FEW = 16
"""Signatures allowed beyond one for each record of the smallest size that fits in the file: tensor bytes can imitate
some.
"""
OVERLAP = 2
"""Bytes that local headers can cover in total, as a multiple of the file's size: those of an archive do not overlap."""
MAX_NAME = 4096
MOST_PLACES = 16
"""Headers with the same name that are compared with a row."""

_SIGNATURE = re.compile(rb"PK(?:\x03\x04|\x07\x08|\x01\x02)")
"""One pass of this is faster than three of ``bytes.find``: 2.0 GB/s on one core against 0.6."""
_SHORT = struct.Struct("<3L")
_LONG = struct.Struct("<L2Q")


class ScannedHeader(NamedTuple):
    """A local header at `header`, with its fields; None for a size or CRC-32 that it leaves to the descriptor."""

    name: str
    header: int
    data: int
    method: int
    flags: int
    stored: int | None
    size: int | None
    crc32: int | None


class DataDescriptor(NamedTuple):
    """A data descriptor: its data is `stored` bytes from `data` on; `end` is the byte after the descriptor."""

    data: int
    stored: int
    size: int
    crc32: int
    end: int


@dataclass(slots=True)
class Signatures:
    """Offsets of each signature, ascending; `unread` has the (offset, length) of each unreadable range."""

    locals: array[int] = field(default_factory=lambda: array("Q"))
    descriptors: array[int] = field(default_factory=lambda: array("Q"))
    rows: array[int] = field(default_factory=lambda: array("Q"))
    unread: list[tuple[int, int]] = field(default_factory=list)


def signatures(reader: Source) -> Signatures:
    """Read the file once, in windows, and collect the offset of every signature.

    Raises:
        Unsupported: there are more signatures than an archive of this size can have records.
    """
    found = Signatures()
    places = {b"PK\x03\x04": found.locals, b"PK\x07\x08": found.descriptors, b"PK\x01\x02": found.rows}
    most = min(MAX_SIGNATURES, reader.size // (LOCAL.size + 1) + FEW)
    tail = b""
    for offset, piece in pieces(reader):
        if piece is None:
            first, length = found.unread[-1] if found.unread else (0, -1)
            if first + length == offset:
                found.unread.pop()
            else:
                first = offset
            found.unread.append((first, min(offset + PAGE, reader.size) - first))
            tail = b""
            continue
        window = tail + piece
        base = offset - len(tail)
        for match in _SIGNATURE.finditer(window):
            places[match.group()].append(base + match.start())
        if max(map(len, places.values())) > most:
            message = f"more than {most:,} zip signatures of one kind: too many for a file of {reader.size:,} bytes"
            raise Unsupported(message, path=reader.name)
        tail = window[-3:]
    return found


def pieces(reader: Source) -> Iterator[tuple[int, bytes | None]]:
    """Yield the file in windows, as (offset, bytes); where the disk fails, yield pages, with None for unreadable ones.

    A sector that cannot be read costs the records in it, and no others.
    """
    for offset in range(0, reader.size, WINDOW):
        length = min(WINDOW, reader.size - offset)
        try:
            yield offset, reader.read(offset, length)
        except WriteFailed:
            for place in range(offset, offset + length, PAGE):
                try:
                    page = reader.read(place, min(PAGE, offset + length - place))
                except WriteFailed:
                    yield place, None
                else:
                    yield place, page


def locals_at(reader: Source, places: Iterable[int]) -> dict[int, ScannedHeader]:
    """Read the local headers at `places`.

    Raises:
        Unsupported: they overlap far more than in any archive.
    """
    found: dict[int, ScannedHeader] = {}
    left = OVERLAP * reader.size + (1 << 20)
    for place in places:
        local = local_at(reader, place)
        if local is None:
            continue
        left -= local.data - place
        if left < 0:
            raise Unsupported("too many local headers overlap for a zip archive", path=reader.name)
        found[place] = local
    return found


def local_at(reader: Source, header: int) -> ScannedHeader | None:
    """Read the local header at `header`; return None if the bytes there cannot be one."""
    found = local_header(reader, header)
    if found is None or not 0 < len(found.name) <= MAX_NAME or found.data > reader.size:
        return None
    name = found.name.decode("utf-8", "surrogateescape")
    if found.flags & 8 and not (found.stored or found.size or found.crc32):
        return ScannedHeader(name, header, found.data, found.method, found.flags, None, None, None)
    stored, size = local_sizes(reader, found)
    return ScannedHeader(name, header, found.data, found.method, found.flags, stored, size, found.crc32)


def descriptors(reader: Source, places: array[int]) -> dict[int, list[DataDescriptor]]:
    """Return the descriptors by the offset at which their data would begin, read with 4-byte and with 8-byte sizes."""
    found: dict[int, list[DataDescriptor]] = {}
    for place in places:
        for form in (_SHORT, _LONG):
            end = place + 4 + form.size
            if end > reader.size:
                continue
            crc32, stored, size = form.unpack(reader.read(place + 4, form.size))
            data = place - stored
            if data > 0:
                found.setdefault(data, []).append(DataDescriptor(data, stored, size, crc32, end))
    return found


def rows(reader: Source, places: array[int]) -> list[DirectoryRecord]:
    """Return the rows of the last directory in the file, whole or partial; each begins where the previous one ended."""
    chains: list[list[DirectoryRecord]] = []
    following = -1
    for place in places:
        if chains and place < following:
            continue
        row = _row(reader, place)
        if row is None:
            continue
        record, end = row
        if place != following:
            chains.append([])
        chains[-1].append(record)
        following = end
    return chains[-1] if chains else []


def _row(reader: Source, place: int) -> tuple[DirectoryRecord, int] | None:
    """Read the directory row at `place`; return it and the byte after it, or None if the bytes cannot be a row."""
    if place + CENTRAL.size > reader.size:
        return None
    row = reader.read(place, CENTRAL.size)
    # fmt: off
    (_, _, _, flags, method, _, _, crc32, stored, size,
     name_length, extra_length, comment_length, _, _, attributes, header) = CENTRAL.unpack(row)
    # fmt: on
    end = place + CENTRAL.size + name_length + extra_length + comment_length
    if not 0 < name_length <= MAX_NAME or end > reader.size:
        return None
    rest = reader.read(place + CENTRAL.size, name_length + extra_length)
    name = rest[:name_length].decode("utf-8", "surrogateescape")
    if MAX32 in (stored, size, header):
        with suppress(ValueError):
            size, stored, header = zip64_fields(rest[name_length:], size, stored, header)
    return DirectoryRecord(name, header, stored, size, crc32, method, flags, place, attributes), end


def shift(found: list[DirectoryRecord], locals_: Mapping[int, ScannedHeader]) -> int:
    """Return by how many bytes the headers are off the directory's offsets: not 0 if bytes were put before the archive.

    It is the distance at which most rows find a header with their name, so that a directory inside a tensor's bytes is
    matched with the records next to it, and with no others.
    """
    places: dict[str, list[int]] = {}
    for local in locals_.values():
        places.setdefault(local.name, []).append(local.header)
    votes: Counter[int] = Counter()
    for record in found:
        votes.update(place - record.header for place in places.get(record.name, ())[:MOST_PLACES])
    return max(votes, key=lambda distance: (votes[distance], distance == 0), default=0)
