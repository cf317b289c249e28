"""Commands one after another, each on the plan of the one before it: the bytes are copied once, at the end.

A planned file is read through its plan, as ranges of the input (`SplicedFile`), so the next command can be planned on
it. This ends at folders, and at checksums that are only known once the bytes have been written, because a later plan
would copy them as zeros. Then the plan so far is written to a folder beside the output, which is removed at the end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ckptfix import formats
from ckptfix.checkpoint import Derived, FileVersion, OutputFile, Plan, RangeCheck, segment_length
from ckptfix.errors import StrPath, Unsupported, about
from ckptfix.findings.row import Finding
from ckptfix.formats.target import of_suffix, suits
from ckptfix.io.output import TEMP_SUFFIX
from ckptfix.io.planned import SplicedFile, SplicedPiece
from ckptfix.io.read import CHECKSUM
from ckptfix.io.source import found_as, open_source
from ckptfix.ops import convert, extract, match, relocate, rename, repair, sanitize, slim
from ckptfix.ops.drafts import LOSSES
from ckptfix.ops.law.promise import Account
from ckptfix.ops.writing import Result, write_aside
from ckptfix.urls import as_path, is_url, real_path

Words = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A command that was carried out: its words as a shell takes them, and its summary lines."""

    command: Words
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Verb:
    """A command as a function: its options by keyword; `flags` take no value, `pairs` take OLD=NEW."""

    call: Callable[..., Result]
    options: Mapping[str, str]
    flags: frozenset[str] = frozenset()
    pairs: frozenset[str] = frozenset()


VERBS: dict[str, _Verb] = {
    "repair": _Verb(repair.repair, {"--fill": "fill"}),
    "extract": _Verb(extract.extract, {"--at": "at", "--ema": "ema", "--to": "to"}, frozenset({"--ema"})),
    "sanitize": _Verb(sanitize.sanitize, {"--torch": "torch", "--keep-only": "keep_only", "--encoding": "encoding"}),
    "slim": _Verb(slim.slim, {"--no-optimizer": "no_optimizer"}, frozenset({"--no-optimizer"})),
    "unwrap": _Verb(rename.unwrap, {"--at": "at"}),
    "strip-module": _Verb(
        rename.strip_module,
        {"--prefix": "prefix", "--at": "at", "--all-levels": "all_levels", "--partial": "partial"},
        frozenset({"--all-levels", "--partial"}),
    ),
    "add-module": _Verb(rename.add_module, {"--prefix": "prefix", "--at": "at"}),
    "rename": _Verb(rename.rename, {"--sub": "subs", "--at": "at"}, pairs=frozenset({"--sub"})),
    "match": _Verb(
        match.match,
        {
            "--like": "like",
            "--like-at": "like_at",
            "--at": "at",
            "--by": "by",
            "--partial": "partial",
            "--reshape": "reshape",
            "--allow-import": "allow_import",
            "--accept-ambiguous": "accept_ambiguous",
        },
        frozenset({"--partial", "--reshape", "--allow-import", "--accept-ambiguous"}),
    ),
    "to-cpu": _Verb(relocate.to_cpu, {}),
    "convert": _Verb(convert.convert, {"--to": "to", "--at": "at", "--shard-size": "shard_size"}),
}
"""The commands that doctor proposes."""


def keywords(verb: str, options: Sequence[str]) -> dict[str, Any]:
    """Convert the `options` of a command to keywords of its function.

    Raises:
        Unsupported: an option is not in the table.
    """
    row = VERBS[verb]
    found: dict[str, Any] = {}
    rest = list(options)
    while rest:
        option = rest.pop(0)
        name = row.options.get(option)
        if name is None:
            raise Unsupported(f"fix does not support the option {option} of {verb}", hint="run the command by itself")
        if option in row.flags:
            found[name] = True
        elif option in row.pairs:
            old, _, new = rest.pop(0).partition("=")
            found[name] = (*found.get(name, ()), (old, new))
        else:
            found[name] = rest.pop(0)
    return found


