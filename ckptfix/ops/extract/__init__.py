"""``ckptfix.extract``: the weights of files that cannot be unpickled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from ckptfix.arguments import checks_types
from ckptfix.checkpoint import Checkpoint, Plan, address
from ckptfix.checkpoint.address import shown
from ckptfix.dataclass import dataclass
from ckptfix.errors import Refused, StrPath, Undecided, about
from ckptfix.findings.table import found
from ckptfix.formats import FORMATS, open_checkpoint
from ckptfix.formats.base import Format
from ckptfix.formats.programs import exported, torchscript
from ckptfix.formats.target import FormatName, fitting, is_folder, not_written, target_format
from ckptfix.formats.torch import calls
from ckptfix.formats.torch.weights import Weights
from ckptfix.formats.torch.weights_only import accepted
from ckptfix.io.read import Progress
from ckptfix.io.source import found_as
from ckptfix.ops.any_source import every_format, takes_any_source
from ckptfix.ops.audit.promise import Promise
from ckptfix.ops.candidates import candidates
from ckptfix.ops.candidates.averages import is_average
from ckptfix.ops.choose import choose as chosen_state_dict
from ckptfix.ops.convert import little
from ckptfix.ops.extract.averaged import averaged
from ckptfix.ops.extract.sources import nested, read
from ckptfix.ops.hazards import globals_below
from ckptfix.ops.rank_shards import refuse_piece
from ckptfix.ops.writing import LOSSES, Draft, Result, WriteOptions, carry_out_file
from ckptfix.words import plural, some


@dataclass(frozen=True, slots=True)
class Extraction:
    """The plan of an extraction.

    Attributes:
        weights: the extracted weights.
        plan: files to write; its findings list what is left out, and what the state dict may lack.
        format: format of the output.
        lost: keys of tensors that its format cannot hold.
        others: addresses of other state dicts that could have been extracted.
    """

    weights: Weights
    plan: Plan
    format: str
    lost: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def allows(self) -> Callable[[str], bool]:
        """Return a test of whether the output may name a global: torch's own, or one that is reported as kept."""
        kept = frozenset(foreign(self.weights))
        return lambda name: _is_own(name) or name in kept

    def promise(self) -> Promise:
        """Return the content that the output must have: the extracted tensors, except those its format cannot hold."""
        weights = self.weights
        kept = [entry for entry in weights.entries if entry.key not in self.lost]
        return Promise(kept, others=weights.beside, reported=frozenset(weights.left))


def choose(checkpoint: Checkpoint, at: str | None, ema: bool) -> tuple[Weights, tuple[str, ...]]:
    """Return the requested state dict, or the only one of a model; and the addresses of the others.

    Raises:
        NoSuchTensor: there is no state dict at `at`.
        Refused: there is no state dict, or there are several equally good ones.
    """
    if at is None:
        refuse_piece(checkpoint)
    found = candidates(checkpoint)
    if ema:
        weights = averaged(checkpoint, found, at)
        return weights, tuple(row.at for row in found if row.at != weights.at)
    if at is not None:
        refuse_piece(checkpoint, address.given(at))
    try:
        chosen = chosen_state_dict(checkpoint, at)
    except Undecided as error:
        error.averages = any(is_average(row.at, row.names) for row in found)
        error.choose_with(error.choice)
        raise
    others = tuple(row.at for row in found if row.at != chosen.at) if at is None else ()
    return read(checkpoint, chosen), others


