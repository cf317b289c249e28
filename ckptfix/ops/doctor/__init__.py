"""``ckptfix.doctor``: find out why a checkpoint does not load, and which command fixes it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptfix.arguments import LIVE, Model, checks_types, takes_model
from ckptfix.errors import StrPath, file_name
from ckptfix.findings.row import FindingKind
from ckptfix.findings.table import ENTRIES
from ckptfix.formats import reads_once
from ckptfix.io.read import Progress
from ckptfix.io.source import found_as, shares_open_files
from ckptfix.ops.doctor import examine
from ckptfix.ops.doctor.report import Diagnosis, of_message
from ckptfix.pickles.collector import gc_paused

if TYPE_CHECKING:
    from ckptfix.ops.target.targets import ExpectedModel


@checks_types
@takes_model
@gc_paused
@shares_open_files()
@reads_once()
def doctor(
    path: StrPath,
    *,
    like: StrPath | Model | None = None,
    error: str | None = None,
    fast: bool = False,
    at: str | None = None,
    like_at: str | None = None,
    allow_import: bool = False,
    progress: Progress | None = None,
) -> Diagnosis:
    """Examine a checkpoint, and report what keeps it from loading; nothing in it is imported, run or changed.

    A folder that holds the checkpoints of a training run is examined as a whole: ``diagnosis.run`` has the state of
    each checkpoint, and the one to resume from. Only the tensors of that one are read, up to 1 GiB. `like`, `error` and
    `at` are about a single model.

    Args:
        like: the model that it is meant for: a checkpoint, a file of keys (``keys.json``), or ``module:factory``.
        error: the error message that the user saw; the findings that explain it come first.
        fast: read no tensor bytes: no checksums, no search for NaN and zeros.
        at: address of the state dict to examine, if there are several; the others are not reported on.
        like_at: the same for `like`.
        allow_import: import the module of ``module:factory`` and call the factory, which runs their code.
        progress: called with the bytes of tensors read, and the bytes in all.

    Returns:
        The findings: ``diagnosis.sentence`` sums them up, ``diagnosis.fixes`` are the commands that help, and
        ``diagnosis.exit_code()`` is the exit code of ``ckptfix doctor``.

    Raises:
        CkptfixError: `path` cannot be read; `like` cannot, as `targets.read`.
    """
    if like is None and error is None and at is None and found_as(file_name(path)) == "folder":
        from ckptfix.ops.doctor import runs

        if (run := runs.diagnosis_of(file_name(path), fast=fast)) is not None:
            return run
    target = expected(like, like_at, allow_import=allow_import)
    how: dict[str, Any] = {"like": target, "at": at, "like_at": like_at}
    done = examine.examine(path, error=error, fast=fast, progress=progress, **how)
    done = finished(done, lambda planned: examine.examine(planned, fast=True, **how), fast=fast)
    if not isinstance(like, str) or like not in LIVE:
        return done
    from ckptfix.ops.doctor.rehearsal import in_python

    return in_python(done, like)


def finished(done: Diagnosis, look: Callable[[str], Diagnosis] | None = None, *, fast: bool = False) -> Diagnosis:
    """Return `done` with a rehearsal of its commands, and with what is left of a damaged file; see `doctor`.

    Args:
        look: examines a planned output; by default without a model.
    """
    if all(finding.severity != "error" for finding in done.findings):
        return done
    from ckptfix.ops.doctor.rehearsal import rehearsed

    look = look or (lambda planned: examine.examine(planned, fast=True))
    if all(finding.id not in SHORT or finding.severity != "error" for finding in done.findings):
        return rehearsed(done, look)
    from ckptfix.ops.repair.open import looked_at_once
    from ckptfix.ops.repair.survivors import survivors_of

    with looked_at_once() as plans:
        done = replace(done, survivors=survivors_of(done.path, fast=fast))
        counts = [len(plan.kept) + len(plan.losses) for plan in plans.values()]
        return rehearsed(done, look, repaired=sum(counts) if counts else None)


SHORT = frozenset({"truncated"})
"""Findings of files from which `repair` recovers the tensors before the damage."""


def expected(like: StrPath | Model | None, like_at: str | None, *, allow_import: bool) -> ExpectedModel | None:
    """Read the model that a checkpoint is meant for; None without `like`. Raises like `targets.read`."""
    if like is None:
        return None
    from ckptfix.ops.target import targets

    assert isinstance(like, str | os.PathLike), "takes_model gives a model in memory a name"
    return targets.read(like, at=like_at, allow_import=allow_import)


def message(error: str) -> Diagnosis:
    """Explain a loader's message `error` without the file; the result has no findings and no fixes."""
    return of_message(error)


def inside(diagnosis: Diagnosis) -> tuple[str, ...]:
    """List the checkpoints in a folder that, according to `diagnosis`, is not a checkpoint itself; sorted by name."""
    if diagnosis.cause is None or diagnosis.cause.id != "no-checkpoint" or found_as(diagnosis.path) != "folder":
        return ()
    from ckptfix.formats.foreign.archives import checkpoints_in

    return checkpoints_in(diagnosis.path)


def explain(id: str) -> FindingKind | None:
    """Return the row with that `id` in the table of findings; None for an unknown id."""
    return ENTRIES.get(id)


def ids() -> tuple[str, ...]:
    """Return the ids of all findings."""
    return tuple(ENTRIES)
