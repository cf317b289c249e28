from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from cli.conftest import Cli, names

from ckptfix.formats import detect


@pytest.mark.parametrize(
    ("name", "options", "found"),
    [
        ("out.safetensors", [], "safetensors"),
        ("out.bin", ["--to", "legacy"], "legacy"),
        ("out.model", ["--to", "torch"], "zip"),
        ("out", ["--to", "ZIP"], "zip"),
    ],
)
def test_the_suffix_or_the_option_says_the_format(
    cli: Cli, ddp: Path, tmp_path: Path, name: str, options: list[str], found: str
) -> None:
    result = cli("convert", ddp, tmp_path / name, *options)
    assert result.exit_code == 0, result.output
    assert found == detect(tmp_path / name).name


def test_what_stays_behind_is_named(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    document = json.loads(cli("convert", ddp, tmp_path / "out.safetensors", "--json").stdout)
    assert document["at"] == "model_state_dict"
    assert document["left_behind"] == ["epoch"]


def test_back_to_torch(cli: Cli, tensors: Path, tmp_path: Path) -> None:
    assert cli("convert", tensors, tmp_path / "out.pt").exit_code == 0
    assert names(tmp_path / "out.pt") == {"a": "cpu", "b": "cpu"}


@pytest.mark.parametrize("options", [["--to", "safetensor5"], []])
def test_an_unknown_format(cli: Cli, ddp: Path, tmp_path: Path, options: list[str]) -> None:
    result = cli("convert", ddp, tmp_path / "out.xyz", *options)
    assert result.exit_code == 2
    assert "safetensors" in result.stderr, "the choices are named"


def test_a_size_of_shards_and_no_suffix_mean_a_folder(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    assert cli("convert", ddp, tmp_path / "shards", "--shard-size", "1kB").exit_code == 0
    assert list((tmp_path / "shards").glob("model*.safetensors"))
    refused = cli("convert", ddp, tmp_path / "bare")
    assert refused.exit_code == 2 and "--to hf writes a folder of shards" in refused.stderr


def test_quantized_weights_become_plain(cli: Cli, tmp_path: Path) -> None:
    codes = torch.ones(4, 4).to(torch.float8_e4m3fn)
    state = {"l.weight": codes, "l.weight_scale_inv": torch.tensor([[2.0]])}
    safetensors.torch.save_file(state, tmp_path / "in.safetensors")
    line = ("convert", tmp_path / "in.safetensors", tmp_path / "out.safetensors", "--dequantize", "--dtype", "fp32")
    done = cli(*line, "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["dequantized"] == [{"name": "l.weight", "key": "l.weight", "dtype": "float32"}]
    assert document["companions"] == ["l.weight_scale_inv"]
    found = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert list(found) == ["l.weight"] and torch.equal(found["l.weight"], torch.full((4, 4), 2.0))
    refused = cli("convert", tmp_path / "out.safetensors", tmp_path / "again.safetensors", "--dequantize")
    assert refused.exit_code == 2 and "no quantized weights" in refused.stderr
