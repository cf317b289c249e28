"""The numbers of a tensor as rows and columns; only the visible ones are read.

The last dimension goes across, all others go down. A one-dimensional tensor has ten elements per row.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ckptfix.browse.model.contents import Contents
from ckptfix.checkpoint import ByteRange, Storage, TensorEntry, dtypes
from ckptfix.checkpoint.dtypes import Dtype
from ckptfix.checkpoint.tensors import end_of, reach
from ckptfix.dataclass import dataclass
from ckptfix.elements.arrays import Encoding
from ckptfix.elements.reader import content, source
from ckptfix.errors import DamagedFile, Unsupported
from ckptfix.io.elements import resolve
from ckptfix.io.source import Readers, shares_open_files
from ckptfix.words import shape

ACROSS = 10
"""Elements per row of a one-dimensional tensor."""

WHOLE_ROWS = 1 << 18
"""Maximum bytes of rows to read at once, including the bytes between the visible columns."""

Number = float | int | complex | bool


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The layout of a tensor.

    Attributes:
        rows, columns: their numbers.
        flat: the tensor has one dimension, so a row ends after `ACROSS` elements.
    """

    shape: tuple[int, ...]
    rows: int
    columns: int
    flat: bool

    def index(self, row: int) -> str:
        """Return the label of a row: the indices of its first element, without the last index unless flat."""
        if self.flat:
            return str(row * ACROSS)
        left = []
        for size in reversed(self.shape[:-1]):
            row, at = divmod(row, size)
            left.append(str(at))
        return ",".join(reversed(left)) or "0"

    def width(self, row: int) -> int:
        """Return the number of elements in a row."""
        return min(ACROSS, self.shape[0] - row * ACROSS) if self.flat else self.columns

    def row_of(self, index: tuple[int, ...]) -> tuple[int, int]:
        """Return the row and column of an element.

        Raises:
            IndexError: the tensor has no such element.
        """
        if len(index) > len(self.shape) or any(
            not 0 <= at < size for at, size in zip(index, self.shape, strict=False)
        ):
            raise IndexError(f"the shape is {shape(self.shape)}")
        whole = (*index, *[0] * (len(self.shape) - len(index)))
        if self.flat:
            return divmod(whole[0], ACROSS)
        row = 0
        for at, size in zip(whole[:-1], self.shape[:-1], strict=True):
            row = row * size + at
        return row, whole[-1] if whole else 0


