"""``ckptfix.sanitize``: a checkpoint of plain values, which ``torch.load(weights_only=True)`` accepts."""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from functools import partial
from typing import Any, Literal

from ckptfix.arguments import checks_types
from ckptfix.checkpoint import Checkpoint, Plan, address
from ckptfix.commands import command
from ckptfix.dataclass import dataclass
from ckptfix.errors import Refused, StrPath, Unsupported
from ckptfix.findings.row import Finding
from ckptfix.findings.steps import Step
from ckptfix.findings.table import found
from ckptfix.formats import format_of
from ckptfix.formats.base import TORCH_SUFFIXES, ByFile, Format, file_by_file
from ckptfix.formats.loading import on_load
from ckptfix.formats.loading.hidden_globals import TEXT, look
from ckptfix.formats.plain.form import KeptMapping, PlainForm
from ckptfix.formats.plain.objects import EXTRACT, WHOLE_MODULE
from ckptfix.formats.plain.report import ConversionReport, LostValue
from ckptfix.formats.torch import versions
from ckptfix.formats.torch import zip as torch_zip
from ckptfix.formats.torch.common import all_findings, maybe_pickled_object, pickled_object
from ckptfix.formats.torch.weights_only import accepted
from ckptfix.io.read import Progress
from ckptfix.ops import choose, tensor_classes
from ckptfix.ops.any_source import takes_any_source
from ckptfix.ops.audit.promise import everything
from ckptfix.ops.candidates import candidates, whole_module
from ckptfix.ops.choose import refuse_damaged
from ckptfix.ops.writing import LOSSES, Draft, Result, WriteOptions, carry_out, copy_of
from ckptfix.urls import as_path
from ckptfix.words import plural, several, some

INSPECT = "run `ckptfix inspect` to list its content"
KEEP = ("weights",)


@dataclass(frozen=True, slots=True)
class Sanitized:
    """The plan of sanitizing.

    Attributes:
        plan: files to write.
        format: format of the output.
        changes: (top-level address, old kind, new kind) -> how often.
        losses: values that are left out.
        identical: whether there was nothing to do, so that the output is a copy.
        reason: why weights_only=True refuses the file; None if no reason was found.
        unloadable: tensors and calls of the output on which torch.load fails in any case.
    """

    plan: Plan
    format: str
    changes: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    losses: tuple[LostValue, ...] = ()
    identical: bool = False
    reason: str | None = None
    unloadable: tuple[Finding, ...] = ()


