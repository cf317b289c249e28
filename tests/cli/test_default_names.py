"""Without OUT a command writes beside IN, under the name that doctor would propose, and says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders import written
from cli.conftest import Cli, names, state

import ckptfix

WORDS = {
    "strip-module": "stripped",
    "add-module": "wrapped",
    "unwrap": "unwrapped",
    "to-cpu": "cpu",
    "sanitize": "plain",
    "extract": "weights",
    "slim": "slim",
    "repair": "repaired",
    "fix": "fixed",
}


@pytest.mark.parametrize(("verb", "word"), WORDS.items())
def test_the_name_is_what_was_done(cli: Cli, ddp: Path, verb: str, word: str) -> None:
    before = ddp.read_bytes()
    result = cli(verb, ddp)
    expected = ddp.with_name(f"{ddp.stem}.{word}.pth")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == f"output: {expected}"
    assert names(expected)
    assert ddp.read_bytes() == before
    again = cli(verb, ddp)
    assert again.stdout.splitlines()[-1] == f"output: {ddp.with_name(f'{ddp.stem}.{word}2.pth')}"


def test_match_and_rename(cli: Cli, ddp: Path) -> None:
    assert cli("match", ddp, "--like", ddp).stdout.splitlines()[-1].endswith(".matched.pth")
    assert cli("rename", ddp, "--sub", "module=net").stdout.splitlines()[-1].endswith(".renamed.pth")


@pytest.mark.parametrize(
    ("to", "name"), [("safetensors", "{}.safetensors"), ("legacy", "{}.legacy.pth"), ("hf", "{}.hf")]
)
def test_convert_is_named_by_its_format(cli: Cli, ddp: Path, to: str, name: str) -> None:
    result = cli("convert", ddp, "--to", to)
    assert result.stdout.splitlines()[-1] == f"output: {ddp.with_name(name.format(ddp.stem))}"
    assert ckptfix.inspect(ddp.with_name(name.format(ddp.stem))).tensors == ckptfix.inspect(ddp).tensors


def test_convert_needs_a_format_or_a_name(cli: Cli, ddp: Path) -> None:
    result = cli("convert", ddp)
    assert result.exit_code == 2
    assert "OUT is required unless you use --to" in result.stderr


def test_devices_stand_where_out_would(cli: Cli, ddp: Path) -> None:
    result = cli("map-location", ddp, "cpu")
    assert result.exit_code == 2
    assert not (ddp.parent / "cpu").exists()


def test_a_dry_run_names_it_and_writes_nothing(cli: Cli, ddp: Path) -> None:
    before = sorted(ddp.parent.iterdir())
    assert f"output: {ddp.with_suffix('.cpu.pth')}" in cli("to-cpu", ddp, "--dry-run").stdout
    assert sorted(ddp.parent.iterdir()) == before


def test_json_has_the_name(cli: Cli, ddp: Path) -> None:
    assert json.loads(cli("to-cpu", ddp, "--json").stdout)["output"] == str(ddp.with_suffix(".cpu.pth"))


def test_the_model_of_a_folder_is_named_after_the_folder(cli: Cli, ddp: Path) -> None:
    """In the folder there would be two models."""
    folder = ddp.parent / "run"
    folder.mkdir()
    ddp.rename(folder / "weights.ckpt")
    result = cli("strip-module", f"{folder}/")
    assert result.stdout.splitlines()[-1] == f"output: {folder}.stripped.ckpt"
    assert [path.name for path in folder.iterdir()] == ["weights.ckpt"]


@pytest.mark.parametrize("suffix", [".pth", ".ckpt"])
def test_an_average_is_named_after_its_inputs(cli: Cli, tmp_path: Path, suffix: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    paths = [written(run / f"epoch_{number}{suffix}", state(weight=(number, 0.0))) for number in range(3)]
    done = cli("average", run, "--last", 2)
    assert done.exit_code == 0 and f"output: {run}.averaged{suffix}" in done.stdout
    done = cli("average", *paths)
    assert done.exit_code == 0 and f"output: {run}/epoch_2.averaged{suffix}" in done.stdout
    assert ckptfix.load_checkpoint(run / f"epoch_2.averaged{suffix}")["weight"][0] == 1.0
    assert cli("average", *paths[:2]).exit_code == 2, "the second name may be IN or OUT"
    again = cli("average", run, "--last", 2, "--force", "-o", tmp_path / "again.pth")
    assert again.exit_code == 0, "an average in the folder is not one of its checkpoints"
