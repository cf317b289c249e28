"""Commands on every source that is read: what they edit in, and the conversions before and after them.

A command edits the format that it reads. A source in a format that is only read, or an output whose suffix belongs to
another format, takes one conversion before the command, or one after it, or both. Each works on the plan of the one
before it (`chain`), so the bytes are copied once. A packed file, such as gzip, is unpacked to a folder beside the
output, because the bytes of its tensors are not ranges of the file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import field, replace
from functools import cache, partial, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

from ckptfix import formats
from ckptfix.checkpoint import Checkpoint, FileVersion, OutputFile, Plan
from ckptfix.commands import command
from ckptfix.dataclass import dataclass
from ckptfix.errors import ChangedFile, CkptfixError, Refused, StrPath, UnknownFormat, about, file_name
from ckptfix.formats import FORMATS
from ckptfix.formats.base import PACKED, TORCH_SUFFIXES, Format
from ckptfix.formats.signs import ZIP, Beginning
from ckptfix.formats.target import named_format, of_suffix, suits
from ckptfix.io.source import mark, open_source, refuse_changes, shares_open_files
from ckptfix.ops import choose
from ckptfix.ops.audit.promise import Account
from ckptfix.ops.chain import Chain, function_of
from ckptfix.ops.writing import (
    LEFT_BEHIND,
    Draft,
    Result,
    WriteOptions,
    carry_out_file,
    companions,
    copy_note,
    existing,
    refuse_destination,
)
from ckptfix.pickles.collector import gc_paused
from ckptfix.urls import Virtual, is_url
from ckptfix.words import plural, some

P = ParamSpec("P")
R = TypeVar("R", bound=Result)


class PlannedCommand(NamedTuple):
    """A command between the conversions.

    Attributes:
        words: its name and options, for the list of steps.
        function: called with the input, the output, its options, and ``dry_run=True``.
        options: its keywords.
        unpacked: the keyword that gets the path of the source as it is read; empty without one. A packed source is
            unpacked once, for all that read it.
    """

    words: tuple[str, ...]
    function: Callable[..., Result]
    options: Mapping[str, Any] = {}
    unpacked: str = ""


@dataclass(frozen=True, slots=True)
class Opened:
    """A source as it is read.

    Attributes:
        path: the file or folder that is read; for a packed source, what was unpacked from it.
        format: its format.
        packed: how it was packed, such as ``"it is packed with gzip"``, outermost first.
        read: the packed file as it was before; empty if it is not packed.
        keeps: keeps the unpacked file as long as it is referred to.
    """

    path: str
    format: Format
    packed: tuple[str, ...] = ()
    read: tuple[FileVersion, ...] = ()
    keeps: tuple[object, ...] = ()


def opened(path: str, near: str, stack: ExitStack) -> Opened:
    """Return the source at `path`, unpacked to a folder beside `near` if it is packed as a whole.

    Args:
        stack: removes the folder.

    Raises:
        UnknownFormat: it is not a checkpoint, packed or not.
        Refused: it is packed, and damaged.
    """
    try:
        format = formats.detect(path)
        if _lacks_object(path, format):
            # Its format is that of every zip; reading it says what it is instead.
            formats.open_as(path, format)
        return Opened(path, format)
    except UnknownFormat as error:
        # Few sources are packed, and other commands start faster without this import.
        from ckptfix.ops.layers import ScratchFolder, unwrap

        before = mark(path)
        folder = cache(lambda: ScratchFolder(_beside(near), stack))
        inner, notes = unwrap(path, lambda: folder().path)
        if not notes:
            raise
        stack.push(partial(_with_names, {inner: path}))
        if any(note.severity != "info" for note in notes):
            hint = f"`{command('repair', path, 'OUT')}` recovers what is intact"
            raise Refused("; ".join(note.message for note in notes), path=path, hint=hint) from error
        with about(path):
            try:
                format = formats.detect(inner)
            except CkptfixError:
                raise error from None
        return Opened(inner, format, tuple(note.message for note in notes), (before,), (folder(),))


def _with_names(names: Mapping[str, str], kind: object, error: BaseException | None, trace: object) -> None:
    """Replace names in an error that leaves a block: those of planned and unpacked files mean nothing to the user.

    Args:
        names: what is replaced -> by what.
        kind, error, trace: as of ``__exit__``.
    """
    if not isinstance(error, CkptfixError):
        return
    for name in sorted(names, key=len, reverse=True):
        error.path = names[name] if error.path == name else error.path
        error.message = error.message.replace(name, names[name])
        if error.hint:
            error.hint = error.hint.replace(name, names[name])


def _with_source(source: str, names: Mapping[str, str], kind: object, error: BaseException | None, *rest: Any) -> None:
    """Make an error about a planned file one about the source, and replace names as `_with_names` does."""
    if isinstance(error, CkptfixError) and isinstance(error.path, Virtual):
        error.path = source
    _with_names(names, kind, error, *rest)


def _lacks_object(path: str, format: Format) -> bool:
    """Return whether this is a zip that is taken for a checkpoint, and has no pickle."""
    if format.folder or not format.edits:
        return False
    with open_source(path) as reader:
        seen = Beginning(path, reader.read(0, min(4, reader.size)), reader.size)
        return seen.head == ZIP and not seen.has_record("data.pkl")


def _beside(near: str) -> str:
    return os.getcwd() if is_url(near) else os.path.dirname(os.path.abspath(near))  # noqa: PTH100, PTH109, PTH120


def as_state_dict(path: str, near: str, at: str | None, stack: ExitStack) -> Checkpoint:
    """Read a further input of a command; it is unpacked if it is packed, and of a whole module it is the state dict.

    Args:
        near, stack: as in `opened`.
        at: address of the state dict that is meant.
    """
    found = opened(formats.located(existing(path)), near, stack)
    stack.callback(lambda: found)  # what was unpacked lasts as long
    checkpoint = formats.open_checkpoint(found.path)
    try:
        choose.mapping(checkpoint, at)
    except Refused as error:
        if error.of_module:
            chain = stack.enter_context(Chain(found.path, None, dry_run=True))
            options = {} if at is None else {"at": at}
            extract = partial(function_of("extract"), to="legacy", **options)
            chain.plan(("extract",), Virtual(f"{path}.pt"), extract)
            return formats.open_checkpoint(chain.current)
    return checkpoint


def working_format(format: Format, target: Format) -> Format:
    """Return the format in which commands work on a source that becomes `target`.

    In a format with checksums they could not work on one another's output before it is written, unless the source has
    that format and states the sums of its data.
    """
    if "objects" not in target.states:
        return FORMATS["safetensors"]
    if format.edits and not format.folder and (target is format or "checksums" not in format.states):
        return format
    return FORMATS["legacy" if "objects" in format.states else "safetensors"]


Amend = Callable[[Checkpoint, Sequence[OutputFile]], Sequence[OutputFile]]
"""The type of a function that changes the copies of the files beside a checkpoint."""


@dataclass(slots=True)
class _Run:
    """The commands on one source: `operations`, with the conversions around them.

    Attributes:
        source: the name that the user gave.
        dest: the output.
        target: its format.
        at: the one state dict that is meant.
        conversion: further options of the conversion.
        shaping: options of the conversion that writes `target`, such as a size of shards.
        first: as in `carry_out`.
        converts: the operation is a conversion itself.
        module: the source is a whole module, whose state dict is extracted.
        alone: the output holds only the state dict at `at`.
        several: the files of all ranks, which the first conversion joins; `source` is the first of them.
        amend: changes the files that follow a folder into another folder.
        names: the names of planned files.
    """

    source: StrPath
    dest: str
    opened: Opened
    target: Format
    operations: Sequence[PlannedCommand]
    at: str | None
    conversion: Mapping[str, Any]
    shaping: Mapping[str, Any]
    first: bool
    converts: bool = False
    module: bool = False
    alone: bool = False
    several: Sequence[StrPath] = ()
    amend: Amend | None = None
    names: set[str] = field(default_factory=set)

    def carried_out(self, chain: Chain) -> tuple[list[Result], list[Result]]:
        """Plan everything; return the results of the operations, and those of the conversions."""
        format, target = self.opened.format, self.target
        working = working_format(format, target)
        # A format that holds only arrays, and is not written, is converted first all the same.
        has_object = format.edits or "objects" in format.states
        if self.converts or (self.first and has_object and not format.folder):
            working = format
        if self.converts and self.module:
            working = working_format(format, target)
        made: list[Result] = []
        given = {} if self.at is None else {"at": self.at}
        flattens = "objects" not in working.states or format.select_weights is not None
        holds = "objects" in working.states
        alone = self.at is not None and holds and (self.alone or (flattens and working is not format))
        if self.module or alone:
            made.append(self._converted(chain, "extract", working, given))
            given = {}
        elif working is not format or self.conversion or self.several:
            options = {**(given if flattens else {}), **self.conversion}
            shaping = self.shaping if working is target else {}
            made.append(self._converted(chain, "convert", working, {**options, **shaping}))
            given = {} if flattens else given
        done: list[Result] = []
        for one in self.operations:
            dest = Virtual(self.dest) if self.converts else self._name(working)
            options = {**one.options, **(given if "at" in one.options else {})}
            if not given:
                options.pop("at", None)
            if one.unpacked:
                options[one.unpacked] = self.opened.path
            done.append(chain.plan(one.words, dest, partial(one.function, **options)))
        if chain.format is None or FORMATS[chain.format] is not target:
            made.append(self._converted(chain, "convert", target, dict(self.shaping)))
        return done, made

    def _converted(self, chain: Chain, verb: str, to: Format, options: Mapping[str, Any]) -> Result:
        words = [verb, "--to", to.name]
        for name, value in options.items():
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        function = partial(function_of(verb), to=to.name, **options)
        if self.several and chain.format is None:
            function = partial(_joining, function, self.several)
        return chain.plan(words, self._name(to), function)

    def _name(self, format: Format) -> Virtual:
        """Return the name of an output of this format, like that of the last one."""
        suffixes = format.suffixes or TORCH_SUFFIXES
        name = Virtual(self.dest if suits(self.dest, format.name) else f"{self.dest}{suffixes[0]}")
        self.names.add(name)
        return name

    @property
    def what(self) -> str:
        """The kind of the source, in words."""
        title = self.opened.format.title
        packed = ", ".join(note.removeprefix("it is ") for note in self.opened.packed)
        return f"{f'a whole module ({title})' if self.module else title}{f', {packed}' if packed else ''}"

    def line(self) -> str:
        """Return a line that says what the source is, and what the output."""
        return f"input: {self.what}; output: {self.target.title}"

    def headline(self, account: Account | None) -> str:
        """Return the first line of a conversion."""
        count = 0 if account is None else account.written
        return f"converted {plural(count, 'tensor')}: {self.what} -> {self.target.title}"

    def along(self, plan: Plan) -> list[OutputFile]:
        """Return the companion files that follow a folder into another folder."""
        if not self.target.folder or self.several:
            return []
        names = {file.path for file in plan.files}
        checkpoint = formats.open_checkpoint(self.opened.path)
        around = companions(checkpoint, self.source, self.dest)
        if self.amend is not None:
            around = tuple(self.amend(checkpoint, around))
        return [file for file in around if file.path not in names]


def _joining(
    function: Callable[..., Result], several: Sequence[StrPath], source: str, *rest: Any, **how: Any
) -> Result:
    """Call `function` with all files of a job instead of the first."""
    return function(several, *rest, **how)


Finish = Callable[[Chain, Sequence[Result], Sequence[Result]], Callable[..., R]]
"""The type of a function that gets the chain, the results of the operations and those of the conversions, and returns
what makes the result of the command from the fields of `Result`.
"""


@gc_paused
@shares_open_files()
def carry_out(
    source: StrPath,
    dest: StrPath,
    operations: Sequence[PlannedCommand],
    finish: Finish[R],
    how: WriteOptions,
    *,
    to: str | None = None,
    at: str | None = None,
    conversion: Mapping[str, Any] | None = None,
    shaping: Mapping[str, Any] | None = None,
    refuse: Callable[[Format], None] | None = None,
    first: bool = False,
    converts: bool = False,
    module: bool = False,
    alone: bool = False,
    several: Sequence[StrPath] = (),
    headline: bool = False,
    amend: Amend | None = None,
) -> R:
    """Carry out commands on a source in any format, and write the result once.

    Args:
        operations: in their order.
        finish: makes the result.
        to: format of the output; by default that of the suffix of `dest`, or else that of the source, or a torch zip.
        at: address of the one state dict that is meant.
        conversion: options of the first conversion.
        shaping: options of the last one.
        refuse: raises an error for a format of outputs that makes no sense.
        first: the operations come before the conversions of a file, because they need its object.
        converts: the operation is a conversion itself.
        module: the source is a whole module, which the caller knows already.
        alone: the output holds only the state dict at `at`.
        several: the files of all ranks of a job; `source` is the first of them.
        headline: the first line says what becomes what.
        amend: changes the files beside a checkpoint that follow it into a folder.

    Raises:
        CkptfixError: as the commands, and as `opened`.
    """
    name, path = os.fspath(dest), formats.located(existing(source))
    stated = None if to is None else named_format(to)
    folder = stated is not None and stated.folder
    refuse_destination(dest, several or [source], how, folder=folder)
    with ExitStack() as stack:
        found = opened(path, name, stack)
        if several:
            marks = tuple(mark(file_name(one)) for one in several)
            found = replace(found, format=FORMATS["ranks"], read=marks)
        target = stated or target_of(found.format, name)
        if refuse is not None:
            with about(path):
                refuse(target)
        run = _Run(
            *(source, name, found, target, operations, at, conversion or {}, shaping or {}),
            first=first,
            converts=converts,
            module=module,
            alone=alone,
            several=several,
            amend=amend,
        )
        stack.push(lambda *left: _with_source(path, dict.fromkeys(run.names - {path, run.dest}, path), *left))
        try:
            made = _written(run, finish, how, path, headline=headline)
        except Refused as error:
            if run.module or not error.of_module:
                raise
            run.module = True
            made = _written(run, finish, how, path, headline=headline)
        if how.dry_run:
            # The plan points to the unpacked files, so they are kept as long as the plan.
            stack.pop_all()
        return made


def target_of(format: Format, dest: str) -> Format:
    """Return the format of the output `dest` of a source in `format`."""
    named = of_suffix(dest)
    if format.edits and (named is None or suits(dest, format.name)):
        return format
    return FORMATS[named or "zip"]


def _written(run: _Run, finish: Finish[R], how: WriteOptions, path: str, *, headline: bool) -> R:
    with Chain(run.opened.path, run.dest, dry_run=how.dry_run) as chain, about(path):
        done, made = run.carried_out(chain)
        result = finish(chain, done, made)

        def make(path: str, dest: str) -> Draft[R]:
            plan = chain.plan_for(dest)
            assert plan is not None and chain.format is not None
            lines = [line.replace(copy_note(unchanged=True), "") for one in done for line in one.lines]
            if run.converts and made:
                lines = [line for line in lines if not line.startswith("nothing to do")]
            noted = [line for one in made for line in one.lines[1:] if not line.startswith("--")]
            if headline:
                left = dict.fromkeys(where for one in (*done, *made) for where in one.left_out)
                lines = [line for line in (*lines, *noted) if not line.startswith(LEFT_BEHIND)]
                lines = [run.headline(chain.account), *lines]
                lines += [f"{LEFT_BEHIND}{some(list(left))}"] if left else []
            else:
                lines = [*lines, run.line(), *noted]
            along = run.along(plan)
            return Draft(
                result=partial(_with_account, result, chain, made if run.module else ()),
                format=chain.format,
                plan=replace(plan, files=(*along, *plan.files), holds=(plan.holds, run.opened.keeps)),
                promise=None,
                lines=lines,
                findings=chain.findings,
                exit_code=chain.exit_code,
                read=run.opened.read or chain.read,
            )

        # In a folder, the output keeps the name of the model's file, so its format must suit that name.
        kept = not run.converts and suits(run.opened.path, run.target.name)
        written = carry_out_file(run.source, run.dest, make, how, folder=run.target.folder or (None if kept else False))
        # What a step unpacked is removed with the last plan that refers to it.
        return replace(written, plan=replace(written.plan, holds=())) if written.written else written


def _with_account(
    result: Callable[..., R], chain: Chain, extracted: Sequence[Result], *, account: Account, **fields: Any
) -> R:
    # Each command has counted the tensors already.
    account = chain.account or account
    # The result of an edit has no list of its own of what is not in the state dict of a module.
    left = dict.fromkeys((*account.left, *(where for one in extracted for where in one.left_out)))
    return result(account=replace(account, left=tuple(left)), **fields)


Takes = Callable[[Format, Format], bool]
"""The type of a function that returns whether a command itself makes a file of the second format of the first."""


def every_format(format: Format, target: Format) -> bool:
    """Return True: a conversion makes a file in every format of one in any other."""
    return True


def edits(format: Format, target: Format) -> bool:
    """Return whether an edit itself makes a file in the format `target` of one in `format`."""
    return format.edits and format is target


def takes_any_source(
    *,
    takes: Takes = edits,
    refuse: Callable[[Format], None] | None = None,
    first: bool = False,
    converts: bool = False,
    unpacks: bool = False,
    name: str = "",
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Wrap a command's function (source, dest, ...) so that it takes every source that is read.

    Args:
        takes: returns whether the function itself makes the output.
        refuse: raises an error for a format of outputs that makes no sense for the command.
        first: it comes before the conversions.
        converts: it is a conversion, and takes every format and every output itself.
        unpacks: the function itself unpacks its source.
        name: of the command; by default that of the function.
    """

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        verb = name or function.__name__.replace("_", "-")

        @wraps(function)
        @shares_open_files()
        def taken(*args: P.args, **kwargs: P.kwargs) -> R:
            words: list[Any] = [*args]
            options: dict[str, Any] = {**kwargs}
            source = words.pop(0) if words else options.pop("source", None)
            dest = words.pop(0) if words else options.pop("dest", None)
            module = False
            if is_direct(source, dest, options, takes, refuse, unpacks=unpacks):
                try:
                    return function(*args, **kwargs)
                except (Refused, UnknownFormat) as error:
                    if not _can_be_read(error, unpacks=unpacks) or dest is None or options.get("in_place"):
                        raise
                    module = isinstance(error, Refused)
            given = {one: options.pop(one, None) for one in ("force", "keep_old", "dry_run", "progress")}
            how = WriteOptions(**{one: value for one, value in given.items() if value})
            at = options.get("at")
            call = cast("Callable[..., Result]", lambda source, dest, **more: function(source, dest, *words, **more))
            return carry_out(
                source,
                dest,
                [PlannedCommand((verb,), call, options)],
                lambda chain, done, made: partial(_of_verb, cast("R", done[-1])),
                how,
                at=at,
                to=options.get("to") if converts else None,
                refuse=refuse,
                first=first,
                converts=converts,
                module=module,
            )

        return taken

    return wrap


