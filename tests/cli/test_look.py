from __future__ import annotations

import json
import os
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
import torch
from cli.conftest import Cli
from click.testing import CliRunner
from safetensors.torch import save_file

from ckptfix.cli import commands, verdict


@pytest.fixture
def wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.save({"module.weight": torch.ones(2)}, "ddp.pt")
    torch.save({"weight": torch.ones(2)}, "plain.pt")
    return tmp_path


def facts(text: str) -> dict[str, str]:
    """The lines of a verdict by their labels, the first under ``""``."""
    first, *rows = text.splitlines()
    return {"": first, **{row.split()[0]: row.split(maxsplit=1)[1] for row in rows}}


def test_a_file_alone_gets_a_verdict(cli: Cli, wrapped: Path) -> None:
    done = cli("ddp.pt")
    told = facts(done.stdout)
    assert done.exit_code == 0 and len(done.stdout.splitlines()) <= 8
    assert told[""].startswith("! ddp.pt: PyTorch zip, ") and "1 tensor, 2 parameters, cpu" in told[""]
    assert told["warning"].endswith("[wrapped-names]") and told["fix"].startswith("ckptfix strip-module ddp.pt ")
    assert "data not checked" in told["more"] and "ckptfix doctor ddp.pt" in told["more"]
    told = facts(cli("plain.pt").stdout)
    assert told[""].startswith("✓ plain.pt: ") and "ok" in told and "fix" not in told


def test_a_training_checkpoint_is_told_in_a_line(cli: Cli, wrapped: Path) -> None:
    adam = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.5, "params": [0]}]}
    torch.save({"epoch": 9, "model": {"weight": torch.ones(2)}, "optimizer": adam, "run": Path("x")}, "train.pt")
    done = cli("train.pt")
    told = facts(done.stdout)
    assert done.exit_code == 1 and len(done.stdout.splitlines()) <= 8
    assert told[""].startswith("✗ train.pt: training checkpoint (PyTorch zip)")
    assert "model: 1 tensor" in told["holds"] and "optimizer" in told["holds"]
    assert "epoch 9" in told["training"] and "[foreign-global]" in told["error"]


def test_what_would_run_is_shown_and_does_not_run(cli: Cli, wrapped: Path) -> None:
    torch.save({"w": torch.ones(2), "x": Call(f"touch PWNED \x1b[31m {'x' * 500}")}, "evil.pt")
    for words in (("evil.pt",), ("doctor", "evil.pt")):
        done = cli(*words)
        assert done.exit_code == 1 and "loading this file runs os.system('touch PWNED \\x1b[31m xxx" in done.stdout
        assert "\x1b" not in done.stdout and "x" * 200 not in done.stdout and "..." in done.stdout
    assert cli("inspect", "evil.pt").exit_code == 0
    assert not Path("PWNED").exists()


class Call:
    """An object whose pickle calls os.system."""

    def __init__(self, line: str) -> None:
        self.line = line

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.line,)


def test_what_is_left_of_a_file_that_is_cut_short(cli: Cli, wrapped: Path) -> None:
    state = {number: {"exp_avg": torch.ones(99)} for number in range(4)}
    optimizer = {"state": state, "param_groups": [{"params": [0, 1, 2, 3]}]}
    torch.save({"model": {"a": torch.ones(9), "b": torch.ones(9)}, "optimizer": optimizer}, "whole.pt")
    whole = Path("whole.pt").read_bytes()
    Path("cut.pt").write_bytes(whole[: whole.index(b"whole/data/4")])
    left = "all 2 model weights are intact; "
    for words in (("cut.pt",), ("doctor", "cut.pt"), ("repair", "cut.pt", "--check-only")):
        said = cli(*words).stdout
        assert left in said and "of 4 optimizer tensors" in said and "lost" in said, words
    assert left in json.loads(cli("doctor", "cut.pt", "--json").stdout)["summary"][1]
    save_file({"weight": torch.ones(9), "zeta": torch.ones(9)}, "whole.safetensors")
    Path("cut.safetensors").write_bytes(Path("whole.safetensors").read_bytes()[:-4])
    assert "1 of 2 model weights is lost" in cli("cut.safetensors").stdout


