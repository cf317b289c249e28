"""A folder format that only the tests have: each tensor is a file of raw bytes, and a JSON index lists them.

::

    FOLDER/pieces.json    {"pieces": [{"name": "w", "dtype": "float32", "shape": [2, 3], "file": "piece-0.bin"}, ...]}
    FOLDER/piece-0.bin    the elements in row-major order, little-endian

It is all that a new folder format needs: `FORMAT`, and its row in `FORMATS`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptfix.checkpoint import (
    ByteRange,
    Checkpoint,
    Drop,
    Edit,
    NameList,
    OutputFile,
    Plan,
    Put,
    Rename,
    StateDict,
    Storage,
    TensorEntry,
    contiguous_stride,
    dtypes,
)
from ckptfix.errors import BadIndex, CkptfixError, NoSuchFile, Unsupported
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.base import Format, plain_weights
from ckptfix.formats.folders.safe_paths import file_inside
from ckptfix.formats.repairs import Repair, RepairTools
from ckptfix.io.elements import row_major
from ckptfix.io.source import mark, open_source

INDEX = "pieces.json"
MOST = 1 << 24


def score(path: str, head: bytes, size: int) -> int:
    if head:
        return 100 if Path(path).name == INDEX else 0
    return 100 if Path(path, INDEX).is_file() else 0


def _listed(index: str) -> list[dict[str, Any]]:
    """The rows of the index."""
    with open_source(index) as source:
        text = source.read(0, min(source.size, MOST))
    try:
        rows = json.loads(text)["pieces"]
        for row in rows:
            assert isinstance(row["name"], str) and isinstance(row["file"], str)
            assert all(type(size) is int and 0 <= size < 1 << 40 for size in row["shape"])
            dtypes.by_name(row["dtype"])
        assert len({row["name"] for row in rows}) == len(rows)
    except (ValueError, KeyError, TypeError, AssertionError, RecursionError) as error:
        raise BadIndex(f"it is no list of pieces: {type(error).__name__}", path=index) from None
    return list(rows)


def _entry(folder: str, row: Mapping[str, Any]) -> tuple[TensorEntry, Finding | None]:
    """A tensor of the index, and what is wrong with its file."""
    shape = tuple(row["shape"])
    empty = TensorEntry(row["name"], "", None, row["dtype"], shape, contiguous_stride(shape))
    try:
        path = file_inside(folder, row["file"], where=str(Path(folder, INDEX)))
        size = mark(path).stamp.size
    except NoSuchFile:
        return empty, found("missing-shard", f"{row['file']} is missing", where=row["name"])
    except CkptfixError as error:
        return empty, found("shard-path", error.message, where=row["name"])
    storage = Storage(row["file"], row["dtype"], empty.nbytes, "cpu", ByteRange(path, 0, empty.nbytes))
    entry = TensorEntry(row["name"], "", storage, row["dtype"], shape, contiguous_stride(shape))
    if size == entry.nbytes:
        return entry, None
    id = "truncated" if size < entry.nbytes else "bad-tensor"
    return entry, found(id, f"{row['file']} has {size} bytes instead of {entry.nbytes}", where=row["name"])


def _all(path: str) -> tuple[str, list[tuple[TensorEntry, Finding | None]]]:
    folder = path if Path(path).is_dir() else str(Path(path).parent)
    return folder, [_entry(folder, row) for row in _listed(str(Path(folder, INDEX)))]


def read(path: str) -> Checkpoint:
    folder, rows = _all(path)
    entries = tuple(entry for entry, _ in rows if entry.storage is not None)
    files = [mark(Path(folder, INDEX))]
    files += [mark(entry.storage.data.path) for entry in entries]  # type: ignore[union-attr]
    return Checkpoint(
        path=path,
        format=FORMAT.name,
        size=sum(file.stamp.size for file in files),
        traits={"pieces": len(rows)},
        load_entries=lambda: entries,
        load_values=lambda: iter(()),
        sites=(NameList("", "state_dict", tuple(entry.key for entry in entries)),),
        state_dicts=(StateDict("", len(entries), 0),) if entries else (),
        findings=tuple(finding for _, finding in rows if finding is not None),
        files=tuple(files),
    )


def validate(checkpoint: Checkpoint) -> Iterator[Finding]:
    yield from checkpoint.findings


def refuses(entry: TensorEntry) -> str | None:
    return None if entry.kind == "dense" and entry.storage is not None else f"a {entry.kind} tensor"


def plan_write(entries: Sequence[TensorEntry], dest: str, *, metadata: Mapping[str, str] | None = None) -> Plan:
    files, rows = [], []
    for number, entry in enumerate(entries):
        name = f"piece-{number}.bin"
        rows.append({"name": entry.key, "dtype": entry.dtype, "shape": list(entry.shape), "file": name})
        files.append(OutputFile.of(Path(dest, name), [row_major(entry, "little")]))
    text = json.dumps({"pieces": rows}).encode()
    return Plan((*files, OutputFile.of(Path(dest, INDEX), [text])))


def plan_edit(checkpoint: Checkpoint, edits: Sequence[Edit], dest: str) -> Plan:
    entries = {entry.key: entry for entry in checkpoint.entries}
    names: dict[str, str | None] = {name: name for name in entries}
    for edit in edits:
        if isinstance(edit, Rename):
            names = {old: None if new is None else edit.names.get(new, new) for old, new in names.items()}
        elif isinstance(edit, Drop):
            names = {old: None if new in edit.names else new for old, new in names.items()}
        elif isinstance(edit, Put):
            put = {old: edit.tensors[new] for old, new in names.items() if new is not None and new in edit.tensors}
            entries |= put
        else:
            raise Unsupported(f"pieces have no {type(edit).__name__}", path=checkpoint.path)
    kept = [TensorEntry(new, "", *_rest(entries[old])) for old, new in names.items() if new is not None]
    return plan_write(kept, dest)


def _rest(entry: TensorEntry) -> tuple[Any, ...]:
    return entry.storage, entry.dtype, entry.shape, entry.stride


def repair(path: str, tools: RepairTools) -> Repair:
    """The tensors of the index; a tensor is lost if its file is missing or has a different size."""
    _, rows = _all(path)
    whole = read(path)
    lost = {entry.key: finding.message for entry, finding in rows if finding is not None}
    every = tuple(entry for entry, _ in rows)
    return tools.without(Checkpoint(path, whole.format, whole.size, {}, lambda: every, lambda: iter(())), lost, ())


FORMAT = Format(
    name="pieces",
    title="pieces of raw bytes",
    suffixes=(),
    states=frozenset(),
    score=score,
    read=read,
    validate=validate,
    weights=plain_weights,
    refuses=refuses,
    plan_edit=plan_edit,
    plan_write=plan_write,
    folder=True,
    repair=repair,
)
