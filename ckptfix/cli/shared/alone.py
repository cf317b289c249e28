"""A command line for one input and its output: checked when it is planned, done in whatever process it is sent to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import click

from ckptfix.cli.shared.common import Verb
from ckptfix.cli.shared.many import Outcome, Recording, Settings, one
from ckptfix.cli.shared.ranks import ALONE
from ckptfix.errors import CkptfixError, printable
from ckptfix.io.written import reported

NOT_IN_A_FLEET = {
    "fleet": "it is the fleet itself",
    "help": "it works on no file",
    "completion": "it works on no file",
    "git": "it is for git",
    "browse": "it is a screen for a person",
    "ls": "it makes one list of all: `ckptfix ls -r FOLDER`",
    "undo": "what it takes back is remembered beside each file, and a plan must not ask for that",
    "average": "it makes one output of several inputs",
    "merge": "it makes one output of several inputs",
}
"""Commands that mean nothing on one file of many, and why."""

_SETTINGS = Settings(json=True, quiet=False, width=0, rows=False)


def verb_called(name: str) -> Verb:
    """The command `name`.

    Raises:
        click.UsageError: there is none, or it is not one for a fleet.
    """
    known = _group().list_commands(click.Context(_group()))
    if name in NOT_IN_A_FLEET:
        raise click.UsageError(f"{name} cannot be done by a fleet: {NOT_IN_A_FLEET[name]}.")
    if name not in known:
        raise click.UsageError(f"No such command {printable(name)!r} for a fleet.{_advice(name, known)}")
    found = _group().get_command(click.Context(_group()), name)
    if not isinstance(found, Verb):
        raise click.UsageError(f"{name} cannot be done by a fleet: it is several commands.")
    return found


def _group() -> click.Group:
    """The group of all commands, above this room: found by name, as each of them is."""
    group: click.Group = import_module("ckptfix.cli").commands
    return group


def _advice(name: str, known: Sequence[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name.lower().replace("_", "-"), [*{*known} - {*NOT_IN_A_FLEET}], n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def parsed(verb: Verb, words: Sequence[str], console: Recording | None = None) -> click.Context:
    """The context of ``VERB WORDS``, whose options are those of the verb.

    Raises:
        click.UsageError: they are not.
    """
    console = Recording(_SETTINGS, None) if console is None else console
    console.command = verb.name
    console.arguments = [str(verb.name), *words]
    return verb.make_context(f"ckptfix {verb.name}", [*words], obj=console)


@dataclass(frozen=True, slots=True)
class Uses:
    """What a command line works with.

    Attributes:
        reads: its input; None where it names none.
        writes: its outputs; its input, for an edit in place.
        imports: it asks for ``module:factory`` to be imported.
    """

    reads: str | None
    writes: tuple[str, ...]
    imports: bool


def uses(argv: Sequence[str]) -> Uses | str:
    """What the command line `argv` works with; a sentence on why it is none for a fleet. Nothing is done."""
    try:
        verb = verb_called(argv[0])
        with parsed(verb, argv[1:]) as ctx:
            return _uses(verb, ctx)
    except click.ClickException as error:
        return error.format_message()
    except click.exceptions.Exit:
        return "it asks for help, and not for work"
    except CkptfixError as error:
        return error.message
    except (OSError, ValueError) as error:
        return f"its command line cannot be read: {error}"


def _uses(verb: Verb, ctx: click.Context) -> Uses | str:
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
    # With --output, what is in the place of OUT is an input too.
    if any(more) and (any(names[1:]) or (params.get("output") and params.get("dest"))):
        return "it has several inputs"
    writes = [first] if params.get("in_place") and first is not None else outputs_of(verb, params)
    if "dest" in params and not writes and not any(params.get(name) for name in WITHOUT):
        return "it writes an output that it does not name"
    return Uses(first, tuple(writes), bool(params.get("allow_import")))


WITHOUT = ("dry_run", "check_only", "report", "rules_file")
"""Parameters of commands that write, with which they need no output."""


def outputs_of(verb: Verb, params: Mapping[str, Any]) -> list[str]:
    """The names of outputs among the parameters, the main one first."""
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
    """Do the command line `argv`, which has one input and its output; errors become its outcome.

    Args:
        replace: whether an output that exists is replaced; with "keep" the old one gets another name.
        allow_import: ``module:factory`` may be imported; the command line itself cannot ask for that.
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