def grid_of(entry: TensorEntry) -> TensorLayout:
    """Return the layout of a tensor.

    Raises:
        Unsupported: it has no numbers to show; the message gives the reason.
    """
    if entry.storage is None:
        raise Unsupported(f"a {entry.kind} tensor has no numbers of its own")
    if entry.storage.data is None:
        raise Unsupported("the file does not hold its data")
    if _decodable(entry.dtype) is None:
        raise Unsupported(f"elements of {entry.dtype} cannot be shown as numbers")
    if not entry.numel:
        raise Unsupported("it has no elements")
    if len(entry.shape) == 1:
        return TensorLayout(entry.shape, -(-entry.shape[0] // ACROSS), min(ACROSS, entry.shape[0]), True)
    columns = entry.shape[-1] if entry.shape else 1
    return TensorLayout(entry.shape, math.prod(entry.shape[:-1]), columns, False)


def _decodable(name: str) -> Dtype | None:
    row = dtypes.find(name)
    return row if row is not None and row.numpy is not None and row.per_item == 1 else None


@shares_open_files()
def window(
    contents: Contents, entry: TensorEntry, rows: range, columns: range
) -> dict[int, list[Number]]:
    """Return row -> its elements in `columns`, for the existing `rows`.

    Raises:
        DamagedFile: the file changed since it was opened, or lacks bytes that its headers promise.
        Unsupported: the elements cannot be read one by one.
    """
    grid = grid_of(entry)
    contents.refuse_changed()
    encoding = Encoding.of(entry.dtype, contents.checkpoint.byteorder)
    made: dict[int, list[Number]] = {}
    with Readers() as readers:
        reading = _Reading(entry, encoding, readers)
        kept = [row for row in rows if 0 <= row < grid.rows]
        if kept and reading.rows_together(grid, len(kept)):
            first, last = kept[0], kept[-1]
            width = grid.columns
            count = (last - first) * width + grid.width(last)
            numbers = _numbers(reading.elements(first * width, count), encoding)
            for row in kept:
                start = (row - first) * width
                made[row] = numbers[start + columns.start : start + min(columns.stop, grid.width(row))]
        else:
            for row in kept:
                stop = min(columns.stop, grid.width(row))
                start = row * grid.columns + columns.start
                raw = reading.elements(start, max(stop - columns.start, 0))
                made[row] = _numbers(raw, encoding)
    contents.refuse_changed(again=True)
    return made


class _Reading:
    """Access to the elements of a tensor by their position in row-major order."""

    def __init__(self, entry: TensorEntry, encoding: Encoding, readers: Readers) -> None:
        self._values = resolve(entry, encoding.byteorder)
        self._entry = entry = entry if self._values is None else replace(entry, detail="")
        self._size = encoding.itemsize
        self._readers = readers
        storage = entry.storage
        assert storage is not None
        self._storage: Storage = storage
        if entry.is_contiguous or not isinstance(storage.data, ByteRange):
            self._source = source(content(entry, encoding.byteorder), readers)
        elif min(entry.offset, *entry.stride) < 0 or end_of(entry) > storage.data.length:
            raise DamagedFile("it reaches outside its storage", where=entry.name)

    def rows_together(self, grid: TensorLayout, count: int) -> bool:
        return self._entry.is_contiguous and grid.columns * count * self._size <= WHOLE_ROWS

    def elements(self, start: int, count: int) -> bytes:
        if count <= 0:
            return b""
        stored = self._stored(start, count)
        return stored if self._values is None else self._values(stored)

    def _stored(self, start: int, count: int) -> bytes:
        if self._entry.is_contiguous:
            return self._source.read(start * self._size, count * self._size)
        data = self._storage.data
        if not isinstance(data, ByteRange):
            return self._source.read(start * self._size, count * self._size)
        return self._strided(data, start, count)

    def _strided(self, data: ByteRange, start: int, count: int) -> bytes:
        """Read elements of one row of a view: a run of the storage, or one by one if they are far apart."""
        first = self._entry.offset
        left = start
        for size, step in zip(reversed(self._entry.shape), reversed(self._entry.stride), strict=True):
            left, at = divmod(left, size)
            first += at * step
        step = self._entry.stride[-1]
        reader = self._readers[data.path]
        size = self._size
        if len(self._entry.shape) == 1 or start % self._entry.shape[-1] + count <= self._entry.shape[-1]:
            span = reach((count,), (step,)) * size
            if span <= WHOLE_ROWS:
                raw = reader.read(data.offset + first * size, span)
                return b"".join(raw[at * step * size : (at * step + 1) * size] for at in range(count))
            places = (first + at * step for at in range(count))
            return b"".join(reader.read(data.offset + place * size, size) for place in places)
        raise Unsupported("elements from several rows of a view cannot be read at once")


def _numbers(raw: bytes, encoding: Encoding) -> list[Number]:
    if not raw:
        return []
    block = encoding.decoded(raw)
    if encoding.dtype.family == "bool":
        return [bool(value) for value in block]
    return [_plain(value) for value in block.tolist()]


def _plain(value: Any) -> Number:
    return value if isinstance(value, float | int | complex) else float(value)


def written(value: Number, dtype: str) -> str:
    """Format a number for display, with about as many digits as its dtype has."""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, complex):
        return f"{value.real:.4g}{value.imag:+.4g}j"
    if value == 0:
        return "-0" if math.copysign(1, value) < 0 else "0"
    return f"{value:.{_DIGITS.get(dtype, 4)}g}"


_DIGITS = {"float64": 8, "float32": 6}
