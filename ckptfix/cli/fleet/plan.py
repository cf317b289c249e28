"""ckptfix fleet plan."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from typing import Any

import click

from ckptfix.cli.shared.common import Verb, output_options
from ckptfix.cli.shared.console import Console, pass_console
from ckptfix.cli.shared.tables import size
from ckptfix.commands import command, quoted
from ckptfix.fleet.bounds import root_options
from ckptfix.urls import secrets
from ckptfix.words import plural

WORDS = "ckptfix.fleet.words"
"""Key in the context's meta: the words after ``--``."""

PLAN = "plan.jsonl"
"""Assumed name of a plan that goes to a pipe, in the current folder."""


class PlanCommand(Verb):
    """A command line that contains another command after ``--``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[WORDS] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "[OPTIONS] NAME... -- VERB ARGS > PLAN")

    def invoke(self, ctx: click.Context) -> Any:
        return click.Command.invoke(self, ctx)  # - is a list of names here, not a checkpoint


@pass_console
def _plan(console: Console, *, names: tuple[str, ...], out_dir: str | None, recursive: bool) -> int:
    """Write a plan to stdout, one line of JSON per job.

    Each line has the input, output and command line of its job.

    NAME is a checkpoint, a folder (with -r all checkpoints below it), a quoted pattern, or a list: a text file with
    one name per line, or - for standard input. Write the command after --, without its inputs. Outputs go to --out-dir
    under the names of their inputs, or where a template puts them: {stem}, {name}, {suffix} and {parent} are parts of
    the input's name.

    Only the plan is written. A command that cannot run in a fleet, wrong options, and outputs with the same name are
    refused.
    """
    from ckptfix.cli.shared.fleets import jobs

    words = click.get_current_context().meta[WORDS]
    if not words:
        raise click.UsageError("Missing command: write it after the names and --, as in ... -- doctor --fast")
    if not names:
        raise click.UsageError("Missing argument 'NAME...'.")
    count = total = missing = hidden = 0
    outputs: list[str] = []
    planned = jobs(names, words, out_dir=out_dir, recursive=recursive)
    secret = secrets()
    for job in planned:
        console.data(job.line())
        outputs += [] if job.output is None else [job.output]
        count, total, missing = count + 1, total + job.bytes, missing + (job.identity is None)
        hidden += bool(secret) and any(word in secret or word.partition("=")[2] in secret for word in job.argv)
    if not console.quiet:
        console.note(f"{plural(count, 'job')}, {size(total)} of inputs")
    if hidden:
        console.note(f"a plan holds no secrets: {plural(hidden, 'job')} will ask for a URL without its password or "
            "signature")  # fmt: skip
    if missing:
        console.note(f"{plural(missing, 'input')} not found: the jobs will fail")
    place = _place()
    if roots := root_options(place or PLAN, outputs):
        run = f"{command('fleet', 'run')} {quoted(place)} {roots}" if place else f"run `ckptfix fleet run` with {roots}"
        console.note(f"outputs are outside the folder of the plan: {run}")
    return 0


def _place() -> str | None:
    """Return the file that the plan goes to, if the system names it; None for a pipe or a terminal."""
    with contextlib.suppress(OSError, ValueError):
        number = sys.stdout.fileno()
        name = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115
        if stat.S_ISREG(os.fstat(number).st_mode) and os.path.samestat(os.stat(name), os.fstat(number)):  # noqa: PTH116
            return os.path.relpath(name) if os.path.dirname(name) == os.getcwd() else name  # noqa: PTH109, PTH120
    return None


plan = PlanCommand(
    "plan",
    params=[
        click.Argument(["names"], metavar="NAME...", nargs=-1, required=False),
        click.Option(["--out-dir"], metavar="DIR", help="Folder for the outputs, under the names of their inputs."),
        click.Option(["-r", "--recursive"], is_flag=True, help="Search folders for checkpoints."),
        next(option for option in output_options() if option.name == "quiet"),
    ],
    callback=_plan,
    help=_plan.__doc__,
    example="ckptfix fleet plan 'runs/**/*.pth' -- to-cpu -o 'cpu/{parent}/{name}' > plan.jsonl",
)
