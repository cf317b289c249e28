"""Repair of a file of arrays with some that cannot be read: the others become a torch or a safetensors file."""

from __future__ import annotations

from dataclasses import replace

from ckptfix.checkpoint import Checkpoint, Plan
from ckptfix.checkpoint.quantization_signs import BLOCKS
from ckptfix.errors import DamagedFile
from ckptfix.findings.folders import BROKEN
from ckptfix.findings.table import found
from ckptfix.formats import FORMATS, format_of, weights_of
from ckptfix.formats.repairs import LostTensor, Repair
from ckptfix.formats.target import of_suffix
from ckptfix.ops.choose import mapping

ZIP = "zip"
"""The format of an output whose suffix names none."""

ALONE = frozenset({"bad-tensor", "unknown-dtype", "truncated"})
"""Findings about one array, which is then lost."""


def is_repairable(checkpoint: Checkpoint) -> bool:
    """Return whether each array of a file that is only read can be used, or is named as one that cannot.

    Blocks of GGUF have no form in another file.
    """
    blocks = any(entry.detail.startswith(BLOCKS) for entry in checkpoint.entries)
    broken = [row for row in checkpoint.findings if row.id in BROKEN]
    return not blocks and all(row.id in ALONE for row in broken)


def repair_arrays(checkpoint: Checkpoint) -> Repair:
    """Plan a file of the arrays that can be read, in the format that its suffix names, or else a torch zip.

    Raises:
        DamagedFile: none can be read.
    """
    faults = {row.where: row.message for row in checkpoint.findings if row.id in ALONE}
    chosen = mapping(checkpoint)
    entries = weights_of(checkpoint, chosen.at)
    kept = tuple(entry for entry in entries if entry.name not in faults and entry.key not in faults)
    if not kept:
        raise DamagedFile(f"none of its {len(faults)} tensors can be kept: {next(iter(faults))}", path=checkpoint.path)
    losses = tuple(LostTensor(name, None, "", why) for name, why in faults.items())
    notes = [row for row in checkpoint.findings if row.id not in ALONE]
    what = f"the input was: {format_of(checkpoint).title}"
    notes.append(found(next(format_of(checkpoint).notes(checkpoint)).id, what, severity="info"))

    def plan_to(dest: str) -> Plan:
        target = FORMATS[of_suffix(dest) or ZIP]
        rows, pairs, findings = target.split_ties([replace(entry, at="") for entry in kept])
        metadata = {"format": "pt", **pairs} if "metadata" in target.states else pairs
        plan = target.plan_write(rows, dest, metadata=metadata)
        return Plan(plan.files, (*findings, *plan.findings))

    return Repair(ZIP, kept, losses, tuple(notes), plan_to, any_format=True)
