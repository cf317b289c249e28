"""ckptfix browse."""

from __future__ import annotations

import os
import sys

import click

from ckptfix.cli.shared import values
from ckptfix.cli.shared.common import FileName, file_argument, reads
from ckptfix.cli.shared.console import Console, is_terminal
from ckptfix.cli.shared.exits import Stopped
from ckptfix.commands import command as line_of
from ckptfix.errors import NoSuchFile, Refused
from ckptfix.extras import need_textual
from ckptfix.io.source import found_as


@reads(
    "browse",
    file_argument("path", "FILE | DIR"),
    click.Argument(["other"], metavar="[OTHER]", required=False, type=FileName()),
    click.Option(
        ["--at"], metavar="PATH", multiple=True, shell_complete=values.addresses,
        help="With OTHER, compare the mappings at this address; given twice, it is FILE's and OTHER's.",
    ),
    example="ckptfix browse model.pth",
    output=False,
)  # fmt: skip
def command(console: Console, *, path: str, other: str | None, at: tuple[str, ...]) -> int:
    """Browse FILE in the terminal: a tree of its tensors and of what else it holds, with sizes.

    / searches as you type, enter opens, v shows values, f lists findings, y copies the command that does what is
    shown, ? shows all keys, q quits. With OTHER the two are side by side: what changed, what was added and removed.
    Of a DIR, the checkpoints in it are listed.

    Only headers are read; of a tensor, what is shown. It needs pip install 'ckptfix[browse]', and a terminal.
    """
    if len(at) > 2 or (at and other is None):
        raise click.UsageError("--at is for two files: give it once for both, or once for each.")
    if not all(map(is_terminal, (sys.stdin, sys.stdout, sys.stderr))) or os.environ.get("TERM") == "dumb":
        hint = line_of("inspect", path) if other is None else line_of("diff", path, other)
        raise Refused("browse needs a terminal", hint=f"`{hint}` prints what it would show")
    need_textual("browse")
    for name in (path, other):
        if name is not None and not found_as(name):
            raise NoSuchFile(name)
    from ckptfix.browse.view import app

    inside = _inside(path) if other is None and found_as(path) == "folder" else ()
    number = app.run(path, other, (at[0], at[-1]) if at else None, inside)
    if number is not None:
        raise Stopped(number)
    return 0


def _inside(folder: str) -> tuple[str, ...]:
    """The checkpoints in a folder that is not one itself."""
    from ckptfix.formats import is_folder_checkpoint, located
    from ckptfix.ops import listing

    if located(folder) != folder or is_folder_checkpoint(folder):
        return ()
    return tuple(listing.checkpoints(folder))
