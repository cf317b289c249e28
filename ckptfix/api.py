"""The verbs: what ``ckptfix.X`` and the commands call. Each opens, plans, writes, and says what it did."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ckptfix import formats
from ckptfix.checkpoint import Checkpoint, Edit, Plan
from ckptfix.collector import without_collections
from ckptfix.errors import Refused, StrPath
from ckptfix.fileio import Progress
from ckptfix.formats import open_checkpoint, torch_legacy
from ckptfix.ops import convert as convert_op
from ckptfix.ops import relocate as relocate_op
from ckptfix.ops import rename as rename_op
from ckptfix.ops.convert import refuse_other_suffix
from ckptfix.ops.inspect import Inspection
from ckptfix.ops.inspect import inspect as inspect_op
from ckptfix.ops.law_promise import Promise
from ckptfix.ops.writing import LOSSES, Draft, about, carry_out, open_input
from ckptfix.results import ConvertResult, RelocateResult, RenameResult
from ckptfix.words import plural, some

if TYPE_CHECKING:
    from ckptfix.ops.diff import DiffResult




@without_collections
def strip_module(
    source: StrPath,
    dest: StrPath,
    *,
    prefix: str = "module",
    at: str | None = None,
    all_levels: bool = False,
    partial: bool = False,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RenameResult:
    """Write `source` to `dest` with `prefix` removed from its names.

    Args:
        prefix: path components at the front of a name, ``"module"`` for what DataParallel adds.
        at: address of the one mapping to change; all by default.
        all_levels: remove it as often as all names have it.
        partial: remove it where only some names of a mapping have it.
        force: replace an existing `dest`.
        keep_old: a checkpoint that `force` replaces is kept beside it, as ``DEST.~1~``; see `Result.backup`.
        dry_run: plan, and write nothing.
        progress: called with bytes done and bytes in all.

    Raises:
        PartialPrefix, KeyConflict, WouldOverwrite, DamagedFile, UnknownFormat, WriteFailed.
    """
    checkpoint = open_input(source, dest, force)
    renames = rename_op.strip(checkpoint, prefix=prefix, at=at, all_levels=all_levels, partial=partial)
    near = None if renames.edits else rename_op.nearest_prefix(checkpoint, prefix, at)
    nothing = f"no key begins with '{prefix.strip('.')}.'" + (f" (nearest is '{near}.')" if near else "")
    return _renamed(checkpoint, renames, dest, "stripped", nothing, force, keep_old, dry_run, progress)


@without_collections
def add_module(
    source: StrPath,
    dest: StrPath,
    *,
    prefix: str = "module",
    at: str | None = None,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RenameResult:
    """Write `source` to `dest` with `prefix` before the names of the model's state dicts. As `strip_module`."""
    checkpoint = open_input(source, dest, force)
    renames = rename_op.add(checkpoint, prefix=prefix, at=at)
    nothing = "no state dict was found"
    return _renamed(checkpoint, renames, dest, "prefixed", nothing, force, keep_old, dry_run, progress)


