"""Groups of modules that repeat, how they are split and levelled, and which of their numbers count what."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ckptfix.align.depth import same_depth
from ckptfix.align.groups import MOST, Effort, UnitGroup, alike, groups
from ckptfix.align.groups import levelled as levelled_with
from ckptfix.align.levels import surroundings, turned
from ckptfix.align.match import match
from ckptfix.align.units import ModelSide, Unit, side
from ckptfix.names.slots import Slot


def of(names: Iterable[str], shape: tuple[int, ...] = (2,)) -> ModelSide:
    return side([Slot(f"{name}.weight", shape, "float32") for name in names])


def grouped(*names: str) -> list[UnitGroup]:
    return groups(of(names).units)


def levelled(one: list[UnitGroup], other: list[UnitGroup]) -> list[tuple[list[UnitGroup], list[UnitGroup]]]:
    return levelled_with(one, other, Effort())


def paths(units: Iterable[Unit]) -> list[str]:
    return [unit.path for unit in units]


def grid(text: str, outer: int, inner: int) -> list[str]:
    return [text.format(n=one, m=two) for one in range(outer) for two in range(inner)]


def test_a_group_is_in_the_order_of_its_numbers() -> None:
    (group,) = grouped("a.10", "a.9", "a.2")
    assert (group.text, paths(group.units)) == ("a.{}", ["a.2", "a.9", "a.10"])
    assert not group.in_order and group.backwards


def test_numbers_that_go_along_are_one_level() -> None:
    (group,) = grouped("x0.fc4_1", "x1.fc4_1", "x0.fc5_2", "x1.fc5_2")
    assert group.nesting[0] == 2
    assert group.numbers == [(0, 4), (0, 5), (1, 4), (1, 5)]


def test_a_label_shows_the_numbers_that_do_not_vary() -> None:
    (group,) = grouped("h.0.ln_1", "h.1.ln_1")
    assert group.label == "h.{}.ln_1"


@pytest.mark.parametrize(
    ("one", "other", "like"),
    [
        (grid("a.{n}.{m}", 2, 3), grid("b.{n}.{m}", 2, 3), True),
        (grid("a.{n}.{m}", 2, 3), grid("b.{n}.{m}", 3, 2), False),
        (grid("a.{n}.{m}", 2, 3), [f"b.{at}" for at in range(6)], True),
        (grid("a.{n}.{m}", 2, 3), [f"b.{at}" for at in range(5)], False),
    ],
)
def test_which_groups_can_go_together(one: list[str], other: list[str], like: bool) -> None:
    assert alike(grouped(*one)[0], grouped(*other)[0]) is like


def test_one_group_is_split_where_the_other_side_has_two() -> None:
    ways = levelled(grouped(*grid("h.{n}.norm{m}", 5, 2)), grouped(*grid("l.{n}.a", 5, 1), *grid("l.{n}.b", 5, 1)))
    assert [[group.text for group in left] for left, _ in ways] == [["h.{}.norm0", "h.{}.norm1"]]


def test_all_ways_with_the_fewest_splits_are_found() -> None:
    ways = levelled(grouped(*grid("h.{n}.norm{m}", 2, 2)), grouped("a.0", "a.1", "b.0", "b.1"))
    assert sorted(left[0].text for left, _ in ways) == ["h.0.norm{}", "h.{}.norm0"]


def test_what_can_not_be_levelled_stays_whole() -> None:
    one, other = grouped("a.0", "a.1", "a.2"), grouped("b.0", "b.1")
    assert levelled(one, other) == [(one, other)]
    many = grouped(*(f"{'abcdefghij'[at % 10]}{'klmnopqrst'[at // 10]}" for at in range(MOST + 1)))
    assert levelled(many, many) == [(many, many)]


def test_without_effort_left_nothing_is_split() -> None:
    one, other = grouped(*grid("h.{n}.norm{m}", 5, 2)), grouped(*grid("l.{n}.a", 5, 1), *grid("l.{n}.b", 5, 1))
    assert levelled_with(one, other, Effort(1)) == [(one, other)]


def answers(one: list[str], other: list[str]) -> tuple[list[str], int]:
    """The other side's paths in the order of the first's, and how many are in doubt."""
    sides = of(one), of(other)
    twins, doubts = turned(groups(sides[0].units)[0], groups(sides[1].units)[0], sides)
    return paths(twins), len(doubts)


def test_equal_counts_of_two_levels_hold_the_given_order_in_equal_blocks() -> None:
    assert answers(grid("a.{n}.{m}", 2, 2), grid("b.{n}.{m}", 2, 2)) == (grid("b.{n}.{m}", 2, 2), 0)


def test_experts_and_layers_that_are_as_many_are_in_doubt() -> None:
    assert answers(grid("a.{n}.experts.{m}", 2, 2), grid("zan.{n}.lor.{m}", 2, 2))[1] == 2


def test_a_word_at_the_other_level_turns_numbers_where_blocks_differ() -> None:
    one, other = grid("layers.{n}.convs.{m}", 2, 2), grid("conv{n}.{m}", 2, 2)
    sides = of([*one, "layers.0.bn", "layers.1.bn"]), of([*other, "bn.0", "bn.1"])
    twins, doubts = turned(groups(sides[0].units)[0], groups(sides[1].units)[0], sides)
    assert not doubts
    assert paths(twins) == ["conv0.0", "conv1.0", "conv0.1", "conv1.1"]


def test_lists_of_blocks_in_lists_of_blocks_keep_their_order() -> None:
    """A stage of one side holds something else too."""
    parts = "ab"
    one, other = ([name for part in parts for name in grid(f"{front}.{{n}}.{{m}}.{part}", 2, 2)]
                  for front in ("layers", "stages"))  # fmt: skip
    sides = of([*one, "layers.0.down"]), of([*other, "down"])
    twins, doubts = turned(groups(sides[0].units)[0], groups(sides[1].units)[0], sides)
    assert (paths(twins), doubts) == (grid("stages.{n}.{m}.a", 2, 2), {})


def test_blocks_that_are_known_rule_an_order_of_numbers_out() -> None:
    sides = of(grid("zan{n}.experts{m}", 2, 2)), of(grid("lor{n}.mev{m}", 2, 2))
    both = groups(sides[0].units)[0], groups(sides[1].units)[0]
    assert turned(*both, sides)[1]
    assert not turned(*both, sides, lambda one, other: one.path[3] != other.path[3])[1]


def test_surroundings() -> None:
    whole = of(["h.0.a", "h.1.a", "h.0.b", "h.1.b", "fc7"])
    assert [surroundings(group, whole) for group in groups(whole.units)] == [(2.0,), (2.0,), (0,)]


def test_blocks_that_only_one_side_has_at_its_end_are_set_aside() -> None:
    one, other = of(grid("h.{n}.q", 4, 1)).units, of(grid("l.{n}.q", 3, 1)).units
    ours, theirs = same_depth(one, other, lambda unit: unit.signature)
    assert (paths(ours), len(theirs)) == (["h.0.q", "h.1.q", "h.2.q"], 3)


def test_of_two_stacks_that_could_be_shorter_none_is_cut() -> None:
    one = of([*grid("enc.{n}.q", 3, 1), *grid("dec.{n}.q", 3, 1)]).units
    other = of([*grid("e.{n}.q", 3, 1), *grid("d.{n}.q", 2, 1)]).units
    ours, theirs = same_depth(one, other, lambda unit: unit.signature)
    assert (len(ours), len(theirs)) == (6, 5)


def test_blocks_that_vary_along_with_their_stages_are_compared() -> None:
    """Two norms in each of two blocks: each block is the last or the first of its stage on one side alone."""
    one = [f"features.{block}.conv.{at}.{part}" for block in (3, 4) for at in (0, 1) for part in (0, 1)]
    other = [f"blocks.{block}.{part}{at}" for block in ("1.1", "2.0") for at in (1, 2) for part in ("conv", "bn")]
    more = "features.5.conv.0.0", "blocks.2.1.conv1"
    sides = []
    for names, extra in zip((one, other), more, strict=True):
        shapes = [(4, 2) if at % 2 == 0 else (4,) for at in range(8)]
        sides.append([*(Slot(f"{name}.weight", shape, "float32") for name, shape in zip(names, shapes, strict=True)),
                      Slot(f"{extra}.weight", (7, 7), "float32")])  # fmt: skip
    found = match(*sides)
    assert found.complete
    assert [pair.target for pair in found.pairs] == [slot.name for slot in sides[1]]
