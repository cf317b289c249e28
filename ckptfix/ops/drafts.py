"""What a verb that writes is given, what it makes, and what it returns: the nouns of `writing`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

from ckptfix.checkpoint import Mark, Plan
from ckptfix.errors import printable
from ckptfix.findings.row import Finding
from ckptfix.findings.table import as_rows
from ckptfix.io.durable import kept_line
from ckptfix.io.read import Progress
from ckptfix.ops.law.promise import Account, Promise

LOSSES = 3
"""Exit code of a verb that is done, with losses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """What every verb that writes takes as keywords, in one value.

    Attributes:
        force: replace an existing output.
        keep_old: a checkpoint that is replaced is kept, under another name beside the output.
        dry_run: plan, and write nothing.
        in_place: change the input itself, by the few bytes that differ; edits of names and devices alone take it.
        link: files of a folder that do not change get a second name in place of a copy; edits of folders alone take it.
        progress: called with bytes done and bytes in all.
    """

    force: bool = False
    keep_old: bool = False
    dry_run: bool = False
    in_place: bool = False
    link: bool = False
    progress: Progress | None = None

    def keywords(self) -> dict[str, Any]:
        """The same as keywords of a verb."""
        few = ("in_place", "link")
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in given.items() if value or name not in few}


R = TypeVar("R", bound="Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft(Generic[R]):
    """What a verb is about to write.

    Attributes:
        result: what the verb returns, but for the fields of `Result`, which it is called with.
        format: of the output.
        promise: what the output has to hold.
        lines: what was done, in one or two sentences.
        findings: what was noticed on the way.
        exit_code: 0, or another if the verb itself knows of losses.
        read: the files that it was read from, as they were before, beside those of the input where that is known.
        link: files of an output folder that are files of the input may be hard links to these.
        allows: says of a global whether the output may name it; without it any may be there.
    """

    result: Callable[..., R]
    format: str
    plan: Plan
    promise: Promise
    lines: Sequence[str]
    findings: Sequence[Finding] = ()
    exit_code: int = 0
    read: tuple[Mark, ...] = ()
    link: bool = False
    allows: Callable[[str], bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Result:
    """What a writing verb did, or would do.

    Attributes:
        source, dest: the files.
        format: of `dest`.
        plan: what was written.
        written: False after a dry run.
        in_place: `dest` is `source`, changed where it is.
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
    in_place: bool = False
    backup: str | None = None
    account: Account = field(default_factory=Account)

    def __str__(self) -> str:
        """What the command prints: what was done, the old file's new name, warnings and losses, each on a line."""
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
        """The same for JSON."""
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
