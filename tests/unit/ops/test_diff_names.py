"""Which tensors of two files belong together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import tensor
from torch import nn

from ckptfix.errors import KeyConflict, NoSuchTensor
from ckptfix.ops.diff.compare import DiffResult
from ckptfix.ops.diff.result import Ambiguous, Difference, NamePair, OneSided, Pairing, ValueChange

Compare = Callable[..., DiffResult]
Save = Callable[..., Path]


def test_names_on_one_side(compare: Compare) -> None:
    result = compare({"a": tensor(2), "old": torch.ones(2, 2)}, {"a": tensor(2), "new": torch.zeros(3).half()})
    assert result.only_a == (OneSided("old", "float32", (2, 2)),)
    assert result.only_b == (OneSided("new", "float16", (3,)),)
    assert not result.same
    assert not result.changed
    assert "1 only in A, 1 only in B" in " ".join(result.lines)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_forward_module."])
def test_wrapper_prefixes(prefix: str, compare: Compare) -> None:
    plain = {"fc.weight": tensor(3), "submodule.weight": tensor(2)}
    wrapped = {prefix + name: value for name, value in plain.items()}
    result = compare(wrapped, plain)
    assert result.wrapped == tuple(NamePair(prefix + name, name) for name in plain)
    assert (result.only_a, result.only_b, result.changed, result.renamed) == ((), (), (), ())
    assert not result.same
    assert compare(plain, wrapped).wrapped == tuple(NamePair(name, prefix + name) for name in plain)


def test_values_are_compared_across_a_wrapper(compare: Compare) -> None:
    result = compare({"module.w": tensor(3)}, {"w": tensor(3) + 1})
    assert [(row.match, row.name_a, row.name_b) for row in result.changed] == [("wrapper", "module.w", "w")]


def test_equal_names_win_over_wrapped_ones(compare: Compare) -> None:
    both = {"module.w": tensor(3), "w": tensor(3, seed=1)}
    assert compare(both, both).same
    result = compare(both, {"w": tensor(3, seed=1)})
    assert [row.name for row in result.only_a] == ["module.w"]
    assert result.wrapped == ()


def test_a_wrapper_that_leaves_a_doubt_matches_nothing(compare: Compare) -> None:
    result = compare({"module.w": tensor(2), "_orig_mod.w": tensor(2, seed=1)}, {"w": tensor(2, seed=2)})
    assert result.wrapped == ()
    assert len(result.only_a) == 2


def test_strip_takes_prefixes_off_both_sides(compare: Compare) -> None:
    plain = {"fc.weight": tensor(3)}
    assert compare({"module.fc.weight": tensor(3)}, plain, strip=["module"]).same
    assert compare({"module.model.fc.weight": tensor(3)}, plain, strip=["module.", "model."]).same
    assert not compare({"modulefc.weight": tensor(3)}, plain, strip=["module"]).same


def test_strip_that_makes_two_names_one(compare: Compare) -> None:
    with pytest.raises(KeyConflict) as caught:
        compare({"module.w": tensor(3), "w": tensor(2)}, {"w": tensor(3)}, strip=["module"])
    assert caught.value.pairs == (("w", ("module.w", "w")),)


def test_renamed(compare: Compare) -> None:
    a = {"features.0.weight": tensor(4, 4), "features.0.bias": tensor(4), "same": tensor(2)}
    b = {"conv.bias": tensor(4), "conv.weight": tensor(4, 4), "same": tensor(2)}
    result = compare(a, b)
    assert result.renamed == (
        NamePair("features.0.weight", "conv.weight"),
        NamePair("features.0.bias", "conv.bias"),
    )
    assert (result.only_a, result.only_b, result.changed) == ((), (), ())
    assert not result.same


def test_renamed_only_when_every_byte_is_equal(compare: Compare) -> None:
    late = torch.zeros(100_000)
    other = late.clone()
    other[-1] = 1
    result = compare({"a": late, "c": late.half()}, {"b": other, "d": late.bfloat16()})
    assert result.renamed == ()
    assert (len(result.only_a), len(result.only_b)) == (2, 2)


def test_renamed_across_formats_and_strides(tmp_path: Path, compare: Compare, as_safetensors: Save) -> None:
    value = tensor(30, 20)
    result = compare({"old": value.t()}, as_safetensors(tmp_path / "b.safetensors", {"new": value.t().contiguous()}))
    assert result.renamed == (NamePair("old", "new"),)


def test_renamed_tensors_may_differ_in_their_properties(compare: Compare) -> None:
    result = compare({"old": tensor(3)}, {"new": tensor(3).requires_grad_()})
    assert result.renamed == (NamePair("old", "new"),)
    assert [(row.match, row.differences) for row in result.changed] == [
        ("content", (Difference("requires_grad", False, True),))
    ]


def test_equal_tensors_are_paired_in_order(compare: Compare) -> None:
    a = {f"a{index}": torch.zeros(4) for index in range(3)}
    b = {f"b{index}": torch.zeros(4) for index in range(3)}
    result = compare(a, b)
    assert result.renamed == tuple(NamePair(f"a{index}", f"b{index}", True) for index in range(3))
    assert result.ambiguous == ()


def test_equal_tensors_of_unequal_number_are_left_alone(compare: Compare) -> None:
    result = compare({"a0": torch.zeros(4), "a1": torch.zeros(4)}, {"b0": torch.zeros(4)})
    assert result.renamed == ()
    assert result.ambiguous == (Ambiguous(("a0", "a1"), ("b0",)),)
    assert [row.name for row in result.only_a] == ["a0", "a1"]
    assert "could not be paired" in " ".join(result.lines)


def test_empty_and_meta_tensors_are_renamed_by_nobody(compare: Compare) -> None:
    result = compare(
        {"a": torch.empty(0), "m": torch.empty(3, device="meta")},
        {"b": torch.empty(0), "n": torch.empty(3, device="meta")},
    )
    assert (result.renamed, result.ambiguous, len(result.only_a)) == ((), (), 2)


def test_a_bare_state_dict_against_a_nested_one(compare: Compare) -> None:
    model = {"fc.weight": tensor(3), "fc.bias": tensor(2)}
    result = compare(model, {"model_state_dict": model, "epoch": 3})
    assert result.pairings == (Pairing("", "model_state_dict", "main state dict"),)
    assert (result.counts.matched, result.only_a, result.only_b, result.changed) == (2, (), (), ())
    assert result.values == (ValueChange(None, "epoch", None, 3),)
    assert "Compared the top level of A with model_state_dict of B" in " ".join(result.lines)
    back = compare({"model_state_dict": model, "epoch": 3}, model)
    assert back.pairings == (Pairing("model_state_dict", "", "main state dict"),)
    assert back.counts.matched == 2


def training(model: str, optimizer: str, **changes: Any) -> dict[str, Any]:
    net = nn.Linear(3, 2)
    net.load_state_dict({"weight": tensor(2, 3), "bias": tensor(2)})
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    adam = torch.optim.Adam(net.parameters(), lr=changes.get("lr", 0.1))
    net.weight.grad, net.bias.grad = tensor(2, 3, seed=1), tensor(2, seed=2)
    adam.step()
    return {"epoch": changes.get("epoch", 1), model: weights, optimizer: adam.state_dict()}


def test_mappings_under_other_names(compare: Compare) -> None:
    result = compare(training("model", "optimizer"), training("state_dict", "optim"))
    assert set(result.pairings) == {
        Pairing("model", "state_dict", "main state dict"),
        Pairing("optimizer", "optim", "optimizer"),
    }
    assert result.same
    assert result.counts.matched == 2 + 2 * 3


def test_equal_addresses_need_no_word(compare: Compare) -> None:
    result = compare(training("model", "optimizer"), training("model", "optimizer", lr=0.2, epoch=2))
    assert result.pairings == ()
    assert ValueChange("epoch", "epoch", 1, 2) in result.values
    assert ValueChange("optimizer/param_groups/0/lr", "optimizer/param_groups/0/lr", 0.1, 0.2) in result.values


def test_one_equal_address_is_enough(compare: Compare) -> None:
    net = {"fc.weight": tensor(3)}
    result = compare(
        {"model": net, "ema": {"fc.weight": tensor(3, seed=1)}}, {"model": net, "best": {"fc.bias": tensor(4)}}
    )
    assert result.pairings == ()
    assert [row.name for row in result.only_a] == ["ema/fc.weight"]


def test_at_limits_the_comparison(compare: Compare) -> None:
    a, b = training("model", "optimizer"), training("model", "optimizer", lr=0.5, epoch=9)
    assert compare(a, b, at="model").same
    assert not compare(a, b).same
    assert compare(a, b, at="model").counts.values == 0
    result = compare(a, {"net": a["model"]}, at=("model", "net"))
    assert result.same
    assert result.pairings == (Pairing("model", "net", "chosen"),)


def test_at_of_one_file_is_compared_with_the_main_state_dict_of_the_other(compare: Compare) -> None:
    nested = training("model", "optimizer")
    for a, b in ((nested, nested["model"]), (nested["model"], nested)):
        assert compare(a, b, at="model").same


@pytest.mark.parametrize("at", ["modle", ("model", "nothing"), ("nothing", "model")])
def test_at_names_nothing(at: Any, compare: Compare) -> None:
    with pytest.raises(NoSuchTensor) as caught:
        compare(training("model", "optimizer"), training("model", "optimizer"), at=at)
    assert "model" in caught.value.near


def test_filter(compare: Compare) -> None:
    a = {"model": {"module.fc.weight": tensor(3), "module.head.weight": tensor(2)}, "epoch": 1}
    b = {"model": {"module.fc.weight": tensor(3), "module.head.weight": tensor(2) + 1}, "epoch": 2}
    assert not compare(a, b).same
    for glob in ("fc.*", "module.fc.*", "model/module.fc.weight"):
        result = compare(a, b, filter=glob)
        assert (result.same, result.counts.matched, result.counts.values) == (True, 1, 0)
    assert compare(a, b, filter="epoch").values == (ValueChange("epoch", "epoch", 1, 2),)
