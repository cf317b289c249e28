"""Examination of a checkpoint that does not load: everything visible in it, judged, with the command that fixes it.

The file is read as text and numbers; nothing in it is imported or run. Nothing is called safe: a diagnosis lists the
parts that were checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptfix.checkpoint import ByteRange, Checkpoint, Storage, address, file_of, with_parts
from ckptfix.checkpoint.address import is_inside
from ckptfix.command_table import STEPS
from ckptfix.errors import (
    CkptfixError,
    DamagedFile,
    DistributedPart,
    NoFile,
    NoSuchFile,
    NoSuchTensor,
    UnknownFormat,
    Unsupported,
    file_name,
)
from ckptfix.findings.contents import RESUMED, RESUMED_ELSEWHERE, RESUMED_IN_PART
from ckptfix.findings.load_errors import LoadError
from ckptfix.findings.remedies import chain
from ckptfix.findings.row import Finding
from ckptfix.findings.steps import Fix, Invocation, Value, step
from ckptfix.findings.table import RANK, Remedy, errors_of, found, place_of, remedy_of
from ckptfix.formats import FORMATS, format_of, located
from ckptfix.formats.loading import hidden_globals as scan_inside
from ckptfix.formats.loading import on_load
from ckptfix.formats.members import members
from ckptfix.formats.torch import module as torch_module
from ckptfix.formats.torch import zip as torch_zip
from ckptfix.formats.torch.common import PickledObject, maybe_pickled_object
from ckptfix.formats.torch.dangerous_globals import is_dangerous
from ckptfix.io.read import Progress
from ckptfix.io.source import found_as, is_local, open_source, stamp
from ckptfix.io.virtual_files import checks_of, crc32_of, is_spliced
from ckptfix.ops import rank_shards
from ckptfix.ops.candidates import state_dict_of
from ckptfix.ops.choose import BROKEN, MISREAD, meant, refuse_damaged
from ckptfix.ops.doctor import adapter as scan_adapter
from ckptfix.ops.doctor import contents as scan_contents
from ckptfix.ops.doctor import data as scan_records
from ckptfix.ops.doctor import foreign as doctor_foreign
from ckptfix.ops.doctor import pickle as doctor_pickle
from ckptfix.ops.doctor import zip as doctor_zip
from ckptfix.ops.doctor.groups import TOLD
from ckptfix.ops.doctor.report import Diagnosis, message_of
from ckptfix.ops.inplace import count_edits
from ckptfix.ops.naming import kept_suffix, stays_folder
from ckptfix.ops.quantized import CONFIG, json_beside
from ckptfix.urls import as_path
from ckptfix.words import plural, some
from ckptfix.zips.append import earlier
from ckptfix.zips.local import record_data
from ckptfix.zips.read import Directory, DirectoryRecord

if TYPE_CHECKING:
    from ckptfix.findings.message_names import Listed
    from ckptfix.ops.target.targets import ExpectedModel

MOST = 200
"""Findings of one id that are kept; a hostile file could cause millions."""


def examine(
    path: str | os.PathLike[str],
    *,
    like: ExpectedModel | None = None,
    error: str | None = None,
    fast: bool = False,
    at: str | None = None,
    like_at: str | None = None,
    checkpoint: Checkpoint | None = None,
    progress: Progress | None = None,
) -> Diagnosis:
    """Examine the file or folder at `path`, and report what keeps it from loading.

    Args:
        like: the model that it is meant for, as `targets.read` returns it.
        error: the error message that the user saw, to tell which findings explain it.
        fast: read no tensor bytes: no checksums, no search for NaN and zeros.
        at: address of the state dict to examine; the others are not reported on.
        like_at: address of the state dict of `like`, if the caller gave one.
        checkpoint: the checkpoint, if it was read already.
        progress: called with the bytes of tensors read, and the bytes in all.

    Raises:
        CkptfixError: there is no such file, or it cannot be read.
    """
    name = file_name(path)
    if not found_as(name):
        raise NoSuchFile(name)
    alone = located(name)
    if alone != name:
        from ckptfix.ops.candidates.other_models import other_models, unexamined_files

        folder = name if stays_folder(name, alone) else ""
        inner = _examined(alone, like, error, fast, at, like_at, None, progress, folder)
        which = f"{as_path(alone).name}, the model among the files of the folder"
        others = [(row, remedy_of(row, alone)) for row in (*other_models(name, alone), *unexamined_files(name, alone))]
        inner = replace(inner, looked_at=(which, *inner.looked_at))
        return _with(inner, others, _members(name, alone), error)
    done = _examined(name, like, error, fast, at, like_at, checkpoint, progress)
    if checkpoint is not None or done.format is None or found_as(name) != "folder":
        return done
    return _with(done, (), _members(name), error)


def _rows(error: str | None) -> tuple[LoadError, ...]:
    """Return the load errors that the pasted message may be. Only with a message are its parsers imported."""
    if error is None:
        return ()
    from ckptfix.ops.doctor import messages

    return messages.rows(error)


def _names(error: str | None) -> Listed | None:
    """Return the keys and shapes that the pasted message names."""
    if error is None:
        return None
    from ckptfix.findings import message_names

    return message_names.listed(error)


def _with(
    done: Diagnosis, more: Sequence[tuple[Finding, Remedy]], beside: Sequence[str], error: str | None
) -> Diagnosis:
    """Add findings and their remedies to `done`, and the damage of the checkpoints `beside` the model."""
    rows = _rows(error)
    place = _places(rows)
    wrong = [row for path in beside for row in _damage(path)]
    both = sorted((*zip(done.findings, done.remedies, strict=True), *more, *wrong), key=lambda row: place(row[0]))
    findings = tuple(_told(finding, remedy) for finding, remedy in both)
    names = [as_path(path).name for path in beside]
    return replace(
        done,
        findings=findings,
        remedies=tuple(remedy for _, remedy in both),
        looked_at=(*done.looked_at, *([f"the structure of {some(names)} beside it"] if names else ())),
        message=message_of(error, rows, findings),
        beside=tuple(_told(finding, remedy) for finding, remedy in wrong),
    )


DAMAGE = BROKEN - {"flat-parameters"} | {
    *("lfs-pointer", "web-page", "json-file", "text-file", "zero-filled", "empty-file", "unknown-format"),
    *("text-mode", "junk-before", "bad-directory", "bad-local-header", "bad-pickle", "bad-storage", "damaged"),
    *("hole", "overlap", "encrypted-record", "dcp-no-metadata", "bad-index", "index-mismatch", "dcp-overlap"),
}
"""Errors of a file beside the model that stop a training from resuming; a need for its classes is not damage."""

_PICKLED = ".pkl"
"""Suffix of accelerate's torch files that are not named like checkpoints."""


