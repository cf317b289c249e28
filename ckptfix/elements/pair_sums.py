"""Statistics of how far apart the values of two tensors are, and the running sums behind them."""

from __future__ import annotations

import math

from ckptfix.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class ValueDiff:
    """The differences in value between two tensors of one shape.

    Sums are over the elements that are finite on both sides. A statistic is None where it is undefined (no such
    element, a zero norm, a dtype without arithmetic) or beyond the range of float64.

    Attributes:
        elements: of either tensor.
        differing: elements further apart than the tolerance, including those counted below.
        max_abs: largest ``|a - b|``; an exact int for integer dtypes.
        mean_abs: mean of ``|a - b|``.
        rel_l2: ``||a - b|| / ||b||``.
        cosine: ``a . b / (||a|| ||b||)``; complex elements count as two real ones.
        nan_a, nan_b: elements that are NaN in A only, in B only.
        infinite: elements that are infinite on one side only, or on both with opposite signs.
        infinite_b: elements that are infinite in B and finite in A.
        norm_b: ``||b||``.
        reason: why the values could not be compared; the other fields then have no meaning.
    """

    elements: int
    differing: int
    max_abs: float | None = None
    mean_abs: float | None = None
    rel_l2: float | None = None
    cosine: float | None = None
    nan_a: int = 0
    nan_b: int = 0
    infinite: int = 0
    infinite_b: int = 0
    norm_b: float | None = None
    reason: str | None = None


@dataclass(slots=True)
class PairSums:
    """Running totals over pairs of elements; `added` joins the totals of two parts of a tensor."""

    finite: int = 0
    differing: int = 0
    max_abs: float = 0
    sum_abs: float = 0
    dd: float = 0.0
    aa: float = 0.0
    bb: float = 0.0
    ab: float = 0.0
    nan_a: int = 0
    nan_b: int = 0
    infinite: int = 0
    infinite_b: int = 0

    def added(self, other: PairSums) -> PairSums:
        return PairSums(
            self.finite + other.finite,
            self.differing + other.differing,
            max(self.max_abs, other.max_abs),
            self.sum_abs + other.sum_abs,
            self.dd + other.dd,
            self.aa + other.aa,
            self.bb + other.bb,
            self.ab + other.ab,
            self.nan_a + other.nan_a,
            self.nan_b + other.nan_b,
            self.infinite + other.infinite,
            self.infinite_b + other.infinite_b,
        )

    def result(self, elements: int) -> ValueDiff:
        """Return the statistics of a tensor, after all its `elements` have been summed."""
        if not self.finite:
            return ValueDiff(
                elements, self.differing, nan_a=self.nan_a, nan_b=self.nan_b, infinite=self.infinite,
                infinite_b=self.infinite_b,
            )  # fmt: skip
        return ValueDiff(
            elements,
            self.differing,
            max_abs=self.max_abs if math.isfinite(self.max_abs) else None,
            mean_abs=_finite(self.sum_abs / self.finite),
            rel_l2=self._rel_l2(),
            cosine=self._cosine(),
            nan_a=self.nan_a,
            nan_b=self.nan_b,
            infinite=self.infinite,
            infinite_b=self.infinite_b,
            norm_b=_finite(math.sqrt(self.bb)) if math.isfinite(self.bb) else None,
        )

    def _rel_l2(self) -> float | None:
        if not self.max_abs:
            return 0.0
        if not (self.dd and self.bb and math.isfinite(self.dd) and math.isfinite(self.bb)):
            return None
        return _finite(math.sqrt(self.dd) / math.sqrt(self.bb))

    def _cosine(self) -> float | None:
        norms = math.sqrt(self.aa) * math.sqrt(self.bb)
        if not norms or not math.isfinite(norms) or not math.isfinite(self.ab):
            return None
        return max(-1.0, min(1.0, self.ab / norms))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
