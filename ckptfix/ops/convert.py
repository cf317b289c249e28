"""``ckptfix.convert``: the same tensors in another format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from ckptfix.arguments import checks_types
from ckptfix.checkpoint import Checkpoint, OutputFile, Plan, TensorEntry, contiguous_stride
from ckptfix.checkpoint.address import holder_of, is_inside, is_inside_any, keys_of, of_keys
from ckptfix.commands import command
from ckptfix.dataclass import dataclass
from ckptfix.errors import Refused, StrPath, UnknownFormat, WouldLoseData
from ckptfix.formats import (
    FORMATS,
    detect,
    format_of,
    open_checkpoint,
    read_files,
    states,
    weights_of,
    without_optimizer,
)
from ckptfix.formats.base import Format, JoinOptions, ParallelSizes, SelectedWeights, refuse_truncated
from ckptfix.formats.safetensors.ties import TIE_KEYS
from ckptfix.formats.target import FormatName, fitting, is_folder, named_format, not_written, parse_size, target_format
from ckptfix.formats.torch.common import element_sizes, little_endian, maybe_pickled_object
from ckptfix.io.elements import resolved, row_major
from ckptfix.io.read import Progress
from ckptfix.io.source import shares_open_files
from ckptfix.ops import choose, quantized
from ckptfix.ops.any_source import every_format, takes_any_source
from ckptfix.ops.audit.promise import Promise, everything, listed
from ckptfix.ops.candidates import Candidate, at_address
from ckptfix.ops.chain import Done
from ckptfix.ops.choose import refuse_damaged
from ckptfix.ops.rank_shards import lone_shard, refuse_odd_keys, refuse_piece
from ckptfix.ops.writing import (
    LOSSES,
    Draft,
    Result,
    WriteOptions,
    carry_out,
    companions,
    copy_note,
    copy_of,
    plan_edits,
    refuse_destination,
)
from ckptfix.pickles.collector import gc_paused
from ckptfix.urls import as_path
from ckptfix.words import plural, some

if TYPE_CHECKING:
    from ckptfix.ops.dequantize.plan import Dequantization


@dataclass(frozen=True, slots=True)
class Conversion:
    """The plan of a conversion.

    Attributes:
        plan: files to write; its findings list what is left out.
        format: format of the output.
        at: address of the state dict that is written; None for the whole object.
        tensors: number of keys that are written.
        left: addresses that the output does not hold.
        lost: keys of tensors among them that were dropped on request.
        ties: number of keys that share their bytes with another key.
        promise: content that the output must have.
        copied: whether the input already had this format, so that the output is a copy.
        change: the plain weights that replace quantized ones.
    """

    plan: Plan
    format: str
    at: str | None
    tensors: int
    promise: Promise
    left: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    ties: int = 0
    copied: bool = False
    change: Dequantization | None = None


def plan_conversion(
    checkpoint: Checkpoint,
    dest: str,
    *,
    to: str | None = None,
    at: str | None = None,
    drop_unsupported: bool = False,
    weights: str | None = None,
    optimizer: bool = False,
    shard_size: int | str | None = None,
    dequantize: bool = False,
    dtype: str | None = None,
    join: JoinOptions | None = None,
    parallel: ParallelSizes | None = None,
    source: object = None,
) -> Conversion:
    """Plan `dest` as a copy of `checkpoint` in a different format.

    A format with objects keeps the whole object of a similar one. Other formats, such as safetensors, hold one state
    dict: the one at `at`, or the only one that looks like a model's.

    Args:
        weights, optimizer: the data to read from a format with `Format.select_weights`.
        dequantize: write plain weights instead of quantized ones, in `dtype` or in that of their scheme's own code.
        join: what the user says about a model that was cut into the files of ranks, which is joined.
        parallel: the numbers of ranks that the output is cut for.
        source: the user's name of the checkpoint; if that is a folder, its other files go to an output folder.

    Raises:
        WouldLoseData: there are tensors that the output cannot hold, without `drop_unsupported`; or the file is one
            rank's part of a model.
        Refused: there are several state dicts and no `at`; or a `shard_size` for a format without shards.
    """
    target = FORMATS[target_format(checkpoint.path, dest, to)]
    take = format_of(checkpoint).select_weights
    if take is None and (weights is not None or optimizer):
        option = "--optimizer" if weights is None else "--weights"
        message = f"{option} works only on a DeepSpeed folder; this is {format_of(checkpoint).title}"
        raise Refused(message, hint=f"leave out {option}")
    if target.parallel is not None:
        sizes = parallel if parallel is not None else ParallelSizes()
        sizes = sizes if join is None else replace(sizes, dims=join.dims)
        target = replace(target, plan_write=target.parallel(checkpoint, sizes))
    elif parallel is not None:
        message = f"{target.title} is not cut into the files of ranks"
        raise Refused(message, hint="--tp works with --to megatron or meta")
    if shard_size is not None:
        if target.sized is None:
            raise Refused(f"{target.title} is one file, without shards", hint="--to hf and --to dcp write shards")
        size = parse_size(shard_size)
        whole = None if target.sized_recode is None else target.sized_recode(size)
        target = replace(target, plan_write=target.sized(size), recode=whole)
    elif target is format_of(checkpoint) and not dequantize and join is None:
        if at is not None:
            at_address(checkpoint, at)
        return _copied(checkpoint, dest)
    if dequantize:
        return _dequantized(checkpoint, dest, target, at, drop_unsupported, dtype, source)
    quantized.refuse_blocks(checkpoint)
    if take is not None and at is None:
        return _taken(take(checkpoint, weights, optimizer), checkpoint, dest, target, drop_unsupported)
    if weights is not None or optimizer:
        raise Refused("--at cannot be combined with --weights or --optimizer", hint="leave out --at")
    return _planned(checkpoint, dest, target, at, drop_unsupported, source)


def _dequantized(
    checkpoint: Checkpoint,
    dest: str,
    target: Format,
    at: str | None,
    drop_unsupported: bool,
    dtype: str | None,
    source: object,
) -> Conversion:
    """Plan plain weights: of one state dict, or in the same object."""
    # Other conversions start faster without this import.
    from ckptfix.ops.dequantize.plan import dequantized, dtype_of

    to = dtype_of(dtype)
    refuse_piece(checkpoint)
    refuse_damaged(checkpoint)
    if "objects" not in target.states:
        make = partial(dequantized, checkpoint, to)
        return _one_state_dict(checkpoint, dest, target, at, drop_unsupported, source, make)
    change = dequantized(checkpoint, to)
    if target is format_of(checkpoint):
        plan = plan_edits(checkpoint, change.edits(), dest)
        files = [file for file in plan.files if not file.along]
        plan = replace(plan, files=(*change.around(checkpoint, [file for file in plan.files if file.along]), *files))
        promise = change.promise(everything(checkpoint), listed(checkpoint))
    elif states(checkpoint, "objects"):
        hint = f"dequantize it to {format_of(checkpoint).name} first, or to safetensors"
        raise Refused(f"{target.title} would need a new object with other tensors", hint=hint)
    else:
        plan = target.plan_write(change.applied(weights_of(checkpoint)), dest)
        promise = change.promise(everything(checkpoint), listed(checkpoint))
    count = len(checkpoint.entries) - len(change.companions)
    return Conversion(plan, target.name, at, count, promise, change=change)


def _taken(taken: SelectedWeights, whole: Checkpoint, dest: str, target: Format, drop_unsupported: bool) -> Conversion:
    """Plan the conversion of the part of `whole` that its format selected."""
    if taken.at is None and "objects" not in target.states:
        message = f"{target.name} holds one state dict, without optimizer state"
        raise Refused(message, hint="write a torch file (--to zip), or leave out --optimizer")
    done = _planned(taken.checkpoint, dest, target, None, drop_unsupported)
    others = [entry for entry in whole.entries if is_inside_any(entry.name, taken.left)]
    promise = replace(
        done.promise,
        others=[*done.promise.others, *others],
        reported=frozenset((*done.promise.reported, *taken.left)),
    )
    behind = not_written(taken.left, (), target)
    plan = replace(done.plan, findings=(*done.plan.findings, *behind))
    left = (*taken.left, *done.left)
    return replace(done, plan=plan, at=taken.at, left=left, promise=promise)


def _planned(
    checkpoint: Checkpoint, dest: str, target: Format, at: str | None, drop_unsupported: bool, source: object = None
) -> Conversion:
    if "objects" not in target.states:
        return _one_state_dict(checkpoint, dest, target, at, drop_unsupported, source)
    if at is not None:
        hint = f"`{command('extract', checkpoint.path, dest, at=at)}` writes one state dict"
        raise Refused("a torch file keeps the whole object", hint=hint)
    if target.recode is None or not states(checkpoint, "objects"):
        if any(entry.at for entry in checkpoint.entries) or any(True for _ in checkpoint.values()):
            # A new state dict has no place for other dicts and values: they are left behind, and named.
            return _one_state_dict(checkpoint, dest, target, None, drop_unsupported, source)
        return _every_tensor(checkpoint, dest, target, source)
    refuse_piece(checkpoint)
    refuse_damaged(checkpoint)
    plan = target.recode(checkpoint, dest)
    lost = tuple(row.where for row in plan.findings if row.id == "lost")
    tensors = len(checkpoint.entries) - len(lost)
    return Conversion(plan, target.name, None, tensors, everything(checkpoint, lost), lost, lost)


def _copied(checkpoint: Checkpoint, dest: str) -> Conversion:
    refuse_piece(checkpoint)
    refuse_truncated(checkpoint)
    plan = copy_of(checkpoint, dest)
    promise = Promise(edited=checkpoint)
    return Conversion(plan, checkpoint.format, None, len(checkpoint.entries), promise, copied=True)


def refuse_state_dict(checkpoint: Checkpoint, target: Format, at: str | None) -> None:
    """Raise the error of a conversion to a format that holds one state dict; no tensor byte is read.

    Raises:
        CkptfixError: as `plan_conversion`.
    """
    _fitting(checkpoint, target, at, drop_unsupported=False)
    refuse_damaged(checkpoint)


def _fitting(
    checkpoint: Checkpoint,
    target: Format,
    at: str | None,
    *,
    drop_unsupported: bool,
    change: Callable[[str], Dequantization] | None = None,
) -> tuple[Candidate, list[TensorEntry], tuple[str, ...], list[str], Dequantization | None]:
    """Return the chosen state dict, its tensors that fit `target`, the keys of the others, and the unreadable ones.

    With a function `change`, the last value is what it returns for the address of the state dict, and its plain weights
    replace quantized ones.
    """
    if at is None:
        refuse_piece(checkpoint)
    chosen = choose.mapping(checkpoint, at)
    refuse_piece(checkpoint, chosen.at)
    refuse_odd_keys(checkpoint, chosen.at)
    entries: Sequence[TensorEntry] = weights_of(checkpoint, chosen.at)
    done = change(chosen.at) if change is not None else None
    if done is not None:
        entries = done.applied(entries)
    plain = [replace(entry, at="") for entry in entries]
    hint = "--drop-unsupported leaves them out, and lists them"
    taken, lost = fitting(
        plain, target, drop_unsupported=drop_unsupported, path=checkpoint.path, at=chosen.at, hint=hint
    )
    parts = maybe_pickled_object(checkpoint)
    unread = parts.found.unread(chosen.at) if parts is not None else []
    if unread and not drop_unsupported:
        raise WouldLoseData(f"built from a value that is not a tensor: {some(unread)}", path=checkpoint.path, hint=hint)
    return chosen, taken, (*lost, *unread), unread, done


def _one_state_dict(
    checkpoint: Checkpoint,
    dest: str,
    target: Format,
    at: str | None,
    drop_unsupported: bool,
    source: object,
    change: Callable[[str], Dequantization] | None = None,
) -> Conversion:
    chosen, taken, lost, unread, done = _fitting(
        checkpoint, target, at, drop_unsupported=drop_unsupported, change=change
    )
    refuse_damaged(checkpoint)
    kept, metadata, findings = target.split_ties(taken)
    pairs = {"format": "pt", **_pairs(checkpoint), **metadata} if "metadata" in target.states else metadata
    pairs = pairs if done is None else done.pairs(pairs)
    plan = target.plan_write(little(checkpoint, kept), dest, metadata=pairs)
    left = [name for name in _left_behind(checkpoint, chosen) if name not in unread and name not in target.kept_beside]
    noticed = (*findings, *plan.findings, *not_written(left, lost, target))
    along = _along(checkpoint, plan, target, dest, source)
    along = along if done is None else done.around(checkpoint, along)
    plan = Plan((*along, *plan.files), noticed)
    ties = len(taken) - len(kept)
    own = {entry.name for entry in without_optimizer(checkpoint.entries_at(chosen.at))}
    others = [entry for entry in checkpoint.entries if entry.name not in own]
    promise = Promise(taken, others=others, reported=frozenset(left))
    if done is not None:
        promise = done.promise(promise, [entry for entry in checkpoint.entries_at(chosen.at) if entry.name in own])
    return Conversion(plan, target.name, chosen.at, len(taken), promise, (*left, *lost), lost, ties, change=done)


def _along(checkpoint: Checkpoint, plan: Plan, target: Format, dest: str, source: object) -> list[OutputFile]:
    """Return the companion files that follow a folder into another folder, except names that the output uses itself."""
    if not target.folder:
        return []
    names = {file.path for file in plan.files}
    return [file for file in companions(checkpoint, source, dest) if file.path not in names]


def _pairs(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the metadata of a checkpoint without its records of ties and views, which are written anew."""
    names = {*format_of(checkpoint).ties(checkpoint), *TIE_KEYS}
    return {key: value for key, value in checkpoint.metadata.items() if key not in names}


