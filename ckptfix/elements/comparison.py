"""Comparison of the elements of two tensors: every dtype, in float64 or exactly.

Sums are computed in float64 over blocks that fit a core's cache, for every dtype; integers of every width are compared
exactly. Elements that are NaN on both sides are equal, and so are infinities of the same sign and zeros of either sign.
Elements that are not finite on both sides are left out of the sums. numpy is imported when the first element is
decoded, not before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from ckptfix.checkpoint import dtypes
from ckptfix.checkpoint.dtypes import Dtype
from ckptfix.dataclass import dataclass
from ckptfix.elements.arrays import DOT, SMALL_BLOCK, Encoding
from ckptfix.elements.pair_sums import PairSums

if TYPE_CHECKING:
    from ckptfix.elements.arrays import Elements

Arithmetic = Literal["integer", "real", "complex", "bits"]

_INTEGERS = ("int", "bool")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The way in which the elements of two tensors are compared.

    Attributes:
        a, b: how their files store them.
        rtol, atol: elements are the same where ``|a - b| <= atol + rtol * |b|``.
        arithmetic: the computation that both dtypes allow.
        bytewise: equal bytes mean equal elements.
    """

    a: Encoding
    b: Encoding
    rtol: float
    atol: float
    arithmetic: Arithmetic
    bytewise: bool

    @classmethod
    def of(
        cls, a: str, b: str, orders: tuple[str, str], rtol: float = 0.0, atol: float = 0.0, *, codes: bool = False
    ) -> Comparison | None:
        """Return the comparison of two dtypes, of files in these byte orders; None if values cannot be compared.

        Args:
            codes: the elements are codes, which are equal or not, and have no distance.
        """
        row_a, row_b = dtypes.find(a), dtypes.find(b)
        if row_a is None or row_b is None:
            return None
        arithmetic = _arithmetic(row_a, row_b)
        if codes:
            arithmetic = "bits" if row_a is row_b else None
        if arithmetic is None:
            return None
        x, y = Encoding(row_a, orders[0]), Encoding(row_b, orders[1])
        return cls(x, y, rtol, atol, arithmetic, row_a is row_b and x.swap == y.swap)

    def add(self, a: bytes, b: bytes, sums: PairSums) -> None:
        """Add the elements of `a` and `b`, which are equally many, to `sums`."""
        import numpy

        add = {"integer": _add_integers, "real": _add_floats, "complex": _add_floats, "bits": _add_bits}[
            self.arithmetic
        ]
        with numpy.errstate(all="ignore"):
            for x, y in zip(self._blocks(self.a, a), self._blocks(self.b, b), strict=True):
                add(x, y, self.rtol, self.atol, sums)

    def add_equal(self, a: bytes, sums: PairSums) -> None:
        """Add elements that are equal on both sides: they count only towards the norms and the mean."""
        import numpy

        if self.arithmetic == "bits":
            return
        with numpy.errstate(all="ignore"):
            for x in self._blocks(self.a, a):
                if self.arithmetic == "integer":
                    x = x.astype(numpy.float64)
                square = _dot(x, x)
                if not math.isfinite(square):
                    x = x[numpy.isfinite(x)]
                    square = _dot(x, x)
                sums.finite += x.size
                sums.aa += square
                sums.bb += square
                sums.ab += square

    def _blocks(self, encoding: Encoding, data: bytes) -> Iterator[Elements]:
        """Yield the elements of one side in the form that the arithmetic needs."""
        parts = encoding.parts(data, SMALL_BLOCK)
        if self.arithmetic == "bits":
            return map(encoding.rows, parts)
        wide = {"real": "f8", "complex": "c16"}.get(self.arithmetic)
        blocks = map(encoding.viewed, parts)
        return blocks if wide is None else (block.astype(wide) for block in blocks)


