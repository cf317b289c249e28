"""The console blocks of the documentation: every ``$ ckptfix`` line is run, in order, and shows what the page says.

Those of a page run in one folder that holds the files of `samples.files`. In the expected output ``...`` stands for
anything; on a line of its own, for any number of lines. ``$ echo $?`` shows the exit code of the command before it;
nothing else is run. With ``CKPTFIX_UPDATE_DOCS=1``, what is shown replaces what a page says.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from builders import written
from docs.pages import PAGES, UPDATE
from docs.samples import files
from forks import MAIN, Forks

SHELL = re.compile(r"[|&;<>()$`*?~{}\[\]!]")
"""What a shell does more with than to split a line into words."""


@dataclass(frozen=True)
class Command:
    """A line of a console block, the output that is shown below it, and where that stands in the page."""

    line: str
    expected: str
    start: int = 0
    end: int = 0


def console(text: str) -> Iterator[Command]:
    """The commands of all console blocks."""
    for block in re.finditer(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for part in re.finditer(r"^\$ ([^\n]*)\n(.*?)(?=^\$ |\Z)", block[1], re.MULTILINE | re.DOTALL):
            start, end = (block.start(1) + place for place in part.span(2))
            yield Command(part[1].strip(), part[2].rstrip(), start, end)


def matches(expected: str, shown: str) -> bool:
    """Whether `shown` is `expected`, in which ``...`` is anything; spaces at the ends of lines do not count."""
    pattern = []
    for line in expected.splitlines():
        if line.strip() == "...":
            pattern.append(r"(?:[^\n]*\n)*?")
        else:
            pattern.append(".*".join(map(re.escape, line.rstrip().split("..."))) + r"[ ]*\n")
    return re.fullmatch("".join(pattern), shown.rstrip("\n") + "\n" if shown.strip() else "") is not None


def updated(expected: str, shown: str) -> str:
    """What a page is to say instead of `expected`; where that was cut, `shown` is cut after as many lines."""
    lines = [line.rstrip() for line in shown.rstrip().splitlines()]
    said = expected.splitlines()
    if said and said[-1].strip() == "..." and len(said) <= len(lines):
        lines[len(said) - 1 :] = ["..."]
    return "".join(f"{line}\n" for line in lines)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, content in files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        written(folder / name, content)
    return folder


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables for a shell that finds this ckptfix."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    shim = written(binaries / "ckptfix", f'#!/bin/sh\nexec "{sys.executable}" -m ckptfix "$@"\n'.encode())
    shim.chmod(0o755)
    return {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "COLUMNS": "80"}


@pytest.fixture
def run(folder: Path, environment: dict[str, str], program: Forks, tmp_path: Path) -> Callable[[str], tuple[int, str]]:
    """Runs a command line in the folder, by a shell where it has anything for one; its exit code and what it shows."""

    def run(line: str) -> tuple[int, str]:
        if SHELL.search(line):
            done = subprocess.run(
                ["sh", "-c", line],
                cwd=folder,
                env=environment,
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            return done.returncode, done.stdout
        with open(tmp_path / "shown", "w+", encoding="utf-8") as shown:
            file = shown.fileno()
            words = shlex.split(line, comments=True)[1:]
            code = program(MAIN, words, folder=folder, environment={"COLUMNS": "80"}, stdout=file, stderr=file).code
            shown.seek(0)
            return code, shown.read()

    return run


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_what_happens(page: Path, run: Callable[[str], tuple[int, str]]) -> None:
    text = page.read_text(encoding="utf-8")
    replaced: list[tuple[int, int, str]] = []
    code = 0
    for command in console(text):
        if command.line == "echo $?":
            shown = f"{code}\n"
        elif command.line.startswith("ckptfix "):
            code, shown = run(command.line)
        else:
            continue
        if matches(command.expected, shown):
            continue
        assert UPDATE, f"$ {command.line}\nshows\n{shown}\nand {page.name} says\n{command.expected}"
        replaced.append((command.start, command.end, updated(command.expected, shown)))
    for start, end, shown in reversed(replaced):
        text = text[:start] + shown + text[end:]
    if replaced:
        page.write_text(text, encoding="utf-8")


def test_there_are_commands_to_run() -> None:
    found = [command.line for page in PAGES for command in console(page.read_text(encoding="utf-8"))]
    assert sum(line.startswith("ckptfix ") for line in found) > 20


def test_console_blocks_are_taken_apart() -> None:
    text = "x\n```console\n$ a b\none\ntwo\n\n$ c\n```\n```sh\n$ no\n```\n```console\n$ d\nthree\n```\n"
    found = list(console(text))
    assert [(row.line, row.expected) for row in found] == [("a b", "one\ntwo"), ("c", ""), ("d", "three")]
    assert [text[row.start : row.end] for row in found] == ["one\ntwo\n\n", "", "three\n"]


@pytest.mark.parametrize(
    ("expected", "shown", "same"),
    [
        ("one", "one\n", True),
        ("one", "one\ntwo\n", False),
        ("one\n...", "one\ntwo\nthree\n", True),
        ("one\n...\nfour", "one\ntwo\nthree\nfour\n", True),
        ("one\n...\nfour", "one\ntwo\nthree\n", False),
        ("one ... three", "one two three\n", True),
        ("one ... three", "one\ntwo three\n", False),
        ("", "", True),
        ("", "one\n", False),
        ("a.b", "axb\n", False),
    ],
)
def test_the_comparison_can_fail(expected: str, shown: str, same: bool) -> None:
    assert matches(expected, shown) is same


@pytest.mark.parametrize(
    ("expected", "shown", "page"),
    [
        ("old", "one\ntwo \n", "one\ntwo\n"),
        ("old\n...", "one\ntwo\nthree\n", "one\n...\n"),
        ("old\n...\n", "one\n", "one\n"),
        ("old", "", ""),
    ],
)
def test_an_update_is_what_was_shown(expected: str, shown: str, page: str) -> None:
    assert updated(expected, shown) == page
    assert matches(page, shown)
