"""``ckptfix.repair``: what is provably intact in a damaged checkpoint, in a fresh file."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from weakref import finalize

from ckptfix import formats
from ckptfix.checkpoint import Plan
from ckptfix.errors import NoSuchFile, Refused, StrPath, WriteFailed, file_name
from ckptfix.findings.row import Finding
from ckptfix.formats.target import refuse_other_suffix
from ckptfix.io import write as output
from ckptfix.io.read import Progress, mark
from ckptfix.names.groups import collapse, shown
from ckptfix.ops.law.promise import Promise
from ckptfix.ops.repair.clean import listed
from ckptfix.ops.repair.fill import Fill
from ckptfix.ops.repair.open import repair as repair_op
from ckptfix.ops.repair.torch import Loss, Repair
from ckptfix.ops.target import targets
from ckptfix.ops.writing import LOSSES, Draft, Result, carry_out
from ckptfix.pickles.collector import without_collections
from ckptfix.words import plural


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RepairResult(Result):
    """What was saved of a damaged file, or could be.

    Attributes:
        kept: names of the intact tensors.
        nbytes_kept: bytes of their storages.
        losses: what is not intact, each with what stands in its place.
    """

    kept: tuple[str, ...] = ()
    nbytes_kept: int = 0
    losses: tuple[Loss, ...] = field(default=())

    def _details(self) -> dict[str, Any]:
        rows = [
            {"name": loss.name, "shape": loss.shape, "dtype": loss.dtype, "reason": loss.reason, "filled": loss.filled}
            for loss in self.losses
        ]
        return {"kept": list(self.kept), "nbytes_kept": self.nbytes_kept, "lost": rows}


@without_collections
def repair(
    source: StrPath,
    dest: StrPath | None,
    *,
    check_only: bool = False,
    fill: Fill | None = None,
    fill_from: StrPath | None = None,
    like: StrPath | None = None,
    allow_import: bool = False,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RepairResult:
    """Write to `dest` what is provably intact in `source`, a damaged file or an unzipped folder.

    The output has the format of the input, written from scratch. Damaged tensors are left out, or filled, and listed;
    `exit_code` is 3 then, and 0 when all are intact. What can run code is left out and listed too, with exit code 3.

    Args:
        check_only: find out, and write nothing; `dest` may be None.
        fill: ``"zeros"`` or ``"nan"``, in place of lost tensors.
        fill_from: an older checkpoint, whose tensors of the same name, shape and dtype go there first.
        like: a model (checkpoint, ``keys.json``, or ``module:factory``), for a file whose pickle is lost.
        allow_import: import the module of ``module:factory`` and call the factory, which runs their code.
        force: replace an existing `dest`.
        keep_old: a checkpoint that `force` replaces is kept beside it, as ``DEST.~1~``; see `Result.backup`.
        dry_run: plan, and write nothing.
        progress: called with bytes done and bytes in all.

    Raises:
        DamagedFile: nothing of it can be saved.
        UnknownFormat: it is not a checkpoint.
        Refused: it has no tensor.
        NoMatch: `like` does not say which storage is which tensor.
        CkptfixError: as `convert`.
    """
    name = file_name(source)
    if dest is None and not check_only:
        raise Refused("no output is given", path=name, hint="name a file to write, or only check")
    if fill not in (None, "zeros", "nan"):
        raise Refused(f"no such filling: {fill!r}", hint="zeros, or nan")
    if not Path(name).exists():
        raise NoSuchFile(name)
    if dest is not None:
        files = [os.fspath(path) for path in (source, fill_from, like) if path is not None and Path(path).is_file()]
        output.check_destination(dest, files, overwrite=force)
    donor = formats.open_checkpoint(fill_from) if fill_from is not None else None
    side = targets.read(like, allow_import=allow_import) if like is not None else None
    before = mark(name)
    near = os.path.dirname(os.path.abspath(name if dest is None else os.fspath(dest)))  # noqa: PTH100, PTH120
    with ExitStack() as stack:
        folder = cache(lambda: _Folder(near, stack))
        found = repair_op(name, lambda: folder().path, fill=fill, donor=donor, like=side)
        if dest is None or check_only:
            return _result(name, found, {"dest": "" if dest is None else os.fspath(dest)})
        refuse_other_suffix(name, os.fspath(dest), found.format)
        draft = Draft(
            source=name,
            read=(before,),
            dest=os.fspath(dest),
            format=found.format,
            plan=replace(found.plan_to(os.fspath(dest)), holds=folder),
            promise=Promise(found.kept),
            lines=_lines(found, written=not dry_run),
            findings=_findings(found),
            exit_code=_exit_code(found),
        )
        fields = carry_out(draft, force=force, keep_old=keep_old, dry_run=dry_run, progress=progress)
        if dry_run:
            # What was unpacked is kept as long as the plan that points to it.
            stack.pop_all()
    return _result(name, found, fields)


class _Folder:
    """A folder for what is unpacked, beside the output, where there is room for it.

    It is removed with `stack`, or, once that has released it, when nothing refers to it any more.
    """

    def __init__(self, near: str, stack: ExitStack) -> None:
        try:
            self.path = mkdtemp(prefix=".ckptfix-", dir=near)
        except OSError as error:
            raise WriteFailed(error.strerror or str(error), path=near) from None
        stack.callback(finalize(self, shutil.rmtree, self.path, ignore_errors=True))


def _findings(found: Repair) -> tuple[Finding, ...]:
    return (*found.notes, *found.left_out, *(loss.finding() for loss in found.losses))


def _exit_code(found: Repair) -> int:
    return LOSSES if found.losses or found.left_out else 0


def _result(source: str, found: Repair, done: dict[str, Any]) -> RepairResult:
    common: dict[str, Any] = {
        "source": source,
        "format": found.format,
        "plan": Plan(()),
        "written": False,
        "lines": _lines(found, written=False),
        "findings": _findings(found),
        "exit_code": _exit_code(found),
    }
    return RepairResult(
        **(common | done),
        kept=tuple(entry.name for entry in found.kept),
        nbytes_kept=found.nbytes,
        losses=found.losses,
    )


def _lines(found: Repair, *, written: bool) -> tuple[str, ...]:
    names = [entry.name for entry in found.kept]
    left_out = [loss.name for loss in found.losses if not loss.filled]
    filled = [loss.name for loss in found.losses if loss.filled]
    total = len(names) + len(found.losses)
    verb = "kept" if written else "intact:"
    line = f"{verb} {len(names):,} of {plural(total, 'tensor')} ({_size(found.nbytes)})"
    if not found.losses:
        line = f"{verb} {'the' if total == 1 else 'all'} {plural(total, 'tensor')} ({_size(found.nbytes)})"
    everything = [*names, *left_out, *filled]
    for word, some in (("lost", left_out), ("filled", filled)):
        if some:
            line += f"; {word} {len(some):,}: {_in_words(some, everything)}"
    if found.left_out:
        line += f"; left out what can run code: {listed(found.left_out)}"
    notes = [note.message for note in found.notes if note.severity == "info"]
    return (line, *([f"note: {'; '.join(notes)}"] if notes else []))


_STATE = re.compile(r"(?:(.*)/)?state/\d+/[^/]+", re.ASCII)


def _in_words(names: list[str], everything: list[str]) -> str:
    """Names in one line; an optimizer's, several for each parameter, as a count."""
    of: Counter[str] = Counter()
    others = []
    for name in names:
        found = _STATE.fullmatch(name)
        if found:
            of[found[1] or "the optimizer"] += 1
        else:
            others.append(name)
    parts = [shown(collapse(others, everything))] if others else []
    return " and ".join([*parts, *(f"{count:,} of {at}" for at, count in of.items())])


def _size(nbytes: int) -> str:
    """Bytes in the usual units, in powers of ten."""
    for unit, width in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= width:
            return f"{nbytes / width:.1f} {unit}"
    return f"{nbytes} bytes"
