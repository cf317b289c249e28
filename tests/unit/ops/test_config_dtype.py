"""The dtype in config.json of a model's folder follows a cast."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import ckptfix
from ckptfix.ops.cast.config import stated

WAYS: dict[str, Callable[..., Any]] = {
    "cast": lambda source, dest: ckptfix.cast(source, dest, "bfloat16"),
    "convert": lambda source, dest: ckptfix.convert(source, dest, to="hf", dtype="bfloat16"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sharded", [True, False])
def test_a_folder_states_its_new_dtype(tmp_path: Path, way: str, sharded: bool) -> None:
    source = tmp_path / "in"
    source.mkdir()
    weights = {"a.weight": torch.ones(4, 4), "b.weight": torch.ones(4, 4)}
    if sharded:
        safetensors.torch.save_file(weights, tmp_path / "whole.safetensors", {"format": "pt"})
        source.rmdir()
        ckptfix.convert(tmp_path / "whole.safetensors", source, to="hf", shard_size=64)
    else:
        torch.save(weights, source / "pytorch_model.bin")
    (source / "config.json").write_text('{"model_type": "x", "dtype": "float32", "hidden_size": 4}')
    WAYS[way](source, tmp_path / "out")
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert made == {"model_type": "x", "dtype": "bfloat16", "hidden_size": 4}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"torch_dtype": "float32", "dtype": "float32"}, {"torch_dtype": "float16", "dtype": "float16"}),
        ({"architectures": ["X"]}, {"architectures": ["X"], "torch_dtype": "float16"}),
        ({"model_type": "x", "dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}, "other": {"a": 1}},
         {"model_type": "x", "dtype": "float16", "text_config": {"dtype": "float16"}, "other": {"a": 1}}),
        ({"_class_name": "UNet2DConditionModel"}, {"_class_name": "UNet2DConditionModel"}),
        ({}, {}),
    ],
)  # fmt: skip
def test_what_is_stated(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert stated(before, "float16") == after
