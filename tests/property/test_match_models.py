"""A slice of the campaign of `campaigns.match_answers`: random models whose true renaming is known."""

from __future__ import annotations

import pytest
from campaigns.match_answers import answered
from campaigns.match_models import pair
from conftest import LONG

SEEDS = range(2000 if LONG else 200)
STEP = 20


@pytest.mark.campaign
@pytest.mark.parametrize("start", range(SEEDS.start, SEEDS.stop, STEP))
def test_a_complete_answer_is_the_true_one(start: int) -> None:
    found = answered(range(start, start + STEP))
    assert not found.wrong
    assert LONG or not found.slips


@pytest.mark.campaign
@pytest.mark.parametrize("start", range(0, 2000 if LONG else 100, STEP))
def test_words_that_say_nothing_make_nothing_certain(start: int) -> None:
    found = answered(range(start, start + STEP), "mixed")
    assert not found.wrong
    assert LONG or not found.slips


FOUND = (11027, 16938, 24148, 85754, 87105, 88993, 89226, 95532, 96610, 98719, 98888, 99449, 91228, 5556,
         10968, 11320, 23468, 50620, 80619, 49029, 13793, 900068, 906191,
         443194, 448356, 943769, 968061, 996801)  # fmt: skip
"""Seeds of models of which a complete answer, or a certain pair, was wrong once."""


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("seed", FOUND)
def test_nothing_certain_is_wrong(seed: int) -> None:
    assert not answered([seed]).pairs[False]


MIXED = (76, 136, 222, 230, 448, 774, 877, 1020, 1318, 1831, 1890, 1951, 5129,
         980334, 980390, 981532, 982849)  # fmt: skip
"""The same of those of which some parts have words that say nothing."""


@pytest.mark.parametrize("seed", MIXED)
def test_what_each_side_has_no_word_for_may_be_any(seed: int) -> None:
    assert not answered([seed], "mixed").pairs[False]


@pytest.mark.campaign
def test_many_are_answered() -> None:
    """So that refusing all would not do."""
    found = answered(range(100))
    assert found.ends["right"] >= 20, found
    assert found.pairs[True] >= 2500, found


def test_models_are_the_same_in_every_run_and_have_each_tensor_on_both_sides() -> None:
    for seed in range(40):
        one, other = pair(seed)
        assert (one, other) == pair(seed)
        keys = [sorted((key, slot.shape) for slot, key in side) for side in (one, other)]
        assert keys[0] == keys[1]
