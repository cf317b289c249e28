"""Histograms: `Histogram` in one pass, for any range, and `Bins` for a range that is known.

The bins of a `Histogram` are powers of two wide, and merge in pairs as the range grows. So the counts are exact, parts
of a tensor can be counted separately and added, and no range is needed in advance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ckptfix.dataclass import dataclass
from ckptfix.elements.moments import LARGE, SMALL, ElementMoments

if TYPE_CHECKING:
    from ckptfix.elements.arrays import Elements

BINS = 48
"""Bins of a `Bins`."""

MOST_BINS = 4096
"""Maximum bins of a `Histogram`, plus one at the end; far more than a screen has columns."""


def real(block: Elements) -> Elements:
    """Return the numbers that are counted: those of `block`, or their absolute values if they are complex."""
    return abs(block.astype("c16")) if block.dtype.kind == "c" else block


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

    @classmethod
    def of(cls, moments: Sequence[ElementMoments], *, whole: bool, symmetric: bool = False) -> Bins | None:
        """Return empty bins for all finite elements of `moments`; None if there are none.

        Args:
            whole: they are integers, which have a bin each if they are few.
            symmetric: the range has zero in its middle, if there are negative elements.
        """
        lows = [row.low for row in moments if row.low is not None]
        highs = [row.high for row in moments if row.high is not None]
        if not lows:
            return None
        low, high = float(min(lows)), float(max(highs))
        if symmetric and low < 0:
            high = max(abs(low), abs(high))
            low = -high
        if whole and high - low < BINS:
            return cls(low - 0.5, high + 0.5, [0] * (int(high - low) + 1))
        return cls(low, high, [0] * BINS)

    def add(self, block: Elements) -> None:
        """Count the elements of `block`, which are real and finite."""
        import numpy

        found = numpy.bincount(self.places(block.astype(numpy.float64)), minlength=len(self.counts))
        self.counts = [count + more for count, more in zip(self.counts, found.tolist(), strict=True)]

    def places(self, block: Elements) -> Elements:
        """Return the bin of each element; `block`, of float64, is overwritten."""
        import numpy

        count = len(self.counts)
        width = self.high - self.low
        if not width:
            return numpy.full(block.shape, count // 2)
        if width < LARGE and width / count > SMALL:
            block -= self.low
            block *= count / width
        else:  # in halves, as the whole range may exceed float64
            block /= 2
            block -= self.low / 2
            block /= self.high / 2 - self.low / 2
            block *= count
        places = block.astype(numpy.intp)
        return numpy.clip(places, 0, count - 1, out=places)


class Histogram:
    """Counts of finite elements in bins that are ``2**scale`` wide; the first begins at ``first * 2**scale``."""

    def __init__(self) -> None:
        self.scale = 0
        self.first = 0
        self.counts: Elements | None = None

    def add(self, block: Elements) -> None:
        """Count the finite elements of `block`; for complex ones, their absolute values."""
        import numpy

        floats = block.dtype.kind in "fc"
        block = real(block).astype(numpy.float64)
        if floats and not numpy.isfinite(block.sum()):
            block = block[numpy.isfinite(block)]
        if not block.size:
            return
        low, high = float(block.min()), float(block.max())
        scale = _scale(low, high)
        if self.counts is not None:
            scale = max(scale, self.scale)
        while _bin(high, scale) - _bin(low, scale) > MOST_BINS:
            scale += 1
        # Multiplying by a power of two is exact; ldexp takes three times as long.
        places = block * 2.0**-scale if abs(scale) < 900 else numpy.ldexp(block, -scale)
        numpy.floor(places, out=places)
        first = _bin(low, scale)
        places -= first
        self._take(scale, first, numpy.bincount(places.astype(numpy.intp)))

    def join(self, other: Histogram) -> None:
        """Add the counts of `other`."""
        if other.counts is not None:
            self._take(other.scale, other.first, other.counts)

    def _take(self, scale: int, first: int, counts: Elements) -> None:
        import numpy

        if self.counts is None:
            self.scale, self.first, self.counts = scale, first, counts
            return
        least = max(scale, self.scale)
        while True:
            mine, theirs = least - self.scale, least - scale
            start = min(self.first >> mine, first >> theirs)
            end = max((self.first + len(self.counts) - 1) >> mine, (first + len(counts) - 1) >> theirs) + 1
            if end - start <= MOST_BINS + 1:
                break
            least += 1
        made = numpy.zeros(end - start, numpy.int64)
        for begin, rows, down in ((self.first, self.counts, mine), (first, counts, theirs)):
            if not down:
                made[begin - start : begin - start + len(rows)] += rows
                continue
            places = ((begin + numpy.arange(len(rows), dtype=numpy.int64)) >> numpy.int64(min(down, 63))) - start
            numpy.add.at(made, places, rows)
        self.scale, self.first, self.counts = least, start, made

    def columns(self, count: int, low: float, high: float) -> list[int]:
        """Sum the counts in `count` equal columns from `low` to `high`; a bin counts in the column of its middle."""
        made = [0] * count
        if self.counts is None:
            return made
        # Divide both by two first, as the whole range of float64 would overflow.
        width = high / 2 - low / 2
        for place in self.counts.nonzero()[0].tolist():
            middle = math.ldexp(self.first + place + 0.5, self.scale - 1)
            share = (middle - low / 2) / width if width > 0 else 0.0
            made[min(max(int(share * count), 0), count - 1)] += int(self.counts[place])
        return made

    def ends(self) -> tuple[float, float]:
        """Return the start of the first bin and the end of the last one."""
        count = 0 if self.counts is None else len(self.counts)
        return math.ldexp(self.first, self.scale), math.ldexp(self.first + count, self.scale)


def _scale(low: float, high: float) -> int:
    """Return the exponent of bins so wide that fewer than `MOST_BINS` cover the range."""
    largest = max(abs(low), abs(high))
    width = high - low
    least = math.frexp(largest)[1] - 53 if largest else -1074  # finer than the precision of the elements
    if width <= 0:
        return least
    exponent = math.frexp(width)[1] if math.isfinite(width) else math.frexp(largest)[1] + 1
    return max(exponent - MOST_BINS.bit_length() + 1, least)


def _bin(value: float, scale: int) -> int:
    return math.floor(math.ldexp(value, -scale))
