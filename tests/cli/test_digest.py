from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders import written
from cli.conftest import Cli, state, wrapped

from ckptfix.cli.values.digest import fitted


def test_a_stripped_copy_verifies(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.pth"
    assert cli("strip-module", ddp, out).exit_code == 0
    result = cli("digest", out, "--check", ddp)
    assert result.exit_code == 0
    assert result.stdout == (
        f"verified: 2 tensors intact (against {ddp}), 2 under other names, such as model_state_dict/module.fc.weight "
        "-> model_state_dict/fc.weight\n"
    )


def test_what_changed_is_listed_and_the_exit_code_says_so(cli: Cli, tmp_path: Path) -> None:
    one, two = (
        written(tmp_path / "one.pth", state(a=(1,), b=(2,))),
        written(tmp_path / "two.pth", state(a=(1,), b=(3,))),
    )
    result = cli("digest", two, "--check", one)
    assert (result.exit_code, result.stdout) == (1, f"DIFFERENT: 1 tensor intact (against {one})\nchanged: b\n")
    assert json.loads(cli("digest", two, "--check", one, "--json").stdout)["check"]["changed"] == ["b"]


def test_the_output_is_a_manifest(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    text = cli("digest", ddp).stdout
    manifest = tmp_path / "ddp.tensors"
    assert cli("digest", ddp, "--manifest", manifest).exit_code == 0
    assert manifest.read_text() == text
    assert cli("digest", ddp, "--check", manifest).exit_code == 0
    assert cli("digest", ddp, "--manifest", manifest).exit_code == 2


def test_many_inputs(cli: Cli, tmp_path: Path) -> None:
    paths = [written(tmp_path / f"{name}.pth", wrapped()) for name in "ab"]
    result = cli("digest", *paths, "--json")
    assert len({json.loads(line)["unnamed"] for line in result.stdout.splitlines()}) == 1
    assert cli("digest", *paths, "--total").stdout.count("(without names)") == 2


@pytest.mark.parametrize("words", [[], ["--files"], ["--hub", "--check", "x"]])
def test_wrong_usage(cli: Cli, words: list[str]) -> None:
    assert cli("digest", *words).exit_code == 2


def test_a_narrow_terminal_gets_the_names(cli: Cli, ddp: Path) -> None:
    lines = cli("digest", ddp).stdout.splitlines()
    assert fitted(lines, 0) == fitted(lines, 200) == lines
    shown = fitted(lines, 60)
    assert max(map(len, shown)) <= 60 and "whole digests" in shown[-1]
    assert shown[1].startswith(lines[1][:16] + "...  ") and shown[1].endswith("fc.weight")
