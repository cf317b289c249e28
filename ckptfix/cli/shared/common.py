"""What the commands share: their options, and how a result is shown."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import click

from ckptfix.cli.shared import tables
from ckptfix.cli.shared.console import Console, pass_console
from ckptfix.cli.shared.operands import InAndOut, Operands, Others, folder_options
from ckptfix.cli.shared.paint import When
from ckptfix.errors import Unsupported, printable

if TYPE_CHECKING:
    from ckptfix.checkpoint import Plan
    from ckptfix.cli.shared.many import Job
    from ckptfix.findings.row import Finding


Dash = Literal["input", "output", "text"]
"""What ``-`` is: standard input as a file, standard output, or the text that standard input has."""

LINES = 16
"""Lines that say what was done, on a terminal; a pipe gets all of them."""


class Written(Protocol):
    """What every operation that writes returns."""

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


class Verb(click.Command):
    """A command whose help ends with an example, and where ``-`` stands for a stream.

    Attributes:
        operands: how it takes its inputs; None where it takes a fixed number.
        shares: of several ranks, each does a part, which the command itself takes.
    """

    shares = False

    def __init__(self, name: str, *, example: str, operands: Operands | None = None, **attributes: Any) -> None:
        super().__init__(name, **attributes)
        self.example = example
        self.operands = operands

    def invoke(self, ctx: click.Context) -> int:
        console = ctx.ensure_object(Console)
        with contextlib.ExitStack() as stack:
            if any(value == "-" or (isinstance(value, tuple) and "-" in value) for value in ctx.params.values()):
                from ckptfix.cli.shared.streams import Place, standing_in

                types = [(str(param.name), param.type) for param in self.params]
                places = [Place(name, type.dash) for name, type in types if isinstance(type, FileName | Message)]
                stack.enter_context(standing_in(ctx.params, places, console))
            if console.record:
                from ckptfix.ops.record import recording

                if ctx.params.get("in_place"):
                    raise click.UsageError("--record is for outputs; `undo --list` says what was done in place.")
                stack.enter_context(recording("ckptfix", *console.arguments))
            job = self.operands.job(self, ctx) if self.operands is not None else None
            invoke = functools.partial(self._invoke, ctx, console, job)
            if not self.shares and ("WORLD_SIZE" in os.environ or "CKPTFIX_RANKS" in os.environ):
                from ckptfix.cli.shared.ranks import among

                return among(ctx, console, job is None, invoke)
            return invoke()

    def _invoke(self, ctx: click.Context, console: Console, job: Job | None) -> int:
        if job is None:
            return int(super().invoke(ctx))
        from ckptfix.cli.shared.jobs import run

        return run(job, console)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_usage(ctx, formatter)
        if self.operands is not None and self.operands.usage:
            formatter.write_usage(ctx.command_path, f"[OPTIONS] {self.operands.usage}", " " * len("Usage: "))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write(f"\nExample:\n  {self.example}\n")


class FileName(click.Path):
    """The name of a file, or of another TARGET; whether it can be read is for the library to say.

    ``-`` is standard input, or with `output` standard output.
    """

    def __init__(self, *, output: bool = False) -> None:
        super().__init__(readable=False, allow_dash=True)
        self.dash: Dash = "output" if output else "input"


class Message(click.types.StringParamType):
    """Text, which ``@FILE`` takes from a file, and ``-`` from standard input."""

    dash: Dash = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value.startswith("@"):
            return value
        from ckptfix.findings.message_names import MOST_TEXT

        with open(value[1:], encoding="utf-8", errors="replace") as stream:
            return stream.read(MOST_TEXT)


def file_argument(name: str, metavar: str) -> click.Argument:
    """A file; whether it can be read is for the library to say."""
    return click.Argument([name], metavar=metavar, type=FileName())


def files_argument(name: str, metavar: str, *, required: bool = True) -> click.Argument:
    """Any number of files."""
    return click.Argument([name], metavar=metavar, nargs=-1, required=required, type=FileName())


def _set(name: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    def callback(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value:
            setattr(ctx.ensure_object(Console), name, True)

    return callback


def _set_color(ctx: click.Context, param: click.Parameter, value: When) -> None:
    ctx.ensure_object(Console).color = value


def output_options() -> list[click.Parameter]:
    """--quiet, --json and --color, which the console keeps."""
    shared: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False}
    return [
        click.Option(["-q", "--quiet"], callback=_set("quiet"), help="Say nothing but warnings and errors.", **shared),
        click.Option(
            ["--json"],
            callback=_set("json"),
            help="Print the result as one JSON object; of several inputs, one on a line for each.",
            **shared,
        ),
        click.Option(
            ["--color"], type=click.Choice(["auto", "always", "never"]), default="auto", show_default=True,
            is_eager=True, expose_value=False, callback=_set_color, help="Colours: by default on a terminal.",
        ),
    ]  # fmt: skip


def reads(
    name: str,
    *params: click.Parameter,
    example: str,
    output: bool = True,
    operands: Operands | None = None,
) -> Callable[[Callable[..., int]], Verb]:
    """Make a command of a function that takes the console and `params`, and returns the exit code.

    Its docstring is the help text, and `example` ends it. `output` says whether it has --quiet, --json and --color,
    `operands` how it is done on several inputs.
    """

    def decorate(function: Callable[..., int]) -> Verb:
        return Verb(
            name,
            example=example,
            operands=operands,
            params=[*params, *(output_options() if output else [])],
            callback=pass_console(function),
            help=function.__doc__,
        )

    return decorate


def destination(*, optional: bool = False) -> list[click.Parameter]:
    """OUT and --output, --force and --dry-run, and --out-dir; `where_to` takes what the first four are given."""
    return [
        click.Argument(["dest"], metavar="[OUT]" if optional else "OUT", required=False, type=FileName(output=True)),
        click.Option(
            ["-o", "--output", "output"],
            metavar="OUT",
            type=FileName(output=True),
            help="The output; with --force an old file there is replaced without being kept.",
        ),
        click.Option(
            ["-f", "--force"],
            is_flag=True,
            help="Replace OUT if it exists. A checkpoint there is kept as OUT.~1~, unless -o named it.",
        ),
        click.Option(["-n", "--dry-run"], is_flag=True, help="Show what would be written, and write nothing."),
        click.Option(
            ["--record"], is_flag=True, is_eager=True, expose_value=False, callback=_set("record"),
            help="Keep what was done with OUT: inputs' SHA-256, command, version.",
        ),
        *folder_options(),
    ]  # fmt: skip


def where_to(dest: str | None, output: str | None, *, force: bool, without: str | None = "") -> tuple[str | None, bool]:
    """The output, and whether a checkpoint that it replaces is kept.

    IN and OUT side by side may be what a shell made of ``*.pth``: neither was given as the output.

    Args:
        without: the options that need no output; None if they are given.

    Raises:
        UsageError: it is given twice, or not at all.
    """
    if dest is not None and output is not None:
        raise click.UsageError("The output is given twice: as OUT and with --output.")
    if dest is None and output is None and without is not None:
        raise click.UsageError(f"OUT is required unless you use {without}." if without else "Missing argument 'OUT'.")
    return (dest, force) if output is None else (output, False)


class _Name(NamedTuple):
    """What an output is called: the word for what is done, its suffix where that is known, whether it is a folder."""

    word: str
    suffix: str | None = None
    folder: bool = False


_WORDS = {
    "fix": "fixed", "map-location": "moved", "select": "selected", "merge": "merged", "cast": "cast",
    "average": "averaged", "set-metadata": "described",
}
"""What the name of an output says that none of doctor's chains has."""


