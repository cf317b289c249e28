"""ckptfix doctor."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, TypedDict

import click

from ckptfix.cli.shared import tables
from ckptfix.cli.shared.common import FileName, at_option, reads
from ckptfix.cli.shared.console import Console
from ckptfix.cli.shared.exits import TROUBLE, describe
from ckptfix.cli.shared.fit import wrapped
from ckptfix.commands import command as line_of
from ckptfix.errors import CkptfixError, printable
from ckptfix.words import plural

if TYPE_CHECKING:
    from typing import Unpack

    from ckptfix.findings.row import Entry
    from ckptfix.ops.doctor.report import Diagnosis

MOST_TEXT = 4 << 20
"""Characters of a message that are read."""

NAMES = 4
"""Names that one line lists on a terminal; a pipe gets all of them, and so does -v."""


@reads(
    "doctor",
    click.Argument(["paths"], metavar="[FILE ...]", nargs=-1, required=False, type=FileName()),
    click.Option(
        ["--like"], metavar="TARGET", type=FileName(), help="The model: a checkpoint, keys.json, or module:factory."
    ),
    click.Option(
        ["--error"], metavar="TEXT",
        help="The error message you saw: what explains it is listed first. - reads it from stdin, @PATH from a file.",
    ),
    click.Option(["--fast"], is_flag=True, help="Read no tensor bytes: no checksums, no NaN, no zeros."),
    at_option(),
    click.Option(["--like-at"], metavar="PATH", help="The mapping of TARGET, where it has several."),
    click.Option(["--allow-import"], is_flag=True, help="Import module:factory, which runs its code."),
    click.Option(
        ["--fail-on"], type=click.Choice(["error", "warning", "never"]), default="error", show_default=True,
        help="The least serious finding that makes the exit code 1.",
    ),
    click.Option(["--explain"], metavar="ID", help="Explain a finding in detail, and stop."),
    click.Option(["-v", "--verbose"], is_flag=True, help="List every finding by itself, with its place in the file."),
    example="ckptfix doctor model.pth --error 'failed finding central directory'",
)
def command(
    console: Console,
    *,
    paths: tuple[str, ...],
    like: str | None,
    error: str | None,
    fast: bool,
    at: str | None,
    like_at: str | None,
    allow_import: bool,
    fail_on: str,
    explain: str | None,
    verbose: bool,
) -> int:
    """Say why FILE does not load, and which commands fix it.

    FILE may be a folder, or the index of a sharded checkpoint; with --error it may be left out. Of several files, and
    of a folder of checkpoints, those that have problems are listed. They are read as text and never run.

    The first lines say what is wrong and what fixes it: of several commands, each reads what the one before it wrote.
    The exit code is 1 with an error: damage, what weights_only=True refuses, a misfit with --like, or a file that is
    not a checkpoint. Devices and names of wrappers are warnings.
    """
    from ckptfix.ops import doctor

    if explain is not None:
        return _explained(console, explain, doctor.explain(explain), doctor.ids())
    error = None if error is None else _text(error)
    options: Options = {"like": like, "fast": fast, "at": at, "like_at": like_at, "allow_import": allow_import}
    if not paths and error is None:
        raise click.UsageError("FILE is required unless you use --error or --explain.")
    if len(paths) > 1:
        return _several(console, paths, fail_on, error=error, **options)
    if not paths:
        done = doctor.message(error or "")
    else:
        with console.progress() as progress:
            done = doctor.doctor(paths[0], error=error, progress=progress, **options)
    if inside := doctor.inside(done):
        return _several(console, inside, fail_on, error=error, **options)
    if console.json:
        console.emit(done.as_dict())
    else:
        _show(console, done, verbose)
    return done.exit_code(fail_on)


class Options(TypedDict):
    """What every file is judged with."""

    like: str | None
    fast: bool
    at: str | None
    like_at: str | None
    allow_import: bool


def _several(
    console: Console, paths: Sequence[str], fail_on: str, *, error: str | None, **options: Unpack[Options]
) -> int:
    """Judge files one by one, and list those that have problems; the exit code of the worst."""
    from ckptfix.ops import doctor

    codes: list[int] = []
    rows: list[tuple[str, str, str, str]] = []
    remedies: list[str] = []
    documents: list[Mapping[str, object]] = []
    for path in paths:
        try:
            with console.progress() as progress:
                done = doctor.doctor(path, error=error, progress=progress, **options)
        except CkptfixError as trouble:
            codes.append(TROUBLE)
            rows.append(("error", "", printable(path), printable(trouble.message)))
            documents.append({"path": path, "error": describe(trouble)})
            continue
        codes.append(done.exit_code(fail_on))
        documents.append(done.as_dict())
        if done.cause is not None:
            rows.append((done.cause.severity, done.cause.id, printable(path), printable(done.sentence)))
            if done.fixes:
                remedies.append(f"Fix: {line_of('fix', path)}")
            elif done.advice is not None:
                remedies.append(f"Try: {done.advice}")
    if console.json:
        console.emit({"files": documents})
        return max(codes)
    broken = sum(row[0] == "error" for row in rows)
    warned = f", {len(rows) - broken:,} with warnings" if len(rows) > broken else ""
    good = len(paths) - len(rows)
    console.prose(f"{plural(len(paths), 'file')}: {broken:,} with errors{warned}, {good:,} without problems.")
    if rows:
        console.say()
        for row in _listed(rows, console.width, "file"):
            console.say(row)
        console.say()
    for line in dict.fromkeys(remedies):
        (console.say if line.startswith("Fix: ") else console.prose)(printable(line))
    return max(codes)


def _text(error: str) -> str:
    """The message itself, from stdin for ``-``, or from a file for ``@FILE``."""
    if error == "-":
        return sys.stdin.read(MOST_TEXT)
    if error.startswith("@"):
        with open(error[1:], encoding="utf-8", errors="replace") as stream:
            return stream.read(MOST_TEXT)
    return error


def _explained(console: Console, id: str, entry: Entry | None, ids: tuple[str, ...]) -> int:
    if entry is None:
        from difflib import get_close_matches

        near = get_close_matches(id, ids, 3, 0.4)
        advice = f" Did you mean {' or '.join(near)}?" if near else ""
        raise click.UsageError(f"No finding is called {id!r}.{advice}")
    if console.json:
        console.emit(asdict(entry))
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
            # One line, however long: it is there to be pasted.
            console.say(line.text, "fix")
        else:
            console.prose(line.text, "damage" if line.kind == "error" else None, line.label)


def _listed(rows: Sequence[tuple[str, str, str, str]], width: int, place: str = "where") -> Iterator[str]:
    """The findings as a table, or a paragraph each where the terminal is too narrow for the table."""
    table = tables.table(rows, ("severity", "finding", place, "what")).splitlines()
    if not width or max(map(len, table)) <= width:
        yield from table
        return
    for severity, id, where, what in rows:
        what_and_where = f"{id} at {where}" if id and where else id or where
        yield from wrapped(f"{severity}: {what_and_where}", width)
        yield from wrapped(f"    {what}", width)
