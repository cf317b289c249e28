"""A command line for one input and its output: checked when it is planned, then run in any process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import click

from ckptfix.cli.shared.batch import ConsoleSettings, Recording, one
from ckptfix.cli.shared.common import Verb
from ckptfix.cli.shared.console import GROUP
from ckptfix.cli.shared.ranks import ALONE
from ckptfix.command_table import COMMANDS
from ckptfix.errors import CkptfixError, printable
from ckptfix.io.write_log import reported
from ckptfix.runner.jobs import Outcome

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


def parsed(verb: Verb, words: Sequence[str], console: Recording | None = None) -> click.Context:
    """Return the context of ``VERB WORDS``, with the options of the verb parsed.

    Raises:
        click.UsageError: the words do not fit the verb.
    """
    console = Recording(_SETTINGS, None) if console is None else console
    console.command = verb.name
    console.arguments = [str(verb.name), *words]
    return verb.make_context(f"ckptfix {verb.name}", [*words], obj=console)


@dataclass(frozen=True, slots=True)
class LineUses:
    """The files and permissions that a command line needs.

    Attributes:
        reads: its input; None if it names no input.
        writes: its outputs; for an in-place edit, its input.
        imports: it asks to import ``module:factory``.
    """

    reads: str | None
    writes: tuple[str, ...]
    imports: bool


def uses(argv: Sequence[str]) -> LineUses | str:
    """Return what the command line `argv` uses, or a sentence on why it cannot run in a fleet. Nothing is run."""
    try:
        verb = verb_called(argv[0])
        with parsed(verb, argv[1:]) as ctx:
            return _uses(verb, ctx)
    except click.ClickException as error:
        return error.format_message()
    except click.exceptions.Exit:
        return "it asks for help, not for work"
    except CkptfixError as error:
        return error.message
    except (OSError, ValueError) as error:
        return f"its command line is not valid: {error}"


def _uses(verb: Verb, ctx: click.Context) -> LineUses | str:
    params = ctx.params
    if any(value == "-" or (isinstance(value, tuple) and "-" in value) for value in params.values()):
        return "- (a stream) cannot be shared by the jobs of a fleet"
    if verb.operands is not None and verb.operands.job(verb, ctx) is not None:
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
    return LineUses(first, tuple(writes), bool(params.get("allow_import")))


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


def done(
    argv: Sequence[str],
    input: str,
    output: str | None,
    replace: Literal["no", "yes", "keep"] = "no",
    allow_import: bool = False,
) -> Outcome:
    """Run the command line `argv`, which has one input and its output; errors become its outcome.

    Args:
        replace: whether to replace an existing output; "keep" renames the old one.
        allow_import: allow importing ``module:factory``; the command line itself cannot ask for that.
    """
    console = Recording(_SETTINGS, None)

    def work(**_: object) -> int:
        with parsed(verb_called(argv[0]), argv[1:], console) as ctx:
            ctx.meta[ALONE] = True
            params = ctx.params
            if "allow_import" in params:
                params["allow_import"] = allow_import
            if replace != "no" and "force" in params and not params.get("in_place"):
                params["force"] = True
                if replace == "yes" and params.get("output") is None:
                    params["output"], params["dest"] = params["dest"], None
                elif replace == "keep" and params.get("dest") is None:
                    params["dest"], params["output"] = params["output"], None
            assert isinstance(ctx.command, Verb)
            return ctx.command.invoke(ctx)

    outcome = one(work, "input", {"input": input, "dest": output}, console)
    reported(outcome.written)
    return outcome
