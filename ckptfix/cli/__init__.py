"""The command line: ``ckptfix COMMAND ...``.

A command is a module here that holds a ``command``, and a row in `COMMANDS`. Only the module of the command that
runs is imported, so ``--help`` costs the same however many there are.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from ckptfix.cli.shared.console import Console
from ckptfix.cli.shared.exits import run
from ckptfix.urls import is_url, known_word

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


COMPLETE = "_CKPTFIX_COMPLETE"
"""Environment variable in which a shell's completion script says what it wants."""


class Row(NamedTuple):
    """A command: the section of the overview it stands in, its module here, and one line of help."""

    section: str
    module: str
    summary: str


COMMANDS: dict[str, Row] = {
    "fix": Row("Start here", "fix", "Fix everything that keeps a file from loading, in one step."),
    "ls": Row("Look", "ls", "List checkpoints, a line each: format, size, devices, faults."),
    "inspect": Row("Look", "inspect", "Say what a file is, and list its tensors."),
    "doctor": Row("Look", "doctor", "Say why a file does not load, and what fixes it."),
    "browse": Row("Look", "browse", "Browse a file, a folder or two files in the terminal."),
    "diff": Row("Look", "diff", "Compare two checkpoints: names, shapes, devices, values."),
    "digest": Row("Look", "values.digest", "Hash each tensor; check a copy against its original."),
    "stats": Row("Look", "values.stats", "Say the range, mean, spread and NaN of each tensor."),
    "git": Row("Look", "git", "Let git show what changed in checkpoints."),
    "strip-module": Row("Names", "strip_module", "Remove the prefix that DataParallel or DDP adds to the keys."),
    "add-module": Row("Names", "add_module", "Add that prefix, for a model that is wrapped."),
    "unwrap": Row("Names", "unwrap", "Remove every known wrapper's prefix: DDP, FSDP, compile."),
    "rename": Row("Names", "rename", "Rename by regular expressions, or by a file of names."),
    "match": Row("Names", "match", "Give the names that another model has for the same tensors."),
    "select": Row("Values", "values.select", "Take some tensors, by their names."),
    "cast": Row("Values", "values.cast", "Give tensors another dtype, rounded as torch does."),
    "average": Row("Values", "values.average", "Make the mean of the weights of several checkpoints."),
    "merge": Row("Values", "values.merge", "Make one state dict of several."),
    "set-metadata": Row("Values", "values.set_metadata", "Change the string pairs of a safetensors file."),
    "to-cpu": Row("Devices", "to_cpu", "Make every tensor load on the CPU."),
    "map-location": Row("Devices", "map_location", "Move tensors to another device."),
    "undo": Row("Undo", "undo", "Take back an edit in place (--in-place)."),
    "convert": Row("Container", "convert", "Convert between torch zip, torch legacy and safetensors."),
    "extract": Row("Container", "extract", "Take the weights out of a pickled module or a program."),
    "sanitize": Row("Container", "sanitize", "Turn what weights_only=True refuses into plain values."),
    "repair": Row("Damage", "repair", "Recover the intact tensors of a damaged file."),
    "slim": Row("Container", "slim", "Leave out bytes that no tensor uses, and the optimizer."),
    "fleet": Row("Many", "fleet", "Do one command on thousands of checkpoints, resumable."),
    "help": Row("Help", "help", "Show the documentation: recipes, formats, findings ..."),
    "completion": Row("Help", "completion", "Print the completion script of a shell."),
}


