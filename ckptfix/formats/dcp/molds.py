"""Patterns of items that differ only in their elements: an item that fits a known pattern needs no parsing.

A model has hundreds of tensors of one shape, and each rank's share of each of them is a separate archive. These
archives differ in the elements, in their checksums, and in the id that torch derives from the checksums. All other
bytes are the same, so their meaning need not be determined again.
"""

from __future__ import annotations

from ckptfix.checkpoint import ByteRange
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError
from ckptfix.formats.dcp.window import SMALL
from ckptfix.formats.torch.zip_layout import ZipCheckpoint
from ckptfix.io.source import Source, open_source
from ckptfix.io.virtual_files import PlannedFile
from ckptfix.zips.local import read_local
from ckptfix.zips.read import DESCRIPTOR_FOLLOWS, DirectoryRecord
from ckptfix.zips.write import CRC_IN_DESCRIPTOR, CRC_IN_ROW

CRC_IN_LOCAL = 14
"""The offset of the four bytes of a checksum in a local header."""

MOST_AROUND = 16 << 10
"""The limit of bytes around the elements that are kept: an archive of one tensor has two or three thousand."""

MOST = 512
"""The number of patterns that are remembered."""


@dataclass(frozen=True, slots=True)
class ItemTemplate:
    """The common bytes of items.

    Attributes:
        data: the offset of the elements in the item; `nbytes` is their size.
        fixed: (offset in the bytes around the elements, these bytes), for all bytes that must be the same.
        crc32: the offset of the elements' checksum in the bytes around the elements.
    """

    data: int
    nbytes: int
    fixed: tuple[tuple[int, bytes], ...]
    crc32: int

    def fits(self, around: bytes) -> bool:
        return all(around.startswith(part, start) for start, part in self.fixed)


class Molds:
    """The known patterns of a folder's items, by item length and by the dtype and shape in the metadata."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, tuple[int, ...]], ItemTemplate] = {}

    def find(self, where: ByteRange, dtype: str, shape: tuple[int, ...]) -> tuple[ByteRange, int | None] | None:
        """Return the range of the elements of the item at `where`, and their checksum; None if no pattern fits.

        The checksum is None if the item states 0: none, or one that is not known yet.
        """
        mold = self._known.get((where.length, dtype, shape))
        if mold is None:
            return None
        around = _around(where, mold.data, mold.nbytes)
        crc32 = int.from_bytes(around[mold.crc32 : mold.crc32 + 4], "little")
        if not mold.fits(around):
            return None
        return ByteRange(where.path, where.offset + mold.data, mold.nbytes), crc32 or None

    def learn(
        self, source: Source, archive: ZipCheckpoint, dtype: str, shape: tuple[int, ...], data: ByteRange
    ) -> None:
        """Remember an item that was parsed; `data` is exactly its elements, in row-major order."""
        key = source.size, dtype, shape
        if key in self._known or len(self._known) >= MOST or source.size - data.length > MOST_AROUND:
            return
        records = archive.directory.records
        own = max((record for record in records if record.header < data.offset), key=lambda record: record.header)
        varying = _checksums(archive, own, data.offset)
        for record in records:
            if record.name == f"{archive.root}/.data/serialization_id":
                try:
                    start = read_local(source, record).data
                except CkptfixError:  # no reader needs this record
                    return
                varying += [(start, record.stored), *_checksums(archive, record, start)]
        crc32 = archive.directory.offset + own.position + CRC_IN_ROW
        around = source.read(0, data.offset) + source.read(data.end, source.size - data.end)
        cuts = sorted((_outside(at, data), length) for at, length in varying)
        fixed: list[tuple[int, bytes]] = []
        start = 0
        for at, length in [*cuts, (len(around), 0)]:
            fixed.append((start, around[start:at]))
            start = at + length
        self._known[key] = ItemTemplate(data.offset, data.length, tuple(fixed), _outside(crc32, data))


def _checksums(archive: ZipCheckpoint, record: DirectoryRecord, data: int) -> list[tuple[int, int]]:
    """Return the locations of a record's checksum: (offset, bytes)."""
    found = [(archive.directory.offset + record.position + CRC_IN_ROW, 4), (record.header + CRC_IN_LOCAL, 4)]
    if record.flags & DESCRIPTOR_FOLLOWS:
        found.append((data + record.stored + CRC_IN_DESCRIPTOR, 4))
    return found


def _outside(offset: int, data: ByteRange) -> int:
    """Convert an offset in the item to an offset in the bytes around the elements."""
    return offset if offset < data.end else offset - data.length


def _around(where: ByteRange, data: int, nbytes: int) -> bytes:
    """Return the bytes around the elements of an item: `nbytes` bytes at its offset `data`."""
    planned = where.path.around(where, data, nbytes) if isinstance(where.path, PlannedFile) else None
    if planned is not None:
        return planned
    behind = data + nbytes
    with open_source(where.path) as file:
        if where.length <= SMALL and not isinstance(where.path, PlannedFile):
            whole = file.read(where.offset, where.length)
            return whole[:data] + whole[behind:]
        return file.read(where.offset, data) + file.read(where.offset + behind, where.length - behind)
