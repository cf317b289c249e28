"""``ckptfix.average``: one set of weights from several, as in stochastic weight averaging and model soups."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ckptfix import formats
from ckptfix.arguments import checks_types
from ckptfix.checkpoint import Checkpoint
from ckptfix.elements.nonfinite import NonFinite
from ckptfix.errors import Refused, StrPath, about, file_name
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.members import role_of
from ckptfix.io.read import Progress
from ckptfix.io.source import found_as, shares_open_files
from ckptfix.ops.audit.promise import everything
from ckptfix.ops.average import plan
from ckptfix.ops.writing import Draft, Result, WriteOptions, carry_out, is_folder, plan_edits, refuse_destination
from ckptfix.urls import as_path, scan_folder
from ckptfix.words import plural, some


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AverageResult(Result):
    """The result of an averaging.

    Attributes:
        inputs: each file, and its weight in the mean; the weights add up to 1.
        averaged: addresses of the averaged tensors.
        taken: addresses of the tensors copied from the last file, such as integers and optimizer state.
    """

    inputs: tuple[tuple[str, float], ...] = ()
    averaged: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()

    def _details(self) -> dict[str, Any]:
        return {
            "inputs": [{"path": path, "weight": weight} for path, weight in self.inputs],
            "averaged": list(self.averaged),
            "taken": list(self.taken),
        }


@checks_types
@shares_open_files()
def average(
    sources: Sequence[StrPath],
    dest: StrPath,
    *,
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    last: int | None = None,
    at: str | None = None,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> AverageResult:
    """Write the last of `sources` to `dest`, with the mean of all inputs in place of its floating-point tensors.

    Sums are in float64 and are rounded once, to the dtype of each tensor. Integers, the optimizer and everything else
    are copied from the last file.

    Args:
        sources: checkpoints of the same model, in any format; with `last`, a folder of them.
        weights: weight of each file in the mean, 1 by default.
        ema: a decay between 0 and 1, for the exponential moving average of the files in their order.
        last: number of checkpoints to use from a folder, counted from the end by the numbers in their names.
        at: address of the state dict in each file; the only one that looks like a model's by default.
        force, keep_old, dry_run, progress: as in `strip_module`.

    Raises:
        Refused: keys, shapes or dtypes differ, and the message lists all such keys; or there are fewer than two files.
        CkptfixError: a file cannot be read, or `dest` cannot be written.
    """
    paths = [file_name(source) for source in sources]
    if last is not None:
        if len(paths) != 1:
            raise Refused("last needs exactly one folder")
        paths = last_of(paths[0], last)
    if len(paths) < 2:
        hint = "--last N averages those in a folder" if len(paths) == 1 and found_as(paths[0]) == "folder" else None
        raise Refused("average needs at least two inputs", hint=hint)
    shares = _shares(len(paths), weights, ema)
    plans: list[plan.Averaging] = []

    def make(checkpoint: Checkpoint, dest: str) -> Draft[AverageResult]:
        others: list[Checkpoint] = []
        for path in paths[:-1]:
            with about(path):
                others.append(formats.open_checkpoint(path))
        done = plan.average([*others, checkpoint], shares, at=at)
        plans.append(done)
        total = sum(shares)
        lines = [f"averaged {plural(len(done.puts), 'tensor')} of {plural(len(paths), 'file')}, in float64"]
        if done.taken:
            lines.append(f"not averaged, copied from {checkpoint.path}: {some(done.taken)}")
        if done.moments:
            lines.append(f"not averaged, optimizer state copied from {checkpoint.path}: {some(done.moments)}")
        findings = [found("batchnorm", where=checkpoint.path)] if done.norms else []
        made = plan_edits(checkpoint, done.edits, dest)
        return Draft(
            result=partial(
                AverageResult,
                inputs=tuple((path, share / total) for path, share in zip(paths, shares, strict=True)),
                averaged=tuple(done.puts),
                taken=(*done.taken, *done.moments),
            ),
            format=checkpoint.format,
            plan=replace(made, checks=(*made.checks, *done.checks), holds=(made.holds, others)),
            promise=replace(everything(checkpoint), puts=done.puts),
            lines=lines,
            findings=findings,
            read=tuple(mark for other in others for mark in other.files),
        )

    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, progress=progress)
    refuse_destination(dest, paths[:-1], how, folder=is_folder(paths[-1]))
    result = carry_out(paths[-1], dest, make, how)
    counts = [plans[-1].oddities.of(number) for number in range(len(paths))]
    findings = [row for path, odd in zip(paths, counts, strict=True) for row in _not_finite(path, odd, counts)]
    return replace(result, findings=(*result.findings, *findings)) if findings else result


Oddities = Mapping[str, NonFinite]


def _not_finite(path: str, odd: Oddities, everyone: Sequence[Oddities]) -> Iterator[Finding]:
    """Yield a finding for the NaN values of an input, and one for its infinities: the mean inherits them."""
    nan = {name: row.nan for name, row in odd.items() if row.nan}
    infinite = {name: row.infinite for name, row in odd.items() if row.infinite}
    # A mask has the same number of infinities in every input; a weight has not.
    is_mask = all(name in row and row[name].infinite == count for name, count in infinite.items() for row in everyone)
    if nan:
        yield found("nan-values", _counted("NaN value", nan), where=path)
    if infinite:
        message = _counted("infinite value", infinite)
        yield found("infinite-values", message, where=path, severity=None if is_mask else "warning")


def _counted(what: str, counts: Mapping[str, int]) -> str:
    names = some([f"{name} ({count:,})" for name, count in counts.items()], 5)
    total, tensors = plural(sum(counts.values()), what), plural(len(counts), "tensor")
    return f"{total} in {tensors}, which the mean inherits: {names}"


def _shares(count: int, weights: Sequence[float] | None, ema: float | None) -> list[float]:
    """Return the weights of `count` files.

    Raises:
        Refused: the number of weights is not `count`, or they do not define a mean.
    """
    if weights is not None and ema is not None:
        raise Refused("weights and ema both set how much each file counts: pass only one of them")
    if ema is not None:
        if not 0 <= ema < 1:
            raise Refused(f"the decay must be at least 0 and below 1, not {ema}")
        return [ema ** (count - 1), *((1 - ema) * ema ** (count - 1 - index) for index in range(1, count))]
    shares = [float(weight) for weight in weights] if weights is not None else [1.0] * count
    if len(shares) != count:
        raise Refused(f"{plural(len(shares), 'weight')} for {plural(count, 'file')}")
    if not all(map(math.isfinite, shares)) or sum(shares) == 0 or not math.isfinite(sum(shares)):
        raise Refused("the weights must be finite numbers whose sum is not zero")
    return shares


def last_of(folder: str, count: int) -> list[str]:
    """Return the last `count` checkpoints of a folder, ordered by the numbers in their names.

    Raises:
        Refused: there are fewer, or their names follow different patterns.
    """
    if found_as(folder) != "folder":
        raise Refused("last needs a folder of checkpoints", path=folder)
    series: dict[str, list[tuple[tuple[int, ...], str]]] = {}
    for entry in scan_folder(folder):
        numbers = re.findall(r"\d+", entry.name)
        if not numbers or entry.name.startswith(".") or role_of(entry.name) == "beside":
            continue
        if formats.is_folder_checkpoint(entry.path) if entry.is_dir() else formats.is_checkpoint(entry.path):
            row = tuple(map(int, numbers)), entry.path
            series.setdefault(re.sub(r"\d+", "N", entry.name), []).append(row)
    if len(series) > 1:
        several = ", ".join(sorted(series))
        raise Refused(f"the checkpoints belong to several series: {several}", path=folder, hint="list the files")
    rows = sorted(row for steps in series.values() for row in steps)
    if len(rows) < count or count < 1:
        raise Refused(f"only {plural(len(rows), 'checkpoint')} in it with a number in the name", path=folder)
    return [str(as_path(path)) for _, path in rows[-count:]]
