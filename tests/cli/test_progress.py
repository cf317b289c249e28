from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
import torch
from cli.terminal import real_terminal

from ckptfix.cli.shared.progress import INTERVAL, PATIENCE, Progress

GB = 10**9


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def drawn(stream: StringIO) -> list[str]:
    return [line.rstrip() for line in stream.getvalue().split("\r") if line.strip()]


def test_says_bytes_share_rate_and_time_left() -> None:
    stream, clock = StringIO(), Clock()
    progress = Progress(stream, clock=clock, columns=80)
    for second in range(1, 5):
        clock.now = 100.0 + second
        progress(second * GB, 10 * GB)
    assert drawn(stream)[-1] == "4.00 GB of 10.0 GB   40 %  1.00 GB/s  6 s left"


def test_the_rate_is_the_latest() -> None:
    stream, clock = StringIO(), Clock()
    progress = Progress(stream, clock=clock, columns=80)
    clock.now += 1
    progress(8 * GB, 20 * GB)
    for _ in range(20):
        clock.now += 1
        progress(9 * GB, 20 * GB)
    assert drawn(stream)[-1] == "9.00 GB of 20.0 GB   45 %"


def test_nothing_is_drawn_for_what_is_done_at_once() -> None:
    stream, clock = StringIO(), Clock()
    progress = Progress(stream, clock=clock, columns=80, at_end="flushing")
    clock.now += 30  # imports
    progress(0, 10)
    clock.now += PATIENCE * 0.9
    progress(5, 10)
    progress(10, 10)
    progress.clear()
    assert stream.getvalue() == ""


def test_at_most_ten_drawings_a_second() -> None:
    stream, clock = StringIO(), Clock()
    progress = Progress(stream, clock=clock, columns=80)
    for step in range(10_000):
        clock.now = 100.0 + step / 1000
        progress(step, 10_000)
    assert 90 <= len(drawn(stream)) <= 10 / INTERVAL


def test_the_end_says_what_is_still_done() -> None:
    stream, clock = StringIO(), Clock()
    progress = Progress(stream, clock=clock, columns=80, at_end="flushing to disk")
    progress(0, 10)
    clock.now += 1
    progress(5, 10)
    progress(10, 10)
    assert drawn(stream)[-1] == "10 B of 10 B  100 %  flushing to disk"


def test_clear_leaves_an_empty_line() -> None:
    stream, clock = StringIO(), Clock()
    progress = Progress(stream, clock=clock, columns=30, phases=("writing",))
    progress(0, 10 * GB)
    clock.now += 1
    progress(5 * GB, 10 * GB)
    progress.clear()
    line = stream.getvalue().split("\r")[1]
    assert len(line) == 29, "cut to the terminal, so that it never wraps"
    assert stream.getvalue().endswith("\r" + " " * len(line) + "\r")
    progress.clear()
    assert stream.getvalue().count("\r") == 3


@pytest.mark.parametrize("total", [0, 1])
def test_odd_totals(total: int) -> None:
    stream, clock = StringIO(), Clock()
    progress = Progress(stream, clock=clock, columns=80)
    for _ in range(3):
        clock.now += 1
        progress(0, total)
    assert drawn(stream)


SCRIPT = """
from ckptfix.ops import rename
from ckptfix.errors import CkptfixError
from ckptfix.cli import commands
from ckptfix.cli.shared import progress as shown

shown.PATIENCE = shown.INTERVAL = 0

def slow(source, dest, *, progress, **options):
    if progress is None:
        print("no progress")
    for step in range(8):
        if progress:
            progress((step + 1) * 10**9, 8 * 10**9)
    raise CkptfixError("the end")

rename.unwrap = slow
commands.main(["unwrap", "in", "out", *ARGUMENTS])
"""


def on_terminal(*arguments: str) -> str:
    """What a terminal gets on stderr from a command that tells how far it is."""
    script = SCRIPT.replace("ARGUMENTS", repr(arguments))
    with real_terminal() as ours:
        done = subprocess.run([sys.executable, "-c", script], stdout=ours.fd, stderr=ours.fd, timeout=120, check=False)
    assert done.returncode == 2
    return ours.shown.decode()


