"""``ckptfix.slim``: a smaller checkpoint with the same tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ckptfix.arguments import checks_types
from ckptfix.checkpoint import Checkpoint
from ckptfix.errors import StrPath
from ckptfix.formats import detect
from ckptfix.io.read import Progress
from ckptfix.ops.audit.promise import everything
from ckptfix.ops.slim import plan
from ckptfix.ops.writing import Draft, Result, WriteOptions, carry_out, is_folder
from ckptfix.words import plural


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SlimResult(Result):
    """The result of slimming.

    Attributes:
        saved: reason -> bytes: ``"unused storage"``, ``"optimizer"``, ``"duplicates"``, and ``"container"`` for the
            rest of the difference in size, which may be negative.
        dropped: addresses of the optimizers that were left out.
        compacted: number of storages that were cut to their used bytes.
        tied: number of storages that were replaced by equal ones.
    """

    saved: Mapping[str, int] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    compacted: int = 0
    tied: int = 0

    def _details(self) -> dict[str, Any]:
        return {
            "saved": dict(self.saved),
            "left_behind": list(self.dropped),
            "compacted": self.compacted,
            "tied": self.tied,
        }


@checks_types
def slim(
    source: StrPath,
    dest: StrPath,
    *,
    no_optimizer: bool = False,
    dedupe: bool = False,
    contiguous: bool = False,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> SlimResult:
    """Write `source` to `dest` without bytes that no tensor uses; a folder of many files becomes one.

    Args:
        no_optimizer: leave out the state of every optimizer.
        dedupe: merge storages with equal bytes into one, which ties their tensors.
        contiguous: write a strided view with gaps, such as a column, without them: its stride changes.
        force, keep_old, dry_run, progress: as in `strip_module`.

    Raises:
        Refused: nothing would be left.
        Unsupported, WouldOverwrite, WouldLoseData, DamagedFile, UnknownFormat, WriteFailed.
    """

    # A folder whose files are not slimmed separately becomes one file.
    folder = is_folder(source) and detect(source).edits_each_file is None

    def make(checkpoint: Checkpoint, dest: str) -> Draft[SlimResult]:
        done = plan.slim(checkpoint, dest, no_optimizer=no_optimizer, dedupe=dedupe, contiguous=contiguous)
        saved = partial(SlimResult, saved=done.saved, dropped=done.dropped, compacted=done.compacted, tied=done.tied)
        return Draft(
            result=saved,
            format="zip" if folder else checkpoint.format,
            plan=done.plan,
            promise=replace(everything(checkpoint, done.dropped), same=done.same),
            lines=_slimmed_lines(done, checkpoint.size, no_optimizer),
        )

    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, progress=progress)
    return carry_out(source, dest, make, how, converts=folder, folder=False if folder else None)


_NO_OPTIMIZER = "no optimizer was found in it, so none is left out (an optimizer is a dict with state and param_groups)"


def _slimmed_lines(done: plan.Slimmed, size: int, no_optimizer: bool) -> tuple[str, ...]:
    without = (_NO_OPTIMIZER,) if no_optimizer and not done.dropped else ()
    if done.identical:
        return ("nothing to do: the tensors use all bytes; the output is an identical copy", *without)
    notes = {
        plan.UNUSED: f" in {plural(done.compacted, 'storage')}",
        plan.OPTIMIZER: f" ({', '.join(done.dropped[:8])}{' ...' if len(done.dropped) > 8 else ''})",
        plan.DUPLICATES: f" in {plural(done.tied, 'storage')}, whose tensors are now tied",
    }
    lines = [
        f"{reason}: {abs(nbytes):,} bytes {'saved' if nbytes > 0 else 'more'}{notes.get(reason, '')}"
        for reason, nbytes in done.saved.items()
    ]
    if done.dropped and plan.OPTIMIZER not in done.saved:
        lines.append(f"left out: {', '.join(done.dropped[:8])}")
    return (*lines, *without, f"{size:,} bytes become {done.plan.nbytes:,}")
