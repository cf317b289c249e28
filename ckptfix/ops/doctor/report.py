"""The diagnosis of a file: the findings, the one that counts, and the commands that help."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ckptfix.dataclass import dataclass
from ckptfix.errors import printable
from ckptfix.findings.load_errors import LoadError
from ckptfix.findings.remedies import chain
from ckptfix.findings.row import Finding, FindingKind, Severity
from ckptfix.findings.steps import LIKE, WHERE, Fix, Invocation, Steps, Value, shell_line
from ckptfix.findings.steps import step as fix_step
from ckptfix.findings.table import ENTRIES, RANK, Remedy, as_row, errors_of, proposed
from ckptfix.io.source import found_as
from ckptfix.ops.doctor.groups import BESIDE, OF_THE_FORMAT, TOLD, FindingGroup, grouped
from ckptfix.shown import html, page
from ckptfix.words import plural, some

if TYPE_CHECKING:
    from ckptfix.findings.message_names import Listed, Prefix
    from ckptfix.ops.doctor.run_report import RunReport

FailOn = Literal["error", "warning", "never"]
"""The least serious finding that makes the exit code 1."""

Kind = Literal["text", "command", "error", "warning", "info"]


class ReportLine(NamedTuple):
    """A line of a report.

    Attributes:
        kind: of the content: a command to paste, a finding by its severity, or other text.
        text: the line itself.
        label: length of the severity at its start; None where the whole line has the color of its kind.
    """

    kind: Kind
    text: str
    label: int | None = None


@dataclass(frozen=True, slots=True)
class ErrorMessage:
    """The interpretation of a pasted error message.

    Attributes:
        rows: the load errors that it may be, most likely first; empty if it is unknown.
        meanings: the usual meaning of each.
        explained: ids of the findings that explain it, in the order of the findings.
        advice: the usual remedy, for a file that is not available; None where nothing is known.
        solved: whether a command follows from the keys of the message; ``ckptfix fix`` does not know the message.
    """

    rows: tuple[LoadError, ...]
    meanings: tuple[str, ...]
    explained: tuple[str, ...]
    advice: str | None = None
    solved: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the message as a JSON object."""
        return {
            "names": [row.id for row in self.rows],
            "meanings": list(self.meanings),
            "explained": list(self.explained),
            "advice": self.advice,
        }


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis:
    """The findings about a file.

    Attributes:
        path: the file or folder; ``""`` where there is only a message.
        format: NAME of the format that reads it; None where none does.
        title: its kind, in words.
        size: bytes of the file; 0 for a folder.
        findings: the most serious first, those that explain the message before others of their severity; `fix` is a
            command line for a shell, or words, or None where nothing helps.
        looked_at: the checked parts, in words.
        message: the interpretation of the pasted message; None without one.
        remedies: the remedy of each finding, in their order.
        beside: the findings that are about other files of the folder. Their remedies have no commands.
        run: the state of each checkpoint of a run folder; None for anything else.
        survivors: the tensors that a damaged file still holds, in one sentence; empty where nothing is known.
        tensors: how many the file has; 0 if it cannot be read.
        further: commands that the output of the others needs, found by planning them.
        folder: the folder of `path`, where commands read the folder because a configuration belongs to the model;
            otherwise empty.
    """

    path: str
    format: str | None
    title: str
    size: int
    findings: tuple[Finding, ...]
    looked_at: tuple[str, ...]
    message: ErrorMessage | None = None
    remedies: tuple[Remedy, ...] = ()
    beside: tuple[Finding, ...] = ()
    run: RunReport | None = None
    survivors: str = ""
    tensors: int = 0
    further: tuple[Invocation, ...] = ()
    folder: str = ""

    @property
    def unfixed(self) -> tuple[Finding, ...]:
        """The errors of the file itself that no command fixes."""
        rows = zip(self.findings, self.remedies, strict=True)
        errors = (finding for finding, row in rows if finding.severity == "error" and not row.commands)
        return tuple(finding for finding in errors if finding not in self.beside)

    def __str__(self) -> str:
        """Return the text that ``ckptfix doctor`` prints, with all rows."""
        return "\n".join(line.text for line in self.lines())

    def __repr__(self) -> str:
        parts = []
        for severity, word in _WORDS.items():
            ids = list(dict.fromkeys(finding.id for finding in self.findings if finding.severity == severity))
            count = sum(finding.severity == severity for finding in self.findings)
            if count:
                parts.append(f"{plural(count, word)} ({some(ids, 4)})")
        return f"<Diagnosis of {self.path!r}: {', '.join(parts) or 'no problems found'}>"

    def _repr_html_(self) -> str:
        rows = [
            (finding.severity, finding.id, finding.where, finding.message, finding.fix) for finding in self.findings
        ]
        advice = [f"Try: {self.advice}"] if self.advice is not None else []
        table = ("findings", ("severity", "finding", "where", "what", "fix"), rows)
        what = f"{self.path}: {self.title}" if self.path else self.title
        said = [self.sentence, self.survivors] if self.survivors else [self.sentence]
        return html([what, *said, *advice, *self._commands(verbose=True)], [table])

    def to_html(self, *, command: str | None = None) -> str:
        """Return a self-contained HTML page, as written by ``ckptfix doctor --html``.

        Args:
            command: the command line shown on the page; ``ckptfix doctor PATH`` by default.
        """
        return page("doctor", self, command=command)

    @property
    def sentence(self) -> str:
        """The diagnosis in one sentence."""
        if self.run is not None:
            return self.run.sentence
        group = self._group_of_cause(self.groups)
        if group is not None:
            return group.text()
        if not self.path:
            meanings = self.message.meanings if self.message is not None else ()
            unknown = "I don't recognize that error message."
            return f"This message usually means that {meanings[0]}" if meanings else unknown
        if self.message is not None and self.message.meanings:
            return f"no cause of this message was found in the file; it usually means that {self.message.meanings[0]}"
        if self.message is not None and self.findings:
            return "no cause of this message was found in the file"
        return f"No problems found. (Checked: {', '.join(self.looked_at)}.)"

    @property
    def groups(self) -> list[FindingGroup]:
        """The findings, with those of one cause grouped."""
        return grouped(self.findings, self.remedies)

    def _group_of_cause(self, groups: Sequence[FindingGroup]) -> FindingGroup | None:
        cause = self.cause
        return next((group for group in groups if any(finding is cause for finding in group.findings)), None)

    @property
    def cause(self) -> Finding | None:
        """The finding that counts: one that explains the message, else the most serious; one with a remedy first."""
        explained = self.message.explained if self.message is not None else ()
        told = [finding for finding in self.findings if finding.about == TOLD and finding.steps]
        for finding in (*told, *self.findings):
            if finding.id in explained and finding.severity == "error":
                return finding
        for finding in self.findings:
            if finding.id in explained:
                return finding
        if self.message is not None and not any(f.severity == "error" for f in self.findings):
            return None
        serious = [row for row in zip(self.findings, self.remedies, strict=True) if row[0].severity != "info"]
        first = [row for row in serious if row[0].severity == serious[0][0].severity]
        return next((finding for finding, row in first if row.text), first[0][0] if first else None)

    @property
    def fixes(self) -> tuple[tuple[str, ...], ...]:
        """The commands for the findings that explain the message or are more than notes: lists of words, in order.

        Each reads the output of the one before it; empty where no command of ckptfix helps.
        """
        return tuple(line.argv() for line in self.chain)

    @property
    def chain(self) -> tuple[Invocation, ...]:
        """The same as steps with the names of their files."""
        from ckptfix.ops.naming import kept_suffix

        rows = [(finding, row) for finding, row in self._counted() if row.invocations]
        kept = None if self.folder else kept_suffix(self.path, self.format)
        return (*chain(self._read, rows, kept), *self.further)

    @property
    def fix(self) -> tuple[str, ...] | None:
        """The one command that does the work of all `fixes`: with several, ``ckptfix fix``.

        It includes the model that the file was to fit, and the address that was asked for. None where no command helps.
        """
        lines = self.chain
        if len(lines) < 2 or self._is_solved:
            return lines[0].argv() if len(lines) == 1 else None
        wanted: dict[str, Value] = {}
        for line in lines:
            for option in ("at", "like", "like_at", "drop_unexpected", "allow_import"):
                value = line.step.get(option)
                if value is not None:
                    wanted.setdefault(option, value)
        (step,) = fix_step("fix", **wanted)
        return Invocation(step, self._read, self._fixed(lines[-1])).argv()

    @property
    def _read(self) -> str:
        """The name of what the commands read."""
        return self.folder or self.path

    @property
    def _is_told(self) -> bool:
        return any(finding.about == TOLD for finding in self.findings)

    @property
    def _is_solved(self) -> bool:
        return self.message is not None and self.message.solved

    def _fixed(self, last: Invocation) -> str:
        """Return the output name for fix, with the suffix that the last command writes; empty for a folder."""
        if found_as(self._read) == "folder" or not last.dest:
            return ""
        from ckptfix.ops.naming import last_suffix

        return proposed(self.path, "fixed", last_suffix(self.path, last.dest))

    @property
    def advice(self) -> str | None:
        """The instruction in words, where the finding that counts has no command; how to resume a run."""
        cause = self.cause
        if self.run is not None and self.run.how is not None:
            return self.run.how
        if cause is None:
            return self.message.advice if self.message is not None and not self.path else None
        return next((row.advice for finding, row in self._counted() if finding is cause), None) or (
            None if self.fixes else next((row.advice for _, row in self._counted() if row.advice), None)
        )

    def _counted(self) -> list[tuple[Finding, Remedy]]:
        """List the findings that explain the message or are more than notes, with their remedies; the cause first."""
        cause = self.cause
        explained = self.message.explained if self.message is not None else ()
        apart = self.message is not None and (self._is_solved or self.cause is None or self._is_told)
        # A command for a warning that has nothing to do with the message would be taken for its cure.
        apart = apart or (cause is not None and cause.id in explained and not _steps_of(self, explained))
        least = RANK["error" if apart else "warning"]
        rows = [
            (finding, row) for finding, row in zip(self.findings, self.remedies, strict=True)
            if RANK[finding.severity] <= least or finding.id in explained
        ]  # fmt: skip
        return sorted(rows, key=lambda row: row[0] is not cause)

    def lines(self, most: int = 0, *, verbose: bool = False) -> list[ReportLine]:
        """Return the report: what is wrong and what fixes it, then the other findings, each cause once.

        Args:
            most: names and places that one line lists, 0 for all.
            verbose: list every finding by itself with its place, and notes that apply to most files of the format.
        """
        groups = self.groups
        first = self._group_of_cause(groups) if self.run is None else None
        kind: Kind = "text" if first is None else first.severity
        said = self.sentence if first is None else f"{first.text(most)} [{first.id}]"
        lines = [ReportLine(kind, printable(said))]
        lines += [ReportLine("text", self.survivors)] if self.survivors else []
        lines += self._remedy_lines(verbose=verbose)
        if self.run is not None:
            lines += [ReportLine("text", ""), *(ReportLine("command", row) for row in self.run.table())]
        if self.message is not None and self.path:
            lines += self._message_lines(self.message)
        rest = [group for group in groups if group is not first]
        noted = [group for group in rest if group.severity == "info" and group.id in OF_THE_FORMAT]
        if verbose:
            shown = [_row(finding.severity, in_full(finding)) for finding in self.findings]
        else:
            shown = [line for group in rest if group not in noted for line in self._group_lines(group, most)]
        lines += [ReportLine("text", ""), *shown] if shown else []
        checked = f"Checked: {', '.join(self.looked_at)}." if self.path and (first or self.message or self.run) else ""
        hidden = len(self.findings) - len(groups)
        if hidden and not verbose:
            noun = "finding" if hidden == 1 else "findings"
            checked = f"{checked} -v lists {hidden:,} more {noun}, and where each is.".strip()
        return lines + ([ReportLine("text", ""), ReportLine("text", checked)] if checked else [])

    def _remedy_lines(self, *, verbose: bool) -> list[ReportLine]:
        """Return the advice about the cause, and the command for all findings; with `verbose`, its steps too."""
        lines = [] if self.advice is None else [ReportLine("text", f"Try: {printable(self.advice)}")]
        lines += [ReportLine("command", line) for line in self._commands(verbose=verbose)]
        if not lines and self.cause is not None and self.cause.severity == "error":
            lines.append(ReportLine("text", "No automatic fix."))
        return lines

    def _commands(self, *, verbose: bool) -> list[str]:
        """Return the command that fixes all; with `verbose`, it is followed by its steps where there are several."""
        first, *more = [shell_line(words) for words in self.fixes] or [""]
        if not more or self.fix is None:
            return [f"Fix: {first}", *(f"Then: {line}" for line in more)] if first else []
        steps = [f"Or: {first}", *(f"Then: {line}" for line in more)] if verbose else []
        return [f"Fix: {shell_line(self.fix)}", *steps]

    def _message_lines(self, message: ErrorMessage) -> list[ReportLine]:
        if message.explained:
            return [ReportLine("text", f"This matches your error message ({', '.join(message.explained)}).")]
        said = [f"This message usually means: {meaning}" for meaning in message.meanings[:3]]
        return [ReportLine("text", text) for text in said or ["I don't recognize that error message."]]

    def _group_lines(self, group: FindingGroup, most: int) -> list[ReportLine]:
        """Return a finding that is not the cause, with any new advice; a note's advice appears only if asked for."""
        lines = [_row(group.severity, printable(f"{group.text(most)} [{group.id}]"))]
        explained = self.message.explained if self.message is not None else ()
        if group.advice and group.advice != self.advice and (group.severity != "info" or group.id in explained):
            lines.append(ReportLine("text", f"  Try: {printable(group.advice)}"))
        return lines

    def exit_code(self, fail_on: FailOn = "error") -> int:
        """Return 1 with a finding at least as serious as `fail_on`, ``"error"`` or ``"warning"``; otherwise 0.

        Errors are damage, objects that ``weights_only=True`` refuses, a misfit with the model, and files that are not
        checkpoints. Device tags and keys of wrappers are warnings. With ``"never"``, the result is 0.
        """
        limits = {"error": 0, "warning": 1, "never": -1}
        return int(any(RANK[finding.severity] <= limits[fail_on] for finding in self.findings))

    def as_dict(self) -> dict[str, Any]:
        """Return the diagnosis as a JSON object: `fix` and `fixes` are lists of words, `advice` is text."""
        return {
            "path": self.path or None,
            "format": self.format,
            "title": self.title,
            "size": self.size,
            "summary": [self.sentence, *([self.survivors] if self.survivors else [])],
            "fix": None if self.fix is None else list(self.fix),
            "fixes": [list(line) for line in self.fixes],
            "advice": self.advice,
            "findings": [
                as_row(finding, row) for finding, row in zip(self.findings, self.remedies, strict=True)
            ],
            "looked_at": list(self.looked_at),
            "load_error": None if self.message is None else self.message.as_dict(),
            **({} if self.run is None else {"run": self.run.as_dict()}),
        }  # fmt: skip


