"""Matching by structure where a wrong answer would look right: it is right there, or says that it does not know."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from ckptfix.align import structure as match_structure
from ckptfix.align.match import match
from ckptfix.align.result import Matching
from ckptfix.names.slots import Slot

SQUARE = (8, 8)


def slots(names: Iterable[str], shape: tuple[int, ...] = SQUARE) -> list[Slot]:
    return [Slot(name, shape, "float32") for name in names]


def sure(found: Matching) -> dict[str, str]:
    """The pairs that the matching stands by."""
    return {pair.source: pair.target for pair in found.pairs if not pair.instead}


def right(one: Sequence[str], other: Sequence[str], shape: tuple[int, ...] = SQUARE) -> bool:
    """Whether all is matched, after no wrong pair was claimed; the names of both sides stand in the order of truth."""
    found = match(slots(one, shape), slots(other, shape))
    truth = dict(zip(one, other, strict=True))
    assert all(truth[source] == target for source, target in sure(found).items())
    return found.complete


@pytest.mark.parametrize("depth", [2, 12])
def test_lists_by_role_against_blocks(depth: int) -> None:
    """XLM holds a list of each kind of module, and BERT's heirs a list of blocks."""
    parts = {"attentions": "attn", "layer_norm1": "norm1", "ffns": "mlp", "layer_norm2": "norm2"}
    shapes = {"attentions": (8, 8), "ffns": (8, 9)}
    one = [Slot(f"{part}.{at}.weight", shapes.get(part, (8,)), "") for part in parts for at in range(depth)]
    other = [
        Slot(f"layers.{at}.{new}.weight", shapes.get(old, (8,)), "")
        for at in range(depth)
        for old, new in parts.items()
    ]
    found = match(one, other)
    truth = {f"{old}.{at}.weight": f"layers.{at}.{new}.weight" for old, new in parts.items() for at in range(depth)}
    assert all(truth[source] == target for source, target in sure(found).items())
    assert depth == 2 or found.complete


@pytest.mark.parametrize("count", [2, 3])
def test_as_many_experts_as_layers(count: int) -> None:
    """Which number counts what, only words can decide."""
    grid = [(layer, expert) for layer in range(count) for expert in range(count)]
    told = [f"layers.{layer}.experts.{expert}.weight" for layer, expert in grid]
    right(told, [f"experts.{expert}.layers.{layer}.weight" for layer, expert in grid])
    assert right(told, [f"h.{layer}.experts.{expert}.weight" for layer, expert in grid])
    assert not right(told, [f"zan.{expert}.lor.{layer}.weight" for layer, expert in grid])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["q", "k", "v", "o"], ["proj3", "proj1", "proj2", "proj4"]),
        (["gate", "up"], ["w2", "w1"]),
        (["gate", "up"], ["w1", "w2"]),
        (["q", "k", "v"], ["zan", "lor", "mev"]),
        (["conv_a", "lor"], ["zan", "conv_b"]),
        (["ln_1", "lor"], ["zan", "ln_2"]),
    ],
)
def test_words_against_numbers_and_words_that_say_nothing(one: list[str], other: list[str]) -> None:
    for seed in range(6):
        names = [f"net.{name}.weight" for name in one], [f"body.{name}.weight" for name in other]
        truth = dict(zip(*names, strict=True))
        shuffled = random.Random(seed).sample(names[1], len(other))
        found = match(slots(names[0]), slots(shuffled))
        assert all(truth[source] == target for source, target in sure(found).items())
        assert not found.complete


def test_gate_up_and_down_have_names_in_numbers() -> None:
    """w3 runs beside w1, and w2 after both."""
    parts = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    one = [f"layers.{at}.mlp.{old}.weight" for at in range(3) for old in parts]
    assert right(one, [f"layers.{at}.feed_forward.{new}.weight" for at in range(3) for new in parts.values()])


@pytest.mark.parametrize("order", ["as defined", "sorted", "shuffled"])
def test_numbers_that_are_moved_are_no_equal_names(order: str) -> None:
    """One side counts from 0 and the other from 1: most names are equal, and mean the layer before."""
    one = [f"blocks.{at}.fc.weight" for at in range(5)]
    other = [f"blocks.{at + 1}.fc.weight" for at in range(5)]
    truth = dict(zip(one, other, strict=True))
    if order != "as defined":
        other = sorted(other) if order == "sorted" else random.Random(1).sample(other, 5)
    assert sure(match(slots(one), slots(other))) == truth


