"""The record of what was merged into a file: in its metadata, so that the same adapter is not merged twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckptfix.checkpoint import Checkpoint, TensorEntry
from ckptfix.io.elements import row_major
from ckptfix.io.read import read_blocks
from ckptfix.ops.adapter import Adapter

KEY = "ckptfix.lora"
"""The pair of a safetensors file that holds the record: a JSON list of what was merged, in order."""

START = 4096
"""Bytes of each tensor of a base that its digest is computed from, with names, dtypes and shapes."""


def digest_of_adapter(adapter: Adapter) -> str:
    """Return the SHA-256 of an adapter's tensors, under their keys."""
    found = hashlib.sha256()
    tensors = [*adapter.whole.values(), *(entry for row in adapter.modules.values() for entry in row.tensors.values())]
    for entry in sorted(tensors, key=lambda one: one.key):
        found.update(_head(entry))
        for block in read_blocks(row_major(entry, adapter.checkpoint.byteorder)):
            found.update(block)
    return found.hexdigest()


def digest_of_base(entries: Iterable[TensorEntry]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and the first bytes of each tensor of a base."""
    found = hashlib.sha256()
    for entry in sorted(entries, key=lambda one: one.key):
        found.update(_head(entry))
        if entry.kind == "dense" and entry.has_data and entry.is_contiguous and entry.numel:
            data = row_major(entry, "little")
            if hasattr(data, "sub"):
                for block in read_blocks(data.sub(0, min(START, data.length))):
                    found.update(block)
    return found.hexdigest()


def _head(entry: TensorEntry) -> bytes:
    return f"{entry.key} {entry.dtype} {','.join(map(str, entry.shape))}\n".encode("utf-8", "surrogatepass")


def recorded(checkpoint: Checkpoint) -> list[Mapping[str, Any]]:
    """Return what was merged into a checkpoint before, as its metadata states."""
    try:
        rows = json.loads(checkpoint.metadata.get(KEY, "[]"))
    except (ValueError, RecursionError):
        return []
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def with_rows(before: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the record as text."""
    return json.dumps([*before, *rows], ensure_ascii=False, sort_keys=True)
