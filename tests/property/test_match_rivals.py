"""What `match` calls certain is right, where every part has rivals of its own shapes (`property.named_rivals`)."""

from __future__ import annotations

from collections import Counter

import pytest
from conftest import LONG
from property import named_rivals
from property.test_match import distinct, slots

from ckptfix.align.match import match
from ckptfix.names.slots import Slot

pytestmark = pytest.mark.campaign

SEEDS = range(900 if LONG else 150)
STEP = 20


@pytest.mark.parametrize("start", range(SEEDS.start, SEEDS.stop, STEP))
def test_what_is_certain_is_right_pair_by_pair(start: int) -> None:
    """In refused answers too: `--partial` writes the certain pairs of those."""
    for seed in range(start, start + STEP):
        one, other = named_rivals.pair(seed)
        if not (distinct(one) and distinct(other)):
            continue
        ours, theirs = ({slot.name: key for slot, key in side} for side in (one, other))
        for pair in match(slots(one), slots(other)).pairs:
            assert pair.instead or ours[pair.source] == theirs[pair.target], (seed, pair)
            assert pair.target not in pair.instead, (seed, pair)


def test_many_pairs_are_certain() -> None:
    """So that doubting all would not do."""
    found: Counter[bool] = Counter()
    for seed in range(100):
        one, other = named_rivals.pair(seed)
        found.update(not pair.instead for pair in match(slots(one), slots(other)).pairs)
    assert found[True] >= 1750, found


def test_order_and_place_alone_make_nothing_certain() -> None:
    """Of two equal convolutions one is numbered on one side, and the other is defined first."""
    one = listed("layers.0.zan", "layers.0.convs.0")
    other = listed("blocks.0.conv1", "blocks.0.conv2")
    assert not certain(one, other)


def listed(*rows: str, shape: tuple[int, ...] = (4, 4, 3, 3)) -> list[Slot]:
    return [Slot(f"{row}.weight", shape, "float32") for row in rows]


def certain(one: list[Slot], other: list[Slot]) -> dict[str, str]:
    return {pair.source: pair.target for pair in match(one, other).pairs if not pair.instead}


def test_equal_levels_of_a_way_up_may_be_counted_from_either_end() -> None:
    down, up = [f"down.{at}.conv" for at in range(3)], [f"up.{at}.conv" for at in range(3)]
    found = certain(listed(*down, *up), listed(*(name.replace("conv", "block") for name in (*down, *up))))
    assert set(found) == {f"down.{at}.conv.weight" for at in range(3)}


def test_a_level_with_a_shape_of_its_own_says_from_which_end_the_others_are_counted() -> None:
    def levels(name: str) -> list[Slot]:
        last = listed(f"up.2.{name}", shape=(2, 4, 3, 3))
        return [*listed(*(f"down.{at}.{name}" for at in range(3)), f"up.0.{name}", f"up.1.{name}"), *last]

    one, other = ([*levels(name), Slot(f"up.2.{name}_norm.weight", (2,), "float32")] for name in ("conv", "block"))
    assert len(certain(one, other)) == 7


def test_a_block_that_may_be_missing_in_the_middle() -> None:
    one = listed(*(f"layers.{at}.fc" for at in range(4)), shape=(4, 4))
    assert not certain(one, listed(*(f"blocks.{at}.lin" for at in (0, 1, 3)), shape=(4, 4)))
    assert not certain(one[:3], listed(*(f"blocks.{at}.lin" for at in (0, 2)), shape=(4, 4)))
    assert len(certain(one, listed(*(f"blocks.{at}.lin" for at in range(3)), shape=(4, 4)))) == 3


def test_a_list_of_one_block_is_not_what_stands_beside_it() -> None:
    """`proj` is in the list on one side, and beside it on the other."""
    found = certain(listed("layer.0.fc", "proj", shape=(4, 4)), listed("last", "layers.0.proj", shape=(4, 4)))
    assert not found
