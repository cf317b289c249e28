"""``ckptfix.cast``: the same numbers in another dtype, bit for bit as torch gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from ckptfix.arguments import typed
from ckptfix.checkpoint import Checkpoint
from ckptfix.errors import Refused, StrPath
from ckptfix.io.read import Progress
from ckptfix.ops.cast import plan
from ckptfix.ops.choose import refuse_damaged
from ckptfix.ops.law.promise import everything
from ckptfix.ops.writing import Draft, How, Result, carry_out, copy_note, plan_edits
from ckptfix.words import plural, some

OnOverflow = Literal["count", "error"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CastResult(Result):
    """What was cast.

    Attributes:
        to: the dtype.
        cast: address of a tensor -> the dtype that it had.
        kept: address of a tensor that stays although it holds numbers -> why.
        rounded: address of a tensor -> how many elements left the range of the dtype; empty after a dry run. Of tensors
            that share their bytes, the first one.
    """

    to: str = ""
    cast: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    rounded: Mapping[str, plan.Tally] = field(default_factory=dict)

    def _details(self) -> dict[str, Any]:
        return {
            "to": self.to,
            "cast": [{"name": name, "dtype": dtype} for name, dtype in self.cast.items()],
            "kept": [{"name": name, "reason": why} for name, why in self.kept.items()],
            "rounded": [
                {"name": name, "overflow": row.overflow, "saturated": row.saturated, "underflow": row.underflow}
                for name, row in self.rounded.items()
            ],
        }


@typed
def cast(
    source: StrPath,
    dest: StrPath,
    to: str,
    *,
    only: Sequence[str] = (),
    keep: Sequence[str] = (),
    at: str | None = None,
    on_overflow: OnOverflow = "count",
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> CastResult:
    """Write `source` to `dest` with its floating-point tensors in another dtype, as ``tensor.to`` gives them.

    Integers, the optimizer, and what a table names (statistics of BatchNorm) stay.

    Args:
        to: such as ``"bfloat16"`` or ``"float8_e4m3fn"``.
        only: globs; only tensors whose names match are cast, integers and those of the table too.
        keep: globs; tensors whose names match stay.
        at: address of the one mapping to cast; all that are a model's by default.
        on_overflow: ``"error"``: a number that leaves the range of the dtype ends it, and nothing is written.
        force, keep_old, dry_run, progress: as in `strip_module`.

    Raises:
        Refused: no such dtype; or codes of a quantized weight, or their scales, are among the tensors.
        WouldLoseData: a number leaves the range, with ``on_overflow="error"``.
        NoSuchTensor, WouldOverwrite, DamagedFile, UnknownFormat, WriteFailed.
    """
    if on_overflow not in ("count", "error"):
        raise Refused(f"on_overflow is 'count' or 'error', not {on_overflow!r}")
    casts: list[plan.Casts] = []

    def make(checkpoint: Checkpoint, dest: str) -> Draft[CastResult]:
        done = plan.cast(checkpoint, to, only=only, keep=keep, at=at, strict=on_overflow == "error")
        refuse_damaged(checkpoint)
        casts.append(done)
        name = plan.dtype_of(to)
        dtypes = dict.fromkeys(done.old.values())
        line = f"cast {plural(len(done.puts), 'tensor')} to {name} (from {', '.join(dtypes)})"
        if not done.puts:
            line = f"nothing to do: no tensor is to become {name}" + copy_note(True)
        lines = [line]
        if done.kept:
            lines.append(f"as they were: {some(list(done.kept))}")
        return Draft(
            result=partial(CastResult, to=name, cast=done.old, kept=done.kept),
            format=checkpoint.format,
            plan=plan_edits(checkpoint, done.edits, dest),
            promise=replace(everything(checkpoint), puts=done.puts),
            lines=lines,
            findings=done.findings,
        )

    how = How(force=force, keep_old=keep_old, dry_run=dry_run, progress=progress)
    result = carry_out(source, dest, make, how)
    tallies = casts[-1].tallies.of()
    if not tallies:
        return result
    under = sum(row.underflow for row in tallies.values())
    lines = [f"underflow: {plural(under, 'element')} became zero"] if under else []
    findings = plan.overflow_findings(tallies, result.to)
    return replace(result, rounded=tallies, lines=(*result.lines, *lines), findings=(*result.findings, *findings))
