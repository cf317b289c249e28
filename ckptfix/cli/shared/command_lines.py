"""A command line for one input and its output: checked when it is planned, and parsed to the job that it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import click

from ckptfix.cli.shared.common import Verb
from ckptfix.cli.shared.console import GROUP
from ckptfix.cli.shared.one_job import Recording, perform
from ckptfix.command_table import COMMANDS
from ckptfix.errors import CkptfixError, printable
from ckptfix.io.write_log import reported
from ckptfix.runner.jobs import ConsoleSettings, Job, Outcome

_SETTINGS = ConsoleSettings(json=True, quiet=False, width=0, rows=False)


def verb_called(name: str) -> Verb:
    """Return the command `name`.

    Raises:
        click.UsageError: there is no such command, or it cannot run in a fleet.
    """
    row = COMMANDS.get(name)
    if row is None:
        raise click.UsageError(f"No such command {printable(name)!r} for a fleet.{_advice(name)}")
    if row.not_in_a_fleet:
        raise click.UsageError(f"{name} cannot run in a fleet: {row.not_in_a_fleet}.")
    group = GROUP.get()
    found = group.get_command(click.Context(group), name)
    if not isinstance(found, Verb):
        raise click.UsageError(f"{name} cannot run in a fleet: it is a group of commands.")
    return found


def _advice(name: str) -> str:
    from difflib import get_close_matches

    known = [row.name for row in COMMANDS.values() if not row.not_in_a_fleet]
    near = get_close_matches(name.lower().replace("_", "-"), known, n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def parsed(verb: Verb, words: Sequence[str], *, console: Recording | None = None) -> click.Context:
    """Return the context of ``VERB WORDS``, with the options of the verb parsed.

    Raises:
        click.UsageError: the words do not fit the verb.
    """
    console = Recording(_SETTINGS, None) if console is None else console
    return verb.make_context(f"ckptfix {verb.name}", [*words], obj=console)


def job_of(argv: Sequence[str]) -> Job | str:
    """Return the job that the command line `argv` is, or a sentence on why it cannot run in a fleet. Nothing is run."""
    console = Recording(_SETTINGS, None)
    try:
        verb = verb_called(argv[0])
        with parsed(verb, argv[1:], console=console) as ctx:
            return _job_of(verb, ctx, console, argv)
    except click.ClickException as error:
        return error.format_message()
    except click.exceptions.Exit:
        return "it asks for help, not for work"
    except CkptfixError as error:
        return error.message
    except (OSError, ValueError) as error:
        return f"its command line is not valid: {error}"


def _job_of(verb: Verb, ctx: click.Context, console: Recording, argv: Sequence[str]) -> Job | str:
    params = ctx.params
    if any(value == "-" or (isinstance(value, tuple) and "-" in value) for value in params.values()):
        return "- (a stream) cannot be shared by the jobs of a fleet"
    if verb.operands is not None and verb.operands.batch(verb, ctx) is not None:
        return "it has several inputs, or a folder of outputs"
    names = [
        params.get(str(param.name))
        for param in verb.params
        if isinstance(param, click.Argument) and getattr(param.type, "dash", None) == "input"
    ]
    first = names[0] if names else None
    if isinstance(first, tuple):
        first = first[0] if len(first) == 1 else None
    more = [isinstance(name, tuple) for name in names[1:]]
    # With --output, the word in OUT's position is an input too.
    if any(more) and (any(names[1:]) or (params.get("output") and params.get("dest"))):
        return "it has several inputs"
    writes = [first] if params.get("in_place") and first is not None else outputs_of(verb, params)
    if "dest" in params and not writes and not any(params.get(name) for name in WITHOUT):
        return "it does not name its output"
    return Job(
        command=str(verb.name),
        input=first,
        outputs=tuple(writes),
        options=params,
        words=tuple(argv),
        record=console.record,
        settings=dataclasses.replace(_SETTINGS, quiet=console.quiet),
    )


WITHOUT = ("dry_run", "check_only", "report", "rules_file")
"""Parameters of writing commands that make an output unnecessary."""


def outputs_of(verb: Verb, params: Mapping[str, Any]) -> list[str]:
    """Return the names of outputs among the parameters, the main one first."""
    main = params.get("output") if params.get("output") is not None else params.get("dest")
    others = [
        params[str(param.name)]
        for param in verb.params
        if getattr(param.type, "dash", None) == "output" and param.name not in ("output", "dest")
    ]
    if any(params.get(name) for name in ("dry_run", "check_only")):
        return []
    return [name for name in (main, *others) if name]


def done(job: Job, replace: Literal["no", "yes", "keep"] = "no", allow_import: bool = False) -> Outcome:
    """Do a job of a fleet.

    Args:
        replace: whether to replace an existing output; "keep" keeps the old one as ``--backup`` does.
        allow_import: allow importing ``module:factory``; the command line itself cannot ask for that.
    """
    options = dict(job.options)
    if "allow_import" in options:
        options["allow_import"] = allow_import
    if replace != "no" and "force" in options and not options.get("in_place"):
        options["force"] = True
        if replace == "keep" and "backup" in options:
            options["backup"] = True
    outcome = perform(dataclasses.replace(job, options=options))
    reported(outcome.written)
    return outcome