def little(checkpoint: Checkpoint, entries: Sequence[TensorEntry]) -> list[TensorEntry]:
    """Return the entries with little-endian data; big-endian ones are made contiguous and swapped while streaming."""
    if checkpoint.byteorder == "little":
        return list(entries)
    units = element_sizes(checkpoint)
    out = []
    for entry in entries:
        unit = units[entry.storage.identity] if entry.storage is not None else 1
        entry = resolved(entry, "big")
        storage = entry.storage
        assert storage is not None
        data = little_endian(row_major(entry, "big"), "big", unit)
        turned = replace(storage, key=entry.key, nbytes=entry.nbytes, data=data, crc32=None)
        out.append(replace(entry, storage=turned, offset=0, stride=contiguous_stride(entry.shape)))
    return out


def _left_behind(checkpoint: Checkpoint, chosen: Candidate) -> list[str]:
    """List the addresses outside the chosen state dict, cut to their first key, and its values that are not tensors."""
    taken = {entry.name for entry in without_optimizer(checkpoint.entries_at(chosen.at))}
    left: dict[str, None] = {}
    for entry in checkpoint.entries:
        if entry.at in taken:
            left[entry.name] = None
        elif entry.name not in taken:
            left[_top(entry.name, chosen.at)] = None
    for address, _ in checkpoint.values():
        if holder_of(address) not in taken:
            left[_top(address, chosen.at)] = None
    return [address for address in left if address]


