"""Matching by structure over models that name the same architecture differently, judged by what they compute.

Nothing here says which key is which: see architectures/judge.py. First come tests of that judge itself.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from architectures.corpus import REAL, RealModel
from architectures.families import FAMILIES, PAIRS
from architectures.family import Family, Pair, Style, learned, pairs, randomise, slots
from architectures.judge import (
    OTHER,
    SAME,
    Answer,
    Judged,
    by_position,
    by_structure,
    counterparts,
    distance,
    fingerprints,
    judge,
    judge_variant,
    longest_suffix,
    outputs,
    shuffled,
    variants,
    zipped,
)
from conftest import CORPUS, LONG

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("match pairs")]  # each pair is matched once

STYLES = [
    pytest.param(family, style, id=f"{family.name}: {style.name}") for family in FAMILIES for style in family.styles
]
SWAPS = 30 if LONG else 12
"""Tried in each model."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These models are so small that threads only wait for each other, many times as long as the work takes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def by_name(pair: Pair) -> str:
    return pair.name


def tied(family: Family, style: Style) -> dict[str, str]:
    """key -> the first name of the same tensor."""
    return {slot.name: slot.tied or slot.name for slot in slots(style.build(family.depth).state_dict())}


def alike(family: Family, one: str, other: str) -> bool:
    """Whether two keys differ only in words that play the same part."""
    return any(other in (one.replace(a, b), one.replace(b, a)) for a, b in family.symmetric)


@pytest.mark.campaign
@pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])
def test_all_styles_compute_the_same_and_each_key_shows(family: Family) -> None:
    plain = fingerprints(family, family.styles[0], family.depth)[""]
    for style in family.styles:
        prints = dict(fingerprints(family, style, family.depth))
        assert distance(plain, prints.pop("")) < SAME, style.name
        assert all(distance(plain, changed) > OTHER for changed in prints.values()), style.name
        assert all(changed.isfinite().all() for changed in prints.values()), style.name


@pytest.mark.campaign
@pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])
def test_each_key_has_one_counterpart(family: Family) -> None:
    """But for what is tied, or plays the same part by design."""
    for pair in pairs(family):
        if pair.expect == "refused":
            continue
        owner = tied(family, pair.target_style)
        for name, others in counterparts(family, pair.source_style, pair.target_style).items():
            first, *more = sorted({owner[other] for other in others})
            assert all(alike(family, first, other) for other in more), (pair.name, name, others)


@pytest.mark.campaign
@pytest.mark.parametrize(("family", "style"), STYLES)
def test_any_two_tensors_that_change_places_change_the_outputs(family: Family, style: Style) -> None:
    model, inputs = randomise(style.build(family.depth), 1).double(), family.inputs()
    owner = tied(family, style)
    state = {key: value for key, value in model.state_dict().items() if learned(key, value) and owner[key] == key}
    swaps = [
        (one, other)
        for one in state
        for other in state
        if one < other and state[one].shape == state[other].shape and not alike(family, one, other)
    ]
    plain = outputs(model, inputs)
    for one, other in random.Random(1).sample(swaps, min(SWAPS, len(swaps))):
        kept = state[one].clone(), state[other].clone()
        state[one].copy_(kept[1])
        state[other].copy_(kept[0])
        assert distance(plain, outputs(model, inputs)) > OTHER, (one, other)
        state[one].copy_(kept[0])
        state[other].copy_(kept[1])
    assert distance(plain, outputs(model, inputs)) == 0


def test_the_judge_sees_one_wrong_pair_among_many() -> None:
    pair = next(pair for pair in PAIRS if pair.family.name == "transformer encoder" and pair.expect == "match")
    meant = counterparts(pair.family, pair.source_style, pair.target_style)
    names = {old: min(new) for old, new in meant.items()}
    assert judge(pair, Answer(names, complete=True)).verdict == "equal"
    one, other = (f"bert.encoder.layer.{layer}.attention.self.key.bias" for layer in (0, 1))
    names[one], names[other] = names[other], names[one]
    judged = judge(pair, Answer(names, complete=True))
    assert judged.verdict == "wrong" and dict(judged.wrong) == {one: names[one], other: names[other]}
    del names[one]
    assert judge(pair, Answer(names, complete=True)).verdict == "wrong"
    assert judge(pair, Answer(names, complete=False)).verdict == "refused"