def _steps_of(done: Diagnosis, explained: Sequence[str]) -> bool:
    """Return whether any finding that explains the message has a command."""
    rows = zip(done.findings, done.remedies, strict=True)
    return any(row.invocations for finding, row in rows if finding.id in explained)


_WORDS = {"error": "error", "warning": "warning", "info": "note"}


def _row(severity: Severity, text: str) -> ReportLine:
    word = _WORDS[severity]
    return ReportLine(severity, f"{word}: {text}", len(word))


def in_full(finding: Finding) -> str:
    """Format a finding with its place and offset, for readers who look for it in the file."""
    where = finding.where
    if finding.offset is not None:
        where = f"{where} @ {finding.offset:#x}".strip()
    return printable(": ".join(part for part in (finding.id, where, finding.message) if part))


def message_of(error: str | None, rows: tuple[LoadError, ...], findings: Sequence[Finding]) -> ErrorMessage | None:
    """Interpret the pasted message `error`, if there is one; `rows` are the load errors that it may be."""
    if error is None:
        return None
    # Only with a message are its parsers imported.
    from ckptfix.findings import message_names
    from ckptfix.ops.doctor import messages

    told = [finding for finding in findings if finding.about == TOLD]
    known = (finding for finding in findings if finding.about != BESIDE)
    explained = [finding.id for finding in told or known if told or set(errors_of(finding)) & set(rows)]
    meanings = [messages.meaning(row) for row in rows]
    names = message_names.listed(error)
    prefix = message_names.prefix(names)
    if prefix is not None:
        meanings[0] = prefix.meaning
    solved = any(finding.steps for finding in told)
    advice = _advice(rows, prefix, None if findings else names)
    return ErrorMessage(rows, tuple(meanings), tuple(dict.fromkeys(explained)), advice, solved)