def _arithmetic(a: Dtype, b: Dtype) -> Arithmetic | None:
    """Return the computation that two dtypes allow; None if they are not to be compared by value."""
    families = {a.family, b.family}
    if families & {"bits", "quantized"}:
        return "bits" if a is b else None
    if "complex" in families:
        return "complex"
    signs = {row.name == "uint64" for row in (a, b)}
    return "integer" if families <= set(_INTEGERS) and len(signs) == 1 else "real"


def _dot(x: Elements, y: Elements) -> float:
    """Compute ``sum(x * y)``; for complex arrays, over their real and imaginary components."""
    if x.dtype.kind == "c":
        x, y = x.view("f8"), y.view("f8")
    return float(sum(x[start : start + DOT].dot(y[start : start + DOT]) for start in range(0, len(x), DOT)))


def _add_floats(x: Elements, y: Elements, rtol: float, atol: float, sums: PairSums) -> None:
    d = x - y
    dd = _dot(d, d)
    if not math.isfinite(dd):
        x, y = _set_aside(x, y, sums)
        d = x - y
        dd = _dot(d, d)
    if not d.size:
        return
    distance = abs(d)
    sums.finite += d.size
    sums.differing += _differing(distance, y, rtol, atol)
    sums.max_abs = max(sums.max_abs, float(distance.max()))
    sums.sum_abs += float(distance.sum())
    _add_norms(x, y, dd, sums)


def _set_aside(x: Elements, y: Elements, sums: PairSums) -> tuple[Elements, Elements]:
    """Count the elements that are not finite on both sides, and return the others."""
    import numpy

    nan_x, nan_y = numpy.isnan(x), numpy.isnan(y)
    finite = numpy.isfinite(x) & numpy.isfinite(y)
    nan_a = int(numpy.count_nonzero(nan_x & ~nan_y))
    nan_b = int(numpy.count_nonzero(nan_y & ~nan_x))
    infinite = int(numpy.count_nonzero(~finite & ~nan_x & ~nan_y & (x != y)))
    sums.nan_a += nan_a
    sums.nan_b += nan_b
    sums.infinite += infinite
    if infinite:
        sums.infinite_b += int(numpy.count_nonzero(numpy.isinf(y) & numpy.isfinite(x)))
    sums.differing += nan_a + nan_b + infinite
    return x[finite], y[finite]


def _add_integers(x: Elements, y: Elements, rtol: float, atol: float, sums: PairSums) -> None:
    import numpy

    wide = numpy.uint64 if x.dtype == numpy.uint64 else numpy.int64
    x, y = x.astype(wide), y.astype(wide)
    # Unsigned subtraction wraps, so it is right where signed subtraction would overflow.
    distance = numpy.maximum(x, y).view("u8") - numpy.minimum(x, y).view("u8")
    x, y, d = x.astype("f8"), y.astype("f8"), distance.astype("f8")
    sums.finite += x.size
    sums.differing += _differing(distance, y, rtol, atol)
    sums.max_abs = max(sums.max_abs, int(distance.max()))
    # The sum is split in halves: 2**15 elements of 32 bits cannot overflow a sum of 64.
    sums.sum_abs += (int((distance >> numpy.uint64(32)).sum()) << 32) + int((distance & numpy.uint64(0xFFFFFFFF)).sum())
    _add_norms(x, y, _dot(d, d), sums)


def _add_norms(x: Elements, y: Elements, dd: float, sums: PairSums) -> None:
    sums.dd += dd
    sums.aa += _dot(x, x)
    sums.bb += _dot(y, y)
    sums.ab += _dot(x, y)


def _add_bits(x: Elements, y: Elements, rtol: float, atol: float, sums: PairSums) -> None:
    sums.differing += int((x != y).any(axis=1).sum())


def _differing(distance: Elements, reference: Elements, rtol: float, atol: float) -> int:
    import numpy

    if not rtol and not atol:
        return int(numpy.count_nonzero(distance))
    return int(numpy.count_nonzero(distance > atol + rtol * abs(reference)))
