"""What words say about a module's part: which agree, which contradict, and which say nothing."""

from __future__ import annotations

import pytest

from ckptfix.align.roles import parts, score, scores

SCORED = [
    (["attn.q_proj", "attn.k_proj", "attn.v_proj"], ["sa.query", "sa.key", "sa.value"]),
    (["attention.wq", "attention.wo"], ["self_attn.q_proj", "self_attn.o_proj"]),
    (["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"], ["ff.w1", "ff.w3", "ff.w2"]),
    (["norm1", "norm2"], ["attention_norm", "ffn_norm"]),
    (["student.x", "teacher.x"], ["online.y", "momentum.y"]),
    (["encoder.h", "decoder.h"], ["enc.l", "dec.l"]),
    (["conv1", "conv2"], ["convs.0", "convs.1"]),
    (["conv_a", "conv_b"], ["conv1", "conv2"]),
    (["mlp.wi_0", "mlp.wi_1"], ["mlp.gate_proj", "mlp.up_proj"]),
    (["mlp.wi_0", "mlp.wi_1"], ["mlp.w1", "mlp.w3"]),
]


@pytest.mark.parametrize(("one", "other"), SCORED, ids=[row[0][0] for row in SCORED])
def test_each_fits_its_own_best_by_far(one: list[str], other: list[str]) -> None:
    ours, theirs = parts(one), parts(other)
    for at, part in enumerate(ours):
        scores = [score(part, twin) for twin in theirs]
        assert min(scores[at] - wrong for to, wrong in enumerate(scores) if to != at) >= 3, (one[at], scores)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["q", "k"], ["zan", "lor"]),
        (["zan", "lor"], ["mev", "tus"]),
        (["layers.a", "blocks.a"], ["layers.b", "blocks.b"]),
        (["gate", "up"], ["proj1", "proj2"]),
        (["w1", "w2", "w3"], ["fc1", "fc2", "fc3"]),
        (["w1", "w2"], ["wi_0", "wi_1"]),
    ],
)
def test_what_says_nothing_fits_all_alike(one: list[str], other: list[str]) -> None:
    assert len({score(a, b) for a in parts(one) for b in parts(other)}) == 1


def test_one_contradiction_outweighs_what_agrees() -> None:
    """Both are in self-attention, and one is its query and the other its key."""
    (query, _), (key, _) = parts(["self_attn.q_proj", "mlp.zan"]), parts(["self_attn.k_proj", "mlp.lor"])
    assert score(query, key) < 0


def test_a_value_projection_is_no_output() -> None:
    (value, _), (out, _) = parts(["attn.v_proj", "zan"]), parts(["attention.wo", "lor"])
    assert value.roles["attention"] == {"value"}
    assert score(value, out) < 0


def test_of_w1_and_w3_the_numbers_are_no_order() -> None:
    assert [part.ordinal for part in parts(["f.w1", "f.w2", "f.w3"])] == [None] * 3
    (first,), (third,) = parts(["f.w1"]), parts(["f.w3"])
    assert score(first, third) < 0


def test_same_words_with_other_letters_are_no_agreement() -> None:
    (one, _), (other, _) = parts(["conv_a", "zan"]), parts(["conv_b", "lor"])
    assert score(one, other) == 0


def test_words_that_one_side_alone_has_count_for_nothing() -> None:
    """What is called ``zan`` may be either: ``left.lin`` has no word more than ``left.op``, and none less."""
    ours, theirs = parts(["right.zan", "left.lin", "left.zan"]), parts(["right.op", "left.op", "left.kip_lor"])
    said = scores(ours, theirs)
    assert len({said[at][to] for at in (1, 2) for to in (1, 2)}) == 1
    assert said[1][1] > said[1][0]


@pytest.mark.parametrize("kind", ["linear", "fc", "dense", "conv", "proj"])
def test_the_kind_of_a_layer_is_no_place(kind: str) -> None:
    ours, theirs = parts([f"{kind}0", "h.1.zan"]), parts(["stem", f"h.0.{kind}"])
    assert scores(ours, theirs) == [[0, 0], [0, 0]]


def test_a_pair_of_words_for_kinds_is_no_place_either() -> None:
    ours, theirs = parts(["attention.output.LayerNorm", "zan"]), parts(["final_layer_norm", "lor"])
    assert score(ours[0], theirs[0]) <= 0


def test_numbers_that_differ_take_only_the_words_that_they_count() -> None:
    (one, _), (other, _) = parts(["text.h.1.zan", "image.x"]), parts(["text.block0.zan", "image.y"])
    assert score(one, other) > 4
    (one, _), (other, _) = parts(["zan1", "x"]), parts(["zan2", "y"])
    assert score(one, other) == 0


def test_self_within_cross_attention_is_none() -> None:
    """BERT's crossattention.self.key."""
    (own, _), (cross, _) = parts(["self_attn.k_proj", "a"]), parts(["crossattention.self.key", "b"])
    assert score(own, cross) < 0
