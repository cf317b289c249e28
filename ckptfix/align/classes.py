"""Classes of modules that may be counterparts by shape: functions that return a class key, strictest first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from ckptfix.align.units import Unit


def whole(unit: Unit) -> Hashable:
    """Return a key for all tensors of a module; a matrix by itself has the key of a module with just that matrix."""
    if len(unit.slots) == 1 and unit.slots.keys() <= {"", "weight"}:
        return main(unit) or unit.signature
    return unit.signature


def main(unit: Unit) -> Hashable:
    """Return a key for what is left then: modules with or without a bias, and parameters outside a module."""
    slot = unit.slots.get("weight") or unit.slots.get("")
    if slot is None or (not unit.slots.get("weight") and len(slot.shape) == 2 and slot.shape[0] == slot.shape[1]):
        return ()  # a square matrix by itself may be the transpose of a Linear's weight
    return ("weight", slot.shape)


def vector(unit: Unit) -> Hashable:
    """Return a key for what is left then: single vectors under any name (a norm's ``scale``, a lone bias)."""
    if len(unit.slots) != 1:
        return ()
    (slot,) = unit.slots.values()
    return ("vector", slot.shape) if len(slot.shape) == 1 else ()


def flat(unit: Unit) -> Hashable:
    if len(unit.slots) != 1:
        return tuple(sorted((leaf, math.prod(slot.shape)) for leaf, slot in unit.slots.items()))
    return ("one", math.prod(next(iter(unit.slots.values())).shape))


def reshaped(one: Sequence[Unit], other: Sequence[Unit]) -> frozenset[Hashable]:
    """Return the keys by `flat` for which the two sides have different shapes, so equal shapes alone decide nothing."""
    sides = (Counter(unit.signature for unit in one), Counter(unit.signature for unit in other))
    unlike = {signature for signature in sides[0] | sides[1] if sides[0][signature] != sides[1][signature]}
    return frozenset(flat(unit) for unit in (*one, *other) if unit.signature in unlike)


def without(key: Callable[[Unit], Hashable], held: frozenset[Hashable]) -> Callable[[Unit], Hashable]:
    """Return `key`, changed to return an empty key for the modules whose key by `flat` is in `held`."""
    return (lambda unit: () if flat(unit) in held else key(unit)) if held else key