def _can_be_read(error: Refused | UnknownFormat, *, unpacks: bool) -> bool:
    """Return whether the source that a function refuses can be extracted or unpacked first."""
    if isinstance(error, Refused):
        return error.of_module
    return not unpacks and error.kind in PACKED


def _of_verb(result: R, **fields: Any) -> R:
    return replace(result, **fields)


def is_direct(
    source: object, dest: object, options: Mapping[str, Any], takes: Takes,
    refuse: Callable[[Format], None] | None = None, *, unpacks: bool = False
) -> bool:
    """Return whether the function itself takes this source and this output, or reports what is wrong with them."""
    if not isinstance(source, str | os.PathLike) or not isinstance(dest, str | os.PathLike):
        return True
    if options.get("in_place") or options.get("check_only") or isinstance(source, Checkpoint):
        return True
    try:
        format = formats.detect(source)
    except UnknownFormat as error:
        return unpacks or error.kind not in PACKED
    except ChangedFile:
        raise  # a second look would see only the new version
    except (CkptfixError, OSError):
        return True
    refuse_changes()  # the command itself would see only the new version
    target = target_of(format, os.fspath(dest))
    try:
        if refuse is not None:
            refuse(target)
    except CkptfixError:
        return False  # the name of the output is looked at first
    return takes(format, target)
