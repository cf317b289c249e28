"""The nouns of `writing`: options of a verb that writes, the draft that it makes, and the result that it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

from ckptfix.checkpoint import FileVersion, Plan
from ckptfix.errors import printable
from ckptfix.findings.row import Finding
from ckptfix.findings.table import as_rows
from ckptfix.io.durable import kept_line
from ckptfix.io.read import Progress
from ckptfix.ops.audit.promise import Account, Promise

LOSSES = 3
"""Exit code of a verb that completed, with losses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """The keywords that every writing verb accepts, in one value.

    Attributes:
        force: replace an existing output.
        keep_old: keep a checkpoint that is replaced, under another name beside the output.
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
        promise: the contents that the output must have.
        lines: what was done, in one or two sentences.
        findings: what was noticed on the way.
        exit_code: 0, or another if the verb itself knows of losses.
        read: the source files as they were before they were read, in addition to those of the input.
        link: files of an output folder that equal files of the input may be hard links to them.
        allows: returns whether the output may name a global; None allows every global.
        folder: the output is a folder, although its format is that of one file.
    """

    result: Callable[..., R]
    format: str
    plan: Plan
    promise: Promise
    lines: Sequence[str]
    findings: Sequence[Finding] = ()
    exit_code: int = 0
    read: tuple[FileVersion, ...] = ()
    link: bool = False
    allows: Callable[[str], bool] | None = None
    folder: bool = False


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
