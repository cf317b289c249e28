"""Repair of a safetensors file that was cut short, is longer than its header states, or has damaged entries in it.

The header is at the start, and the format has no checksums. So every tensor whose bytes end before the file does counts
as intact.
"""

from __future__ import annotations

from ckptfix.checkpoint import ByteRange, OutputFile, Plan, TensorEntry
from ckptfix.checkpoint import Checkpoint as Other
from ckptfix.errors import BadDirectory, DamagedFile
from ckptfix.findings.table import found
from ckptfix.formats.repairs import LostTensor, Repair
from ckptfix.formats.safetensors import format as safetensors
from ckptfix.formats.safetensors.header import ALIGNMENT, header_of
from ckptfix.formats.safetensors.salvage import salvaged
from ckptfix.formats.safetensors.ties import follow, ties
from ckptfix.ops.repair.fill import Allowance, Donor, Fill, Leaf, constant, taken_from, with_data

_LOSS = frozenset({"truncated", "bad-tensor", "unknown-dtype", "duplicate-key"})
"""Findings that lose a tensor. For a duplicate key, it is unknown which of its tensors is meant."""


def repair_safetensors(path: str, *, fill: Fill | None = None, donor: Other | None = None) -> Repair:
    """Plan the repair of a safetensors file.

    Raises:
        Truncated, BadDirectory: no entry of its header is intact, and without one the bytes have no meaning.
        DamagedFile: no tensor is intact, and nothing is filled.
        Refused: more bytes would have to be generated than `Allowance` allows.
    """
    try:
        checkpoint = safetensors.read(path)
    except DamagedFile as error:
        rest = salvaged(path) if isinstance(error, BadDirectory) else None
        if rest is None:
            error.hint = "nothing can be saved without the header: use a different copy of the file"
            raise
        checkpoint = safetensors.of_header(rest)
    header = header_of(checkpoint)
    faults = {row.where: row.message for row in checkpoint.findings if row.id in _LOSS}
    other = Donor(donor, "little") if donor is not None else None
    allowance = Allowance(path, checkpoint.size)
    kept: list[TensorEntry] = []
    written: list[TensorEntry] = []
    listed = {row.key for row in header.rows}
    losses = [LostTensor(name, None, "", why) for name, why in faults.items() if name not in listed]
    for entry in checkpoint.entries:
        if entry.key not in faults:
            kept.append(entry)
            written.append(entry)
            continue
        made, loss = _replaced(entry, faults[entry.key], fill, other, allowance)
        losses.append(loss)
        written += [made] if made is not None else []
    if losses and not written:
        message = f"none of its {len(losses)} tensors is intact"
        raise DamagedFile(message, path=path, offset=header.data_start, hint="--fill-from OLDER copies them from there")
    rows = {row.key: row for row in header.rows}
    end = max((row.stop for row in rows.values()), default=0)
    lost = {loss.name for loss in losses}
    notes = [row for row in checkpoint.findings if row.id not in _LOSS or row.where not in lost]
    if header.data_size > end:
        message = f"{header.data_size - end:,} bytes follow the last tensor"
        notes.append(found("trailing-bytes", message, offset=header.data_start + end, severity="info"))
    tied = ties(checkpoint.metadata, rows.keys())
    left_out = {loss.name for loss in losses if not loss.filled}
    gone: dict[str, str | None] = dict.fromkeys(left_out)
    for name, base in tied.items():
        if base in left_out:
            gone[name] = None
            losses.append(LostTensor(name, None, "", f"it is tied to {base}, which is lost"))
    pairs = [follow(key, value, tied, gone) if gone else (key, value) for key, value in checkpoint.metadata.items()]
    metadata = dict(pair for pair in pairs if pair is not None)
    sound = not losses and len(rows) == len(header.rows) and _gapless([(row.begin, row.stop) for row in rows.values()])
    sound = sound and header.data_start % ALIGNMENT == 0

    def plan_to(dest: str) -> Plan:
        if sound:
            return Plan((OutputFile.of(dest, (ByteRange(path, 0, header.data_start + end),)),))
        return safetensors.FORMAT.plan_write(written, dest, metadata=metadata)

    return Repair("safetensors", tuple(kept), tuple(losses), tuple(notes), plan_to)


def _gapless(spans: list[tuple[int, int]]) -> bool:
    """Return whether the tensors follow one another from the first byte on, as readers demand."""
    at = 0
    for begin, stop in sorted(spans):
        if begin != at:
            return False
        at = stop
    return True


def _replaced(
    entry: TensorEntry, reason: str, fill: Fill | None, other: Donor | None, allowance: Allowance
) -> tuple[TensorEntry | None, LostTensor]:
    """Return the replacement of a lost tensor, if any, and the loss."""
    if entry.detail:
        return None, LostTensor(entry.name, None, "", reason)
    assert entry.storage is not None
    leaf = Leaf(entry.name, entry)
    taken = other.storage(entry.storage, [leaf]) if other is not None else ""
    if not isinstance(taken, str):
        what = taken_from(other)
        return with_data(entry, taken), LostTensor(entry.name, entry.shape, entry.dtype, reason, what, taken=True)
    if fill is not None:
        allowance.take(entry.nbytes, entry.name)
        data, what = constant(fill, [leaf], entry.nbytes, "little")
        return with_data(entry, data), LostTensor(entry.name, entry.shape, entry.dtype, reason, what)
    refused = f"; not filled: {taken}" if taken else ""
    return None, LostTensor(entry.name, entry.shape, entry.dtype, reason + refused)
