from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.conftest import Cli


def test_a_pair_is_set_and_one_deleted(cli: Cli, tensors: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    result = cli("set-metadata", tensors, out, "--set", "license=a=b", "--delete", "format")
    assert result.stdout == "set license; deleted format\n"
    told = json.loads(cli("inspect", out, "--json").stdout)
    assert told["metadata"] == {"license": "a=b"}


def test_in_place(cli: Cli, tensors: Path) -> None:
    result = cli("set-metadata", "-i", tensors, "--set", "room=b", "--delete", "format", "--json")
    assert json.loads(result.stdout)["metadata"] == {"room": "b"}
    assert cli("undo", tensors).exit_code == 0


def test_nothing_to_do_is_said(cli: Cli, tensors: Path, tmp_path: Path) -> None:
    result = cli("set-metadata", tensors, tmp_path / "out.safetensors", "--set", "format=pt")
    assert "nothing to do" in result.stdout
    assert (tmp_path / "out.safetensors").read_bytes() == tensors.read_bytes()


@pytest.mark.parametrize("words", [(), ("--set", "a"), ("--set", "=b"), ("--set", "a=b", "--set", "a=c")])
def test_wrong_usage(cli: Cli, tensors: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    assert cli("set-metadata", tensors, tmp_path / "out.safetensors", *words).exit_code == 2
    assert not (tmp_path / "out.safetensors").exists()