def _members(folder: str, taken: str = "") -> list[str]:
    """List the paths of the checkpoints in `folder` that a trainer saved beside the model, which is `taken`."""
    try:
        found = members(folder)
    except OSError:
        return []
    known = [member for member in found if member.role in ("optimizer", "beside")]
    may = [member for member in known if member.may_be_checkpoint or member.name.endswith(_PICKLED)]
    return [path for member in may if (path := str(as_path(folder, member.name))) != taken]


def _damage(path: str) -> Iterator[tuple[Finding, Remedy]]:
    """Yield the structural damage of a file beside the model, with remedies.

    The commands are not part of a chain, because they read a different file.
    """
    name = as_path(path).name
    try:
        done = _examined(path, None, None, True, None, None, None, None)
    except CkptfixError as error:
        yield found("damaged", f"cannot be read: {error.message}", where=name, severity="warning", fix=""), Remedy()
        return
    for finding, remedy in zip(done.findings, done.remedies, strict=True):
        if is_damage(finding):
            where = f"{name}: {finding.where}" if finding.where else name
            advice = f"`{remedy.text}`" if remedy.invocations else remedy.advice
            yield replace(finding, where=where), Remedy(advice=advice or _WITHOUT)


def is_damage(finding: Finding) -> bool:
    """Return whether a finding is structural damage of a file, and not only a need for its classes."""
    return finding.severity == "error" and finding.id in DAMAGE


