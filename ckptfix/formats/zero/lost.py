"""What is not there, and what does not belong: ranks whose files are missing, files of another save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckptfix.checkpoint import ByteRange, TensorEntry
from ckptfix.errors import DamagedFile
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.folders.nodes import number
from ckptfix.formats.zero.cuts import Cuts, Shape, rows_of
from ckptfix.formats.zero.states import Lost, Model, Optim, step_values
from ckptfix.formats.zero.verified import Ranks
from ckptfix.io.read import read_chunks
from ckptfix.urls import as_path
from ckptfix.words import some


def lost_rank(rank: int, ranks: int, lost: Lost, groups: Sequence[Mapping[str, Shape]], cuts: Cuts) -> Finding:
    """The finding for a rank whose file is missing, with the tensors and the rows that it holds."""
    held = [
        f"{name} ({rows})"
        for shapes, own in zip(groups, cuts, strict=True)
        for name, shape in shapes.items()
        if (rows := rows_of(shape, own[name].runs(), rank)) is not None
    ]
    what = f"it holds {some(held)}" if held else "it holds nothing but padding"
    message = f"rank {rank} of {ranks}: {as_path(lost.path).name} {lost.why}; {what}"
    return found("missing-rank", message, where=lost.path)


def other_steps(ranks: Ranks) -> list[tuple[Optim, str]]:
    """The ranks whose optimizer counted other steps than most, or whose file is another rank's, and what to say."""
    there = ranks.there
    counts = {rank: _steps(own) for rank, own in there.items()}
    known = [count for count in counts.values() if count is not None]
    if len(set(known)) < 2:
        return _doubled(there) or ranks.exchanged()
    usual = max(sorted(set(known)), key=known.count)
    return [
        (there[rank], f"its optimizer is at step {count:g}, the other ranks' at {usual:g}: it is of another save")
        for rank, count in counts.items()
        if count is not None and count != usual
    ]


def other_model(model: Model, there: Mapping[int, Optim]) -> Iterator[Finding]:
    """A warning where the optimizer counted other steps than the model states; reads one element.

    A step that overflowed counts for the model alone. A training that went on without its optimizer's states has a
    difference too, so that it is no error.
    """
    counts = map(_steps, there.values())
    own, skipped = model.step, number(model.file.top.get("skipped_steps")) or 0
    count = next((count for count in counts if count is not None), None)
    if own is not None and count is not None and count != own - skipped:
        left_out = f" and skipped {skipped} of them" if skipped else ""
        message = f"the model states count {own:,} steps{left_out}, the optimizer's {count:,g}"
        yield found("model-steps", message, where=model.file.path)


def _doubled(there: Mapping[int, Optim]) -> list[tuple[Optim, str]]:
    """The ranks that hold the very weights of another: copies of its file under another name."""
    first: dict[object, Optim] = {}
    made = []
    for own in there.values():
        storages = [entry.storage for entry in own.flat]
        sums = tuple((storage.nbytes, storage.crc32) for storage in storages if storage is not None)
        if not sums or any(crc32 is None for _, crc32 in sums) or not any(map(_varies, own.flat)):
            continue
        other = first.setdefault(sums, own)
        if other is not own:
            made.append((own, f"it holds the very weights of {as_path(other.file.path).name}: it is a copy of that"))
    return made


def _varies(entry: TensorEntry) -> bool:
    """Whether the first elements of a tensor are not all the same, as of padding alone."""
    data = None if entry.storage is None else entry.storage.data
    if not isinstance(data, ByteRange) or not entry.itemsize:
        return False
    start = next(read_chunks(data.sub(0, min(data.length, 1 << 16))), b"")
    return start != start[: entry.itemsize] * (len(start) // entry.itemsize)


def refuse_other_steps(ranks: Ranks) -> None:
    """Refuse ranks of another save.

    Raises:
        DamagedFile: there is one.
    """
    for own, message in other_steps(ranks):
        raise DamagedFile(message, path=own.file.path, hint="copy the files of all ranks from one save")


def _steps(own: Optim) -> float | None:
    """The steps that the optimizer of a rank counted; None where it does not say, or says several."""
    values = {value for value in step_values(own) if value is not None}
    return values.pop() if len(values) == 1 else None
