"""The distribution of the values of one tensor, or of two tensors and their difference.

The elements are streamed twice: first for the range and the moments, then to count them in bins. NaN and infinities are
counted with the moments, and are in no bin. For complex numbers, the absolute values are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

from ckptfix.checkpoint import TensorEntry
from ckptfix.dataclass import dataclass
from ckptfix.elements.histogram import Bins, real
from ckptfix.elements.moments import ElementMoments
from ckptfix.elements.reader import Content, content, read_each, tensor_id, why_no_numbers
from ckptfix.errors import CkptfixError
from ckptfix.io.read import Progress
from ckptfix.io.source import Readers, shares_open_files

if TYPE_CHECKING:
    from ckptfix.elements.arrays import Elements

Pair = tuple[TensorEntry | None, TensorEntry | None]
"""A tensor of A and one of B; one of them may be None."""

Codes = tuple[Mapping[str, str], Mapping[str, str]]
"""Address -> description of the tensors of A, and of B, whose elements are codes of quantized weights."""


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
    pairs: Sequence[Pair], byteorders: tuple[str, str], codes: Codes = ({}, {}), *, progress: Progress | None = None
) -> list[Distribution]:
    """Compute the distribution of each pair; a pair that cannot be read, or holds codes, has a reason instead."""
    unique = {_place(pair): pair for pair in pairs}

    def read(pair: Pair, readers: Readers) -> Distribution:
        return _distribution(pair, byteorders, codes, readers)

    made = read_each(unique.values(), read, _weight, progress, sum(map(_weight, unique.values())))
    found = dict(zip(unique, made, strict=True))
    return [found[_place(pair)] for pair in pairs]


def _place(pair: Pair) -> object:
    return tuple(None if entry is None else tensor_id(entry) for entry in pair)


def _weight(pair: Pair) -> int:
    return sum(0 if entry is None else entry.nbytes for entry in pair)


def _distribution(pair: Pair, byteorders: tuple[str, str], codes: Codes, readers: Readers) -> Distribution:
    for entry, described in zip(pair, codes, strict=True):
        reason = None if entry is None else why_no_numbers(entry) or described.get(entry.name)
        if reason is not None:
            return Distribution(reason=reason)
    try:
        a, b = (
            None if entry is None else content(entry, order) for entry, order in zip(pair, byteorders, strict=True)
        )
        return _of_sides(a, b, _alike(pair), readers)
    except CkptfixError as error:
        return Distribution(reason=error.message)


def _alike(pair: Pair) -> bool:
    """Return whether there are two tensors of one shape, which have a difference."""
    a, b = pair
    return a is not None and b is not None and a.shape == b.shape


def _of_sides(a: Content | None, b: Content | None, both: bool, readers: Readers) -> Distribution:
    import numpy

    made = [None if side is None else ValueBins() for side in (a, b)]
    apart = ValueBins() if both else None
    families = [side.encoding.dtype.family for side in (a, b) if side is not None]
    with numpy.errstate(all="ignore"):
        for number, block in _blocks(a, b, both, readers):
            values = apart if number == 2 else made[number]
            assert values is not None
            values.moments.add(block)
        whole = all(family in ("int", "bool") for family in families)
        ranges = [values.moments for values in made if values is not None]
        for values in made:
            if values is not None:
                values.bins = Bins.of(ranges, whole=whole)
        if apart is not None:
            apart.bins = Bins.of([apart.moments], whole=whole, symmetric=True)
        for number, block in _blocks(a, b, both, readers):
            values = apart if number == 2 else made[number]
            assert values is not None
            if values.bins is not None:
                values.bins.add(block if values.moments.all_finite else block[numpy.isfinite(block)])
        if apart is not None and apart.bins is not None:
            (place,) = apart.bins.places(numpy.zeros(1))
            apart.bins.counts[place] -= apart.moments.zeros
    for values in made:
        if values is not None and not values.moments.finite:
            values.bins = None
    return Distribution(made[0], made[1], apart, "complex" in families)


def _blocks(a: Content | None, b: Content | None, both: bool, readers: Readers) -> Iterator[tuple[int, Elements]]:
    """Yield real numbers of A (0), of B (1), and of their difference (2)."""
    if both and a is not None and b is not None:
        for x, y in zip(a.blocks(readers), b.blocks(readers), strict=True):
            yield from ((0, real(x)), (1, real(y)), (2, real(_wide(y) - _wide(x))))
        return
    for number, side in enumerate((a, b)):
        if side is not None:
            yield from ((number, real(block)) for block in side.blocks(readers))


def _wide(block: Elements) -> Elements:
    return block.astype("c16" if block.dtype.kind == "c" else "f8")