def damage_of(path: str, *, fast: bool = True) -> tuple[Finding, ...]:
    """Return the structural damage of a file or folder that a trainer saved.

    Args:
        fast: read no tensor bytes; otherwise they are compared with their checksums, and NaN is reported too.

    Raises:
        CkptfixError: it cannot be read.
    """
    rows = _examined(path, None, None, fast, None, None, None, None).findings
    return tuple(row for row in rows if is_damage(row) or row.id == NAN)


NAN = "nan-values"


_WITHOUT = "copy the file again, or resume from an older checkpoint; the model is in a different file"
"""Remedy for a file beside the model that is beyond repair."""


def _examined(
    name: str,
    like: ExpectedModel | None,
    error: str | None,
    fast: bool,
    at: str | None,
    like_at: str | None,
    checkpoint: Checkpoint | None,
    progress: Progress | None,
    folder: str = "",
) -> Diagnosis:
    """Examine one checkpoint by itself, like `examine`.

    Args:
        folder: as in `Diagnosis`.
    """
    rows, names = _rows(error), _names(error)
    looked = ["first bytes"]
    findings: list[Finding]
    try:
        if checkpoint is None or format_of(checkpoint).program:
            checkpoint = None
            checkpoint = doctor_foreign.open_file(name)
    except NoFile:
        raise
    except (DamagedFile, UnknownFormat, Unsupported) as trouble:
        program = isinstance(trouble, UnknownFormat) and doctor_foreign.is_program(trouble.kind)
        inside = []
        if program:
            from ckptfix.ops.doctor import program as scan_program

            looked += ["records"]
            inside = list(scan_program.scan(name, fast=fast, progress=progress))
        elif not isinstance(trouble, DistributedPart):
            inside = list(_container(name, fast=fast))
        # An archive whose records can be listed is not an unknown file.
        said = doctor_foreign.scan(name, trouble)
        known = [finding for finding in said if finding.id != "unknown-format" or not inside]
        findings = [*known, *inside]
        title = trouble.message
    else:
        title = format_of(checkpoint).title
        findings = list(_judge(checkpoint, like, rows, names, fast=fast, at=at, looked=looked, progress=progress))
    size = stamp(name).size if found_as(name) == "file" else 0
    ordered = _ordered(findings, rows)
    form = checkpoint.format if checkpoint is not None else None
    kept = None if folder else kept_suffix(name, form)
    remedies = [_remedy(finding, folder or name, like, at=at, like_at=like_at, kept=kept) for finding in ordered]
    if any(finding.id in ("one-rank", "flat-parameters", "tensor-class") for finding in ordered):
        # Plain values of one rank would load, but are not a model, which needs the files of all ranks. Plain values of
        # a library's tensors are only their parts.
        remedies = [_without(_without(row, "sanitize"), "unwrap") for row in remedies]
    if checkpoint is not None:
        remedies = _that_work(checkpoint, ordered, remedies, folder or checkpoint.path)
    done = tuple(_told(finding, row) for finding, row in zip(ordered, remedies, strict=True))
    count = 0 if checkpoint is None else len(checkpoint.entries)
    message = message_of(error, rows, done)
    return Diagnosis(
        name, form, title, size, done, tuple(looked), message, tuple(remedies), tensors=count, folder=folder
    )


def _remedy(
    finding: Finding,
    path: str,
    like: ExpectedModel | None,
    *,
    at: str | None,
    like_at: str | None,
    kept: str | None,
) -> Remedy:
    """Return the remedy of a finding, with the options about the model that `match` needs."""
    if like is None:
        return remedy_of(finding, path, at=at, kept=kept)
    more: dict[str, Value] = {"like_at": like_at} if like_at else {}
    more |= {} if found_as(like.label) else {"allow_import": True}
    row = remedy_of(finding, path, at=at, kept=kept, like=like.label)
    lines = row.invocations
    known = (replace(line, step=line.step.having(**more)) if line.step.get("like") else line for line in lines)
    return replace(row, invocations=tuple(known))


