"""The table of error messages in the README, and its pictures."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner
from docs.pages import ROOT
from kinds import location_tags
from torch import nn

from ckptfix.cli import commands

README = (ROOT / "README.md").read_text(encoding="utf-8")
TABLE = README.partition("## From the error message")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| (`.*`) \| `ckptfix ([^`]*)`.*\|$", TABLE, re.MULTILINE)


def test_the_table_has_eight_messages() -> None:
    assert len(ROWS) == 8


@pytest.mark.parametrize(("message", "line"), ROWS)
def test_a_message_leads_to_its_command(message: str, line: str) -> None:
    text = ". ".join(re.findall(r"`([^`]*)`", message))
    said = CliRunner().invoke(commands, ["doctor", "--error", text]).stdout
    assert said.startswith("This message usually means that")
    if line.startswith(("FILE", "doctor")):  # no one command is meant
        return
    assert f"Try: ckptfix {line.removesuffix(' FILE OUT')} FILE OUT" in said


class Net(nn.Module):
    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.fc = nn.Linear(512, classes)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12345\n"


def _prefixed(prefix: str) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": value for name, value in Net().state_dict().items()}


def _on_a_gpu(path: Path) -> None:
    with location_tags(lambda _: "cuda:0"):
        torch.save(Net().state_dict(), path)


def _cut(path: Path) -> None:
    # torch has another message for files of less than 64 kB.
    torch.save({**Net().state_dict(), "args": torch.zeros(20_000)}, path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - 300])


def _of_a_module_that_is_gone(path: Path) -> None:
    models = ModuleType("models")
    models.Net = type("Net", (Net,), {"__module__": "models"})  # type: ignore[attr-defined]
    sys.modules["models"] = models
    torch.save(models.Net(), path)
    del sys.modules["models"]


SHOWING: dict[str, Callable[[Path], object]] = {
    "strip-module": lambda path: torch.save(_prefixed("module."), path),
    "unwrap": lambda path: torch.save(_prefixed("_orig_mod."), path),
    "to-cpu": _on_a_gpu,
    "sanitize": lambda path: torch.save({**Net().state_dict(), "args": argparse.Namespace(lr=0.1)}, path),
    "repair": _cut,
    "extract": _of_a_module_that_is_gone,
    "doctor": lambda path: torch.save(Net().state_dict(), path),
    "FILE": lambda path: path.write_bytes(LFS),
}
"""Command of a row -> writes the file that shows its message."""


def _load(path: Path, command: str) -> None:
    """Load the file as people do."""
    whole = command in ("extract", "FILE")
    state = torch.load(path, weights_only=not whole)  # files of this test alone
    state = state.state_dict() if isinstance(state, nn.Module) else state
    state.pop("args", None)
    Net(1000 if command == "doctor" else 10).load_state_dict(state)


@pytest.mark.slow
@pytest.mark.parametrize(("message", "line"), ROWS)
def test_the_command_helps_a_file_that_shows_the_message(
    message: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = line.split()[0]
    path = tmp_path / "in.pth"
    SHOWING[command](path)
    try:
        _load(path, command)
    except Exception as error:
        kind = type(error)
        said = f"{kind.__name__}: {error} {kind.__module__}.{kind.__name__}: {error}"
    for part in re.findall(r"`([^`]*)`", message):
        assert part in said
    torch.save(Net(1000).state_dict(), "model.pth")
    names = {"FILE": "in.pth", "OUT": "out.pth", "MODEL": "model.pth"}
    done = CliRunner().invoke(commands, [names.get(word, word) for word in line.split()])
    if command == "doctor":
        assert done.exit_code == 1 and "fc.weight is [10, 512] here, [1000, 512] in the model" in done.output
    elif command == "FILE":
        assert done.exit_code == 1 and "git-lfs pointer" in done.output
    else:
        assert done.exit_code == 0, done.output
        _load(tmp_path / "out.pth", "out")


@pytest.mark.parametrize(("name", "shown"), [("verdict", "[foreign-global]"), ("browse", "stem.weight")])
def test_a_picture_shows_a_run_and_loads_nothing(name: str, shown: str) -> None:
    assert f"(.github/{name}.svg)" in README
    text = (ROOT / f".github/{name}.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    assert shown in "".join("".join(root.itertext()).split())
    assert not re.findall(r"https?://(?!www\.w3\.org)", text) and "url(http" not in text
