"""Which modules may be each other's counterpart by shapes: keys of classes, the strictest first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from ckptfix.align.units import Unit


def whole(unit: Unit) -> Hashable:
    """All that a module has; a matrix on its own is of the same class as a module that has nothing else."""
    if len(unit.slots) == 1 and unit.slots.keys() <= {"", "weight"}:
        return main(unit) or unit.signature
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


def reshaped(one: Sequence[Unit], other: Sequence[Unit]) -> frozenset[Hashable]:
    """The keys by `flat` of which the two sides have other shapes: there, equal shapes decide nothing alone."""
    sides = (Counter(unit.signature for unit in one), Counter(unit.signature for unit in other))
    unlike = {signature for signature in sides[0] | sides[1] if sides[0][signature] != sides[1][signature]}
    return frozenset(flat(unit) for unit in (*one, *other) if unit.signature in unlike)


def without(key: Callable[[Unit], Hashable], held: frozenset[Hashable]) -> Callable[[Unit], Hashable]:
    """`key`, and nothing for the modules that `held` has by `flat`."""
    return (lambda unit: () if flat(unit) in held else key(unit)) if held else key
