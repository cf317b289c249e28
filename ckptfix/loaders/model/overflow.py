"""Counting numbers that leave the range of the dtype that they are cast to."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ckptfix.elements import arrays

if TYPE_CHECKING:
    import torch

_PARTS = {"complex32": "float16", "complex64": "float32"}
"""The dtype of the two parts of a complex number. complex128 is absent because no dtype is wider."""

BLOCK = 1 << 20
"""Number of elements compared at a time."""


def out_of_range(value: torch.Tensor, dtype: torch.dtype) -> int:
    """Count the finite numbers of `value` that are beyond the largest or smallest number of `dtype` after a cast.

    For an integer dtype, infinities and NaN count too, because it cannot represent them.
    """
    import torch

    if value.layout != torch.strided or value.is_quantized or value.is_meta or dtype is value.dtype:
        return 0
    low, high = _range(dtype)
    lowest, highest = _range(value.dtype)
    if low <= lowest and highest <= high:
        return 0
    parts = torch.view_as_real(value.detach().resolve_conj()) if value.is_complex() else value.detach()
    found = 0
    for block in parts.reshape(-1).split(BLOCK):
        wide = block.double()
        beyond = (wide < low) | (wide > high)
        beyond = beyond & wide.isfinite() if dtype.is_floating_point or dtype.is_complex else beyond | wide.isnan()
        found += int(beyond.count_nonzero())
    return found


def _range(dtype: torch.dtype) -> tuple[float, float]:
    """Return the (lowest, highest) number that `dtype` can represent, including those rounded to its largest."""
    import torch

    if dtype is torch.bool:
        return -math.inf, math.inf  # any number but zero is true
    if not (dtype.is_floating_point or dtype.is_complex):
        limits = torch.iinfo(dtype)
        return float(limits.min), float(limits.max)
    name = str(dtype).removeprefix("torch.")
    most = arrays.MOST.get(_PARTS.get(name, name))
    if most is None:  # no number exceeds the range of float64
        return -math.inf, math.inf
    if name != "float8_e4m3fn":  # for the others, MOST is the first number that is rounded to infinity
        most = math.nextafter(most, 0)
    return -most, most
