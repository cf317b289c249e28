"""ckptfix rename."""

from __future__ import annotations

import re

import click

from ckptfix.cli.shared.common import FileName, Written, writes
from ckptfix.cli.shared.options import at_option, in_place_option, link_option
from ckptfix.ops import rename
from ckptfix.ops.writing import How


@writes(
    "rename",
    click.Option(
        ["--sub", "subs"],
        metavar="REGEX=REPLACEMENT",
        multiple=True,
        help="Replace every match of REGEX in a name; \\1 is its first group. Repeatable, applied in order. "
        "Write \\= for an equals sign in REGEX.",
    ),
    click.Option(
        ["--map", "map_file"],
        metavar="FILE",
        type=FileName(),
        help="Names to change, after --sub: a JSON object, or a line `old new` or `old -> new` each. # begins a "
        "comment. Placeholders make a line a rule: {n} is a number, {n-1} the one before, {*} the rest of a name. "
        "Lines may also split, join and turn tensors: see `ckptfix help rules`.",
    ),
    click.Option(["--reverse"], is_flag=True, help="Run the file of --map backwards."),
    at_option(),
    in_place_option(),
    link_option(),
    example=r"ckptfix rename old.pth new.pth --sub '^backbone\.=' --sub 'gamma$=weight'",
)
def command(
    source: str,
    dest: str | None,
    how: How,
    *,
    subs: tuple[str, ...],
    map_file: str | None,
    reverse: bool,
    at: str | None,
) -> Written:
    """Write OUT: IN with its names changed by rule.

    In a state dict no two keys may end up with the same name: then nothing is written. A rule that matched no name is
    reported.
    """

    if not subs and not map_file:
        raise click.UsageError("Nothing to rename by: give --sub or --map.")
    if reverse and not map_file:
        raise click.UsageError("--reverse runs a file backwards: give --map.")
    pairs = [split_substitution(text) for text in subs]
    return rename.rename(source, dest, subs=pairs, rules=map_file, reverse=reverse, at=at, **how.keywords())


def split_substitution(text: str) -> tuple[str, str]:
    """``REGEX=REPLACEMENT`` at its first ``=`` without a backslash before it.

    Raises:
        click.BadParameter: there is none, or nothing before it.
    """
    match = re.match(r"((?:[^\\=]|\\.)+)=(.*)", text, re.DOTALL)
    if match is None:
        raise click.BadParameter(f"{text!r} is not REGEX=REPLACEMENT.", param_hint="--sub")
    return match[1], match[2]