@cache
def structured(pair: Pair) -> Judged:
    """What matching by structure is worth for `pair`."""
    return judge(pair, by_structure(slots(pair.source().state_dict()), slots(pair.target().state_dict())))


@pytest.mark.campaign
@pytest.mark.parametrize("pair", PAIRS, ids=by_name)
def test_structure_is_right_or_refuses(pair: Pair) -> None:
    judged = structured(pair)
    assert not judged.wrong
    assert judged.verdict in ("equal", "refused")
    assert pair.expect == "match" or judged.verdict == "refused"


@pytest.mark.campaign
def test_structure_matches_most_pairs_whole() -> None:
    found = Counter(structured(pair).verdict for pair in PAIRS if pair.expect == "match")
    assert len({pair.family.name for pair in PAIRS}) >= 12
    assert found["equal"] >= WHOLE, found


WHOLE = 181
"""Of the pairs that can be matched, this many are, with no key left."""


@pytest.mark.campaign
def test_order_and_suffixes_do_worse() -> None:
    """On these pairs the simple ways fail often, so that a right answer is not a matter of course."""
    matchable = [pair for pair in PAIRS if pair.expect == "match"][::3]
    for matcher, most in ((zipped, 0.5), (longest_suffix, 0.6)):
        verdicts = Counter(
            judge(pair, matcher(slots(pair.source().state_dict()), slots(pair.target().state_dict()))).verdict
            for pair in matchable
        )
        assert verdicts["equal"] < most * len(matchable), verdicts


def some_pairs() -> list[Pair]:
    """Two of each family, other styles in each; all of them in a long run."""
    chosen = []
    for number, family in enumerate(FAMILIES):
        matchable = [pair for pair in pairs(family) if pair.expect == "match"]
        chosen += matchable if LONG else random.Random(number).sample(matchable, 2)
    return chosen


@pytest.mark.campaign
@pytest.mark.parametrize("pair", some_pairs(), ids=by_name)
def test_harder_variants_are_right_or_refused(pair: Pair) -> None:
    """Whole again where only a prefix, a dtype or an added head is new."""
    for variant in variants(pair):
        judged = judge_variant(pair, variant, by_structure(variant.source, variant.target))
        assert judged.verdict != "wrong", (variant.name, judged.wrong)
        if variant.name in EASY and structured(pair).verdict == "equal":
            assert judged.verdict == "equal", (variant.name, judged.open)


EASY = ("added head", "source under module.", "source under model.", "half-precision source")


@pytest.mark.parametrize("pair", some_pairs(), ids=by_name)
def test_position_refuses_a_shuffled_target(pair: Pair) -> None:
    target = shuffled(slots(pair.target().state_dict()), 3)
    assert not by_position(slots(pair.source().state_dict()), target).complete


def by_file(real: RealModel) -> str:
    return f"{real.family.name}, {real.path.rpartition('/')[2]}"


@pytest.mark.sampled(8, test_all=10_000)
@pytest.mark.parametrize("back", [False, True], ids=["from the file", "to the file"])
@pytest.mark.parametrize("real", REAL, ids=by_file)
def test_files_of_other_people_and_their_twins(real: RealModel, back: bool) -> None:
    if not CORPUS.exists():
        pytest.skip("the corpus of real files is not here (../shared/corpus)")
    state = real.state(CORPUS)
    pair = real.pair
    known = pair.source().state_dict()
    assert set(state) <= set(known) and {name for name in known if learned(name, known[name])} <= set(state)
    assert all(state[name].shape == known[name].shape for name in state)
    if back:
        pair = Pair(pair.family, pair.target_style, pair.source_style)
        judged = judge(pair, by_structure(slots(pair.source().state_dict()), slots(state)))
    else:
        judged = judge(pair, by_structure(slots(state), slots(pair.target().state_dict())), weights=state)
    assert not judged.wrong and judged.verdict != "wrong"
    assert judged.verdict == "equal" or real.pair.family.name in REFUSED_REAL, judged.open


REFUSED_REAL = ("actor and critic", "critic and actor")
"""Files where names leave it open which part is which, so that a matching may refuse: it must not guess."""
