"""What a comparison says about values that are not tensors, and how it says everything."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from builders import Tensor, assemble, push, state_dict_ops, torch_zip, written
from kinds import tensor
from torch import nn

from ckptfix.ops.diff.compare import DiffResult
from ckptfix.ops.diff.result import ValueChange, jsonable

Compare = Callable[..., DiffResult]
Save = Callable[..., Path]


def test_values_that_are_no_tensors(compare: Compare) -> None:
    state = {"w": tensor(2)}
    a = {
        "m": state,
        "epoch": 1,
        "nan": math.nan,
        "flag": True,
        "names": ["x", "y"],
        "gone": None,
        "long": list(range(99)),
    }
    b = {"m": state, "epoch": 1, "nan": math.nan, "flag": 1, "names": ["x", "z"], "new": "n", "long": [*range(98), 0]}
    result = compare(a, b)
    assert result.values == (
        ValueChange("flag", "flag", True, 1),
        ValueChange("names", "names", ["x", "y"], ["x", "z"]),
        ValueChange("gone", None, None, None),
        ValueChange("long", "long", list(range(99)), [*range(98), 0]),
        ValueChange(None, "new", None, "n"),
    )
    assert result.counts.values == 7


def test_parameter_names_are_compared_as_names(compare: Compare) -> None:
    def named(prefix: str) -> dict[str, Any]:
        net = nn.Linear(2, 2)
        nn.init.ones_(net.weight)
        nn.init.ones_(net.bias)
        sgd = torch.optim.SGD([(prefix + name, value) for name, value in net.named_parameters()], lr=0.1)
        return {
            "model": {prefix + name: value for name, value in net.state_dict().items()},
            "optimizer": sgd.state_dict(),
        }

    result = compare(named("module."), named(""))
    assert [row.name_a for row in result.values] == ["optimizer/param_groups/0/param_names"]
    assert compare(named("module."), named(""), strip=["module"]).same


def test_metadata_of_safetensors(tmp_path: Path, compare: Compare, as_safetensors: Save) -> None:
    a = as_safetensors(tmp_path / "a.safetensors", {"w": tensor(2)}, {"format": "pt", "step": "1"})
    b = as_safetensors(tmp_path / "b.safetensors", {"w": tensor(2)}, {"format": "pt", "step": "2"})
    assert compare(a, b).values == (ValueChange("__metadata__/step", "__metadata__/step", "1", "2"),)
    assert compare(a, {"w": tensor(2)}).same


def test_the_result_as_json() -> None:
    value = {"a": [1, math.nan, -math.inf], 2: (b"\x01", complex(1, 2), None, True), "big": b"\0" * 100}
    assert jsonable(value) == {
        "a": [1, "NaN", "-Infinity"],
        "2": ["01", "(1+2j)", None, True],
        "big": "00" * 64 + "... (100 bytes)",
    }


def test_the_result_says_everything(compare: Compare) -> None:
    found = compare({"a": tensor(2), "b": tensor(3)}, {"a": tensor(2) + math.nan, "c": torch.ones(2)}).as_dict()
    assert found["same"] is False
    assert found["changed"][0]["values"]["nan_b"] == 2
    assert found["changed"][0]["values"]["max_abs"] is None
    assert [row["name"] for row in found["only_a"]] == ["b"]
    assert found["counts"]["matched"] == 1
    assert found["summary"][0] == "NaN or infinity in B where A has numbers: a (2 NaN of 2)."
    assert found["summary"][1].startswith("Different: ")


def test_ordered_dicts_and_order_make_no_difference(compare: Compare) -> None:
    assert compare({"a": tensor(2), "b": tensor(3)}, OrderedDict(b=tensor(3), a=tensor(2))).same


def test_keys_of_two_types(tmp_path: Path, compare: Compare) -> None:
    ops: list[Any] = ["EMPTY_DICT", "MARK"]
    for key in (1, "1"):
        ops += [*push(key), *state_dict_ops({"w": Tensor("0", (1,), 1)})]
    path = written(tmp_path / "a", torch_zip(assemble(("PROTO", 2), *ops, "SETITEMS", "STOP"), [b"\0" * 4]))
    result = compare(path, path)
    assert (result.same, result.counts.matched) == (True, 2)