def _top(address: str, at: str) -> str:
    """Return the address, cut to its first key if it is outside the chosen state dict."""
    return address if at and is_inside(address, at) else of_keys(keys_of(address)[:1])


def _every_tensor(checkpoint: Checkpoint, dest: str, target: Format, source: object) -> Conversion:
    """Plan the tensors of a format that otherwise holds only metadata."""
    refuse_piece(checkpoint)
    entries = weights_of(checkpoint)
    refuse_damaged(checkpoint)
    plan = target.plan_write(entries, dest)
    names = {entry.key for entry in entries}
    left = [key for key in checkpoint.metadata if key not in names and key not in {"format", *TIE_KEYS}]
    behind = tuple(f"__metadata__/{key}" for key in left)
    # The settings of the model, such as params.json, go with the files that are cut by them.
    along = _along(checkpoint, plan, target, dest, source) if target.parallel is not None else []
    plan = Plan((*along, *plan.files), (*plan.findings, *not_written(behind, (), target)))
    ties = len(entries) - len(checkpoint.entries)
    promise = everything(checkpoint)
    stored = {entry.key: entry for entry in promise.kept}
    # A recorded view replaces a copy of its elements. The two were compared before.
    views = {entry.name: entry for entry in entries if entry != stored.get(entry.key, entry)}
    promise = replace(promise, puts=views)
    return Conversion(plan, target.name, "", len(entries), promise, behind, (), max(ties, 0))


