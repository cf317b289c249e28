"""Pairs in definition order: what is paired, what a rule passes over, and what is shown where the orders part."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ckptfix.align.position import match
from ckptfix.align.result import Skipped
from ckptfix.errors import NoMatch
from ckptfix.names.slots import Slot, is_transposed, misfit


def slots(prefix: str, *shapes: Sequence[int], dtype: str = "float32") -> list[Slot]:
    return [Slot(f"{prefix}{index}", tuple(shape), dtype) for index, shape in enumerate(shapes)]


def batch_norm(prefix: str, *, tracked: bool = True, position: int = 4) -> list[Slot]:
    rows = [Slot(f"{prefix}.{name}", (4,), "float32") for name in ("weight", "bias", "running_mean", "running_var")]
    if tracked:
        rows.insert(position, Slot(f"{prefix}.num_batches_tracked", (), "int64"))
    return rows


def test_the_nth_goes_to_the_nth() -> None:
    matching = match(slots("features.", (4, 3), (4,)), slots("backbone.", (4, 3), (4,)))
    assert matching.by == "position"
    assert matching.names == {"features.0": "backbone.0", "features.1": "backbone.1"}
    assert matching.complete


def test_nothing_against_nothing() -> None:
    assert match([], []).pairs == ()


@pytest.mark.parametrize("source_side", [True, False])
def test_a_count_of_batches_that_one_side_lacks_is_passed_over(source_side: bool) -> None:
    with_count = [*slots("c", (4, 3)), *batch_norm("a"), *batch_norm("b")]
    without = [*slots("d", (4, 3)), *batch_norm("x", tracked=False), *batch_norm("y", tracked=False)]
    source, target = (with_count, without) if source_side else (without, with_count)
    matching = match(source, target)
    expected = tuple(Skipped(f"{name}.num_batches_tracked", "num_batches_tracked") for name in "ab")
    assert (matching.skipped_source, matching.skipped_target) == ((expected, ()) if source_side else ((), expected))
    assert len(matching.pairs) == 9
    assert matching.complete


def test_buffers_that_both_sides_have_are_paired() -> None:
    matching = match(batch_norm("a"), batch_norm("b"))
    assert matching.names["a.num_batches_tracked"] == "b.num_batches_tracked"
    assert not matching.skipped_source


@pytest.mark.parametrize("source_side", [True, False])
def test_a_count_of_another_name_is_paired(source_side: bool) -> None:
    """Whichever side calls it so; and weights never go to a buffer that may be lacking."""
    known = [*batch_norm("a"), *slots("w", (3,))]
    other = [Slot("b.steps", slot.shape, slot.dtype) if slot.shape == () else slot for slot in known]
    source, target = (known, other) if source_side else (other, known)
    matching = match(source, target)
    assert matching.complete and len(matching.pairs) == 6
    assert matching.names[source[4].name] == target[4].name
    mask, weight = Slot("attn.bias", (1, 1, 4, 4), "float32"), Slot("conv.weight", (1, 1, 4, 4), "float32")
    with pytest.raises(NoMatch):
        match([mask, *slots("w", (3,))], [weight, *slots("v", (3,))])


def test_a_buffer_of_another_size_is_passed_over_on_both_sides() -> None:
    source = [Slot("e.position_ids", (1, 512), "int64"), *slots("w", (3,))]
    target = [Slot("f.position_ids", (1, 77), "int64"), *slots("v", (3,))]
    matching = match(source, target)
    assert matching.names == {"w0": "v0"}
    assert [len(matching.skipped_source), len(matching.skipped_target)] == [1, 1]


def test_buffers_at_the_end_are_passed_over() -> None:
    assert match(batch_norm("a"), batch_norm("b", tracked=False)).complete


def test_a_tied_name_that_the_other_side_lacks_is_passed_over() -> None:
    source = [*slots("w", (5, 4), (4,)), Slot("head.weight", (5, 4), "float32", tied="w0")]
    matching = match(source, slots("v", (5, 4), (4,)))
    assert matching.skipped_source == (Skipped("head.weight", "tied to w0", tied=True),)
    back = match(slots("v", (5, 4), (4,)), source)
    assert back.skipped_target == (Skipped("head.weight", "tied to w0", tied=True),)
    assert back.complete


def test_a_tied_name_goes_to_a_tensor_of_its_own_where_there_is_one() -> None:
    source = [*slots("w", (5, 4), (4,)), Slot("head.weight", (5, 4), "float32", tied="w0")]
    matching = match(source, slots("v", (5, 4), (4,), (5, 4)))
    assert matching.names["head.weight"] == "v2"


def test_ties_on_both_sides_are_passed_over_apart() -> None:
    source = [Slot("a", (2,)), Slot("a_again", (2,), tied="a"), Slot("b", (3,))]
    target = [Slot("x", (2,)), Slot("y", (3,)), Slot("x_again", (2,), tied="x")]
    matching = match(source, target)
    assert matching.names == {"a": "x", "b": "y"}
    assert matching.complete


def test_the_place_where_shapes_part_is_shown_with_its_neighbours() -> None:
    shapes = [(index + 1,) for index in range(10)]
    other = [*shapes[:5], (60,), *shapes[6:]]
    with pytest.raises(NoMatch) as caught:
        match(slots("a.", *shapes), slots("b.", *other))
    message = caught.value.message
    assert "after 5 pairs" in message
    assert "tensor 6 of IN" in message
    assert "shape [6] against [60]" in message
    lines = caught.value.lines
    assert len(lines) == 7
    assert [line.split()[0] for line in lines] == ["a.2", "a.3", "a.4", "x", "a.6", "a.7", "a.8"]
    assert lines[3].split() == ["x", "a.5", "[6]", "float32", "b.5", "[60]", "float32"]


@pytest.mark.parametrize(("ours", "theirs", "longer"), [(3, 5, "TARGET"), (5, 3, "IN"), (0, 1, "TARGET")])
def test_the_longer_side_is_never_cut(ours: int, theirs: int, longer: str) -> None:
    with pytest.raises(NoMatch, match=f"{longer} has more tensors") as caught:
        match(slots("a", *[(2,)] * ours), slots("b", *[(2,)] * theirs))
    assert any("(nothing)" in line for line in caught.value.lines)


def test_a_parameter_in_the_way_is_no_buffer() -> None:
    """Skipping it would pair everything behind it wrongly, with shapes that fit."""
    source = [Slot("extra", (4,), "float32"), *batch_norm("a", tracked=False)]
    with pytest.raises(NoMatch):
        match(source, batch_norm("b", tracked=False))


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"),
    [
        ("float32", "float16", True),
        ("float32", "bfloat16", True),
        ("uint8", "bool", True),
        ("int64", "int32", True),
        ("int64", "float32", False),
        ("complex64", "float32", False),
        ("float32", "", True),
        ("", "int64", True),
    ],
)
def test_dtypes(ours: str, theirs: str, fits: bool) -> None:
    source, target = [Slot("a", (2,), ours)], [Slot("b", (2,), theirs)]
    if fits:
        assert match(source, target).names == {"a": "b"}
    else:
        with pytest.raises(NoMatch, match=f"dtype {ours} against {theirs}"):
            match(source, target)


def test_reshape_only_when_asked() -> None:
    source, target = slots("a", (4, 6, 1, 1), (4,)), slots("b", (4, 6), (4,))
    with pytest.raises(NoMatch, match="with equally many elements"):
        match(source, target)
    matching = match(source, target, reshape=True)
    assert [pair.reshape for pair in matching.pairs] == [(4, 6), None]


def test_a_transposition_is_no_reshape() -> None:
    assert is_transposed((4, 6), (6, 4))
    assert is_transposed((4, 6, 1), (1, 6, 4))
    assert not is_transposed((4, 6), (4, 6, 1))
    assert not is_transposed((4, 4), (4, 4))
    assert not is_transposed((4, 6), (24,))
    with pytest.raises(NoMatch, match="transposition"):
        match(slots("a", (4, 6)), slots("b", (6, 4)), reshape=True)


def test_an_empty_tensor_takes_another_empty_shape() -> None:
    assert misfit(Slot("a", (0,)), Slot("b", (0, 4)), reshape=True) is None
    assert misfit(Slot("a", (0,)), Slot("b", (1,)), reshape=True)
