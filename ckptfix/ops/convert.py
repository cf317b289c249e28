"""Containers: the same tensors in another format."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ckptfix import dtypes
from ckptfix.checkpoint import (
    ByteRange,
    Checkpoint,
    Finding,
    OutputFile,
    Plan,
    TensorEntry,
    contiguous_stride,
)
from ckptfix.commands import command
from ckptfix.errors import Refused, Unsupported, WouldLoseData
from ckptfix.fileio import truncated_hint
from ckptfix.formats import FORMATS, safetensors, torch_recode
from ckptfix.formats.safetensors_write import row_major
from ckptfix.formats.torch_common import element_sizes, little_endian
from ckptfix.formats.torch_tensors import LAZY
from ckptfix.ops import choose
from ckptfix.ops.candidates import Candidate
from ckptfix.ops.law_promise import Promise, everything
from ckptfix.ops.pieces import refuse_odd_keys, refuse_piece

ALIASES = {"torch": "zip", "pt": "zip", "pth": "zip", "pytorch": "zip", "st": "safetensors"}


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
    """

    plan: Plan
    format: str
    at: str | None
    tensors: int
    promise: Promise
    left: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    ties: int = 0


def target_format(dest: str, to: str | None) -> str:
    """The format's name for `to`, or for the suffix of `dest`.

    Raises:
        Unsupported: neither determines it.
    """
    if to is not None:
        name = ALIASES.get(to.lower(), to.lower())
        if name not in FORMATS:
            raise Unsupported(f"no format called {to!r}", hint=f"formats are {', '.join(FORMATS)}")
        return name
    for name in ("safetensors", "zip"):
        if dest.lower().endswith(FORMATS[name].SUFFIXES):
            return name
    suffix = os.path.splitext(dest)[1]  # noqa: PTH122 (dest is text, whatever the system makes of it)
    what = f"the suffix {suffix!r}" if suffix else "a name without a suffix"
    message = f"cannot tell the output format from {what}"
    raise Unsupported(message, path=dest, hint="use another suffix, or --to zip, --to legacy or --to safetensors")


def refuse_other_suffix(source: str, dest: str, name: str, *, chosen: bool = False) -> None:
    """A file of one format must not have another's suffix: its reader would take it for that format.

    Args:
        source: the file that `dest` is made of.
        name: the format of the output.
        chosen: the user asked for this format (``--to``), instead of what the suffix says.

    Raises:
        Refused: the suffix of `dest` belongs to another format, and not to `name`.
    """
    own = FORMATS[name].SUFFIXES
    for other in FORMATS.values():
        if dest.lower().endswith(other.SUFFIXES) and not dest.lower().endswith(own):
            way = command("convert", source, dest)
            first = f"without --to it writes {other.NAME}" if chosen else f"`{way}` first, and work on that"
            raise Refused(
                f"the output would be {FORMATS[name].TITLE}, but its suffix suggests {other.TITLE}",
                path=dest,
                hint=f"{first}; or call the output *{own[0]}",
            )


def convert(
    checkpoint: Checkpoint, dest: str, *, to: str | None = None, at: str | None = None, drop_unsupported: bool = False
) -> Conversion:
    """Plan `dest` as another format of `checkpoint`.

    torch to torch keeps the whole object. safetensors takes one state dict: the one at `at`, or the only
    one that looks like a model's.

    Raises:
        WouldLoseData: tensors that the output cannot hold, without `drop_unsupported`.
        Refused: several state dicts and no `at`; or they are one rank's piece, and the output would not say so.
    """
    target = target_format(dest, to)
    refuse_other_suffix(checkpoint.path, dest, target, chosen=True)
    if target == checkpoint.format:
        return _copied(checkpoint, dest, target)
    if target == "safetensors":
        return _to_safetensors(checkpoint, dest, at, drop_unsupported)
    if at is not None:
        raise Refused("--at picks a state dict for safetensors; a torch file keeps the whole object")
    if checkpoint.format == "safetensors":
        return _from_safetensors(checkpoint, dest, target)
    _ = checkpoint.entries
    refuse_damaged(checkpoint)
    plan = (torch_recode.to_zip if target == "zip" else torch_recode.to_legacy)(checkpoint, dest)
    return Conversion(plan, target, None, len(checkpoint.entries), everything(checkpoint))


def _copied(checkpoint: Checkpoint, dest: str, target: str) -> Conversion:
    plan = Plan((OutputFile.of(dest, (ByteRange(checkpoint.path, 0, checkpoint.size),)),))
    return Conversion(plan, target, None, len(checkpoint.entries), everything(checkpoint))