def plan_sanitized(
    checkpoint: Checkpoint,
    dest: str,
    *,
    keep_only: str | None = None,
    encoding: str | None = None,
    torch: str | None = None,
    parts_too: bool = False,
) -> Sanitized:
    """Plan `dest` as `checkpoint` with plain values in place of foreign objects.

    Args:
        keep_only: ``"weights"`` keeps only the state dicts, at their addresses.
        encoding: codec of the byte strings of a Python 2 file.
        torch: a version from ``"1.5"`` on, whose rebuild calls and container are used.
        parts_too: write tensors of a library that registers its classes with torch as dicts of their parts.

    Raises:
        Refused: nothing of the object would be left, or the file lacks what `keep_only` names. Or a tensor would become
            its parts, without `parts_too`.
        Unsupported: not a torch file, a folder that is not converted to one, an unknown version or codec, or a tensor
            that the version does not support.
        KeyConflict: two keys would become one.
    """
    if maybe_pickled_object(checkpoint) is None and torch is None and keep_only is None:
        refuse_damaged(checkpoint)
        return Sanitized(copy_of(checkpoint, dest), checkpoint.format, identical=True)
    if maybe_pickled_object(checkpoint) is None:
        message = f"a {checkpoint.format} file holds only tensors and text; there is nothing to sanitize"
        raise Unsupported(message, path=checkpoint.path)
    if keep_only is not None and keep_only not in KEEP:
        raise Unsupported(f"cannot keep only {keep_only!r}", hint=f"use --keep-only {' or '.join(KEEP)}")
    if encoding is not None:
        _refuse_codec(encoding)
    by_file = format_of(checkpoint).edits_each_file
    if by_file is not None:
        refuse_damaged(checkpoint)
        options = partial(plan_sanitized, keep_only=keep_only, encoding=encoding, torch=torch, parts_too=parts_too)
        return _sanitize_files(checkpoint, by_file, options, dest)
    own = format_of(checkpoint)
    if own.folder and as_path(dest).suffix not in TORCH_SUFFIXES:
        hint = f"name a single torch file as the output: `{command('sanitize', checkpoint.path, 'OUT.pth')}`"
        raise Unsupported(f"sanitize does not write {own.title}", path=checkpoint.path, hint=hint)
    target = None if torch is None else versions.find(torch)
    if target is not None and not target.reads_zip and checkpoint.byteorder == "big":
        raise Unsupported("a legacy file cannot be written with big-endian data", path=checkpoint.path)
    refuse_damaged(checkpoint, listed=False)
    torch_zip.refuse_disputed(checkpoint)
    keep = _weights(checkpoint) if keep_only == "weights" else None
    form = PlainForm(checkpoint, keep=keep, encoding=encoding, target=target)
    report = form.report
    if form.empty:
        raise _nothing_left(checkpoint, form)
    if not parts_too:
        _refuse_parts(checkpoint, report)
    moved = own.folder or not own.edits or (form.legacy and torch_zip.archive_of(checkpoint) is not None)
    if not moved:
        _hidden_beside(checkpoint, report)
    if not report.changes and not report.losses and form.refusal is None and not moved:
        unloadable = _unloadable(checkpoint, report, form.failing())
        return Sanitized(copy_of(checkpoint, dest), checkpoint.format, identical=True, unloadable=unloadable)
    made = form.written()
    unloadable = _unloadable(checkpoint, report, made.failing)
    if form.refused_protocol is not None:
        report.changes["", f"pickle of protocol {form.refused_protocol}", "protocol 2"] += 1
    if moved:
        container = own.title if own.folder else "zip container" if own.edits else f"{own.title} file"
        report.changes["", container, f"{'legacy' if form.legacy else 'zip'} container"] += 1
    plan, changes = made.plan(dest), dict(report.changes)
    return Sanitized(plan, made.format, changes, tuple(report.losses), reason=form.refusal, unloadable=unloadable)


def _sanitize_files(
    checkpoint: Checkpoint,
    by_file: ByFile,
    sanitized: Callable[[Checkpoint, str], Sanitized],
    dest: str,
) -> Sanitized:
    """Process each file of a folder separately."""
    plan, done = file_by_file(by_file, checkpoint, sanitized, dest)
    changes: Counter[tuple[str, str, str]] = Counter()
    for made in done:
        changes.update(made.changes)
    return Sanitized(
        plan,
        checkpoint.format,
        dict(changes),
        tuple(loss for made in done for loss in made.losses),
        all(made.identical for made in done),
        next((made.reason for made in done if made.reason is not None), None),
        tuple(finding for made in done for finding in made.unloadable),
    )


AROUND = ("trailing-bytes", "hidden-bytes", "junk-before")
"""Findings about bytes that belong to no part of the file."""


def _hidden_beside(checkpoint: Checkpoint, report: ConversionReport) -> None:
    """Report content beside the object: the file is then rewritten from the object alone."""
    parts = pickled_object(checkpoint)
    archive = torch_zip.archive_of(checkpoint)
    data = [f"{archive.root}/data/{key}" for key in parts.storage_keys()] if archive is not None else []
    object_at = archive.pickle.name if archive is not None else ""
    known = set(parts.global_names())
    looked = look(checkpoint.path, data=data)
    # The globals of the object itself are known, and bytes that are one of its values are not beside it.
    beside = [row for row in looked.hidden if TEXT not in row.place]
    rows = [row for row in beside if row.place != object_at or row.name not in known]
    for place, name in dict.fromkeys((row.place, row.name) for row in rows):
        report.losses.append(LostValue(place, name, "it is in a pickle that is not part of the checkpoint"))
    behind = archive is not None and on_load.after_stop(parts) is not None
    if not rows and (behind or looked.cut or any(row.id in AROUND for row in all_findings(checkpoint))):
        report.changes["", "bytes that belong to no part of the file", "nothing"] += 1


