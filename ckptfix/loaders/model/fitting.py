"""Fitting a state dict of a file to a model: which one, under which keys, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from functools import cache
from typing import TYPE_CHECKING

from ckptfix.align.result import Skipped
from ckptfix.checkpoint import ByteRange, Checkpoint, TensorEntry, dtypes, same_place
from ckptfix.checkpoint.address import join
from ckptfix.commands import command
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, Refused
from ckptfix.formats.torch.tensors import KINDS
from ckptfix.io.checksums import digest
from ckptfix.io.read import read_blocks
from ckptfix.loaders.model.places import Target, dtype_of, is_lazy, shape_of
from ckptfix.loaders.model.report import Mismatch
from ckptfix.loaders.sources import EXTRA_STATE, StateSource
from ckptfix.loaders.tensors import TensorMaker
from ckptfix.names import adapters, bases, no_weights, wrappers
from ckptfix.names.slots import Slot
from ckptfix.ops import choose
from ckptfix.ops.quantized import quantization_of

if TYPE_CHECKING:
    import torch

    from ckptfix.align.fused import Heads
    from ckptfix.align.result import Matching
    from ckptfix.ops.match.fused import Operations

    Again = Callable[[Heads], tuple[Matching, Operations]]
    """Match again with numbers of heads."""

    Prove = Callable[[Matching, Operations, Sequence[Slot], Again | None], tuple[Matching, Operations]]
    """Return what is proved of a matching of the slots of a file, or raise an error."""


ADAPTER = "adapter name"
"""The rule for an adapter's file and a model of PEFT, whose keys have the adapter's name in them."""


@dataclass(slots=True)
class Fit:
    """A state dict of the file under the keys of the model.

    Attributes:
        names: key in the file -> its key in the model, whether or not the model has it.
        pairs: key of the model -> key in the file, for everything that can be loaded.
        tied: key of the model -> the key in `pairs` of the same parameter.
        notes: further remarks of the matcher.
        rivals: other rules under which equally many keys match, but different ones.
    """

    source: StateSource
    target: Target
    rule: str
    names: Mapping[str, str]
    pairs: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[Mismatch] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    rivals: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)

    def entry(self, name: str) -> TensorEntry:
        """Return the tensor of the file for the model's key `name`."""
        return self.source.entries[self.pairs[name]]


def best_fit(
    checkpoint: Checkpoint,
    found: Sequence[StateSource],
    target: Target,
    how: str | bool,
    *,
    assign: bool,
    strict: bool = False,
    prove: Prove | None = None,
) -> Fit:
    """Return the fit of the state dict that fits `target` better than any other.

    Args:
        strict: only a complete fit counts; if ``"auto"`` finds none by keys, a complete alignment by structure does.
        how: ``"auto"``, ``"position"`` or ``"structure"``.
        prove: returns the matching and the operations that are proved, given those that are found.

    Raises:
        Refused: two state dicts fit equally well, or `how` is not a way to match.
    """
    if how not in _WAYS or not isinstance(how, str):
        raise Refused(f"match={how!r} is unknown", hint=f"use one of {', '.join(_WAYS)}")
    if how != "auto":
        return _matched(checkpoint, _meant(checkpoint, found, fit=False), target, how, assign, prove)
    fits = [by_names(source, target, assign=assign) for source in found]
    score = {id(fit): (fit.complete, len(fit.pairs)) for fit in fits}
    top = max(score.values())
    best = [fit for fit in fits if score[id(fit)] == top]
    source = _meant(checkpoint, [fit.source for fit in best], fit=True)
    named = next(fit for fit in best if fit.source is source)
    if named.complete or not strict or named.rivals:
        return named
    with suppress(CkptfixError):
        aligned = _matched(checkpoint, source, target, "structure", assign)
        if aligned.complete:
            return aligned
    return named


_WAYS = ("auto", "position", "structure")


def _meant(checkpoint: Checkpoint, found: Sequence[StateSource], *, fit: bool) -> StateSource:
    """Return the state dict that is meant, judging by the file alone.

    Raises:
        Undecided: several are possible.
    """
    rows = choose.meant(checkpoint, [source.row for source in found])
    if len(rows) > 1:
        raise choose.undecided(checkpoint, rows, fit=fit)
    return next(source for source in found if source.row is rows[0])


