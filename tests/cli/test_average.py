from __future__ import annotations

import json
from pathlib import Path

import torch
from builders import written
from cli.conftest import Cli, state


def test_two_files_and_their_weights(cli: Cli, tmp_path: Path) -> None:
    one = written(tmp_path / "one.pth", state(w=(1, 2)))
    two = written(tmp_path / "two.pth", state(w=(3, 6)))
    result = cli("average", one, two, "-o", tmp_path / "out.pth")
    assert (result.exit_code, result.stdout) == (0, "averaged 1 tensor of 2 files, in float64\n")
    assert torch.load(tmp_path / "out.pth")["w"].tolist() == [2, 4]
    told = json.loads(cli("average", one, two, "-o", tmp_path / "w.pth", "--weights", "1,3", "--json").stdout)
    assert [row["weight"] for row in told["inputs"]] == [0.25, 0.75]
    assert torch.load(tmp_path / "w.pth")["w"].tolist() == [2.5, 5]


def test_the_last_of_a_folder(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for step in (2, 10):
        written(tmp_path / f"run/epoch_{step}.pth", state(w=(step,)))
    assert cli("average", tmp_path / "run", "-o", tmp_path / "out.pth", "--last", "2").exit_code == 0
    assert torch.load(tmp_path / "out.pth")["w"].tolist() == [6]


def test_wrong_usage(cli: Cli, tmp_path: Path) -> None:
    one = written(tmp_path / "one.pth", state(w=(1, 2)))
    for words in ([one], [one, one, "--weights", "a,b"], [one, one, "--ema", "2"]):
        assert cli("average", *words, "-o", tmp_path / "out.pth").exit_code == 2
    assert not (tmp_path / "out.pth").exists()
