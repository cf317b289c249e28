"""``ckptfix.sanitize``: a checkpoint of plain values, which ``torch.load(weights_only=True)`` accepts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from ckptfix.arguments import checks_types
from ckptfix.checkpoint import Checkpoint, address
from ckptfix.errors import StrPath
from ckptfix.findings.row import Finding
from ckptfix.findings.steps import Step
from ckptfix.findings.table import found
from ckptfix.formats.torch.weights_only import accepted
from ckptfix.io.read import Progress
from ckptfix.ops.audit.promise import everything
from ckptfix.ops.sanitize import plan
from ckptfix.ops.sanitize.objects import EXTRACT
from ckptfix.ops.sanitize.report import LostValue
from ckptfix.ops.writing import LOSSES, Draft, Result, WriteOptions, carry_out
from ckptfix.words import plural, several, some


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SanitizeResult(Result):
    """The result of sanitizing.

    Attributes:
        changes: (top-level address, old kind, new kind) -> how often.
        dropped: every value that was left out; those with `asked` were left out on request.
    """

    changes: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    dropped: tuple[LostValue, ...] = ()

    def _details(self) -> dict[str, Any]:
        rows = [
            {"at": at, "old": what, "new": became, "count": count}
            for (at, what, became), count in self.changes.items()
        ]
        dropped = [
            {"at": loss.where, "what": loss.what, "reason": loss.why, "asked": loss.asked} for loss in self.dropped
        ]
        return {"changes": rows, "dropped": dropped}


@checks_types
def sanitize(
    source: StrPath,
    dest: StrPath,
    *,
    keep_only: Literal["weights"] | None = None,
    encoding: str | None = None,
    torch: str | None = None,
    parts: bool = False,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> SanitizeResult:
    """Write `source` to `dest` so that ``torch.load(weights_only=True)`` accepts it.

    Args:
        keep_only: ``"weights"`` keeps the state dicts, at their addresses, and nothing else.
        encoding: codec of a Python 2 file's byte strings; by default UTF-8, and Latin-1 for keys that are not UTF-8.
        torch: a version of torch, such as ``"1.5"``, that must be able to read the file.
        parts: write tensors of torchao, tensordict and torch.nested as dicts of their parts; they are refused by
            default, because torch.load accepts them once their library is imported.
        force, keep_old, dry_run, progress: as in `strip_module`.

    Returns:
        A result whose `exit_code` is 3 if something was left out without a request.

    Raises:
        Refused: nothing would be left, as for a whole pickled module; or, without `parts`, a tensor would become parts.
        Unsupported, KeyConflict, WouldOverwrite, DamagedFile, UnknownFormat, WriteFailed.
    """

    def make(checkpoint: Checkpoint, dest: str) -> Draft[SanitizeResult]:
        done = plan.sanitize(checkpoint, dest, keep_only=keep_only, encoding=encoding, torch=torch, parts_too=parts)
        unasked = [loss for loss in done.losses if not loss.asked]
        findings = (*(_finding(loss, checkpoint.path) for loss in unasked), *done.unloadable)
        return Draft(
            result=partial(SanitizeResult, changes=done.changes, dropped=done.losses),
            format=done.format,
            plan=done.plan,
            promise=everything(checkpoint, [loss.where for loss in done.losses]),
            lines=_sanitized_lines(done),
            findings=findings,
            exit_code=LOSSES if findings else 0,
            allows=accepted,
        )

    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, progress=progress)
    return carry_out(source, dest, make, how, converts=True)


def _finding(loss: LostValue, path: str) -> Finding:
    fix = (Step("extract", source=path, dest="OUT"),) if loss.why == EXTRACT else None
    return found("dropped", f"left out {loss.what}: {loss.why}", where=loss.where, fix=fix)


def _sanitized_lines(done: plan.Sanitized) -> tuple[str, ...]:
    count = len(done.unloadable)
    broken = [f"CANNOT BE LOADED: {plural(count, 'value')}, listed below"] if count else []
    if done.identical and broken:
        return ("weights_only=True accepts all names; the output is an identical copy", *broken)
    if done.identical:
        line = "nothing to do: weights_only=True accepts the whole file; the output is an identical copy"
        return (line,)
    rows: dict[str, list[str]] = {}
    for (at, what, became), count in done.changes.items():
        rows.setdefault(at, []).append(f"{several(count, what) if count > 1 else what} -> {became}")
    lines = [f"{address.shown(at)}: {', '.join(parts)}" for at, parts in rows.items()]
    unasked = sum(not loss.asked for loss in done.losses)
    asked = [loss.where for loss in done.losses if loss.asked]
    if asked:
        lines.append(f"left out as requested: {some(asked)}")
    if unasked:
        lines.append(f"LEFT OUT: {plural(unasked, 'value')}, each listed below")
    return (*(lines or ["rewritten; no value changed"]), *broken)
