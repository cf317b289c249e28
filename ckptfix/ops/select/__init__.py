"""``ckptfix.select``: some tensors of a state dict, chosen by their keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ckptfix.arguments import checks_types
from ckptfix.checkpoint import Checkpoint, address
from ckptfix.errors import StrPath
from ckptfix.io.read import Progress
from ckptfix.ops.audit.promise import everything
from ckptfix.ops.choose import refuse_damaged
from ckptfix.ops.select import plan
from ckptfix.ops.writing import Draft, Result, WriteOptions, carry_out, copy_note, plan_edits
from ckptfix.words import plural, some


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SelectResult(Result):
    """The result of a selection.

    Attributes:
        kept: number of tensors that stay in the state dicts that the globs apply to.
        dropped: addresses that are left out of them.
    """

    kept: int = 0
    dropped: tuple[str, ...] = ()

    def _details(self) -> dict[str, Any]:
        return {"kept": self.kept, "left_behind": list(self.dropped)}


@checks_types
def select(
    source: StrPath,
    dest: StrPath,
    *,
    keep: Sequence[str] = (),
    drop: Sequence[str] = (),
    at: str | None = None,
    allow_unmatched: bool = False,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> SelectResult:
    """Write `source` to `dest` with only some tensors of its state dicts. Everything else is unchanged.

    Args:
        keep: globs; tensors whose keys match none of them are left out. Without any, all tensors match.
        drop: globs; tensors whose keys match one of them are left out.
        at: address of the one state dict to choose from; all that look like a model's by default.
        allow_unmatched: a glob that matches no key is a finding, not an error.
        force, keep_old, dry_run, progress: as in `strip_module`.

    Raises:
        Refused: there is no glob, or no tensor would be left.
        NoSuchTensor, WouldOverwrite, DamagedFile, UnknownFormat, WriteFailed.
    """

    def make(checkpoint: Checkpoint, dest: str) -> Draft[SelectResult]:
        done = plan.select(checkpoint, keep=keep, drop=drop, at=at, allow_unmatched=allow_unmatched)
        gone = done.addresses
        kept = sum(done.kept.values())
        line = "nothing to do: every tensor is kept"
        if gone:
            line = f"kept {plural(kept, 'tensor')}, left out {len(gone):,}"
            places = [place for place in done.dropped if place] or list(done.dropped)
            if len(done.dropped) > 1 or places[0]:
                line += f" ({some([address.shown(place) for place in done.dropped])})"
        lines = [line + copy_note(not gone)]
        if gone:
            lines.append(f"left behind: {some(gone)}")
        lines += [f"{row.where}: {row.message}" for row in done.findings if row.id == "optimizer-left"]
        refuse_damaged(checkpoint, left_out=frozenset(gone))
        return Draft(
            result=partial(SelectResult, kept=kept, dropped=gone),
            format=checkpoint.format,
            plan=plan_edits(checkpoint, done.edits, dest),
            promise=replace(everything(checkpoint, gone), chosen=checkpoint if gone else None),
            lines=lines,
            findings=done.findings,
        )

    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, progress=progress)
    return carry_out(source, dest, make, how)
