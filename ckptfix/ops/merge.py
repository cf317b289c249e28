"""``ckptfix.merge``: several state dicts combined into one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from ckptfix.arguments import checks_types
from ckptfix.dataclass import dataclass
from ckptfix.errors import KeyConflict, Refused, StrPath, Unsupported, about, file_name
from ckptfix.findings.table import found
from ckptfix.formats import located
from ckptfix.formats.target import FormatName, is_folder
from ckptfix.formats.torch.emit import Calls
from ckptfix.formats.torch.weights import Weights, in_little
from ckptfix.io.read import Progress
from ckptfix.ops.adapter import differences
from ckptfix.ops.any_source import opened
from ckptfix.ops.extract import open_weights, plan_extraction
from ckptfix.ops.writing import LOSSES, Draft, Result, WriteOptions, carry_out_file, existing
from ckptfix.words import plural, some

MOST_NAMED = 200
"""Keys listed in the message of a conflict; its `pairs` has all of them."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MergeResult(Result):
    """The result of a merge.

    Attributes:
        inputs: each file, and the number of its tensors in the output.
        left: addresses that the output does not hold; from the second file on, they begin with the file's name.
    """

    inputs: tuple[tuple[str, int], ...] = ()
    left: tuple[str, ...] = ()

    def _details(self) -> dict[str, Any]:
        rows = [{"path": path, "tensors": tensors} for path, tensors in self.inputs]
        return {"inputs": rows, "left_behind": list(self.left)}


@checks_types
def merge(
    sources: Sequence[StrPath],
    dest: StrPath,
    *,
    at: str | None = None,
    to: FormatName | None = None,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> MergeResult:
    """Write the state dicts of all `sources`, which must not share a key, to `dest` as one.

    Args:
        sources: files or folders of any format.
        at: address of the state dict in each of them; the only one by default.
        to: as in `convert`.
        force, keep_old, dry_run, progress: as in `strip_module`.

    Raises:
        KeyConflict: two of them have the same key; the message lists all such keys.
        Refused: a file holds several state dicts, or none; or there are fewer than two files.
        CkptfixError: a file cannot be read, or `dest` cannot be written.
    """
    paths = [file_name(source) for source in sources]
    if len(paths) < 2:
        raise Refused("merge needs at least two inputs", hint="run `ckptfix convert` to copy one file")

    def make(path: str, dest: str) -> Draft[MergeResult]:
        ways = [opened(located(existing(one)), dest, stack) for one in (path, *paths[1:])]
        taken = [_opened(way.path, at) for way in ways]
        names = [one.path if not way.packed else name for name, way, one in zip(paths, ways, taken, strict=True)]
        merged = _merged(taken)
        done = plan_extraction(merged, dest, to=to)
        counts = tuple((name, len(one.entries)) for name, one in zip(names, taken, strict=True))
        lines = [f"merged {plural(len(merged.entries), 'tensor')} from {plural(len(taken), 'input')}, as {done.format}"]
        if merged.left:
            lines.append(f"left behind: {some(merged.left)}")
        missing = any(finding.id == "not-taken" for finding in done.plan.findings)
        return Draft(
            result=partial(MergeResult, inputs=counts, left=merged.left),
            format=done.format,
            plan=replace(done.plan, holds=(done.plan.holds, [way.keeps for way in ways])),
            promise=replace(done.promise(), others=()),
            read=tuple(mark for way, one in zip(ways, taken, strict=True) for mark in way.read or one.files),
            lines=lines,
            findings=(*done.plan.findings, *differences([one.as_checkpoint() for one in taken])),
            exit_code=LOSSES if missing else 0,
        )

    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, progress=progress)
    with ExitStack() as stack:
        return carry_out_file(paths[0], dest, make, how, others=paths[1:], folder=is_folder(to))


def _opened(path: str, at: str | None) -> Weights:
    with about(path):
        weights, _ = open_weights(path, at, ema=False)
    return in_little(weights) if weights.byteorder == "big" else weights


def _merged(taken: Sequence[Weights]) -> Weights:
    """Combine the state dicts in their order.

    Raises:
        KeyConflict: two of them have the same key.
        Unsupported: tensors that are not dense are in several pickles.
    """
    holders: dict[str, list[str]] = {}
    for weights in taken:
        for entry in weights.entries:
            holders.setdefault(entry.key, []).append(weights.path)
    clashes = {name: tuple(paths) for name, paths in holders.items() if len(paths) > 1}
    if clashes:
        shown = ", ".join([*clashes][:MOST_NAMED])
        more = f" and {len(clashes) - MOST_NAMED:,} more" if len(clashes) > MOST_NAMED else ""
        raise KeyConflict(
            f"{plural(len(clashes), 'key')} in two inputs: {shown}{more}",
            path=next(iter(clashes.values()))[1],
            pairs=tuple(clashes.items()),
            hint="leave them out of one input with `ckptfix select --drop`, or rename them with `ckptfix rename`",
        )
    first = taken[0]
    left = [*first.left, *(f"{one.path}: {address}" for one in taken[1:] for address in one.left)]
    rows = [finding for one in taken for finding in one.findings]
    behind = {*left}
    rows += [found("left-behind", "is not in the output", where=where) for where in behind.difference(first.left)]
    return replace(
        first,
        what="the merged state dict",
        at="",
        entries=tuple(replace(entry, at="") for one in taken for entry in one.entries),
        versions={name: row for one in taken for name, row in (one.versions or {}).items()}
        if any(one.versions for one in taken)
        else None,
        calls=_calls(taken),
        left=tuple(left),
        classes=tuple(dict.fromkeys(name for one in taken for name in one.classes)),
        findings=tuple(rows),
        beside=(),
        files=tuple(mark for one in taken for mark in one.files),
    )


def _calls(taken: Sequence[Weights]) -> Calls | None:
    """Return the calls that rebuild tensors that are not dense; only one input's pickle can provide them."""
    holding = [one for one in taken if any(entry.kind != "dense" for entry in one.entries)]
    if len(holding) > 1:
        odd = [entry.key for one in holding for entry in one.entries if entry.kind != "dense"]
        raise Unsupported(f"several inputs have tensors that are not dense: {some(odd)}", path=holding[1].path)
    return holding[0].calls if holding else None
