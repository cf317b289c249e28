"""ckptfix rename."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

import click

from ckptfix.cli.shared.common import FileName, Written, writes
from ckptfix.cli.shared.options import at_option, in_place_option, link_option
from ckptfix.errors import CkptfixError, Refused, printable
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
        "comment. Placeholders make a line a rule: {n} is a number, {n-1} the one before, {*} the rest of a name.",
    ),
    at_option(),
    in_place_option(),
    link_option(),
    example=r"ckptfix rename old.pth new.pth --sub '^backbone\.=' --sub 'gamma$=weight'",
)
def command(
    source: str, dest: str | None, how: How, *, subs: tuple[str, ...], map_file: str | None, at: str | None
) -> Written:
    """Write OUT: IN with its names changed by rule.

    In a state dict no two keys may end up with the same name: then nothing is written. A rule that matched no name is
    reported.
    """

    if not subs and not map_file:
        raise click.UsageError("Nothing to rename by: give --sub or --map.")
    pairs = [split_substitution(text) for text in subs]
    mapping = read_map(map_file) if map_file else None
    return rename.rename(source, dest, subs=pairs, mapping=mapping, at=at, **how.keywords())


def split_substitution(text: str) -> tuple[str, str]:
    """``REGEX=REPLACEMENT`` at its first ``=`` without a backslash before it.

    Raises:
        click.BadParameter: there is none, or nothing before it.
    """
    match = re.match(r"((?:[^\\=]|\\.)+)=(.*)", text, re.DOTALL)
    if match is None:
        raise click.BadParameter(f"{text!r} is not REGEX=REPLACEMENT.", param_hint="--sub")
    return match[1], match[2]


def read_map(path: str) -> dict[str, str]:
    """The names and rules of a map file: old -> new.

    Raises:
        CkptfixError: it is neither form, or a rule is malformed; the message names the line.
    """
    from ckptfix.names.rules import NameRule, is_rule

    with open(path, encoding="utf-8-sig") as file:
        try:
            text = file.read()
        except UnicodeDecodeError as error:
            raise CkptfixError("a file of names is UTF-8 text", path=path, offset=error.start) from None
    try:
        pairs = _json_pairs(text) if text.lstrip().startswith("{") else list(_line_pairs(text.split("\n")))
    except _BadLine as bad:
        hint = "give a JSON object, or a line `old new` for each name"
        raise CkptfixError(bad.message, path=path, where=bad.where, hint=hint) from None
    mapping: dict[str, str] = {}
    for old, new in pairs:
        if is_rule(old) or is_rule(new):
            try:
                NameRule(old, new)
            except Refused as error:
                raise CkptfixError(error.message, path=path, where=f"{old} -> {new}") from None
        if mapping.setdefault(old, new) != new:
            raise CkptfixError(f"{old!r} would become both {mapping[old]!r} and {new!r}", path=path)
    return mapping


class _BadLine(Exception):
    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = None if line is None else f"line {line}"


def _json_pairs(text: str) -> list[tuple[str, str]]:
    def pairs_of(pairs: list[tuple[str, object]]) -> list[tuple[str, object]]:
        return pairs

    pairs: list[tuple[str, object]]
    try:
        pairs = json.loads(text, object_pairs_hook=pairs_of)
    except json.JSONDecodeError as error:
        raise _BadLine(f"not JSON: {error.msg}", error.lineno) from None
    except ValueError as error:  # a number of too many digits
        raise _BadLine(f"not JSON that holds names: {error}") from None
    except RecursionError:
        raise _BadLine("not JSON that holds names: nested too deeply") from None
    renames: list[tuple[str, str]] = []
    for old, new in pairs:
        if not isinstance(new, str):
            raise _BadLine(f"the new name of {printable(repr(old))} is not a string")
        renames.append((old, new))
    return renames


def _line_pairs(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(lines, 1):
        words = _before_comment(line.split())
        if not words:
            continue
        if len(words) == 3 and words[1] == "->":
            del words[1]
        if len(words) != 2:
            raise _BadLine(f"expected `old new`, found {len(words)} words", number)
        yield words[0], words[1]


def _before_comment(words: list[str]) -> list[str]:
    """The words before one that begins with ``#``: a name may hold the sign, but not begin with it."""
    for index, word in enumerate(words):
        if word.startswith("#"):
            return words[:index]
    return words
