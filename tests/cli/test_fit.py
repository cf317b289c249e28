from __future__ import annotations

import re
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from builders import safetensors, written
from cli.conftest import Cli
from cli.terminal import real_terminal
from forks import MAIN, WITHOUT_PROGRESS, Forks

from ckptfix import convert
from ckptfix.cli.shared import console, streams, tables, terminal_width

WIDTHS = (40, 60, 80, 100, 200)
WITHOUT_COLUMNS = "import os; os.environ.pop('COLUMNS', 0); os.environ.pop('LINES', 0); "


@pytest.fixture
def terminal(program: Forks) -> Callable[..., tuple[int, list[str]]]:
    """Runs a command on a terminal of so many columns; its exit code and what it showed."""

    def run(columns: int, *words: object) -> tuple[int, list[str]]:
        with real_terminal(columns) as ours:
            done = program(WITHOUT_COLUMNS + WITHOUT_PROGRESS, words, stdout=ours.fd, stderr=ours.fd)
        lines = re.sub(r"\x1b\[[0-9;]*m", "", ours.shown.decode()).replace("\r\n", "\n").splitlines()
        return done.code, [line.split("\r")[-1] for line in lines]

    return run


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    prefix = "module.encoder.transformer.layers.11.self_attention.projection"
    state = {f"{prefix}.{number}.weight": torch.ones(3, 4) + number for number in range(3)}
    torch.save({"state_dict": state, "config": Path("x")}, tmp_path / "wide.pt")
    other = {name: tensor + 0.5 for name, tensor in state.items()}
    torch.save({"state_dict": other, "config": Path("x")}, tmp_path / "other.pt")
    return tmp_path / "wide.pt"


TO_PASTE = ("Fix: ", "Or: ", "Then: ", "Try: ", "hint: ")


def too_wide(text: str, columns: int) -> list[str]:
    """Lines that do not fit; what is there to be pasted may be longer."""
    found = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        commands = re.findall(r"`[^`]*`", line)
        if len(line) > columns and not line.lstrip().startswith(TO_PASTE) and not any(
            len(command) > columns - 8 for command in commands
        ):
            found.append(line)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("columns", WIDTHS)
