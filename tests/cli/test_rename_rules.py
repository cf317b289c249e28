"""ckptfix rename --map with lines that change tensors, and --reverse."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.conftest import Cli, state


@pytest.fixture
def fused(tmp_path: Path) -> Path:
    path = tmp_path / "in.pth"
    path.write_bytes(state(a=(1, 2, 3, 4), b=(5, 6)))
    return path


def test_a_file_is_run_and_run_backwards(cli: Cli, tmp_path: Path, fused: Path) -> None:
    rules = tmp_path / "rules.txt"
    rules.write_text("a -> {x,y} | split\nb -> c\n")
    done = cli("rename", fused, tmp_path / "out.pth", "--map", rules)
    assert done.exit_code == 0
    assert done.output == "made 2 tensors by rule, renamed 1 key\n"
    done = cli("rename", tmp_path / "out.pth", tmp_path / "back.pth", "--map", rules, "--reverse")
    assert done.exit_code == 0
    assert cli("diff", fused, tmp_path / "back.pth").exit_code == 0


def test_lines_without_a_file(cli: Cli, tmp_path: Path, fused: Path) -> None:
    done = cli("rename", fused, tmp_path / "out.pth", "--line", "a -> {x,y} | split", "--line", "b -> c")
    assert done.exit_code == 0 and done.output == "made 2 tensors by rule, renamed 1 key\n"
    (tmp_path / "rules.txt").write_text("a -> b")
    both = cli("rename", fused, tmp_path / "x.pth", "--line", "a -> c", "--map", tmp_path / "rules.txt")
    assert both.exit_code == 2 and "--line and --map" in both.output
    broken = cli("rename", fused, tmp_path / "x.pth", "--line", "a -> c | turn")
    assert broken.exit_code == 2 and "there is no operation called 'turn'" in broken.output


def test_reverse_needs_a_file(cli: Cli, tmp_path: Path, fused: Path) -> None:
    done = cli("rename", fused, tmp_path / "out.pth", "--sub", "a=b", "--reverse")
    assert done.exit_code == 2
    assert "--reverse needs --map." in done.stderr


def test_a_line_that_does_not_fit_names_itself(cli: Cli, tmp_path: Path, fused: Path) -> None:
    rules = tmp_path / "rules.txt"
    rules.write_text("# head\na -> {x,y,z} | split\n")
    done = cli("rename", fused, tmp_path / "out.pth", "--map", rules)
    assert done.exit_code == 2
    assert f"{rules}: line 2: a [4]: `split`: 4 rows cannot be divided into 3 equal parts" in done.stderr
    assert not (tmp_path / "out.pth").exists()
