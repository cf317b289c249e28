"""Whether a matching is right, judged by what models compute and by nothing that a person wrote down.

Whole models: the source's weights, renamed and loaded into a target that had others, must give the source's outputs.

Key by key: every tensor of a shape gets the same values in all styles of a family. Then all styles compute the same,
whichever key is which. Now one key at a time gets other values, and the outputs are that key's fingerprint: a key of
the source and a key of the target with the same fingerprint do the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from architectures.family import Family, Pair, Style, drawn, learned, randomise, seed_of, slots
from torch import Tensor, nn

from ckptfix.align.match import match
from ckptfix.errors import Refused
from ckptfix.names.slots import Slot

SAME = 1e-9
"""Outputs of equal models in float64 differ by less, as part of the largest output ..."""
OTHER = 1e-6
"""... and the scores of different ones by more."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a matcher says: source -> target, and whether it stands by that for all keys."""

    names: Mapping[str, str]
    complete: bool


Matcher = Callable[[Sequence[Slot], Sequence[Slot]], Answer]


@dataclass(frozen=True, slots=True)
class Judged:
    """What an answer is worth.

    Attributes:
        verdict: equal outputs; wrong, where a complete answer gives others or cannot be loaded; or refused.
        right, wrong: pairs that the answer has, and that fingerprints bear out or not.
        open: learned keys of the target that it leaves without a source.
    """

    verdict: Literal["equal", "wrong", "refused"]
    right: tuple[tuple[str, str], ...]
    wrong: tuple[tuple[str, str], ...]
    open: tuple[str, ...]


