"""ckptfix doctor."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ckptfix.cli import tables
from ckptfix.cli.common import FileName, at_option, reads
from ckptfix.cli.console import Console
from ckptfix.errors import printable

if TYPE_CHECKING:
    from ckptfix.checkpoint import Finding
    from ckptfix.ops.catalogue_row import Entry
    from ckptfix.ops.doctor import Diagnosis

SHOWN = 30
"""Findings in the table; --json has all."""


@reads(
    "doctor",
    click.Argument(["path"], metavar="FILE", required=False, type=FileName()),
    click.Option(
        ["--like"], metavar="TARGET", type=FileName(), help="The model: a checkpoint, keys.json, or module:factory."
    ),
    click.Option(["--error"], metavar="TEXT", help="The message that you got: which findings explain it?"),
    click.Option(["--fast"], is_flag=True, help="Read no tensor bytes: no checksums, no NaN, no zeros."),
    at_option(),
    click.Option(["--like-at"], metavar="PATH", help="The mapping of TARGET, where it has several."),
    click.Option(["--allow-import"], is_flag=True, help="Import module:factory, which runs its code."),
    click.Option(["--explain"], metavar="ID", help="Print the longer story of a finding, and stop."),
    example="ckptfix doctor model.pth --error 'failed finding central directory'",
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
    explain: str | None,
) -> int:
    """Say why FILE does not load, and the command that mends it.

    FILE may be a folder, or the index of a sharded checkpoint. It is read as text and never run. The first lines are
    what is wrong and what mends it; the exit code is 1 with findings and 0 without.
    """
    from ckptfix import diagnosis

    if explain is not None:
        return _explained(console, explain, diagnosis.explain(explain), diagnosis.ids())
    if path is None:
        raise click.UsageError("Missing argument 'FILE'.")
    done = diagnosis.doctor(
        path, like=like, error=error, fast=fast, at=at, like_at=like_at, allow_import=allow_import
    )
    if console.json:
        console.emit(done.as_dict())
    else:
        _show(console, done)
    return done.exit_code


def _explained(console: Console, id: str, entry: Entry | None, ids: tuple[str, ...]) -> int:
    if entry is None:
        from difflib import get_close_matches

        near = get_close_matches(id, ids, 3, 0.4)
        advice = f" Did you mean {' or '.join(near)}?" if near else ""
        raise click.UsageError(f"No finding is called {id!r}.{advice}")
    if console.json:
        console.emit(asdict(entry))
        return 0
    console.say(f"{entry.id} ({entry.severity}): {entry.title}")
    for line in _wrapped(entry.story):
        console.say(line)
    if entry.fix:
        console.say(f"what helps: {_readable(entry.fix)}")
    return 0


def _readable(template: str) -> str:
    """A command template with its fields as words."""
    for field in ("source", "like", "at"):
        template = template.replace(f"{{{field}}}", {"source": "FILE", "like": "TARGET", "at": "PATH"}[field])
    return template.replace("{", "").replace("}", "")


def _wrapped(text: str) -> list[str]:
    from textwrap import wrap

    return wrap(text, 100)


def _show(console: Console, done: Diagnosis) -> None:
    console.say(printable(done.sentence))
    cause = done.cause
    if cause is not None and cause.fix:
        console.say(_remedy(cause.fix))
    elif cause is not None and cause.severity == "error":
        console.say("no command mends it")
    if done.message is not None:
        _message(console, done)
    if done.findings:
        console.say()
        rows = [_row(finding) for finding in done.findings[:SHOWN]]
        console.say(tables.table(rows, ("severity", "finding", "where", "what")))
        if len(done.findings) > SHOWN:
            console.say(f"... {len(done.findings) - SHOWN:,} more findings (--json has all)")
        _others(console, done)
    if done.cause is not None or done.message is not None:
        console.say()
        console.say(f"looked at {', '.join(done.looked_at)}")


def _message(console: Console, done: Diagnosis) -> None:
    message = done.message
    assert message is not None
    if message.explained:
        console.say(f"the message is explained by {', '.join(message.explained)}")
    elif message.meanings:
        for meaning in message.meanings[:3]:
            console.say(f"such a message usually means: {meaning}")
    else:
        console.say("the message is none that ckptfix knows")


def _remedy(fix: str) -> str:
    return f"{'mend it: ' if fix.startswith('ckptfix ') else 'what helps: '}{printable(fix)}"


def _row(finding: Finding) -> tuple[str, str, str, str]:
    where = printable(finding.where)
    if finding.offset is not None:
        where = f"{where} @ {finding.offset:#x}".strip()
    return finding.severity, finding.id, where, printable(finding.message)


def _others(console: Console, done: Diagnosis) -> None:
    """The remedies that were not told first, each once; a mere note's only where the message is about it."""
    first = done.cause.fix if done.cause is not None else None
    explained = done.message.explained if done.message is not None else ()
    fixes: dict[str, str] = {}
    for finding in done.findings:
        if finding.fix and finding.fix != first and (finding.severity != "info" or finding.id in explained):
            fixes.setdefault(finding.fix, finding.id)
    if any(fix.startswith("ckptfix repair ") for fix in (first or "", *fixes)):
        # The other commands need a whole file, and would fail on this one.
        fixes = {fix: id for fix, id in fixes.items() if fix.startswith("ckptfix repair ")}
    if fixes:
        console.say()
        for fix, id in list(fixes.items())[:SHOWN]:
            console.say(f"{id}: {printable(fix)}")


