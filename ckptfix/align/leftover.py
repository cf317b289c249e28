"""Single left-over parameters: one beside certain siblings belongs to the one that is left beside their counterparts.

DeepSeek's ``ffn.gate.bias`` is ``mlp.gate.e_score_correction_bias`` in transformers: ``gate.weight`` shows which gates
belong together, and each has one parameter more. If both have the same name, no sibling is needed: fairseq's ESM-2 has
``lm_head.bias`` beside ``lm_head.weight``, and transformers has the latter in a module of its own. Such pairs count
only if they leave nothing open in the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckptfix.align import roles
from ckptfix.align.result import MatchedPair, Matching
from ckptfix.align.units import number_kind, words
from ckptfix.names.slots import Slot

WHY = "left over beside certain ones"

SCALES, SHIFTS = frozenset(["weight", "gamma", "scale", "g", "kernel"]), frozenset(["bias", "beta", "shift", "b"])
"""Words for what multiplies and for what is added: they are never paired."""


def with_leftovers(matching: Matching, source: Sequence[Slot], target: Sequence[Slot]) -> Matching:
    """Return the matching with the tensors that are left over paired, if they all can be and nothing is ambiguous."""
    count = len(matching.left)
    if not count or count != len(matching.missing) or matching.ambiguous:
        return matching
    slots = {slot.name: slot for slot in source}, {slot.name: slot for slot in target}
    places = _places(matching)
    found: dict[str, str] = {}
    for ours, theirs in _alone(matching, places):
        one, other = slots[0][ours], slots[1][theirs]
        if one.shape != other.shape or number_kind(one.dtype) != number_kind(other.dtype) or _contrary(ours, theirs):
            return matching
        found[ours] = theirs
    if len(found) != count or len(set(found.values())) != count:
        return matching
    pairs = {pair.source: pair for pair in matching.pairs}
    pairs |= {ours: MatchedPair(ours, theirs, 0.9, WHY) for ours, theirs in found.items()}
    ordered = tuple(pairs[slot.name] for slot in source if slot.name in pairs)
    return replace(matching, pairs=ordered, rules=(), left=(), missing=())


def _places(matching: Matching) -> dict[str, str]:
    """Return module -> the module of the other side that has the counterparts of all its tensors, and no others."""
    to: tuple[dict[str, set[str]], dict[str, set[str]]] = ({}, {})
    for pair in matching.pairs:
        for one, other in zip(_above(pair.source), _above(pair.target), strict=False):
            to[0].setdefault(one, set()).add(other)
            to[1].setdefault(other, set()).add(one)
    return {
        one: other
        for one, others in to[0].items()
        if len(others) == 1 and len(to[1][other := next(iter(others))]) == 1
    }


def _above(name: str) -> Iterator[str]:
    """Yield the module of a tensor, and the module that contains it."""
    module = name.rpartition(".")[0]
    yield module
    yield module.rpartition(".")[0]


def _alone(matching: Matching, places: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of left-over tensors of one name, and those alone in their module, or in the one around it."""
    done = set(matching.left).intersection(matching.missing)
    yield from ((name, name) for name in done)
    for depth in (0, 1):
        rows: tuple[dict[str, list[str]], dict[str, list[str]]] = ({}, {})
        for side, names in zip(rows, (matching.left, matching.missing), strict=True):
            for name in names:
                if name not in done:
                    side.setdefault([*_above(name)][depth], []).append(name)
        for module, ours in rows[0].items():
            theirs = rows[1].get(places.get(module, ""), ()) if module else ()
            if len(ours) == len(theirs) == 1:
                done |= {ours[0], theirs[0]}
                yield ours[0], theirs[0]


def _contrary(ours: str, theirs: str) -> bool:
    """Return whether the last words of two names contradict each other."""
    said = [frozenset(words(name.rpartition(".")[2])) for name in (ours, theirs)]
    if any(one & SCALES and other & SHIFTS for one, other in (said, said[::-1])):
        return True
    return roles.score(roles.parts([ours])[0], roles.parts([theirs])[0]) < 0