NOTED = frozenset({"ranks-differ", "no-masters", "not-taken", "model-steps", "left-behind"})
"""Findings of reading a checkpoint of many files that matter to the user of the output."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ConvertResult(Result):
    """The result of a conversion.

    Attributes:
        at: address of the state dict that was written, None for the whole object.
        left: what the output lacks.
        dequantized: address of quantized codes -> (key, dtype) of the plain weight that was written.
        companions: addresses of the scales and other tensors that were left out with the codes.
        steps: the commands that were carried out, if there were several.
    """

    at: str | None = None
    tensors: int = 0
    left: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    dequantized: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    companions: tuple[str, ...] = ()
    steps: tuple[Done, ...] = ()

    def _details(self) -> dict[str, Any]:
        return {
            "at": self.at,
            "tensors": self.tensors,
            "left_behind": list(self.left),
            "lost": list(self.lost),
            "dequantized": [
                {"name": name, "key": key, "dtype": dtype} for name, (key, dtype) in self.dequantized.items()
            ],
            "companions": list(self.companions),
            "steps": [one.as_dict() for one in self.steps],
        }


@checks_types
@takes_any_source(takes=every_format, converts=True)
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
    dequantize: bool = False,
    dtype: Literal["bf16", "fp16", "fp32"] | None = None,
    dims: Mapping[str, int | str] | None = None,
    vocab_size: int | str | None = None,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ConvertResult:
    """Write `source` to `dest` in a different format. The arguments are those of `deploy.convert`, which calls it.
    """

    join = JoinOptions(dims or {}, vocab_size) if dims or vocab_size is not None else None
    parallel = _sizes(tp, pp, ep)

    def make(checkpoint: Checkpoint, dest: str) -> Draft[ConvertResult]:
        checkpoint = _rejoined(checkpoint, join, to)
        done = plan_conversion(
            checkpoint,
            dest,
            to=to,
            at=at,
            drop_unsupported=drop_unsupported,
            weights=weights,
            optimizer=optimizer,
            shard_size=shard_size,
            dequantize=dequantize,
            dtype=dtype,
            join=join,
            parallel=parallel,
            source=source,
        )
        of = f" of {done.at}" if done.at else ""
        titles = f"{FORMATS[checkpoint.format].title} -> {FORMATS[done.format].title}"
        line = f"converted {plural(done.tensors, 'tensor')}{of}: {titles}"
        shards = sum(not file.along and file.has_data for file in done.plan.files)
        if shards > 1 and FORMATS[done.format].sized is not None:
            line += f", {plural(shards, 'file')}"
        if done.copied:
            line = f"nothing to do: it is already {done.format}{copy_note(True)}"
        if done.ties:
            line += f"; {plural(done.ties, 'key')} tied to another"
        lines = [line]
        if done.change is not None:
            lines += done.change.lines(folder=FORMATS[done.format].folder)
        if done.lost:
            lines.append(f"LOST ({done.format} cannot hold them): {some(done.lost)}")
        behind = [address for address in done.left if address not in done.lost]
        behind += [row.where for row in checkpoint.findings if row.id == "left-behind"]
        if behind:
            lines.append(f"left behind: {some(behind)}")
        takes = format_of(checkpoint).select_weights is not None and "objects" in FORMATS[done.format].states
        if takes and "optimizer" in behind:
            lines.append("--optimizer writes the optimizer state too")
        lone = lone_shard(checkpoint.path)
        alone = () if lone is None else (lone.finding("warning"),)
        return Draft(
            result=partial(
                ConvertResult,
                at=done.at,
                tensors=done.tensors,
                left=done.left,
                lost=done.lost,
                dequantized={} if done.change is None else done.change.written,
                companions=() if done.change is None else tuple(done.change.companions),
            ),
            format=done.format,
            plan=done.plan,
            promise=done.promise,
            lines=lines,
            findings=(*done.plan.findings, *(row for row in checkpoint.findings if row.id in NOTED), *alone),
            exit_code=LOSSES if done.lost else 0,
        )

    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, progress=progress)
    folder = is_folder(to)
    if isinstance(source, list | tuple):
        refuse_destination(dest, source, how, folder=folder)
        return carry_out(_joined(source), dest, make, how, converts=True, folder=folder)
    return carry_out(cast("StrPath", source), dest, make, how, converts=True, folder=folder)


def _sizes(tp: int | None, pp: int | None, ep: int | None) -> ParallelSizes | None:
    """Return the numbers of ranks that the user asked for; None without any.

    Raises:
        Refused: one is not positive, or beyond any job.
    """
    if (tp, pp, ep) == (None, None, None):
        return None
    for name, size in (("--tp", tp), ("--pp", pp), ("--ep", ep)):
        if size is not None and not 0 < size <= MOST_PARTS:
            raise Refused(f"{name} {size} is not a number of ranks", hint=f"give a number from 1 to {MOST_PARTS}")
    return ParallelSizes(tp or 1, pp or 1, ep or 1)


MOST_PARTS = 1024
"""The largest number of ranks of one kind that a model is cut for."""


def _rejoined(checkpoint: Checkpoint, join: JoinOptions | None, to: str | None) -> Checkpoint:
    """Return the checkpoint as joined with the cuts and the vocabulary that the user states.

    Raises:
        Refused: it is not a model that was cut into files.
    """
    if join is None:
        return checkpoint
    again = format_of(checkpoint).rejoined
    if again is not None:
        return again(checkpoint, join)
    if join.vocab_size is None and to is not None and named_format(to).parallel is not None:
        return checkpoint
    option = "--dim" if join.vocab_size is None else "--vocab-size"
    message = f"{option} works on the files of ranks that tensor parallelism cut; this is {format_of(checkpoint).title}"
    raise Refused(message, path=checkpoint.path, hint=f"leave out {option}")


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
        return read_files(paths)
    except UnknownFormat as error:
        path = error.path or ""
        what = detect(path).title
        message = f"this is {what}; several inputs can be joined only if they are the rank files of one job"
        hint = f"for shards, name the folder: `{command('convert', as_path(path).parent, 'OUT')}`"
        raise Refused(message, path=path, hint=hint) from None
