"""Containers: the same tensors in another format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckptfix.checkpoint import Checkpoint, OutputFile, Plan, TensorEntry, contiguous_stride
from ckptfix.checkpoint.address import holder_of, is_inside, is_inside_any, keys_of, of_keys
from ckptfix.errors import Refused, WouldLoseData
from ckptfix.formats import FORMATS, format_of, states, weights_of, without_optimizer
from ckptfix.formats.base import Format, Taken
from ckptfix.formats.safetensors.ties import TIE_KEYS
from ckptfix.formats.shards.write import parse_size
from ckptfix.formats.target import fitting, not_written, target_format
from ckptfix.formats.torch import legacy_layout
from ckptfix.formats.torch.common import element_sizes, little_endian, pickled
from ckptfix.io.elements import resolved, row_major
from ckptfix.ops import choose
from ckptfix.ops.candidates import Candidate
from ckptfix.ops.choose import refuse_damaged
from ckptfix.ops.law.promise import Promise, everything
from ckptfix.ops.pieces import refuse_odd_keys, refuse_piece
from ckptfix.ops.writing import copy_of
from ckptfix.words import some


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion will do.

    Attributes:
        plan: what will be written; its findings list what is left out.
        format: of the output.
        at: address of the state dict that was taken; None for the whole object.
        tensors: how many names are written.
        left: addresses of what the output does not hold.
        lost: names of tensors among them that were dropped on request.
        ties: names that share their bytes with another one.
        promise: what the output has to hold.
        copied: the input had this format; the output is a copy.
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


def convert(
    checkpoint: Checkpoint,
    dest: str,
    *,
    to: str | None = None,
    at: str | None = None,
    drop_unsupported: bool = False,
    weights: str | None = None,
    optimizer: bool = False,
    shard_size: int | str | None = None,
) -> Conversion:
    """Plan `dest` as another format of `checkpoint`.

    A format with objects keeps the whole object of another one. Others, as safetensors, take one state dict: the one
    at `at`, or the only one that looks like a model's.

    Args:
        weights, optimizer: what is taken of a format with `Format.take`.

    Raises:
        WouldLoseData: tensors that the output cannot hold, without `drop_unsupported`; or one rank's piece of a model.
        Refused: several state dicts and no `at`; or a `shard_size` for a format without shards.
    """
    target = FORMATS[target_format(checkpoint.path, dest, to)]
    take = format_of(checkpoint).take
    if take is None and (weights is not None or optimizer):
        option = "--optimizer" if weights is None else "--weights"
        message = f"{option} chooses from a DeepSpeed folder; this is {format_of(checkpoint).title}"
        raise Refused(message, hint=f"leave out {option}")
    if shard_size is not None:
        if target.sized is None:
            raise Refused(f"{target.title} is one file, without shards", hint="--to hf and --to dcp write shards")
        size = parse_size(shard_size)
        whole = None if target.sized_recode is None else target.sized_recode(size)
        target = replace(target, plan_write=target.sized(size), recode=whole)
    elif target is format_of(checkpoint):
        return _copied(checkpoint, dest)
    if take is not None and at is None:
        return _taken(take(checkpoint, weights, optimizer), checkpoint, dest, target, drop_unsupported)
    if weights is not None or optimizer:
        raise Refused("--at says what is taken; --weights and --optimizer say it too", hint="leave out --at")
    return _planned(checkpoint, dest, target, at, drop_unsupported)


def _taken(taken: Taken, whole: Checkpoint, dest: str, target: Format, drop_unsupported: bool) -> Conversion:
    """The same for a part of the object of `whole`."""
    if taken.at is None and "objects" not in target.states:
        message = f"{target.name} holds one state dict, and no optimizer's state"
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
    checkpoint: Checkpoint, dest: str, target: Format, at: str | None, drop_unsupported: bool
) -> Conversion:
    if "objects" not in target.states:
        return _one_state_dict(checkpoint, dest, target, at, drop_unsupported)
    if at is not None:
        raise Refused("--at picks a state dict for safetensors; a torch file keeps the whole object")
    if target.recode is None or not states(checkpoint, "objects"):
        return _every_tensor(checkpoint, dest, target)
    refuse_piece(checkpoint)
    refuse_damaged(checkpoint)
    plan = target.recode(checkpoint, dest)
    lost = tuple(row.where for row in plan.findings if row.id == "lost")
    tensors = len(checkpoint.entries) - len(lost)
    return Conversion(plan, target.name, None, tensors, everything(checkpoint, lost), lost, lost)


def _copied(checkpoint: Checkpoint, dest: str) -> Conversion:
    refuse_piece(checkpoint)
    legacy_layout.refuse_truncated(checkpoint)
    plan = copy_of(checkpoint, dest)
    promise = Promise(edited=checkpoint)
    return Conversion(plan, checkpoint.format, None, len(checkpoint.entries), promise, copied=True)


def refuse_state_dict(checkpoint: Checkpoint, target: Format, at: str | None) -> None:
    """Raise the error of a conversion to a format that holds one state dict; no tensor byte is read.

    Raises:
        CkptfixError: as `convert`.
    """
    _fitting(checkpoint, target, at, drop_unsupported=False)
    refuse_damaged(checkpoint)


def _fitting(
    checkpoint: Checkpoint, target: Format, at: str | None, *, drop_unsupported: bool
) -> tuple[Candidate, list[TensorEntry], tuple[str, ...], list[str]]:
    """Return the state dict to take, its tensors that `target` can hold, what it cannot, and what cannot be read."""
    if at is None:
        refuse_piece(checkpoint)
    chosen = choose.mapping(checkpoint, at)
    refuse_piece(checkpoint, chosen.at)
    refuse_odd_keys(checkpoint, chosen.at)
    entries = weights_of(checkpoint, chosen.at)
    plain = [replace(entry, at="") for entry in entries]
    hint = "--drop-unsupported leaves them out, and names them"
    taken, lost = fitting(
        plain, target, drop_unsupported=drop_unsupported, path=checkpoint.path, at=chosen.at, hint=hint
    )
    parts = pickled(checkpoint)
    unread = parts.found.unread(chosen.at) if parts is not None else []
    if unread and not drop_unsupported:
        raise WouldLoseData(f"made of what is no tensor: {some(unread)}", path=checkpoint.path, hint=hint)
    return chosen, taken, (*lost, *unread), unread


def _one_state_dict(
    checkpoint: Checkpoint, dest: str, target: Format, at: str | None, drop_unsupported: bool
) -> Conversion:
    chosen, taken, lost, unread = _fitting(checkpoint, target, at, drop_unsupported=drop_unsupported)
    refuse_damaged(checkpoint)
    kept, metadata, findings = target.share(taken)
    pairs = {"format": "pt", **_pairs(checkpoint), **metadata} if "metadata" in target.states else metadata
    plan = target.plan_write(little(checkpoint, kept), dest, metadata=pairs)
    left = [name for name in _left_behind(checkpoint, chosen) if name not in unread]
    noticed = (*findings, *plan.findings, *not_written(left, lost, target))
    plan = Plan((*_along(checkpoint, plan, target, dest), *plan.files), noticed)
    ties = len(taken) - len(kept)
    own = {entry.name for entry in without_optimizer(checkpoint.entries_at(chosen.at))}
    others = [entry for entry in checkpoint.entries if entry.name not in own]
    promise = Promise(taken, others=others, reported=frozenset(left))
    return Conversion(plan, target.name, chosen.at, len(taken), promise, (*left, *lost), lost, ties)


def _along(checkpoint: Checkpoint, plan: Plan, target: Format, dest: str) -> list[OutputFile]:
    """What lies beside a folder of files goes along to another one, but for names that the output has."""
    if not target.folder:
        return []
    names = {file.path for file in plan.files}
    return [file for file in format_of(checkpoint).beside(checkpoint, dest) if file.path not in names]


def _pairs(checkpoint: Checkpoint) -> dict[str, str]:
    """The metadata of a checkpoint, without what it says of ties and views: these are written anew."""
    names = {*format_of(checkpoint).ties(checkpoint), *TIE_KEYS}
    return {key: value for key, value in checkpoint.metadata.items() if key not in names}


def little(checkpoint: Checkpoint, entries: Sequence[TensorEntry]) -> list[TensorEntry]:
    """The same entries with little-endian data, made contiguous first: elements are turned as they stream."""
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
    """Addresses at the top of what is outside the chosen state dict, and its values that are not tensors."""
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
    """The address, cut to its first key when it lies outside the chosen mapping."""
    return address if at and is_inside(address, at) else of_keys(keys_of(address)[:1])


def _every_tensor(checkpoint: Checkpoint, dest: str, target: Format) -> Conversion:
    """The tensors of a format that holds nothing else but metadata."""
    refuse_piece(checkpoint)
    entries = weights_of(checkpoint)
    refuse_damaged(checkpoint)
    plan = target.plan_write(entries, dest)
    names = {entry.key for entry in entries}
    left = [key for key in checkpoint.metadata if key not in names and key not in {"format", *TIE_KEYS}]
    behind = tuple(f"__metadata__/{key}" for key in left)
    plan = Plan(plan.files, (*plan.findings, *not_written(behind, (), target)))
    ties = len(entries) - len(checkpoint.entries)
    promise = everything(checkpoint)
    stored = {entry.key: entry for entry in promise.kept}
    # A view that metadata records takes the place of a copy of its elements, which were compared.
    views = {entry.name: entry for entry in entries if entry != stored.get(entry.key, entry)}
    promise = replace(promise, puts=views)
    return Conversion(plan, target.name, "", len(entries), promise, behind, (), max(ties, 0))
