"""The answer of a command to a file: facts in a line that can be compared, and the sentences apart from them.

The line holds the exit code, a checksum of what the command wrote, the ids of findings and the classes of errors, and
a checksum of all numbers that it printed. The sentences, without their numbers, are the same for many files, and are
kept once each: a better word changes one line.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from file_commands import ANY, IN, OTHER, OUT, RECORDED, lines
from property.folder_mutants import write as write_folder
from property.small_files import SMALL
from property.verbs import run_command
from recorded.files import Content

import ckptfix
from ckptfix.findings.table import ENTRIES
from ckptfix.io.unfinished_edits import UNDO

DRAWN = frozenset({"inspect --html", "doctor --html", "diff --html"})
"""Pages: what they say is what the same commands say in a terminal."""

ASKED = {name: arguments for name, arguments in lines(ANY | RECORDED).items() if name not in DRAWN}
NAMES = tuple(ASKED)
IN_PLACE = tuple(name for name, line in ASKED.items() if "-i" in line)
"""Edits that shorten a header, which any file system can do."""

NUMBER = re.compile(r"\b0x[0-9a-f]+|\b[0-9a-f]{16,}\b|\d+")
"""A number, an offset or a digest."""

ID = re.compile(r"\[([a-z0-9-]+)\]$|\"id\": \"([a-z0-9-]+)\"", re.MULTILINE)
"""The id of a finding, in text and in JSON."""

OTHER_FILE = "other.pth"


def read(path: str) -> Content | None:
    """What a file or folder holds, but for what is kept of an edit; None if there is none."""
    place = Path(path)
    if not place.is_dir():
        return place.read_bytes() if place.exists() else None
    files = sorted(file for file in place.rglob("*") if file.is_file() and not file.name.endswith(UNDO))
    return {str(file.relative_to(place)): file.read_bytes() for file in files}


def total(content: Content | None) -> str:
    if content is None:
        return "-"
    found = 0
    for name, data in content.items() if isinstance(content, Mapping) else [("", content)]:
        found = crc32(data, crc32(name.encode(), found))
    return f"{found:08x}"


def remove(path: str) -> None:
    if Path(path).is_dir():
        shutil.rmtree(path)
    Path(path).unlink(missing_ok=True)


def write(content: Content) -> str:
    """Write a file or folder of that content here, in place of the one before it; its name."""
    remove("in")
    if isinstance(content, bytes):
        Path("in.pth").write_bytes(content)
        return "in.pth"
    return str(write_folder(content, Path("in")))


class Answer(NamedTuple):
    """The answer of one command: its line of facts, its verb, and the sentences of its text output."""

    line: str
    verb: str
    sentences: frozenset[str]


def answer(name: str, source: str, content: Content) -> Answer:
    """Run a command on ``in.pth`` in the current folder, and check that its input is as before."""
    arguments = ASKED[name]
    places = {IN: source, OUT: "out", OTHER: OTHER_FILE}
    outcome = run_command(tuple(places.get(part, part) for part in arguments), name)
    assert not outcome.failure, outcome.failure
    written = total(read("out"))
    remove("out")
    if name in IN_PLACE and (now := read(source)) != content:
        written = total(now)
        undone = run_command(("undo", source))
        assert undone.code == 0, f"{name}: undo: {undone}"
    assert read(source) == content, f"{name}: IN is not what it was"
    said = outcome.stderr + outcome.stdout
    said = said.replace(os.path.realpath(os.curdir), "HERE").replace(ckptfix.__version__, "VERSION")
    numbers = crc32(" ".join(NUMBER.findall(said)).encode())
    ids = sorted({text or field for text, field in ID.findall(said)} & ENTRIES.keys())
    line = " ".join([f"{name}: {outcome.code} {written} {numbers:08x}", *sorted(set(outcome.errors)), *ids])
    # The text form of each command says what its JSON does.
    sentences = () if "--json" in arguments else NUMBER.sub("0", said).splitlines()
    shown = frozenset(text.rstrip().encode("ascii", "backslashreplace").decode() for text in sentences)
    return Answer(line, arguments[0], shown - {""})


def answers(content: Content, names: Sequence[str]) -> Iterator[Answer]:
    """Run commands on a file or folder with this content, which is written to the current folder."""
    Path(OTHER_FILE).write_bytes(SMALL["zip"])
    source = write(content)
    for name in names:
        yield answer(name, source, content)
