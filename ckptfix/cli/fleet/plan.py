"""ckptfix fleet plan: expand names to inputs, build a command line for each, and check the outputs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import click

from ckptfix import formats, platform
from ckptfix.cli.shared.command_lines import WITHOUT, outputs_of, parsed, verb_called
from ckptfix.cli.shared.common import Verb, output_options
from ckptfix.cli.shared.console import Console, pass_console
from ckptfix.cli.shared.operands import InAndOut
from ckptfix.cli.shared.tables import size
from ckptfix.commands import command, quoted
from ckptfix.errors import CkptfixError, NoSuchFile, WouldOverwrite
from ckptfix.fleet.bounds import root_options
from ckptfix.fleet.plan_lines import PlannedJob, identity, size_of
from ckptfix.io.source import found_as
from ckptfix.io.system import text_of
from ckptfix.runner.inputs import SUFFIXES, Input, expanded, is_pattern, refuse_collisions
from ckptfix.urls import as_path, is_url, known, normal, real_path, secrets, word_without_secrets
from ckptfix.words import plural

WORDS = "ckptfix.fleet.words"
"""Key in the context's meta: the words after ``--``."""

PLAN = "plan.jsonl"
"""Assumed name of a plan that goes to a pipe, in the current folder."""


LISTS = (".txt", ".lst", ".list", ".jsonl", ".ndjson")
"""Suffixes of lists of names."""

FIELDS = re.compile(r"\{(stem|name|suffix|parent)\}")
"""Fields of a template: for ``runs/7/model.pth``, stem model, name model.pth, suffix .pth, parent runs/7."""

IN_PLACE = "{in place}"
"""The template for commands whose outputs are their inputs."""


class PlanCommand(Verb):
    """A command line that contains another command after ``--``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[WORDS] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, "[OPTIONS] NAME... -- VERB ARGS > PLAN")

    def invoke(self, ctx: click.Context) -> Any:
        return click.Command.invoke(self, ctx)  # - is a list of names here, not a checkpoint


@pass_console
def _plan(console: Console, *, names: tuple[str, ...], out_dir: str | None, recursive: bool) -> int:
    """Write a plan to stdout, one line of JSON per job.

    Each line has the input, output and command line of its job.

    NAME is a checkpoint, a folder (with -r all checkpoints below it), a quoted pattern, or a list: a text file with
    one name per line, or - for standard input. Write the command after --, without its inputs. Outputs go to --out-dir
    under the names of their inputs, or where a template puts them: {stem}, {name}, {suffix} and {parent} are parts of
    the input's name.

    Only the plan is written. A command that cannot run in a fleet, wrong options, and outputs with the same name are
    refused.
    """
    words = click.get_current_context().meta[WORDS]
    if not words:
        raise click.UsageError("Missing command: write it after the names and --, as in ... -- doctor --fast")
    if not names:
        raise click.UsageError("Missing argument 'NAME...'.")
    count = total = missing = hidden = 0
    outputs: list[str] = []
    planned = jobs(names, words, out_dir=out_dir, recursive=recursive)
    secret = secrets()
    for job in planned:
        console.data(job.line())
        outputs += [] if job.output is None else [job.output]
        count, total, missing = count + 1, total + job.bytes, missing + (job.identity is None)
        hidden += bool(secret) and any(word in secret or word.partition("=")[2] in secret for word in job.argv)
    if not console.quiet:
        console.note(f"{plural(count, 'job')}, {size(total)} of inputs")
    if hidden:
        console.note(f"a plan holds no secrets: {plural(hidden, 'job')} will ask for a URL without its password or "
            "signature")  # fmt: skip
    if missing:
        console.note(f"{plural(missing, 'input')} not found: the jobs will fail")
    place = _place()
    if roots := root_options(place or PLAN, outputs):
        run = f"{command('fleet', 'run')} {quoted(place)} {roots}" if place else f"run `ckptfix fleet run` with {roots}"
        console.note(f"outputs are outside the folder of the plan: {run}")
    return 0


def _place() -> str | None:
    """Return the file that the plan goes to, if the system names it; None for a pipe or a terminal."""
    with contextlib.suppress(OSError, ValueError):
        number = sys.stdout.fileno()
        name = os.readlink(platform.name_of(number))  # noqa: PTH115
        if stat.S_ISREG(os.fstat(number).st_mode) and os.path.samestat(os.stat(name), os.fstat(number)):  # noqa: PTH116
            return os.path.relpath(name) if os.path.dirname(name) == os.getcwd() else name  # noqa: PTH109, PTH120
    return None


def jobs(names: Sequence[str], words: Sequence[str], *, out_dir: str | None, recursive: bool) -> Iterator[PlannedJob]:
    """Yield the jobs that run ``VERB ARGS`` on the inputs in `names`. Check everything before the first job.

    Args:
        names: lists of names, patterns, folders, inputs; ``-`` is a list on standard input.
        words: the verb and its arguments, which may contain template fields.
        recursive: search folders.

    Raises:
        click.UsageError: the verb cannot run in a fleet, or the words do not fit it.
        WouldOverwrite: two outputs have the same name, one is inside another, or one is an input.
        NoSuchFile: a name of the command line matches nothing.
    """
    verb = verb_called(words[0])
    args, inner = _without(verb, [word_without_secrets(word) for word in words[1:]])
    out_dir = None if out_dir is None else known(out_dir)
    if out_dir is not None and "out_dir" in inner:
        raise click.UsageError("--out-dir is given twice: before -- and after it.")
    out_dir = inner.get("out_dir", out_dir)
    recursive = recursive or "recursive" in inner
    template = _template(verb, args, out_dir)
    inputs = list(_unique(_inputs(names, recursive=recursive, leave_out=out_dir)))
    if not inputs:
        raise click.UsageError("The list is empty: there is nothing to plan.")
    outputs = _outputs(verb, inputs, args, out_dir, template)
    refuse_collisions(
        [row.path for row in inputs],
        outputs,
        "use more of the input's name, as in -o 'out/{parent}/{name}'; with -r FOLDER, --out-dir keeps the folders",
    )
    if template != IN_PLACE:
        for row, output in zip(inputs, outputs, strict=True):
            if output is not None and real_path(output) == real_path(row.path):
                raise WouldOverwrite("the output is the input", path=output, hint="--in-place edits the inputs")
    return _lines(verb, inputs, outputs, args, with_output=template is None and out_dir is not None)


def _lines(
    verb: Verb, inputs: Sequence[Input], outputs: Sequence[str | None], args: Sequence[str], *, with_output: bool
) -> Iterator[PlannedJob]:
    for row, output in zip(inputs, outputs, strict=True):
        found = identity(row.path)
        first = f"./{row.path}" if row.path.startswith("-") else row.path
        out = [str(output)] if with_output else []
        words = [filled(word, row.path) for word in args]
        yield PlannedJob(row.path, found, output, size_of(found), (str(verb.name), first, *out, *words))


def _without(verb: Verb, args: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split the arguments: the rest, and the options that the plan handles itself (--out-dir and -r)."""
    takes = {word: param for param in verb.params if isinstance(param, click.Option) for word in param.opts}
    left: list[str] = []
    inner: dict[str, Any] = {}
    words = iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        param = takes.get(word) or (takes.get(name) if equals and name.startswith("--") else None)
        if param is None:
            left.append(word)
            continue
        given = [] if param.is_flag or equals else [next(words, "") for _ in range(param.nargs)]
        match param.name:
            case "out_dir":
                inner["out_dir"] = value if equals else given[0]
            case "recursive":
                inner["recursive"] = True
            case "jobs" | "allow_import":
                raise click.UsageError(f"{name} is an option of `ckptfix fleet run`.")
            case _:
                left += [word, *given]
    return left, inner


