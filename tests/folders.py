"""A format whose checkpoints are folders, made of public pieces alone: two torch files, and an index of their names.

::

    FOLDER/pair.json      {"files": ["one.pth", "two.pth"]}
    FOLDER/one.pth        a state dict as torch.save writes it; its storages are called "0", "1" ...
    FOLDER/two.pth        ... and so are this one's
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ranges import read_exact

from ckptfix.checkpoint import (
    ByteRange,
    Checkpoint,
    Drop,
    Edit,
    FormatState,
    NameList,
    OutputFile,
    Plan,
    Rename,
    StateDict,
    TensorEntry,
)
from ckptfix.errors import Unsupported
from ckptfix.findings.row import Finding
from ckptfix.formats import FORMATS, format_of, open_checkpoint
from ckptfix.formats.base import Format, plain_weights
from ckptfix.io.source import mark

INDEX = "pair.json"


class Parts(FormatState):
    """The checkpoints of the files, in the order of the index."""

    __slots__ = ("each",)

    def __init__(self, each: tuple[Checkpoint, ...]) -> None:
        self.each = each


def parts_of(checkpoint: Checkpoint) -> tuple[Checkpoint, ...]:
    assert isinstance(checkpoint.inside, Parts)
    return checkpoint.inside.each


def score(path: str, head: bytes, size: int) -> int:
    return 100 if Path(path, INDEX).is_file() else 0


def read(path: str) -> Checkpoint:
    index = mark(Path(path, INDEX))
    names = json.loads(read_exact(ByteRange(index.path, 0, index.stamp.size)))["files"]
    parts = tuple(open_checkpoint(Path(path, name)) for name in names)
    files = (index, *(one for part in parts for one in part.files))

    def entries() -> tuple[TensorEntry, ...]:
        return tuple(entry for part in parts for entry in part.entries)

    keys = tuple(name for part in parts for site in part.sites if site.kind == "state_dict" for name in site.names)
    return Checkpoint(
        path=path,
        format=FORMAT.name,
        size=sum(file.stamp.size for file in files),
        traits={"files": len(parts)},
        load_entries=entries,
        load_values=lambda: iter(()),
        sites=(NameList("", "state_dict", keys),),
        state_dicts=(StateDict("", len(keys), 0),),
        devices={"cpu": len(keys)},
        inside=Parts(parts),
        findings=tuple(finding for part in parts for finding in part.findings),
        files=files,
    )


def judge(checkpoint: Checkpoint) -> Iterator[Finding]:
    for part in parts_of(checkpoint):
        yield from format_of(part).validate(part)


def plan_edit(checkpoint: Checkpoint, edits: Sequence[Edit], dest: str) -> Plan:
    """The edits of each file, and the index last."""
    files: list[OutputFile] = []
    for part in parts_of(checkpoint):
        own = {entry.key for entry in part.entries}
        theirs = [edit for one in edits for edit in _below(one, own)]
        files += format_of(part).plan_edit(part, theirs, str(Path(dest, Path(part.path).name))).files
    index = checkpoint.files[0]
    files.append(OutputFile.of(Path(dest, INDEX), [ByteRange(index.path, 0, index.stamp.size)]))
    return Plan(tuple(files))


def _below(edit: Edit, own: set[str]) -> Iterator[Edit]:
    """What an edit is for the file that holds the names `own`."""
    if isinstance(edit, Rename):
        names = {old: new for old, new in edit.names.items() if old in own}
        if names and edit.kind == "state_dict":
            yield Rename(edit.at, edit.kind, names)
    elif isinstance(edit, Drop):
        yield Drop(edit.at, tuple(name for name in edit.names if name in own))
    else:
        yield edit


def plan_write(entries: Sequence[TensorEntry], dest: str, *, metadata: Mapping[str, str] | None = None) -> Plan:
    raise Unsupported("nothing is written as a pair", path=dest)


FORMAT = Format(
    name="pair",
    title="a pair of files",
    suffixes=(),
    states=frozenset({"device", "stride", "sharing", "requires_grad", "order"}),
    score=score,
    read=read,
    validate=judge,
    weights=plain_weights,
    refuses=FORMATS["zip"].refuses,
    plan_edit=plan_edit,
    plan_write=plan_write,
    folder=True,
    writes=False,
)