def outputs(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """Everything that `model`, made float64 and set to eval mode for good, returns for `inputs`, in one row."""
    given = (x.double() if x.is_floating_point() else x for x in inputs)
    with torch.no_grad():
        found = model.double().eval()(*given)
    parts = found if isinstance(found, tuple) else (found,)
    return torch.cat([part.flatten() for part in parts])


def distance(one: Tensor, other: Tensor) -> float:
    """Largest difference, as part of the largest value."""
    return float((one - other).abs().max() / one.abs().max())


def shared_values(shape: tuple[int, ...], fused: Mapping[int, int], *, other: bool = False) -> Tensor:
    """What every tensor of `shape` is filled with; `other` values make a fingerprint."""
    parts = 1 if other or not shape else fused.get(shape[0], 1)
    part = (shape[0] // parts, *shape[1:]) if shape else shape
    values = drawn(part, torch.Generator().manual_seed(seed_of(sorted(part) if len(part) == 2 else part, other)))
    return torch.cat([values] * parts) if parts > 1 else values


@cache
def fingerprints(family: Family, style: Style, depth: int) -> dict[str, Tensor]:
    """key -> outputs with this key alone changed; under "" those with none changed. float64."""
    model = style.build(depth).double().eval()
    inputs = family.inputs()
    state = {name: tensor for name, tensor in model.state_dict().items() if learned(name, tensor)}
    with torch.no_grad():
        for tensor in state.values():
            tensor.copy_(shared_values(tuple(tensor.shape), family.fused))
        found = {"": outputs(model, inputs)}
        for name, tensor in state.items():
            kept = tensor.clone()
            tensor.copy_(shared_values(tuple(tensor.shape), family.fused, other=True))
            found[name] = outputs(model, inputs)
            tensor.copy_(kept)
    return found


@cache
def counterparts(family: Family, source: Style, target: Style) -> dict[str, frozenset[str]]:
    """Each learned key of the source -> the keys of the target that do the same."""
    shapes = {
        style: {name: tensor.shape for name, tensor in style.build(family.depth).state_dict().items()}
        for style in (source, target)
    }
    theirs = fingerprints(family, target, family.depth)
    return {
        name: frozenset(
            other
            for other, print_ in theirs.items()
            if other and shapes[source][name] == shapes[target][other] and distance(mine, print_) < SAME
        )
        for name, mine in fingerprints(family, source, family.depth).items()
        if name
    }


def judge(pair: Pair, answer: Answer, *, seed: int = 1, weights: Mapping[str, Tensor] | None = None) -> Judged:
    """What `answer` is worth, as a matching of the pair's two models; the source has `weights`, or random ones."""
    source, target = randomise(pair.source(), seed), randomise(pair.target(), seed + 1)
    if weights is not None:
        source.load_state_dict(weights, strict=False)
    state, wanted = source.state_dict(), target.state_dict()
    right, wrong = sorted_out(counterparts(pair.family, pair.source_style, pair.target_style), answer.names)
    missing = open_keys(wanted, set(answer.names.values()))
    if not answer.complete:
        return Judged("refused", right, wrong, missing)
    try:
        target.load_state_dict({new: state[old] for old, new in answer.names.items()}, strict=False)
    except RuntimeError:
        return Judged("wrong", right, wrong, missing)
    same = not missing and distance(outputs(source, pair.inputs()), outputs(target, pair.inputs())) < SAME
    return Judged("equal" if same else "wrong", right, wrong, missing)


def sorted_out(
    meant: Mapping[str, frozenset[str]], names: Mapping[str, str]
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """The pairs of `names` that are right, and those that are wrong; of keys that are not learned, neither."""
    known = [(old, new) for old, new in names.items() if old in meant]
    return (
        tuple((old, new) for old, new in known if new in meant[old]),
        tuple((old, new) for old, new in known if new not in meant[old]),
    )


def open_keys(state: Mapping[str, Tensor], given: set[str]) -> tuple[str, ...]:
    """Learned keys that are not in `given`; a tied one is given where any of its names is."""
    filled = {state[name].data_ptr() for name in given if name in state}
    return tuple(name for name, tensor in state.items() if learned(name, tensor) and tensor.data_ptr() not in filled)


def by_structure(source: Sequence[Slot], target: Sequence[Slot]) -> Answer:
    """``ckptfix match --by structure``; pairs that it calls ambiguous are refused ones."""
    found = match(source, target, by="structure")
    return Answer({pair.source: pair.target for pair in found.pairs if not pair.instead}, found.complete)


def by_position(source: Sequence[Slot], target: Sequence[Slot]) -> Answer:
    """``ckptfix match --by position``."""
    try:
        found = match(source, target, by="position")
    except Refused:
        return Answer({}, complete=False)
    return Answer({pair.source: pair.target for pair in found.pairs if not pair.instead}, found.complete)


def zipped(source: Sequence[Slot], target: Sequence[Slot]) -> Answer:
    """The first key to the first, the second to the second: refused where a strict load would fail."""
    fits = [slot.shape for slot in source] == [slot.shape for slot in target]
    return Answer({one.name: other.name for one, other in zip(source, target, strict=True)} if fits else {}, fits)


def longest_suffix(source: Sequence[Slot], target: Sequence[Slot]) -> Answer:
    """To each key of the target, in order, the unused source key of its shape with the longest common suffix.

    Suffixes count whole dotted parts first, then characters; of equally long ones the first is taken.
    """
    unused = {slot.name: slot for slot in source}
    names: dict[str, str] = {}
    for slot in target:
        fitting = [name for name, other in unused.items() if other.shape == slot.shape]
        if fitting:
            best = max(fitting, key=lambda name: common_suffix(name, slot.name))
            names[best] = slot.name
            del unused[best]
    counted = ("num_batches_tracked", "position_ids")
    covered = set(names.values())
    return Answer(names, all(slot.name in covered or slot.name.endswith(counted) for slot in target))


def common_suffix(one: str, other: str) -> tuple[int, int]:
    """How many dotted parts, and how many characters, two names end with alike."""
    parts = equal_ends(one.split("."), other.split("."))
    return parts, equal_ends(one, other)


def equal_ends(one: Sequence[str], other: Sequence[str]) -> int:
    count = 0
    for left, right in zip(reversed(one), reversed(other), strict=False):
        if left != right:
            break
        count += 1
    return count


MATCHERS: dict[str, Matcher] = {
    "structure": by_structure,
    "position": by_position,
    "zip by order": zipped,
    "longest suffix": longest_suffix,
}


@dataclass(frozen=True, slots=True)
class Variant:
    """A pair that was made harder: other slots, and the names that its keys had before.

    Attributes:
        source, target: what the matcher is given.
        originals: name in `source` -> name in the pair's source.
        extra: names of the target that nothing in the source can fill.
        whole: whether a matching of all the others is what one would wish for.
    """

    name: str
    source: tuple[Slot, ...]
    target: tuple[Slot, ...]
    originals: Mapping[str, str]
    extra: frozenset[str] = frozenset()


def variants(pair: Pair, *, seed: int = 3) -> Iterator[Variant]:
    """The pair with a shuffled target, added heads, dropped blocks, wrapped and half-precision sources."""
    source, target = tuple(slots(pair.source().state_dict())), tuple(slots(pair.target().state_dict()))
    same = {slot.name: slot.name for slot in source}
    yield Variant("shuffled target", source, shuffled(target, seed), same)
    head = (Slot("aux_head.weight", (7, 13), "float32"), Slot("aux_head.bias", (7,), "float32"))
    yield Variant("added head", source, target + head, same, frozenset(slot.name for slot in head))
    if pair.family.shallower:
        fewer = tuple(slots(pair.target_style.build(pair.family.depth - 1).state_dict()))
        yield Variant("dropped block", source, fewer, same)
    for prefix in ("module.", "model."):
        moved = tuple(
            replace(slot, name=prefix + slot.name, tied=None if slot.tied is None else prefix + slot.tied)
            for slot in source
        )
        yield Variant(f"source under {prefix}", moved, target, {prefix + name: name for name in same})
    half = tuple(replace(slot, dtype="float16") if slot.dtype == "float32" else slot for slot in source)
    yield Variant("half-precision source", half, target, same)


def shuffled(target: Sequence[Slot], seed: int) -> tuple[Slot, ...]:
    """`target` in another order. What is tied stays so, under the name that now comes first."""
    order = list(target)
    random.Random(seed).shuffle(order)
    first: dict[str, str] = {}
    for slot in order:
        first.setdefault(slot.tied or slot.name, slot.name)
    owners = {slot.name: first[slot.tied or slot.name] for slot in order}
    return tuple(replace(slot, tied=None if owners[slot.name] == slot.name else owners[slot.name]) for slot in order)


def judge_variant(pair: Pair, variant: Variant, answer: Answer) -> Judged:
    """What `answer` is worth for `variant`, by the fingerprints of the pair itself."""
    names = {variant.originals[old]: new for old, new in answer.names.items()}
    right, wrong = sorted_out(counterparts(pair.family, pair.source_style, pair.target_style), names)
    full = pair.target().state_dict()
    wanted = {slot.name: full[slot.name] for slot in variant.target if slot.name not in variant.extra}
    missing = open_keys(wanted, {new for _, new in right})
    lies = wrong or any(new in variant.extra for new in answer.names.values())
    return Judged("wrong" if lies else "refused" if missing else "equal", right, wrong, missing)