def of_message(error: str) -> Diagnosis:
    """Interpret the pasted message `error` by itself, without the file."""
    from ckptfix.ops.doctor import messages

    message = message_of(error, messages.rows(error), ())
    return Diagnosis("", None, "a message", 0, (), ("the message",), message)


def _advice(
    rows: Sequence[LoadError], prefix: Prefix | None, names: Listed | None
) -> str | None:
    """Return the remedy of the row that is closest to the first of `rows`, for any file."""
    if prefix is not None:
        line = shell_line(Invocation(prefix.step, "FILE", "OUT").argv())
        return f"{line}; or in Python: ckptfix.load_into(model, FILE)"
    if names is not None and names.missing and names.unexpected:
        from ckptfix.ops.doctor import solve

        result = solve.solve(names.unexpected, names.missing, names.unexpected, complete=not names.shortened)
        if result.made.issuperset(names.missing):
            (one,) = fix_step("rename", subs=result.subs)
            return shell_line(Invocation(one, "FILE", "OUT").argv())
    about = [entry for entry in ENTRIES.values() if entry.fix and rows and rows[0] in entry.errors]
    nearest = min(about, key=lambda entry: (entry.errors.index(rows[0]), len(entry.errors)), default=None)
    return None if nearest is None or nearest.fix is None else readable(nearest.fix)


