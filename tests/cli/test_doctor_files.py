from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cli.conftest import Cli


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six checkpoints: one is cut short, one is a web page, one has wrapped names."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs")
    folder.mkdir()
    for epoch in range(6):
        prefix = "module." if epoch == 5 else ""
        state = {f"{prefix}bias": torch.ones(3) + epoch, f"{prefix}weight": torch.ones(900) + epoch}
        torch.save(state, folder / f"epoch_{epoch}.pt")
    cut = folder / "epoch_1.pt"
    cut.write_bytes(cut.read_bytes()[:3000])
    (folder / "epoch_3.pt").write_bytes(b"<html>not found</html>")
    (folder / "log.txt").write_text("a log")
    return folder


def test_a_folder_of_checkpoints_is_judged_file_by_file(cli: Cli, runs: Path) -> None:
    done = cli("doctor", "runs")
    lines = done.stdout.splitlines()
    assert done.exit_code == 1
    assert lines[0] == "6 files: 2 with errors, 1 with warnings, 3 without problems."
    rows = [line.split()[:3] for line in lines[4:7]]
    assert rows == [
        ["error", "truncated", "runs/epoch_1.pt"],
        ["error", "web-page", "runs/epoch_3.pt"],
        ["warning", "wrapped-names", "runs/epoch_5.pt"],
    ]
    assert lines[8:] == [
        "Fix: ckptfix fix runs/epoch_1.pt",
        "Try: download it again from its direct (raw) link",
        "Fix: ckptfix fix runs/epoch_5.pt",
    ]


def test_the_commands_for_several_files_run_as_printed(cli: Cli, runs: Path) -> None:
    for line in cli("doctor", "runs").stdout.splitlines():
        if line.startswith("Fix: ckptfix "):
            assert cli(*line.removeprefix("Fix: ckptfix ").split()).exit_code in (0, 3)


def test_several_files_may_be_named(cli: Cli, runs: Path) -> None:
    good = cli("doctor", "runs/epoch_0.pt", "runs/epoch_2.pt")
    assert (good.exit_code, good.stdout) == (0, "2 files: 0 with errors, 2 without problems.\n")
    absent = cli("doctor", "runs/epoch_0.pt", "absent.pt")
    assert absent.exit_code == 2
    assert "absent.pt  no such file or folder" in absent.stdout and absent.stderr == ""
    quiet = cli("doctor", "runs/epoch_0.pt", "absent.pt", "--quiet")
    assert (quiet.stdout, quiet.stderr) == ("", "absent.pt: no such file or folder\n")
    warned = cli("doctor", "--fail-on", "warning", "runs/epoch_0.pt", "runs/epoch_5.pt")
    assert warned.exit_code == 1


def test_a_terminal_gets_the_first_of_many(cli: Cli, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptfix.cli.doctor.SHOWN", 2)
    assert "more" not in cli("doctor", "runs").stdout
    monkeypatch.setattr("ckptfix.cli.shared.console.is_terminal", lambda stream: True)
    lines = cli("doctor", "runs").stdout.splitlines()
    assert lines[6] == "... 1 more (a pipe gets all)"
    assert lines[-1] == "... 1 more commands (a pipe gets all)"


def test_several_files_as_json(cli: Cli, runs: Path) -> None:
    files = [json.loads(line) for line in cli("doctor", "runs", "--json").stdout.splitlines()]
    assert [file["path"] for file in files] == [f"runs/epoch_{epoch}.pt" for epoch in range(6)]
    assert files[0] == json.loads(cli("doctor", "runs/epoch_0.pt", "--json").stdout)


def test_a_file_that_cannot_be_read_is_a_line_of_its_own(cli: Cli, runs: Path) -> None:
    done = cli("doctor", "runs/epoch_0.pt", "absent.pt", "--json")
    good, failed = (json.loads(line) for line in done.stdout.splitlines())
    assert (done.exit_code, good["exit_code"], failed["exit_code"]) == (2, 0, 2)
    assert failed["path"] == "absent.pt" and failed["error"]["type"] == "NoSuchFile" and "findings" not in failed


def test_a_folder_without_checkpoints_is_judged_itself(cli: Cli, tmp_path: Path) -> None:
    done = cli("doctor", str(tmp_path))
    assert done.exit_code == 1 and done.stdout.startswith("an empty folder")
