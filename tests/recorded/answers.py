"""What a command says about a file and writes for it, in a line that can be compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from zlib import crc32

from property.small_files import SMALL
from property.verbs import COMMANDS, IN, OTHER, OUT, run_command

import ckptfix

DRAWN = frozenset({"inspect --html", "doctor --html", "diff --html"})
"""Pages: what they say is what the same commands say in a terminal."""

IN_PLACE = {f"{verb} -i": (verb, IN, "-i") for verb in ("strip-module", "unwrap", "to-cpu")}
"""Edits that shorten a header, which any file system can do."""

ASKED = {name: arguments for name, arguments in COMMANDS.items() if name not in DRAWN} | IN_PLACE
NAMES = tuple(ASKED)

FIRST = 72
"""Characters of the first line that are shown; all lines count."""

PLACES = {IN: "in.pth", OUT: "out", OTHER: "other.pth"}


def total(*paths: str) -> str:
    """A sum of what is in files and folders, as far as they are there."""
    found = 0
    files = [file for path in map(Path, paths) for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
    for file in files:
        if file.is_file():
            found = crc32(file.read_bytes(), crc32(str(file).encode(), found))
    return f"{found:08x}" if files else "-"


def answer(name: str, data: bytes) -> str:
    """What is done with ``in.pth`` of this folder: the exit code, sums of what is written and said, the first line."""
    source, out = Path(PLACES[IN]), Path(PLACES[OUT])
    outcome = run_command(tuple(PLACES.get(part, part) for part in ASKED[name]), name)
    assert not outcome.failure, outcome.failure
    written = total(PLACES[IN] if name in IN_PLACE else PLACES[OUT])
    out.unlink(missing_ok=True)
    if source.read_bytes() != data:
        assert name in IN_PLACE
        undone = run_command(("undo", PLACES[IN]))
        assert undone.code == 0 and source.read_bytes() == data, f"{name}: undo: {undone}"
    said = (outcome.stderr + outcome.stdout).replace(ckptfix.__version__, "VERSION")
    whole = crc32(said.encode("utf-8", "surrogatepass"))
    shown = said.partition("\n")[0][:FIRST].encode("ascii", "backslashreplace").decode()
    return f"{name}: {outcome.code} {written} {whole:08x} {shown}"


def answers(data: bytes, names: Sequence[str]) -> Iterator[str]:
    """The answers of commands on a file with this content, which is written to this folder."""
    Path(PLACES[OTHER]).write_bytes(SMALL["zip"])
    Path(PLACES[IN]).write_bytes(data)
    for name in names:
        yield answer(name, data)
