"""The one way from a plan to a file, for every verb that writes.

A verb reads its input and drafts a plan, with the contents that the output must have. `carry_out` does the rest in the
same way for all verbs: it checks the output's name, opens the input once, audits the draft (`audit`), and writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from ckptfix import formats
from ckptfix.checkpoint import ByteRange, Checkpoint, Edit, FileVersion, OutputFile, Plan
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, NoSuchFile, Refused, StrPath, Unsupported, about, file_name, printable
from ckptfix.findings.row import Finding
from ckptfix.findings.table import as_rows, found
from ckptfix.formats.base import refuse_truncated
from ckptfix.formats.target import of_suffix, refuse_other_suffix
from ckptfix.io import write as io_write
from ckptfix.io.durable import kept_line
from ckptfix.io.ranks import joined
from ckptfix.io.read import Progress
from ckptfix.io.source import blames_changes, found_as, mark, refuse_changed, shares_open_files, stamp
from ckptfix.io.sources import given_up
from ckptfix.io.write_log import noted, recorded
from ckptfix.ops.audit import audit
from ckptfix.ops.audit.promise import Account, Promise
from ckptfix.ops.naming import stays_folder
from ckptfix.ops.record import with_record
from ckptfix.pickles.collector import gc_paused
from ckptfix.urls import as_path, is_url
from ckptfix.words import some

if TYPE_CHECKING:
    from ckptfix.formats.folders.companions import Beside

LOSSES = 3
"""Exit code of a verb that completed, with losses."""


LEFT_BEHIND = "left behind: "
"""The beginning of the line that lists what an output lacks."""

OLD_BYTES = "the old bytes stay in the file: `ckptfix slim` removes them"
"""The line about an in-place edit that no longer uses data of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """The keywords that every writing verb accepts, in one value.

    Attributes:
        force: replace an existing output.
        keep_old: keep a file or folder that is replaced, under another name beside the output.
        dry_run: plan, and write nothing.
        in_place: change only the bytes of the input that differ; for edits of keys and devices alone.
        link: hard-link the files of a folder that do not change, instead of copying them; for edits of folders alone.
        progress: called with the bytes done and the bytes in all.
    """

    force: bool = False
    keep_old: bool = False
    dry_run: bool = False
    in_place: bool = False
    link: bool = False
    progress: Progress | None = None

    def keywords(self) -> dict[str, Any]:
        """Return the options as keyword arguments of a verb."""
        few = ("in_place", "link")
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in given.items() if value or name not in few}