UNLOADABLE = ("bad-tensor", "bad-call", "memory-bomb")
"""Findings about tensors on which torch.load fails or runs out of memory."""


def _unloadable(
    checkpoint: Checkpoint, report: ConversionReport, failing: Iterable[Finding]
) -> tuple[Finding, ...]:
    """Return a finding for each tensor, and for each of the `failing` calls, on which torch.load fails."""
    left_out = {loss.where for loss in report.losses}

    def is_left_out(where: str) -> bool:
        parts = where.split("/")
        return any("/".join(parts[:count]) in left_out for count in range(1, len(parts) + 1))

    known = [finding for finding in all_findings(checkpoint) if finding.id in UNLOADABLE]
    tensors = [finding for finding in known if not is_left_out(finding.where)]
    return tuple(
        found("unloadable", finding.message, where=finding.where)
        for finding in [*tensors, *failing]
    )


def _weights(checkpoint: Checkpoint) -> list[KeptMapping]:
    """Return the state dicts with weights; only the model's values if the trainer keeps other data in the same dict."""
    found = choose.states(checkpoint)
    if not found and (modules := candidates(checkpoint)):
        raise whole_module(checkpoint, modules[0].at)
    if not found:
        raise Refused("no state dict was found in it", path=checkpoint.path, hint=INSPECT)
    return [KeptMapping(state.at, _own_keys(checkpoint, state.at)) for state in found]


def _own_keys(checkpoint: Checkpoint, at: str) -> tuple[str, ...] | None:
    site = checkpoint.names_at(at)
    own = None if site is None else choose.own_keys(checkpoint, site)
    return None if site is None or own is None or len(own) == len(site.names) else tuple(own)


def _refuse_parts(checkpoint: Checkpoint, report: ConversionReport) -> None:
    """Refuse to write codes, scales and offsets in place of the tensors that a library builds from them."""
    rows = [(at, what) for at, what, _ in report.changes]
    rows += [(loss.where, loss.what) for loss in report.losses if not loss.asked]
    for at, what in rows:
        library = tensor_classes.library_of(what)
        if library is not None:
            message = f"{what} is a tensor class of {library.name}; plain values would hold only its parts"
            hint = f"run `{library.statement}` before torch.load(..., weights_only=True), which then accepts the file; "
            hint += "--parts writes dicts of the parts"
            raise Refused(message, path=checkpoint.path, where=at or None, hint=hint)


def _nothing_left(checkpoint: Checkpoint, form: PlainForm) -> Refused:
    losses = form.report.losses
    why = losses[-1].why if losses else "it is not a plain value"
    hint = command("extract", checkpoint.path, "OUT") if why == EXTRACT else INSPECT
    what = f"it is {WHOLE_MODULE}" if why == EXTRACT else why
    message = f"nothing would be left of {form.was or 'the object'}: {what}"
    error = Refused(message, path=checkpoint.path, hint=hint)
    return error.because_of_module() if why == EXTRACT else error


def _refuse_codec(encoding: str) -> None:
    try:
        codecs.lookup(encoding)
    except (LookupError, ValueError):
        raise Unsupported(f"there is no text encoding {encoding!r}", hint="try utf-8, latin-1 or cp1251") from None


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


def _takes(format: Format, target: Format) -> bool:
    """Return whether sanitizing itself makes a `target` of `format`: of any object a torch file."""
    return format is target or ("objects" in format.states and "objects" in target.states)


@checks_types
@takes_any_source(takes=_takes, first=True)
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
        done = plan_sanitized(checkpoint, dest, keep_only=keep_only, encoding=encoding, torch=torch, parts_too=parts)
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


def _sanitized_lines(done: Sanitized) -> tuple[str, ...]:
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
