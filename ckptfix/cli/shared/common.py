"""The shared parts of the commands: their options, and the display of a result."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import click

from ckptfix.cli.shared import tables
from ckptfix.cli.shared.colors import When
from ckptfix.cli.shared.console import Console, pass_console
from ckptfix.cli.shared.help_text import ShortHelp
from ckptfix.cli.shared.operands import CommonOption, InAndOut, Operands, Others, folder_options
from ckptfix.command_table import COMMANDS
from ckptfix.commands import word
from ckptfix.errors import Unsupported, printable
from ckptfix.urls import is_url

if TYPE_CHECKING:
    from ckptfix.checkpoint import Plan
    from ckptfix.cli.shared.batch import Batch
    from ckptfix.findings.row import Finding


Dash = Literal["input", "output", "text"]
"""The meaning of ``-``: standard input as a file, standard output, or the text of standard input."""

LINES = 16
"""Result lines shown on a terminal; a pipe gets all of them."""


class Written(Protocol):
    """The result that every writing operation returns."""

    @property
    def plan(self) -> Plan: ...
    @property
    def written(self) -> bool: ...
    @property
    def lines(self) -> tuple[str, ...]: ...
    @property
    def findings(self) -> tuple[Finding, ...]: ...
    @property
    def exit_code(self) -> int: ...
    @property
    def dest(self) -> str: ...
    @property
    def in_place(self) -> bool: ...
    @property
    def backup(self) -> str | None: ...
    def as_dict(self) -> Mapping[str, Any]: ...


class Verb(ShortHelp, click.Command):
    """A command that accepts ``-`` for a stream.

    Attributes:
        operands: how it reads its inputs from the command line; None if their number is fixed.
        shares: with several ranks, each does a part; the command itself divides the work.
    """

    shares = False

    def __init__(
        self, name: str, *, examples: Sequence[str], operands: Operands | None = None, **attributes: Any
    ) -> None:
        super().__init__(name, **attributes)
        self.examples = examples
        self.operands = operands

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from ckptfix.cli.shared.wrong_words import wrong_option

            raise wrong_option(error, str(self.name), ctx) from None

    def invoke(self, ctx: click.Context) -> int:
        console = ctx.ensure_object(Console)
        with contextlib.ExitStack() as stack:
            if any(value == "-" or (isinstance(value, tuple) and "-" in value) for value in ctx.params.values()):
                from ckptfix.cli.shared.streams import StreamParameter, standing_in

                types = [(str(param.name), param.type) for param in self.params]
                places = [
                    StreamParameter(name, type.dash) for name, type in types if isinstance(type, FileName | MessageType)
                ]
                stack.enter_context(standing_in(ctx.params, places, console))
            if console.record:
                from ckptfix.ops.record import recording

                if ctx.params.get("in_place"):
                    raise click.UsageError("--record is for outputs; `undo --list` shows in-place edits.")
                stack.enter_context(recording("ckptfix", *console.arguments))
            batch = self.operands.batch(self, ctx) if self.operands is not None else None
            invoke = functools.partial(self._invoke, ctx, console, batch)
            if not self.shares and ("WORLD_SIZE" in os.environ or "CKPTFIX_RANKS" in os.environ):
                from ckptfix.cli.shared.ranks import among

                return among(ctx, console, batch is None, invoke)
            return invoke()

    def _invoke(self, ctx: click.Context, console: Console, batch: Batch | None) -> int:
        if batch is None:
            return int(super().invoke(ctx))
        from ckptfix.cli.shared.batch import run

        return run(batch, console)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_usage(ctx, formatter)
        others = [MoreInputs.usage] if any(isinstance(param, MoreInputs) for param in self.params) else []
        others += [self.operands.usage] if self.operands is not None and self.operands.usage else []
        for usage in others:
            formatter.write_usage(ctx.command_path, f"[OPTIONS] {usage}", " " * len("Usage: "))


class FileName(click.Path):
    """The name of a file or other TARGET; the library, not click, checks that it is readable.

    ``-`` is standard input, or with `output` standard output.
    """

    def __init__(self, *, output: bool = False) -> None:
        super().__init__(readable=False, allow_dash=True)
        self.dash: Dash = "output" if output else "input"


class MoreInputs(click.Argument):
    """Inputs after the first, for a command that makes one output of several: ``-o OUT`` names it."""

    usage = "IN IN... -o OUT"

    def __init__(self) -> None:
        super().__init__(["more"], nargs=-1, required=False, type=FileName())

    def get_usage_pieces(self, ctx: click.Context) -> list[str]:
        return []


class MessageType(click.types.StringParamType):
    """Text; ``@FILE``, or the name of a file that exists, reads it from there, and ``-`` from standard input."""

    dash: Dash = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name = value.removeprefix("@")
        if name == value and not _is_file_name(value):
            return value
        from ckptfix.findings.message_names import MOST_TEXT

        with open(name, encoding="utf-8", errors="replace") as stream:
            return stream.read(MOST_TEXT)


def _is_file_name(text: str) -> bool:
    """Return whether a short text without line breaks is the name of a file that exists."""
    return 0 < len(text) < 1000 and "\n" not in text and "\0" not in text and Path(text).is_file()


def file_argument(name: str, metavar: str) -> click.Argument:
    """Make an argument for one file; the library, not click, checks that it is readable."""
    return click.Argument([name], metavar=metavar, type=FileName())


def files_argument(name: str, metavar: str, *, required: bool = True) -> click.Argument:
    """Make an argument for any number of files."""
    return click.Argument([name], metavar=metavar, nargs=-1, required=required, type=FileName())


def _set(name: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    def callback(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            setattr(ctx.ensure_object(Console), name, True)

    return callback


def _set_color(ctx: click.Context, param: click.Parameter, value: When) -> None:
    ctx.ensure_object(Console).color = value


def output_options() -> list[click.Parameter]:
    """Return --quiet, --json and --color, whose values the console keeps."""
    shared: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False}
    return [
        CommonOption(["-q", "--quiet"], callback=_set("quiet"), help="Show only warnings and errors.", **shared),
        CommonOption(
            ["--json"],
            callback=_set("json"),
            help="Print the result as one JSON object; with several inputs, one object per line.",
            **shared,
        ),
        CommonOption(
            ["--color"], type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True,
            is_eager=True, expose_value=False, callback=_set_color, help="Use color; auto means on a terminal.",
        ),
    ]  # fmt: skip


def reads(
    name: str,
    *params: click.Parameter,
    examples: Sequence[str] | None = None,
    output: bool = True,
    operands: Operands | None = None,
) -> Callable[[Callable[..., int]], Verb]:
    """Make a command from a function that gets the console and `params`, and returns the exit code.

    Its docstring is the help text, followed by `examples`, by default those of its row in the table of commands.
    `output` adds --quiet, --json and --color; `operands` defines how it runs on several inputs.
    """

    def decorate(function: Callable[..., int]) -> Verb:
        return Verb(
            name,
            examples=COMMANDS[name].all_examples if examples is None else examples,
            operands=operands,
            params=[*params, *(output_options() if output else [])],
            callback=pass_console(function),
            help=function.__doc__,
        )

    return decorate


def destination(*, optional: bool = False) -> list[click.Parameter]:
    """Return OUT, --output, --force, --backup, --dry-run and --out-dir; pass the first two to `where_to`."""
    return [
        click.Argument(["dest"], metavar="[OUT]" if optional else "OUT", required=False, type=FileName(output=True)),
        CommonOption(
            ["-o", "--output", "output"],
            metavar="OUT",
            type=FileName(output=True),
            help="Path of the output, instead of OUT.",
        ),
        CommonOption(
            ["-f", "--force"],
            is_flag=True,
            help="Replace OUT if it exists.",
        ),
        CommonOption(
            ["-b", "--backup"],
            is_flag=True,
            help="Replace OUT if it exists, and keep the old one as OUT.~1~, or with the next unused number.",
        ),
        CommonOption(["-n", "--dry-run"], is_flag=True, help="Show what would be written; write nothing."),
        CommonOption(
            ["--record"], is_flag=True, is_eager=True, expose_value=False, callback=_set("record"),
            help="Save a record next to OUT: SHA-256 of the inputs, command, version.",
        ),
        *folder_options(),
    ]  # fmt: skip


def where_to(dest: str | None, output: str | None, *, without: str | None = "") -> str | None:
    """Return the output.

    Args:
        without: the options that make OUT unnecessary; None if they are given.

    Raises:
        UsageError: the output is given twice, or not at all.
    """
    if dest is not None and output is not None:
        raise click.UsageError("The output is given twice: as OUT and with --output.")
    if dest is None and output is None and without is not None:
        raise click.UsageError(f"OUT is required unless you use {without}." if without else "Missing argument 'OUT'.")
    return dest if output is None else output


class _Name(NamedTuple):
    """The parts of an output's name: the word for the change, the suffix if known, and whether it is a folder."""

    word: str
    suffix: str | None = None
    folder: bool = False


