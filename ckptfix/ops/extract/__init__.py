"""``ckptfix.extract``: the weights of files that cannot be unpickled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ckptfix.arguments import checks_types
from ckptfix.checkpoint.address import shown
from ckptfix.errors import StrPath, about
from ckptfix.formats import FORMATS
from ckptfix.formats.target import FormatName, is_folder
from ckptfix.io.read import Progress
from ckptfix.ops.extract import plan
from ckptfix.ops.writing import LOSSES, Draft, Result, WriteOptions, carry_out_file
from ckptfix.words import plural, some


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
def extract(
    source: StrPath,
    dest: StrPath,
    *,
    at: str | None = None,
    ema: bool = False,
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
            weights, others = plan.open_weights(path, at, ema)
            done = replace(plan.plan(weights, dest, to=to, drop_unsupported=drop_unsupported), others=others)
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


def _lines(done: plan.Extraction) -> tuple[str, ...]:
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