def by_names(source: StateSource, target: Target, *, assign: bool = False) -> Fit:
    """Match by exact keys, wrapper prefixes or a base prefix: the first that agrees completely, or the best."""
    aliases = target.aliases
    groups = _groups(aliases)
    wanted = set(target.names)
    adapter = adapters.in_model(source.names, target.names)
    if adapter is not None:
        fit = Fit(source, target, ADAPTER, adapter.names)
        fit.skipped += [Skipped(name, "part of the base model") for name in sorted(adapter.base)]
        found = {new: old for old, new in adapter.names.items() if new in wanted}
        over = [old for old, new in adapter.names.items() if new not in wanted]
        _settle(fit, found, over, assign, adapter.base)
        return fit

    def complete(names: Mapping[str, str]) -> bool:
        here = set(names.values()) & wanted
        lacking = [name for name in target.names if name not in here and not _has_alias(name, aliases, groups, here)]
        over = [old for old, new in names.items() if new not in wanted]
        return None not in (*(_rule(target, name) for name in lacking), *(_source_rule(source, name) for name in over))

    loose = [name for name, entry in source.entries.items() if not entry.shape]
    renaming = bases.find(source.names, target.names, complete, loose=[*loose, *source.extra])
    fit = Fit(source, target, renaming.rule, renaming.names, rivals=renaming.rivals)
    found = {new: old for old, new in renaming.names.items() if new in wanted}
    over = [old for old, new in renaming.names.items() if new not in wanted]
    _settle(fit, found, over, assign)
    return fit


def _matched(
    checkpoint: Checkpoint, source: StateSource, target: Target, how: str, assign: bool, prove: Prove | None = None
) -> Fit:
    """Match by position or structure. Ambiguous pairs are not loaded."""
    # Most files match by keys, and load faster without these imports.
    from ckptfix.align.fused import Heads
    from ckptfix.align.match import match
    from ckptfix.ops.match.fused import Operations, with_operations

    operations = Operations()
    try:
        plain = match(source.slots(), target.slots(), by=how)
        matching = plain

        def with_heads(heads: Heads) -> tuple[Matching, Operations]:
            return with_operations(plain, source.slots(), target.slots(), heads, {})

        if how == "structure":
            matching, operations = with_heads(Heads())
        if prove is not None:
            again = with_heads if how == "structure" else None
            matching, operations = prove(matching, operations, source.slots(), again)
    except CkptfixError as error:
        error.path = error.path or checkpoint.path
        if how == "position":
            error.hint = "match='structure' also uses the keys and the neighboring layers"
        raise
    if operations.refused:
        question = operations.questions[-1]
        line = command("match", checkpoint.path, "OUT", like="TARGET", heads="N")
        proof = "verify_against=, the model that the file was saved from, finds out and proves the order"
        hint = f"{line} writes a file that fits" if "--heads" in question else proof
        raise Refused(question, path=checkpoint.path, hint=hint)
    sure = {pair.source: pair.target for pair in matching.pairs if not (pair.instead or pair.operation)}
    if operations.taken:
        source = _transformed(checkpoint, source, operations)
        sure |= {name: name for one in operations.taken for name in one.new}
    extra = {name: name for name in source.extra if name in target.extra}
    fit = Fit(source, target, how, {**sure, **extra}, notes=matching.notes)
    for pair in matching.ambiguous:
        instead = " or ".join((pair.target, *pair.instead))
        why = f"{pair.source} could equally be {instead}"
        fit.mismatched.append(Mismatch(pair.target, pair.source, None, None, why))
    passed = {skip.name for skip in (*matching.skipped_source, *matching.skipped_target)}
    fit.skipped += [*matching.skipped_source, *matching.skipped_target]
    doubtful = {pair.source for pair in matching.ambiguous} | {pair.target for pair in matching.ambiguous}
    found = {new: old for old, new in fit.names.items()}
    over = [name for name in source.names if name not in fit.names and name not in doubtful | passed]
    _settle(fit, found, over, assign, passed | doubtful)
    return fit


def _transformed(checkpoint: Checkpoint, source: StateSource, operations: Operations) -> StateSource:
    """Return `source` with fused or split tensors of the model in place of the tensors they are made of."""
    from ckptfix.ops.match.fused import rules
    from ckptfix.ops.rename.transform import TransformedTensors

    site = checkpoint.names_at(source.at)
    assert site is not None
    made = TransformedTensors(rules(operations.taken, (), list(source.entries)))
    made.add(checkpoint, replace(site, names=tuple(source.entries)), {name: name for name in source.entries})
    entries: dict[str, TensorEntry] = {}
    for old, (new, entry) in made.sites[0].after():
        entries[new] = source.entries[old] if entry is None else entry
    from_names = {
        new: join(source.at, one.old[0]) for one in operations.taken for new in one.new if one.old
    }
    return replace(source, entries=entries, made=from_names)


