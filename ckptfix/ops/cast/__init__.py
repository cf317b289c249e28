"""``ckptfix.cast``: the same numbers in a different dtype, bit for bit as torch converts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from ckptfix.arguments import checks_types
from ckptfix.checkpoint import Checkpoint
from ckptfix.errors import Refused, StrPath
from ckptfix.io.read import Progress
from ckptfix.ops.audit.promise import everything
from ckptfix.ops.cast import plan
from ckptfix.ops.choose import refuse_damaged
from ckptfix.ops.writing import Draft, Result, WriteOptions, carry_out, copy_note, plan_edits
from ckptfix.words import plural, some

OnOverflow = Literal["count", "error"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CastResult(Result):
    """The result of a cast.

    Attributes:
        to: the new dtype.
        cast: address of a tensor -> its former dtype.
        kept: address of a tensor that holds numbers but was not cast -> the reason.
        rounded: address of a tensor -> how many of its elements left the range of the dtype; empty after a dry run. For
            tensors that share their bytes, only the first one is listed.
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


@checks_types
def cast(
    source: StrPath,
    dest: StrPath,
    to: str,
    *,
    only: Sequence[str] = (),
    keep: Sequence[str] = (),
    at: str | None = None,
    on_overflow: OnOverflow = "count",
    allow_unmatched: bool = False,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> CastResult:
    """Write `source` to `dest` with its floating-point tensors in a different dtype, converted as ``tensor.to`` does.

    Integers, the optimizer and the tensors in a table of exceptions (such as BatchNorm statistics) are not cast.

    Args:
        to: a dtype such as ``"bfloat16"`` or ``"float8_e4m3fn"``.
        only: globs; only tensors whose keys match are cast, including integers and those in the table.
        keep: globs; tensors whose keys match are not cast.
        at: address of the one state dict to cast; all that look like a model's by default.
        on_overflow: ``"error"``: stop at a number that leaves the range of the dtype, and write nothing.
        allow_unmatched: a glob that matches no key is a finding, not an error.
        force, keep_old, dry_run, progress: as in `strip_module`.

    Raises:
        Refused: the dtype does not exist; or the tensors include codes of a quantized weight, or their scales.
        WouldLoseData: a number leaves the range, with ``on_overflow="error"``.
        NoSuchTensor, WouldOverwrite, DamagedFile, UnknownFormat, WriteFailed.
    """
    if on_overflow not in ("count", "error"):
        raise Refused(f"on_overflow must be 'count' or 'error', not {on_overflow!r}")
    casts: list[plan.Casts] = []

    def make(checkpoint: Checkpoint, dest: str) -> Draft[CastResult]:
        strict = on_overflow == "error"
        done = plan.cast(
            checkpoint, to, only=only, keep=keep, at=at, strict=strict, allow_unmatched=allow_unmatched
        )
        refuse_damaged(checkpoint)
        casts.append(done)
        name = plan.dtype_of(to)
        dtypes = dict.fromkeys(done.old.values())
        line = f"cast {plural(len(done.puts), 'tensor')} to {name} (from {', '.join(dtypes)})"
        if not done.puts:
            line = f"nothing to do: no tensor to cast to {name}" + copy_note(True)
        lines = [line]
        if done.kept:
            lines.append(f"unchanged: {some(list(done.kept))}")
        return Draft(
            result=partial(CastResult, to=name, cast=done.old, kept=done.kept),
            format=checkpoint.format,
            plan=plan_edits(checkpoint, done.edits, dest),
            promise=replace(everything(checkpoint), puts=done.puts),
            lines=lines,
            findings=done.findings,
        )

    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, progress=progress)
    result = carry_out(source, dest, make, how)
    tallies = casts[-1].tallies.of()
    if not tallies:
        return result
    under = sum(row.underflow for row in tallies.values())
    lines = [f"underflow: {plural(under, 'element')} became zero"] if under else []
    findings = plan.overflow_findings(tallies, result.to)
    return replace(result, rounded=tallies, lines=(*result.lines, *lines), findings=(*result.findings, *findings))
