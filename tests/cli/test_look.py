from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cli.conftest import Cli
from click.testing import CliRunner
from safetensors.torch import save_file

from ckptfix.cli import commands


@pytest.fixture
def wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.save({"module.weight": torch.ones(2)}, "ddp.pt")
    torch.save({"weight": torch.ones(2)}, "plain.pt")
    return tmp_path


def test_a_file_alone_is_inspected_and_judged(cli: Cli, wrapped: Path) -> None:
    done = cli("ddp.pt")
    assert done.exit_code == 0
    assert done.stdout.startswith(cli("inspect", "ddp.pt").stdout)
    assert done.stdout.splitlines()[-1].endswith("as in module.weight: `ckptfix doctor ddp.pt` shows the fix.")
    assert cli("plain.pt").stdout.splitlines()[-1].startswith("No problems found in the headers")


def test_a_file_alone_takes_the_options_of_inspect(cli: Cli, wrapped: Path) -> None:
    assert cli("ddp.pt", "--json").stdout == cli("inspect", "ddp.pt", "--json").stdout


def test_a_name_that_is_neither_a_command_nor_a_file(cli: Cli, wrapped: Path) -> None:
    done = cli("missing.pt")
    assert done.exit_code == 2 and "No such command or file 'missing.pt'." in done.stderr
    assert "No such command 'inspekt'. Did you mean inspect?" in cli("inspekt", "ddp.pt").stderr


def test_a_command_goes_before_a_file_of_its_name(cli: Cli, wrapped: Path) -> None:
    Path("ddp.pt").rename("inspect")
    assert "Missing argument 'FILE...'" in cli("inspect").stderr


def test_a_stream_alone(wrapped: Path) -> None:
    done = CliRunner().invoke(commands, ["-"], input=Path("ddp.pt").read_bytes())
    assert done.stdout.startswith("file          -\n")
    assert done.stdout.splitlines()[-1].endswith("as in module.weight: `ckptfix doctor -` shows the fix.")


def test_several_files_alone(cli: Cli, wrapped: Path) -> None:
    assert cli("ddp.pt", "plain.pt").stdout == cli("inspect", "ddp.pt", "plain.pt").stdout


@pytest.mark.parametrize("options", [(), ("--json",), ("--quiet",)])
def test_a_file_that_is_cut_short_does_not_look_fine(cli: Cli, wrapped: Path, options: tuple[str, ...]) -> None:
    save_file({"weight": torch.ones(9)}, "whole.safetensors")
    Path("cut.safetensors").write_bytes(Path("whole.safetensors").read_bytes()[:-4])
    assert cli("whole.safetensors", *options).exit_code == 0
    done = cli("cut.safetensors", *options)
    assert done.exit_code == 1 and (options != ("--json",) or '"exit_code": 1' in done.stdout)
    assert cli("inspect", "cut.safetensors", *options).exit_code == 0


def test_several_processes_judge_as_one_does(cli: Cli, wrapped: Path) -> None:
    save_file({"weight": torch.ones(9)}, "whole.safetensors")
    Path("cut.safetensors").write_bytes(Path("whole.safetensors").read_bytes()[:-4])
    codes = [cli("whole.safetensors", "cut.safetensors", "--jobs", jobs).exit_code for jobs in (1, 2)]
    assert codes == [cli("cut.safetensors").exit_code] * 2 and codes[0]
