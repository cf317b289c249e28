"""``ckptfix.repair``: save what is provably intact in a damaged checkpoint to a fresh file."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import field, replace
from functools import cache, partial
from typing import Any

from ckptfix import formats
from ckptfix.arguments import Model, checks_types, takes_model
from ckptfix.checkpoint import Plan
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, Refused, StrPath, about, file_name
from ckptfix.formats.base import Format
from ckptfix.formats.repairs import LostTensor, Repair
from ckptfix.formats.target import of_suffix
from ckptfix.formats.torch.object import reads_equal_once
from ckptfix.io.read import Progress
from ckptfix.io.source import found_as, shares_open_files
from ckptfix.names.groups import collapse, shown
from ckptfix.ops.any_source import takes_any_source
from ckptfix.ops.audit.promise import Promise
from ckptfix.ops.hazards import is_harmless
from ckptfix.ops.layers import ScratchFolder
from ckptfix.ops.repair.clean import listed
from ckptfix.ops.repair.fill import Fill
from ckptfix.ops.repair.folder import becomes_folder
from ckptfix.ops.repair.open import repair as planned
from ckptfix.ops.repair.survivors import survivors
from ckptfix.ops.target import targets
from ckptfix.ops.writing import (
    LOSSES,
    Draft,
    Result,
    WriteOptions,
    carry_out_file,
    existing,
    looked_at,
    refuse_destination,
)
from ckptfix.pickles.collector import gc_paused
from ckptfix.urls import as_path
from ckptfix.words import plural


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RepairResult(Result):
    """The outcome of a repair, or of a check.

    Attributes:
        kept: keys of the intact tensors.
        nbytes_kept: bytes of their storages.
        losses: the tensors that are not intact, each with its replacement.
    """

    kept: tuple[str, ...] = ()
    nbytes_kept: int = 0
    losses: tuple[LostTensor, ...] = field(default=())

    def _details(self) -> dict[str, Any]:
        rows = [
            {"name": loss.name, "shape": loss.shape, "dtype": loss.dtype, "reason": loss.reason, "filled": loss.filled}
            for loss in self.losses
        ]
        return {"kept": list(self.kept), "nbytes_kept": self.nbytes_kept, "losses": rows}


def _takes(format: Format, target: Format) -> bool:
    """Return whether the repair itself makes a `target` of `format`.

    It makes a torch file of an object in a format that is only read, and of a folder that holds objects.
    """
    becomes_file = "objects" in format.states and (format.folder or not format.edits)
    arrays = not format.edits and not format.folder and "objects" not in format.states
    return format is target or (becomes_file and "objects" in target.states) or (arrays and not target.folder)


@contextmanager
def _names_other_ways() -> Iterator[None]:
    """Leave out of a hint that the file can be repaired, as the readers of many formats say of a damaged one."""
    try:
        yield
    except CkptfixError as error:
        if error.hint is not None and "ckptfix repair" in error.hint:
            others = _OR_REPAIR.sub("", error.hint)
            error.hint = "use another copy of the file" if "ckptfix repair" in others else others
        raise


_OR_REPAIR = re.compile(r"[;,] or (?:run )?`?ckptfix repair.*", re.DOTALL)


@checks_types
@takes_model
@gc_paused
@shares_open_files()
@reads_equal_once()
@_names_other_ways()
@takes_any_source(takes=_takes, first=True, unpacks=True)
def repair(
    source: StrPath,
    dest: StrPath | None,
    *,
    check_only: bool = False,
    fill: Fill | None = None,
    fill_from: StrPath | None = None,
    like: StrPath | Model | None = None,
    allow_import: bool = False,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> RepairResult:
    """Write to `dest` what is provably intact in `source`: a damaged file, an unzipped folder, a folder of shards.

    The output has the format of the input, written from scratch. Damaged tensors are left out, or filled, and listed;
    then `exit_code` is 3, and 0 when all are intact. Parts that can run code are left out and listed in the same way.

    Args:
        check_only: only report, and write nothing; `dest` may be None.
        fill: ``"zeros"`` or ``"nan"``, in place of lost tensors.
        fill_from: an older checkpoint, whose tensors with the same key, shape and dtype are used first.
        like: a model (checkpoint, ``keys.json``, or ``module:factory``), for a file whose pickle is lost.
        allow_import: import the module of ``module:factory`` and call the factory, which runs their code.
        force: replace an existing `dest`.
        keep_old: keep a checkpoint that `force` replaces beside it, as ``DEST.~1~``; see `Result.backup`.
        dry_run: plan, and write nothing.
        progress: called with the bytes done and the bytes in all.

    Raises:
        DamagedFile: nothing in it can be saved.
        UnknownFormat: it is not a checkpoint.
        Refused: it has no tensors.
        NoMatch: `like` does not determine which storage is which tensor.
        CkptfixError: as `convert`.
    """
    if dest is None and not check_only:
        raise Refused("no output is named", path=file_name(source), hint="name a file to write, or add --check-only")
    if fill not in (None, "zeros", "nan"):
        raise Refused(f"unknown fill: {fill!r}", hint="choose zeros or nan")
    target = None if like is None else file_name(like)
    beside = [path for path in (fill_from, target) if path is not None]
    inputs: list[StrPath] = [path for path in beside if found_as(file_name(path)) == "file"]
    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, progress=progress)
    many = becomes_folder(formats.folder_format(file_name(source)))
    if many and found_as(file_name(source)) != "folder":
        inputs.append(as_path(source).parent)
    with ExitStack() as stack:

        def look(path: str, near: str) -> tuple[Repair, Callable[[], ScratchFolder]]:
            donor = formats.open_checkpoint(fill_from) if fill_from is not None else None
            side = targets.read(target, allow_import=allow_import) if target is not None else None
            near = os.path.dirname(os.path.abspath(near))  # noqa: PTH100, PTH120
            folder = cache(lambda: ScratchFolder(near, stack))
            with about(path):
                return planned(path, lambda: folder().path, fill=fill, donor=donor, like=side), folder

        def make(path: str, dest: str) -> Draft[RepairResult]:
            found, folder = look(path, dest)
            found = replace(found, format=of_suffix(dest) or found.format) if found.any_format else found
            return _draft(found, replace(found.plan_to(dest), holds=folder), written=not dry_run)

        if dest is None or check_only:
            path = existing(source)
            if dest is not None:
                refuse_destination(dest, [source, *inputs], how, folder=many)
            found, _ = look(path, path if dest is None else os.fspath(dest))
            return looked_at(_draft(found, Plan(()), written=False), path, dest)
        result = carry_out_file(source, dest, make, how, others=inputs, folder=many or None)
        if dry_run:
            # The plan points to the unpacked files, so they are kept as long as the plan.
            stack.pop_all()
    return result


def _draft(found: Repair, plan: Plan, *, written: bool) -> Draft[RepairResult]:
    kept = tuple(entry.name for entry in found.kept)
    return Draft(
        result=partial(RepairResult, kept=kept, nbytes_kept=found.nbytes, losses=found.losses),
        format=found.format,
        plan=plan,
        promise=Promise(found.kept),
        lines=_lines(found, written=written),
        findings=(*found.notes, *(row.finding for row in found.left_out), *(loss.finding() for loss in found.losses)),
        exit_code=LOSSES if found.losses or found.left_out else 0,
        allows=is_harmless,
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
        line += f"; left out because it can run code: {listed(found.left_out)}"
    notes = [note.message for note in found.notes if note.severity == "info"]
    return (line, *([survivors(found)] if found.losses else ()), *([f"note: {'; '.join(notes)}"] if notes else []))


_STATE = re.compile(r"(?:(.*)/)?state/\d+/[^/]+", re.ASCII)


def _in_words(names: list[str], everything: list[str]) -> str:
    """Join names in one line; an optimizer's, several for each parameter, appear as a count."""
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
    """Format bytes in the usual units, in powers of ten."""
    for unit, width in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= width:
            return f"{nbytes / width:.1f} {unit}"
    return f"{nbytes} bytes"