@pytest.mark.slow
def test_a_terminal_sees_it_and_then_sees_it_no_more() -> None:
    shown = on_terminal()
    assert " of 8.00 GB" in shown
    assert "flushing to disk" in shown
    last = shown.rsplit("flushing to disk", 1)[1]
    assert last.lstrip(" ").startswith("\r"), "cleared before the error"
    assert last.strip() == "\x1b[1;31mthe end\x1b[0m"


@pytest.mark.slow
def test_quiet_and_no_terminal_mean_none() -> None:
    assert " of 8.00 GB" not in on_terminal("--quiet")
    script = SCRIPT.replace("ARGUMENTS", "()")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("no progress\n", "the end\n")


def test_the_rate_shows_after_a_second_of_work() -> None:
    stream, clock = StringIO(), Clock()
    progress = Progress(stream, clock=clock, columns=80)
    clock.now += 30  # start-up is no transfer
    progress(0, 10 * GB)
    for _ in range(12):
        clock.now += 0.1
        progress(int((clock.now - 130) * GB), 10 * GB)
    shown = drawn(stream)
    assert len(shown) in (2, 3), "none in the first second"
    assert re.search(r"  (1\.00 GB|999 MB|1000 MB)/s  9 s left$", shown[-1])


def test_each_pass_over_the_bytes_is_named() -> None:
    stream, clock = StringIO(), Clock()
    progress = Progress(stream, clock=clock, columns=80, phases=("checking", "writing"))
    for done in (5, 9, 2, 8, 1):
        clock.now += 1
        progress(done, 10)
    assert [line.split()[0] for line in drawn(stream)] == ["checking", "writing", "writing", "writing"]
    assert "left" not in drawn(stream)[1], "a new phase begins a new measure"


ONE_BAR = """
from ckptfix.cli import commands
from ckptfix.cli.shared import progress

progress.PATIENCE = progress.INTERVAL = 0
commands.main(WORDS, standalone_mode=False)
"""
_BAR = re.compile(r"\d B of |B of +\d[\d.,]* [kMG]?B\b.*%")


def screens(shown: str) -> Iterator[list[str]]:
    """Yield the rows of a terminal after each piece that is written, as the cursor moves."""
    rows, column = [""], 0
    for piece in re.findall(r"\r|\n|\x1b\[[\d;]*[A-Za-z]|[^\r\n\x1b]+", shown):
        if piece == "\n":
            rows.append("")
        elif piece == "\r":
            column = 0
        elif not piece.startswith("\x1b"):
            row = rows[-1].ljust(column)
            rows[-1] = row[:column] + piece + row[column + len(piece) :]
            column += len(piece)
        yield rows


WORDS = {
    "convert": ("a.pth", "b.safetensors", "--dtype", "fp16", "--strip-prefix", "module."),
    "fix": ("a.pth", "b.pth"),
    "doctor": ("a.pth",),
    "average": ("a.pth", "a.pth", "-o", "b.pth"),
}


@pytest.mark.sampled(2, test_all=10_000)
@pytest.mark.slow
@pytest.mark.parametrize("verb", WORDS)
def test_a_command_shows_one_line_of_progress_at_a_time(verb: str, tmp_path: Path) -> None:
    torch.save({f"module.{number}.w": torch.rand(1 << 20) for number in range(8)}, tmp_path / "a.pth")
    script = ONE_BAR.replace("WORDS", repr([verb, *WORDS[verb]]))
    line = [sys.executable, "-c", script]
    with real_terminal() as ours:
        done = subprocess.run(line, stdout=ours.fd, stderr=ours.fd, cwd=tmp_path, timeout=120, check=False)
    shown = ours.shown.decode()
    assert done.returncode == 0, shown
    counts = [sum(_BAR.search(row) is not None for row in rows) for rows in screens(shown)]
    assert max(counts) == 1, "progress is drawn, and in one row"
    assert counts[-1] == 0, "and cleared at the end"
