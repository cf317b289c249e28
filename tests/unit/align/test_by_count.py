"""Counts, words and blocks that speak against one another make a class ambiguous, and never certain."""

from __future__ import annotations

from collections.abc import Mapping

from ckptfix.align.match import match
from ckptfix.align.nesting import Twins, crossed
from ckptfix.align.roles import parts, score
from ckptfix.align.units import Unit, side
from ckptfix.names.learn import learn
from ckptfix.names.rules import renamed
from ckptfix.names.slots import Slot


def listed(rows: Mapping[str, tuple[int, ...]]) -> list[Slot]:
    return [Slot(f"{name}.weight", shape, "float32") for name, shape in rows.items()]


def certain(one: Mapping[str, tuple[int, ...]], other: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    pairs = match(listed(one), listed(other)).pairs
    return {row.source.removesuffix(".weight"): row.target.removesuffix(".weight") for row in pairs if not row.instead}


def test_as_many_norms_of_stem_and_head_as_of_blocks() -> None:
    """``features.{}.norm`` has as many as ``layers.{}.norm1``, and stands beside the stem and the head."""
    norms = {"features.1.norm": (4,), "features.2.zan": (4,), "features.2.ln_2": (4,), "features.3.norm": (4,)}
    one = {"features.1.proj": (4, 3), "features.2.fc": (8, 4), **norms}
    other = {"conv1": (4, 3), "layers.0.fc": (8, 4), "bn1": (4,), "layers.0.norm1": (4,), "layers.0.norm2": (4,),
             "norm": (4,)}  # fmt: skip
    found = certain(one, other)
    truth = {"features.1.norm": "bn1", "features.2.zan": "layers.0.norm1", "features.2.ln_2": "layers.0.norm2",
             "features.3.norm": "norm", "features.1.proj": "conv1", "features.2.fc": "layers.0.fc"}  # fmt: skip
    assert all(truth[name] == new for name, new in found.items())
    assert "features.1.proj" in found


def test_only_one_candidate_is_only_shape() -> None:
    one = {"head": (3, 4), **{f"layers.{at}.fc": (4, 4) for at in range(3)}}
    other = {"classifier": (3, 4), **{f"h.{at}.lin": (4, 4) for at in range(3)}}
    why = {row.source: row.why for row in match(listed(one), listed(other)).pairs}
    assert why == {"head.weight": "only shape", **{f"layers.{at}.fc.weight": "number" for at in range(3)}}


def test_a_norm_follows_the_block_that_shapes_tell() -> None:
    """Two stacks that no word tells apart: one has a matrix of its own, and the norms beside it go along."""
    shapes: dict[str, tuple[int, ...]] = {"zan": (4, 4), "lor": (4, 8)}
    one: dict[str, tuple[int, ...]] = {f"{stack}.{at}.{part}": (4,) if part == "n" else shapes[stack]
                                       for stack in shapes for at in range(3) for part in ("m", "n")}  # fmt: skip
    other = {name.replace("zan", "tus").replace("lor", "kip"): one[name] for name in reversed(one)}
    found = certain(one, dict(sorted(other.items())))
    assert found == {name: name.replace("zan", "tus").replace("lor", "kip") for name in one}


def test_two_classes_that_cross_are_no_grid() -> None:
    """Of two blocks, one role says straight and the other crosswise: each block has as much of each."""
    names = {"up.0.c": "dec.0.c", "up.1.c": "dec.1.c", "up.0.n": "dec.1.n", "up.1.n": "dec.0.n"}
    pairs = [(unit(one), unit(other)) for one, other in names.items()]
    assert crossed(pairs) == {0, 1, 2, 3}


def unit(name: str) -> Unit:
    return side([Slot(f"{name}.weight", (2, 2), "float32")]).units[0]


def test_what_shapes_leave_one_block_is_not_doubted_where_blocks_cross() -> None:
    """What stands between two stages is at the end of the one or at the beginning of the other."""
    one = listed({f"s.{at}.{part}": (at + 1, size) for at in range(2) for part, size in (("a", 4), ("down", 8))})
    other = listed({f"t.{at + (part == 'down')}.{part}": (at + 1, size) for at in range(2)
                    for part, size in (("a", 4), ("down", 8))})  # fmt: skip
    assert match(one, other).complete


def test_twins_are_blocks_of_one_size_with_a_module_in_common() -> None:
    names = ["a.0.x", "a.0.y", "a.1.x", "a.1.y"]
    ours = side([Slot(f"{name}.weight", (2,), "") for name in names])
    theirs = side([Slot(f"{name.replace('a', 'b')}.weight", (2,), "") for name in names])
    twins = Twins([(ours.units[0], theirs.units[0])], (ours.contents, theirs.contents))
    assert [[twins.say(one, other) for other in theirs.units] for one in ours.units] == [
        [1, 1, -1, -1], [1, 1, -1, -1], [-1, -1, 0, 0], [-1, -1, 0, 0],
    ]  # fmt: skip


def test_blocks_of_other_shapes_are_no_twins() -> None:
    """A list of one kind of module has as many as a block, and shares one with it."""
    ours = side([Slot(f"a.0.{name}.weight", shape, "") for name, shape in (("conv", (2, 2)), ("norm", (2,)))])
    theirs = side([Slot(f"convs.0.{name}.weight", (2, 2), "") for name in ("a", "b")])
    twins = Twins([(ours.units[0], theirs.units[0])], (ours.contents, theirs.contents))
    assert [twins.say(one, other) for one in ours.units for other in theirs.units] == [0, 0, 0, 0]


def test_norms_of_different_blocks_have_no_order() -> None:
    assert [part.ordinal for part in parts(["layers.{}.attention_norm", "final_norm"])] == [None, None]
    assert [part.ordinal for part in parts(["layers.{}.attention_norm", "layers.{}.ffn_norm"])] == [(2, 0), (2, 1)]


def test_output_of_cross_attention_is_of_the_attention() -> None:
    cross, _ = parts(["layers.{}.enc_attn.output.dense", "layers.{}.zan"])
    feed, _ = parts(["layers.{}.mlp.c_proj", "layers.{}.lor"])
    assert "feed-forward" not in cross.roles["block"]
    assert score(cross, feed) < 0


def test_what_stands_beside_blocks_has_no_part_of_a_block() -> None:
    beside, _ = parts(["pre_classifier", "layers.{}.q_lin"])
    assert "block" not in beside.roles


def test_f_and_b_are_directions_where_both_are_there() -> None:
    one, other = parts(["f.0.w", "b.0.w"]), parts(["forward.0.w", "backward.0.w"])
    assert score(one[0], other[0]) > 0 > score(one[0], other[1])
    assert "reverse" not in parts(["conv_a", "conv_b"])[1].roles


def test_a_number_that_the_new_name_has_twice() -> None:
    wanted = {f"a.{at}": f"b.{at + 2}.{at}" for at in range(4)}
    assert renamed(list(wanted), learn(wanted, list(wanted))) == wanted


def test_with_reshape_equal_shapes_decide_nothing_alone() -> None:
    """One of two convolutions of one size is a matrix on the other side: which, only words can say."""
    one = listed({"a.zan": (4, 4, 1, 1), "a.lor": (4, 4)})
    blunt = match(one, listed({"b.mev": (4, 4), "b.tus": (4, 4)}), reshape=True)
    assert not blunt.complete and all(row.instead for row in blunt.pairs)
    ours, theirs = listed({"a.query": (4, 4, 1, 1), "a.key": (4, 4)}), listed({"b.k": (4, 4), "b.q": (4, 4)})
    told = match(ours, theirs, reshape=True)
    assert told.complete
    assert told.names == {"a.query.weight": "b.q.weight", "a.key.weight": "b.k.weight"}


def test_of_lists_that_count_otherwise_the_size_is_no_proof() -> None:
    """``bn{0,1}`` and another norm in each block against ``norms.{1,2}`` and another: the lists may share one."""
    one = {f"h.{at}.{part}": (4,) for at in range(3) for part in ("bn0", "bn1", "zan")}
    for numbers, sure in (((1, 2), False), ((0, 1), True)):
        parts = ("kip", *(f"norms.{number}" for number in numbers))
        found = certain(one, {f"layer.{at}.{part}": (4,) for at in range(3) for part in parts})
        assert bool(found) == sure


def test_what_sizes_tell_of_a_class_in_doubt_is_in_doubt() -> None:
    """The only groups of their size, once others are split: those that are not told apart take it along."""
    one = {**{f"a.{at}.{part}": (4, 4) for at in range(3) for part in "123"}, **{f"b.{at}": (4, 4) for at in (0, 1)}}
    other = {**{f"{part}.{at}": (4, 4) for at in range(3) for part in ("zan", "lor", "kip")},
             **{f"tus.{at}": (4, 4) for at in (0, 1)}}  # fmt: skip
    assert not certain(one, other)


def test_what_is_in_doubt_in_one_stage_takes_along_what_numbers_alone_tell_there() -> None:
    """A dual path network: of three norms of a unit the sizes of lists tell nothing, as one list lacks its first."""
    parts = {"pre": "c", "conv2": "b", "conv1": "a"}
    one = {f"s1.u{at}.{ours}.bn": (4,) for at in (1, 2, 3) for ours in parts if ours != "conv1" or at == 3}
    other = {f"conv2_{at}.c{'3x3' if theirs == 'b' else '1x1'}_{theirs}.bn": (4,)
             for at in (1, 2, 3) for ours, theirs in parts.items() if ours != "conv1" or at == 3}  # fmt: skip
    wrong = {f"s1.u{at}.pre.bn": f"conv2_{at}.c3x3_b.bn" for at in (1, 2, 3)}
    assert not set(wrong.items()) & set(certain(one, other).items())
