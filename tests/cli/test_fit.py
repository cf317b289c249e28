from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest
import torch
from forks import MAIN, Forks

from ckptfix.cli.shared import fit, tables

WIDTHS = (40, 60, 80, 100)
WITHOUT_COLUMNS = "import os; os.environ.pop('COLUMNS', 0); os.environ.pop('LINES', 0); "


@pytest.fixture
def terminal(program: Forks) -> Callable[..., tuple[int, list[str]]]:
    """Runs a command on a terminal of so many columns; its exit code and what it showed."""

    def run(columns: int, *words: object) -> tuple[int, list[str]]:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        shown = b""

        def read() -> None:
            nonlocal shown
            # EIO: the other end is closed.
            with suppress(OSError):
                while piece := os.read(ours, 65536):
                    shown += piece

        reader = Thread(target=read)
        reader.start()
        done = program(WITHOUT_COLUMNS + MAIN, words, stdout=theirs, stderr=theirs)
        os.close(theirs)
        reader.join()
        os.close(ours)
        lines = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).replace("\r\n", "\n").splitlines()
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


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_report_fits_its_terminal(
    terminal: Callable[..., tuple[int, list[str]]], wide: Path, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(wide.parent)
    for words in (["inspect", "wide.pt"], ["doctor", "wide.pt"], ["diff", "wide.pt", "other.pt"]):
        code, lines = terminal(columns, *words)
        assert code in (0, 1)
        assert len(lines) > 6
        # What cannot be broken: a command to paste, and a single word that is longer than its line.
        long = [line for line in lines if len(line) > columns and not line.startswith(("Fix: ", "Then: "))]
        assert [line for line in long if " " in line.removeprefix("globals").removeprefix("weights_only").strip()] == []


def test_a_command_to_paste_is_one_whole_line(
    terminal: Callable[..., tuple[int, list[str]]], wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(wide.parent)
    _, lines = terminal(40, "doctor", "wide.pt")
    assert "Fix: ckptfix sanitize wide.pt wide.plain.pt" in lines


def test_a_pipe_gets_whole_names(program: Forks, wide: Path) -> None:
    done = program(MAIN, ["inspect", wide])
    assert "state_dict/module.encoder.transformer.layers.11.self_attention.projection.2.weight  float32" in done.stdout


def test_lines_break_at_spaces_and_never_in_a_command() -> None:
    line = "hint: copy or download it again, or `ckptfix repair model.pt OUT` keeps what is intact"
    assert fit.wrapped(line, 0) == [line]
    assert fit.wrapped(line, 44) == [
        "hint: copy or download it again, or",
        "    `ckptfix repair model.pt OUT` keeps what",
        "    is intact",
    ]


def test_a_fact_is_set_under_its_value() -> None:
    lines = fit.wrapped("traits      pickle protocol 2, records 15", 30)
    assert lines == ["traits      pickle protocol 2,", "            records 15"]


def test_an_indented_row_is_set_under_its_text() -> None:
    lines = fit.wrapped("  json     The fields that --json prints.", 28)
    assert lines == ["  json     The fields that", "           --json prints."]
    assert fit.wrapped("    a sentence of five words", 20) == ["    a sentence of", "    five words"]


@pytest.mark.parametrize("most", [16, 20, 26])
def test_a_cut_name_keeps_both_ends(most: int) -> None:
    name = "module.encoder.layers.11.weight"
    short = fit.cut(name, most)
    assert len(short) == most
    assert short.startswith(name[:4])
    assert short.endswith("1.weight")


def test_columns_are_cut_then_left_out_and_named() -> None:
    rows = [("a" * 30, "", "note " * 6, "1234567890")]
    text = tables.table(rows, ["name", "empty", "note", "number"], width=60).splitlines()
    assert max(map(len, text)) <= 60
    assert text[0].split() == ["name", "note", "number"]
    narrow = tables.table(rows, ["name", "empty", "note", "number"], width=30).splitlines()
    assert " ".join(" ".join(narrow[3:]).split()) == "... no room for note, number (a pipe gets all)"