def _name_of(verb: str, options: Mapping[str, Any]) -> _Name:
    """Raises UsageError where the options do not say what the output is."""
    from ckptfix.findings.remedies import VERBS
    from ckptfix.formats.target import named_format

    word = VERBS[verb].word if verb in VERBS else _WORDS[verb]
    if "to" not in options or (verb != "convert" and options["to"] is None):
        return _Name(word)
    if options["to"] is None:
        raise click.UsageError("OUT is required unless you use --to.")
    format = named_format(options["to"])
    if verb == "convert":
        return _Name(format.name, folder=format.folder)
    return _Name(word, ".safetensors" if format.name == "safetensors" else None, format.folder)


def default_name(verb: str, source: str, options: Mapping[str, Any]) -> str | None:
    """What the output is called where it was not named: as doctor would propose it, beside `source`.

    Returns:
        None where the function of the command names it.

    Raises:
        UsageError: the options do not say what the output is, or `source` is a stream, beside which nothing stands.
    """
    from ckptfix.ops.naming import named_beside

    if source in click.get_current_context().ensure_object(Console).streams:
        raise click.UsageError("OUT is required where IN is - (standard input); as OUT, - is standard output.")
    if verb == "fix":
        return None
    name = _name_of(verb, options)
    return named_beside(source, name.word, name.suffix, folder=name.folder)


