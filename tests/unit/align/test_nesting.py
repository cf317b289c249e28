"""Blocks of two sides nest, or what links them is in doubt."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable
from dataclasses import replace

import pytest

from ckptfix.align.nesting import crossed, turnable
from ckptfix.align.units import Unit, side
from ckptfix.names.slots import Slot


def units(names: Iterable[str]) -> tuple[Unit, ...]:
    return side([Slot(f"{name}.weight", (2, 2), "float32") for name in names]).units


def doubted(pairs: dict[str, str]) -> set[str]:
    rows = list(zip(units(pairs), units(pairs.values()), strict=True))
    return {rows[index][0].path for index in crossed(rows)}


def test_numbered_modules_with_nothing_below_need_little_memory() -> None:
    names = [f"blocks.{at}.part{part}" for at in range(200) for part in range(10)]
    rows = list(zip(units(names), units(f"h.{name}" for name in names), strict=True))
    tracemalloc.start()
    try:
        assert not crossed(rows, ([one for one, _ in rows], [other for _, other in rows]))
        assert tracemalloc.get_traced_memory()[1] < 600 * len(rows)
    finally:
        tracemalloc.stop()


def test_two_roles_that_send_a_block_to_two_blocks() -> None:
    straight = {f"up.{at}.conv": f"dec.{at}.c" for at in range(3)}
    shifted = {f"up.{at}.norm": f"dec.{(at + 1) % 3}.n" for at in range(3)}
    assert doubted({**straight, **shifted}) == {*straight, *shifted}
    assert not doubted({**straight, **{name: f"dec.{name[3]}.n" for name in shifted}})


def test_norms_that_send_two_blocks_to_two_crosswise_are_no_grid() -> None:
    crosswise = {f"tower.{at}.{part}": f"h.{part}.{name}" for at, name in enumerate(("pre", "post")) for part in (0, 1)}
    assert doubted(crosswise) == {*crosswise}


def test_a_number_that_tells_parts_apart_as_their_shapes_do_counts_no_blocks() -> None:
    """``fc1`` and ``fc2`` hold one part of each block: where these are of different shapes, that is sure."""
    parts = ("expand", "reduce")
    pairs = {f"layers.{at}.{part}": f"fc{1 + nth}.{at}" for nth, part in enumerate(parts) for at in range(3)}
    slots = [
        [Slot(f"{name}.weight", (2, 8) if name.endswith("expand") else (8, 2), "float32") for name in pairs],
        [Slot(f"{name}.weight", (2, 8) if name.startswith("fc1") else (8, 2), "float32") for name in pairs.values()],
    ]
    ours, theirs = (side(each).units for each in slots)
    assert crossed(list(zip(ours, theirs, strict=True))) == set()
    assert doubted(pairs) == {*pairs}, "of equal shapes the two may be the other way round"


def test_what_is_between_two_stages_is_at_the_end_of_one_or_the_beginning_of_the_next() -> None:
    stages = {f"stage{at}.0.{part}": f"levels.{at}.0.{part}" for at in range(3) for part in ("a", "b")}
    between = {f"stage{at}.down": f"levels.{at + 1}.reduce" for at in range(2)}
    assert not doubted(stages | between)
    assert doubted(stages | {"stage0.down": "levels.1.reduce"}), "there is one for each two stages"
    assert doubted(stages | {"stage0.0.c": "levels.1.0.c", "stage1.0.c": "levels.0.0.c"})
    same = {f"stage{at}.0.{part}": f"levels.{at}.0.{part}" for at in (1, 2) for part in ("a", "b")}
    assert doubted(same | {"stage0.0.a": "levels.1.0.a", "stage1.0.a": "levels.2.0.a"}), "a name that is in a stage too"


def test_what_is_in_no_pair_shows_too_that_two_overlap() -> None:
    """Block 1 goes to the stem with its convolution, and to the transition with its norm, whose other part is left."""
    pairs = {"f.1.conv": "stem.c", "f.2.conv": "stem.d", "f.1.norm": "trans.1.n", "f.2.norm": "trans.2.n"}
    rows = list(zip(units(pairs), units(pairs.values()), strict=True))

    def doubted_beside(ours: list[str], theirs: list[str]) -> set[str]:
        sides = (*units(ours), *(one for one, _ in rows)), (*units(theirs), *(other for _, other in rows))
        return {rows[index][0].path for index in crossed(rows, sides)}

    assert not doubted_beside([], [])
    assert doubted_beside(["f.3.conv", "f.4.conv"], ["trans.1.proj", "trans.2.proj"]) == {*pairs}
    # It may be what block 1 has left over, or what this side lacks.
    assert not doubted_beside(["f.1.proj", "f.2.proj"], ["trans.1.proj", "trans.2.proj"])
    assert not doubted_beside([], ["trans.1.proj", "trans.2.proj"])


def test_a_block_in_no_stack_shows_too_that_two_overlap() -> None:
    """What is before and after two blocks is in no block of one side, and in their list on the other."""
    down = {"down.0.norm": "features.2.norm", "down.0.conv": "features.1.conv"}
    more = {"down.1.conv": "features.3.conv"}
    assert doubted({**down, **more, "head.fc": "features.2.fc"}) == {*down, "head.fc"}
    assert not doubted({**down, **more})
    assert not doubted({**down, "head.fc": "features.2.fc"}), "down0 may be a name"


@pytest.mark.parametrize(
    "pairs",
    [
        {f"features.{at}": f"stage.{at // 2}.conv.{at % 2}" for at in range(6)},
        {f"layers.{at}.experts.{part}": f"experts.{part}.layers.{at}" for at in range(3) for part in range(2)},
        {f"{part}.{at}": f"blocks.{at}.{part}" for part in ("attentions", "norms") for at in range(3)},
        {f"{part}.0.{at}": f"blocks.{at}.{part}" for part in ("convs", "norms") for at in range(2)},
    ],
    ids=["flat against stages", "a grid", "lists by role", "lists by role in stages"],
)
def test_what_nests_or_crosses_as_a_grid_is_left(pairs: dict[str, str]) -> None:
    assert not doubted(pairs)


@pytest.mark.parametrize(("front", "turned"), [("model.decoder", False), ("model.decoder.conv", True)])
def test_only_what_convolves_is_a_way_up(front: str, turned: bool) -> None:
    """The decoder of a model of speech stands beside convolutions of its encoder, and has none."""
    shape = (2, 2, 3) if turned else (2, 2)
    conv = [Slot("model.encoder.conv1.weight", (2, 2, 3), "float32")]
    slots = [Slot(f"{front}.{at}.fc.weight", shape, "float32") for at in range(3)]
    one = side([*conv, *slots]).units
    other = side([replace(slot, name=slot.name.replace("model.", "")) for slot in (*conv, *slots)]).units
    assert turnable(list(zip(one, other, strict=True)), (one, other)) == ({1, 2, 3} if turned else set())
