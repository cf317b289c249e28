"""The lines that a dry run prints for a file that would be written."""

from __future__ import annotations

from itertools import groupby

from ckptfix.checkpoint import ByteRange, OutputFile, segment_length
from ckptfix.cli.shared.tables import size
from ckptfix.errors import printable
from ckptfix.io.output import SCRATCH
from ckptfix.words import plural


def plan_lines(file: OutputFile) -> list[str]:
    """Return lines on what would be written to `file`, and on the sources of its bytes."""
    new = [sum(map(segment_length, run)) for kind, run in groupby(file.segments, type) if kind is bytes]
    lines = [f"would write {printable(file.path)}: {size(file.nbytes)}"]
    if new:
        lines.append(f"  {size(sum(new))} new, in {plural(len(new), 'piece')}")
    copied: dict[str, list[int]] = {}
    derived: dict[str, list[int]] = {}
    for segment in file.segments:
        if isinstance(segment, ByteRange):
            copied.setdefault(_named(segment.path), []).append(segment.length)
        elif not isinstance(segment, bytes):
            derived.setdefault(segment.what or "computed", []).append(segment.length)
    for path, lengths in copied.items():
        lines.append(f"  {size(sum(lengths))} copied from {printable(path)}, in {plural(len(lengths), 'range')}")
    for what, lengths in derived.items():
        lines.append(f"  {size(sum(lengths))} {printable(what)}, in {plural(len(lengths), 'piece')}")
    return lines


def _named(path: str) -> str:
    """Return the file's name, or a description if it is a scratch file, which goes with the process."""
    return "unpacked data" if f"/{SCRATCH}" in path else path
