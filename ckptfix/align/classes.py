"""Which modules may be each other's counterpart by shapes: keys of classes, the strictest first."""

from __future__ import annotations

import math
from collections.abc import Hashable

from ckptfix.align.units import Unit


def whole(unit: Unit) -> Hashable:
    return unit.signature


def main(unit: Unit) -> Hashable:
    """For what is left: a module with or without a bias, a parameter that one side holds in its own module."""
    slot = unit.slots.get("weight") or unit.slots.get("")
    if slot is None or (not unit.slots.get("weight") and len(slot.shape) == 2 and slot.shape[0] == slot.shape[1]):
        return ()  # a square matrix on its own may be the transpose of a Linear's weight
    return ("weight", slot.shape)


def vector(unit: Unit) -> Hashable:
    """For what is then left: a vector on its own, whatever it is called (a norm's ``scale``, a lone bias)."""
    if len(unit.slots) != 1:
        return ()
    (slot,) = unit.slots.values()
    return ("vector", slot.shape) if len(slot.shape) == 1 else ()


def flat(unit: Unit) -> Hashable:
    if len(unit.slots) != 1:
        return tuple(sorted((leaf, math.prod(slot.shape)) for leaf, slot in unit.slots.items()))
    return ("one", math.prod(next(iter(unit.slots.values())).shape))
