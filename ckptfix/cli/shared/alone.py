"""A command line for one input and its output: checked when it is planned, done in whatever process it is sent to."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Literal

import click

from ckptfix.cli.shared.common import Verb
from ckptfix.cli.shared.many import Outcome, Recording, Settings, one
from ckptfix.cli.shared.ranks import ALONE
from ckptfix.errors import printable
from ckptfix.io.written import reported

NOT_IN_A_FLEET = {
    "fleet": "it is the fleet itself",
    "help": "it works on no file",
    "completion": "it works on no file",
    "git": "it is for git",
    "browse": "it is a screen for a person",
    "ls": "it makes one list of all: `ckptfix ls -r FOLDER`",
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


def done(
    argv: Sequence[str], input: str, output: str | None, replace: Literal["no", "yes", "keep"] = "no"
) -> Outcome:
    """Do the command line `argv`, which has one input and its output; errors become its outcome.

    Args:
        replace: whether an output that exists is replaced; with "keep" the old one gets another name.
    """
    console = Recording(_SETTINGS, None)

    def work(**_: object) -> int:
        with parsed(verb_called(argv[0]), argv[1:], console) as ctx:
            ctx.meta[ALONE] = True
            params = ctx.params
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
