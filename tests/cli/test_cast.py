from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from builders import written
from cli.conftest import Cli, state


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return written(tmp_path / "in.pth", state(w=(1, 70000), running_mean=(1, 2)))


def test_what_was_cast_what_stays_and_what_left_the_range(cli: Cli, source: Path, tmp_path: Path) -> None:
    result = cli("cast", source, tmp_path / "out.pth", "--to", "float16")
    assert result.stdout.splitlines() == ["cast 1 tensor to float16 (from float32)", "unchanged: running_mean"]
    assert result.stderr == "warning: w: 1 elements are beyond the range of float16\n"
    assert torch.load(tmp_path / "out.pth")["w"].tolist() == [1, float("inf")]


def test_json(cli: Cli, source: Path, tmp_path: Path) -> None:
    told = json.loads(cli("cast", source, tmp_path / "out.pth", "--to", "e4m3", "--json").stdout)
    assert told["cast"] == [{"name": "w", "dtype": "float32"}]
    assert told["rounded"] == [{"name": "w", "overflow": 0, "saturated": 1, "underflow": 0}]


def test_an_overflow_may_be_an_error(cli: Cli, source: Path, tmp_path: Path) -> None:
    assert cli("cast", source, tmp_path / "out.pth", "--to", "float16", "--on-overflow", "error").exit_code == 2
    assert not (tmp_path / "out.pth").exists()


def test_wrong_usage(cli: Cli, source: Path, tmp_path: Path) -> None:
    assert cli("cast", source, tmp_path / "out.pth").exit_code == 2
    assert cli("cast", source, tmp_path / "out.pth", "--to", "int8").exit_code == 2
