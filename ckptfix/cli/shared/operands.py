"""The words of a command line: an input and its output, or any number of inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import click

from ckptfix.cli.shared.console import Console
from ckptfix.errors import CkptfixError
from ckptfix.urls import as_path, normal

if TYPE_CHECKING:
    from ckptfix.cli.shared.batch import Batch, OutcomeReport

JOBS = "ckptfix.jobs"
"""Key in the context's meta: the number of processes asked for."""


class Operands(Protocol):
    """The way in which a command reads its inputs from the command line."""

    usage: str
    """The second usage line; empty if there is only one."""

    def batch(self, command: click.Command, ctx: click.Context) -> Batch | None:
        """Return the jobs that the command line asks for; None for a single input, which is then in the parameters."""


class Others(click.Argument):
    """Inputs after IN and OUT, for outputs that go to a folder. The second usage line shows them."""

    def __init__(self) -> None:
        super().__init__(["others"], nargs=-1, required=False)

    def get_usage_pieces(self, ctx: click.Context) -> list[str]:
        return []


class Last(click.Argument):
    """An argument for the last words of the line; `tells` distinguishes them from names of inputs."""

    def __init__(self, name: str, metavar: str, *, tells: Callable[[str], bool], **attributes: Any) -> None:
        super().__init__([name], metavar=metavar, nargs=-1, required=False, **attributes)
        self.tells = tells


class CommonOption(click.Option):
    """An option that many commands have; the short help only names it."""


def _option(*words: str, **attributes: Any) -> click.Option:
    return CommonOption(words, **attributes)


def search_options() -> list[click.Parameter]:
    """Return the options --recursive and --jobs."""
    return [
        _option(
            "-r", "--recursive", is_flag=True,
            help="Search folders. A checkpoint of many files is one input; other files are skipped.",
        ),
        _option(
            "--jobs", metavar="N", type=click.IntRange(min=1), default=1, show_default=True,
            help="Work on N inputs at a time, each in its own process.",
        ),
    ]  # fmt: skip


def folder_options() -> list[click.Parameter]:
    """Return the option --out-dir, and the options that search for its inputs."""
    out_dir = _option(
        "--out-dir", metavar="DIR", type=click.Path(file_okay=False),
        help="Treat every name as an input, and write the outputs to DIR under the same names. Patterns may be quoted.",
    )  # fmt: skip
    return [out_dir, *search_options()]


class Inputs:
    """A command that only reads: every word is an input, passed to its function one at a time as `argument`."""

    usage = ""

    def __init__(self, argument: str, report: Callable[[Console, Batch], OutcomeReport]) -> None:
        self.argument = argument
        self.report = report

    def batch(self, command: click.Command, ctx: click.Context) -> Batch | None:
        names: tuple[str, ...] = ctx.params[self.argument]
        recursive = ctx.params.pop("recursive")
        ctx.meta[JOBS] = ctx.params.pop("jobs")
        if len(names) < 2 and not recursive:
            from ckptfix.runner.inputs import is_pattern

            if not any(map(is_pattern, names)):
                ctx.params[self.argument] = names[0] if names else None
                return None
        if not names:
            raise click.UsageError("-r needs the name of a folder.", ctx)
        return self.of(command, ctx, names, recursive=recursive)

    def of(
        self, command: click.Command, ctx: click.Context, names: Sequence[str], *, recursive: bool = False
    ) -> Batch:
        """Return the jobs that read these inputs, with the options of the command line."""
        if ctx.params.get("html"):
            raise click.UsageError("--html writes one page for one input: name one, or run the command for each.", ctx)
        from ckptfix.runner.inputs import expanded

        paths = [input.path for input in expanded(names, recursive=recursive)]
        return _batch(command, ctx, self.argument, paths, self.report)


