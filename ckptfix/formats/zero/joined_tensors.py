"""Tensors in pieces in the files of the ranks; their bytes are located only when they are needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from ckptfix.checkpoint import ByteRange, RangeCheck, Segment, TensorEntry, dtypes
from ckptfix.dataclass import dataclass
from ckptfix.errors import DamagedFile
from ckptfix.formats.zero.partitions import Cut, Shape, rows_of
from ckptfix.formats.zero.states import Lost
from ckptfix.io.virtual_files import SplicedFile, SplicedPiece

LOST = "copy it from where it was saved, or use an older step; or run `ckptfix repair FOLDER OUT` to keep the rest"

Table = Sequence[Sequence[TensorEntry] | Lost]
"""For each rank, its flat tensors, one for each group."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A tensor to join.

    Attributes:
        claims: the flat tensors whose checksums are verified when this tensor is read. Each flat tensor is verified
            once, together with the first tensor in it.
    """

    name: str
    shape: Shape
    itemsize: int
    cut: Cut
    table: Table
    claims: tuple[tuple[int, int], ...]


class Joiner:
    """The tensors of one folder, in the order in which they are added."""

    def __init__(self, path: str, verify: Callable[[], None]) -> None:
        """Create a joiner that calls `verify` before the first read; `verify` raises if files do not fit together."""
        self._path = path
        self._verify = verify
        self._verified = False
        self._rows: list[_Row | Callable[[], SplicedPiece]] = []
        self._lengths: list[int] = []
        self._claimed: dict[int, set[tuple[int, int]]] = {}
        self._file: SplicedFile | None = None

    def add(self, name: str, dtype: str, shape: Shape, cut: Cut, table: Table) -> int:
        """Add a tensor whose elements are at `cut` in the flat tensors of `table`, and return its number."""
        claimed = self._claimed.setdefault(id(table), set())
        claims = tuple(place for place in cut.touched() if place not in claimed)
        claimed.update(claims)
        row = dtypes.by_name(dtype)
        self._rows.append(_Row(name, shape, row.itemsize, cut, table, claims))
        self._lengths.append(row.nbytes(math.prod(shape)))
        return len(self._rows) - 1

    def add_later(self, nbytes: int, make: Callable[[], SplicedPiece]) -> int:
        """Add a tensor of `nbytes` bytes that `make` locates, and return its number."""
        self._rows.append(make)
        self._lengths.append(nbytes)
        return len(self._rows) - 1

    def place(self, number: int) -> ByteRange:
        """Return the position of a tensor's bytes; no tensor can be added after the first call."""
        if self._file is None:
            self._file = SplicedFile(self._path, self._lengths, self._make)
        return self._file.place(number)

    def _make(self, number: int) -> SplicedPiece:
        if not self._verified:
            self._verify()
            self._verified = True
        row = self._rows[number]
        if not isinstance(row, _Row):
            return row()
        return SplicedPiece(tuple(_segments(row)), tuple(_checks(row)))


def _segments(row: _Row) -> Iterator[Segment]:
    for run in row.cut.runs():
        own = row.table[run.rank]
        if isinstance(own, Lost):
            rows = rows_of(row.shape, row.cut.runs(), run.rank)
            message = f"it {own.why}; it holds {rows} of {row.name}"
            raise DamagedFile(message, path=own.path, hint=LOST)
        yield own[run.group].data.sub(run.first * row.itemsize, run.count * row.itemsize)


def _checks(row: _Row) -> Iterator[RangeCheck]:
    for rank, group in row.claims:
        own = row.table[rank]
        storage = None if isinstance(own, Lost) else own[group].storage
        if storage is not None and storage.data is not None and storage.crc32 is not None:
            yield RangeCheck(storage.key, storage.data, storage.crc32)
