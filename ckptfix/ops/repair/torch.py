"""Repair of a torch file: a fresh one with what is provably intact; the rest is left out or filled, and listed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from ckptfix.checkpoint import Checkpoint, Data, Plan, Storage, TensorEntry, dtypes, with_parts
from ckptfix.dataclass import dataclass
from ckptfix.errors import DamagedFile
from ckptfix.formats.repairs import LostTensor, Repair
from ckptfix.formats.torch.damaged.object import DamagedObject, DamagedTensor, IntactStorage
from ckptfix.io.source import found_as, stamp
from ckptfix.ops.repair.clean import clean, clean_records
from ckptfix.ops.repair.fill import Allowance, Donor, Fill, Leaf, constant, taken_from
from ckptfix.ops.repair.remains import Wreck
from ckptfix.words import some


def repair_torch(wreck: Wreck, *, fill: Fill | None = None, donor: Checkpoint | None = None) -> Repair:
    """Plan the repair of a torch checkpoint whose object is intact.

    Args:
        fill: the replacement of lost tensors that `donor` does not have.
        donor: an older checkpoint, whose tensors with the same key, shape and dtype are used first.

    Raises:
        DamagedFile: no tensor is intact, and nothing is filled.
    """
    assert wreck.found is not None
    _note_cases(wreck)
    sight = DamagedObject(wreck.found, wreck.path, wreck.parts, wreck.faults, legacy=wreck.legacy)
    every = sight.tensors()
    cleaned = clean(sight)
    rows: list[DamagedTensor] = []
    losses: list[LostTensor] = []
    for row in every:
        if cleaned.lost(row.identity) or cleaned.lost(row.holder):
            shape, dtype = (row.entry.shape, row.entry.dtype) if row.entry is not None else (None, "")
            losses.append(LostTensor(row.name, shape, dtype, "it is an argument of code that is left out"))
        elif row.unusable:
            losses.append(LostTensor(row.name, None, "", row.unusable))
        else:
            rows.append(row)
    left_out = (*cleaned.findings, *clean_records(wreck.extras))
    filled = _filled(wreck, sight, rows, fill, donor)
    whole = [row for row in rows if not row.lost and row.entry is not None]
    for name, entry, lost, *_ in rows:
        if not lost:
            continue
        whats = {filled.done.get(key, "") for key in lost}
        what = "" if "" in whats else ", ".join(sorted(whats))
        reason = sight.reason(lost)
        if not what and (refused := [filled.refused[key] for key in lost if key in filled.refused]):
            reason += f"; not filled: {refused[0]}"
        shape, dtype = (entry.shape, entry.dtype) if entry is not None else (None, "")
        taken = bool(what) and filled.taken.issuperset(lost)
        losses.append(LostTensor(name, shape, dtype, reason, what, taken))
    for key, data in filled.data.items():
        wreck.parts[key] = IntactStorage(data, None, filled.counts.get(key, sight.counts.get(key, 0)))
    gone = (sight.filled(frozenset(filled.data)) if filled.data else sight).gone()
    if gone:
        left = sight.still_written(gone)
        inside = [row for row in whole if not left.issuperset((row.identity, row.holder))]
        reason = "it belongs to a tensor that is left out"
        losses += [LostTensor(row.name, row.entry.shape, row.entry.dtype, reason) for row in inside if row.entry]
        whole = [row for row in whole if left.issuperset((row.identity, row.holder))]
    kept = tuple(row.entry for row in whole if row.entry is not None)
    if losses and not kept and not any(loss.filled for loss in losses):
        _refuse_empty(wreck.path, losses)
    # Calls whose results an unpickler drops are in the stream but not in the object; only a new stream lacks them.
    rewritten = sight.rewritten(
        gone | cleaned.gone, cleaned.items, filled.counts, unused=cleaned.kept is not None
    )

    def plan_to(dest: str) -> Plan:
        return sight.plan(rewritten, dest, wreck.extras, wreck.byteorder)

    return Repair(wreck.format, kept, tuple(losses), tuple(wreck.notes), plan_to, left_out, compared=wreck.sums)


def _refuse_empty(path: str, losses: Sequence[LostTensor]) -> None:
    names = ", ".join(loss.name for loss in losses[:4])
    more = f" and {len(losses) - 4} more" if len(losses) > 4 else ""
    raise DamagedFile(
        f"none of its {len(losses)} tensors is intact: {names}{more} ({losses[0].reason})",
        path=path,
        hint="copy them from an older checkpoint with --fill-from OLDER",
    )


@dataclass(slots=True)
class _Filled:
    """Results by storage key: the new bytes, their description, or why the other file could not fill it.

    `counts` has the elements of those that get fewer than the pickle promises; `taken` those that came from the other
    file.
    """

    data: dict[str, Data] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    done: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)


def _filled(
    wreck: Wreck,
    sight: DamagedObject,
    rows: Sequence[DamagedTensor],
    fill: Fill | None,
    donor: Checkpoint | None,
) -> _Filled:
    out = _Filled()
    if fill is None and donor is None:
        return out
    other = Donor(donor, wreck.byteorder) if donor is not None else None
    allowance = Allowance(wreck.path, _size(wreck))
    on: dict[str, list[Leaf]] = {}
    storages: dict[str, Storage] = {}
    for name, entry, lost, *_ in rows:
        for leaf in with_parts([entry]) if entry is not None and lost else ():
            if leaf.storage is not None and leaf.storage.key in lost:
                on.setdefault(leaf.storage.key, []).append(Leaf(name, leaf))
                storages[leaf.storage.key] = leaf.storage
    for key, several in on.items():
        taken: Data | str = other.storage(storages[key], several) if other is not None else ""
        if not isinstance(taken, str):
            out.data[key], out.done[key] = taken, taken_from(other)
            out.taken.add(key)
        elif fill is not None:
            itemsize = dtypes.by_name(storages[key].dtype).itemsize
            count = -(-reached([leaf.entry for leaf in several]) // itemsize)
            nbytes = storages[key].nbytes if key in sight.viewed else min(count * itemsize, storages[key].nbytes)
            if nbytes < storages[key].nbytes:
                out.counts[key] = count
            allowance.take(nbytes, several[0].name)
            out.data[key], out.done[key] = constant(fill, several, nbytes, wreck.byteorder)
        else:
            out.refused[key] = taken
    return out


def _size(wreck: Wreck) -> int:
    """Return the bytes of the damaged file, or of the intact files of a folder."""
    whole = sum(part.data.length for part in wreck.parts.values())
    return max(stamp(wreck.path).size, whole) if found_as(wreck.path) == "file" else whole


def reached(entries: Sequence[TensorEntry]) -> int:
    """Return how many bytes, from the beginning of their storage, dense tensors use."""
    end = 0
    for entry in entries:
        if 0 not in entry.shape:
            steps = ((size - 1) * step for size, step in zip(entry.shape, entry.stride, strict=True))
            end = max(end, dtypes.by_name(entry.dtype).nbytes(entry.offset + 1 + sum(steps)))
    return end


def _note_cases(wreck: Wreck) -> None:
    """Note which storages torch confuses, as it finds records regardless of the case of their names."""
    alike: dict[str, list[str]] = {}
    for key in () if wreck.legacy else wreck.parts:
        alike.setdefault(key.lower(), []).append(key)
    names = [" and ".join(f"data/{key}" for key in several) for several in alike.values() if len(several) > 1]
    if names:
        message = f"torch reads the same record for {some(names)}; both are kept, under new keys"
        wreck.note("case-variant", message, warns=True)
