from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli.conftest import Cli


@pytest.fixture
def views(tmp_path: Path) -> Path:
    """A view of a large storage, two equal tensors, and an optimizer."""
    path = tmp_path / "in.pt"
    large = torch.arange(100_000.0)
    model = {"a.weight": large[10:20], "b.weight": torch.ones(64), "c.weight": torch.ones(64)}
    torch.save({"model": model, "optimizer": {"state": {0: {"m": torch.zeros(500)}}, "param_groups": []}}, path)
    return path


def test_what_each_reason_saves_is_said(cli: Cli, views: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.pt"
    result = cli("slim", views, out, "--no-optimizer", "--dedupe")
    assert result.exit_code == 0
    assert "unused storage: 399,960 bytes saved in 1 storage" in result.stdout
    assert "optimizer: 2,000 bytes saved (optimizer)" in result.stdout
    assert "duplicates: 256 bytes saved in 1 storage, whose tensors are now tied" in result.stdout
    before, after = torch.load(views), torch.load(out, weights_only=True)
    assert set(after) == {"model"}
    assert all(torch.equal(before["model"][name], after["model"][name]) for name in before["model"])
    assert out.stat().st_size < 5_000


@pytest.mark.parametrize("flag", ["--check-only", "--dry-run"])
def test_what_would_be_saved_is_listed_and_nothing_written(cli: Cli, views: Path, tmp_path: Path, flag: str) -> None:
    result = cli("slim", views, tmp_path / "out.pt", flag, "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert told["saved"]["unused storage"] == 399_960 and not told["written"]
    assert not (tmp_path / "out.pt").exists()


def test_the_result_is_the_same_to_diff(cli: Cli, views: Path, tmp_path: Path) -> None:
    assert cli("slim", views, tmp_path / "out.pt").exit_code == 0
    assert cli("diff", views, tmp_path / "out.pt").exit_code == 0


def test_nothing_to_do_is_said_and_copied(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    result = cli("slim", ddp, tmp_path / "out.pth")
    assert result.exit_code == 0 and "identical copy" in result.stdout
    assert (tmp_path / "out.pth").read_bytes() == ddp.read_bytes()