def _settle(
    fit: Fit, found: Mapping[str, str], over: Sequence[str], assign: bool, passed: Collection[str] = ()
) -> None:
    """Sort the keys of both sides into those that can be loaded and those that cannot.

    Args:
        found: key of the model -> key in the file.
        over: keys of the file that the model does not have.
        passed: keys that have been reported already.
    """
    source, target = fit.source, fit.target
    for name in target.names:
        old = found.get(name)
        if old is None:
            continue
        wrong = _misfit(source, target, name, old, assign)
        if wrong is None:
            fit.pairs[name] = old
        else:
            fit.mismatched.append(wrong)
    aliases = target.aliases
    groups = _groups(aliases)
    for name in target.names:
        if name in found or name in passed:
            continue
        lead = _has_alias(name, aliases, groups, found)
        rule = _rule(target, name)
        if lead is not None:
            fit.tied[name] = lead
        elif rule is not None:
            fit.skipped.append(Skipped(name, rule))
        else:
            fit.missing.append(name)
    for old in over:
        rule = _source_rule(source, old)
        if rule is not None:
            fit.skipped.append(Skipped(old, rule))
        else:
            fit.unexpected.append(old)


def _groups(aliases: Mapping[str, str]) -> dict[str, list[str]]:
    """Return first key of a tied tensor -> all its keys."""
    groups: dict[str, list[str]] = {}
    for name, first in aliases.items():
        groups.setdefault(first, [first]).append(name)
    return groups


def _has_alias(
    name: str, aliases: Mapping[str, str], groups: Mapping[str, list[str]], here: Mapping[str, str] | set[str]
) -> str | None:
    """Return another key of the same tensor that is in `here`."""
    group = groups.get(aliases.get(name, name), ())
    return next((other for other in group if other != name and other in here), None)


def _rule(target: Target, name: str) -> str | None:
    """Return the rule that allows `name` to be absent from the file."""
    tensor = target.tensors.get(name)
    if tensor is None:
        return None
    return _optional(Slot(name, shape_of(tensor) or (), dtype_of(tensor)))


def _source_rule(source: StateSource, name: str) -> str | None:
    """Return the rule that allows `name` to be absent from the model."""
    entry = source.entries.get(name)
    if name in wrappers.COUNTERS and wrappers.is_average(source.names):
        return "a wrapper's own"
    if entry is None:
        # The data of a module may be an object, such as the BytesIO of Transformer Engine, without shape and dtype.
        return _optional(Slot(name, (), "")) if name.rpartition(".")[2] == EXTRA_STATE else None
    return _optional(Slot(name, entry.shape, entry.dtype))


def _optional(slot: Slot) -> str | None:
    family = no_weights.optional(slot)
    if family is not None:
        return family.id
    return "a wrapper's own" if slot.name in wrappers.COMPANIONS else None


def _misfit(source: StateSource, target: Target, name: str, old: str, assign: bool) -> Mismatch | None:
    """Return the reason why the file's `old` cannot become the model's `name`; None if it can."""
    entry, tensor = source.entries.get(old), target.tensors.get(name)
    if entry is None or tensor is None:
        if (tensor is None) != (name in target.extra) or (entry is not None and tensor is not None):
            return Mismatch(name, old, None, None, "only one side has a tensor there")
        if tensor is not None:
            return Mismatch(name, old, None, None, "the file has no tensor there")
        return None
    shape = shape_of(tensor)
    # torch up to 0.3 had no 0-d tensors, so a file may have shape (1,) instead.
    fits = shape is None or entry.shape == shape or (shape == () and entry.shape == (1,))
    if shape is not None and not fits and name not in target.reshaped:
        return Mismatch(name, old, shape, entry.shape, shapes_differ(entry.shape, shape))
    reason = _wrong_kind(entry, tensor, assign)
    return None if reason is None else Mismatch(name, old, shape, entry.shape, reason)


def shapes_differ(found: tuple[int, ...], expected: tuple[int, ...]) -> str:
    return f"{list(found)} in the file, {list(expected)} in the model"


