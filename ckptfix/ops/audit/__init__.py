"""The weight audit: each tensor of an input is in the output, left out on request, or reported as lost.

The audit does not rely on the report of an operation. It reads the planned output back through its plan, as any reader
will read the file. It compares the tensors with those that the operation must keep: by shape, dtype, and the bytes of
the input that they will be made of. No tensor byte is read for that.

The same comparison finds checksums that would be lost. Bytes that a CRC-32 of the input covers, and none of the output,
are compared with it while they are copied (`Plan.checks`). Otherwise damaged data would come out as intact.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ckptfix.checkpoint import ByteRange, Checkpoint, Plan, bytes_of, storages_of
from ckptfix.checkpoint.address import is_inside_any
from ckptfix.formats import format_of
from ckptfix.formats.torch.common import referred, size_of
from ckptfix.io.read import read_from
from ckptfix.ops.audit.output import PlannedOutput, covered_by, leaves
from ckptfix.ops.audit.promise import Account, Promise, damaged, everything


def keeps_all(source: Checkpoint, plan: Plan, but: Collection[str] = ()) -> bool:
    """Return whether `plan` certainly keeps every tensor of `source`, except those at or below an address of `but`.

    False proves nothing: `audit` then checks each tensor. For an edit of keys or devices, this takes a tenth of the
    time.
    """
    sure = format_of(source).keeps_all
    return sure is not None and sure(source, plan, but)


def audit(promise: Promise, plan: Plan, format: str) -> tuple[Plan, Account]:
    """Check and count the effect of `plan`, whose files have the format `format`, on the tensors of `promise`.

    Returns:
        The plan, with checks of the bytes that lose their checksums, and the account.

    Raises:
        WouldLoseData: the planned file cannot be read back.
    """
    source = promise.edited
    broken = () if source is None else damaged(source)
    if source is not None and not promise.puts and not promise.made and keeps_all(source, plan):
        tensors, nbytes = size_of(source)
        return plan, Account(tensors, nbytes, tensors, nbytes, damaged=broken)
    if promise.chosen is not None and keeps_all(promise.chosen, plan, promise.reported):
        everyone = [*promise.kept, *promise.others]
        written = len(promise.kept)
        return plan, Account(len(everyone), bytes_of(everyone), written, bytes_of(promise.kept))
    if source is not None:
        whole = everything(source, promise.reported)
        promise = replace(
            promise,
            kept=whole.kept,
            others=whole.others,
            storages=whole.storages,
            source=whole.source,
        )
    if not promise.made and is_copy(plan, promise):
        entries = [*promise.kept, *promise.others]
        nbytes = bytes_of(entries)
        return plan, Account(len(entries), nbytes, len(entries), nbytes, damaged=broken)
    out = PlannedOutput(plan, format, promise.same)
    lost: list[str] = []
    taken: dict[int, bool] = {}
    for entry in promise.kept:
        made = promise.made.get(entry.name)
        if made is not None:
            for one in made:
                if id(one) not in taken:
                    taken[id(one)] = out.take(one, promise)
            whole_of = entry.name in promise.partly or covered_by(entry, made)
            if not whole_of or not all(taken[id(one)] for one in made):
                lost.append(entry.name)
            continue
        put = promise.puts.get(entry.name)
        parts = list(leaves(put or entry))
        missing = sum(not out.take(part, promise) for part in parts)
        if missing or (promise.names_stay and not put and any(out.has_other(part) for part in parts)):
            lost.append(entry.name)
    covered = {storage.identity for storage in storages_of(promise.kept)}
    others = (storage for storage in promise.storages if storage.identity not in covered)
    gone = {storage.identity: storage for storage in others if not out.holds(storage)}
    if gone and promise.source is not None:
        in_object = {storage.identity for storage in referred(promise.source, in_object=True)}
        gone = {identity: storage for identity, storage in gone.items() if identity in in_object}
    unlisted = tuple(f"storage {storage.key}" for storage in gone.values())
    left = [
        entry.name
        for entry in promise.others
        if not is_inside_any(entry.name, promise.reported) and not all(out.has(part) for part in leaves(entry))
    ]
    everyone = [*promise.kept, *promise.others]
    account = Account(
        tensors=len(everyone),
        nbytes=bytes_of(everyone),
        written=len(out.entries),
        nbytes_written=bytes_of(out.entries),
        left=tuple(left),
        lost=tuple(dict.fromkeys((*lost, *unlisted))),
        unlisted=unlisted,
        excused=bool(promise.reported),
        damaged=broken,
    )
    return replace(plan, checks=(*plan.checks, *out.unchecked(promise))), account


def is_copy(plan: Plan, promise: Promise) -> bool:
    """Return whether every file of the plan is one copied range, and these hold all bytes of the kept tensors."""
    copied: dict[str, ByteRange] = {}
    for file in plan.files:
        whole = file.segments[0] if len(file.segments) == 1 else None
        if not isinstance(whole, ByteRange):
            return False
        copied[whole.path] = whole
    for entry in promise.kept:
        for storage in storages_of([entry]):
            for span in read_from(storage.data) if storage.data is not None else ():
                whole = copied.get(span.path)
                if whole is None or span.offset < whole.offset or span.end > whole.end:
                    return False
    return True
