"""``ckptfix.convert``: the same tensors in another format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

from ckptfix.arguments import checks_types
from ckptfix.checkpoint import Checkpoint
from ckptfix.commands import command
from ckptfix.errors import Refused, StrPath, UnknownFormat
from ckptfix.formats import FORMATS, detect, format_of, open_checkpoint
from ckptfix.formats.target import FormatName, is_folder
from ckptfix.io.read import Progress
from ckptfix.io.source import shares_open_files
from ckptfix.ops.convert import plan
from ckptfix.ops.writing import LOSSES, Draft, Result, WriteOptions, carry_out, copy_note, refuse_destination
from ckptfix.pickles.collector import gc_paused
from ckptfix.urls import as_path
from ckptfix.words import plural, some

NOTED = frozenset({"ranks-differ", "no-masters", "not-taken", "model-steps", "left-behind"})
"""Findings of reading a checkpoint of many files that matter to the user of the output."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ConvertResult(Result):
    """The result of a conversion.

    `at` is the address of the state dict that was written, None for the whole object; `left` lists what the output
    lacks.
    """

    at: str | None = None
    tensors: int = 0
    left: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    def _details(self) -> dict[str, Any]:
        return {"at": self.at, "tensors": self.tensors, "left_behind": list(self.left), "lost": list(self.lost)}


@checks_types
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
    """Write `source` to `dest` in a different format.

    Args:
        source: a file or a folder; or the files of all ranks of a job, which are joined.
        to: ``"zip"``, ``"legacy"``, ``"safetensors"`` or ``"hf"``, a folder of shards; by default, the suffix of `dest`
            decides.
        at: address of the state dict to write, if there are several.
        drop_unsupported: leave out tensors that the format cannot hold; they are listed, and `exit_code` is 3.
        shard_size: bytes of tensors per file in a folder of shards, or a string such as ``"500MB"``; 5GB by default.
        weights: for a DeepSpeed folder: ``"fp32"``, the master weights, by default; or ``"model"``, the weights that
            the model computed with.
        optimizer: for a DeepSpeed folder: write the optimizer state too, by parameter name; not to safetensors.

    The other arguments are those of `strip_module`.
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
            line = f"nothing to do: it is already {done.format}{copy_note(True)}"
        if done.ties:
            line += f"; {plural(done.ties, 'key')} tied to another"
        lines = [line]
        if done.lost:
            lines.append(f"LOST ({done.format} cannot hold them): {some(done.lost)}")
        behind = [address for address in done.left if address not in done.lost]
        behind += [row.where for row in checkpoint.findings if row.id == "left-behind"]
        if behind:
            lines.append(f"left behind: {some(behind)}")
        takes = format_of(checkpoint).select_weights is not None and "objects" in FORMATS[done.format].states
        if takes and "optimizer" in behind:
            lines.append("--optimizer writes the optimizer state too")
        return Draft(
            result=partial(ConvertResult, at=done.at, tensors=done.tensors, left=done.left, lost=done.lost),
            format=done.format,
            plan=done.plan,
            promise=done.promise,
            lines=lines,
            findings=(*done.plan.findings, *(row for row in checkpoint.findings if row.id in NOTED)),
            exit_code=LOSSES if done.lost else 0,
        )

    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, progress=progress)
    if to is None and shard_size is not None and not as_path(dest).suffix:
        to = "hf"
    folder = is_folder(to)
    if isinstance(source, list | tuple):
        refuse_destination(dest, source, how, folder=folder)
        return carry_out(_joined(source), dest, make, how, converts=True, folder=folder)
    return carry_out(cast("StrPath", source), dest, make, how, converts=True, folder=folder)


@gc_paused
@shares_open_files()
def _joined(paths: Sequence[StrPath]) -> Checkpoint:
    """Open the files of all ranks as one checkpoint.

    Raises:
        Refused: `paths` is empty, or one of the files is not from a rank of a job.
    """
    if not paths:
        raise Refused("there is no file to convert")
    if len(paths) == 1:
        return open_checkpoint(paths[0])
    try:
        from ckptfix.formats.ranks.format import read_files

        return read_files(paths)
    except UnknownFormat as error:
        path = error.path or ""
        what = detect(path).title
        message = f"this is {what}; several inputs can be joined only if they are the rank files of one job"
        hint = f"for shards, name the folder: `{command('convert', as_path(path).parent, 'OUT')}`"
        raise Refused(message, path=path, hint=hint) from None
