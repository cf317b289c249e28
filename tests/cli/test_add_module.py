from __future__ import annotations

from pathlib import Path

from cli.conftest import Cli, names


def test_adds_and_strip_module_takes_it_off_again(cli: Cli, plain: Path, tmp_path: Path) -> None:
    added, back = tmp_path / "added.pth", tmp_path / "back.pth"
    assert cli("add-module", plain, added, "--at", "model_state_dict").exit_code == 0
    assert list(names(added)) == ["model_state_dict/module.fc.weight", "model_state_dict/module.fc.bias"]
    assert cli("strip-module", added, back).exit_code == 0
    assert list(names(back)) == list(names(plain))


def test_another_prefix(cli: Cli, plain: Path, tmp_path: Path) -> None:
    assert cli("add-module", plain, tmp_path / "out.pth", "--prefix", "model.net.").exit_code == 0
    assert "model_state_dict/model.net.fc.weight" in names(tmp_path / "out.pth")