def kept_name(verb: str, source: str, options: Mapping[str, Any]) -> str:
    """What the output is called in a folder of outputs. Raises UsageError as `default_name`, and for no format."""
    from ckptfix.ops.naming import name_kept

    try:
        name = _name_of(verb, options)
    except Unsupported as error:
        raise click.UsageError(f"{error.message}; {error.hint}") from None
    return name_kept(source, name.word, name.suffix, folder=name.folder)


def writes(name: str, *params: click.Parameter, example: str) -> Callable[[Callable[..., Written]], Verb]:
    """Make a command ``NAME IN [OUT]`` of a function (source, dest, how, `params`) that writes and returns its result.

    An argument among `params` is one that takes the rest of the line. It must be given something, and OUT is then
    required; unless it is called ``[...]``: then it is for further inputs, which come with --output.
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
            dry_run: bool,
            **options: Any,
        ) -> int:
            for param in rest_of_line:
                assert param.name is not None
                if output is not None and dest is not None:
                    # With --output, what stands in OUT's place is the first of these.
                    dest, options[param.name] = None, (dest, *options[param.name])
                if is_more(param) and options[param.name] and output is None:
                    raise click.UsageError("Of several inputs, --output names the output.")
                if not is_more(param) and not options[param.name]:
                    raise click.UsageError(f"Missing argument '{param.metavar}'.")
            in_place = options.pop("in_place", False)
            needed = None if optional or in_place else "--output or --out-dir"
            out, keep_old = where_to(dest, output, force=force, without=needed)
            named = out is None and not in_place
            if named:
                out = default_name(name, source, options)
            from ckptfix.ops.writing import How

            with console.progress(at_end="flushing to disk") as progress:
                link = options.pop("link", False)
                how = How(
                    force=force, keep_old=keep_old, dry_run=dry_run, in_place=in_place, link=link, progress=progress
                )
                result = function(source, out, how, **options)
            return show(console, result, named=named)

        def is_more(param: click.Parameter) -> bool:
            return (param.metavar or "").startswith("[")

        rest_of_line = [param for param in params if isinstance(param, click.Argument)]
        optional = all(map(is_more, rest_of_line))
        out, *how_to = destination(optional=optional)
        rest = rest_of_line[0] if rest_of_line else Others()
        others = [] if rest_of_line else [rest]
        operands = InAndOut(rest, kept_name)
        arguments = [file_argument("source", "IN"), out, *params, *others]
        return reads(name, *arguments, *how_to, example=example, operands=operands)(callback)

    return decorate


def show(console: Console, result: Written, *, named: bool = False, most: int | None = None) -> int:
    """Show what an operation wrote, or would write; its exit code. With `named`, the user did not name the output.

    Its `lines` include the findings that are just notes; warnings and losses are listed on stderr, each, or `most` of
    them.
    """
    if console.json:
        console.emit(result.as_dict(), result.exit_code)
        return result.exit_code
    from ckptfix.cli.shared.planned import plan_lines
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
