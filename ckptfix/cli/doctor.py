"""ckptfix doctor."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from ckptfix.cli.shared import reports, tables, values
from ckptfix.cli.shared.colors import SEVERITIES
from ckptfix.cli.shared.common import FileName, MessageType, files_argument, reads
from ckptfix.cli.shared.console import Console
from ckptfix.cli.shared.one_job import Recording
from ckptfix.cli.shared.operands import Inputs, search_options
from ckptfix.cli.shared.options import at_option, like_at_option
from ckptfix.cli.shared.terminal_width import wrapped
from ckptfix.commands import command as line_of
from ckptfix.errors import printable
from ckptfix.runner.jobs import TROUBLE, Outcome, Summary
from ckptfix.words import plural

if TYPE_CHECKING:
    from ckptfix.cli.shared.batch import Batch
    from ckptfix.findings.row import FindingKind
    from ckptfix.ops.doctor.report import Diagnosis, FailOn

SHOWN = 30
"""Rows shown on a terminal when several files are listed."""

NAMES = 4
"""Names per line on a terminal; a pipe and -v show all of them."""


class _Problems:
    """The inputs with problems: a summary line, a table, and the commands that fix each."""

    def __init__(self, console: Console, batch: Batch) -> None:
        self._console = console
        self._unread = " Only headers were checked." if batch.options.get("brief") else ""
        self._rows: list[tuple[str, str, str, str]] = []
        self._remedies: list[str] = []

    def add(self, name: str, outcome: Outcome) -> bool:
        if outcome.row is not None:
            severity, id, sentence, remedy = outcome.row
            self._rows.append((severity, id, name, sentence))
            self._remedies += [remedy] if remedy else []
        elif outcome.code == TROUBLE:
            self._rows.append(("error", "", name, outcome.notes[0].removeprefix(f"{name}: ")))
        return not (self._console.json or self._console.quiet)

    def end(self, summary: Summary) -> None:
        console, rows = self._console, self._rows
        broken = sum(row[0] == "error" for row in rows)
        warned = f", {len(rows) - broken:,} with warnings" if len(rows) > broken else ""
        good = summary.ended - len(rows)
        line = f"{plural(summary.ended, 'file')}: {broken:,} with errors{warned}, {good:,} without problems."
        console.prose(line + self._unread)
        if rows:
            console.say()
            limit = console.rows(None, SHOWN) or len(rows)
            for row in _listed(rows[:limit], console.width, "file"):
                console.say(row)
            if len(rows) > limit:
                console.say(f"... {len(rows) - limit:,} more (a pipe gets all)")
            console.say()
        remedies = list(dict.fromkeys(self._remedies))
        limit = console.rows(None, SHOWN) or len(remedies)
        for line in remedies[:limit]:
            (console.say if line.startswith("Fix: ") else console.prose)(printable(line))
        if len(remedies) > limit:
            console.say(f"... {len(remedies) - limit:,} more commands (a pipe gets all)")


_INPUTS = Inputs("path", _Problems)


def _row_of(done: Diagnosis) -> tuple[str, str, str, str] | None:
    """Return severity, finding, sentence and remedy for the list of several files; None without a problem."""
    if done.cause is None:
        return None
    advice = f"Try: {done.advice}" if done.advice is not None else ""
    remedy = f"Fix: {line_of('fix', done.path)}" if done.fixes else advice
    return done.cause.severity, done.cause.id, printable(done.sentence), remedy


@reads(
    "doctor",
    files_argument("path", "[FILE...]", required=False),
    click.Option(
        ["--like"], metavar="TARGET", type=FileName(), help="The model: a checkpoint, keys.json, or module:factory."
    ),
    click.Option(
        ["--error"], metavar="TEXT", type=MessageType(),
        help="The error message you saw, or a file with it (- for stdin); findings that explain it come first.",
    ),
    click.Option(["--fast"], is_flag=True, help="Read no tensor bytes: skip checksums, NaN and zeros."),
    at_option(),
    like_at_option(),
    click.Option(["--allow-import"], is_flag=True, help="Allow importing module:factory, which runs its code."),
    click.Option(
        ["--fail-on"], metavar="LEVEL", type=click.Choice(["error", "warning", "never"]), default="error",
        show_default=True, help="Findings that make the exit code 1. LEVEL is error, warning or never.",
    ),
    click.Option(
        ["--explain"], metavar="ID", shell_complete=values.findings, help="Explain a finding in detail, and stop."
    ),
    click.Option(["-v", "--verbose"], is_flag=True, help="List every finding separately, with its place in the file."),
    *reports.html_options(),
    *search_options(),
    operands=_INPUTS,
)
def command(
    console: Console,
    *,
    path: str | None,
    like: str | None,
    error: str | None,
    fast: bool,
    at: str | None,
    like_at: str | None,
    allow_import: bool,
    fail_on: FailOn,
    explain: str | None,
    verbose: bool,
    html: str | None,
    force: bool,
    brief: bool = False,
) -> int:
    """Explain why FILE does not load, and which commands fix it.

    FILE may be a folder, the index of a sharded checkpoint, or - for standard input; with --error you can leave it out.
    With several files, or a folder of checkpoints, those with problems are listed. For a folder with the checkpoints of
    a training run, the one to resume from is named; only their headers are read. Files are read as text and never run.

    The first lines name the problem and the commands that fix it; each command reads the output of the one before it.
    The exit code is 1 if there is an error: damage, content that weights_only=True refuses, a mismatch with --like, or
    a file that is not a checkpoint. Devices and wrapper prefixes are only warnings.
    """
    from ckptfix.ops import doctor

    if explain is not None:
        return _explained(console, explain, doctor.explain(explain), doctor.ids())
    html = reports.checked(html, (path,), force=force)
    short, inspection = False, None
    if path is None:
        if error is None:
            raise click.UsageError("FILE is required unless you use --error or --explain.")
        done = doctor.message(error)
    else:
        short = brief and like is None and error is None and at is None and not isinstance(console, Recording)
        with console.progress() as progress:
            if short:
                from ckptfix.ops.verdict import verdict

                done, inspection = verdict(path)
            else:
                done = doctor.doctor(
                    path, like=like, error=error, fast=fast, at=at, like_at=like_at, allow_import=allow_import,
                    progress=progress,
                )  # fmt: skip
            short = short and done.run is None
        if not isinstance(console, Recording) and (inside := doctor.inside(done)):
            from ckptfix.cli.shared.batch import run

            ctx = click.get_current_context()
            return run(_INPUTS.of(ctx.command, ctx, inside), console)
    if html is not None:
        reports.write(console, html, (path,), lambda line: done.to_html(command=line), force=force)
    console.row = _row_of(done)
    code = done.exit_code(fail_on)
    if console.json:
        console.emit(done.as_dict(), code)
    elif short:
        from ckptfix.cli import verdict as shown

        shown.show(console, done, inspection, verbose=verbose)
    else:
        _show(console, done, verbose)
    reports.say(console, html)
    return code


def _explained(console: Console, id: str, entry: FindingKind | None, ids: tuple[str, ...]) -> int:
    if entry is None:
        from difflib import get_close_matches

        near = get_close_matches(id, ids, 3, 0.4)
        advice = f" Did you mean {' or '.join(near)}?" if near else " `ckptfix help findings` lists them."
        raise click.UsageError(f"No finding is called {id!r}.{advice}")
    if console.json:
        from ckptfix.ops.doctor.report import explained

        console.emit(explained(entry), 0)
        return 0
    console.prose(f"{entry.id} ({entry.severity}): {entry.title}")
    for line in textwrap.wrap(entry.story, min(console.width or 100, 100), break_on_hyphens=False):
        console.say(line)
    if entry.fix:
        from ckptfix.ops.doctor.report import readable

        console.say(f"Fix: {readable(entry.fix)}")
    return 0


def _show(console: Console, done: Diagnosis, verbose: bool) -> None:
    for line in done.lines(console.rows(None, NAMES), verbose=verbose):
        if line.kind == "command":
            # Commands stay on one line, however long, so that they can be pasted.
            label = line.text.find(": ") + 2
            console.say(line.text, *(("fix", -label) if label > 1 else ()))
        else:
            console.prose(line.text, SEVERITIES.get(line.kind), line.label)


def _listed(rows: Sequence[tuple[str, str, str, str]], width: int, place: str = "where") -> Iterator[str]:
    """Yield the findings as a table, or as one paragraph each if the terminal is too narrow."""
    table = tables.table(rows, ("severity", "finding", place, "message")).splitlines()
    if not width or max(map(len, table)) <= width:
        yield from table
        return
    for severity, id, where, what in rows:
        what_and_where = f"{id} at {where}" if id and where else id or where
        yield from wrapped(f"{severity}: {what_and_where}", width)
        yield from wrapped(f"    {what}", width)
