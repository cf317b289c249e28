"""Min, max, mean and spread of elements in one pass, in float64, for any dtype and number of elements.

For each block, the mean is computed first, and then the sum of squares around it. Blocks are joined by the formula of
Chan, Golub and LeVeque (1979), so that large sums are never subtracted from each other. Blocks of float64 whose squares
would leave its range are scaled by a power of two, which is exact. NaN and infinities are counted, and left out of the
rest.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

from ckptfix.dataclass import dataclass
from ckptfix.elements.arrays import BLOCK, DOT

if TYPE_CHECKING:
    from ckptfix.elements.arrays import Elements

LARGE, SMALL = 2.0**500, 2.0**-400
"""Limits of magnitude beyond which summed squares overflow float64, or lose their last digits."""


@dataclass(slots=True)
class ElementMoments:
    """The statistics of some elements.

    Attributes:
        elements: how many.
        nan, infinite, zeros: how many of them are NaN, infinite, zero.
        low, high: the smallest and the largest finite one; exact for integers. None for complex numbers.
        finite: how many are finite.
        mean, mean_imag: of the finite ones, divided by 2**scale.
        squares: sum of their squared distances from the mean, divided by 4**scale.
        scale: exponent of the power of two by which `mean` and `squares` are divided.
    """

    elements: int = 0
    nan: int = 0
    infinite: int = 0
    zeros: int = 0
    low: float | None = None
    high: float | None = None
    finite: int = 0
    mean: float = 0.0
    mean_imag: float = 0.0
    squares: float = 0.0
    scale: int = 0

    def add(self, block: Elements) -> None:
        """Include the elements of `block`, which is not empty; numpy's warnings must be off."""
        self.join(_block(block))

    @classmethod
    def each(cls, block: Elements, count: int) -> list[ElementMoments]:
        """Return the statistics of each `count` elements of `block`; the last ones may be fewer."""
        whole = block.size - block.size % count
        made = _rows(block[:whole].reshape(-1, count)) if whole else []
        if whole < block.size:
            made.append(_block(block[whole:]))
        return made

    def join(self, other: ElementMoments) -> None:
        """Include the elements of `other`."""
        self.elements += other.elements
        self.nan += other.nan
        self.infinite += other.infinite
        self.zeros += other.zeros
        if not other.finite:
            return
        if not self.finite:
            self.low, self.high, self.finite = other.low, other.high, other.finite
            self.mean, self.mean_imag = other.mean, other.mean_imag
            self.squares, self.scale = other.squares, other.scale
            return
        self.low = _least(self.low, other.low, min)
        self.high = _least(self.high, other.high, max)
        scale = max(self.scale, other.scale)
        mine, theirs = self._scaled(scale), other._scaled(scale)
        count = self.finite + other.finite
        share = other.finite / count
        apart, apart_imag = theirs[0] - mine[0], theirs[1] - mine[1]
        self.mean, self.mean_imag = mine[0] + apart * share, mine[1] + apart_imag * share
        self.squares = mine[2] + theirs[2] + (apart * apart + apart_imag * apart_imag) * self.finite * share
        self.finite, self.scale = count, scale

    def _scaled(self, scale: int) -> tuple[float, float, float]:
        down = self.scale - scale
        if not down:
            return self.mean, self.mean_imag, self.squares
        return math.ldexp(self.mean, down), math.ldexp(self.mean_imag, down), math.ldexp(self.squares, 2 * down)

    @property
    def all_finite(self) -> bool:
        """True if no element is NaN or infinite."""
        return self.finite == self.elements

    @property
    def average(self) -> tuple[float, float] | None:
        """The mean, and its imaginary part."""
        return (_up(self.mean, self.scale), _up(self.mean_imag, self.scale)) if self.finite else None

    @property
    def mean_value(self) -> float | complex | None:
        """The mean as one number, complex only if it has an imaginary part."""
        average = self.average
        return None if average is None else complex(*average) if average[1] else average[0]

    @property
    def deviation(self) -> float | None:
        """The standard deviation as computed by `torch.std`; None for fewer than two elements."""
        return _up(math.sqrt(self.squares / (self.finite - 1)), self.scale) if self.finite > 1 else None

    @property
    def norm(self) -> float | None:
        """The Euclidean norm."""
        if not self.finite:
            return None
        square = self.mean * self.mean + self.mean_imag * self.mean_imag
        return _up(math.sqrt(self.squares + square * self.finite), self.scale)


class _Scratch(threading.local):
    """Memory that a thread uses again for each block: fresh memory costs page faults, and space in the cache."""

    def __init__(self) -> None:
        self._held: Elements | None = None

    def wide(self, block: Elements) -> Elements:
        """Return the elements of `block` in float64."""
        import numpy

        if self._held is None or self._held.size < block.size:
            self._held = numpy.empty(max(block.size, BLOCK))
        made = self._held[: block.size]
        numpy.copyto(made, block)
        return made


