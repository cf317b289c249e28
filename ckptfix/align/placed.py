"""Evidence from names for the place of a module, as definition order alone makes nothing certain."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ckptfix.align.groups import Sides, UnitGroup
from ckptfix.align.roles import RoleEvidence, singular
from ckptfix.align.units import ModelSide, Unit, counted, words


def placed_by_name(side: ModelSide, groups: Sequence[UnitGroup], parts: Sequence[RoleEvidence]) -> list[bool]:
    """Return for each of the rival `groups` whether its name shows where it belongs.

    Numbers show it if they count up as modules are defined. So does a word, or a block of its own, that it shares with
    the module defined before or after it: ``expand_bn`` is the norm of ``expand_conv``. If only one group shows
    nothing, it belongs in the remaining place. If the names of two norms show nothing, the first defined need not run
    first.
    """
    order = sorted(groups, key=lambda group: group.units[0].first)
    if all(counted(one.label, other.label) for one, other in pairwise(order)):
        return [True] * len(groups)
    homes = [_homes(group.units[0]) for group in groups]
    found = []
    for group, part, home in zip(groups, parts, homes, strict=True):
        own = {front for front in home if sum(front in other for other in homes) == 1}
        near = [unit for unit in side.beside(group.units[0]) if unit is not None]
        found.append(any(part.terms.intersection(words(unit.path)) or own & _homes(unit) for unit in near))
    return found if found.count(False) > 1 else [True] * len(groups)


def _homes(unit: Unit) -> set[str]:
    """Return the paths of the modules that contain it, except lists of modules."""
    components = unit.path.split(".")
    return {".".join(components[:count]) for count in range(1, len(components)) if not components[count].isdecimal()}


def untold(sides: Sides, parts: Sequence[Sequence[RoleEvidence]]) -> Sides:
    """Return the groups of each side that no word connects with a group of the other side."""
    told = [[singular(one, other) for other in parts[1]] for one in parts[0]]
    return (
        [group for group, row in zip(sides[0], told, strict=True) if not any(row)],
        [group for group, column in zip(sides[1], zip(*told, strict=True), strict=True) if not any(column)],
    )