def _to_safetensors(checkpoint: Checkpoint, dest: str, at: str | None, drop_unsupported: bool) -> Conversion:
    if at is None:
        refuse_piece(checkpoint)
    chosen = choose.mapping(checkpoint, at)
    refuse_piece(checkpoint, chosen.at)
    refuse_odd_keys(checkpoint, chosen.at)
    entries = [entry for entry in checkpoint.entries if entry.at == chosen.at]
    plain = [replace(entry, at="") for entry in entries]
    fitting = [entry for entry in plain if fits(entry)]
    odd = [entry for entry in plain if not fits(entry)]
    if odd and not drop_unsupported:
        shown = ", ".join(f"{entry.key} ({why_not(entry)})" for entry in odd[:5])
        more = f" and {len(odd) - 5} more" if len(odd) > 5 else ""
        raise WouldLoseData(
            f"safetensors cannot hold {len(odd)} of {len(plain)} tensors: {shown}{more}",
            path=checkpoint.path,
            where=chosen.at or None,
            hint="--drop-unsupported leaves them out, and names them",
        )
    refuse_damaged(checkpoint)
    kept, metadata, findings = safetensors.share_plan(fitting)
    plan = safetensors.plan_write(little(checkpoint, kept), dest, metadata={"format": "pt", **metadata})
    left = _left_behind(checkpoint, chosen)
    lost = tuple(entry.key for entry in odd)
    noticed = [*findings, *plan.findings]
    noticed += [Finding("left-behind", "info", address, "is not in the output") for address in left]
    noticed += [Finding("lost", "warning", key, "safetensors cannot hold it") for key in lost]
    plan = Plan(plan.files, tuple(noticed))
    ties = len(fitting) - len(kept)
    others = [entry for entry in checkpoint.entries if entry.at != chosen.at]
    promise = Promise(fitting, others=others, reported=frozenset(left))
    return Conversion(plan, "safetensors", chosen.at, len(fitting), promise, (*left, *lost), lost, ties)


BROKEN = frozenset({
    *("bad-crc", "bad-tensor", "truncated", "unknown-dtype", "too-deep", "duplicate-record", "duplicate-key")
})  # fmt: skip
MISREAD = frozenset({"bad-tensor", "unknown-dtype", "too-deep", "duplicate-record", "duplicate-key"})
"""The ones among them that no length and no checksum shows."""


def refuse_damaged(checkpoint: Checkpoint, ids: Collection[str] = BROKEN, below: str = "") -> None:
    """Tensors that were listed as broken would be missing from the output, or stand there as something else.

    Args:
        ids: what is looked for.
        below: an address; findings about tensors elsewhere do not count.

    Raises:
        WouldLoseData: a finding says that a tensor cannot be read as its writer meant it.
    """
    broken = [row for row in checkpoint.findings if row.id in ids and not row.where.startswith("__metadata__/")]
    if below:
        elsewhere = {entry.name for entry in checkpoint.entries if not entry.name.startswith(f"{below}/")}
        broken = [row for row in broken if row.where not in elsewhere]
    if broken:
        message = f"{broken[0].message} ({len(broken)} such)" if len(broken) > 1 else broken[0].message
        where, offset = broken[0].where or None, broken[0].offset
        hint = truncated_hint(checkpoint.path) if broken[0].id == "truncated" else None
        raise WouldLoseData(message, path=checkpoint.path, where=where, offset=offset, hint=hint)


def fits(entry: TensorEntry) -> bool:
    """Whether safetensors can hold a tensor as it is."""
    lazy = set(LAZY) & set(entry.detail.split(", "))
    return entry.kind == "dense" and not lazy and dtypes.by_name(entry.dtype).safetensors is not None


def why_not(entry: TensorEntry) -> str:
    """What about a tensor safetensors cannot hold."""
    return f"{entry.detail} {entry.dtype}".strip() if entry.kind == "dense" else f"{entry.kind} {entry.dtype}"


def little(checkpoint: Checkpoint, entries: Sequence[TensorEntry]) -> list[TensorEntry]:
    """The same entries with little-endian data, made contiguous first: elements are turned as they stream."""
    if checkpoint.byteorder == "little":
        return list(entries)
    units = element_sizes(checkpoint)
    out = []
    for entry in entries:
        storage = entry.storage
        assert storage is not None
        data = little_endian(row_major(entry), "big", units[storage.key])
        turned = replace(storage, key=entry.key, nbytes=entry.nbytes, data=data, crc32=None)
        out.append(replace(entry, storage=turned, offset=0, stride=contiguous_stride(entry.shape)))
    return out


def _left_behind(checkpoint: Checkpoint, chosen: Candidate) -> list[str]:
    """Addresses at the top of what is outside the chosen state dict, and its values that are not tensors."""
    inside = f"{chosen.at}/" if chosen.at else ""
    taken = {entry.name for entry in checkpoint.entries if entry.at == chosen.at}
    left: dict[str, None] = {}
    for entry in checkpoint.entries:
        if entry.at in taken:
            left[entry.name] = None
        elif entry.at != chosen.at:
            left[_top(entry.name, inside)] = None
    for address, _ in checkpoint.values():
        if address.rpartition("/")[0] not in taken:
            left[_top(address, inside)] = None
    return [address for address in left if address]


def _top(address: str, inside: str) -> str:
    """The address, cut to its first part when it lies outside the chosen mapping."""
    return address if inside and address.startswith(inside) else address.partition("/")[0]


def _from_safetensors(checkpoint: Checkpoint, dest: str, target: str) -> Conversion:
    refuse_piece(checkpoint)
    entries = safetensors.restore_ties(checkpoint.entries, checkpoint.metadata)
    refuse_damaged(checkpoint)
    plan = FORMATS[target].plan_write(entries, dest)
    names = {entry.key for entry in entries}
    left = [key for key in checkpoint.metadata if key not in names and key not in {"format", *safetensors.TIE_KEYS}]
    findings = list(plan.findings)
    findings += [Finding("left-behind", "info", f"__metadata__/{key}", "is not in the output") for key in left]
    plan = Plan(plan.files, tuple(findings))
    ties = len(entries) - len(checkpoint.entries)
    behind = tuple(f"__metadata__/{key}" for key in left)
    return Conversion(plan, target, "", len(entries), everything(checkpoint), behind, (), max(ties, 0))
