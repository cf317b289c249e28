"""Answers to options, commands and names that users know from other tools, or mistype: each names the right one."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import click

from ckptfix.cli.shared.console import GROUP
from ckptfix.command_table import COMMANDS, meant_by
from ckptfix.commands import word

MOST = 2
"""Commands that an answer names."""

MOST_NAMES = 10_000
"""Names in a folder that are compared with a mistyped one."""

_SED = re.compile(r"s(?P<mark>[/|#,])(?P<old>.+)(?P=mark)(?P<new>.*)(?P=mark)[gi]*")


_PAIRS = {"rename": "--sub", "set-metadata": "--set"}
"""Commands with an option that takes ``A=B`` -> the option."""


def wrong_option(error: click.NoSuchOption, command: str, ctx: click.Context) -> click.NoSuchOption:
    """Return the error for an option that `command` lacks: it names its own option, or the command that has it."""
    typed = error.option_name
    return click.NoSuchOption(typed, f"No such option '{typed}'.{_advice(error, command, ctx)}", ctx=ctx)


def _advice(error: click.NoSuchOption, command: str, ctx: click.Context) -> str:
    typed = error.option_name
    row = COMMANDS.get(command)
    own = dict(row.other_options).get(typed) if row is not None else None
    if row is not None and own is not None:
        shown = [line for line in row.all_examples if own.split()[0] in line.split()]
        return f" Use {own}{f': `{shown[0]}`' if shown else ''}."
    others = [
        f"`ckptfix {name}` has {dict(other.other_options)[typed]}"
        for name, other in COMMANDS.items() if typed in dict(other.other_options)
    ] or [f"`ckptfix {name}` has it" for name in _with_option(typed, ctx) if name != command]  # fmt: skip
    others = others or [f"`ckptfix {name}`?" for name in meant_by(typed.strip("-")) if name != command]
    near = error.possibilities or []
    if near and (not others or typed.startswith(near[0])):
        return f" Did you mean {' or '.join(sorted(near))}?"
    return f" {'; '.join(others[:MOST])}." if others else f" `ckptfix {command} --help` lists them."


def _with_option(typed: str, ctx: click.Context) -> list[str]:
    """List the commands that have an option; their modules are only imported for this answer."""
    group = GROUP.get()
    found = ((name, group.get_command(ctx, name)) for name in COMMANDS)
    return [name for name, one in found if one is not None and any(typed in param.opts for param in one.params)]


def substitution(typed: str) -> str | None:
    """Return the value of --sub for a command of sed; None for other text."""
    rule = _SED.fullmatch(typed)
    return None if rule is None else f"{rule['old']}={rule['new']}"


def third_name(command: str, others: Sequence[str]) -> str:
    """Return the message for the words after IN and OUT."""
    typed = others[0]
    rule = substitution(typed)
    if rule is None and command == "rename" and len(others) == MOST and not any(map(os.path.lexists, others)):
        rule = "=".join(others)
    if rule is not None:
        return f"Unexpected argument {typed!r}. A rule is an option: `ckptfix rename IN OUT --sub {word(rule)}`."
    option = _PAIRS.get(command)
    if option is not None and "=" in typed:
        return f"Unexpected argument {typed!r}. Give it as an option: {option} {word(typed)}."
    return (
        f"Unexpected argument {typed!r}: the first two names are IN and OUT. "
        "With --out-dir DIR every name is an input, and the outputs go to DIR."
    )


def near_names(path: str) -> list[str]:
    """Return files beside `path` with nearly its name; `path` does not exist."""
    folder, name = os.path.split(path)
    try:
        with os.scandir(folder or os.curdir) as entries:
            names = [entry.name for entry, _ in zip(entries, range(MOST_NAMES), strict=False)]
    except (OSError, ValueError):
        return []
    from difflib import get_close_matches

    return [os.path.join(folder, near) for near in get_close_matches(name, names, n=3, cutoff=0.75)]  # noqa: PTH118


_PLAINER = (
    (re.compile(r"is not a valid integer range\."), "is not a whole number."),
    (re.compile(r"is not a valid float range\."), "is not a number."),
    (re.compile(r"Got unexpected extra arguments? \((.*)\)"), r"Unexpected argument '\1'."),
)
"""Sentences of click, and plainer ones."""

_NOT_ONE_OF = re.compile(r"'(.*?)' is not one of ")


def reworded(text: str) -> str:
    """Return a message of click in plainer words."""
    for pattern, plain in _PLAINER:
        text = pattern.sub(plain, text)
    return text


def advice(error: click.UsageError, command: str | None) -> tuple[str, str | None]:
    """Return a sentence after the message of `error`, which may be empty, and the example that shows what is right.

    The example is None where the message itself names a command line.
    """
    typed = _NOT_ONE_OF.search(error.message)
    param = getattr(error, "param", None)
    if typed is not None and isinstance(param, click.Parameter) and isinstance(param.type, click.Choice):
        from difflib import get_close_matches

        near = get_close_matches(typed[1].lower(), [str(one) for one in param.type.choices], n=1)
        return (f" Did you mean {near[0]}?" if near else ""), None
    row = COMMANDS.get(command or "")
    if row is None or "`" in error.message or isinstance(error, click.NoSuchOption):
        return "", None
    wanted = set(param.opts) if isinstance(param, click.Option) else set()
    lines = [line for line in row.all_examples if not wanted or wanted & set(line.split())]
    # A command of a group has examples of its own.
    own = [line for line in lines if error.ctx is not None and f" {error.ctx.info_name} " in line]
    return "", next(iter(own or lines), None)