def explained(entry: FindingKind) -> dict[str, Any]:
    """Return a row of the table of findings as a JSON object; words such as FILE in a command are placeholders."""
    commands = [] if entry.fix is None or isinstance(entry.fix, str) else _readable(entry.fix)
    return {
        "id": entry.id,
        "severity": entry.severity,
        "title": entry.title,
        "story": entry.story,
        "load_errors": [error.id for error in entry.errors],
        "fix": commands[0] if commands else None,
        "fixes": commands,
        "advice": None if commands or entry.fix is None else readable(entry.fix),
    }


def readable(fix: Fix) -> str:
    """Return a remedy from the table as text, with words such as FILE and OUT as placeholders."""
    if not isinstance(fix, str):
        return " && ".join(map(" ".join, _readable(fix)))
    words = {"source": "FILE", "like": LIKE.value, "at": WHERE.value}
    fields = re.findall(r"\{(\w+)(?:!r)?\}", fix)
    outs = [field for field in dict.fromkeys(fields) if field not in words]
    words |= {field: "OUT" if field == outs[-1] else f"{field.upper()}_FILE" for field in outs}
    return re.sub(r"\{(\w+)(?:!r)?\}", lambda field: words[field[1]], fix)


def _readable(steps: Steps) -> list[list[str]]:
    """Return the command lines of `steps`, with words as placeholders for the names of their files."""
    made, source = [], "FILE"
    for number, step in enumerate(steps, 1):
        dest = "OUT" if number == len(steps) else f"{step.output_word.upper()}_FILE"
        made.append([*Invocation(step, source, dest).argv()])
        source = dest
    return made
