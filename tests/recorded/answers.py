"""What a command says about a file and writes for it, in a line that can be compared."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from zlib import crc32

from property.folder_mutants import write as write_folder
from property.small_files import SMALL
from property.verbs import COMMANDS, IN, OTHER, OUT, run_command
from recorded.files import Content

import ckptfix
from ckptfix.io.unfinished import UNDO

DRAWN = frozenset({"inspect --html", "doctor --html", "diff --html"})
"""Pages: what they say is what the same commands say in a terminal."""

IN_PLACE = {f"{verb} -i": (verb, IN, "-i") for verb in ("strip-module", "unwrap", "to-cpu")}
"""Edits that shorten a header, which any file system can do."""

MANY = {
    "convert dcp": ("convert", IN, OUT, "--to", "dcp", "--drop-unsupported"),
    "convert hf": ("convert", IN, OUT, "--to", "hf", "--shard-size", "24", "--drop-unsupported"),
    "ls": ("ls", IN, OTHER, "--json"),
    "rename into other files": ("rename", IN, OUT, "--sub", "a=zz", "--sub", "layers=blocks", "--sub", "epoch=e"),
    "select some": ("select", IN, OUT, "--keep", "*a*"),
    "cast some": ("cast", IN, OUT, "--to", "float16", "--only", "*a*"),
}  # fmt: skip

ASKED = {name: arguments for name, arguments in COMMANDS.items() if name not in DRAWN} | IN_PLACE | MANY
NAMES = tuple(ASKED)

FIRST = 56
"""Characters of the first line that are shown; all lines count."""

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


def answer(name: str, source: str, content: Content) -> str:
    """What is done with ``in.pth`` of this folder: the exit code, sums of what is written and said, the first line."""
    places = {IN: source, OUT: "out", OTHER: OTHER_FILE}
    outcome = run_command(tuple(places.get(part, part) for part in ASKED[name]), name)
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
    whole = crc32(said.encode("utf-8", "surrogatepass"))
    shown = said.partition("\n")[0][:FIRST].encode("ascii", "backslashreplace").decode()
    return f"{name}: {outcome.code} {written} {whole:08x} {shown}"


def answers(content: Content, names: Sequence[str]) -> Iterator[str]:
    """The answers of commands on a file or folder with this content, which is written to this folder."""
    Path(OTHER_FILE).write_bytes(SMALL["zip"])
    source = write(content)
    for name in names:
        yield answer(name, source, content)
