"""Tied tensors: a tensor with several names is a set of names, and none of them is first.

If all names of a shape are one tensor, and the other side has as many of this shape, every name has a counterpart, and
names are matched one by one, as for tensors that are not tied. Otherwise each tensor is matched under one name: one
that the other side has too, or that of a module without further tensors. The order of definition does not matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptfix.align.result import MatchedPair, Matching
from ckptfix.names.slots import Slot

Sides = tuple[Sequence[Slot], Sequence[Slot]]


def as_sets(source: Sequence[Slot], target: Sequence[Slot]) -> Sides:
    """Return both sides with ties removed where every name has a counterpart, and otherwise with chosen owners."""
    sides = source, target
    if not any(slot.tied for side in sides for slot in side):
        return sides
    counts = [Counter(slot.shape for slot in side) for side in sides]
    tensors = [Counter(slot.shape for slot in side if slot.tied is None) for side in sides]
    level = {
        shape
        for shape, count in counts[0].items()
        if counts[1][shape] == count and all(own[shape] in (1, count) for own in tensors)
    }
    names = [{slot.name for slot in side} for side in sides]
    return _rooted(source, level, names[1]), _rooted(target, level, names[0])


def _rooted(side: Sequence[Slot], level: set[tuple[int, ...]], others: set[str]) -> Sequence[Slot]:
    groups: dict[str, list[Slot]] = {}
    for slot in side:
        groups.setdefault(slot.tied or slot.name, []).append(slot)
    modules = Counter(slot.name.rpartition(".")[0] for slot in side)
    owner: dict[str, str | None] = {}
    for group in groups.values():
        if len(group) > 1:
            first = min(group, key=lambda slot: (slot.name not in others, modules[slot.name.rpartition(".")[0]]))
            free = first.shape in level
            owner |= {slot.name: None if free or slot is first else first.name for slot in group}
    return [replace(slot, tied=owner[slot.name]) if slot.name in owner else slot for slot in side]


def settled(matching: Matching, source: Sequence[Slot]) -> Matching:
    """Return the matching without doubts among the names of one tensor of the source, if no other has its shape."""
    counts = Counter(slot.shape for slot in source)
    tensors = Counter(slot.shape for slot in source if slot.tied is None)
    interchangeable = {slot.name for slot in source if tensors[slot.shape] == 1 < counts[slot.shape]}
    if not interchangeable:
        return matching
    sources = {pair.target: pair.source for pair in matching.pairs}

    def sure(pair: MatchedPair) -> MatchedPair:
        names = (pair.source, *map(sources.get, pair.instead))
        harmless = all(name in interchangeable for name in names)
        return replace(pair, instead=()) if pair.instead and harmless else pair

    return replace(matching, pairs=tuple(map(sure, matching.pairs)))


def of_untied(proven: Mapping[str, str], before: Sides) -> Mapping[str, str]:
    """Return the `proven` pairs whose tensors have one name on each side: values cannot tell names of one tensor."""
    several = [{name for slot in side if slot.tied for name in (slot.name, slot.tied)} for side in before]
    return {ours: theirs for ours, theirs in proven.items() if ours not in several[0] and theirs not in several[1]}
