from __future__ import annotations

import json
from pathlib import Path

from builders import written
from cli.conftest import Cli, names, wrapped


def test_writes_the_names_without_their_prefix(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.pth"
    before = ddp.read_bytes()
    result = cli("strip-module", ddp, out)
    assert result.exit_code == 0, result.output
    assert "stripped 2 keys" in result.stdout
    assert result.stderr == ""
    assert list(names(out)) == ["model_state_dict/fc.weight", "model_state_dict/fc.bias"]
    assert ddp.read_bytes() == before


def test_an_existing_output_needs_force(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    out = written(tmp_path / "out.pth", b"mine")
    refused = cli("strip-module", ddp, out)
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"{out}: ")
    assert "--force" in refused.stderr
    assert out.read_bytes() == b"mine"
    assert cli("strip-module", ddp, out, "--force").exit_code == 0
    assert out.read_bytes() != b"mine"


def test_a_dry_run_shows_the_plan_and_writes_nothing(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    result = cli("strip-module", ddp, tmp_path / "out.pth", "--dry-run")
    assert result.exit_code == 0
    assert f"would write {tmp_path / 'out.pth'}" in result.stdout
    assert f"copied from {ddp}" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["ddp.pth"]


def test_json_is_one_object_and_quiet_is_silent(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    document = json.loads(cli("strip-module", ddp, tmp_path / "a.pth", "--json").stdout)
    assert document["written"] is True
    assert document["output_format"] == "zip"
    assert document["changes"][0]["new"] == "fc.weight"
    quiet = cli("strip-module", ddp, tmp_path / "b.pth", "--quiet")
    assert (quiet.exit_code, quiet.output) == (0, "")


def test_options_reach_the_operation(cli: Cli, tmp_path: Path) -> None:
    twice = written(tmp_path / "twice.pth", wrapped("net.net."))
    assert cli("strip-module", twice, tmp_path / "once.pth", "--prefix", "net").exit_code == 0
    assert "model_state_dict/net.fc.weight" in names(tmp_path / "once.pth")
    assert cli("strip-module", twice, tmp_path / "all.pth", "--prefix", "net", "--all-levels").exit_code == 0
    assert "model_state_dict/fc.weight" in names(tmp_path / "all.pth")
    elsewhere = cli("strip-module", twice, tmp_path / "at.pth", "--at", "model_state_dikt")
    assert elsewhere.exit_code == 2
    assert "model_state_dict" in elsewhere.stderr


def test_a_partial_prefix_is_refused_with_the_way_out(cli: Cli, tmp_path: Path) -> None:
    mixed = written(tmp_path / "mixed.pth", wrapped("module.", second=""))
    result = cli("strip-module", mixed, tmp_path / "out.pth")
    assert result.exit_code == 2
    assert "--partial" in result.stderr
    assert not (tmp_path / "out.pth").exists()
    assert cli("strip-module", mixed, tmp_path / "out.pth", "--partial").exit_code == 0
    assert list(names(tmp_path / "out.pth")) == ["model_state_dict/fc.weight", "model_state_dict/fc.bias"]