def plan_extraction(
    weights: Weights, dest: str, *, to: str | None = None, drop_unsupported: bool = False
) -> Extraction:
    """Plan a file at `dest` that holds `weights`.

    Raises:
        Refused: there are no tensors in it.
        WouldLoseData: there are tensors that the format cannot hold, without `drop_unsupported`.
        Unsupported: the format is unknown, or a tensor cannot be written again.
    """
    target = FORMATS[target_format(weights.path, dest, to)]
    if weights.dicts and target.plan_state_dict is None:
        torch_file = "write a torch file: give OUT the suffix .pth or .bin"
        raise Refused(f"{target.name} cannot hold dicts in a dict", path=weights.path, hint=torch_file)
    if not weights.entries:
        first = weights.findings[0].message if weights.findings else "a module without parameters and buffers"
        hint = f"--at {torchscript.CONSTANTS} extracts its constants" if torchscript.CONSTANTS in weights.left else None
        raise Refused(f"{weights.what} holds no tensors: {first}", path=weights.path, hint=hint)
    lost: tuple[str, ...] = ()
    if target.plan_state_dict is not None:
        made = target.plan_state_dict(weights, dest)
    else:
        made, lost = _tensors_alone(weights, dest, target, drop_unsupported)
    kept = foreign(weights) if "objects" in target.states else []
    named = [found("foreign-global", KEPT, where=name, severity="warning") for name in kept]
    noticed = (*weights.findings, *named, *made.findings, *not_written(weights.left, lost, target))
    return Extraction(weights, Plan(made.files, noticed), target.name, lost)


KEPT = "a class or function that builds tensors; weights_only=True refuses it, and the output names it"


def foreign(weights: Weights) -> list[str]:
    """Return the globals in the calls of its tensors that are not torch's own."""
    items = () if weights.calls is None else weights.calls.items().values()
    return [name for name in dict.fromkeys(chain.from_iterable(map(globals_below, items))) if not _is_own(name)]


def _is_own(name: str) -> bool:
    """Return whether a global is torch's own: weights_only=True accepts it, or it builds a tensor of torch."""
    return accepted(name) or name in _REBUILDS


_REBUILDS = frozenset(row.full for row in calls.TABLE)


def _tensors_alone(
    weights: Weights, dest: str, target: Format, drop_unsupported: bool
) -> tuple[Plan, tuple[str, ...]]:
    hint = "--drop-unsupported leaves them out, and lists them; a torch file can hold them"
    taken, lost = fitting(
        weights.entries, target, drop_unsupported=drop_unsupported, path=weights.path, at=weights.at, hint=hint
    )
    kept, metadata, findings = target.split_ties(taken)
    view = replace(weights, entries=kept).as_checkpoint()
    made = target.plan_write(little(view, kept), dest, metadata={"format": "pt", **metadata})
    return Plan(made.files, (*findings, *made.findings)), lost


def open_weights(path: str, at: str | None, ema: bool) -> tuple[Weights, tuple[str, ...]]:
    """Return the weights to extract from the file at `path`, and the addresses of other state dicts in it.

    Raises:
        UnknownFormat: the file holds no weights.
        CkptfixError: as `choose`.
    """
    if found_as(path) != "file":
        return choose(open_checkpoint(path), at, ema)
    weights = read_program(path, at)
    if weights is None:
        return choose(open_checkpoint(path), at, ema)
    if ema:
        raise Refused("a program holds only one set of weights; --ema is for training checkpoints", path=path)
    return weights, ()


def read_program(path: str, at: str | None = None) -> Weights | None:
    """Return the state dict of a TorchScript archive or an exported program; None for every other file.

    Raises:
        CkptfixError: as `torchscript.read` and `exported.read`.
    """
    if found_as(path) != "file":
        return None
    return next((found for program in (torchscript, exported) if (found := program.read(path, at)) is not None), None)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ExtractResult(Result):
    """A state dict that was extracted from a file.

    Attributes:
        what: description of its origin in the file, such as ``"the module models.Net"``.
        at: its address in the file.
        tensors: number of keys that are written.
        left: addresses that the output does not hold.
        lost: keys of tensors that the output's format cannot hold.
        others: addresses of other state dicts in the file.
        classes: classes of the objects in it; none of them was imported.
        versions: whether the output has the ``_metadata`` of a state dict.
    """

    what: str
    at: str
    tensors: int
    left: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    versions: bool = False

    def _details(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "at": self.at,
            "tensors": self.tensors,
            "left_behind": list(self.left),
            "lost": list(self.lost),
            "others": list(self.others),
            "classes": list(self.classes),
            "versions": self.versions,
        }


