from __future__ import annotations

from pathlib import Path

from cli.conftest import Cli, names


def test_everything_is_on_the_cpu(cli: Cli, ddp: Path, tmp_path: Path) -> None:
    assert set(names(ddp).values()) == {"cuda:0"}
    result = cli("to-cpu", ddp, tmp_path / "out.pth")
    assert result.exit_code == 0
    assert "cuda:0 -> cpu" in result.stdout
    assert set(names(tmp_path / "out.pth").values()) == {"cpu"}
