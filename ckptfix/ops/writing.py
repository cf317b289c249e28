"""The one way from a plan to a file, for every verb that writes.

A verb looks at its input and drafts: a plan, and what the output has to hold. `carry_out` counts the law of weights
over every draft (`law`), so that no verb can forget it, and writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ckptfix import formats
from ckptfix.checkpoint import Checkpoint, Edit, Mark, OutputFile, Plan
from ckptfix.errors import CkptfixError, DamagedFile, StrPath, file_name, printable
from ckptfix.findings.row import Finding
from ckptfix.formats.target import refuse_other_suffix
from ckptfix.formats.torch import legacy_layout
from ckptfix.io import write as output
from ckptfix.io.durable import folder_of, kept_line
from ckptfix.io.read import Progress, stamp
from ckptfix.io.replacing import given_up
from ckptfix.ops.law import audit
from ckptfix.ops.law.promise import Account, Promise
from ckptfix.words import some

LOSSES = 3
"""Exit code of a verb that is done, with losses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What a verb is about to write.

    Attributes:
        source: the input.
        read: the files that it was read from, as they were before.
        dest, format: the output.
        promise: what the output has to hold.
        lines: what was done, in one or two sentences.
        findings: what was noticed on the way.
        exit_code: 0, or another if the verb itself knows of losses.
    """

    source: str
    read: tuple[Mark, ...]
    dest: str
    format: str
    plan: Plan
    promise: Promise
    lines: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    exit_code: int = 0

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        dest: StrPath,
        plan: Plan,
        promise: Promise,
        lines: Iterable[str],
        findings: Iterable[Finding] = (),
        *,
        format: str | None = None,
        exit_code: int = 0,
    ) -> Draft:
        """The draft of a verb that read `checkpoint` and writes `dest`, in the same format by default."""
        return cls(
            source=checkpoint.path,
            read=checkpoint.files,
            dest=os.fspath(dest),
            format=format or checkpoint.format,
            plan=plan,
            promise=promise,
            lines=tuple(lines),
            findings=tuple(findings),
            exit_code=exit_code,
        )


def is_folder(source: StrPath) -> bool:
    """Whether `source` is a checkpoint of many files, so that an edited one is a folder too."""
    return Path(file_name(source)).is_dir() and formats.detect(source).folder


def open_input(source: StrPath, dest: StrPath, force: bool, *, folder: bool | None = None) -> Checkpoint:
    """Open `source` after a look at `dest`: a refusal should not wait for a long read.

    Args:
        folder: whether `dest` is to be a folder of files; by default, whether `source` is.
    """
    folder = is_folder(source) if folder is None else folder
    output.check_destination(dest, [source], overwrite=force, folder=folder)
    return formats.open_checkpoint(source)


@contextmanager
def about(path: str) -> Iterator[None]:
    """Errors inside that have no path are about `path`."""
    try:
        yield
    except CkptfixError as error:
        error.path = error.path or path
        raise


def carry_out(
    draft: Draft, *, force: bool, keep_old: bool = False, dry_run: bool, progress: Progress | None
) -> dict[str, Any]:
    """Count and write `draft`; a dry run writes nothing.

    Args:
        keep_old: a checkpoint that is replaced is kept, under another name beside `dest`.

    Returns:
        The fields that the result of every verb has.

    Raises:
        Refused: the suffix of the output belongs to another format.
        DamagedFile: the input changed since it was read, or its bytes do not have the checksum that it states.
        CkptfixError: as `io.write.write_plan`.
    """
    refuse_other_suffix(draft.source, draft.dest, draft.format)
    with about(draft.source):
        plan, account = audit(draft.promise, draft.plan, draft.format)
    for mark in draft.read:
        if not stamp(mark.path).same(mark.stamp):
            raise DamagedFile("it changed while it was read", path=mark.path, hint="wait until its writer is done")
    # A folder changes by what is written into it.
    inputs = {mark.path: mark.stamp for mark in draft.read if not Path(mark.path).is_dir()}
    replaced = given_up(plan, inputs)
    backup = None
    if not dry_run:
        keep = formats.is_checkpoint if keep_old else None
        with folder_of(draft.dest) if formats.FORMATS[draft.format].folder else nullcontext():
            kept = output.write_plan(plan, overwrite=force, keep_old=keep, inputs=inputs, progress=progress)
        backup = kept.get(draft.dest)
    lines = list(draft.lines)
    if account.lost:
        lines.append(f"LOST: {some(account.lost)}")
    if account.left:
        lines.append(f"left behind: {some(account.left)}")
    return {
        "source": draft.source,
        "dest": draft.dest,
        "format": draft.format,
        "plan": plan,
        "written": not dry_run,
        "backup": backup,
        "lines": tuple(lines),
        "findings": (*draft.findings, *account.findings(), *replaced),
        "exit_code": LOSSES if account.lost else draft.exit_code,
        "account": account,
    }


def write_text(dest: StrPath, text: str, *, force: bool, source: str) -> None:
    """Write a file that holds no tensors, such as a report or rules."""
    output.check_destination(dest, [source], overwrite=force)
    plan = Plan((OutputFile.of(dest, [text.encode("utf-8", "surrogatepass")]),))
    output.write_plan(plan, overwrite=force, inputs={source: stamp(source)})


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Result:
    """What a writing verb did, or would do.

    Attributes:
        source, dest: the files.
        format: of `dest`.
        plan: what was written.
        written: False after a dry run.
        backup: name under which the checkpoint that `dest` replaced is kept, where that was asked for.
        lines: one or two sentences for a person; warnings and errors among the findings are not repeated there.
        findings: what was noticed on the way.
        exit_code: 0, or 3 after named losses.
        account: how the tensors of the input fared, counted from the plan.
    """

    source: str
    dest: str
    format: str
    plan: Plan = field(repr=False)
    written: bool
    lines: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    exit_code: int = 0
    backup: str | None = None
    account: Account = field(default_factory=Account)

    def __str__(self) -> str:
        """What the command prints: what was done, the old file's new name, warnings and losses, each on a line."""
        lines = [*self.lines]
        if self.backup is not None:
            lines.append(kept_line(self.dest, self.backup))
        for finding in self.findings:
            if finding.severity != "info":
                parts = (finding.severity, finding.where, finding.message)
                lines.append(": ".join(part for part in parts if part))
        return "\n".join(map(printable, lines))

    def __repr__(self) -> str:
        done = "written" if self.written else "not written"
        return f"<{type(self).__name__}: {self.source!r} to {self.dest!r}, {done}, exit code {self.exit_code}>"

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "source": self.source,
            "dest": self.dest,
            "format": self.format,
            "written": self.written,
            "backup": self.backup,
            "nbytes": self.plan.nbytes,
            "summary": list(self.lines),
            "findings": [asdict(finding) for finding in self.findings],
            "account": asdict(self.account),
            **self._details(),
        }

    def _details(self) -> dict[str, Any]:
        return {}


def plan_edits(checkpoint: Checkpoint, edits: Sequence[Edit], dest: StrPath) -> Plan:
    refuse_other_suffix(checkpoint.path, os.fspath(dest), checkpoint.format)
    if edits:
        # A new header over the data that is left would be an equally broken file, made silently.
        legacy_layout.refuse_truncated(checkpoint)
    with about(checkpoint.path):
        return formats.FORMATS[checkpoint.format].plan_edit(checkpoint, edits, os.fspath(dest))


def copy_note(unchanged: bool) -> str:
    return "; the output is an identical copy" if unchanged else ""
