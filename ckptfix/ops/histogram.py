"""The distribution of the values of one tensor, or of two tensors and their difference.

The elements are streamed twice: first for the range and the moments, then to count them in bins. NaN and infinities are
counted with the moments, and are in no bin. For complex numbers, the absolute values are counted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from ckptfix.checkpoint import TensorEntry, dtypes, same_place
from ckptfix.elements.arrays import decoded
from ckptfix.elements.moments import LARGE, SMALL, ElementMoments, of_numbers
from ckptfix.elements.reader import content, source
from ckptfix.errors import CkptfixError
from ckptfix.io.read import Progress
from ckptfix.io.source import Readers, shares_open_files
from ckptfix.io.threads import OVERHEAD, TASK, Workers, batches
from ckptfix.ops.stats import why_no_numbers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Elements: TypeAlias = NDArray[Any]

BINS = 48

STEP = 1 << 16
"""Elements that are processed together."""

Pair = tuple[TensorEntry | None, TensorEntry | None]
"""A tensor of A and one of B; one of them may be None."""


@dataclass(slots=True)
class Bins:
    """Counts of the elements in equal parts of a range.

    Attributes:
        low, high: the range; the two are equal if all elements are.
        counts: number of elements in each part.
    """

    low: float
    high: float
    counts: list[int]


@dataclass(slots=True)
class ValueBins:
    """The values of one tensor, or of a difference; `bins` is None if no element is finite."""

    moments: ElementMoments = field(default_factory=ElementMoments)
    bins: Bins | None = None


@dataclass(frozen=True, slots=True)
class Distribution:
    """The values of two tensors in the same bins, and those of B - A; zeros of the difference are in no bin.

    Attributes:
        a, b: values of the tensors; None if there is no tensor.
        difference: values of B - A; None unless there are two tensors of the same shape.
        absolute: whether the values are absolute values, of complex numbers.
        reason: why there are no values; everything else is then None.
    """

    a: ValueBins | None = None
    b: ValueBins | None = None
    difference: ValueBins | None = None
    absolute: bool = False
    reason: str | None = None


@shares_open_files()
def distributions(
    pairs: Sequence[Pair], byteorders: tuple[str, str], *, progress: Progress | None = None
) -> list[Distribution]:
    """Compute the distribution of each pair; a pair that cannot be read has a reason instead."""
    unique = {_place(pair): pair for pair in pairs}
    total = sum(map(_weight, unique.values()))
    done = 0
    found: dict[object, Distribution] = {}
    with Readers() as readers:
        call = partial(_of_task, readers, byteorders)
        for rows, nbytes in Workers().run(call, batches(unique.items(), lambda row: _weight(row[1]) + OVERHEAD, TASK)):
            found.update(rows)
            done += nbytes
            if progress is not None:
                progress(done, total)
    return [found[_place(pair)] for pair in pairs]


def _place(pair: Pair) -> object:
    return tuple(None if entry is None else same_place(entry) or (entry.at, entry.key) for entry in pair)


def _weight(pair: Pair) -> int:
    return sum(0 if entry is None else entry.nbytes for entry in pair)


def _of_task(
    readers: Readers, byteorders: tuple[str, str], task: Sequence[tuple[object, Pair]]
) -> tuple[list[tuple[object, Distribution]], int]:
    rows = [(place, _distribution(pair, byteorders, readers)) for place, pair in task]
    return rows, sum(_weight(pair) for _, pair in task)


def _distribution(pair: Pair, byteorders: tuple[str, str], readers: Readers) -> Distribution:
    for entry in pair:
        reason = None if entry is None else why_no_numbers(entry)
        if reason is not None:
            return Distribution(reason=reason)
    sides = [
        None if entry is None else ElementReader(entry, order, readers)
        for entry, order in zip(pair, byteorders, strict=True)
    ]
    try:
        return _of_sides(*sides)
    except CkptfixError as error:
        return Distribution(reason=error.message)


class ElementReader:
    """A tensor whose elements are read in steps, any number of times."""

    def __init__(self, entry: TensorEntry, byteorder: str, readers: Readers) -> None:
        self.entry = entry
        self.dtype = dtypes.by_name(entry.dtype)
        self.whole = self.dtype.family in ("int", "bool")
        self._byteorder = byteorder
        self._swap = byteorder != sys.byteorder and self.dtype.itemsize > 1
        self._readers = readers

    def blocks(self) -> Iterator[Elements]:
        """Yield all elements. Raises CkptfixError if they cannot be read."""
        place = content(self.entry, self._byteorder)
        if place.endless:
            raise CkptfixError("a view that repeats its storage too often to be read")
        elements, size = source(place, self._readers), self.dtype.itemsize
        for start in range(0, self.entry.numel, STEP):
            count = min(STEP, self.entry.numel - start)
            yield decoded(elements.read(start * size, count * size), self.dtype, self._swap)


def _of_sides(a: ElementReader | None, b: ElementReader | None) -> Distribution:
    import numpy

    both = a is not None and b is not None and a.entry.shape == b.entry.shape
    made = [None if side is None else ValueBins() for side in (a, b)]
    apart = ValueBins() if both else None
    with numpy.errstate(all="ignore"):
        for number, block in _blocks(a, b, both):
            values = apart if number == 2 else made[number]
            assert values is not None
            values.moments.add(of_numbers(block))
        whole = all(side.whole for side in (a, b) if side is not None)
        ranges = [values.moments for values in made if values is not None]
        for values in made:
            if values is not None:
                values.bins = _bins(ranges, whole=whole)
        if apart is not None:
            apart.bins = _bins([apart.moments], whole=whole, symmetric=True)
        for number, block in _blocks(a, b, both):
            values = apart if number == 2 else made[number]
            assert values is not None
            if values.bins is not None:
                _count(block, values)
        if apart is not None and apart.bins is not None:
            (place,) = _places(numpy.zeros(1), apart.bins)
            apart.bins.counts[place] -= apart.moments.zeros
    for values in made:
        if values is not None and not values.moments.finite:
            values.bins = None
    absolute = any(side.dtype.family == "complex" for side in (a, b) if side is not None)
    return Distribution(made[0], made[1], apart, absolute)


def _blocks(a: ElementReader | None, b: ElementReader | None, both: bool) -> Iterator[tuple[int, Elements]]:
    """Yield real numbers of A (0), of B (1), and of their difference (2)."""
    if both and a is not None and b is not None:
        for x, y in zip(a.blocks(), b.blocks(), strict=True):
            yield from ((0, _real(x)), (1, _real(y)), (2, _real(_wide(y) - _wide(x))))
        return
    for number, side in enumerate((a, b)):
        if side is not None:
            yield from ((number, _real(block)) for block in side.blocks())


def _wide(block: Elements) -> Elements:
    return block.astype("c16" if block.dtype.kind == "c" else "f8")


def _real(block: Elements) -> Elements:
    return abs(_wide(block)) if block.dtype.kind == "c" else block


def _bins(moments: Sequence[ElementMoments], *, whole: bool, symmetric: bool = False) -> Bins | None:
    """Return empty bins for the finite elements; one bin for each number if they are few integers."""
    lows = [row.low for row in moments if row.low is not None]
    highs = [row.high for row in moments if row.high is not None]
    if not lows:
        return None
    low, high = float(min(lows)), float(max(highs))
    if symmetric and low < 0:
        high = max(abs(low), abs(high))
        low = -high
    if whole and high - low < BINS:
        return Bins(low - 0.5, high + 0.5, [0] * (int(high - low) + 1))
    return Bins(low, high, [0] * BINS)


def _count(block: Elements, values: ValueBins) -> None:
    import numpy

    bins = values.bins
    assert bins is not None
    if values.moments.finite < values.moments.elements:
        block = block[numpy.isfinite(block)]
    found = numpy.bincount(_places(block.astype(numpy.float64), bins), minlength=len(bins.counts))
    bins.counts = [count + more for count, more in zip(bins.counts, found.tolist(), strict=True)]


def _places(block: Elements, bins: Bins) -> Elements:
    """Return the bin of each element; `block` is overwritten."""
    import numpy

    count = len(bins.counts)
    width = bins.high - bins.low
    if not width:
        return numpy.full(block.shape, count // 2)
    if width < LARGE and width / count > SMALL:
        block -= bins.low
        block *= count / width
    else:  # in halves, as the whole range may exceed float64
        block /= 2
        block -= bins.low / 2
        block /= bins.high / 2 - bins.low / 2
        block *= count
    places = block.astype(numpy.intp)
    return numpy.clip(places, 0, count - 1, out=places)
