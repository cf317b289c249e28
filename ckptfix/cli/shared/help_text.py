"""The help of a command: a screen with what is its own; `ckptfix help COMMAND` has all of it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click

from ckptfix.cli.shared.operands import CommonOption

FULL = "ckptfix.full-help"
"""Key in the context's meta: show the whole description, and every option with its whole text."""

COLUMN = 28
"""Greatest width of the column with the names of options; longer names have a line of their own."""


class ShortHelp(click.Command):
    """A command whose help has its own options first, names the common ones, and ends with examples."""

    examples: Sequence[str] = ()

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the first paragraph of the description, or all of it."""
        if FULL in ctx.meta or self.help is None:
            super().format_help_text(ctx, formatter)
            return
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(re.sub(r"\s+", " ", self.help.strip().partition("\n\n")[0]))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of the command; the common ones share a line, unless all of the help is asked for."""
        own: list[tuple[click.Parameter, tuple[str, str]]] = []
        common: list[tuple[click.Parameter, tuple[str, str]]] = []
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if row is not None:
                shared = isinstance(param, CommonOption) or "--help" in param.opts
                (common if shared else own).append((param, row))
        if FULL in ctx.meta:
            for title, params in (("Options", own), ("Common options", common)):
                if params:
                    with formatter.section(title):
                        formatter.write_dl([row for _, row in params])
            return
        if own:
            with formatter.section("Options"):
                width = min(max(len(words) for _, (words, _) in own), COLUMN)
                room = formatter.width - width - 2 * formatter.indent_increment
                rows = [(words, fitted(text, room)) for _, (words, text) in own]
                formatter.write_dl(rows, col_max=COLUMN)
        if common:
            with formatter.section("Common options"):
                import textwrap

                names = ", ".join("/".join(param.opts) for param, _ in common)
                indent = " " * formatter.current_indent
                # click would break lines at the hyphens in the names of options.
                wrapped = textwrap.fill(
                    names, formatter.width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
                )
                formatter.write(f"{wrapped}\n")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = "".join(f"  {line}\n" for line in self.examples)
        path = ctx.command_path.partition(" ")[2] or self.name
        more = "" if FULL in ctx.meta else f"\n`ckptfix help {path}` explains every option.\n"
        formatter.write(f"\nExamples:\n{rows}{more}")


class GroupHelp(ShortHelp, click.Group):
    """A command with commands of its own. Its help has a line for each, and is shown where no command is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, and the commands with as much of their first sentence as fits in a line."""
        click.Command.format_options(self, ctx, formatter)
        width = max(map(len, self.commands))
        room = formatter.width - width - 2 * formatter.indent_increment
        with formatter.section("Commands"):
            texts = {name: " ".join((one.help or "").split()) for name, one in self.commands.items()}
            formatter.write_dl([(name, fitted(text, room)) for name, text in texts.items()])


def fitted(text: str, room: int) -> str:
    """Return the first sentence of `text`, or as many of its clauses or words as fit; a default stays if it is short.

    Args:
        room: the characters of one line.
    """
    brackets = re.search(r"(\s+\[[^\]]*\])+$", text)
    tail = brackets[0] if brackets else ""
    body = text.removesuffix(tail)
    tail = "" if len(tail) > room // 2 else re.sub(r"\s+\[", " [", tail)
    found = re.match(r"(.*?[.!?])(?=\s+[A-Z(`-]|$)", body, re.DOTALL)
    sentence = found[1] if found else body
    room -= len(tail)
    if len(sentence) <= room:
        return sentence + tail
    clauses = [mark.start() for mark in re.finditer(r"[;,:] | \(", sentence) if room // 2 < mark.start() < room]
    if clauses and sentence.count("(", 0, clauses[-1]) == sentence.count(")", 0, clauses[-1]):
        return f"{sentence[: clauses[-1]].rstrip()}.{tail}"
    return f"{sentence[: max(room - 4, 8)].rpartition(' ')[0]} ...{tail}"
