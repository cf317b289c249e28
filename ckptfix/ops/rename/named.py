"""Formats of keys and tensors without objects, edited by a rules file: safetensors, and shards of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptfix.checkpoint import Checkpoint, Plan, TensorEntry
from ckptfix.formats import format_of, weights_of
from ckptfix.formats.safetensors.ties import TIE_KEYS
from ckptfix.ops.rename.transform import StateDictChange


def plan(checkpoint: Checkpoint, site: StateDictChange, dest: str) -> Plan:
    """Plan the checkpoint with the rows of its one state dict.

    Raises:
        WouldLoseData: the format cannot hold a tensor.
    """
    format = format_of(checkpoint)
    untouched = {entry.key: entry for entry in weights_of(checkpoint, site.at)}
    rows: list[tuple[str, TensorEntry]] = []
    for key, (name, entry) in site.after():
        rows.append((key, replace(untouched[key] if entry is None else entry, key=name, at="")))
    pairs = _pairs(checkpoint)
    if format.plan_rows is not None:
        return format.plan_rows(checkpoint, rows, dest, pairs)
    kept, metadata, findings = format.split_ties([entry for _, entry in rows])
    if format.plan_like is not None:
        made = format.plan_like(checkpoint, kept, dest, {**pairs, **metadata})
    else:
        made = format.plan_write(kept, dest, metadata={**pairs, **metadata})
    return replace(made, findings=(*findings, *made.findings))


def _pairs(checkpoint: Checkpoint) -> Mapping[str, str]:
    """Return the metadata without entries about ties and views, which are written again."""
    names = {*format_of(checkpoint).ties(checkpoint), *TIE_KEYS}
    return {key: value for key, value in checkpoint.metadata.items() if key not in names}