def _wrong_kind(entry: TensorEntry, tensor: object, assign: bool) -> str | None:
    from torch import Tensor

    assert isinstance(tensor, Tensor)
    kind = KINDS[entry.kind]
    if kind.load is None:
        return f"a {entry.kind} tensor ({entry.detail}), which only its own library can rebuild"
    if assign:
        return _without_gradients(entry, tensor)
    if any(step == 0 and size > 1 for size, step in _steps(tensor)):
        return "expanded in the model: several of its elements share memory"
    if entry.dtype.startswith("complex") and not tensor.is_complex():
        return f"complex in the file, {dtype_of(tensor)} in the model"
    if is_lazy(tensor):
        return None if entry.kind == "dense" else f"{entry.kind} in the file, a parameter without a shape in the model"
    if tensor._is_zerotensor():
        return "a tensor of zeros without memory in the model"
    if (why := kind.misfit(entry, tensor)) is not None:
        return why
    dtype = dtype_of(tensor)
    if entry.kind == "dense" and not tensor.is_quantized and not _casts(entry.dtype, dtype, tensor.device.type):
        return f"{entry.dtype} in the file, {dtype} in the model: torch does not copy one to the other"
    return None


def _without_gradients(entry: TensorEntry, tensor: torch.Tensor) -> str | None:
    """Return why a tensor of the file cannot be assigned: a parameter requires gradients, and it can have none."""
    import torch

    dtype = getattr(torch, entry.dtype, None)
    if not tensor.requires_grad or dtype is None or dtype.is_floating_point or dtype.is_complex:
        return None
    return f"{entry.dtype} in the file, a parameter that requires gradients in the model"


@cache
def _casts(source: str, target: str, device: str) -> bool:
    """Return whether torch copies numbers of the dtype `source` into a tensor of the dtype `target`."""
    import torch

    if source == target or not hasattr(torch, source):
        return True
    try:
        one, other = (torch.empty(1, dtype=getattr(torch, dtype), device=device) for dtype in (source, target))
        other.copy_(one)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _steps(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield (size, stride) for each dimension of a strided tensor."""
    import torch

    if tensor.layout == torch.strided and not is_lazy(tensor):
        yield from zip(tensor.shape, tensor.stride(), strict=True)


def refuse_codes(checkpoint: Checkpoint, fit: Fit) -> bool:
    """Mark codes of quantized weights mismatched if the parameter has a different dtype; return whether any are."""
    roles = quantization_of(checkpoint).roles
    codes = {name: row for name, (role, row) in roles.items() if role == "codes"}
    if not codes:
        return False
    found = False
    for name, old in list(fit.pairs.items()):
        entry, tensor = fit.source.entries.get(old), fit.target.tensors.get(name)
        row = codes.get(fit.source.made.get(old, "") or (entry.name if entry is not None else ""))
        if entry is None or tensor is None or row is None or dtype_of(tensor) == entry.dtype:
            continue
        why = f"codes of a quantized weight ({row.label}), {entry.dtype} in the file, {dtype_of(tensor)} in the model"
        fit.mismatched.append(Mismatch(name, old, shape_of(tensor), entry.shape, why))
        del fit.pairs[name]
        found = True
    return found


def refuse_two_values(fit: Fit, maker: TensorMaker) -> None:
    """Mark keys mismatched that the model ties but that have different values in the file."""
    for first, group in _groups(fit.target.aliases).items():
        having = [name for name in group if name in fit.pairs]
        if len(having) < 2:
            continue
        lead = fit.entry(having[0])
        for name in having[1:]:
            entry = fit.entry(name)
            place = same_place(entry)
            if (place is not None and place == same_place(lead)) or _equal(maker, lead, entry):
                continue
            why = f"tied to {first} in the model, but {fit.pairs[having[0]]} and {fit.pairs[name]} differ in the file"
            fit.mismatched.append(Mismatch(name, fit.pairs[name], lead.shape, entry.shape, why))
            for both in having:
                fit.pairs.pop(both, None)
            break
        else:
            for name in having[1:]:
                fit.tied[name] = having[0]


def _equal(maker: TensorMaker, one: TensorEntry, other: TensorEntry) -> bool:
    """Return whether two tensors of the file have the same values; NaN equals NaN here."""
    import torch

    maker.check((one, other))
    if one.dtype == other.dtype and one.shape == other.shape:
        mine, its = _bytes_of(one), _bytes_of(other)
        if mine is not None and its is not None and digest(read_blocks(mine)) == digest(read_blocks(its)):
            return True  # without memory for either
    a, b = maker.once(one).detach(), maker.once(other).detach()
    equal = a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    maker.forget()
    return bool(equal)


def _bytes_of(entry: TensorEntry) -> ByteRange | None:
    """Return where the bytes of a plain tensor are in the file, in row-major order."""
    storage, row = entry.storage, dtypes.by_name(entry.dtype)
    if storage is None or not isinstance(storage.data, ByteRange) or entry.kind != "dense":
        return None
    if entry.lazy or not entry.is_contiguous:
        return None
    return storage.data.sub(row.nbytes(entry.offset), row.nbytes(entry.numel))