def _template(verb: Verb, args: Sequence[str], out_dir: str | None) -> str | None:
    """Return the template of the outputs; None without outputs or with --out-dir. Check the arguments."""
    probe = "IN.pth"
    out = ["OUT.pth"] if out_dir is not None and isinstance(verb.operands, InAndOut) else []
    with parsed(verb, [probe, *out, *args]) as ctx:
        if verb.operands is not None and verb.operands.batch(verb, ctx) is not None:
            raise click.UsageError(f"{verb.name}: name the inputs before --.", ctx)
        params = ctx.params
        for value in params.values():
            if value == "-" or (isinstance(value, tuple) and "-" in value):
                raise click.UsageError("- (a stream) cannot be shared by the jobs of a fleet.", ctx)
        outputs = outputs_of(verb, params)
        _missing(verb, ctx)
        if out_dir is not None:
            if "dest" not in params:
                raise click.UsageError(f"{verb.name} writes nothing: leave out --out-dir.", ctx)
            if len(outputs) > 1:
                raise click.UsageError(f"A job of a fleet writes one output, but this has {len(outputs)}.", ctx)
            if params.get("output") is not None or params.get("in_place"):
                raise click.UsageError("The output is given twice: with --out-dir and with -o or --in-place.", ctx)
            return None
        if params.get("in_place"):
            return IN_PLACE
        if len(outputs) > 1:
            raise click.UsageError(f"A job of a fleet writes one output, but this has {len(outputs)}.", ctx)
        if not outputs:
            if "dest" in params and not any(params.get(name) for name in WITHOUT):
                example = f"-- {verb.name} -o 'out/{{stem}}{{suffix}}'"
                raise click.UsageError(f"Missing output: give --out-dir DIR, or a template: {example}.", ctx)
            return None
        return outputs[0]


