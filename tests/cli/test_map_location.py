from __future__ import annotations

from pathlib import Path

import click
import pytest
from cli.conftest import Cli, names

from ckptfix.cli.map_location import parse_targets


def test_one_device(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    assert cli("map-location", ddp, tmp_path / "out.pth", "cuda:1").exit_code == 0
    assert set(names(tmp_path / "out.pth").values()) == {"cuda:1"}


def test_pairs(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    result = cli("map-location", ddp, tmp_path / "out.pth", "cuda:0=mps", "cuda:1=cuda:0")
    assert result.exit_code == 0
    assert set(names(tmp_path / "out.pth").values()) == {"mps"}
    assert "cuda:1" in result.stderr, "a source that does not occur is named"


@pytest.mark.parametrize("wrong", ["cudda:0", "gpu", "cuda:x", "cuda:0=cuuda:1"])
def test_no_such_device(cli: Cli, ddp: Path, tmp_path: Path, wrong: str) -> None:
    result = cli("map-location", ddp, tmp_path / "out.pth", wrong)
    assert result.exit_code == 2
    assert "hint: " in result.stderr
    assert not (tmp_path / "out.pth").exists()


def test_targets_are_a_device_or_pairs() -> None:
    assert parse_targets(["cuda:1"]) == "cuda:1"
    assert parse_targets(["cuda:1=cuda:0", " cuda:0 = cpu "]) == {"cuda:1": "cuda:0", "cuda:0": "cpu"}
    assert parse_targets(["cuda:1=cpu", "cuda:1=cpu"]) == {"cuda:1": "cpu"}


@pytest.mark.parametrize(
    "targets", [["cpu", "cuda:0"], ["cuda:0=cpu", "cuda:1"], ["=cpu"], ["cuda:0="], ["a=b", "a=c"]]
)
def test_anything_else_is_wrong_usage(targets: list[str]) -> None:
    with pytest.raises(click.BadParameter):
        parse_targets(targets)
