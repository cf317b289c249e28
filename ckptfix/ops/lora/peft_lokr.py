"""The factors into which PEFT cuts a weight for LoKr: its configuration has one number for all modules."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from ckptfix.errors import Refused

Shape = tuple[int, ...]


def factorization(size: int, factor: int) -> tuple[int, int]:
    """Return two factors of a size, the smaller first (peft ``tuners/lycoris_utils.py factorization``)."""
    if factor > 0 and size % factor == 0:
        other = size // factor
        return (factor, other) if factor <= other else (other, factor)
    most = size if factor == -1 else factor
    small, large = 1, size
    length = small + large
    while small < large:
        new = small + 1
        while size % new:
            new += 1
        other = size // new
        if new + other > length or new > most:
            break
        small, large, length = new, other, new + other
    return (small, large) if small <= large else (large, small)


def peft_lokr(shapes: Mapping[Any, Shape], name: str) -> tuple[int, int]:
    """Return the rank and the decompose_factor with which PEFT makes tensors of these shapes.

    Args:
        shapes: role -> shape.

    Raises:
        Refused: there are none.
    """
    one, two = _size(shapes, "1"), _size(shapes, "2")
    rows, columns = one[0] * two[0], one[1] * two[1]
    rank = next((shapes[role][0] for role in ("w1_b", "w2_b") if role in shapes), None)
    whole = [number for number in "12" if f"w{number}" in shapes]
    most = max(two)
    stated = rank if rank is not None else (most + 1) // 2
    fits = [
        factor for factor in (-1, one[0], one[1])
        if (factorization(rows, factor)[0], factorization(columns, factor)[0]) == one
    ]  # fmt: skip
    # PEFT decides by the rank whether a factor is whole (tuners/lokr/layer.py update_layer).
    second = ("2" in whole) == (stated >= most / 2)
    first = "1" in whole or stated < max(one) / 2
    if not fits or not second or not first:
        shown = " and ".join(f"{rows} x {columns}" for rows, columns in (one, two))
        raise Refused(f"{name}: PEFT does not make a LoKr with the factors {shown} of rank {stated}",
                      hint="merge it with lora merge, or --to kohya|comfy")  # fmt: skip
    return stated, fits[0]


def _size(shapes: Mapping[Any, Shape], number: str) -> tuple[int, int]:
    if f"w{number}" in shapes:
        shape = shapes[f"w{number}"]
        return shape[0], shape[1]
    up, down = shapes[f"w{number}_a"], shapes[f"w{number}_b"]
    if f"t{number}" in shapes:
        return up[1], down[1]
    return up[0], prod(down[1:])
