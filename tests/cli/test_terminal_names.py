"""No name of a stranger's file reaches a terminal raw: every command, on a pty and in a pipe, on hostile files."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import Tensor, assemble, safetensors, state_dict_ops, torch_zip, written
from cli.terminal import real_terminal
from file_commands import COMMANDS, job
from forks import MAIN, WITHOUT_PROGRESS, Forks

HOSTILE = {
    "title": "\x1b]0;owned\x07",
    "clear": "\x1b[2J",
    "c1": "\x9b2J",
    "forged": "\rFORGED",
    "line": "a\nFORGED",
    "delete": "\x7f\x08\x08",
    "next line": "b\x85FORGED",
    "direction": "\u202egpj.exe",
    "separator": "c\u2028FORGED",
}
"""What -> a part of a name that a terminal would obey."""

OURS = re.compile(r"\x1b\[(?:0|2|31|32|33|1;31|36)m|\r\n")
"""What a command itself sends to a terminal: its colours, and ends of lines."""

MORE = {
    "comma-separated": ["stats", "{torch}", "--csv"],
    "digest of files": ["digest", "{torch}", "--files"],
    "digest that is checked": ["digest", "--check", "{torch}", "{safetensors}"],
    "inspect all": ["inspect", "{torch}", "--tensors"],
    "inspect what is not there": ["inspect", "{torch}", "--filter", "none"],
    "select what is not there": ["select", "{torch}", "{out}.pth", "--keep", "none"],
    "rename what is not there": ["rename", "{torch}", "{out}.pth", "--sub", "none=x"],
    "no such state dict": ["strip-module", "{torch}", "{out}.pth", "--at", "none"],
    "histograms": ["stats", "{torch}", "--by-layer"],
    "list of several": ["ls", "-r", "{folder}"],
    "batch": ["sanitize", "{torch}", "{torch}", "--out-dir", "{folder}/many", "--force"],
    "plan of a fleet": ["fleet", "plan", "{torch}", "--", "inspect"],
}
EXACT = {"digest", "digest of files", "comma-separated", "git", "plan of a fleet"}
"""Those whose output in a pipe is data for another program, as the documentation says: names are as they are."""

ALL = {**COMMANDS, **MORE}


def hostile_files(folder: Path) -> dict[str, str]:
    """A torch file with every hostile text in keys, an address, a class, a record, a device; and a safetensors file.

    The names of the files are hostile too.
    """
    raw = bytes(8)
    tensors = {f"module.{text}.w{number}": Tensor("0", (2,), 2) for number, text in enumerate(HOSTILE.values())}
    tensors["module.tagged"] = Tensor("1", (2,), 2, location=HOSTILE["clear"])
    foreign = [("GLOBAL", "zmodule\x1b[2J", "name\x07"), "EMPTY_TUPLE", "REDUCE"]
    ops = state_dict_ops({HOSTILE["title"]: state_dict_ops(tensors), HOSTILE["clear"]: foreign, "text": HOSTILE["c1"]})
    pickle = assemble(("PROTO", 2), *ops, "STOP")
    rows = [(f"{text}.w", "F32", [2], raw) for text in HOSTILE.values()]
    values = {
        "torch": str(written(folder / "in\x1b[2J.pth", torch_zip(pickle, [raw, raw]))),
        "safetensors": str(written(folder / "in\x1b[2J.safetensors", safetensors(rows))),
        "out": str(folder / "out\x1b[2J"),
        "folder": str(folder),
    }
    values["plan"] = str(written(folder / "plan.jsonl", job(values["torch"])))
    return values


def raw_controls(text: str) -> list[str]:
    """The characters in `text` that a terminal obeys, each with what is around it."""
    bare = OURS.sub("\n", text)
    kinds = ("Cc", "Cf", "Zl", "Zp")
    bad = [at for at, char in enumerate(bare) if unicodedata.category(char) in kinds and char not in "\n\t"]
    return [bare[max(at - 30, 0) : at + 10] for at in bad]


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def on_terminal(program: Forks) -> Run:
    def run(*words: object) -> tuple[int, str]:
        with real_terminal() as ours:
            done = program(WITHOUT_PROGRESS, words, stdout=ours.fd, stderr=ours.fd)
        return done.code, ours.shown.decode("utf-8", "surrogateescape")

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_no_control_character_reaches_a_terminal(name: str, tmp_path: Path, on_terminal: Run) -> None:
    words = [word.format(**hostile_files(tmp_path)) for word in ALL[name]]
    code, text = on_terminal(*words)
    assert code in (0, 1, 2, 3) and "Traceback" not in text
    assert raw_controls(text) == []
    assert text or name in ("undo", "git and its configuration")


@pytest.mark.parametrize("name", [name for name in ALL if name not in EXACT])
def test_nor_comes_one_out_of_a_pipe_but_in_data(name: str, tmp_path: Path, program: Forks) -> None:
    words = [word.format(**hostile_files(tmp_path)) for word in ALL[name]]
    done = program(MAIN, words)
    assert raw_controls(done.stdout) == [] and raw_controls(done.stderr) == []


@pytest.mark.parametrize("name", ["digest", "comma-separated"])
def test_data_in_a_pipe_is_exact(name: str, tmp_path: Path, program: Forks) -> None:
    words = [word.format(**hostile_files(tmp_path)) for word in ALL[name]]
    done = program(MAIN, words)
    assert HOSTILE["title"] in done.stdout and HOSTILE["next line"] in done.stdout


def test_json_is_exact(tmp_path: Path, on_terminal: Run) -> None:
    code, text = on_terminal("stats", hostile_files(tmp_path)["torch"], "--json")
    assert code == 0 and raw_controls(text) == []
    names = [row["name"] for row in json.loads(text)["entries"]]
    assert all(any(part in name for name in names) for part in HOSTILE.values())
