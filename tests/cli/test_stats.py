from __future__ import annotations

import json
from pathlib import Path

import torch
from cli.conftest import Cli


def test_a_line_for_each_tensor_and_one_for_all(cli: Cli, ddp: Path) -> None:
    lines = cli("stats", ddp).stdout.splitlines()
    assert lines[0].split() == [
        "name",
        "dtype",
        "shape",
        "min",
        "max",
        "mean",
        "std",
        "norm",
        "nan",
        "infinite",
        "zeros",
    ]
    assert lines[2].split()[:8] == [
        "model_state_dict/module.fc.weight",
        "float32",
        "2x3",
        "1",
        "6",
        "3.5",
        "1.871",
        "9.539",
    ]
    assert lines[-1].split()[:4] == ["(all)", "1", "8", "4.5"]


def test_layers_csv_and_json(cli: Cli, ddp: Path) -> None:
    assert "model_state_dict/module.fc" in cli("stats", ddp, "--by-layer").stdout
    assert (
        cli("stats", ddp, "--csv")
        .stdout.splitlines()[2]
        .startswith("model_state_dict/module.fc.bias,float32,2,7.0,8.0")
    )
    told = json.loads(cli("stats", ddp, "--json", "--depth", "1").stdout)
    assert told["total"]["elements"] == 8 and [row["name"] for row in told["groups"]] == ["model_state_dict/module"]


def test_a_glob_that_matches_nothing(cli: Cli, ddp: Path) -> None:
    result = cli("stats", ddp, "--filter", "*.weight", "--filter", "none", "--allow-unmatched")
    assert result.exit_code == 0 and "none: matched no key" in result.stderr
    assert cli("stats", ddp, "--filter", "none").exit_code == 2


def test_the_mean_of_complex_numbers_is_one(cli: Cli, tmp_path: Path) -> None:
    torch.save({"w": torch.tensor([1 + 2j, 3 - 4j])}, tmp_path / "c.pth")
    assert "2-1j" in cli("stats", tmp_path / "c.pth").stdout.splitlines()[2].split()
    assert "(2-1j)" in cli("stats", tmp_path / "c.pth", "--csv").stdout
