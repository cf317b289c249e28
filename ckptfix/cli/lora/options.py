"""Options that the commands for adapters share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from ckptfix.cli.shared.common import FileName, destination, reads, show, where_to
from ckptfix.cli.shared.console import Console

KEPT = ("output", "force", "backup", "dry_run", "record")
"""The common options of commands that write one output."""


def alpha_option() -> click.Option:
    """Make the option --alpha."""
    return click.Option(["--alpha"], type=float, metavar="A", help="The alpha of an adapter that states none.")


def adapter_option() -> click.Option:
    """Make the option --adapter."""
    return click.Option(["--adapter"], metavar="NAME", help="The adapter of this name, in a file with several.")


def dtype_option(what: str) -> click.Option:
    """Make the option --dtype."""
    return click.Option(["--dtype"], metavar="DTYPE", help=what)


def writing(name: str, *params: click.Parameter, examples: Sequence[str]) -> Callable[[Callable[..., Any]], Any]:
    """Make a command that writes one output, from a function (dest, how, `params`) that returns the result."""

    def decorate(function: Callable[..., Any]) -> Any:
        def callback(
            console: Console,
            /,
            *,
            output: str | None,
            force: bool,
            backup: bool,
            dry_run: bool,
            dest: str | None = None,
            **options: Any,
        ) -> int:
            from ckptfix.ops.writing import WriteOptions

            out = where_to(dest, output, without="--output")
            with console.progress("flushing to disk", ("writing",)) as progress:
                how = WriteOptions(force=force or backup, keep_old=backup, dry_run=dry_run, progress=progress)
                result = function(out, how, **options)
            return show(console, result)

        callback.__doc__ = function.__doc__
        common = [one for one in destination()[1:] if one.name in KEPT or "--record" in one.opts]
        return reads(name, *params, *common, examples=examples)(callback)

    return decorate


def file_named(name: str, metavar: str) -> click.Argument:
    """Make an argument for one file or folder."""
    return click.Argument([name], metavar=metavar, type=FileName())
