"""``ckptfix.slim``: a smaller checkpoint with the same tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import partial
from typing import Any, TypeGuard

from ckptfix.arguments import checks_types
from ckptfix.checkpoint import Checkpoint, Data, Plan, storages_of
from ckptfix.checkpoint.address import join
from ckptfix.checkpoint.tree import Item, ListValue, MapValue, ObjectValue, Value, identity, pairs_of
from ckptfix.commands import command
from ckptfix.dataclass import dataclass
from ckptfix.errors import BadPickle, Refused, StrPath, Unsupported
from ckptfix.formats import detect, format_of
from ckptfix.formats.base import ByFile, Format, file_by_file
from ckptfix.formats.torch.common import maybe_pickled_object, pickled_object
from ckptfix.formats.torch.packed import PackedStorage, find_used, plan_with, units_of
from ckptfix.formats.torch.tensors import BadTensor
from ckptfix.io.checksums import digest
from ckptfix.io.read import Progress, read_blocks
from ckptfix.names import kinds
from ckptfix.ops.any_source import edits, takes_any_source
from ckptfix.ops.audit.promise import everything
from ckptfix.ops.choose import refuse_damaged
from ckptfix.ops.inplace import grown
from ckptfix.ops.writing import Draft, Result, WriteOptions, carry_out, copy_of, is_folder
from ckptfix.words import plural

UNUSED, OPTIMIZER, DUPLICATES, CONTAINER = "unused storage", "optimizer", "duplicates", "container"


@dataclass(frozen=True, slots=True)
class Slimmed:
    """The plan of slimming.

    Attributes:
        plan: files to write.
        saved: reason -> bytes of tensor data; ``"container"`` is the rest of the difference in size.
        dropped: addresses of optimizers that are left out.
        compacted: number of storages that are cut.
        tied: number of storages that are replaced by equal ones.
        identical: whether there is nothing to do, so that the output is a copy.
        same: pairs of (bytes, equal bytes that replace them).
    """

    plan: Plan
    saved: Mapping[str, int] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    compacted: int = 0
    tied: int = 0
    identical: bool = False
    same: tuple[tuple[Data, Data], ...] = ()


def plan_slim(
    checkpoint: Checkpoint,
    dest: str,
    *,
    no_optimizer: bool = False,
    dedupe: bool = False,
    contiguous: bool = False,
) -> Slimmed:
    """Plan `dest` as `checkpoint` without unused bytes.

    Args:
        no_optimizer: leave out the state of every optimizer: mappings with ``state`` and ``param_groups``.
        dedupe: merge storages with equal bytes into one. This ties their tensors.
        contiguous: write a strided view with gaps, such as a column, without them, with a new stride.

    Raises:
        Refused: the file holds only an optimizer's state.
        Unsupported: `dedupe` is not possible in a safetensors file.
        DamagedFile, WouldLoseData: the file lacks data that its header or pickle promises.
    """
    refuse_damaged(checkpoint, listed=False)
    format = format_of(checkpoint)
    if format.edits_each_file is not None:
        options = partial(plan_slim, no_optimizer=no_optimizer, dedupe=dedupe, contiguous=contiguous)
        return _slim_files(checkpoint, format.edits_each_file, options, dest)
    if format.plan_packed is not None:
        if dedupe:
            message = f"in a {format.name} file every tensor has its own bytes"
            hint = "convert it to zip and slim that; or convert it to safetensors, which records ties as metadata"
            raise Unsupported(message, path=checkpoint.path, hint=hint)
        plan, saved = format.plan_packed(checkpoint, dest)
        return Slimmed(plan, _sums(checkpoint, plan, {UNUSED: saved}), compacted=bool(saved), identical=not saved)
    if maybe_pickled_object(checkpoint) is None:
        raise Unsupported(f"slim does not write {format.title}", path=checkpoint.path, hint=_CONVERT)
    try:
        return _slim_torch(checkpoint, dest, no_optimizer, dedupe, contiguous)
    except BadTensor as error:
        raise BadPickle(str(error), path=checkpoint.path) from None
    except Unsupported as error:
        error.path = error.path or checkpoint.path
        error.hint = error.hint or f"run `{command('extract', checkpoint.path, 'OUT')}` to get its weights"
        raise


def _slim_files(
    checkpoint: Checkpoint,
    by_file: ByFile,
    slimmed: Callable[[Checkpoint, str], Slimmed],
    dest: str,
) -> Slimmed:
    """Process each file of a folder separately."""
    plan, done = file_by_file(by_file, checkpoint, slimmed, dest)
    saved: Counter[str] = Counter()
    for made in done:
        saved.update(made.saved)
    return Slimmed(
        plan,
        {reason: nbytes for reason, nbytes in saved.items() if nbytes},
        tuple(dict.fromkeys(address for made in done for address in made.dropped)),
        sum(made.compacted for made in done),
        sum(made.tied for made in done),
        all(made.identical for made in done),
        tuple(pair for made in done for pair in made.same),
    )


_CONVERT = "convert it, and slim the result"


def _slim_torch(checkpoint: Checkpoint, dest: str, no_optimizer: bool, dedupe: bool, contiguous: bool) -> Slimmed:
    parts = pickled_object(checkpoint)
    root = checkpoint.tree.root
    legacy = format_of(checkpoint).one_stream
    gone, dropped = _optimizers(root) if no_optimizer else ({}, ())
    if identity(root) in gone:
        hint = "leave out --no-optimizer to keep it"
        raise Refused("it holds only an optimizer's state", path=checkpoint.path, hint=hint)
    before = find_used(checkpoint)
    used = find_used(checkpoint, gone) if gone else before
    keys = {*before, *parts.storage_keys()}

    def new_key() -> str:
        number = len(keys)
        while str(number) in keys:
            number += 1
        keys.add(str(number))
        return str(number)

    units: list[PackedStorage] = []
    compacted = 0
    # A storage without a listed tensor, such as a part of one that cannot be read, is kept whole.
    listed = {storage.key for storage in storages_of(checkpoint.entries)}
    for storage in used.values():
        storage.whole |= storage.key not in listed
        made = units_of(storage, new_key, contiguous=contiguous)
        compacted += made[0].data is not storage.data
        units += made
    same = _equal(units) if dedupe else {}
    lengths = {unit.key: unit.data.length for unit in units}
    saved = {
        UNUSED: sum(storage.data.length for storage in used.values()) - sum(lengths.values()),
        OPTIMIZER: sum(storage.data.length for key, storage in before.items() if key not in used),
        DUPLICATES: sum(lengths[key] for key in same),
    }
    if not gone and not compacted and not same and not format_of(checkpoint).folder and not grown(checkpoint):
        return Slimmed(copy_of(checkpoint, dest), identical=True)
    plan = plan_with(checkpoint, dest, units, same, gone, legacy=legacy)
    places = {unit.key: unit.data for unit in units}
    equal = tuple((places[key], places[other]) for key, other in same.items())
    return Slimmed(plan, _sums(checkpoint, plan, saved), dropped, compacted, len(same), same=equal)


def _sums(checkpoint: Checkpoint, plan: Plan, saved: Mapping[str, int]) -> dict[str, int]:
    """Return `saved` without zeros, and with the rest of the difference in size."""
    rest = checkpoint.size - plan.nbytes - sum(saved.values())
    return {reason: nbytes for reason, nbytes in {**saved, CONTAINER: rest}.items() if nbytes}


def _optimizers(root: Item) -> tuple[dict[int, Item], tuple[str, ...]]:
    """Find optimizer states, lists of only these, and an optimizer's tensors among those of a model.

    Return the items by identity, and their addresses.
    """
    gone: dict[int, Item] = {}
    dropped: list[str] = []
    seen: set[int] = set()
    stack = [("", root)]
    while stack:
        address, item = stack.pop()
        if not _holds_values(item) or item.identity in seen:
            continue
        seen.add(item.identity)
        several = isinstance(item, ListValue) and item.count and all(map(_is_optimizer, item))
        if several or _is_optimizer(item):
            gone[item.identity] = item
            dropped.append(address)
            continue
        # A class may not rebuild its object if a part of what it reads is missing.
        own = item.payload if isinstance(item, ObjectValue) else frozenset()
        rows = list(item.children())
        below = [(join(address, name), child) for name, child in rows if identity(child) not in own]
        mixed = kinds.optimizer_names(name for name, _ in rows) if pairs_of(item) is not None else frozenset()
        if mixed:
            gone |= {identity(child): child for name, child in rows if name in mixed}
            dropped += [join(address, name) for name, _ in rows if name in mixed]
            below = [(where, child) for where, child in below if identity(child) not in gone]
        stack += [(where[:1024], child) for where, child in reversed(below)]
    return gone, tuple(dropped)


def _holds_values(item: Item) -> TypeGuard[Value]:
    """Return whether an item may hold an optimizer: a dict, a list, a tuple or an object."""
    return isinstance(item, MapValue | ObjectValue) or _is_sequence(item)


def _is_sequence(item: Item) -> TypeGuard[ListValue]:
    return isinstance(item, ListValue) and item.kind in ("list", "tuple")


def _is_optimizer(item: Item) -> bool:
    """Return whether an item is the result of ``Optimizer.state_dict()``, flattened or not, or a pickled optimizer."""
    rows = pairs_of(item)
    if rows is not None and kinds.is_flat_optimizer([str(key) for key, _ in rows if isinstance(key, str)]):
        return True
    if rows is None and isinstance(item, ObjectValue):
        rows = item.attributes
    found = {str(key): value for key, value in rows or () if isinstance(key, str)}
    return pairs_of(found.get("state")) is not None and _is_sequence(found.get("param_groups"))


def _equal(units: list[PackedStorage]) -> dict[str, str]:
    """Map the key of a unit to that of an earlier unit with the same kind, device and bytes."""
    alike: dict[tuple[str, str, int], list[PackedStorage]] = {}
    for unit in units:
        if unit.data.length:
            kind = (unit.used.kind.full, unit.used.location, unit.data.length)
            alike.setdefault(kind, []).append(unit)
    same: dict[str, str] = {}
    for group in alike.values():
        if len(group) < 2:
            continue
        first: dict[bytes, str] = {}
        for unit in group:
            key = first.setdefault(digest(read_blocks(unit.data)), unit.key)
            if key != unit.key:
                same[unit.key] = key
    return same


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SlimResult(Result):
    """The result of slimming.

    Attributes:
        saved: reason -> bytes: ``"unused storage"``, ``"optimizer"``, ``"duplicates"``, and ``"container"`` for the
            rest of the difference in size, which may be negative.
        dropped: addresses of the optimizers that were left out.
        compacted: number of storages that were cut to their used bytes.
        tied: number of storages that were replaced by equal ones.
    """

    saved: Mapping[str, int] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    compacted: int = 0
    tied: int = 0

    def _details(self) -> dict[str, Any]:
        return {
            "saved": dict(self.saved),
            "left_behind": list(self.dropped),
            "compacted": self.compacted,
            "tied": self.tied,
        }


def _takes(format: Format, target: Format) -> bool:
    """Return whether slimming itself makes a `target` of `format`: a folder of one object becomes a torch file."""
    own = format.folder and format.edits_each_file is None and "objects" in format.states & target.states
    return own or edits(format, target)


@checks_types
@takes_any_source(takes=_takes)
def slim(
    source: StrPath,
    dest: StrPath,
    *,
    no_optimizer: bool = False,
    dedupe: bool = False,
    contiguous: bool = False,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> SlimResult:
    """Write `source` to `dest` without bytes that no tensor uses; a folder of many files becomes one.

    Args:
        no_optimizer: leave out the state of every optimizer.
        dedupe: merge storages with equal bytes into one, which ties their tensors.
        contiguous: write a strided view with gaps, such as a column, without them: its stride changes.
        force, keep_old, dry_run, progress: as in `strip_module`.

    Raises:
        Refused: nothing would be left.
        Unsupported, WouldOverwrite, WouldLoseData, DamagedFile, UnknownFormat, WriteFailed.
    """

    # A folder whose files are not slimmed separately becomes one file.
    folder = is_folder(source) and detect(source).edits_each_file is None

    def make(checkpoint: Checkpoint, dest: str) -> Draft[SlimResult]:
        done = plan_slim(checkpoint, dest, no_optimizer=no_optimizer, dedupe=dedupe, contiguous=contiguous)
        saved = partial(SlimResult, saved=done.saved, dropped=done.dropped, compacted=done.compacted, tied=done.tied)
        return Draft(
            result=saved,
            format="zip" if folder else checkpoint.format,
            plan=done.plan,
            promise=replace(everything(checkpoint, done.dropped), same=done.same),
            lines=_slimmed_lines(done, checkpoint.size, no_optimizer),
        )

    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, progress=progress)
    return carry_out(source, dest, make, how, converts=folder, folder=False if folder else None)


_NO_OPTIMIZER = "no optimizer was found in it, so none is left out (an optimizer is a dict with state and param_groups)"


def _slimmed_lines(done: Slimmed, size: int, no_optimizer: bool) -> tuple[str, ...]:
    without = (_NO_OPTIMIZER,) if no_optimizer and not done.dropped else ()
    if done.identical:
        return ("nothing to do: the tensors use all bytes; the output is an identical copy", *without)
    notes = {
        UNUSED: f" in {plural(done.compacted, 'storage')}",
        OPTIMIZER: f" ({', '.join(done.dropped[:8])}{' ...' if len(done.dropped) > 8 else ''})",
        DUPLICATES: f" in {plural(done.tied, 'storage')}, whose tensors are now tied",
    }
    lines = [
        f"{reason}: {abs(nbytes):,} bytes {'saved' if nbytes > 0 else 'more'}{notes.get(reason, '')}"
        for reason, nbytes in done.saved.items()
    ]
    if done.dropped and OPTIMIZER not in done.saved:
        lines.append(f"left out: {', '.join(done.dropped[:8])}")
    return (*lines, *without, f"{size:,} bytes become {done.plan.nbytes:,}")