def _told(finding: Finding, remedy: Remedy) -> Finding:
    """Return `finding` with its remedy as text, and as steps."""
    return replace(finding, fix=remedy.text, steps=remedy.steps)


def _without(row: Remedy, verb: str) -> Remedy:
    return Remedy() if any(line.step.command == verb for line in row.invocations) else row


def _that_work(
    checkpoint: Checkpoint, findings: Sequence[Finding], remedies: Sequence[Remedy], path: str
) -> list[Remedy]:
    """Drop the commands that refuse the file, or put the command before them whose output they read.

    `repair` accepts any file, and `extract` any module; the later commands of a chain read their output.
    """
    rows = list(zip(findings, remedies, strict=True))
    opening = {
        row.invocations[0].step.command: (finding, row)
        for finding, row in reversed(rows) if row.invocations and finding.severity != "info"
    }  # fmt: skip
    if "repair" in opening:
        return [_after(opening["repair"], pair, checkpoint, path, _is_refused) for pair in rows]
    if "extract" in opening:
        rows = [(pair[0], _after(opening["extract"], pair, checkpoint, path, _needs_keys)) for pair in rows]
    # `extract` or `sanitize` runs before a conversion, which then reads a different object.
    planned = not opening.keys() & {"extract", "sanitize"}
    return [
        Remedy() if row.invocations and _is_refused(checkpoint, row.invocations[0], planned) else row
        for _, row in rows
    ]


def _after(
    opener: tuple[Finding, Remedy],
    pair: tuple[Finding, Remedy],
    checkpoint: Checkpoint,
    path: str,
    refuses: Callable[[Checkpoint, Invocation], bool],
) -> Remedy:
    """Return the remedy of `pair`, which begins with the commands of `opener` where it refuses the file as it is."""
    finding, row = pair
    lines = row.invocations
    if finding.severity == "info":  # it is not part of the chain
        return Remedy() if lines and refuses(checkpoint, lines[0]) else row
    if not lines or lines[0].step.command == opener[1].invocations[0].step.command:
        return row
    return Remedy(chain(path, [opener, pair])) if refuses(checkpoint, lines[0]) else row


def _needs_keys(checkpoint: Checkpoint, line: Invocation) -> bool:
    """Return whether a command works on the keys of a state dict, which a pickled module is not."""
    chained = STEPS[line.step.command].chained
    return chained is not None and chained.keys


def _is_refused(checkpoint: Checkpoint, line: Invocation, planned: bool = False) -> bool:
    """Return whether a command refuses the file, as far as its headers show."""
    verb, at = line.step.command, line.step.keywords().get("at")
    try:
        if verb == "extract":
            refuse_damaged(checkpoint, MISREAD, address.given(at or ""))
        else:
            refuse_damaged(checkpoint, listed=verb not in ("sanitize", "slim"))
        target = FORMATS.with_suffix(line.dest) if planned and verb == "convert" else None
        if target is not None and "objects" not in target.states:
            from ckptfix.ops.convert import refuse_state_dict

            refuse_state_dict(checkpoint, target, at)
    except CkptfixError:
        return True
    return False


