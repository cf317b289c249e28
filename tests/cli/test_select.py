from __future__ import annotations

import json
from pathlib import Path

import torch
from cli.conftest import Cli


def test_what_is_left_out_is_listed(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    result = cli("select", ddp, tmp_path / "out.pth", "--drop", "*.bias", "--drop", "nothing", "--allow-unmatched")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "kept 1 tensor, left out 1 (model_state_dict)",
        "left behind: model_state_dict/module.fc.bias",
    ]
    assert result.stderr == "warning: nothing: matched no key\n"
    assert list(torch.load(tmp_path / "out.pth", map_location="cpu")["model_state_dict"]) == ["module.fc.weight"]


def test_json_and_a_dry_run(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    result = cli("select", ddp, tmp_path / "out.pth", "--keep", "*.weight", "--json", "--dry-run")
    told = json.loads(result.stdout)
    assert (told["kept"], told["left_behind"]) == (1, ["model_state_dict/module.fc.bias"])
    assert told["account"]["tensors"] == 2 and told["account"]["tensors_written"] == 1
    assert not (tmp_path / "out.pth").exists()


def test_without_a_glob_it_is_wrong_usage(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    assert cli("select", ddp, tmp_path / "out.pth").exit_code == 2
    assert cli("select", ddp, tmp_path / "out.pth", "--keep", "x.*").exit_code == 2
    assert not (tmp_path / "out.pth").exists()


def test_without_an_output_its_name_is_said(cli: Cli, ddp: Path) -> None:
    result = cli("select", ddp, "--keep", "*.weight")
    assert f"output: {ddp.with_name('ddp.selected.pth')}" in result.stdout
