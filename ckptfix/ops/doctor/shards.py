"""Whether the index of a sharded checkpoint matches its shards.

::

    {"metadata": {"total_size": 123}, "weight_map": {"fc.weight": "model-00001-of-00002.safetensors", ...}}

Source: ``save_pretrained`` of transformers, which writes ``*.index.json`` beside the shards.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptfix.checkpoint import Checkpoint
from ckptfix.commands import command, quoted, verbatim
from ckptfix.errors import CkptfixError
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats import open_checkpoint
from ckptfix.io.source import is_local, open_source

MAX_INDEX = 1 << 28

_SHARD = re.compile(r"-\d{5}-of-\d{5}\.(safetensors|bin|pt|pth)$")


def index_of(path: str) -> str | None:
    """The index that `path` is, or the one in the folder that it is; None if there is none."""
    place = Path(path)
    if not is_local(path):
        return None
    if place.is_dir():
        names = sorted(entry for entry in place.iterdir() if entry.name.endswith(".index.json"))
        return str(names[0]) if names else None
    if place.name.endswith(".index.json"):
        return path
    if place.suffix == ".json" and place.is_file():
        with open_source(path) as reader:
            return path if b'"weight_map"' in reader.read(0, min(reader.size, 1 << 16)) else None
    return None


def scan(index: str) -> Iterator[Finding]:
    """Findings about the index and every shard that it lists; of the shards, headers are read."""
    try:
        rows, stated = _document(index)
    except (ValueError, RecursionError) as error:
        yield found("bad-index", f"not an index: {error}")
        return
    folder = Path(index).parent
    listed: dict[str, list[str]] = defaultdict(list)
    for name, shard in rows.items():
        listed[shard].append(name)
    total = 0
    holders: dict[str, list[str]] = defaultdict(list)
    whole = True
    for shard, names in listed.items():
        if Path(shard).is_absolute() or ".." in Path(shard).parts or "\\" in shard or "\0" in shard:
            yield found("shard-path", f"the index names {shard!r}, which leads out of its folder", where=shard)
            whole = False
            continue
        if not (folder / shard).is_file():
            yield found("missing-shard", f"{shard} is not there; it should hold {_some(names)}", where=shard)
            whole = False
            continue
        try:
            checkpoint = open_checkpoint(folder / shard)
        except CkptfixError as error:
            fix = verbatim(command("doctor", folder / shard))
            yield found("missing-shard", f"{shard} cannot be read: {error.message}", where=shard, fix=fix)
            whole = False
            continue
        for entry in checkpoint.entries:
            holders[entry.key].append(shard)
        total += _bytes(checkpoint)
        yield from (
            replace(finding, where=f"{shard}: {finding.where}", fix=None)
            for finding in checkpoint.findings
        )
        absent = [name for name in names if shard not in holders.get(name, ())]
        if absent:
            message = f"the index says that {shard} holds {_some(absent)}; it does not"
            yield found("index-mismatch", message, where=shard)
    unnamed = [name for name in holders if name not in rows]
    if unnamed:
        yield found("index-mismatch", f"the index does not name {_some(unnamed)}, which the shards hold")
    twice = [name for name, shards in holders.items() if len(shards) > 1]
    if twice:
        yield found("index-mismatch", f"several shards hold {_some(twice)}")
    yield from _others(folder, listed)
    if whole and type(stated) is int and stated != total:
        message = f"total_size is {stated:,}, and the tensors take {total:,} bytes"
        yield found("index-total", message, severity="warning" if abs(stated - total) * 100 > total else None)


def _document(index: str) -> tuple[dict[str, str], object]:
    """Name -> file, and the total size that an index states. Raises ValueError for anything that is not an index."""
    with open_source(index) as reader:
        if reader.size > MAX_INDEX:
            raise ValueError(f"{reader.size:,} bytes of JSON")
        text = reader.read(0, reader.size).decode("utf-8-sig")
    document = json.loads(text, object_pairs_hook=_unique)
    rows = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(rows, dict) or not all(isinstance(shard, str) for shard in rows.values()):
        raise ValueError("no weight_map from names to files")
    about = document.get("metadata")
    return rows, about.get("total_size") if isinstance(about, dict) else None


def _unique(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name stands in it twice")
    return made


def _others(folder: Path, listed: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """Shards in the folder that are numbered like the listed ones, and not listed."""
    suffixes = {Path(shard).suffix for shard in listed}
    for entry in sorted(folder.iterdir()):
        if entry.name not in listed and _SHARD.search(entry.name) and entry.suffix in suffixes:
            yield found("extra-shard", f"{entry.name} is there, and the index does not list it", where=entry.name)


def _bytes(checkpoint: Checkpoint) -> int:
    seen: dict[object, int] = {}
    for entry in checkpoint.entries:
        place = (entry.storage.identity if entry.storage else entry.name, entry.offset, entry.shape)
        seen[place] = entry.nbytes
    return sum(seen.values())


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3:,} more names" if len(names) > 3 else shown


def _quoted(path: Path) -> str:
    return verbatim(quoted(path))