def _judge(
    checkpoint: Checkpoint,
    like: ExpectedModel | None,
    rows: Sequence[LoadError],
    names: Listed | None,
    *,
    fast: bool,
    at: str | None,
    looked: list[str],
    progress: Progress | None,
) -> Iterator[Finding]:
    """Yield all findings about a file that can be opened."""
    path, format = checkpoint.path, format_of(checkpoint)
    far = fast and not is_local(path)
    whole = ("container", format.validate)
    container, judge = format.validate_headers if far and format.validate_headers is not None else whole
    looked[:] = [container, "key names", "devices"]
    # Globals are reported with their calls below.
    judged = [finding for finding in judge(checkpoint) if finding.id != "foreign-global"]
    yield from judged
    yield from _container(path, checkpoint, fast=fast)
    yield from _edited(checkpoint)
    of_adapter = list(scan_adapter.scan(path, checkpoint, rows, names))
    yield from of_adapter
    yield from (replace(remark, severity="error") for remark in rank_shards.remarks(checkpoint, at))
    if like is None and names is None:
        yield from rank_shards.with_other_shards(checkpoint)
    view = checkpoint if at is None else scan_contents.only_at(checkpoint, at)
    if far and torch_zip.archive_of(checkpoint) is not None:
        looked[0] = "directory (and no local headers)"
    yield from _pickles(checkpoint, looked, at, fast=fast)
    contents = list(scan_contents.scan(view))
    yield from scan_contents.needs_torch(checkpoint)
    yield from scan_contents.asked(view, rows)
    if names is not None and like is None:
        from ckptfix.ops.doctor import compare, messages

        told = [] if any(row.about == TOLD for row in of_adapter) else compare.scan(view, names)
        if told and all(row.id == "other-file" for row in told) and _explained(contents, messages.beside_keys(rows)):
            told = []  # a log lists keys of several files before the error itself
        contents = compare.settled(contents, told, names)
        yield from rank_shards.with_other_shards(view, told, names.missing)
    if like is not None:
        from ckptfix.ops.doctor import fit as scan_target

        looked.append("names and shapes against the model")
        try:
            fit = [*contents, *scan_target.scan(view, like, at=at, fast=fast)]
            contents = scan_target.advised(scan_target.settled(fit, view, like, at=at))
            contents = list(rank_shards.with_other_shards(view, contents, [slot.name for slot in like.slots]))
        except NoSuchTensor as error:
            yield found("missing-keys", error.message)
    if like is None and names is None and json_beside(checkpoint, CONFIG):
        from ckptfix.ops.doctor import message_shapes

        yield from message_shapes.of_config(view)
    resumed = next((_RESUMES[row] for row in rows if row in _RESUMES), None)
    if resumed is not None:
        contents = [row.fixed_by(resumed) if row.id == "optimizer-state" else row for row in contents]
    yield from contents
    if not fast:
        looked.append("tensor data")
        yield from scan_records.scan(_pieces(checkpoint, view), checkpoint.byteorder, progress)


def _explained(findings: Iterable[Finding], rows: Collection[LoadError]) -> bool:
    """Return whether any of `findings` explains one of the load errors `rows`."""
    return any(not set(errors_of(finding)).isdisjoint(rows) for finding in findings)


_RESUMES = {
    LoadError.PARAMETER_COUNT: RESUMED_IN_PART,
    LoadError.PARAMETER_ORDER: RESUMED,
    LoadError.WORLD_SIZE: RESUMED_ELSEWHERE,
}
"""Load error of an optimizer -> how to resume with its state all the same."""