_SCRATCH = _Scratch()


def _up(value: float, scale: int) -> float:
    try:
        return math.ldexp(value, scale)
    except OverflowError:
        return math.copysign(math.inf, value)


def _least(one: float | None, other: float | None, choose: Any) -> float | None:
    found: float | None = one if other is None else other if one is None else choose(one, other)
    return found


def _block(block: Elements) -> ElementMoments:
    return _complex(block) if block.dtype.kind == "c" else _real(block)


def _rows(rows: Elements) -> list[ElementMoments]:
    """Return the statistics of each row, equal to those that `_block` returns, by calls of numpy for all of them."""
    import numpy

    count = rows.shape[1]
    if rows.dtype.kind == "c" or count % DOT:
        return [_block(row) for row in rows]
    low, high = rows.min(axis=1), rows.max(axis=1)
    if rows.dtype.kind == "f":
        least, most = (SMALL, LARGE) if rows.dtype.itemsize == 8 else (-1, numpy.inf)
        largest = numpy.maximum(high, -low)
        if not ((largest > least) & (largest < most)).all():
            return [_block(row) for row in rows]
    made = [
        ElementMoments(count, zeros=int(numpy.count_nonzero(zero)), low=lowest, high=highest, finite=count)
        for zero, lowest, highest in zip(rows == 0, low.tolist(), high.tolist(), strict=True)
    ]
    wide = _SCRATCH.wide(rows.reshape(-1))
    sums = wide.reshape(rows.shape).sum(axis=1).tolist()
    # Products of rows and columns are the dot products that `_squares` adds up, in one call.
    dots = numpy.matmul(wide.reshape(-1, 1, DOT), wide.reshape(-1, DOT, 1)).reshape(len(rows), -1).tolist()
    for one, total, products, row in zip(made, sums, dots, wide.reshape(rows.shape), strict=True):
        one.mean, one.squares = _around(row, total / count, sum(products))
    return made


def _real(block: Elements) -> ElementMoments:
    import numpy

    made = ElementMoments(elements=block.size)
    low, high = block.min(), block.max()
    if block.dtype.kind == "f" and not (numpy.isfinite(low) and numpy.isfinite(high)):
        made.nan = int(numpy.count_nonzero(block != block))
        block = block[numpy.isfinite(block)]
        made.infinite = made.elements - made.nan - block.size
        if not block.size:
            return made
        low, high = block.min(), block.max()
    made.low, made.high = low.item(), high.item()
    made.zeros = int(numpy.count_nonzero(block == 0)) if low <= 0 <= high else 0
    made.finite = block.size
    made.scale = _scale(max(abs(float(low)), abs(float(high)))) if block.dtype.itemsize == 8 else 0
    wide = numpy.ldexp(block, -made.scale) if made.scale else _SCRATCH.wide(block)
    made.mean, made.squares = _around_mean(wide)
    return made


def _complex(block: Elements) -> ElementMoments:
    import numpy

    made = ElementMoments(elements=block.size)
    made.zeros = int(numpy.count_nonzero(block == 0))
    finite = numpy.isfinite(block)
    if not finite.all():
        made.nan = int(numpy.count_nonzero(numpy.isnan(block)))
        block = block[finite]
        made.infinite = made.elements - made.nan - block.size
    made.finite = block.size
    if block.size:
        real, imag = block.real.astype(numpy.float64), block.imag.astype(numpy.float64)
        made.scale = _scale(float(max(abs(real).max(), abs(imag).max())))
        if made.scale:
            real, imag = numpy.ldexp(real, -made.scale), numpy.ldexp(imag, -made.scale)
        made.mean, squares = _around_mean(real)
        made.mean_imag, made.squares = _around_mean(imag)
        made.squares += squares
    return made


def _scale(largest: float) -> int:
    return 0 if not largest or SMALL < largest < LARGE else math.frexp(largest)[1]


def _around_mean(wide: Elements) -> tuple[float, float]:
    """Return the mean, and the squares around it; `wide` is overwritten."""
    return _around(wide, float(wide.sum()) / wide.size, _squares(wide))


def _around(wide: Elements, mean: float, around_zero: float) -> tuple[float, float]:
    """Return the mean, and the squares around it; `wide`, whose squares have the sum `around_zero`, is overwritten."""
    squares = around_zero - mean * mean * wide.size
    if 2 * squares > around_zero:  # the difference of the two has lost at most one bit
        return mean, squares
    wide -= mean
    return mean, _squares(wide)


def _squares(wide: Elements) -> float:
    return sum(float(wide[start : start + DOT].dot(wide[start : start + DOT])) for start in range(0, wide.size, DOT))