def test_a_file_alone_takes_the_options_of_doctor(cli: Cli, wrapped: Path) -> None:
    assert cli("ddp.pt", "--json").stdout == cli("doctor", "ddp.pt", "--fast", "--json").stdout
    assert cli("ddp.pt", "--fail-on", "warning").exit_code == 1
    assert "needs-torch" in cli("ddp.pt", "-v").stdout


def test_no_tensor_is_read(cli: Cli, wrapped: Path) -> None:
    torch.save({"weight": torch.tensor([float("nan")])}, "nan.pt")
    assert cli("nan.pt").exit_code == 0 and "nan" in cli("doctor", "nan.pt").stdout.lower()


def test_the_marks_are_ascii_where_the_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", TextIOWrapper(BytesIO(), encoding="ascii"))
    assert verdict.marks() == {"error": "x", "warning": "!", "info": "-"}


def test_a_name_that_is_neither_a_command_nor_a_file(cli: Cli, wrapped: Path) -> None:
    done = cli("missing.pt")
    assert done.exit_code == 2 and done.stderr == "missing.pt: no such file or folder\n"
    assert "hint: did you mean ddp.pt?" in cli("dpd.pt").stderr
    assert "No such command 'inspekt'. Did you mean inspect?" in cli("inspekt", "ddp.pt").stderr
    assert "Use `ckptfix select ddp.pth --drop 'fc.*'`." in cli("drop", "ddp.pth", "fc.*").stderr
    assert "Use `ckptfix select ddp.pth o.pth --keep 'fc.*'`." in cli("keep", "ddp.pth", "o.pth", "fc.*").stderr
    assert "Did you mean select?" in cli("drop", "ddp.pth").stderr


def test_a_command_goes_before_a_file_of_its_name(cli: Cli, wrapped: Path) -> None:
    Path("ddp.pt").rename("inspect")
    assert "Missing argument 'FILE...'" in cli("inspect").stderr


def test_a_stream_alone(wrapped: Path) -> None:
    done = CliRunner().invoke(commands, ["-"], input=Path("ddp.pt").read_bytes())
    assert done.stdout.startswith("! -: PyTorch zip, ") and "`ckptfix doctor -`" in done.stdout


def test_several_files_alone(cli: Cli, wrapped: Path) -> None:
    done = cli("ddp.pt", "plain.pt").stdout
    assert done.startswith("2 files: 0 with errors, 1 with warnings, 1 without problems. Only headers were checked.")


@pytest.mark.parametrize("options", [(), ("--json",), ("--quiet",)])
def test_a_file_that_is_cut_short_does_not_look_fine(cli: Cli, wrapped: Path, options: tuple[str, ...]) -> None:
    save_file({"weight": torch.ones(9)}, "whole.safetensors")
    Path("cut.safetensors").write_bytes(Path("whole.safetensors").read_bytes()[:-4])
    assert cli("whole.safetensors", *options).exit_code == 0
    done = cli("cut.safetensors", *options)
    assert done.exit_code == 1 and (options != ("--json",) or '"exit_code": 1' in done.stdout)
    assert cli("inspect", "cut.safetensors", *options).exit_code == 0


@pytest.mark.slow
def test_several_processes_judge_as_one_does(cli: Cli, wrapped: Path) -> None:
    save_file({"weight": torch.ones(9)}, "whole.safetensors")
    Path("cut.safetensors").write_bytes(Path("whole.safetensors").read_bytes()[:-4])
    codes = [cli("whole.safetensors", "cut.safetensors", "--jobs", jobs).exit_code for jobs in (1, 2)]
    assert codes == [cli("cut.safetensors").exit_code] * 2 and codes[0]