def test_blocks_counted_down_are_not_blocks_counted_up() -> None:
    one = [f"up.{at}.weight" for at in range(4)]
    other = [f"dec.{at}.weight" for at in reversed(range(4))]
    assert not right([*one, "fc.weight"], [*other, "head.weight"])


def test_twin_towers_that_no_name_tells_apart() -> None:
    told = [f"{tower}.{at}.weight" for tower in ("student", "teacher") for at in range(3)]
    assert not right(told, [f"{tower}.{at}.weight" for tower in ("lor", "zan") for at in range(3)])
    assert right(told, [f"{tower}.{at}.weight" for tower in ("online", "momentum") for at in range(3)])


def test_a_head_of_the_same_shape_too_many() -> None:
    one = slots(["fc.weight"])
    found = match(one, slots(["head.weight", "aux.weight"]))
    assert not found.complete and not sure(found)


def test_two_stacks_of_other_depths() -> None:
    one = [f"enc.{at}.a.weight" for at in range(4)] + [f"dec.{at}.a.weight" for at in range(3)]
    other = [f"encoder.{at}.b.weight" for at in range(3)] + [f"decoder.{at}.b.weight" for at in range(2)]
    found = match(slots(one), slots(other))
    assert not found.complete
    assert all(source[:3] == target[:3] and source[4] == target.split(".")[1] for source, target in sure(found).items())


def test_blocks_too_many_beside_a_module_of_the_same_shape() -> None:
    """Two last blocks less, or one and the other module: nothing decides."""
    one = [*(f"h.{at}.q.weight" for at in range(4)), "extra.q.weight"]
    assert not sure(match(slots(one), slots(f"l.{at}.q.weight" for at in range(3))))


def test_more_comparisons_than_are_made_leave_all_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = slots(["a.query.weight", "a.key.weight"]), slots(["b.q.weight", "b.k.weight"])
    assert match(one, other).complete
    monkeypatch.setattr(match_structure, "COMPARED", 3)
    assert len(match(one, other).ambiguous) == 2


def test_a_square_matrix_on_its_own_may_be_a_transposed_one() -> None:
    found = match(slots(["attn.proj"]), slots(["attn.proj.weight"]))
    assert not found.pairs and found.left == ("attn.proj",)


def test_leftovers_of_a_class_in_doubt_are_not_matched_by_weight_alone() -> None:
    """What shapes leave open stays open, however few are left."""
    shapes = {"weight": SQUARE, "bias": SQUARE[:1]}
    one = [Slot(f"{name}.{leaf}", shapes[leaf], "") for name in ("q", "k") for leaf in shapes]
    other = [Slot(f"{name}.{leaf}", shapes[leaf], "") for name in ("zan", "lor", "mev") for leaf in shapes]
    assert not sure(match(one, other))


def test_many_equal_shapes_without_numbers_are_all_in_doubt() -> None:
    names = [f"{one}{two}x.weight" for one in "abcdefghij" for two in "klmnopqrst"]
    found = match(slots(names), slots(f"z{name[2::-1]}.weight" for name in names))
    assert len(found.ambiguous) == len(found.pairs) == 100


def test_flat_numbers_against_stages_need_a_course_that_agrees() -> None:
    """features.N runs through the blocks; lists by role do not."""
    kinds = {"conv": (4, 4, 3, 3), "bn": (4,)}
    flat = [Slot(f"features.{at}.weight", shape, "") for at, shape in enumerate(list(kinds.values()) * 4)]
    staged = [Slot(f"stage{at // 2}.{kind}{at % 2}.weight", kinds[kind], "") for at in range(4) for kind in kinds]
    assert match(flat, staged).complete
    assert list(sure(match(flat, staged)).values()) == [slot.name for slot in staged]
    by_role = [Slot(f"{kind}{at % 2}.{at // 2}.weight", kinds[kind], "") for kind in kinds for at in (0, 2, 1, 3)]
    found = match(flat, by_role)
    meant = [f"{kind}{at % 2}.{at // 2}.weight" for at in range(4) for kind in kinds]
    truth = {f"features.{at}.weight": name for at, name in enumerate(meant)}
    assert all(truth[source] == target for source, target in sure(found).items())
