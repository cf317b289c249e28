"""Plans whose files are written to a store: complete under their names, or absent.

All long data is uploaded first, without a name; then the files get their names one after the other, in the order of the
plan: data first, an index last. A failure before that leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

from ckptfix.checkpoint import OutputFile, Plan
from ckptfix.checkpoint.file_version import FileStat
from ckptfix.errors import CkptfixError, Refused, Unsupported, WouldOverwrite, file_name
from ckptfix.io import ranks
from ckptfix.io.background_checks import Checking
from ckptfix.io.durable import Undisturbed
from ckptfix.io.open_files import forget
from ckptfix.io.read import Progress
from ckptfix.io.remote import folders, fsspec_store, rank_folder, s3, s3_upload
from ckptfix.io.remote.clients import client_of
from ckptfix.io.remote.fsspec_upload import FsspecUpload
from ckptfix.io.remote.rank_folder import Steps
from ckptfix.io.source import shares_open_files
from ckptfix.io.sources import Sources
from ckptfix.io.write_log import note, record
from ckptfix.urls import READ_ONLY, as_path, scheme_of

NOT_KEPT = "the old object is not kept, unless the bucket has versioning turned on"

ALONE = Steps()

Own = Callable[[str], Collection[str]]


def check_destination(
    path: str, sources: Iterable[Any] = (), *, overwrite: bool, folder: bool = False
) -> None:
    """Check a URL like `io.write.check_destination`.

    With `overwrite`, an object can replace itself: the old one exists until the new one is complete.
    """
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
    if not overwrite and _is_taken(bare, folder):
        raise WouldOverwrite("exists", path=path, hint="choose a different name, or add --force to replace it")


def _is_taken(path: str, folder: bool) -> bool:
    if folder:
        return bool(folders.listing(path).files)
    if s3_upload.in_s3(path):
        return s3_upload.head(path) is not None
    system, inner = fsspec_store.file_system(path)
    return bool(fsspec_store.asked_again(path, lambda: system.exists(inner)))


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
    forget(f"{dest.rstrip('/')}/")
    if team is not None and team.rank:
        return
    for path in sorted(before - {file.path for file in plan.files}):
        _remove(path)
    if keep_old and taken:
        note(NOT_KEPT)


def _remove(path: str) -> None:
    forget(path)
    if s3_upload.in_s3(path):
        where = s3.location(path)
        s3_upload.asked(path, "delete_object", Bucket=where.bucket, Key=where.key)
    else:
        system, inner = fsspec_store.file_system(path)
        fsspec_store.asked_again(path, lambda: system.rm_file(inner))


class _Files(Protocol):
    """Files that are being written to a store."""

    replaced: bool

    def write(self, file: OutputFile, advance: Callable[[int], None], checking: Checking) -> None: ...

    def publish(self) -> None: ...

    def abort(self) -> None: ...


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

    files: _Files = (_InS3 if s3_upload.in_s3(plan.files[0].path) else FsspecUpload)(sources, overwrite, steps)
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
            steps.up()
            files.publish()
            steps.named()
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
    def __init__(self, sources: Sources, overwrite: bool, steps: Steps) -> None:
        self._sources, self._overwrite, self._steps = sources, overwrite, steps
        self._outputs: list[s3_upload.UploadWriter] = []
        self.replaced = False

    def write(self, file: OutputFile, advance: Callable[[int], None], checking: Checking) -> None:
        output = s3_upload.UploadWriter(file, self._sources.stamps, overwrite=self._overwrite, began=self._steps.began)
        self._outputs.append(output)
        self.replaced |= not output.is_new
        output.write(advance, checking.saw)

    def publish(self) -> None:
        for output in self._outputs:
            output.publish()
        copied = sum(output.copied for output in self._outputs)
        if copied:
            sent = sum(output.sent for output in self._outputs)
            note(f"the store copied {copied:,} bytes itself; {sent:,} were uploaded")

    def abort(self) -> None:
        failures: list[CkptfixError] = []
        for output in self._outputs:
            try:
                output.abort()
                # A replacement cannot be undone, because the old object is gone.
                if output.published and output.is_new:
                    output.remove()
            except CkptfixError as error:
                failures.append(error)
        for failure in failures:
            record(f"{failure.path}: a failed upload could not be removed: {failure.message}")
