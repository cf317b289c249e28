from __future__ import annotations

import json
from pathlib import Path

import torch
from builders import written
from cli.conftest import Cli, state


def test_two_files(cli: Cli, tmp_path: Path) -> None:
    one = written(tmp_path / "one.pth", state(a=(1, 2)))
    two = written(tmp_path / "two.pth", state(b=(3,)))
    result = cli("merge", one, two, "-o", tmp_path / "out.pth")
    assert result.stdout == "merged 2 tensors from 2 inputs, as zip\n"
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"a": [1, 2], "b": [3]}


def test_a_conflict_is_an_error_with_its_names(cli: Cli, tmp_path: Path) -> None:
    one = written(tmp_path / "one.pth", state(a=(1, 2), b=(3,)))
    two = written(tmp_path / "two.pth", state(b=(3,)))
    result = cli("merge", one, two, "-o", tmp_path / "out.pth", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["pairs"] == [["b", [str(one), str(two)]]]
    assert not (tmp_path / "out.pth").exists()


def test_one_input_is_wrong_usage(cli: Cli, tmp_path: Path) -> None:
    one = written(tmp_path / "one.pth", state(a=(1, 2)))
    assert cli("merge", one, "-o", tmp_path / "out.pth").exit_code == 2
    assert cli("merge", one, tmp_path / "out.pth").exit_code == 2
    assert not (tmp_path / "out.pth").exists()
