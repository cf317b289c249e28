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

from ckptfix.cli.shared.console import COMPLETE as COMPLETE
from ckptfix.cli.shared.console import Console
from ckptfix.cli.shared.exits import run
from ckptfix.urls import is_url, known_word

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class Row(NamedTuple):
    """A command: its section in the overview, its module in this package, and its one-line summary."""

    section: str
    module: str
    summary: str


COMMANDS: dict[str, Row] = {
    "fix": Row("Start here", "fix", "Fix everything that keeps a file from loading, in one step."),
    "ls": Row("Look", "ls", "List checkpoints with format, size, devices and problems."),
    "inspect": Row("Look", "inspect", "Show what a file is, and list its tensors."),
    "doctor": Row("Look", "doctor", "Explain why a file does not load, and what fixes it."),
    "browse": Row("Look", "browse", "Browse a file, a folder or two files in the terminal."),
    "diff": Row("Look", "diff", "Compare two checkpoints: keys, shapes, devices, values."),
    "digest": Row("Look", "values.digest", "Hash each tensor; check a copy against its original."),
    "stats": Row("Look", "values.stats", "Show min, max, mean, std and NaN count per tensor."),
    "git": Row("Look", "git", "Let git show what changed in checkpoints."),
    "strip-module": Row("Keys", "strip_module", "Remove the prefix that DataParallel or DDP adds to the keys."),
    "add-module": Row("Keys", "add_module", "Add that prefix, for a wrapped model."),
    "unwrap": Row("Keys", "unwrap", "Remove the prefixes of all known wrappers: DDP, FSDP, compile."),
    "rename": Row("Keys", "rename", "Rename keys by regular expressions or a file of rules."),
    "match": Row("Keys", "match", "Rename keys to fit another model."),
    "select": Row("Values", "values.select", "Keep or drop tensors by key."),
    "cast": Row("Values", "values.cast", "Convert tensors to fp16, bf16, fp8 ..."),
    "average": Row("Values", "values.average", "Average several checkpoints."),
    "merge": Row("Values", "values.merge", "Combine several state dicts into one."),
    "set-metadata": Row("Values", "values.set_metadata", "Change the metadata of a safetensors file."),
    "to-cpu": Row("Devices", "to_cpu", "Make every tensor load on the CPU."),
    "map-location": Row("Devices", "map_location", "Move tensors to another device."),
    "undo": Row("Undo", "undo", "Undo the last in-place edit (--in-place)."),
    "convert": Row("Container", "convert", "Convert between torch zip, torch legacy and safetensors."),
    "extract": Row("Container", "extract", "Extract the weights from a pickled module or a program."),
    "sanitize": Row("Container", "sanitize", "Replace what weights_only=True refuses with plain values."),
    "repair": Row("Damage", "repair", "Recover the intact tensors of a damaged file."),
    "slim": Row("Container", "slim", "Shrink a file (unused bytes; optimizer with --no-optimizer)."),
    "fleet": Row("Many", "fleet", "Run one command on thousands of checkpoints, resumable."),
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
"""Words that users may know from other tools, and the commands that do that here."""


class CommandGroup(click.Group):
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
        """Run a command line. Exit with its code, or return the code if not `standalone_mode`."""
        # Only the client of a URL sees the secrets in it.
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

                with opened_once():  # the checks of an operand and the command itself share one request
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
    click.echo(f"ckptfix {version('ckptfix')}")
    click.echo(f"Python {platform.python_version()}, torch {torch}, {platform.platform()}")
    ctx.exit()


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    *("-V", "--version"), is_flag=True, is_eager=True, expose_value=False, callback=_version,
    help="Show the versions of ckptfix, Python and torch, and exit.",
)
def commands() -> None:
    """Fix PyTorch checkpoints without loading them: keys, devices, container.

    The input never changes, unless you give --in-place. Exit codes: 0 done, same or clean; 1 differences or findings;
    2 an error or wrong usage; 3 done with losses, each named; 128+n a signal.

    `ckptfix FILE` shows what a file is and what is wrong with it.

    - means standard input for IN, and standard output for OUT. Lists are complete in a pipe.
    """


def main() -> NoReturn:
    """Run the console script ``ckptfix``."""
    commands.main()
    raise AssertionError("commands.main exits")
