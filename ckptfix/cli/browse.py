"""ckptfix browse."""

from __future__ import annotations

import os
import sys

import click

from ckptfix.cli.shared import values
from ckptfix.cli.shared.common import FileName, file_argument, reads
from ckptfix.cli.shared.console import Console, is_terminal
from ckptfix.commands import command as line_of
from ckptfix.errors import NoSuchFile, Refused
from ckptfix.extras import need_textual
from ckptfix.io.source import found_as
from ckptfix.platform import Stopped


@reads(
    "browse",
    file_argument("path", "FILE | DIR"),
    click.Argument(["other"], metavar="[OTHER]", required=False, type=FileName()),
    click.Option(
        ["--at"], metavar="PATH", multiple=True, shell_complete=values.addresses,
        help="With OTHER: compare the state dicts at this address. Give it twice for two addresses.",
    ),
    output=False,
)  # fmt: skip
def command(console: Console, *, path: str, other: str | None, at: tuple[str, ...]) -> int:
    """Browse FILE in the terminal: a tree of its tensors and other values, with sizes.

    Press / to search as you type, enter to open, v for values, f for findings, y to copy the command that prints
    what you see, ? for all keys, q to quit. With OTHER, both files are compared side by side: changed, added,
    removed. With a DIR, the checkpoints in it are listed.

    Only headers and the values on screen are read. Needs a terminal and pip install 'ckptfix[browse]'.
    """
    if len(at) > 2 or (at and other is None):
        raise click.UsageError("--at needs two files: give it once for both, or once for each.")
    if not all(map(is_terminal, (sys.stdin, sys.stdout, sys.stderr))) or os.environ.get("TERM") == "dumb":
        hint = line_of("inspect", path) if other is None else line_of("diff", path, other)
        raise Refused("browse needs a terminal", hint=f"`{hint}` prints the same data")
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
    """Return the checkpoints in a folder, or nothing if the folder itself is a checkpoint."""
    from ckptfix.formats import is_folder_checkpoint, located
    from ckptfix.ops import listing

    if located(folder) != folder or is_folder_checkpoint(folder):
        return ()
    return tuple(listing.checkpoints(folder))
