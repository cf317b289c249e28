"""Whether names bear out where a module is defined: the order of definition alone makes nothing certain."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ckptfix.align.groups import Group, Sides
from ckptfix.align.roles import Part, singular
from ckptfix.align.units import Side, Unit, counted, words


def placed_by_name(side: Side, groups: Sequence[Group], parts: Sequence[Part]) -> list[bool]:
    """For each of `groups`, among which a choice is to be made, whether its name shows where it belongs.

    Numbers do that which count up as modules are defined; so does a word or a block of its own that it shares with the
    module defined before or after it: ``expand_bn`` is the norm of ``expand_conv``. Where only one group is without,
    it belongs where no other does. Of two norms whose names say nothing, the first defined need not run first.
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
    """The paths of the modules that it stands in; a list of them is none."""
    components = unit.path.split(".")
    return {".".join(components[:count]) for count in range(1, len(components)) if not components[count].isdecimal()}


def untold(sides: Sides, parts: Sequence[Sequence[Part]]) -> Sides:
    """The groups of each side for which no word says which one of the other side they are."""
    told = [[singular(one, other) for other in parts[1]] for one in parts[0]]
    return (
        [group for group, row in zip(sides[0], told, strict=True) if not any(row)],
        [group for group, column in zip(sides[1], zip(*told, strict=True), strict=True) if not any(column)],
    )
