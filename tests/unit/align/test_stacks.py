"""Stacks of blocks are matched first: a module of equal shapes elsewhere does not disturb what is in them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ckptfix.align.match import match
from ckptfix.names.slots import Slot

D, DEPTH = 8, 3
Shapes = Mapping[str, tuple[int, ...]]


def side(shapes: Shapes) -> list[Slot]:
    return [Slot(name, shape, "float32") for name, shape in shapes.items()]


def blocks(front: str, words: list[str], shape: tuple[int, ...] = (D, D)) -> dict[str, tuple[int, ...]]:
    return {f"{front}.{number}.{word}.weight": shape for number in range(DEPTH) for word in words}


@pytest.mark.parametrize("elsewhere", ["pooler.dense", "attn_pool.q", "head.proj", "layers_norm.dense"])
def test_projections_of_blocks_are_certain_beside_another_square_one(elsewhere: str) -> None:
    one = blocks("blocks", ["attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.proj"])
    words = ["query", "key", "value", "out"]
    other = blocks("layers", [f"attention.{word}" for word in words]) | {f"{elsewhere}.weight": (D, D)}
    for sides in ((one, other), (other, one)):
        found = match(*map(side, sides))
        assert not found.ambiguous and len(found.pairs) == len(one)
        assert [*found.left, *found.missing] == [f"{elsewhere}.weight"]


def test_norms_of_blocks_are_certain_beside_norms_that_are_not() -> None:
    one = blocks("blocks", ["norm1", "norm2"], (D,)) | {"norm.weight": (D,), "mlp_head.0.weight": (D,)}
    other = blocks("layers", ["layernorm_before", "layernorm_after"], (D,))
    other |= {"layernorm.weight": (D,), "classifier.layernorm.weight": (D,)}
    found = match(side(one), side(other))
    assert {pair.source for pair in found.ambiguous} <= {"norm.weight", "mlp_head.0.weight"}
    certain = {pair.source: pair.target for pair in found.pairs if not pair.instead}
    for number in range(DEPTH):
        assert certain[f"blocks.{number}.norm1.weight"] == f"layers.{number}.layernorm_before.weight"


def test_two_equal_stacks_stay_open() -> None:
    """Nothing says which of two towers is which."""
    words = ["attn.q", "attn.k", "attn.v", "attn.proj"]
    one = blocks("left.blocks", words) | blocks("right.blocks", words)
    other = blocks("lhs.blocks", words) | blocks("rhs.blocks", words)
    assert len(match(side(one), side(other)).ambiguous) == len(one)


@pytest.mark.parametrize("towers", [("text", "textual", "vision", "visual"), ("fwd", "forward", "bwd", "backward")])
def test_words_of_towers_tell_blocks_that_have_no_second_one(towers: tuple[str, ...]) -> None:
    """The single block of each tower is in a list on one side, and in a list in a list on the other."""
    words = {"input": "0", "hidden": "1"}
    both = dict(zip(towers[::2], towers[1::2], strict=True))
    pairs = {f"{ours}.layers.0.{one}.weight": f"net.{theirs}.stages.1.layers.1.{other}"
             for ours, theirs in both.items() for one, other in words.items()}  # fmt: skip
    found = match(side(dict.fromkeys(pairs, (12, 4))), side(dict.fromkeys(sorted(pairs.values()), (12, 4))))
    assert found.names == pairs
    assert found.complete


def test_a_single_block_of_many_modules_is_the_only_one_of_its_contents() -> None:
    words = dict(zip(("attn.q", "attn.k", "attn.v", "attn.proj", "fc1", "fc2"), "123456", strict=True))
    pairs = {f"layers.1.{one}.weight": f"net.blocks.0.{other}.weight" for one, other in words.items()}
    found = match(side(dict.fromkeys(pairs, (D, D))), side(dict.fromkeys(reversed(pairs.values()), (D, D))))
    assert found.names == pairs
    assert found.complete
