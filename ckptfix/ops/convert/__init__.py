"""``ckptfix.convert``: the same tensors in another format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

from ckptfix.arguments import typed
from ckptfix.checkpoint import Checkpoint
from ckptfix.commands import command
from ckptfix.errors import Refused, StrPath, UnknownFormat
from ckptfix.formats import FORMATS, detect, open_checkpoint
from ckptfix.formats.ranks.format import read_files
from ckptfix.formats.target import FormatName, is_folder
from ckptfix.io.read import Progress
from ckptfix.io.source import opened_once
from ckptfix.ops.convert import plan
from ckptfix.ops.writing import LOSSES, Draft, How, Result, carry_out, copy_note, refuse_destination
from ckptfix.pickles.collector import without_collections
from ckptfix.urls import as_path
from ckptfix.words import plural, some

NOTED = frozenset({"ranks-differ", "no-masters", "not-taken", "model-steps", "left-behind"})
"""Findings about what was read of a checkpoint of many files, which the user of the output should know."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ConvertResult(Result):
    """`at` is the state dict that was taken, None for the whole object; `left` is what the output lacks."""

    at: str | None = None
    tensors: int = 0
    left: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    def _details(self) -> dict[str, Any]:
        return {"at": self.at, "tensors": self.tensors, "left_behind": list(self.left), "lost": list(self.lost)}


@typed
def convert(
    source: StrPath | Sequence[StrPath],
    dest: StrPath,
    *,
    to: FormatName | None = None,
    at: str | None = None,
    drop_unsupported: bool = False,
    weights: Literal["fp32", "model"] | None = None,
    optimizer: bool = False,
    shard_size: int | str | None = None,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ConvertResult:
    """Write `source` to `dest` in another format.

    Args:
        source: a file or a folder; or the files of all ranks of a job, which are joined.
        to: ``"zip"``, ``"legacy"``, ``"safetensors"`` or ``"hf"``, a folder of shards; by the suffix of `dest` by
            default.
        at: address of the state dict to take, when there are several.
        drop_unsupported: leave out tensors that the format cannot hold; they are listed, and `exit_code` is 3.
        shard_size: bytes of tensors in one file of a folder of shards, or such as ``"500MB"``; 5GB by default.

        weights: of a DeepSpeed folder: ``"fp32"``, the master weights, by default; ``"model"``, what the model
            computed with.
        optimizer: of a DeepSpeed folder: take the optimizer's state too, by parameter name; not to safetensors.

    The rest as `strip_module`.
    """

    def make(checkpoint: Checkpoint, dest: str) -> Draft[ConvertResult]:
        done = plan.convert(
            checkpoint,
            dest,
            to=to,
            at=at,
            drop_unsupported=drop_unsupported,
            weights=weights,
            optimizer=optimizer,
            shard_size=shard_size,
        )
        of = f" of {done.at}" if done.at else ""
        titles = f"{FORMATS[checkpoint.format].title} -> {FORMATS[done.format].title}"
        line = f"converted {plural(done.tensors, 'tensor')}{of}: {titles}"
        shards = sum(not file.along and not file.path.endswith((".json", "/.metadata")) for file in done.plan.files)
        if shards > 1 and FORMATS[done.format].sized is not None:
            line += f", {plural(shards, 'file')}"
        if done.copied:
            line = f"nothing to do: it is {done.format} already{copy_note(True)}"
        if done.ties:
            line += f"; {plural(done.ties, 'name')} tied to another"
        lines = [line]
        if done.lost:
            lines.append(f"LOST, as {done.format} cannot hold them: {some(done.lost)}")
        behind = [address for address in done.left if address not in done.lost]
        behind += [row.where for row in checkpoint.findings if row.id == "left-behind"]
        if behind:
            lines.append(f"left behind: {some(behind)}")
        if checkpoint.format == "zero" and "optimizer" in behind and done.format != "safetensors":
            lines.append("with --optimizer, the optimizer's state is written too")
        return Draft(
            result=partial(ConvertResult, at=done.at, tensors=done.tensors, left=done.left, lost=done.lost),
            format=done.format,
            plan=done.plan,
            promise=done.promise,
            lines=lines,
            findings=(*done.plan.findings, *(row for row in checkpoint.findings if row.id in NOTED)),
            exit_code=LOSSES if done.lost else 0,
        )

    how = How(force=force, keep_old=keep_old, dry_run=dry_run, progress=progress)
    if to is None and shard_size is not None and not as_path(dest).suffix:
        to = "hf"
    folder = is_folder(to)
    if isinstance(source, list | tuple):
        refuse_destination(dest, source, how, folder=folder)
        return carry_out(_joined(source), dest, make, how, converts=True, folder=folder)
    return carry_out(cast("StrPath", source), dest, make, how, converts=True, folder=folder)


@without_collections
@opened_once()
def _joined(paths: Sequence[StrPath]) -> Checkpoint:
    """The files of all ranks as one checkpoint.

    Raises:
        Refused: there is none.
    """
    if not paths:
        raise Refused("no file to convert")
    if len(paths) == 1:
        return open_checkpoint(paths[0])
    try:
        return read_files(paths)
    except UnknownFormat as error:
        path = error.path or ""
        what = detect(path).title
        message = f"{what}, not what one rank of a job saved: of several inputs, only these are joined"
        hint = f"of shards, name the folder: `{command('convert', as_path(path).parent, 'OUT')}`"
        raise Refused(message, path=path, hint=hint) from None