class InAndOut:
    """A command ``IN [OUT]``; every word is an input if the outputs go to a folder.

    Args:
        rest: its argument for the rest of the line; `Others` if it has no such argument.
        called: (verb, source, options) -> the name of an output that keeps the name of its input.
    """

    usage = "--out-dir DIR IN..."

    def __init__(self, rest: click.Argument, called: Callable[[str, str, Mapping[str, Any]], str]) -> None:
        self._rest = rest
        self._called = called
        if isinstance(rest, Last):
            self.usage += f" {rest.metavar}"

    def batch(self, command: click.Command, ctx: click.Context) -> Batch | None:
        params = ctx.params
        out_dir, recursive = params.pop("out_dir"), params.pop("recursive")
        ctx.meta[JOBS] = params.pop("jobs")
        rest = str(self._rest.name)
        others: tuple[str, ...] = params.pop("others") if rest == "others" else ()
        if params.get("in_place"):
            return self._in_place(command, ctx, others, out_dir, recursive=recursive)
        if out_dir is None:
            self._refuse(ctx, recursive, others)
            return None
        if params["output"] is not None:
            raise click.UsageError("The output is given twice: with --output and with --out-dir.", ctx)
        for param in command.params:
            if getattr(param.type, "dash", None) == "output" and param.name != "dest" and params[str(param.name)]:
                raise click.UsageError(f"{param.opts[0]} is one file, but with --out-dir every input writes one.", ctx)
        words = self._words(ctx, others)
        return self._many(command, ctx, words, out_dir, recursive=recursive)

    def _words(self, ctx: click.Context, others: Sequence[str]) -> list[str]:
        """Remove all names of inputs from the parameters, and return them."""
        params, rest = ctx.params, str(self._rest.name)
        words = [word for word in (params.pop("source"), params.pop("dest")) if word is not None]
        words += others if rest == "others" else params[rest]
        if rest != "others":
            params[rest] = self._last(words)
            del words[len(words) - len(params[rest]) :]
        if not words:
            raise click.UsageError("Missing argument 'IN...'.", ctx)
        return words

    def _in_place(
        self, command: click.Command, ctx: click.Context, others: Sequence[str], out_dir: str | None, *, recursive: bool
    ) -> Batch | None:
        """Return the jobs that change each input in place; None for one input, which is then in the parameters."""
        from ckptfix.runner.inputs import expanded, is_pattern

        if out_dir is not None or ctx.params["output"] is not None:
            raise click.UsageError("An in-place edit has no output: every name is an input.", ctx)
        words = self._words(ctx, others)
        if any(word in ctx.ensure_object(Console).streams for word in words):
            raise click.UsageError("- (standard input) cannot be edited in place.", ctx)
        ctx.params["dest"] = None
        if len(words) == 1 and not recursive and not is_pattern(words[0]):
            ctx.params["source"] = words[0]
            return None
        from ckptfix.cli.shared.batch import LineReport

        paths = [input.path for input in expanded(words, recursive=recursive)]
        return _batch(command, ctx, "source", paths, LineReport, outputs=paths)

    def _refuse(self, ctx: click.Context, recursive: bool, others: Sequence[str]) -> None:
        """Refuse a command line with many inputs but no folder for the outputs."""
        if recursive:
            raise click.UsageError("-r needs --out-dir DIR: the outputs go there, under the same names.", ctx)
        if others:
            from ckptfix.cli.shared.wrong_words import third_name

            raise click.UsageError(third_name(str(ctx.command.name), others), ctx)
        from ckptfix.runner.inputs import is_pattern

        if is_pattern(ctx.params["source"]):
            raise click.UsageError("IN is a pattern: give --out-dir DIR, the folder for the outputs.", ctx)

    def name_of(self, verb: str, path: str, params: Mapping[str, Any]) -> str:
        """Return the name of the output of `path` in a folder of outputs."""
        try:
            return self._called(verb, path, params)
        except (CkptfixError, OSError):
            return as_path(path).name  # there will be no output: the command reports the problem

    def _last(self, words: Sequence[str]) -> tuple[str, ...]:
        if not isinstance(self._rest, Last):
            return ()
        count = 0
        while count < len(words) and self._rest.tells(words[-1 - count]):
            count += 1
        return tuple(words[len(words) - count :])

    def _many(
        self, command: click.Command, ctx: click.Context, words: Sequence[str], out_dir: str, *, recursive: bool
    ) -> Batch:
        from ckptfix.cli.shared.batch import LineReport
        from ckptfix.runner.inputs import expanded, refuse_collisions

        console = ctx.ensure_object(Console)
        if any(word in console.streams for word in words):
            raise click.UsageError("- (standard input) has no name for an output in --out-dir.", ctx)
        inputs = expanded(words, recursive=recursive, leave_out=out_dir)
        names = [self.name_of(str(command.name), input.path, ctx.params) for input in inputs]
        paths = [input.path for input in inputs]
        outputs = [
            normal(str(as_path(out_dir, input.within, name))) for input, name in zip(inputs, names, strict=True)
        ]
        hint = "-r FOLDER keeps the folders below FOLDER, and so does a quoted pattern; or run them one by one"
        refuse_collisions(paths, outputs, hint)
        return _batch(command, ctx, "source", paths, LineReport, outputs=outputs, out_dir=out_dir)


def _batch(
    command: click.Command,
    ctx: click.Context,
    argument: str,
    inputs: Sequence[str],
    report: Callable[[Console, Batch], OutcomeReport],
    *,
    outputs: Sequence[str] | None = None,
    out_dir: str | None = None,
) -> Batch:
    """Return a job for each input, with the options of the command line.

    Args:
        argument: the parameter for the input.
        outputs: that of each input; None for a command without outputs.
    """
    from ckptfix.cli.shared.batch import Batch
    from ckptfix.runner.jobs import ConsoleSettings, Job

    console = ctx.ensure_object(Console)
    settings = ConsoleSettings(console.json, console.quiet, console.width, bool(console.rows(None, 1)))
    options = {name: value for name, value in ctx.params.items() if name != argument}
    jobs = []
    for number, path in enumerate(inputs):
        output = None if outputs is None else outputs[number]
        jobs.append(
            Job(
                command=str(command.name),
                input=path,
                outputs=() if output is None else (output,),
                options={**options, argument: path, **({} if out_dir is None else {"dest": output})},
                words=tuple(console.arguments),
                record=console.record,
                settings=settings,
            )
        )
    return Batch(jobs=jobs, options=options, report=report, processes=ctx.meta[JOBS], out_dir=out_dir)
