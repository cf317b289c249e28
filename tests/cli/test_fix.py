from __future__ import annotations

import json
from pathlib import Path

from cli.conftest import Cli, names


def test_one_step(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    result = cli("fix", ddp, tmp_path / "out.pth")
    assert result.exit_code == 0
    assert "strip-module: stripped" in result.stdout and "to-cpu: moved cuda:0 -> cpu" in result.stdout
    assert set(names(tmp_path / "out.pth").values()) == {"cpu"}
    assert not any(name.startswith("module.") for name in names(tmp_path / "out.pth"))


def test_without_out_the_name_is_said(cli: Cli, ddp: Path) -> None:
    result = cli("fix", ddp)
    assert result.exit_code == 0
    assert f"output: {ddp.with_suffix('.fixed.pth')}" in result.stdout
    assert ddp.with_suffix(".fixed.pth").exists()


def test_json_has_the_steps(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    printed = json.loads(cli("fix", ddp, "-o", tmp_path / "out.pth", "--json").stdout)
    assert [step["argv"][1] for step in printed["steps"]] == ["strip-module", "to-cpu"]


def test_what_cannot_be_fixed_is_said(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "empty.pth").write_bytes(b"")
    result = cli("fix", tmp_path / "empty.pth")
    assert result.exit_code == 2
    assert "no command fixes that" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["empty.pth"]


def test_a_name_without_a_suffix_gets_none(cli: Cli, ddp: Path) -> None:
    bare = ddp.rename(ddp.with_suffix(""))
    assert f"output: {bare}.fixed\n" in cli("fix", bare).stdout
    assert f"output: {bare}.fixed2\n" in cli("fix", bare).stdout
