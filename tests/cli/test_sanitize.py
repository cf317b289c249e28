from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from cli.conftest import Cli, names


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A training checkpoint with a numpy scalar, a Namespace and a function in it."""
    path = tmp_path / "in.pt"
    held: dict[str, Any] = {"state_dict": {"fc.weight": torch.ones(2)}, "best": numpy.float64(0.5)}
    held |= {"args": argparse.Namespace(lr=0.1), "loss": torch.nn.functional.relu}
    torch.save(held, path)
    return path


def test_it_loads_and_what_was_left_out_is_named(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    with pytest.raises(Exception, match="Weights only load failed"):
        torch.load(checkpoint, weights_only=True)
    result = cli("sanitize", checkpoint, out)
    assert result.exit_code == 3
    assert "best: numpy scalar -> float" in result.stdout
    assert "args: argparse.Namespace -> dict" in result.stdout
    assert "loss" in result.stderr and "torch.nn.functional.relu" in result.stderr
    found = torch.load(out, weights_only=True)
    assert found["best"] == 0.5 and found["args"] == {"lr": 0.1} and set(found) == {"state_dict", "best", "args"}
    assert names(out) == {"state_dict/fc.weight": "cpu"}


def test_what_was_asked_for_is_no_loss(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    result = cli("sanitize", checkpoint, out, "--keep-only", "weights", "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert {loss["at"] for loss in told["dropped"]} == {"best", "args", "loss"}
    assert all(loss["asked"] for loss in told["dropped"])
    assert set(torch.load(out, weights_only=True)) == {"state_dict"}


def test_a_dry_run_writes_nothing(cli: Cli, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    assert cli("sanitize", checkpoint, out, "--dry-run").exit_code == 3
    assert not out.exists()


def test_nothing_to_do_is_said_and_copied(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    result = cli("sanitize", ddp, tmp_path / "out.pth")
    assert result.exit_code == 0 and "identical copy" in result.stdout
    assert (tmp_path / "out.pth").read_bytes() == ddp.read_bytes()


def test_of_a_whole_module_it_is_the_state_dict(cli: Cli, tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "in.pt")
    result = cli("sanitize", tmp_path / "in.pt", tmp_path / "out.pt")
    assert result.exit_code == 0 and "input: a whole module" in result.stdout
    assert set(torch.load(tmp_path / "out.pt", weights_only=True)) == {"weight", "bias"}


def test_for_an_old_torch_a_zip_becomes_a_legacy_file(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    result = cli("sanitize", ddp, tmp_path / "out.pth", "--torch", "1.5")
    assert result.exit_code == 0 and "zip container -> legacy container" in result.stdout
    assert cli("diff", ddp, tmp_path / "out.pth").exit_code == 0


@pytest.mark.parametrize("version", ["9.9", "0.4", "1.4", "x", "1"])
def test_an_unknown_version_is_refused(cli: Cli, ddp: Path, tmp_path: Path, version: str) -> None:
    assert cli("sanitize", ddp, tmp_path / "out.pth", "--torch", version).exit_code == 2
