"""What was done to a file, kept with it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from builders import written
from click.testing import CliRunner

import ckptfix
from ckptfix.cli import commands
from ckptfix.errors import WouldOverwrite


def run(*words: object) -> Any:
    return CliRunner().invoke(commands, [str(word) for word in words])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.save({"module.w": torch.randn(300, 7), "module.i": torch.arange(3)}, tmp_path / "in.pth")
    return tmp_path / "in.pth"


def checked(record: dict[str, Any], *sources: Path) -> list[str]:
    """The command of a record, whose inputs are `sources`."""
    expected = [
        {"name": path.name, "size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sources
    ]
    assert sorted(record["inputs"], key=str) == sorted(expected, key=str) and set(record) == {
        "ckptfix",
        "command",
        "inputs",
    }
    words: list[str] = record["command"]
    return words


def test_beside_a_torch_file(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.pth"
    result = run("strip-module", source, out, "--record")
    assert result.exit_code == 0 and f"record: {out}.record.json" in result.stdout
    record = json.loads(Path(f"{out}.record.json").read_text())
    assert checked(record, source) == ["ckptfix", "strip-module", str(source), str(out), "--record"]
    assert set(torch.load(out, weights_only=True)) == {"w", "i"}
    assert run("strip-module", source, out, "--record").exit_code == 2
    assert run("strip-module", source, "-o", out, "--force", "--record").exit_code == 0


def test_in_the_metadata_of_safetensors(source: Path, tmp_path: Path) -> None:
    for number, words in enumerate((["convert"], ["cast", "--to", "bfloat16"])):
        start = source if not number else tmp_path / "0.safetensors"
        out = tmp_path / f"{number}.safetensors"
        assert run(words[0], start, out, *words[1:], "--record").exit_code == 0
        with safetensors.safe_open(out, "pt") as file:
            metadata = file.metadata()
        assert metadata["format"] == "pt"
        assert checked(json.loads(metadata["ckptfix.record"]), start)[1] == words[0]
    whole, found = torch.load(source), safetensors.torch.load_file(tmp_path / "1.safetensors")
    assert torch.equal(found["module.w"], whole["module.w"].bfloat16())
    assert torch.equal(found["module.i"], whole["module.i"])


def test_in_a_folder_and_of_several_inputs(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pth"
    torch.save({"x": torch.ones(2)}, other)
    assert run("merge", source, other, "-o", tmp_path / "out", "--to", "hf", "--record").exit_code == 0
    checked(json.loads((tmp_path / "out/ckptfix.record.json").read_text()), source, other)
    assert not ckptfix.doctor(tmp_path / "out").exit_code(fail_on="warning")
    assert run("convert", source, tmp_path / "dcp", "--to", "dcp", "--record").exit_code == 0
    assert run("select", tmp_path / "dcp", tmp_path / "less", "--drop", "*.i", "--record").exit_code == 0
    record = json.loads((tmp_path / "less/ckptfix.record.json").read_text())
    files = [path for path in (tmp_path / "dcp").iterdir() if path.name != "ckptfix.record.json"]
    assert checked(record, *files)[1] == "select"


def test_only_where_it_is_asked_for(source: Path, tmp_path: Path) -> None:
    assert run("strip-module", source, tmp_path / "out.pth").exit_code == 0
    assert run("strip-module", source, tmp_path / "dry.pth", "--record", "--dry-run").exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.pth", "out.pth"]
    assert run("strip-module", "-i", source, "--record").exit_code == 2


def test_in_python(source: Path, tmp_path: Path) -> None:
    with ckptfix.recording("train.py", "--lr", "1"):
        ckptfix.unwrap(source, tmp_path / "out.pth")
    assert checked(json.loads((tmp_path / "out.pth.record.json").read_text()), source) == ["train.py", "--lr", "1"]
    written(tmp_path / "new.pth.record.json", b"mine")
    with ckptfix.recording("x"), pytest.raises(WouldOverwrite):
        ckptfix.unwrap(source, tmp_path / "new.pth")
    assert (tmp_path / "new.pth.record.json").read_bytes() == b"mine" and not (tmp_path / "new.pth").exists()