class Chain:
    """The commands so far, and their result.

    Attributes:
        current: the input of the next command: the file, its planned successor, or an intermediate file.
        format: of the plan; None before the first command.
        findings, exit_code: of all commands.
        account: counts of kept and lost tensors; None before the first command.
        read: the file, or those of the folder, as they were before.
    """

    def __init__(self, path: str, dest: StrPath | None, *, dry_run: bool) -> None:
        self.current = path
        self.format: str | None = None
        self.findings: tuple[Finding, ...] = ()
        self.exit_code = 0
        self.account: Account | None = None
        self.read: tuple[FileVersion, ...] = ()
        self._path = path
        self._steps: list[Step] = []
        self._done: set[tuple[str, Words]] = set()
        self._plan: Plan | None = None
        self._target = ""
        self._source = path
        self._checks: tuple[RangeCheck, ...] = ()
        self._holds: list[object] = []
        self._dry_run = dry_run
        self._dest = None if dest is None else os.fspath(dest)
        near = real_path(path if dest is None else dest)
        self._beside = None if is_url(near) else as_path(near).parent
        self._folder: str | None = None

    def __enter__(self) -> Chain:
        return self

    def __exit__(self, *error: object) -> None:
        if self._folder is not None:
            with suppress(OSError):
                shutil.rmtree(self._folder)

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(self._steps)

    @property
    def suffix(self) -> str | None:
        """The suffix of the planned output, which may be empty; None for a folder."""
        if not self.is_one_file:
            return None
        target = self._target or self._path
        # If the path has no suffix, the text after the dot of `target` is a word such as "stripped".
        return as_path(target).suffix if as_path(self._path).suffix or of_suffix(target) else ""

    @property
    def is_one_file(self) -> bool:
        """True if the planned output, or the file if nothing is planned, is one file."""
        if self.format is None:
            return found_as(self._path) != "folder"
        return not formats.FORMATS[self.format].folder

    def carry_out(self, commands: Sequence[Words]) -> bool:
        """Plan these commands, each on the result of the one before it; return whether any of them was new."""
        new = False
        for words in commands:
            verb, options = words[1], words[4:]
            if verb not in VERBS or (verb, options) in self._done or self._is_against_name(words):
                continue
            self._done.add((verb, options))
            self._carry_out(verb, words[3], options)
            new = True
        return new

    def leave(self, findings: Sequence[Finding]) -> None:
        """Record findings that no command of the chain is about; with an error among them, the result has losses."""
        self.findings += tuple(findings)
        if any(finding.severity == "error" for finding in findings):
            self.exit_code = LOSSES

    def _is_against_name(self, words: Words) -> bool:
        """Return whether this converts to a format that the output's name rules out, while the present one suits it."""
        if words[1] != "convert" or self._dest is None:
            return False
        made = words[words.index("--to") + 1] if "--to" in words else of_suffix(words[3])
        if made is None or suits(self._dest, made):
            return False
        return suits(self._dest, self.format or formats.detect(self._path).name)

    def _carry_out(self, verb: str, dest: str, options: Words) -> None:
        source = self._readable()
        with about(self._path):
            result = VERBS[verb].call(source, dest, dry_run=True, **keywords(verb, options))
        plan = result.plan
        self._steps.append(Step(("ckptfix", verb, self._source, dest, *options), result.lines))
        self._source = dest
        self._plan, self._target, self.format = plan, dest, result.format
        self._checks += plan.checks
        self._holds.append(plan)
        self.findings += result.findings
        self.exit_code = max(self.exit_code, result.exit_code)
        self.account = _together(self.account, result.account)
        # Writing the output into a folder changes the folder itself, so its files are recorded instead.
        folder = found_as(self._path) == "folder"
        self.read = self.read or (formats.open_checkpoint(self._path).files if folder else (self._as_opened(),))
        self.current = self._spliced() if self.is_one_file else self._path

    def _as_opened(self) -> FileVersion:
        """Return the file's mark from when this command opened it, before it was diagnosed."""
        with open_source(self._path) as source:
            return FileVersion(self._path, source.mark)

    def _spliced(self) -> SplicedFile:
        """Return the planned output as a file that can be read."""
        assert self._plan is not None
        (file,) = self._plan.files
        return SplicedFile(
            self._target,
            [segment_length(segment) for segment in file.segments],
            lambda i: SplicedPiece((file.segments[i],)),
        )

    def _readable(self) -> str:
        """Return the path that the next command reads."""
        if self._plan is None:
            return self._path
        if self._can_be_joined():
            return self._spliced()
        if self._dry_run:
            # Nothing will be written, so zeros in place of its checksums do no harm.
            return self._spliced() if self.is_one_file else self._path
        if self._folder is None:
            self._folder = tempfile.mkdtemp(TEMP_SUFFIX, ".", self._beside)
        aside = str(as_path(self._folder, as_path(self._target).name))
        write_aside(self._written(aside), aside, folder=not self.is_one_file)
        self._plan, self._target, self._checks, self._holds = None, aside, (), []
        return aside

    def _can_be_joined(self) -> bool:
        assert self._plan is not None
        made = [segment for file in self._plan.files for segment in file.segments if isinstance(segment, Derived)]
        return self.is_one_file and all(segment.what != CHECKSUM for segment in made)

    def plan_for(self, dest: str) -> Plan | None:
        """Return the plan that writes `dest`; None if there was nothing to do."""
        if self._plan is None:
            return None
        return self._written(dest)

    def _written(self, dest: str) -> Plan:
        """Return the plan of all commands since the last intermediate file, with `dest` as its output."""
        assert self._plan is not None
        files = tuple(_moved(file, self._target, dest) for file in self._plan.files)
        return replace(self._plan, files=files, checks=self._checks, holds=tuple(self._holds))


def _together(first: Account | None, last: Account) -> Account:
    """Combine the accounts of two commands that ran one after the other on a file."""
    if first is None:
        return last
    return replace(
        last,
        tensors=first.tensors,
        nbytes=first.nbytes,
        left=(*first.left, *last.left),
        lost=(*first.lost, *last.lost),
        excused=first.excused or last.excused,
    )


def _moved(file: OutputFile, old: str, new: str) -> OutputFile:
    """Return the file with `new` in place of the path prefix `old`."""
    return replace(file, path=new + file.path[len(old) :])