R = TypeVar("R", bound="Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft(Generic[R]):
    """The output that a verb is about to write.

    Attributes:
        result: makes the verb's result; it is called with the fields of `Result` as keywords.
        format: of the output.
        promise: the contents that the output must have; None for the plan of a chain, whose steps have been audited.
        lines: what was done, in one or two sentences.
        findings: what was noticed on the way.
        exit_code: 0, or another if the verb itself knows of losses.
        read: the source files as they were before they were read, in addition to those of the input.
        link: files of an output folder that equal files of the input may be hard links to them.
        allows: returns whether the output may name a global; None allows every global.
        folder: the output is a folder, although its format is that of one file.
        amend: changes the copies of the files beside a model, which follow it to a folder.
    """

    result: Callable[..., R]
    format: str
    plan: Plan
    promise: Promise | None
    lines: Sequence[str]
    findings: Sequence[Finding] = ()
    exit_code: int = 0
    read: tuple[FileVersion, ...] = ()
    link: bool = False
    allows: Callable[[str], bool] | None = None
    folder: bool = False
    amend: Callable[[Iterable[OutputFile]], Iterable[OutputFile]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Result:
    """The outcome of a writing verb, or of its dry run.

    Attributes:
        source, dest: the files.
        format: of `dest`.
        plan: the files as they were written.
        written: False after a dry run.
        in_place: `dest` is `source`, edited in place.
        backup: name under which the checkpoint that `dest` replaced is kept, where that was asked for.
        lines: one or two sentences for a person; warnings and errors among the findings are not repeated there.
        findings: what was noticed on the way.
        exit_code: 0, or 3 after reported losses.
        account: counts of kept, changed and lost tensors of the input, from the plan.
        finish: adds to the result what is known only once the output is written, such as counts of computed values.
    """

    source: str
    dest: str
    format: str
    plan: Plan = field(repr=False)
    written: bool
    lines: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    exit_code: int = 0
    in_place: bool = False
    backup: str | None = None
    account: Account = field(default_factory=Account)
    finish: Callable[[Any], Any] | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        """Return the lines that the command prints: what was done, the old file's new name, warnings and losses."""
        kept = () if self.backup is None else (kept_line(self.dest, self.backup),)
        noticed = (finding.line for finding in self.findings if finding.severity != "info")
        return "\n".join(map(printable, (*self.lines, *kept, *noticed)))

    def __repr__(self) -> str:
        done = "written" if self.written else "not written"
        return f"<{type(self).__name__}: {self.source!r} to {self.dest!r}, {done}, exit code {self.exit_code}>"

    def _repr_html_(self) -> str:
        from ckptfix.shown import html

        return html(self.lines, [("", ("severity", "where", "what"), [row.cells for row in self.findings])])

    def as_dict(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return {
            "path": self.source,
            "output": self.dest or None,
            "output_format": self.format,
            "output_size": self.plan.nbytes,
            "written": self.written,
            "in_place": self.in_place,
            "backup": self.backup,
            "summary": list(self.lines),
            "findings": as_rows(self.findings, self.source),
            "account": self.account.as_dict(),
            **self._details(),
        }

    def _details(self) -> dict[str, Any]:
        return {}

    @property
    def left_out(self) -> tuple[str, ...]:
        """The addresses that the output does not hold, as the JSON object lists them."""
        return tuple(self._details().get("left_behind", ()))


def is_folder(source: StrPath) -> bool:
    """Return whether `source` is a checkpoint of many files, or its index, so that an edited copy is a folder too."""
    path = file_name(source)
    kind = found_as(path)
    if kind == "folder":
        return formats.detect(source).folder
    if kind != "file" or not path.endswith(".json"):
        return False
    try:
        return formats.detect(source).folder
    except CkptfixError:
        return False


@gc_paused
@shares_open_files()
def carry_out(
    source: StrPath | Checkpoint,
    dest: StrPath | None,
    make: Callable[[Checkpoint, str], Draft[R]],
    how: WriteOptions,
    *,
    converts: bool = False,
    folder: bool | None = None,
    named: StrPath | None = None,
) -> R:
    """Read the checkpoint `source`, let a verb `make` its draft, audit it, and write it to `dest`.

    Args:
        source: a file, or a checkpoint that is open already.
        dest: None for an in-place edit.
        make: the verb, called with the checkpoint and the name of the output. Its errors are about the checkpoint.
        how: options of the verb.
        converts: the verb may write a different format from the one that it reads.
        folder: whether `dest` is to be a folder of files; by default, whether `source` is, or holds a model that needs
            its configuration (`beside_model`).
        named: the user's name of a checkpoint that is open already.

    Raises:
        Refused: the suffix of the output belongs to a different format.
        DamagedFile: the input changed since it was read, or its bytes do not match the checksum that it states.
        CkptfixError: as `formats.open_checkpoint`, `make` and `io.write.write_plan`.
    """
    path = source.path if isinstance(source, Checkpoint) else formats.located(source)
    if how.in_place or dest is None:
        return _carry_out_in_place(source, path, dest, make, how)
    many = is_folder(path)
    inputs: list[StrPath] = [path]
    if many and found_as(file_name(path)) != "folder":
        inputs.append(as_path(path).parent)
    meant = path if isinstance(source, Checkpoint) else source
    around = beside_model(named or meant, path, dest) if folder is None and not many else None
    refuse_destination(dest, inputs, how, folder=(many or around is not None) if folder is None else folder)
    checkpoint = source if isinstance(source, Checkpoint) else formats.open_checkpoint(path)
    name = os.fspath(dest)
    if not converts:
        refuse_read_only(checkpoint)
        refuse_other_suffix(checkpoint.path, name, checkpoint.format)
    if how.link and (is_url(checkpoint.path) or is_url(name)):
        raise Refused("hard links need local files", path=checkpoint.path, hint="leave out --link")
    if how.link and not formats.format_of(checkpoint).folder:
        raise Refused("hard links need a folder of files, and this is one file", path=checkpoint.path)
    with about(checkpoint.path), blames_changes():
        draft = folder_draft(partial(make, checkpoint), around, checkpoint.path, name)
    read = (*checkpoint.files, *draft.read)
    return _written(_from_folder(draft, source, path), checkpoint.path, read, name, how)


def _carry_out_in_place(
    source: StrPath | Checkpoint,
    path: StrPath,
    dest: StrPath | None,
    make: Callable[[Checkpoint, str], Draft[R]],
    how: WriteOptions,
) -> R:
    if dest is not None or not how.in_place:
        what = "an in-place edit takes no output" if how.in_place else "no output is named"
        raise Refused(what, path=file_name(path), hint="name an output, or set in_place=True (--in-place)")
    from ckptfix.ops import inplace

    inplace.refuse_far(file_name(path))
    checkpoint = source if isinstance(source, Checkpoint) else formats.open_checkpoint(path)
    if not formats.format_of(checkpoint).edits:
        message = f"{formats.format_of(checkpoint).title}: ckptfix reads this format, but does not write it"
        raise Unsupported(message, path=checkpoint.path, hint="name an output, such as OUT.pth: it is converted too")
    inplace.refuse_shared(checkpoint, force=how.force)
    with about(checkpoint.path), blames_changes():
        draft = make(checkpoint, inplace.target_of(checkpoint))
        draft = replace(draft, plan=inplace.in_place(checkpoint, draft.plan))
        plan, account = audit(draft.promise or Promise(), draft.plan, draft.format)
    stamps = {file.path: file.stamp for file in checkpoint.files if found_as(file.path) != "folder"}
    changes = inplace.write(checkpoint, plan, draft.lines[0], stamps, dry_run=how.dry_run)
    if changes:
        lines = [*draft.lines, inplace.line_of(changes, dry_run=how.dry_run)]
    else:
        lines = [draft.lines[0].replace(copy_note(unchanged=True), "; the file is unchanged"), *draft.lines[1:]]
    result = draft.result(
        source=checkpoint.path,
        dest=checkpoint.path,
        format=draft.format,
        plan=plan,
        written=not how.dry_run and bool(changes),
        in_place=True,
        lines=tuple(lines),
        findings=(*draft.findings, *account.findings()),
        exit_code=LOSSES if account.lost or account.damaged else draft.exit_code,
        account=account,
    )
    return result if result.finish is None else result.finish(result)


def _any_file(path: str) -> bool:
    """Accept every file as one to keep."""
    return True


@gc_paused
@shares_open_files()
def carry_out_file(
    source: StrPath,
    dest: StrPath,
    make: Callable[[str, str], Draft[R]],
    how: WriteOptions,
    *,
    others: Iterable[StrPath] = (),
    folder: bool | None = None,
) -> R:
    """Write the draft of a verb that reads `source` itself; otherwise like `carry_out`.

    Args:
        source: a file or folder.
        make: the verb, called with the names of the input and the output.
        others: further inputs, which the output must not replace either.
        folder: whether `dest` is to be a folder of files; by default, as in `carry_out`.
    """
    exists = bool(found_as(file_name(source)))
    around = beside_model(source, formats.located(source), dest) if folder is None and exists else None
    refuse_destination(dest, [source, *others], how, folder=folder or around is not None)
    path, name = formats.located(existing(source)), os.fspath(dest)
    before = mark(path)
    with blames_changes():
        draft = _from_folder(folder_draft(partial(make, path), around, path, name), source, path)
    return _written(draft, path, draft.read or (before,), name, how)


def beside_model(source: StrPath, path: StrPath, dest: StrPath | None) -> Beside | None:
    """Return the files beside the model `path` of the folder `source`, if the output of an edit is a folder like it.

    It is one if a loader needs a configuration beside the weights, unless the name of the output is that of a file.
    """
    if (dest is not None and of_suffix(os.fspath(dest))) or not stays_folder(source, path):
        return None
    from ckptfix.formats.folders.companions import beside

    return beside(os.fspath(source), (os.fspath(path),))


def folder_draft(make: Callable[[str], Draft[R]], around: Beside | None, path: str, dest: str) -> Draft[R]:
    """Return the draft of the output `dest`; with `around`, it is a folder of the model under its name and of copies.

    Args:
        make: called with the name of the file.
        path: the model.
    """
    if around is None:
        return make(dest)
    draft = make(str(as_path(dest, as_path(path).name)))
    copies: Iterable[OutputFile] = around.copied_to(dest)
    if draft.amend is not None:
        copies = draft.amend(copies)
    findings = (*draft.findings, *around.findings())
    return replace(draft, plan=replace(draft.plan, files=(*copies, *draft.plan.files)), findings=findings, folder=True)


def _from_folder(draft: Draft[R], source: StrPath | Checkpoint, path: StrPath) -> Draft[R]:
    """Add a line to the draft that reports which checkpoint of the folder `source` was read, if it has several."""
    if isinstance(source, Checkpoint) or os.fspath(path) == os.fspath(source):
        return draft
    from ckptfix.ops.candidates.other_models import other_models

    others = tuple(other_models(os.fspath(source), os.fspath(path)))
    notes = [other.message for other in others if other.severity == "info"]
    line = "; ".join([f"read {os.path.relpath(path, source)} in {os.fspath(source)}", *notes])
    return replace(draft, lines=(line, *draft.lines), findings=(*others, *draft.findings))


def companions(checkpoint: Checkpoint, source: object, dest: str) -> tuple[OutputFile, ...]:
    """Return copies in the folder `dest` of the files beside a checkpoint, such as config.json.

    Args:
        source: the user's name of the checkpoint. Files beside a checkpoint of one file follow it if that is a folder.
    """
    own = formats.format_of(checkpoint)
    if own.folder or not isinstance(source, str | os.PathLike) or is_url(checkpoint.path):
        return own.companions(checkpoint, dest)
    if os.fspath(source) == checkpoint.path or found_as(file_name(source)) != "folder":
        return ()
    from ckptfix.formats.folders.companions import beside
    from ckptfix.formats.members import INDEX, kind_of

    around = beside(str(as_path(checkpoint.path).parent), [checkpoint.path]).copied_to(dest)
    others = tuple(suffix for row in formats.FORMATS.values() for suffix in row.suffixes)
    return tuple(
        file for file in around if not file.path.lower().endswith(others) and kind_of(as_path(file.path).name) != INDEX
    )


def refuse_destination(dest: StrPath, inputs: Iterable[StrPath], how: WriteOptions, *, folder: bool = False) -> None:
    """Raise an error for an output that cannot be written, or is one of `inputs`, before a long read begins.

    Args:
        folder: it is to be a folder of files.
    """
    io_write.check_destination(dest, inputs, overwrite=how.force, folder=folder)


def existing(source: StrPath) -> str:
    """Return the name of a file or folder that exists.

    Raises:
        NoSuchFile: it does not exist.
    """
    path = file_name(source)
    if not found_as(path):
        raise NoSuchFile(path)
    return path


def _written(draft: Draft[R], source: str, read: Sequence[FileVersion], dest: str, how: WriteOptions) -> R:
    refuse_other_suffix(source, dest, draft.format)
    with about(source), blames_changes():
        audited = not (how.dry_run and _unaudited.get())
        plan, account = draft.plan, Account()
        if audited and draft.promise is not None:
            plan, account = audit(draft.promise, plan, draft.format)
        if draft.allows is not None and audited:
            from ckptfix.ops.hazards import refuse_named

            refuse_named(plan, draft.format, draft.allows, source)
    for file in read:
        refuse_changed(file.path, stamp(file.path), file.stamp)
    # Writing into a folder changes the folder's own stamp.
    inputs = {file.path: file.stamp for file in read if found_as(file.path) != "folder"}
    folder = draft.folder or formats.FORMATS[draft.format].folder
    files, record = (plan, None) if how.dry_run else with_record(plan, draft.format, dest, read)
    replaced = () if folder else given_up(plan, inputs)
    backup = None
    with noted() as notes:
        if not how.dry_run and folder:
            from ckptfix.io.folders import write_folder

            backup = write_folder(
                files,
                dest,
                overwrite=how.force,
                keep_old=how.keep_old,
                own=files_of,
                link=draft.link or how.link,
                inputs=inputs,
                progress=how.progress,
            )
        elif not how.dry_run:
            keep = _any_file if how.keep_old else None
            kept = io_write.write_plan(files, overwrite=how.force, keep_old=keep, inputs=inputs, progress=how.progress)
            backup = kept.get(dest)
    lines = [*draft.lines, *account.lines(), *([] if record is None else [record]), *notes]
    linked = [found("linked-files", where=dest)] if folder and how.link else []
    said = set(draft.findings)
    behind = [finding for finding in plan.findings if finding.id == "left-behind" and finding not in said]
    left = [*account.left, *(finding.where for finding in behind)]
    if left:
        lines.append(f"{LEFT_BEHIND}{some(left)}")
    made = draft.result(
        source=source,
        dest=dest,
        format=draft.format,
        plan=plan,
        written=not how.dry_run,
        backup=backup,
        lines=tuple(lines),
        findings=(*draft.findings, *behind, *account.findings(), *linked, *replaced),
        exit_code=LOSSES if account.lost or account.damaged else draft.exit_code,
        account=account,
    )
    return made if how.dry_run or made.finish is None else cast("R", made.finish(made))


_unaudited: ContextVar[bool] = ContextVar("unaudited", default=False)


@contextmanager
def unaudited() -> Iterator[None]:
    """Leave the weight audit out of dry runs inside the block.

    The audit reads the planned output back, which takes most of the time of a plan.
    """
    token = _unaudited.set(True)
    try:
        yield
    finally:
        _unaudited.reset(token)


def files_of(folder: str) -> tuple[str, ...]:
    """List the files of the checkpoint in `folder`; empty if it is not a checkpoint."""
    try:
        return tuple(file.path for file in formats.open_checkpoint(folder).files)
    except CkptfixError:
        return ()


def write_aside(plan: Plan, dest: str, *, folder: bool) -> None:
    """Write the intermediate output of a chain of commands, audited already, to a new file or folder."""
    # The command deletes it at its end, so it is not recorded, and each of several ranks writes its own.
    with recorded(), joined(None):
        if folder:
            from ckptfix.io.folders import write_folder

            write_folder(plan, dest)
        else:
            io_write.write_plan(plan)


def looked_at(draft: Draft[R], source: str, dest: StrPath | None = None) -> R:
    """Return the result of a verb that only looked, and planned no output."""
    return draft.result(
        source=source,
        dest="" if dest is None else os.fspath(dest),
        format=draft.format,
        plan=Plan(()),
        written=False,
        lines=tuple(draft.lines),
        findings=tuple(draft.findings),
        exit_code=draft.exit_code,
    )


def write_text(dest: StrPath, text: str, *sources: str, force: bool) -> None:
    """Write a file without tensors, such as a report or rules, that is no more readable than its sources."""
    io_write.check_destination(dest, sources, overwrite=force)
    plan = Plan((OutputFile.of(dest, [text.encode("utf-8", "surrogatepass")]),))
    io_write.write_plan(plan, overwrite=force, inputs={source: stamp(source) for source in sources})


def plan_edits(checkpoint: Checkpoint, edits: Sequence[Edit], dest: str) -> Plan:
    """Plan the output of a verb that keeps the object of `checkpoint`, and changes only keys, shapes and devices."""
    # A new header over truncated data would silently make another broken file, and so would a copy.
    refuse_truncated(checkpoint)
    return formats.FORMATS[checkpoint.format].plan_edit(checkpoint, edits, dest)


def refuse_read_only(checkpoint: Checkpoint) -> None:
    """Raise `Unsupported` for a checkpoint of a format that ckptfix only reads.

    Raises:
        Unsupported: it has such a format.
    """
    format = formats.format_of(checkpoint)
    if not format.edits:
        format.plan_edit(checkpoint, (), "")


def copy_of(checkpoint: Checkpoint, dest: str) -> Plan:
    """Plan `dest` as a copy of a checkpoint, file or folder."""
    format = formats.format_of(checkpoint)
    if format.folder:
        return format.plan_edit(checkpoint, (), dest)
    return Plan((OutputFile.of(dest, (ByteRange(checkpoint.path, 0, checkpoint.size),)),))


def copy_note(unchanged: bool) -> str:
    return "; the output is an identical copy" if unchanged else ""
