"""Answers to options, commands and names that users know from other tools, or mistype: each names the right one."""

from __future__ import annotations

import os
import re

import click

from ckptfix.cli.shared.console import GROUP
from ckptfix.command_table import COMMANDS, meant_by
from ckptfix.commands import word

MOST = 2
"""Commands that an answer names."""

MOST_NAMES = 10_000
"""Names in a folder that are compared with a mistyped one."""

_SED = re.compile(r"s(?P<mark>[/|#,])(?P<old>.+)(?P=mark)(?P<new>.*)(?P=mark)[gi]*")


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


def third_name(command: str, typed: str) -> str:
    """Return the message for a word after IN and OUT."""
    rule = _SED.fullmatch(typed)
    if rule is not None:
        line = word(f"{rule['old']}={rule['new']}")
        return f"Unexpected argument {typed!r}. A rule is an option: `ckptfix rename IN OUT --sub {line}`."
    if command == "rename" and "=" in typed:
        return f"Unexpected argument {typed!r}. A rule is an option: --sub {word(typed)}."
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
