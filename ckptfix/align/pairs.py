"""From pairs of modules to pairs of tensors: leaves, optional buffers, and names of tied tensors."""

from __future__ import annotations

from collections.abc import Sequence

from ckptfix.align.result import MatchedPair, Matching, Skipped
from ckptfix.align.units import ModelSide, Unit
from ckptfix.dataclass import dataclass
from ckptfix.names.slots import Slot

PROOF = "same values"
"""Reason to pair two modules whose tensors have equal bytes; it overrides all others."""


@dataclass(slots=True)
class Link:
    """A pair of units, with rivals of the second in `instead`.

    Attributes:
        firm: whether words that apply to no other unit of the block support it.
        turned: whether the numbers of the two paths may count different things, such as layers and experts.
    """

    one: Unit
    other: Unit
    confidence: float
    why: str
    instead: tuple[Unit, ...] = ()
    firm: bool = False
    turned: bool = False


def matching(
    links: Sequence[Link], sides: tuple[ModelSide, ModelSide], source: Sequence[Slot], target: Sequence[Slot]
) -> Matching:
    """Return the matching of the tensors of `sides` that follows from `links`, without rules."""
    pairs: dict[str, MatchedPair] = {}
    skipped: tuple[dict[str, Skipped], dict[str, Skipped]] = ({}, {})
    for link in links:
        for leaf, slot in link.one.slots.items():
            twin = _twin(link.one, leaf, link.other)
            if twin is None:
                continue
            instead = tuple(rival.name for unit in link.instead if (rival := _twin(link.one, leaf, unit)) is not None)
            shape = None if slot.shape == twin.shape else twin.shape
            pairs[slot.name] = MatchedPair(
                slot.name, twin.name, link.confidence, _why(link, slot, twin), instead, shape
            )
        theirs = {leaf: slot for leaf, slot, _ in link.other.optional}
        for leaf, slot, _ in link.one.optional:
            twin = theirs.get(leaf)
            if twin is not None and twin.shape == slot.shape:
                pairs[slot.name] = MatchedPair(slot.name, twin.name, link.confidence, _why(link, slot, twin))
    taken = {pair.target for pair in pairs.values()}
    _pair_aliases(sides, pairs, taken)
    taken = {pair.target for pair in pairs.values()}
    for which, units, done in ((0, sides[0].units, pairs.keys()), (1, sides[1].units, taken)):
        for unit in units:
            for _, slot, rule in unit.optional:
                if slot.name not in done:
                    skipped[which][slot.name] = Skipped(slot.name, rule)
    for which, aliases, done in ((0, sides[0].aliases, pairs.keys()), (1, sides[1].aliases, taken)):
        for slot in aliases:
            if slot.name not in done:
                skipped[which][slot.name] = Skipped(slot.name, "tied", tied=True)
    ordered = tuple(pairs[slot.name] for slot in source if slot.name in pairs)
    return Matching(
        "structure",
        ordered,
        (),
        tuple(slot.name for slot in source if slot.name not in pairs and slot.name not in skipped[0]),
        tuple(slot.name for slot in target if slot.name not in taken and slot.name not in skipped[1]),
        tuple(skipped[0].values()),
        tuple(skipped[1].values()),
    )


def _twin(one: Unit, leaf: str, other: Unit) -> Slot | None:
    """Return the slot of `other` for `leaf` of `one`; a lone parameter is paired with a lone weight."""
    found = other.slots.get(leaf)
    if found is None and leaf in ("", "weight"):
        found = other.slots.get("weight" if leaf == "" else "")
    if found is None and len(one.slots) == len(other.slots) == 1:
        found = next(iter(other.slots.values()))
    return found


def _pair_aliases(sides: tuple[ModelSide, ModelSide], pairs: dict[str, MatchedPair], taken: set[str]) -> None:
    """Pair names of tied tensors with the target's names for the same tie, or with a tensor that it does not tie."""
    waiting: dict[str | None, list[Slot]] = {}
    for slot in sides[1].aliases:
        waiting.setdefault(slot.tied, []).append(slot)
    free = [slot for unit in sides[1].units for slot in unit.slots.values() if slot.name not in taken]
    for slot in sides[0].aliases:
        primary = pairs.get(slot.tied or "")
        if primary is None:
            continue
        if waiting.get(primary.target):
            twin = waiting[primary.target].pop(0)
            pairs[slot.name] = MatchedPair(slot.name, twin.name, primary.confidence, "tied", primary.instead)
            continue
        fitting = [other for other in free if other.shape == slot.shape]
        if len(fitting) == 1:
            free.remove(fitting[0])
            pairs[slot.name] = MatchedPair(slot.name, fitting[0].name, 0.9, "tied in the source")


def _why(link: Link, slot: Slot, twin: Slot) -> str:
    """Return the reason for a pair. A pair due to a unique shape or equal bytes may still have the same name."""
    return "same name" if slot.name == twin.name and link.why in ("only shape", PROOF) else link.why