_OTHER_WORDS: dict[str, Sequence[str]] = {
    **dict.fromkeys(("info", "show", "view", "cat", "load", "read", "open", "summary"), ("inspect",)),
    **dict.fromkeys(("tui", "ui", "explore", "explorer", "tree", "less"), ("browse",)),
    **dict.fromkeys(("list", "dir", "find"), ("ls",)),
    **dict.fromkeys(("hash", "sha256sum", "checksum", "manifest"), ("digest",)),
    **dict.fromkeys(("stat", "histogram", "nan", "norms"), ("stats",)),
    **dict.fromkeys(("verify",), ("doctor", "digest")),
    **dict.fromkeys(("report", "html", "page"), ("diff", "inspect", "doctor")),
    **dict.fromkeys(("textconv", "difftool", "gitattributes"), ("git",)),
    **dict.fromkeys(("check", "validate", "diagnose", "why", "scan"), ("doctor",)),
    **dict.fromkeys(("compare", "cmp"), ("diff",)),
    **dict.fromkeys(("join", "consolidate", "export", "save", "shard", "split"), ("convert",)),
    **dict.fromkeys(("half", "bf16", "fp16", "quantize", "dtype", "to"), ("cast",)),
    **dict.fromkeys(("avg", "mean", "swa", "ema", "soup"), ("average",)),
    **dict.fromkeys(("prune", "filter", "drop", "subset"), ("select",)),
    **dict.fromkeys(("recover", "rescue", "restore", "salvage"), ("repair",)),
    **dict.fromkeys(("remap", "map-keys", "replace"), ("rename",)),
    **dict.fromkeys(("strip", "unwrap-ddp"), ("strip-module", "unwrap")),
    **dict.fromkeys(("cpu", "device"), ("to-cpu", "map-location")),
    **dict.fromkeys(("revert", "rollback", "back"), ("undo",)),
}
"""What others call what a command does."""


class Commands(click.Group):
    """The group whose commands are the rows of `COMMANDS`."""

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
                from ckptfix.cli.inspect import look

                ctx.ensure_object(Console).command = look.name
                return look.name, look, args
            from difflib import get_close_matches

            meant = name.lower().replace("_", "-")
            near = [meant] if meant in COMMANDS else _OTHER_WORDS.get(meant, [])
            near = near or get_close_matches(meant, COMMANDS, n=3, cutoff=0.5)
            advice = f" Did you mean {' or '.join(near)}?" if near else ""
            kind = "command or file" if os.path.splitext(name)[1] or os.sep in name else "command"  # noqa: PTH122
            raise click.UsageError(f"No such {kind} {name!r}.{advice}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, row in COMMANDS.items():
            sections.setdefault(row.section, []).append((name.ljust(width), row.summary))
        for section, rows in sections.items():
            with formatter.section(section):
                formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write("\nExample:\n  ckptfix strip-module ddp.pth plain.pth\n")

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
        """Run a command line. Exits with its code, or returns the code when not `standalone_mode`."""
        # What is secret in a URL is seen by its client alone.
        arguments = [known_word(word) for word in (sys.argv[1:] if args is None else args)]
        console = Console()
        console.arguments = arguments

        def invoke() -> object:
            if instruction := os.environ.get(complete_var or COMPLETE):
                return _completed(self, complete_var or COMPLETE, instruction)
            with self.make_context("ckptfix", arguments, obj=console, **extra) as ctx:
                if not any(map(is_url, arguments)):
                    return self.invoke(ctx)
                from ckptfix.io.source import opened_once

                with opened_once():  # what looks at an operand before the command reads it asks its store once
                    return self.invoke(ctx)

        code = run(invoke, console, arguments)
        if standalone_mode:
            sys.exit(code)
        return code


def _completed(group: Commands, variable: str, instruction: str) -> int:
    """Say what a completion script asked for: ``bash_complete``, or ``bash_source`` for the script itself."""
    from ckptfix.cli.shared.shells import SHELLS

    shell, _, what = instruction.partition("_")
    if shell not in SHELLS or what not in ("source", "complete"):
        return 1
    complete = SHELLS[shell](group, {}, "ckptfix", variable)
    click.echo(complete.source() if what == "source" else complete.complete())
    return 0


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Say the versions of what a report of a fault should name; torch is not imported for that."""
    if not value or ctx.resilient_parsing:
        return
    import platform
    from importlib.metadata import PackageNotFoundError, version

    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    click.echo(f"ckptfix {version('ckptfix')}")
    click.echo(f"Python {platform.python_version()}, torch {torch}, {platform.platform()}")
    ctx.exit()


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    *("-V", "--version"), is_flag=True, is_eager=True, expose_value=False, callback=_version,
    help="Show the versions of ckptfix, Python and torch, and exit.",
)
def commands() -> None:
    """Fix PyTorch checkpoints without loading them: names, devices, container.

    The input is never changed, unless --in-place is given. Exit codes: 0 done, same or clean; 1 differences or
    findings; 2 trouble or wrong usage; 3 done with losses, each named; 128+n a signal.

    `ckptfix FILE` says what a file is, and what is wrong with it.

    As IN, - is standard input, and as OUT standard output. Lists are complete in a pipe.
    """


def main() -> NoReturn:
    """The console script ``ckptfix``."""
    commands.main()
    raise AssertionError("commands.main exits")
