"""ckptfix rename."""

from __future__ import annotations

import re

import click

from ckptfix.cli.shared.common import FileName, Written, writes
from ckptfix.cli.shared.options import allow_unmatched_option, at_option, in_place_option, link_option, names_options
from ckptfix.commands import word
from ckptfix.ops import rename
from ckptfix.ops.writing import WriteOptions


@writes(
    "rename",
    click.Option(
        ["--sub", "subs"],
        metavar="REGEX=REPLACEMENT",
        multiple=True,
        help="Replace every match of REGEX in a key; \\1 is its first group. Repeatable, applied in order. "
        "Write \\= for an equals sign in REGEX.",
    ),
    click.Option(
        ["--map", "map_file"],
        metavar="FILE",
        type=FileName(),
        help="Keys to rename, after --sub: a JSON object, or lines `old new` or `old -> new`. # begins a "
        "comment. Placeholders turn a line into a rule: {n} is a number, {n-1} the one before, {*} the rest of a key. "
        "Lines may also split, join and transpose tensors: see `ckptfix help rules`.",
    ),
    click.Option(
        ["--line", "lines"], metavar="LINE", multiple=True,
        help="A line of such a file. Repeatable; without --map. Example: 'fc.weight -> fc.weight | rows to=1000'.",
    ),
    click.Option(["--reverse"], is_flag=True, help="Apply the file of --map in reverse."),
    *names_options(),
    allow_unmatched_option(),
    at_option(),
    in_place_option(),
    link_option(),
)
def command(
    source: str,
    dest: str | None,
    how: WriteOptions,
    *,
    subs: tuple[str, ...],
    lines: tuple[str, ...],
    map_file: str | None,
    reverse: bool,
    names: str | None,
    heads: int | None,
    kv_heads: int | None,
    allow_unmatched: bool,
    at: str | None,
) -> Written:
    """Rename the keys of IN by regular expressions, by a file of rules, or by a table of names.

    --names FROM:TO, such as meta:hf, gives a model the names and the layout of another library: see
    `ckptfix help names`. Each key must be in the table. With --map, the table is FILE.

    If two keys of a state dict would end up the same, nothing is written. A REGEX that matches
    no key is an error; lines of FILE that match none are reported, and are an error only if no line matches.
    """

    if not subs and not map_file and not lines and not names:
        raise click.UsageError("Nothing to rename: give --sub, --map, --line or --names.")
    if map_file and lines:
        raise click.UsageError("--line and --map cannot be combined: add the line to the file.")
    if reverse and not map_file:
        raise click.UsageError("--reverse needs --map.")
    pairs = [split_substitution(text) for text in subs]
    return rename.rename(
        *(source, dest),
        subs=pairs,
        rules=map_file,
        lines=lines,
        names=names,
        heads=heads,
        kv_heads=kv_heads,
        reverse=reverse,
        allow_unmatched=allow_unmatched,
        at=at,
        **how.keywords(),
    )


def split_substitution(text: str) -> tuple[str, str]:
    """Split ``REGEX=REPLACEMENT`` at its first ``=`` without a backslash before it.

    Raises:
        click.BadParameter: there is no such ``=``, or nothing before it.
    """
    match = re.match(r"((?:[^\\=]|\\.)+)=(.*)", text, re.DOTALL)
    if match is None:
        from ckptfix.cli.shared.wrong_words import substitution

        meant = substitution(text)
        advice = "" if meant is None else f" Did you mean --sub {word(meant)}?"
        raise click.BadParameter(f"{text!r} is not REGEX=REPLACEMENT.{advice}", param_hint="--sub")
    return match[1], match[2]
