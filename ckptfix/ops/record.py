"""The record of how a file was made: the inputs with their SHA-256, the command and the version.

A safetensors file has it in its ``__metadata__``, under `KEY`. Other files have it beside them, as
``OUT.record.json``, and a folder has it in `NAME`. It is JSON::

    {"ckptfix": "0.1.0", "command": ["ckptfix", "cast", ...], "inputs": [{"name": ..., "size": ..., "sha256": ...}]}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from ckptfix.checkpoint import ByteRange, FileVersion, OutputFile, Plan, Segment, SetMetadata
from ckptfix.formats import FORMATS
from ckptfix.io.read import read_blocks
from ckptfix.io.source import found_as
from ckptfix.io.threads import Workers
from ckptfix.io.virtual_files import PlannedFile, part_of
from ckptfix.urls import as_path
from ckptfix.version import VERSION

KEY = "ckptfix.record"
NAME = "ckptfix.record.json"
SUFFIX = ".record.json"

_command: ContextVar[tuple[str, ...] | None] = ContextVar("command", default=None)


@contextmanager
def recording(*command: str) -> Iterator[None]:
    """Keep a record of this command with everything that is written inside the block.

    An in-place edit has no record: `undo` knows what it did.
    """
    token = _command.set(command)
    try:
        yield
    finally:
        _command.reset(token)


def with_record(plan: Plan, format: str, dest: str, read: Iterable[FileVersion]) -> tuple[Plan, str | None]:
    """Return the plan with a record, if one is requested, and a sentence that says where it is."""
    command = _command.get()
    if command is None:
        return plan, None
    text = json.dumps({"ckptfix": VERSION, "command": list(command), "inputs": _inputs(read)}, ensure_ascii=False)
    row = FORMATS[format]
    if row.folder:
        place = str(as_path(dest, NAME))
    elif "metadata" in row.states and len(plan.files) == 1:
        return replace(plan, files=(_with_pair(plan.files[0], format, text),)), f"record: {KEY} in its metadata"
    else:
        place = dest + SUFFIX
    others = tuple(file for file in plan.files if file.path != place)
    made = OutputFile.of(place, [text.encode("utf-8", "surrogatepass") + b"\n"], along=True)
    return replace(plan, files=(made, *others)), f"record: {place}"


def _inputs(read: Iterable[FileVersion]) -> list[dict[str, object]]:
    marks = [mark for mark in dict.fromkeys(read) if found_as(mark.path) == "file"]
    digests = Workers().run(_sha256, marks)
    return [
        {"name": as_path(mark.path).name, "size": mark.stamp.size, "sha256": digest}
        for mark, digest in zip(marks, digests, strict=True)
    ]


def _sha256(mark: FileVersion) -> str:
    import hashlib

    state = hashlib.sha256()
    for block in read_blocks(ByteRange(mark.path, 0, mark.stamp.size)):
        state.update(block)
    return state.hexdigest()


def _with_pair(file: OutputFile, format: str, text: str) -> OutputFile:
    """Return a planned file with one more pair in its metadata: a new header, and unchanged data."""
    name = PlannedFile(file)
    checkpoint = FORMATS[format].read(name)
    (made,) = FORMATS[format].plan_edit(checkpoint, [SetMetadata({KEY: text})], file.path).files
    return OutputFile.of(file.path, _resolved(made.segments, name))


def _resolved(segments: Sequence[Segment], name: PlannedFile) -> Iterator[Segment]:
    """Yield the segments, with the content of the planned file in place of ranges of it."""
    for segment in segments:
        if isinstance(segment, ByteRange) and segment.path == name:
            for inner, first, count in name.between(segment.offset, segment.length):
                yield part_of(inner, first, count)
        else:
            yield segment
