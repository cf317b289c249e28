"""``ckptfix.map_location`` and ``ckptfix.to_cpu``: tensors moved to other devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ckptfix.arguments import checks_types
from ckptfix.checkpoint import Checkpoint
from ckptfix.errors import StrPath
from ckptfix.io.read import Progress
from ckptfix.ops.audit.promise import Promise
from ckptfix.ops.relocate.plan import relocate
from ckptfix.ops.writing import Draft, Result, WriteOptions, carry_out, copy_note, plan_edits
from ckptfix.words import plural


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RelocateResult(Result):
    """The result of a relocation.

    `moved` maps (from, to) to the number of places that moved; `kept` maps a location to the number that did not.
    """

    moved: Mapping[tuple[str, str], int] = field(default_factory=dict)
    kept: Mapping[str, int] = field(default_factory=dict)

    def _details(self) -> dict[str, Any]:
        rows = [{"old": old, "new": new, "count": count} for (old, new), count in self.moved.items()]
        return {"moved": rows, "unmoved": dict(self.kept)}


@checks_types
def map_location(
    source: StrPath,
    dest: StrPath | None,
    target: str | Mapping[str, str],
    *,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    in_place: bool = False,
    link: bool = False,
    progress: Progress | None = None,
) -> RelocateResult:
    """Write `source` to `dest` with its tensors on other devices.

    Args:
        target: a device for everything (``"cpu"``), or pairs from -> to, applied at once (``{"cuda:1": "cuda:0"}``).

    The other arguments are those of `strip_module`.
    """

    def make(checkpoint: Checkpoint, dest: str) -> Draft[RelocateResult]:
        moves = relocate(checkpoint, target)
        plan = plan_edits(checkpoint, moves.edits, dest)
        if moves.moved:
            rows = ", ".join(f"{old} -> {new} in {plural(count, 'place')}" for (old, new), count in moves.moved.items())
            kept = ", ".join(f"{count} on {location}" for location, count in moves.kept.items())
            line = f"moved {rows}" + (f"; left {kept}" if kept else "")
        else:
            here = ", ".join(checkpoint.devices) or "no device"
            already = " already" if isinstance(target, str) else ""
            line = f"nothing to do: the tensors are on {here}{already}"
        lines = (line + copy_note(not moves.moved),)
        return Draft(
            result=partial(RelocateResult, moved=moves.moved, kept=moves.kept),
            format=checkpoint.format,
            plan=plan,
            promise=Promise(names_stay=False, edited=checkpoint),
            lines=lines,
            findings=moves.findings,
        )

    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, in_place=in_place, link=link, progress=progress)
    return carry_out(source, dest, make, how)


@checks_types
def to_cpu(
    source: StrPath,
    dest: StrPath | None = None,
    *,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    in_place: bool = False,
    link: bool = False,
    progress: Progress | None = None,
) -> RelocateResult:
    """Write `source` to `dest` with every tensor on the CPU: `map_location` to ``"cpu"``."""
    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, in_place=in_place, link=link, progress=progress)
    return map_location(source, dest, "cpu", **how.keywords())