def _name_of(verb: str, options: Mapping[str, Any]) -> _Name:
    """Return the parts of the output's name. Raise UsageError if the options do not define them."""
    from ckptfix.formats.target import named_format

    word = COMMANDS[verb].output_word
    if "to" not in options or (verb != "convert" and options["to"] is None):
        return _Name(word)
    if options["to"] is None and any(options.get(name) for name in ("dtype", "unwrap", "strip_prefix", "keep", "drop")):
        return _Name(word)
    if options["to"] is None:
        raise click.UsageError("OUT is required unless you use --to.")
    format = named_format(options["to"])
    if verb == "convert":
        return _Name(format.name, folder=format.folder)
    return _Name(word, format.own_suffix, format.folder)


def default_name(verb: str, source: str, options: Mapping[str, Any]) -> str | None:
    """Return the default name of an output, beside `source`: the name that doctor proposes.

    Returns:
        None if the function of the command chooses the name.

    Raises:
        UsageError: the options do not define a name, or `source` is a stream, which has no folder.
    """
    from ckptfix.ops.naming import named_beside

    if source in click.get_current_context().ensure_object(Console).streams:
        raise click.UsageError("OUT is required if IN is - (standard input); use - for standard output.")
    if verb == "fix":
        return None
    name = _name_of(verb, options)
    return named_beside(source, name.word, name.suffix, folder=name.folder)