def _missing(verb: Verb, ctx: click.Context) -> None:
    """Refuse a command line that lacks its last argument, which only the command's function would check."""
    for param in verb.params:
        if isinstance(param, click.Argument) and param.nargs == -1 and not (param.metavar or "[").startswith("["):
            given = ctx.params.get(str(param.name)) or (ctx.params.get("output") and ctx.params.get("dest"))
            if not given and param.name not in ("path", "source"):
                raise click.UsageError(f"Missing argument '{param.metavar}'.", ctx)


def filled(word: str, name: str) -> str:
    """Replace the template fields in a word of a command line with the parts of an input's name."""
    if "{" not in word:
        return word
    parts = _parts(name)
    return FIELDS.sub(lambda found: parts[found[1]], word)


def _parts(name: str) -> dict[str, str]:
    parent, _, last = normal(name).rpartition("/")
    stem, suffix = os.path.splitext(last)  # noqa: PTH122
    if stem.endswith(".pth"):  # .pth.tar
        stem, suffix = stem.removesuffix(".pth"), f".pth{suffix}"
    if is_url(name):
        parent = parent.partition("://")[2]
    return {"stem": stem, "name": last, "suffix": suffix, "parent": parent or "."}


def _outputs(
    verb: Verb, inputs: Sequence[Input], args: Sequence[str], out_dir: str | None, template: str | None
) -> list[str | None]:
    """Return the output of each input."""
    if template == IN_PLACE:
        return [row.path for row in inputs]
    if template is not None:
        return [normal(filled(template, row.path)) for row in inputs]
    if out_dir is None:
        return [None] * len(inputs)
    assert isinstance(verb.operands, InAndOut)
    with parsed(verb, ["IN.pth", "OUT.pth", *args]) as ctx:
        names = [verb.operands.name_of(str(verb.name), row.path, ctx.params) for row in inputs]
    return [normal(str(as_path(out_dir, row.within, name))) for row, name in zip(inputs, names, strict=True)]


def _unique(inputs: Iterable[Input]) -> Iterator[Input]:
    """Yield each input once, however often a list names it."""
    seen: set[str] = set()
    for row in inputs:
        if row.path not in seen:
            seen.add(row.path)
            yield row


def _inputs(names: Sequence[str], *, recursive: bool, leave_out: str | None) -> Iterator[Input]:
    for name in names:
        if name == "-":
            yield from _listed(sys.stdin.read(), recursive, leave_out)
        elif is_list(name):
            yield from _listed(text_of(name, encoding="utf-8", errors="surrogateescape"), recursive, leave_out)
        elif not is_pattern(name) and not found_as(name):
            raise NoSuchFile(name)
        else:
            yield from expanded([known(name)], recursive=recursive, leave_out=leave_out)


def is_list(name: str) -> bool:
    """Return whether a name of the command line is a list of names, and not an input itself."""
    low = name.lower()
    if is_url(name) or found_as(name) != "file" or low.endswith(SUFFIXES):
        return False
    if low.endswith(LISTS):
        return True
    try:
        if formats.is_checkpoint(name):
            return False
    except CkptfixError:
        return False
    with open(name, "rb") as file:
        start = file.read(4096)
    return bool(start) and b"\0" not in start and not low.endswith((".json", ".bin"))


def _listed(text: str, recursive: bool, leave_out: str | None) -> Iterator[Input]:
    """Yield the inputs of a list, separated by newlines or NUL; skip empty lines and comments."""
    for line in text.split("\0" if "\0" in text else "\n"):
        name = line.strip("\r\n")
        if name.strip() and not name.startswith("#"):
            yield from expanded([known(_name_in(name))], recursive=recursive, leave_out=leave_out)


def _name_in(line: str) -> str:
    """Return the name in a line: plain, as a JSON string, or in a JSON object under input, path or file."""
    if line.startswith(("{", '"')):
        try:
            value = json.loads(line)
        except ValueError:
            return line
        if isinstance(value, dict):
            value = next((value[key] for key in ("input", "path", "file") if isinstance(value.get(key), str)), None)
        if isinstance(value, str):
            return value
        raise click.UsageError(f"A line of the list names no input: {line[:60]!r}.")
    return line


plan = PlanCommand(
    "plan",
    params=[
        click.Argument(["names"], metavar="NAME...", nargs=-1, required=False),
        click.Option(["--out-dir"], metavar="DIR", help="Folder for the outputs, under the names of their inputs."),
        click.Option(["-r", "--recursive"], is_flag=True, help="Search folders for checkpoints."),
        next(option for option in output_options() if option.name == "quiet"),
    ],
    callback=_plan,
    help=_plan.__doc__,
    examples=("ckptfix fleet plan 'runs/**/*.pth' -- to-cpu -o 'cpu/{parent}/{name}' > plan.jsonl",),
)
