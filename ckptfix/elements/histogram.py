"""A histogram in one pass, for any range: bins are powers of two wide, and merge in pairs as the range grows.

So the counts are exact, parts of a tensor can be counted separately and added, and no range is needed in advance.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Elements: TypeAlias = NDArray[Any]

BINS = 4096
"""Maximum bins, plus one at the end; far more than a screen has columns."""


class Histogram:
    """Counts of finite elements in bins that are ``2**scale`` wide; the first begins at ``first * 2**scale``."""

    def __init__(self) -> None:
        self.scale = 0
        self.first = 0
        self.counts: Elements | None = None

    def add(self, block: Elements) -> None:
        """Count the elements of `block`, which are finite float64."""
        import numpy

        if not block.size:
            return
        low, high = float(block.min()), float(block.max())
        scale = _scale(low, high)
        if self.counts is not None:
            scale = max(scale, self.scale)
        while _bin(high, scale) - _bin(low, scale) > BINS:
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
            if end - start <= BINS + 1:
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
    """Return the exponent of bins so wide that fewer than `BINS` cover the range."""
    largest = max(abs(low), abs(high))
    width = high - low
    least = math.frexp(largest)[1] - 53 if largest else -1074  # finer than the precision of the elements
    if width <= 0:
        return least
    exponent = math.frexp(width)[1] if math.isfinite(width) else math.frexp(largest)[1] + 1
    return max(exponent - BINS.bit_length() + 1, least)


def _bin(value: float, scale: int) -> int:
    return math.floor(math.ldexp(value, -scale))
