"""Colours: where a terminal is, or where they are asked for; never in JSON."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli.conftest import Cli
from cli.terminal import real_terminal

from ckptfix.cli.shared import colors, console

FIX, DAMAGE, ADDED, REMOVED, END = "\x1b[36m", "\x1b[1;31m", "\x1b[32m", "\x1b[31m", "\x1b[0m"
WARNING, NOTE = "\x1b[33m", "\x1b[2m"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "is_terminal", lambda stream: stream is sys.stdout)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def refused(tmp_path: Path) -> Path:
    torch.save({"m": {"module.w": torch.ones(2)}, "p": Path("x")}, tmp_path / "refused.pth")
    return tmp_path / "refused.pth"


def test_a_pipe_gets_none(cli: Cli, refused: Path) -> None:
    assert "\x1b" not in cli("doctor", refused).output
    assert "\x1b" not in cli("doctor", refused.with_name("missing.pth")).output


def test_damage_and_fixes_on_a_terminal(cli: Cli, refused: Path, terminal: None) -> None:
    lines = cli("doctor", refused).stdout.splitlines()
    assert lines[0].startswith(f"{DAMAGE}torch.load refuses") and lines[0].endswith(END)
    assert lines[1].startswith(f"Fix: {FIX}ckptfix fix") and lines[1].endswith(END)
    later = [line for line in lines[4:] if "\x1b" in line]
    assert later and all(line.startswith((f"{WARNING}warning{END}: ", f"{NOTE}note{END}: ")) for line in later)


def test_the_checkpoints_of_a_run_are_no_command(cli: Cli, tmp_path: Path, terminal: None) -> None:
    group = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1).state_dict()
    for epoch in (1, 2):
        torch.save({"epoch": epoch, "model": {"w": torch.ones(2)}, "optimizer": group}, tmp_path / f"epoch_{epoch}.pth")
    lines = cli("doctor", tmp_path).stdout.splitlines()
    table = [line for line in lines if "epoch_" in line and "resume" not in line and "Try" not in line]
    assert len(table) >= 2 and not [line for line in table if FIX in line]


@pytest.mark.parametrize("name", ["NO_COLOR", "TERM"])
def test_the_environment_turns_them_off(
    cli: Cli, refused: Path, terminal: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, {"NO_COLOR": "1", "TERM": "dumb"}[name])
    assert "\x1b" not in cli("doctor", refused).stdout
    assert FIX in cli("doctor", refused, "--color", "always").stdout


def test_an_empty_no_color_says_nothing(
    cli: Cli, refused: Path, terminal: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    assert FIX in cli("doctor", refused).stdout


def test_options_decide(cli: Cli, refused: Path, terminal: None) -> None:
    assert "\x1b" not in cli("doctor", refused, "--color", "never").stdout
    assert "\x1b" not in cli("doctor", refused, "--color", "always", "--json").stdout
    assert cli("doctor", refused, "--color", "blue").exit_code == 2


def test_an_error_is_damage(cli: Cli, refused: Path) -> None:
    done = cli("inspect", refused.with_name("missing.pth"), "--color", "always")
    assert done.stderr.startswith(f"{DAMAGE}{refused.with_name('missing.pth')}: no such file")


def test_painted_text() -> None:
    assert colors.painted("Fix: it", "fix", 3) == f"{FIX}Fix{END}: it"
    assert colors.painted("Fix: it", "fix", -5) == f"Fix: {FIX}it{END}"
    assert colors.painted("x", None) == "x" and colors.painted("", "added") == ""


def test_what_diff_finds_on_one_side(cli: Cli, tmp_path: Path) -> None:
    torch.save({"old": torch.ones(2), "both": torch.ones(3)}, tmp_path / "a.pth")
    torch.save({"new": torch.zeros(2), "both": torch.ones(3)}, tmp_path / "b.pth")
    lines = cli("diff", tmp_path / "a.pth", tmp_path / "b.pth", "--color", "always").stdout.splitlines()
    painted = [line for line in lines if "\x1b" in line]
    assert [line.split()[0] for line in painted] == [f"{REMOVED}Only", f"{REMOVED}old", f"{ADDED}Only", f"{ADDED}new"]
    assert all(line.endswith(END) for line in painted)


def test_nan_and_warnings_in_tables(cli: Cli, tmp_path: Path) -> None:
    torch.save({"bad": torch.tensor([float("nan"), 1]), "good": torch.ones(3)}, tmp_path / "a.pth")
    lines = cli("stats", tmp_path / "a.pth", "--color", "always").stdout.splitlines()
    assert [line.split()[0] for line in lines if "\x1b" in line] == [f"{DAMAGE}bad", f"{DAMAGE}(all)"]
    torch.save({"module.w": torch.ones(2)}, tmp_path / "b.pth")
    lines = cli("ls", tmp_path / "b.pth", "--color", "always").stdout.splitlines()
    assert [line.startswith(WARNING) for line in lines] == [False, False, True]


def _on_terminal(*words: object, **environment: str) -> str:
    """What a real terminal of 100 columns gets from a command line."""
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"} | environment
    line = [sys.executable, "-m", "ckptfix", *map(str, words)]
    with real_terminal(100) as ours:
        subprocess.run(line, stdin=ours.fd, stdout=ours.fd, stderr=ours.fd, env=env, timeout=120, check=False)
    return ours.shown.decode()


@pytest.mark.slow
def test_each_meaning_on_a_real_terminal(tmp_path: Path, refused: Path) -> None:
    """Error, warning, fix, NaN, added and removed have their colours; progress does not flicker; NO_COLOR is plain."""
    torch.save({"old": torch.ones(2), "both": torch.ones(3)}, tmp_path / "a.pth")
    torch.save({"new": torch.zeros(4), "both": torch.tensor([1, 2, float("nan")])}, tmp_path / "b.pth")
    verdict, compared = _on_terminal(refused), _on_terminal("diff", tmp_path / "a.pth", tmp_path / "b.pth")
    assert f"{DAMAGE}  error{END}" in verdict and f"{WARNING}  warning{END}" in verdict
    assert f"fix      {FIX}ckptfix fix " in verdict
    assert f"{DAMAGE}NaN or infinity in B" in compared
    assert f"{REMOVED}Only in A:" in compared and f"{ADDED}Only in B:" in compared
    assert " of 12" not in compared, "a bar for what takes a moment"
    for words in ((refused,), ("diff", tmp_path / "a.pth", tmp_path / "b.pth"), (tmp_path / "none.pth",)):
        assert "\x1b" not in _on_terminal(*words, NO_COLOR="1")
        assert "\x1b[" in _on_terminal(*words)