@without_collections
def unwrap(
    source: StrPath,
    dest: StrPath,
    *,
    at: str | None = None,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RenameResult:
    """Write `source` to `dest` without any known wrapper's name in its keys. As `strip_module`."""
    checkpoint = open_input(source, dest, force)
    renames = rename_op.unwrap(checkpoint, at=at)
    nothing = "no wrapper's name was found"
    return _renamed(checkpoint, renames, dest, "unwrapped", nothing, force, keep_old, dry_run, progress)


@without_collections
def rename(
    source: StrPath,
    dest: StrPath,
    *,
    subs: Sequence[tuple[str, str]] = (),
    mapping: Mapping[str, str] | None = None,
    at: str | None = None,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RenameResult:
    """Write `source` to `dest` with its names changed by regular expressions and by an exact map.

    Args:
        subs: (pattern, replacement) of `re.sub`, applied in order.
        mapping: old name -> new name, applied after them.

    The rest as `strip_module`. A rule that matched nothing is a finding.
    """
    checkpoint = open_input(source, dest, force)
    renames = rename_op.rename(checkpoint, subs=subs, mapping=mapping, at=at)
    return _renamed(checkpoint, renames, dest, "renamed", "no rule matched a key", force, keep_old, dry_run, progress)


@without_collections
def map_location(
    source: StrPath,
    dest: StrPath,
    target: str | Mapping[str, str],
    *,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RelocateResult:
    """Write `source` to `dest` with other devices in it.

    Args:
        target: a device for everything (``"cpu"``), or from -> to, all at once (``{"cuda:1": "cuda:0"}``).

    The rest as `strip_module`.
    """
    checkpoint = open_input(source, dest, force)
    moves = relocate_op.relocate(checkpoint, target)
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
    draft = Draft.of(checkpoint, dest, plan, Promise(names_stay=False, edited=checkpoint), lines, moves.findings)
    done = carry_out(draft, force=force, keep_old=keep_old, dry_run=dry_run, progress=progress)
    return RelocateResult(**done, moved=moves.moved, kept=moves.kept)


def to_cpu(
    source: StrPath,
    dest: StrPath,
    *,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RelocateResult:
    """Write `source` to `dest` with every tensor on the CPU: `map_location` to ``"cpu"``."""
    return map_location(source, dest, "cpu", force=force, keep_old=keep_old, dry_run=dry_run, progress=progress)


@without_collections
def convert(
    source: StrPath,
    dest: StrPath,
    *,
    to: str | None = None,
    at: str | None = None,
    drop_unsupported: bool = False,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ConvertResult:
    """Write `source` to `dest` in another format.

    Args:
        to: ``"zip"``, ``"legacy"`` or ``"safetensors"``; by the suffix of `dest` by default.
        at: address of the state dict to take, when there are several.
        drop_unsupported: leave out tensors that the format cannot hold; they are listed, and `exit_code` is 3.

    The rest as `strip_module`.
    """
    checkpoint = open_input(source, dest, force)
    done = convert_op.convert(checkpoint, os.fspath(dest), to=to, at=at, drop_unsupported=drop_unsupported)
    line = f"{plural(done.tensors, 'tensor')} from {checkpoint.format} to {done.format}"
    if done.format == checkpoint.format:
        line = f"nothing to do: it is {done.format} already{copy_note(True)}"
    if done.at:
        line += f" from {done.at}"
    if done.ties:
        line += f"; {plural(done.ties, 'name')} tied to another"
    lines = [line]
    if done.lost:
        lines.append(f"LOST, as {done.format} cannot hold them: {some(done.lost)}")
    behind = [address for address in done.left if address not in done.lost]
    if behind:
        lines.append(f"left behind: {some(behind)}")
    code = LOSSES if done.lost else 0
    findings = done.plan.findings
    draft = Draft.of(checkpoint, dest, done.plan, done.promise, lines, findings, format=done.format, exit_code=code)
    return ConvertResult(
        **carry_out(draft, force=force, keep_old=keep_old, dry_run=dry_run, progress=progress),
        at=done.at,
        tensors=done.tensors,
        left=done.left,
        lost=done.lost,
    )


@without_collections
def diff(
    a: StrPath,
    b: StrPath,
    *,
    keys_only: bool = False,
    rtol: float = 0.0,
    atol: float = 0.0,
    filter: str | None = None,
    strip: Sequence[str] | str = (),
    quick: bool = False,
    at: str | tuple[str, str] | None = None,
    progress: Progress | None = None,
) -> DiffResult:
    """Compare two checkpoints of any formats; see `DiffResult`.

    Args:
        keys_only: names, shapes and dtypes; no tensor byte is read.
        rtol, atol: values that differ by at most ``atol + rtol * abs(b)`` count as the same.
        filter: a glob; only tensors whose names match are compared.
        strip: prefixes to remove on both sides before names are matched.
        quick: equal CRC-32 and size count as equal bytes.
        at: address of the state dicts to compare, one for both or one each.
    """
    from ckptfix.ops.diff import diff as diff_op

    for name, tolerance in (("rtol", rtol), ("atol", atol)):
        if not 0 <= tolerance < math.inf:
            raise Refused(f"{name} is {tolerance}, and must be a number from 0 on")
    return diff_op(
        open_checkpoint(a),
        open_checkpoint(b),
        keys_only=keys_only,
        rtol=rtol,
        atol=atol,
        filter=filter,
        strip=(strip,) if isinstance(strip, str) else strip,
        quick=quick,
        at=at,
        progress=progress,
    )


@without_collections
def inspect(path: StrPath) -> Inspection:
    """Describe the checkpoint at `path` from its headers."""
    return inspect_op(open_checkpoint(path))


def plan_edits(checkpoint: Checkpoint, edits: Sequence[Edit], dest: StrPath) -> Plan:
    refuse_other_suffix(checkpoint.path, os.fspath(dest), checkpoint.format)
    if edits:
        # A new header over the data that is left would be an equally broken file, made silently.
        torch_legacy.refuse_truncated(checkpoint)
    with about(checkpoint.path):
        return formats.FORMATS[checkpoint.format].plan_edit(checkpoint, edits, os.fspath(dest))


def _renamed(
    checkpoint: Checkpoint,
    renames: rename_op.Renames,
    dest: StrPath,
    verb: str,
    nothing: str,
    force: bool,
    keep_old: bool,
    dry_run: bool,
    progress: Progress | None,
) -> RenameResult:
    plan = plan_edits(checkpoint, renames.edits, dest)
    if renames.changes:
        first = renames.changes[0]
        places = len({change.at for change in renames.changes})
        line = f"{verb} {plural(len(renames.changes), 'key')}, as in {first.old} -> {first.new}"
        if places > 1 or first.at:
            line += f" ({some(list(dict.fromkeys(change.at or 'top level' for change in renames.changes)))})"
        if renames.references:
            line += f" (and {plural(renames.references, 'related name')})"
    elif renames.references:
        line = f"{verb} {plural(renames.references, 'name')} of an optimizer"
    else:
        line = f"nothing to do: {nothing}"
    lines = [line + copy_note(not renames.edits)]
    notes = [f"{found.where}: {found.message}" for found in renames.findings if found.severity == "info"]
    if notes:
        lines.append("; ".join(notes[:5]).removeprefix(": "))
    draft = Draft.of(checkpoint, dest, plan, Promise(names_stay=False, edited=checkpoint), lines, renames.findings)
    return RenameResult(
        **carry_out(draft, force=force, keep_old=keep_old, dry_run=dry_run, progress=progress),
        changes=renames.changes,
        references=renames.references,
    )


def copy_note(unchanged: bool) -> str:
    return "; the output is an identical copy" if unchanged else ""