def kept_name(verb: str, source: str, options: Mapping[str, Any]) -> str:
    """Return the output's name in a folder of outputs. Raise UsageError like `default_name`, or without a format."""
    from ckptfix.ops.naming import name_kept

    try:
        name = _name_of(verb, options)
    except Unsupported as error:
        raise click.UsageError(f"{error.message}; {error.hint}") from None
    return name_kept(source, name.word, name.suffix, folder=name.folder)


def writes(
    name: str, *params: click.Parameter, phases: Sequence[str] = ("writing",)
) -> Callable[[Callable[..., Written]], Verb]:
    """Make a command ``NAME IN [OUT]`` from a function (source, dest, how, `params`) that returns what it wrote.

    An argument among `params` gets the rest of the line. It must not be empty, and OUT is then required. `MoreInputs`
    are further inputs instead.

    Args:
        phases: as in `Console.progress`.
    """

    def decorate(function: Callable[..., Written]) -> Verb:
        @functools.wraps(function)
        def callback(
            console: Console,
            /,
            source: str,
            dest: str | None,
            output: str | None,
            *,
            force: bool,
            backup: bool,
            dry_run: bool,
            **options: Any,
        ) -> int:
            named = False
            for param in rest_of_line:
                assert param.name is not None
                if output is not None and dest is not None:
                    # With --output, the word in OUT's position is the first of these.
                    dest, options[param.name] = None, (dest, *options[param.name])
                if isinstance(param, MoreInputs) and options[param.name] and output is None:
                    # Of three names and more all are inputs, and the output is named after the last.
                    options[param.name], dest = (dest, *options[param.name]), None
                    _refuse_output(name, source, options[param.name])
                    output = default_name(name, options[param.name][-1], options)
                    named = True
                if not isinstance(param, MoreInputs) and not options[param.name]:
                    raise click.UsageError(f"Missing argument '{param.metavar}'.")
            in_place = options.pop("in_place", False)
            needed = None if optional or in_place else "--output or --out-dir"
            out = where_to(dest, output, without=needed)
            named = named or (out is None and not in_place)
            if out is None and named:
                out = default_name(name, source, options)
            from ckptfix.ops.writing import WriteOptions

            with console.progress("flushing to disk", phases) as progress:
                link = options.pop("link", False)
                how = WriteOptions(
                    force=force or backup, keep_old=backup, dry_run=dry_run, in_place=in_place, link=link,
                    progress=progress,
                )  # fmt: skip
                result = function(source, out, how, **options)
            return show(console, result, named=named)

        rest_of_line = [param for param in params if isinstance(param, click.Argument)]
        optional = all(isinstance(param, MoreInputs) for param in rest_of_line)
        out, *how_to = destination(optional=optional)
        rest = rest_of_line[0] if rest_of_line else Others()
        others = [] if rest_of_line else [rest]
        operands = InAndOut(rest, kept_name)
        arguments = [file_argument("source", "IN"), out, *params, *others]
        return reads(name, *arguments, *how_to, operands=operands)(callback)

    return decorate


def _refuse_output(verb: str, source: str, more: Sequence[str]) -> None:
    """Raise UsageError where the last of several inputs does not exist, and was meant as the output."""
    *others, last = more
    if is_url(last) or os.path.lexists(last) or not all(map(os.path.lexists, (source, *others))):
        return
    from ckptfix.cli.shared.wrong_words import near_names

    near = near_names(last)
    meant = f" Did you mean {word(near[0])}?" if near else ""
    line = " ".join(["ckptfix", verb, word(source), "...", "-o", word(last)])
    raise click.UsageError(
        f"{printable(last)} does not exist.{meant} If it is the output, name it with -o: `{line}`."
    )


def show(console: Console, result: Written, *, named: bool = False, most: int | None = None) -> int:
    """Show what an operation wrote or would write, and return its exit code.

    The `lines` of a result include findings that are only notes; warnings and losses go to stderr.

    Args:
        named: the output has a default name, because the user did not name it.
        most: limit on the warnings and losses listed.
    """
    if console.json:
        console.emit(result.as_dict(), result.exit_code)
        return result.exit_code
    from ckptfix.cli.shared.dry_run_lines import plan_lines
    from ckptfix.io.durable import kept_line

    lines = [printable(line) for line in tables.middle_cut(result.lines, console.rows(None, LINES))]
    if named:
        lines.append(printable(f"output: {result.dest}"))
    if result.backup is not None:
        lines.append(printable(kept_line(result.dest, result.backup)))
    planned = () if result.written or result.in_place else result.plan.files
    console.done(lines, [line for file in planned for line in plan_lines(file)])
    console.findings((row for row in result.findings if row.severity != "info"), most=most)
    return result.exit_code
