"""A key that expects a tensor, and the test whether a tensor could go there, judging by shape and dtype alone."""

from __future__ import annotations

import math

from ckptfix.checkpoint import dtypes
from ckptfix.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor that a model or a state dict has: its key, and what fits there.

    Attributes:
        name: its key.
        shape: sizes in elements.
        dtype: torch dtype name; ``""`` if unknown.
        tied: name of the first slot that is the same tensor (tied weights); None if it is not tied to an earlier one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = ""
    tied: str | None = None


_WHOLE = {"int": "whole", "bool": "whole"}
"""Families of dtypes that may replace each other: masks are uint8 before torch 1.2 and bool since."""


def misfit(source: Slot, target: Slot, *, reshape: bool = False) -> str | None:
    """Return why `source` cannot go where `target` is expected, in a few words; None if it can.

    A float32 tensor fits in place of a float16 one, because loading converts it; an int tensor in place of a float one
    does not. With `reshape`, a different shape with equally many elements fits, unless one is a transposition of the
    other: then all elements would be present, but in the wrong places.
    """
    if source.shape != target.shape:
        shown = f"shape {list(source.shape)} against {list(target.shape)}"
        if math.prod(source.shape) != math.prod(target.shape):
            return shown
        if not reshape:
            return f"{shown}, with equally many elements"
        if is_transposed(source.shape, target.shape):
            return f"{shown}, which is a transposition, not a reshape"
    ours, theirs = dtype_kind(source.dtype), dtype_kind(target.dtype)
    if ours and theirs and ours != theirs:
        return f"dtype {source.dtype} against {target.dtype}"
    return None


def is_transposed(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return whether the sizes above 1 are the same in a different order."""
    sizes, others = ([size for size in sizes if size != 1] for sizes in (shape, other))
    return sizes != others and sorted(sizes) == sorted(others)


def dtype_kind(name: str) -> str:
    """Return the kind of number of a dtype: ``"float"``, ``"whole"``, ``"complex"`` ...; ``""`` for an unknown one."""
    row = dtypes.find(name)
    return "" if row is None else _WHOLE.get(row.family, row.family)