def test_a_report_fits_its_terminal(
    terminal: Callable[..., tuple[int, list[str]]], wide: Path, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(wide.parent)
    for words in (["inspect", wide], ["doctor", "wide.pt"], ["diff", wide, "other.pt"], ["ls", "."]):
        code, lines = terminal(columns, *words)
        assert code in (0, 1)
        assert len(lines) > 3
        assert too_wide("\n".join(lines), columns) == []


REPORTS = (
    "inspect LONG", "inspect LONG --tree", "inspect LONG --tensors --sort size", "inspect whole.pt", "inspect dcp",
    "inspect wide.safetensors", "doctor LONG", "doctor LONG -v", "doctor whole.pt", "doctor whole.pt --like LONG",
    "doctor lfs.pt", "doctor LONG other.pt lfs.pt none.pt", "doctor LONG --error 'Unexpected key(s): module.x'",
    "doctor --explain foreign-global", "ls . dcp none.pt", "ls lfs.pt", "diff LONG other.pt", "diff LONG whole.pt",
    "match LONG --like other.pt --report", "strip-module LONG -n", "add-module LONG -n", "unwrap LONG -n",
    "rename LONG -n --sub encoder=decoder", "to-cpu LONG -n", "map-location LONG OUT.pt cuda:0 -n", "fix LONG -n",
    "sanitize LONG -n", "slim LONG -n", "repair LONG -n", "extract LONG -n", "extract whole.pt -n",
    "convert LONG -n --to safetensors", "convert dcp -n --to zip", "strip-module LONG", "inspect none.pt", "help",
    "inspect LONG --filter nothing.like.it", "doctor", "rename LONG",
    "inspect LONG other.pt", "strip-module LONG other.pt whole.pt --out-dir out -n", "to-cpu -r . --out-dir out",
    "ls -r .", "ls 'o*.pt' LONG", "doctor -r .",
)  # fmt: skip


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files with long names, in which long names are."""
    folder = tmp_path_factory.mktemp("reports")
    prefix = "module.encoder.transformer.layers.11.self_attention.projection.with.a.name.longer.than.a.terminal"
    state = {f"{prefix}.{number}.weight": torch.ones(3, 4) + number for number in range(30)}
    values = {"config": Path("x"), "args": Namespace(lr=1), "best": Fraction(1, 3), "epoch": 12}
    torch.save({"state_dict": state, "ema": dict(state), **values}, folder / f"{'long_name_of_a_file_' * 6}.pt")
    torch.save({"state_dict": {f"{name}.x": tensor + 0.5 for name, tensor in state.items()}}, folder / "other.pt")
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.TransformerEncoderLayer(4, 2))
    torch.save({"model": net, "options": values}, folder / "whole.pt")
    rows = [(name, "F32", [12], bytes(48)) for name in state]
    metadata = {"a key of the metadata " * 5: "value " * 100, "format": "pt"}
    written(folder / "wide.safetensors", safetensors(rows, metadata=metadata))
    written(folder / "lfs.pt", b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n")
    convert(folder / "other.pt", folder / "dcp", to="dcp")
    return folder


@pytest.mark.sampled(48, quick=3)
@pytest.mark.parametrize("columns", (60, 80, 100, 200))
@pytest.mark.parametrize("line", REPORTS)
def test_every_report_fits(
    cli: Cli, reports: Path, tmp_path: Path, columns: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (long,) = reports.glob("long*.pt")
    monkeypatch.setattr(console, "width_of", lambda stream: columns)
    for module in (console, streams):
        monkeypatch.setattr(module, "is_terminal", lambda stream: stream is sys.stdout)
    folder = tmp_path / "run"
    shutil.copytree(reports, folder)
    monkeypatch.chdir(folder)
    done = cli(*shlex.split(line.replace("LONG", long.name)))
    assert not isinstance(done.exception, Exception), done.output
    assert done.output.strip()
    assert too_wide(done.output, columns) == []


def test_a_pipe_gets_every_name_whole(cli: Cli, reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(reports)
    (long,) = reports.glob("long*.pt")
    for line in ("inspect LONG", "inspect LONG --tree", "doctor LONG -v", "ls LONG", "diff LONG other.pt"):
        shown = cli(*shlex.split(line.replace("LONG", long.name))).stdout
        assert "..." not in shown, line
        assert long.name in shown or "projection.with.a.name.longer.than.a.terminal" in shown, line


def test_a_command_to_paste_is_one_whole_line(
    terminal: Callable[..., tuple[int, list[str]]], wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(wide.parent)
    _, lines = terminal(40, "doctor", "wide.pt", "-v")
    assert "Or: ckptfix sanitize wide.pt wide.plain.pt" in lines


def test_a_pipe_gets_whole_names(program: Forks, wide: Path) -> None:
    done = program(MAIN, ["inspect", wide])
    assert "state_dict/module.encoder.transformer.layers.11.self_attention.projection.2.weight  float32" in done.stdout


def test_lines_break_at_spaces_and_never_in_a_command() -> None:
    line = "hint: copy or download it again, or `ckptfix repair model.pt OUT` keeps what is intact"
    assert terminal_width.wrapped(line, 0) == [line]
    assert terminal_width.wrapped(line, 44) == [
        "hint: copy or download it again, or",
        "    `ckptfix repair model.pt OUT` keeps what",
        "    is intact",
    ]


def test_a_word_that_is_longer_than_a_line_loses_its_middle() -> None:
    assert terminal_width.wrapped("file  /a/long/path/of/a/checkpoint.pth", 30) == ["file  /a/lon.../checkpoint.pth"]
    assert (
        terminal_width.wrapped("Try: tar -xf /a/long/path/of/a/checkpoint.tar", 30)[-1]
        .strip()
        .endswith("/a/checkpoint.tar")
    )
    command = "`ckptfix doctor /a/long/path/of/a/checkpoint.pth`"
    assert command in "".join(terminal_width.wrapped(f"more: {command}", 30))


def test_a_fact_is_set_under_its_value() -> None:
    lines = terminal_width.wrapped("traits      pickle protocol 2, records 15", 30)
    assert lines == ["traits      pickle protocol 2,", "            records 15"]


def test_an_indented_row_is_set_under_its_text() -> None:
    lines = terminal_width.wrapped("  json     The fields that --json prints.", 28)
    assert lines == ["  json     The fields that", "           --json prints."]
    assert terminal_width.wrapped("    a sentence of five words", 20) == ["    a sentence of", "    five words"]


@pytest.mark.parametrize("most", [16, 20, 26])
def test_a_cut_name_keeps_both_ends(most: int) -> None:
    name = "module.encoder.layers.11.weight"
    short = terminal_width.cut(name, most)
    assert len(short) == most
    assert short.startswith(name[:4])
    assert short.endswith("1.weight")


def test_two_columns_of_names_are_cut_alike() -> None:
    rows = [("a" * 60, "b" * 60, "1")]
    text = tables.table(rows, ["source", "target", "n"], names=["target"], width=60).splitlines()
    source, target, _ = text[2].split()
    assert max(map(len, text)) <= 60 and abs(len(source) - len(target)) <= 1
    alone = tables.table(rows, ["source", "target", "n"], width=60).splitlines()[2].split()
    assert (len(alone[0]), len(alone[1])) == (60 - 16 - 5, 16)


def test_columns_are_cut_then_left_out_and_named() -> None:
    rows = [("a" * 30, "", "note " * 6, "1234567890")]
    text = tables.table(rows, ["name", "empty", "note", "number"], width=60).splitlines()
    assert max(map(len, text)) <= 60
    assert text[0].split() == ["name", "note", "number"]
    narrow = tables.table(rows, ["name", "empty", "note", "number"], width=30).splitlines()
    assert " ".join(" ".join(narrow[3:]).split()) == "... hidden to fit: note, number (a pipe gets all)"