@checks_types
@takes_any_source(takes=every_format, converts=True)
def extract(
    source: StrPath,
    dest: StrPath,
    *,
    at: str | None = None,
    ema: bool = False,
    nest: Sequence[str] = (),
    to: FormatName | None = None,
    drop_unsupported: bool = False,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ExtractResult:
    """Write one state dict of `source` to `dest`, exactly as ``torch.save(model.state_dict(), dest)`` would have.

    `source` is a whole pickled module, whose class need not exist, a training checkpoint, a TorchScript archive or an
    exported program (``.pt2``). None of its code is run. Tensors keep their keys, order, strides and ties; parameters
    become plain tensors, as in every state dict.

    Args:
        at: address of the state dict or module to extract; the only one by default.
        ema: extract the averaged weights, wherever the trainer keeps them, under the keys of a plain model.
        nest: prefixes of keys; the output is a dict with a state dict for each, and nothing else: ``"unet"`` takes
            ``unet.*``, ``"image_proj=image_proj_model"`` puts ``image_proj_model.*`` under ``image_proj``, and
            ``"model="`` puts all tensors under ``model``.
        to: ``"zip"``, ``"legacy"``, ``"safetensors"`` or ``"hf"``, a folder of shards; by default, the suffix of `dest`
            decides.
        drop_unsupported: leave out tensors that the format cannot hold; they are listed, and `exit_code` is 3.
        force: replace an existing `dest`.
        keep_old: keep the checkpoint that `force` replaces beside it, as ``DEST.~1~``; see `Result.backup`.
        dry_run: plan, and write nothing.
        progress: called with the bytes done and the total bytes.

    Raises:
        NoSuchTensor: there is nothing at `at`.
        Refused: there are several state dicts, or none; WouldLoseData, if a tensor cannot be read or written.
        CkptfixError: `source` cannot be read, or `dest` cannot be written.
    """

    def make(path: str, dest: str) -> Draft[ExtractResult]:
        with about(path):
            weights, others = open_weights(path, at, ema)
            if nest:
                weights = nested(weights, nest)
            done = replace(plan_extraction(weights, dest, to=to, drop_unsupported=drop_unsupported), others=others)
        missing = any(finding.id == "not-taken" for finding in done.plan.findings)
        return Draft(
            result=partial(
                ExtractResult,
                what=weights.what,
                at=weights.at,
                tensors=len(weights.entries) - len(done.lost),
                left=weights.left,
                lost=done.lost,
                others=others,
                classes=weights.classes,
                versions="objects" in FORMATS[done.format].states and weights.versions is not None,
            ),
            format=done.format,
            plan=done.plan,
            promise=done.promise(),
            read=weights.files,
            lines=_lines(done),
            findings=done.plan.findings,
            exit_code=LOSSES if done.lost or missing else 0,
            allows=done.allows(),
        )

    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, progress=progress)
    return carry_out_file(source, dest, make, how, folder=is_folder(to))


def _lines(done: Extraction) -> tuple[str, ...]:
    weights = done.weights
    count = len(weights.entries) - len(done.lost)
    place = f" at {weights.at}" if weights.at and weights.at not in weights.what else ""
    line = f"extracted {plural(count, 'tensor')}: {weights.what}{place}, as {done.format}"
    lines = [line]
    if weights.classes:
        lines.append(f"classes not needed, and not run: {some(weights.classes)}")
    hooks = [finding for finding in weights.findings if finding.id == "hook-not-run"]
    lines += [f"{finding.where or 'the module'}: {finding.message}" for finding in hooks[:3]]
    if weights.left:
        lines.append(f"left behind: {some(weights.left)}")
    elsewhere = [at for at in done.others if at not in weights.left]
    if elsewhere:
        lines.append(f"other state dicts: {some([shown(at) for at in elsewhere])}")
    if done.lost:
        lines.append(f"LOST ({done.format} cannot hold them): {some(done.lost)}")
    return tuple(lines)
