"""Missing and foreign files: ranks whose files are missing, and files of another save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckptfix.checkpoint import ByteRange, TensorEntry
from ckptfix.errors import DamagedFile
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.folders.nodes import number
from ckptfix.formats.zero.partitions import Cuts, Shape, rows_of
from ckptfix.formats.zero.rank_evidence import Ranks
from ckptfix.formats.zero.states import Lost, Model, Optim, step_values
from ckptfix.io.read import read_chunks
from ckptfix.urls import as_path
from ckptfix.words import some


def lost_rank(rank: int, ranks: int, lost: Lost, groups: Sequence[Mapping[str, Shape]], cuts: Cuts) -> Finding:
    """Return the finding for a rank whose file is missing, with the tensors and rows that it holds."""
    held = [
        f"{name} ({rows})"
        for shapes, own in zip(groups, cuts, strict=True)
        for name, shape in shapes.items()
        if (rows := rows_of(shape, own[name].runs(), rank)) is not None
    ]
    what = f"it holds {some(held)}" if held else "it holds only padding"
    message = f"rank {rank} of {ranks}: {as_path(lost.path).name} {lost.why}; {what}"
    return found("missing-rank", message, where=lost.path)


def other_steps(ranks: Ranks) -> list[tuple[Optim, str]]:
    """Return ranks with a different step count or another rank's file, each with a message."""
    there = ranks.there
    counts = {rank: _steps(own) for rank, own in there.items()}
    known = [count for count in counts.values() if count is not None]
    if len(set(known)) < 2:
        return _doubled(there) or ranks.exchanged()
    usual = max(sorted(set(known)), key=known.count)
    return [
        (there[rank], f"its optimizer is at step {count:g}, the other ranks' at {usual:g}: it is from a different save")
        for rank, count in counts.items()
        if count is not None and count != usual
    ]


def other_model(model: Model, there: Mapping[int, Optim]) -> Iterator[Finding]:
    """Yield a warning if the optimizer's step count differs from the model's; reads one element.

    A step that overflowed is counted by the model alone. A training that was resumed without its optimizer states has a
    difference too, so this is not an error.
    """
    counts = map(_steps, there.values())
    own, skipped = model.step, number(model.file.top.get("skipped_steps")) or 0
    count = next((count for count in counts if count is not None), None)
    if own is not None and count is not None and count != own - skipped:
        left_out = f" and skipped {skipped} of them" if skipped else ""
        message = f"the model states count {own:,} steps{left_out}, and the optimizer counts {count:,g}"
        yield found("model-steps", message, where=model.file.path)


def _doubled(there: Mapping[int, Optim]) -> list[tuple[Optim, str]]:
    """Return ranks with the same weights as an earlier rank: copies of that rank's file under another name."""
    first: dict[object, Optim] = {}
    made = []
    for own in there.values():
        storages = [entry.storage for entry in own.flat]
        sums = tuple((storage.nbytes, storage.crc32) for storage in storages if storage is not None)
        if not sums or any(crc32 is None for _, crc32 in sums) or not any(map(_varies, own.flat)):
            continue
        other = first.setdefault(sums, own)
        if other is not own:
            made.append((own, f"it has the same weights as {as_path(other.file.path).name}: it is a copy of that file"))
    return made


def _varies(entry: TensorEntry) -> bool:
    """Return whether the first elements of a tensor differ, unlike those of padding."""
    data = None if entry.storage is None else entry.storage.data
    if not isinstance(data, ByteRange) or not entry.itemsize:
        return False
    start = next(read_chunks(data.sub(0, min(data.length, 1 << 16))), b"")
    return start != start[: entry.itemsize] * (len(start) // entry.itemsize)


def refuse_other_steps(ranks: Ranks) -> None:
    """Refuse ranks from another save.

    Raises:
        DamagedFile: there is one.
    """
    for own, message in other_steps(ranks):
        raise DamagedFile(message, path=own.file.path, hint="copy the files of all ranks from one save")


def _steps(own: Optim) -> float | None:
    """Return the number of steps that the optimizer of a rank counted; None unless it states exactly one."""
    values = {value for value in step_values(own) if value is not None}
    return values.pop() if len(values) == 1 else None
