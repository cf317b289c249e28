"""Plans whose files go to a store: complete under their names, or not there at all.

All that is long goes up first, without a name; then the files get their names one after the other, in the order of the
plan: data first, an index last. What fails before that leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from ckptfix.checkpoint import OutputFile, Plan
from ckptfix.checkpoint.stamp import Stamp
from ckptfix.errors import CkptfixError, Refused, Unsupported, WouldOverwrite, WriteFailed, file_name
from ckptfix.io import checking, ranks
from ckptfix.io.checking import Checking
from ckptfix.io.durable import Undisturbed
from ckptfix.io.pool import forget
from ckptfix.io.ranks.shares import digest, shares
from ckptfix.io.read import Progress, read_chunks
from ckptfix.io.remote import folders, other, parts, s3, upload
from ckptfix.io.remote.store import client_of
from ckptfix.io.source import is_local, opened_once
from ckptfix.io.sources import Sources
from ckptfix.io.written import note, record
from ckptfix.urls import READ_ONLY, as_path, scheme_of

NOT_KEPT = "the old one is not kept: a bucket keeps it where its versions are on"

Own = Callable[[str], Collection[str]]


def check_destination(
    path: str, sources: Iterable[Any] = (), *, overwrite: bool, folder: bool = False
) -> None:
    """As `io.write.check_destination`, of a URL.

    An object may take its own place, with `overwrite`: the old one is there until the new one is complete.
    """
    scheme = scheme_of(path)
    if scheme in READ_ONLY:
        hint = "write a file, and `hf upload` it" if scheme == "hf" else "write a file, and upload it"
        raise Refused(f"{scheme}:// is read only here", path=path, hint=hint)
    client_of(path)
    bare = path.rstrip("/")
    if bare.count("/") < 3 and not (folder and bare.count("/") == 2):
        raise Unsupported("names no object in a bucket", path=path)
    if path.endswith("/") and not folder:
        raise Unsupported("names a folder, not a file", path=path)
    for source in map(file_name, sources):
        same = source.rstrip("/") == bare
        if folder and (same or source.startswith(f"{bare}/")):
            raise WouldOverwrite(f"the input is in it: {source}", path=path, hint="give the output another name")
        if same and not overwrite:
            raise WouldOverwrite("the output is the input", path=path, hint="give another name, or --force")
    if not overwrite and _is_taken(bare, folder):
        raise WouldOverwrite("exists", path=path, hint="give another name, or --force to replace it")


def _is_taken(path: str, folder: bool) -> bool:
    if folder:
        return bool(folders.listing(path).files)
    if upload.in_s3(path):
        return upload.head(path) is not None
    system, inner = other.file_system(path)
    return bool(other.asked(path, lambda: system.exists(inner)))


@opened_once()
def write_plan(
    plan: Plan,
    *,
    overwrite: bool = False,
    keep_old: object = None,
    inputs: Mapping[str, Stamp] | None = None,
    progress: Progress | None = None,
) -> dict[str, str]:
    """As `io.write.write_plan`, of files that all go to a store, which keeps no old ones beside new ones."""
    sources = Sources(plan, inputs or {})
    for file in plan.files:
        check_destination(file.path, sources.stamps, overwrite=overwrite)
    replaced = _write(plan, sources, overwrite, progress)
    if keep_old is not None and replaced:
        note(NOT_KEPT)
    return {}


def write_folder(
    plan: Plan,
    dest: str,
    *,
    overwrite: bool = False,
    keep_old: bool = False,
    own: Own = lambda folder: (),
    inputs: Mapping[str, Stamp] | None = None,
    progress: Progress | None = None,
) -> None:
    """As `io.folders.write_folder`, of a folder in a store.

    Files of a checkpoint that was there, and that the new one has not, are removed when the index is in its place.
    """
    taken = bool(folders.listing(dest).files)
    if taken and not overwrite:
        raise WouldOverwrite("exists", path=dest, hint="give another name, or --force to replace it")
    before = set(own(dest)) if taken else set()
    team = ranks.current()
    if team is not None:
        _write_with(team, plan, dest, overwrite, inputs or {}, progress)
    else:
        _write(plan, Sources(plan, inputs or {}), overwrite, progress)
    forget(f"{dest.rstrip('/')}/")
    if team is not None and team.rank:
        return
    for path in sorted(before - {file.path for file in plan.files}):
        _remove(path)
    if keep_old and taken:
        note(NOT_KEPT)


def _write_with(
    team: ranks.Team,
    plan: Plan,
    dest: str,
    overwrite: bool,
    inputs: Mapping[str, Stamp],
    progress: Progress | None,
) -> None:
    """A folder by several ranks: nothing gets its name before all is up, and the index when the data has its names."""
    word = team.folder()
    team.agree(f"{word}/plan", digest(plan, dest, inputs))
    share = shares(plan, team.size)[team.rank]
    if team.rank == 0:
        share = replace(share, files=(*share.files, plan.files[-1]))

    def step(done: int, total: int) -> None:
        team.check()
        if progress is not None:
            progress(done, total)

    def up() -> None:
        team.say(f"{word}/up/{team.rank}")
        team.all_said(f"{word}/up")
        for rank in range(1, team.size) if team.rank == 0 else ():
            team.wait(f"{word}/named/{rank}", rank)

    def named() -> None:
        team.say(f"{word}/named/{team.rank}")
        team.wait(f"{word}/named/0")

    try:
        if share.files:
            _write(share, Sources(share, inputs), overwrite, step, up, named)
        else:
            checking.run(share.checks)
            up()
            named()
    except BaseException as error:
        if not isinstance(error, ranks.RankFailed):
            team.fail(str(error), said=True)
        raise


def _remove(path: str) -> None:
    forget(path)
    if upload.in_s3(path):
        where = s3.location(path)
        upload.asked(path, "delete_object", Bucket=where.bucket, Key=where.key)
    else:
        system, inner = other.file_system(path)
        other.asked(path, lambda: system.rm_file(inner))


class _Files(Protocol):
    """Files on their way to a store."""

    replaced: bool

    def write(self, file: OutputFile, advance: Callable[[int], None], checking: Checking) -> None: ...

    def publish(self) -> None: ...

    def abort(self) -> None: ...


def _write(
    plan: Plan,
    sources: Sources,
    overwrite: bool,
    progress: Progress | None,
    up: Callable[[], None] = lambda: None,
    named: Callable[[], None] = lambda: None,
) -> bool:
    """Whether something was replaced.

    Args:
        up: called when all bytes are there, before the files get their names; what it raises takes all back.
        named: called when they have them; the same.
    """
    total, done = plan.nbytes, 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(min(done, total), total)

    files: _Files = (_InS3 if upload.in_s3(plan.files[0].path) else _Elsewhere)(sources, overwrite)
    checks = Checking(plan)
    quiet = Undisturbed()
    with ExitStack() as stack:
        stack.callback(sources.close)
        stack.callback(checks.stop)
        try:
            for file in plan.files:
                files.write(file, advance, checks)
            checks.finish()
            sources.check_unchanged()
            up()
            files.publish()
            named()
        except BaseException:
            with quiet:
                files.abort()
            raise
    for file in plan.files:
        forget(file.path)
        forget(f"{as_path(file.path).parent}/")
        record(f"{file.path} is complete: it was written before that")
    return files.replaced


class _InS3:
    def __init__(self, sources: Sources, overwrite: bool) -> None:
        self._sources, self._overwrite = sources, overwrite
        self._outputs: list[upload.Output] = []
        self.replaced = False

    def write(self, file: OutputFile, advance: Callable[[int], None], checking: Checking) -> None:
        output = upload.Output(file, self._sources.stamps, overwrite=self._overwrite)
        self._outputs.append(output)
        self.replaced |= not output.is_new
        output.write(advance, checking.saw)

    def publish(self) -> None:
        for output in self._outputs:
            output.publish()
        copied = sum(output.copied for output in self._outputs)
        if copied:
            sent = sum(output.sent for output in self._outputs)
            note(f"the store copied {copied:,} bytes itself; {sent:,} went up")

    def abort(self) -> None:
        failures: list[CkptfixError] = []
        for output in self._outputs:
            try:
                output.abort()
                # What replaced another object cannot be taken back: that one is gone.
                if output.published and output.is_new:
                    output.remove()
            except CkptfixError as error:
                failures.append(error)
        for failure in failures:
            record(f"{failure.path}: an upload that failed could not be taken away: {failure.message}")


class _Elsewhere:
    """Files of a file system of fsspec: all of them get their names when its transaction ends."""

    def __init__(self, sources: Sources, overwrite: bool) -> None:
        self._sources = sources
        self._system: Any = None
        self._open: list[tuple[str, Any]] = []
        self.replaced = False

    def write(self, file: OutputFile, advance: Callable[[int], None], checking: Checking) -> None:
        path = file.path
        system, inner = other.file_system(path)
        if self._system is None:
            self._system = system
            system.start_transaction()
        elif system is not self._system:
            raise Unsupported("the files of an output go to several stores", path=path)
        self.replaced |= bool(other.asked(path, lambda: system.exists(inner)))
        target = other.asked(path, lambda: system.open(inner, "wb"))
        self._open.append((path, target))
        count = 0
        for segment in file.segments:
            for data in (segment,) if isinstance(segment, bytes) else read_chunks(segment):
                other.asked(path, partial(target.write, data))
                count += len(data)
                advance(len(data))
        if count != file.nbytes:
            raise WriteFailed(f"{file.nbytes} bytes were planned, {count} came", path=path)
        other.asked(path, target.close)
        same = {where for where in self._sources.stamps if scheme_of(where) == scheme_of(path)}
        if any(not is_local(where) for where in same) and file.nbytes > parts.LEAST:
            note(f"{scheme_of(path)}:// copies no ranges of objects: all {count:,} bytes go through this machine")

    def publish(self) -> None:
        path = self._open[-1][0]
        other.asked(path, lambda: self._system.end_transaction())
        self._system = None

    def abort(self) -> None:
        system, self._system = self._system, None
        if system is not None:
            path = self._open[-1][0] if self._open else ""
            other.asked(path, lambda: system.transaction.complete(commit=False))
            system._intrans = False
