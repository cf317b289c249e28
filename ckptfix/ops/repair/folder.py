"""Repair of a checkpoint that is a folder of many files: its format states what is lost, and the rest is written.

A folder of keys and tensors is written as a folder of its own format, and one with objects as one torch file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ckptfix.checkpoint import Checkpoint, TensorEntry
from ckptfix.formats import format_of
from ckptfix.formats.base import Format
from ckptfix.formats.repairs import LostTensor, Repair, RepairTools
from ckptfix.ops.repair.fill import Donor, Fill, Filling, with_data
from ckptfix.ops.repair.rank_files import lost_tensors, mended


def becomes_folder(format: Format | None) -> bool:
    """Return whether a repaired checkpoint of `format` is a folder."""
    return format is not None and "objects" not in format.states and format.writes


def repair_folder(
    path: str,
    format: Format,
    repair_file: Callable[[str], Repair],
    *,
    fill: Fill | None = None,
    donor: Checkpoint | None = None,
) -> Repair:
    """Plan what can be saved of the folder `path`, or of the folder whose index is `path`.

    Args:
        repair_file: plans the repair of one file of it.
        fill, donor: replacements of lost tensors; see `repair_torch`.

    Raises:
        DamagedFile: nothing lists the tensors that there were.
    """

    def without(checkpoint: Checkpoint, lost: Mapping[str, str], losses: Sequence[LostTensor]) -> Repair:
        made = mended if "objects" in format.states else _written
        return made(checkpoint, lost, losses, fill=fill, donor=donor)

    if format.repair is not None:
        return format.repair(path, RepairTools(repair_file, without))
    checkpoint = format.read(path)
    lost = {entry.name: why for entry, why in lost_tensors(checkpoint.entries)}
    # A missing file may hold data that nothing lists, such as optimizer states: they are lost too.
    missing = [] if lost else [finding for finding in checkpoint.findings if finding.id == "missing-rank"]
    return without(checkpoint, lost, [LostTensor(finding.where, None, "", finding.message) for finding in missing])


def _written(
    checkpoint: Checkpoint,
    lost: Mapping[str, str],
    losses: Sequence[LostTensor] = (),
    *,
    fill: Fill | None = None,
    donor: Checkpoint | None = None,
) -> Repair:
    """Plan a folder without the tensors that are `lost`, or with other bytes in their place; see `mended`."""
    format = format_of(checkpoint)
    filling = Filling(checkpoint, fill, Donor(donor, "little") if donor is not None else None)
    found = {entry.name: (data, row) for entry, data, row in filling.of_lost(lost)}
    kept = tuple(entry for entry in checkpoint.entries if entry.name not in found)
    written: list[TensorEntry] = []
    for entry in checkpoint.entries:
        data, row = found.get(entry.name, (None, None))
        if row is None or data is not None:
            written.append(entry if data is None else with_data(entry, data))
    return Repair(
        format.name,
        kept,
        (*losses, *(row for _, row in found.values())),
        (),
        lambda dest: format.plan_write(written, dest, metadata=checkpoint.metadata),
    )
