from __future__ import annotations

from pathlib import Path

from builders import written
from cli.conftest import Cli, names, wrapped


def test_every_wrapper_goes(cli: Cli, tmp_path: Path) -> None:
    source = written(tmp_path / "in.pth", wrapped("module._orig_mod."))
    result = cli("unwrap", source, tmp_path / "out.pth", "--at", "model_state_dict")
    assert result.exit_code == 0, result.output
    assert list(names(tmp_path / "out.pth")) == ["model_state_dict/fc.weight", "model_state_dict/fc.bias"]


def test_nothing_to_do_is_an_identical_copy(cli: Cli, plain: Path, tmp_path: Path) -> None:
    result = cli("unwrap", plain, tmp_path / "out.pth")
    assert result.exit_code == 0
    assert "identical copy" in result.stdout
    assert (tmp_path / "out.pth").read_bytes() == plain.read_bytes()
