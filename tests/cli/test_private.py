"""What is written of an input that only its owner may read, only its owner may read: by every command that writes."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from file_commands import COMMANDS, small_files
from property.verbs import run_command

OTHERS = stat.S_IRGRP | stat.S_IROTH
WRITING = {name: words for name, words in COMMANDS.items() if any("{out}." in word for word in words)}
MORE = {
    "convert to a distributed checkpoint": ["convert", "{torch}", "{out}", "--to", "dcp"],
    "convert to shards": ["convert", "{torch}", "{out}", "--to", "hf"],
    "strip-module in place": ["strip-module", "{torch}", "--in-place"],
    "to-cpu in place": ["to-cpu", "{torch}", "--in-place"],
    "a name in place": ["rename", "{safetensors}", "--in-place", "--sub", "w=v"],
    "match and rules": ["match", "{torch}", "{out}.pth", "--like", "{torch}", "--rules", "{out}.toml"],
    "a replaced file that is kept": ["to-cpu", "{torch}", "{old}", "--force"],
}


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.parametrize("name", [*WRITING, *MORE])
def test_no_file_is_more_open_than_the_input(name: str, tmp_path: Path) -> None:
    torch_file, safetensors_file = small_files(tmp_path)
    old = tmp_path / "old.pth"
    old.write_bytes(Path(torch_file).read_bytes())
    for path in tmp_path.iterdir():
        path.chmod(0o600)
    values = {"torch": torch_file, "safetensors": safetensors_file, "out": str(tmp_path / "out"), "old": str(old)}
    given = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    done = run_command(tuple(word.format(**values) for word in {**WRITING, **MORE}[name]), name)
    assert done.code == 0, done.stderr
    made = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(made) > len(given) or any(path.stat().st_mtime_ns != given[path] for path in given)
    assert [path.name for path in made if path.stat().st_mode & OTHERS] == []