def _edited(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a note if in-place edits can be undone."""
    if edits := count_edits(checkpoint):
        yield found("edited-in-place", f"{plural(edits, 'in-place edit')}; `ckptfix undo` undoes the last one")


def _container(path: str, checkpoint: Checkpoint | None = None, *, fast: bool = False) -> Iterator[Finding]:
    """Yield findings about a zip directory, whether or not the checkpoint in it can be read."""
    if found_as(path) == "folder" or (checkpoint is not None and torch_zip.archive_of(checkpoint) is None):
        return
    directory = doctor_foreign.directory_of(path)
    if directory is None:
        return
    pickles = [record.name for record in directory.records if record.name.endswith("/data.pkl")]
    if not pickles:
        return
    with open_source(path) as reader:
        # In a remote file, each local header costs a request of its own.
        local_headers = not (fast and reader.far)
        yield from doctor_zip.scan(reader, directory, pickles[0].rpartition("/")[0], local_headers=local_headers)


def _pickles(checkpoint: Checkpoint, looked: list[str], at: str | None, *, fast: bool = False) -> Iterator[Finding]:
    """Yield findings about the pickle, and about further pickles in the records."""
    parts = maybe_pickled_object(checkpoint)
    if parts is None:
        if not (format_of(checkpoint).folder or format_of(checkpoint).writes):
            # An array of objects in a file of NumPy is a pickle, which ckptfix does not take and others load.
            rows = [row for row in scan_inside.look(checkpoint.path).hidden if is_dangerous(row.name)]
            yield from doctor_pickle.hidden(rows, fix="")
        return
    looked.append("pickle")
    archive = torch_zip.archive_of(checkpoint)
    where, base = ("pickle", 0) if archive is None else (archive.pickle.name, 0)
    if archive is not None:
        with open_source(checkpoint.path) as reader:
            data = record_data(reader, archive.pickle)
        base = data.offset if isinstance(data, ByteRange) else 0
        yield from doctor_pickle.after_stop(parts, where, base)
        yield from _hidden(checkpoint, parts, archive.directory, archive.root, fast)
    if not format_of(checkpoint).writes:
        known = {_STREAM, *parts.global_names()}
        rows = [row for row in scan_inside.look(checkpoint.path).hidden if is_dangerous(row.name)]
        yield from doctor_pickle.hidden((row for row in rows if row.name not in known), fix="")
    for finding in on_load.failing(parts):
        yield replace(finding, where=where, offset=base + (finding.offset or 0))
    module = doctor_pickle.whole_module(parts)
    if at is not None and not any(is_inside(place, at) for place, _ in torch_module.modules(checkpoint)):
        module = None
    # With several state dicts, extract would ask for one of them; sanitize keeps all.
    beside = at is None and module is not None and len(meant(checkpoint)) > 1
    arrays = any(parts.named_arrays()) if not checkpoint.entries else False
    for finding in doctor_pickle.scan(parts, where, base):
        if finding.id == "foreign-global" and not checkpoint.entries and module is None and not arrays:
            # It is a scheduler's state, or a program's settings, so no weights fail to load.
            finding = replace(finding, severity="warning")
        # Without its classes, sanitize would have nothing of a module to write; extract saves the weights.
        taken = module is not None and not beside and finding.id in ("foreign-global", "dangerous-global")
        yield finding.fixed_by(_extracted(checkpoint)) if taken else finding
    if module is not None:
        message = f"a whole pickled model (class {module[0]}), not a state dict: loading it needs its code"
        fix = step("sanitize") if beside else _extracted(checkpoint)
        yield found("whole-module", message, where=where, offset=base + module[1], fix=fix)


def _extracted(checkpoint: Checkpoint) -> Fix:
    """Return the fix that extracts the weights of a whole module, if it has any."""
    try:
        empty = not any(state_dict_of(checkpoint, row) for row in meant(checkpoint))
    except CkptfixError:
        empty = False
    if empty:
        return "it has no tensors to extract: only its class, from the package that defines it, can rebuild it"
    return step("extract")


_STREAM = "torch.storage._load_from_bytes"
"""Function that a plain pickle calls for each storage, whose stream is a part of its graph."""


_SLIM = step("slim")


def _hidden(
    checkpoint: Checkpoint, parts: PickledObject, directory: Directory, root: str, fast: bool
) -> Iterator[Finding]:
    """Yield findings about unused records, and about records and replaced data.pkl that hide pickles."""
    used = parts.storage_keys()
    prefix = f"{root}/data/"
    idle: list[DirectoryRecord] = []
    with open_source(checkpoint.path) as reader:
        for record in directory.records:
            key = record.name.removeprefix(prefix)
            if record.name.startswith(prefix) and key not in used and record.size:
                idle.append(record)
            if record.name == f"{root}/data.pkl" or record.size <= 2 or (fast and reader.far):
                continue
            offset, names = scan_inside.names_in_record(reader, record)
            if names:
                message = f"a pickle that names {doctor_pickle.listed(names)}"
                yield found("hidden-pickle", message, where=record.name, offset=offset)
        for _, _, record in earlier(checkpoint.path, directory):
            _, names = scan_inside.names_in_record(reader, record)
            if names:
                message = f"the data.pkl from before an in-place edit names {doctor_pickle.listed(names)}"
                yield found("hidden-pickle", message, where=record.name, offset=record.header, fix=_SLIM)
    if idle:
        total = sum(record.size for record in idle)
        message = f"no tensor uses {total:,} bytes in {len(idle)} records"
        yield found("unused-record", message, where=idle[0].name, offset=idle[0].header)


def _piece(storage: Storage, name: str) -> scan_records.CheckedRange:
    """Return the bytes of a storage; for one in several files, with the checksum that their checksums combine to."""
    data = storage.data
    assert data is not None
    if is_spliced(data):
        with suppress(CkptfixError):
            return scan_records.CheckedRange(name, data, crc32_of(data))
    return scan_records.CheckedRange(storage.key, data, storage.crc32)


def _pieces(checkpoint: Checkpoint, view: Checkpoint) -> list[scan_records.CheckedRange]:
    """List all bytes of the file that hold tensors, and other records of a zip; the values of `view` are judged."""
    judged = {entry.name for entry in view.entries}
    pieces: dict[object, scan_records.CheckedRange] = {}
    for whole, entry in ((top, part) for top in checkpoint.entries for part in with_parts([top])):
        storage = entry.storage
        if storage is None or storage.data is None:
            continue
        piece = pieces.get(storage.identity)
        if piece is None:
            piece = pieces[storage.identity] = _piece(storage, whole.name)
        if whole.name in judged:
            piece.dtype = piece.dtype or entry.dtype
            piece.entries.append(entry)
    archive = torch_zip.archive_of(checkpoint)
    if archive is None:
        return [
            part
            for piece in pieces.values()
            if _inside(piece, checkpoint.size_of(file_of(piece.data)))
            for part in _spliced(piece)
        ]
    prefix = f"{archive.root}/data/"
    for piece in pieces.values():
        piece.where = f"{prefix}{piece.where}"
    known = {piece.where for piece in pieces.values()}
    others: list[scan_records.CheckedRange] = []
    with open_source(checkpoint.path) as reader:
        for record in archive.directory.records:
            # The pickle's checksum was compared when it was read.
            if record.name in known or record == archive.pickle or record.name in archive.ambiguous or not record.size:
                continue
            try:
                data = record_data(reader, record)
            except CkptfixError:
                continue
            others.append(scan_records.CheckedRange(record.name, data, record.crc32 or None))
    return [*pieces.values(), *others]


def _spliced(piece: scan_records.CheckedRange) -> Iterator[scan_records.CheckedRange]:
    """Yield a piece that is spread over several files, and the parts with checksums; nothing if a file is lost."""
    try:
        checks = list(checks_of(piece.data))
    except CkptfixError:
        return
    named = ((as_path(file_of(check.data)).name, check) for check in checks)
    apart = [scan_records.CheckedRange(f"{name}: {check.where}", check.data, check.crc32) for name, check in named]
    if piece.crc32 is not None:
        piece.apart = apart
        apart = []
    yield piece
    yield from apart


def _inside(piece: scan_records.CheckedRange, size: int) -> bool:
    """Return whether the file has these bytes; if not, the truncation is reported already."""
    return not isinstance(piece.data, ByteRange) or (piece.data.length >= 0 and piece.data.end <= size)


def _ordered(findings: Iterable[Finding], rows: Sequence[LoadError]) -> list[Finding]:
    """Return each finding once, the most serious first; equally serious ones that explain the message come first."""
    kept: dict[tuple[object, ...], Finding] = {}
    counts: dict[str, int] = {}
    for finding in findings:
        # The scan's finding replaces the format's own about the same place, as it is more detailed.
        key = (finding.id, finding.where, finding.offset if finding.id not in _SAME else None)
        counts[finding.id] = counts.get(finding.id, 0) + (key not in kept)
        if key in kept or counts[finding.id] <= MOST:
            kept[key] = finding
    return sorted(kept.values(), key=_places(rows))


def _places(rows: Sequence[LoadError]) -> Callable[[Finding], tuple[int, int, int]]:
    """Return the sort key of findings: the most serious first, then those that explain the message."""
    wanted = {row: place for place, row in enumerate(rows)}

    def place(finding: Finding) -> tuple[int, int, int]:
        explains = min((wanted[row] for row in errors_of(finding) if row in wanted), default=len(wanted))
        return RANK[finding.severity], explains, place_of(finding)

    return place


_SAME = ("duplicate-record", "bad-crc", "trailing-bytes", "no-lightning-version", "fixed-device")
"""Ids that two scans may report for one place, with different offsets."""
