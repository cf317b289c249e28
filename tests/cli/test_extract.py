from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli.conftest import Cli, names
from torch import nn

from ckptfix.formats import detect


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    torch.save({"model": nn.Linear(2, 1), "ema": nn.Linear(2, 1), "epoch": 1}, tmp_path / "whole.pt")
    return tmp_path / "whole.pt"


def test_the_plain_model_is_taken_and_the_rest_is_named(cli: Cli, whole: Path, tmp_path: Path) -> None:
    result = cli("extract", whole, tmp_path / "out.pth")
    assert result.exit_code == 0, result.output
    assert "extracted 2 tensors: the module torch.nn.modules.linear.Linear at model, as zip" in result.stdout
    assert "left behind: ema, epoch" in result.stdout
    assert names(tmp_path / "out.pth") == {"weight": "cpu", "bias": "cpu"}


@pytest.mark.parametrize("options", [["--ema"], ["--at", "ema"]])
def test_ema_and_at(cli: Cli, whole: Path, tmp_path: Path, options: list[str]) -> None:
    document = json.loads(cli("extract", whole, tmp_path / "out.safetensors", *options, "--json").stdout)
    assert document["at"] == "ema" and document["tensors"] == 2 and document["output_format"] == "safetensors"
    assert detect(tmp_path / "out.safetensors").name == "safetensors"


def test_a_dry_run_writes_nothing(cli: Cli, whole: Path, tmp_path: Path) -> None:
    result = cli("extract", whole, tmp_path / "out.pth", "--dry-run")
    assert result.exit_code == 0 and "would write" in result.stdout
    assert not (tmp_path / "out.pth").exists()


def test_an_existing_output_needs_force(cli: Cli, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "out.pth").write_bytes(b"mine")
    assert cli("extract", whole, tmp_path / "out.pth").exit_code == 2
    assert (tmp_path / "out.pth").read_bytes() == b"mine"
    assert cli("extract", whole, tmp_path / "out.pth", "--force").exit_code == 0


def test_a_wrong_address_names_the_right_ones(cli: Cli, whole: Path, tmp_path: Path) -> None:
    result = cli("extract", whole, tmp_path / "out.pth", "--at", "net")
    assert result.exit_code == 2 and "hint: there are 2, at model, ema" in result.stderr
