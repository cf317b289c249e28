"""The command line: ``ckptfix COMMAND ...``.

A command is a module here that holds a ``command``, and a row in `ckptfix.command_table`. Only the module of the
command that runs is imported, so ``--help`` costs the same however many there are.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ckptfix.cli.shared.console import COMPLETE as COMPLETE
from ckptfix.cli.shared.console import Console
from ckptfix.cli.shared.exits import run
from ckptfix.command_table import COMMANDS, meant_by
from ckptfix.urls import is_url, word_without_secrets
from ckptfix.version import VERSION

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


EXAMPLES = (
    ("ckptfix model.pth", "what it is, what is wrong, what fixes it"),
    ("ckptfix fix model.pth", "write model.fixed.pth, which loads"),
    ("ckptfix diff a.pth b.pth", "what differs"),
)
"""The command lines on top of the overview."""


class CommandGroup(click.Group):
    """The group whose commands are the rows of the table of commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        from importlib import import_module

        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"ckptfix.cli.{COMMANDS[cmd_name].module}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        ctx.ensure_object(Console).command = name if name in COMMANDS else None
        if name not in COMMANDS and (name == "-" or not name.startswith("-")) and not ctx.resilient_parsing:
            if name == "-" or is_url(name) or os.path.lexists(name):
                from ckptfix.cli.look import look

                ctx.ensure_object(Console).command = look.name
                return look.name, look, args
            if os.path.splitext(name)[1] or os.sep in name:  # noqa: PTH122
                from ckptfix.errors import NoSuchFile

                raise NoSuchFile(name)
            from difflib import get_close_matches

            meant = name.lower().replace("_", "-")
            near = [meant] if meant in COMMANDS else meant_by(meant)
            near = near or get_close_matches(meant, COMMANDS, n=3, cutoff=0.5)
            advice = f" Did you mean {' or '.join(near)}?" if near else ""
            if len(near) == 1 and (line := self._as_option(ctx, near[0], meant, args[1:])):
                advice = f" Use `{line}`."
            elif len(near) == 1 and (shown := [line for line in COMMANDS[near[0]].all_examples if meant in line]):
                advice += f" For example: {shown[0]}"
            raise click.UsageError(f"No such command {name!r}.{advice}", ctx)
        return super().resolve_command(ctx, args)

    def _as_option(self, ctx: click.Context, command: str, typed: str, others: list[str]) -> str | None:
        """Return the line that was meant where `typed` is an option of `command`: ``drop FILE 'fc.*'`` for select."""
        found = self.get_command(ctx, command)
        options = [name for param in found.params for name in param.opts] if found is not None else []
        if f"--{typed}" not in options or len(others) < 2 or any(one.startswith("-") for one in others):
            return None
        from ckptfix.commands import word

        return " ".join(["ckptfix", command, *map(word, others[:-1]), f"--{typed}", word(others[-1])])

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage("ckptfix", "FILE")
        formatter.write_usage("ckptfix", "COMMAND [OPTIONS] [ARGS]...", " " * len("Usage: "))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write three examples, and then the commands by section; those behind the others are only named."""
        with formatter.section("Examples"):
            formatter.write_dl(EXAMPLES)
        shown = [row for row in COMMANDS.values() if not row.behind]
        width = max(len(row.name) for row in shown)
        sections: dict[str, list[tuple[str, str]]] = {}
        for row in shown:
            sections.setdefault(row.section, []).append((row.name.ljust(width), row.summary))
        for section, rows in sections.items():
            with formatter.section(section):
                formatter.write_dl(rows)
        with formatter.section("More commands"):
            formatter.write_text(", ".join(row.name for row in COMMANDS.values() if row.behind))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write where more is explained."""
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(
                "`ckptfix COMMAND --help` shows a command, `ckptfix help WORDS` searches recipes and findings, and "
                "-V shows the version. Exit codes: 0 done, same or clean; 1 differences or findings; 2 an error; "
                "3 done with losses; 128+n a signal."
            )

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=row.summary) for name, row in COMMANDS.items() if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line. Exit with its code, or return the code if not `standalone_mode`."""
        # Only the client of a URL sees the secrets in it.
        arguments = [word_without_secrets(word) for word in (sys.argv[1:] if args is None else args)]
        console = Console()
        console.arguments = arguments

        def invoke() -> object:
            if instruction := os.environ.get(complete_var or COMPLETE):
                return _completed(self, complete_var or COMPLETE, instruction)
            with self.make_context("ckptfix", arguments, obj=console, **extra) as ctx:
                if not any(map(is_url, arguments)):
                    return self.invoke(ctx)
                from ckptfix.io.source import shares_open_files

                with shares_open_files():  # the checks of an operand and the command itself share one request
                    return self.invoke(ctx)

        code = run(invoke, console, arguments)
        if standalone_mode:
            sys.exit(code)
        return code


def _completed(group: CommandGroup, variable: str, instruction: str) -> int:
    """Answer a completion script: ``bash_complete`` asks for completions, ``bash_source`` for the script itself."""
    from ckptfix.cli.shared.shells import SHELLS

    shell, _, what = instruction.partition("_")
    if shell not in SHELLS or what not in ("source", "complete"):
        return 1
    complete = SHELLS[shell](group, {}, "ckptfix", variable)
    click.echo(complete.source() if what == "source" else complete.complete())
    return 0


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Print the versions that a bug report needs, without importing torch."""
    if not value or ctx.resilient_parsing:
        return
    import platform
    from importlib.metadata import PackageNotFoundError, version

    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    click.echo(f"ckptfix {VERSION}")
    click.echo(f"Python {platform.python_version()}, torch {torch}, {platform.platform()}")
    ctx.exit()


@click.group(
    cls=CommandGroup,
    no_args_is_help=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    *("-V", "--version"), is_flag=True, is_eager=True, expose_value=False, callback=_version,
    help="Show the versions of ckptfix, Python and torch, and exit.",
)
@click.pass_context
def commands(ctx: click.Context) -> None:
    """Fix PyTorch checkpoints without loading them: keys, devices, container.

    The input never changes, unless you give --in-place. - is standard input or output.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> NoReturn:
    """Run the console script ``ckptfix``."""
    commands.main()
    raise AssertionError("commands.main exits")
