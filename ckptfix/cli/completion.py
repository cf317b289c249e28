"""ckptfix completion."""

from __future__ import annotations

import click

from ckptfix.cli.shared.common import reads
from ckptfix.cli.shared.console import COMPLETE, GROUP, Console
from ckptfix.cli.shared.shells import SHELLS


@reads(
    "completion",
    click.Argument(["shell"], type=click.Choice(list(SHELLS))),
    example="ckptfix completion bash >> ~/.bashrc",
    output=False,
)
def command(console: Console, *, shell: str) -> int:
    """Print the script that makes SHELL complete commands, options, files, and option values.

    Addresses are completed from the file named before them: ckptfix extract model.pth --at <TAB>.
    """
    complete = SHELLS[shell](GROUP.get(), {}, "ckptfix", COMPLETE)
    console.say(complete.source_template % complete.source_vars())
    return 0
