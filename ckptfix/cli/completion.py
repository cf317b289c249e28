"""ckptfix completion."""

from __future__ import annotations

import click

from ckptfix.cli import COMPLETE
from ckptfix.cli.shared.common import reads
from ckptfix.cli.shared.console import Console

SHELLS = ("bash", "zsh", "fish")


@reads(
    "completion",
    click.Argument(["shell"], type=click.Choice(SHELLS)),
    example="ckptfix completion bash >> ~/.bashrc",
    output=False,
)
def command(console: Console, *, shell: str) -> int:
    """Print the script that makes SHELL complete ckptfix's commands, options and files."""
    from click.shell_completion import get_completion_class

    from ckptfix.cli import commands

    maker = get_completion_class(shell)
    if maker is None:
        raise click.UsageError(f"click knows no completion for {shell}")
    complete = maker(commands, {}, "ckptfix", COMPLETE)
    console.say(complete.source_template % complete.source_vars())
    return 0
