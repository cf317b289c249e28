"""Plans whose files are written to a store: complete under their names, or absent.

All long data is uploaded first, without a name; then the files get their names one after the other, in the order of the
plan: data first, an index last. A failure before that leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from ckptfix.checkpoint import Plan
from ckptfix.checkpoint.file_version import FileStat
from ckptfix.errors import CkptfixError, Refused, Unsupported, WouldOverwrite, file_name
from ckptfix.io import ranks
from ckptfix.io.background_checks import Checking
from ckptfix.io.durable import Undisturbed
from ckptfix.io.read import Progress
from ckptfix.io.remote import folders, rank_folder
from ckptfix.io.remote.clients import client_of, writable
from ckptfix.io.remote.rank_folder import Steps
from ckptfix.io.remote.upload import Uploader
from ckptfix.io.source import shares_open_files
from ckptfix.io.sources import Sources
from ckptfix.io.write_log import note, record
from ckptfix.urls import READ_ONLY, scheme_of

NOT_KEPT = "the old object is not kept, unless the bucket has versioning turned on"

ALONE = Steps()

Own = Callable[[str], Collection[str]]


def check_destination(
    path: str, sources: Iterable[Any] = (), *, overwrite: bool, folder: bool = False
) -> None:
    """Check a URL like `io.write.check_destination`.

    With `overwrite`, an object can replace itself: the old one exists until the new one is complete.
    """
    _check_name(path, sources, overwrite=overwrite, folder=folder)
    bare = path.rstrip("/")
    if not overwrite and (folders.listing(bare).files if folder else writable(path).is_taken(bare)):
        raise WouldOverwrite("exists", path=path, hint="choose a different name, or add --force to replace it")


def _check_name(path: str, sources: Iterable[Any], *, overwrite: bool, folder: bool = False) -> None:
    """Check a URL like `check_destination`, without asking whether it exists."""
    scheme = scheme_of(path)
    if scheme in READ_ONLY:
        hint = "write a file, and `hf upload` it" if scheme == "hf" else "write a file, and upload it"
        raise Refused(f"{scheme}:// is read-only", path=path, hint=hint)
    client_of(path)
    bare = path.rstrip("/")
    if bare.count("/") < 3 and not (folder and bare.count("/") == 2):
        raise Unsupported("does not name an object in a bucket", path=path)
    if path.endswith("/") and not folder:
        raise Unsupported("names a folder, not a file", path=path)
    for source in map(file_name, sources):
        same = source.rstrip("/") == bare
        if folder and (same or source.startswith(f"{bare}/")):
            raise WouldOverwrite(f"the input is in it: {source}", path=path, hint="choose a different output name")
        if same and not overwrite:
            raise WouldOverwrite("the output is the input", path=path, hint="choose a different name, or add --force")


@shares_open_files()
def write_plan(
    plan: Plan,
    *,
    overwrite: bool = False,
    keep_old: object = None,
    inputs: Mapping[str, FileStat] | None = None,
    progress: Progress | None = None,
) -> dict[str, str]:
    """Write files to a store, like `io.write.write_plan`; a store keeps no old files beside new ones."""
    sources = Sources(plan, inputs or {})
    for file in plan.files:
        _check_name(file.path, sources.stamps, overwrite=overwrite)
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
    inputs: Mapping[str, FileStat] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a folder to a store, like `io.folders.write_folder`.

    Files of the old checkpoint that the new one does not have are removed after the index is written.
    """
    taken = bool(folders.listing(dest).files)
    if taken and not overwrite:
        raise WouldOverwrite("exists", path=dest, hint="choose a different name, or add --force to replace it")
    before = set(own(dest)) if taken else set()
    team = ranks.current()
    if team is not None:
        rank_folder.write_with(team, plan, dest, overwrite, inputs or {}, progress, _write)
    else:
        _write(plan, Sources(plan, inputs or {}), overwrite, progress)
    folders.forget(dest)
    if team is not None and team.rank:
        return
    for path in sorted(before - {file.path for file in plan.files}):
        folders.forget(path)
        writable(path).remove(path)
    if keep_old and taken:
        note(NOT_KEPT)


def _write(
    plan: Plan,
    sources: Sources,
    overwrite: bool,
    progress: Progress | None,
    steps: Steps = ALONE,
) -> bool:
    """Write the files of a plan, and return whether one was replaced."""
    total, done = plan.nbytes, 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(min(done, total), total)

    outputs: list[Uploader] = []
    checks = Checking(plan)
    quiet = Undisturbed()
    with ExitStack() as stack:
        stack.callback(sources.close)
        stack.callback(checks.stop)
        try:
            for file in plan.files:
                output = Uploader(file, sources.stamps, overwrite=overwrite, began=steps.began)
                outputs.append(output)
                output.write(advance, checks)
            checks.finish()
            sources.check_unchanged()
            steps.up()
            for output in outputs:
                output.publish()
            steps.named()
        except BaseException:
            with quiet:
                _abort(outputs)
            raise
    for file in plan.files:
        folders.forget(file.path)
        record(f"{file.path} is complete: it was written before that")
    _note_copies(outputs)
    return not all(output.is_new for output in outputs)


def _abort(outputs: Iterable[Uploader]) -> None:
    failures: list[CkptfixError] = []
    for output in outputs:
        try:
            output.abort()
        except CkptfixError as error:
            failures.append(error)
    for failure in failures:
        record(f"{failure.path}: a failed upload could not be removed: {failure.message}")


def _note_copies(outputs: Sequence[Uploader]) -> None:
    """Note which bytes stayed in the store, and which could have."""
    if copied := sum(output.copied for output in outputs):
        sent = sum(output.sent for output in outputs)
        note(f"the store copied {copied:,} bytes itself; {sent:,} were uploaded")
    if passed := [output for output in outputs if output.not_copied]:
        sent = sum(output.sent for output in passed)
        note(f"{passed[0].not_copied}: all {sent:,} bytes pass through this machine")
