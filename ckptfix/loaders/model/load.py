"""Loading a checkpoint into a model; either side may be wrapped."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal

from ckptfix.checkpoint import Checkpoint, Storage, TensorEntry, address, same_place
from ckptfix.errors import LoadMismatch, Refused
from ckptfix.extras import need_torch
from ckptfix.io.threads import batches
from ckptfix.loaders.model import direct_read, so_far, torch_way
from ckptfix.loaders.model.fitting import Fit, best_fit, refuse_codes, refuse_two_values
from ckptfix.loaders.model.overflow import out_of_range
from ckptfix.loaders.model.overlaps import refuse_other_values
from ckptfix.loaders.model.places import ModuleSlot, dtype_of, identity, is_lazy, put_back, target
from ckptfix.loaders.model.report import LoadReport, Mismatch, named, nearest_names
from ckptfix.loaders.objects import Builder
from ckptfix.loaders.open_for_loading import opened, opens_once, refuse_swapped_arguments
from ckptfix.loaders.reading import Fill, Progress
from ckptfix.loaders.sources import StateSource, chosen
from ckptfix.loaders.tensors import TensorMaker, caller, restore_location, unmoved
from ckptfix.loaders.values import ForeignObject
from ckptfix.ops.choose import refuse_damaged
from ckptfix.ops.rank_shards import lone_shard, refuse_piece
from ckptfix.words import plural, some

if TYPE_CHECKING:
    import torch

    from ckptfix.align.fused import Heads
    from ckptfix.align.result import Matching
    from ckptfix.loaders.tensors import MapLocation
    from ckptfix.names.slots import Slot
    from ckptfix.ops.match.fused import Operations


@opens_once
def load_into(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    map_location: MapLocation = None,
    match: Literal["auto", "position", "structure"] | bool = "auto",
    at: str | None = None,
    strict: bool = True,
    assign: bool = False,
    mmap: bool = False,
    verify: bool = True,
    allow_empty: bool = False,
    verify_against: torch.nn.Module | None = None,
) -> LoadReport:
    """Load the checkpoint at `path` into `model`, and report what was done.

    Either side may be wrapped: DataParallel, DistributedDataParallel, FSDP, torch.compile, checkpoint wrapper,
    AveragedModel, and stacks of them. Parameters and buffers keep their device and dtype. Values are read straight
    into them, or converted tensor by tensor, in constant memory. A warning counts the values that leave the range of
    the model's dtype. Keys that the model ties count as one.

    Modules that load in their own way (hooks, an overridden ``_load_from_state_dict``, extra state) still do so. Such
    hooks, before and after a load, run twice: first on a copy of the module without data, to find out whether
    everything fits before anything is changed.

    Args:
        map_location: device for assigned tensors, as for torch.load. Copies go straight to the parameter's device, so
            only a callable is used for them.
        match: ``"auto"``, or True: exact keys, else without wrapper prefixes on either side, else with a base prefix
            (``model.``, ``backbone.``, ...) removed or added. If `strict` and these do not fit, an alignment by
            structure that is complete and unique is used, with a warning; not for modules that load in their own way,
            because their hooks may rename keys. ``"position"``: in definition order, with
            shapes checked. ``"structure"``: by an alignment of keys and shapes, with fused tensors split or joined as
            `ckptfix.match` does.
        at: address of the state dict; ``""`` is the top level. By default, the state dict that fits best.
        strict: raise unless everything fits, before anything is changed; False loads what fits. A tensor of a
            different shape is never loaded, not even in part.
        assign: replace the model's tensors with those of the file, including their dtype but not requires_grad. On an
            error the model keeps its own tensors.
        mmap: with `assign`, map the file for the tensors, as for `load_state_dict`.
        verify: compare the data with the checksums that a zip stores for it (legacy files and safetensors store
            none). All data is checked before a parameter is changed, and each tensor again as it is copied. The pickle
            is always checked.
        allow_empty: with ``strict=False``, accept a file even if nothing of it fits. There is a warning if less than
            half of the keys of both sides fit.
        verify_against: with ``match="structure"`` or ``"position"``, the model that the file was saved from. Copies of
            both models are run with the same random weights on an input that their first layer shows, and only a
            matching with equal outputs is used; this settles keys that are ambiguous.

    Raises:
        LoadMismatch: model and file disagree and `strict` is True, or nothing of the file fits, or codes of a quantized
            weight would become a parameter of a different dtype. Its `report` has the details; nothing was changed. Or
            torch or the model's own code raised an error while the model was changed; there is no `report`, and the
            message says what the model had received. An interrupt stays one, with a note that says so.
        Refused: several state dicts fit equally well or, with ``strict=False``, several base prefixes do. Or the model
            is on the meta device and `assign` is False, or it was made in inference mode, or is not a torch.nn.Module.
            Or the file has no state dict.
        NoSuchTensor: there is no state dict at `at`.
        WouldLoseData: a tensor of the file cannot be read; the message names it. Or the file is one rank's part of a
            model; the message says which.
        DamagedFile: a tensor turned out to be unreadable, or a checksum does not match. With `verify`, all records are
            read before anything is changed, otherwise only deflated ones. Or the file changed while it was read, so
            copied tensors may be of two versions. If anything was overwritten, the message lists the keys; with
            `assign` nothing is.
        MissingExtra: torch is not installed.
    """
    need_torch("load_into")
    refuse_swapped_arguments(model, path, "model")
    checkpoint = opened(path)
    goal = target(model)
    refuse_piece(checkpoint, None if at is None else address.given(at))
    found = chosen(checkpoint, at, goal.leaves())
    refuse_damaged(checkpoint)
    if mmap and not assign:
        raise Refused("mmap=True requires assign=True: copied tensors need no map", hint="leave out mmap=True")
    restore = restore_location(map_location)
    where = restore if assign or callable(map_location) else unmoved
    maker = TensorMaker(checkpoint, where, warn=assign, verify=verify, mmap=mmap)
    prove = None
    match = "auto" if match is True else match
    if verify_against is not None:
        if match == "auto":
            raise Refused("verify_against proves a matching, and there is none", hint="add match='structure'")
        prove = partial(_proved, verify_against, model)
    alone = strict and not goal.own_way
    fit = best_fit(checkpoint, found, goal, match, assign=assign, strict=alone, prove=prove)
    codes = refuse_codes(checkpoint, fit)
    if fit.rivals and not strict:
        raise _rivals(checkpoint, fit)
    _refuse_unwritable(fit, assign)
    if mmap or not assign:  # data that is read in order to be assigned is checked as it is read
        maker.check(fit.source.entries[old] for old in fit.pairs.values() if old in fit.source.entries)
    refuse_two_values(fit, maker.looking(unmoved))
    if not assign:
        refuse_other_values(fit, maker.looking(unmoved))
    extra = _extra_state(checkpoint, fit, maker)
    if goal.own_way:
        # What a hook takes under other keys than those of the model is verified here, and only mapped.
        torch_way.rehearse(fit, maker.looking(where, mmap=True), extra, assign=assign)
    empty = not (fit.pairs or fit.complete or allow_empty)
    done = fit.complete or not (strict or empty or codes)
    report = _report(checkpoint, fit, done, assign)
    if not done:
        raise LoadMismatch(
            "; ".join([*(() if strict or codes else ("no tensor of the file fits the model",)), *report.trouble()]),
            report=report,
            path=checkpoint.path,
            where=fit.source.at or None,
            hint=_CODES
            if codes
            else _other_shards(fit, checkpoint) or (_HINT if strict else _EMPTY) + _elsewhere(found, fit, at),
        )
    if fit.pairs and 2 * len(fit.pairs) < min(len(fit.source.names), len(goal.names)):
        names = f"{len(fit.pairs):,} of the file's {len(fit.source.names):,} keys and the model's {len(goal.names):,}"
        warnings.warn(f"{checkpoint.path}: only {names} match; the rest is not loaded", stacklevel=caller())
    if match == "auto" and fit.rule == "structure":
        first = next(iter(report.renamed.items()), ("", ""))
        line = f"the keys differ, and all {plural(len(fit.pairs), 'tensor')} were matched by structure"
        warnings.warn(f"{checkpoint.path}: {line}, as in {' -> '.join(first)}", stacklevel=caller())
    maker.reading.refuse_changes()
    beyond: dict[str, int] = {}
    if goal.own_way:
        beyond = torch_way.perform(fit, maker, extra, assign=assign)
    elif assign:
        _assign(fit, maker, extra)
    else:
        beyond = _copy(fit, maker, extra)
    report = replace(report, overflow={name: count for name, count in beyond.items() if count})
    if report.overflow:
        warnings.warn(f"{checkpoint.path}: {report.overflow_line()}", stacklevel=caller())
    return report


_HINT = "strict=False loads what fits; match='structure' aligns models that name the same layers differently"
_CODES = "load it into a model that its library has quantized in the same way; or save the weights dequantized first"
_EMPTY = "match='structure' aligns models that name the same layers differently; allow_empty=True accepts this"


def _proved(
    source: torch.nn.Module,
    model: torch.nn.Module,
    matching: Matching,
    operations: Operations,
    slots: Sequence[Slot],
    again: Callable[[Heads], tuple[Matching, Operations]] | None,
) -> tuple[Matching, Operations]:
    """Return the matching with which both models give equal outputs.

    Raises:
        NoMatch: none does.
    """
    from ckptfix.ops.match import converted, running, verify

    done = verify.prove(running.models(source, model), matching, operations, slots, converted, again)
    if not done.equal:
        raise verify.refusal(done)
    return done.matching, done.operations


def _other_shards(fit: Fit, checkpoint: Checkpoint) -> str:
    """Return a hint to load the folder, if the file is only a shard of a model; else an empty text."""
    lone = lone_shard(checkpoint.path) if fit.missing else None
    return "" if lone is None else f"{lone.finding().message}: load its folder, {lone.folder!r}"


def _elsewhere(found: Sequence[StateSource], fit: Fit, at: str | None) -> str:
    """Return a hint on how to load a different state dict of the file, or an empty text if it has only one."""
    ats = [source.at for source in found if source is not fit.source] if at is None else []
    listed = some([repr(place) + ("" if place else " (the top level)") for place in ats], 4)
    return f"; at= chooses a different state dict: {listed}" if ats else ""


def _rivals(checkpoint: Checkpoint, fit: Fit) -> Refused:
    rules = " and by ".join((fit.rule, *fit.rivals))
    hint = "load into only the part of the model that these keys are for, or first remove the other keys from the file"
    names = plural(len(fit.pairs), "key")
    return Refused(f"{names} would fit equally well by {rules}", path=checkpoint.path, hint=hint)


def _refuse_unwritable(fit: Fit, assign: bool) -> None:
    import torch

    tensors = {name: tensor for name, tensor in fit.target.tensors.items() if name in fit.pairs and not is_lazy(tensor)}
    on_meta = [name for name, tensor in tensors.items() if tensor.is_meta]
    if on_meta and not assign:
        hint = "use assign=True to give the model the file's tensors, or call model.to_empty(device=...) first"
        raise Refused(f"the model is on the meta device ({on_meta[0]}), so nothing can be copied into it", hint=hint)
    frozen = [name for name, tensor in tensors.items() if tensor.is_inference()]
    if frozen and not assign and not torch.is_inference_mode_enabled():
        hint = "call load_into inside torch.inference_mode() too, or use assign=True"
        raise Refused(f"the model was made in inference mode ({frozen[0]}): it cannot be changed outside", hint=hint)


def _extra_state(checkpoint: Checkpoint, fit: Fit, maker: TensorMaker) -> dict[str, object]:
    """Return key -> value for ``set_extra_state``; a value that holds a foreign object becomes a mismatch."""
    found: dict[str, object] = {}
    for name in [name for name in fit.pairs if name in fit.target.extra]:
        old = fit.pairs[name]
        if old in fit.source.entries:
            found[name] = maker(fit.source.entries[old]).detach()
            continue
        builder = Builder(checkpoint, maker)
        value = builder.build(fit.source.extra[old])
        foreign = next((made for made in (value, *builder.made.values()) if isinstance(made, ForeignObject)), None)
        if foreign is None:
            found[name] = value
        else:
            why = f"holds an object of class {foreign.module}.{foreign.name}, which is not imported"
            fit.mismatched.append(Mismatch(name, old, None, None, why))
            del fit.pairs[name]
    return found


def _report(checkpoint: Checkpoint, fit: Fit, done: bool, assign: bool) -> LoadReport:
    tensors, entries = fit.target.tensors, fit.source.entries
    pairs = {name: old for name, old in fit.pairs.items() if name in tensors and old in entries}
    # A key counts as loaded if a key that it is tied to is loaded.
    loaded = [name for name in fit.target.names if name in fit.pairs or fit.tied.get(name) in fit.pairs]
    shapes = {name: entry.shape for name, entry in entries.items()}
    shapes.update((name, tuple(tensor.shape)) for name, tensor in tensors.items() if not is_lazy(tensor))
    casts = {name: (entries[old].dtype, dtype_of(tensors[name])) for name, old in pairs.items()}
    return LoadReport(
        path=checkpoint.path,
        format=checkpoint.format,
        at=fit.source.at,
        rule=fit.rule,
        done=done,
        assigned=assign,
        loaded=tuple(loaded),
        missing=tuple(fit.missing),
        unexpected=tuple(fit.unexpected),
        mismatched=tuple(fit.mismatched),
        skipped=tuple(fit.skipped),
        renamed={old: name for name, old in fit.pairs.items() if old != name},
        tied=dict(fit.tied),
        casts={name: (old, new) for name, (old, new) in casts.items() if old != new},
        nearest=nearest_names(fit.missing, fit.unexpected, shapes),
        model_names=tuple(fit.target.names),
        file_names=tuple(fit.source.names),
    )


def in_file_order(fit: Fit) -> Iterator[tuple[str, TensorEntry]]:
    """Yield (key of the model, entry) for everything to be loaded; each tensor of the model occurs once."""
    aliases = fit.target.aliases
    back = {old: name for name, old in fit.pairs.items() if name in fit.target.tensors}
    seen = set()
    for old, entry in fit.source.entries.items():
        name = back.get(old)
        if name is not None and aliases.get(name, name) not in seen:
            seen.add(aliases.get(name, name))
            yield name, entry


GROUP = 512 << 20
"""Bytes of the tensors that are loaded together: enough for two threads to be busy all the time."""


def _copy(fit: Fit, maker: TensorMaker, extra: Mapping[str, object]) -> dict[str, int]:
    """Copy what fits; return key of the model -> count of the numbers that left the range of its dtype."""
    import torch

    path = maker.checkpoint.path
    rows = list(in_file_order(fit))
    names = [name for name, _ in rows]
    beyond: dict[str, int] = {}
    loaded: set[int] = set()
    torn: set[int] = set()
    with (
        torch.no_grad(),
        so_far.telling(lambda: so_far.copied(names, loaded, torn), path, lambda: names[min(torn)] if torn else None),
    ):
        for group in batches(range(len(rows)), lambda number: rows[number][1].nbytes, GROUP):
            _read_directly(fit, maker, rows, group, loaded, torn)
            rest = [number for number in group if number not in loaded]
            for number, following in zip_longest(rest, rest[1:]):
                name, entry = rows[number]
                parameter = fit.target.tensors[name]
                value = maker.once(entry)
                beyond[name] = out_of_range(value, parameter.dtype)
                torn.add(number)
                parameter.copy_(torch_way.placed(value, parameter))
                loaded.add(number)
                torn.remove(number)
                del value  # the next one is read into the same memory
                maker.forget(None if following is None else rows[following][1])
    every = f"{plural(len(names), 'tensor')} of the model were overwritten"
    with so_far.telling(lambda: f"{every}, perhaps with two versions: {so_far.listed(names, names)}", path):
        maker.reading.refuse_changes()
    given: list[str] = []
    with so_far.telling(lambda: f"{every}, and extra state was set: {named(given) if given else 'none'}", path):
        _set_extra_state(fit, extra, given)
    return beyond


def _set_extra_state(fit: Fit, extra: Mapping[str, object], given: list[str]) -> None:
    """Set the extra state of the modules, and list its keys in `given`."""
    for name, value in extra.items():
        if (module := fit.target.extra[name]) is not None:
            given.append(name)
            module.set_extra_state(value)


def _read_directly(
    fit: Fit,
    maker: TensorMaker,
    rows: Sequence[tuple[str, TensorEntry]],
    group: Sequence[int],
    loaded: set[int],
    torn: set[int],
) -> None:
    """Fill those tensors of a group whose bytes need no conversion.

    Args:
        loaded: is extended by the numbers of the tensors that have their values.
        torn: is extended by the numbers of those that have a part of them, after an error.
    """
    import torch

    numbers: list[int] = []
    parts: list[tuple[Storage, Fill]] = []
    for number in group:
        name, entry = rows[number]
        part = direct_read.planned(maker, entry, fit.target.tensors[name])
        if part is not None:
            numbers.append(number)
            parts.append(part)
    progress = Progress()
    try:
        maker.fill(parts, progress)
    finally:
        loaded.update(numbers[nth] for nth in progress.filled)
        torn.update(numbers[nth] for nth in progress.begun - progress.filled)
    for number in numbers:
        torch.autograd.graph.increment_version(fit.target.tensors[rows[number][0]])


def _assign(fit: Fit, maker: TensorMaker, extra: Mapping[str, object]) -> None:
    import torch

    holders: dict[object, list[ModuleSlot]] = {}
    for place in fit.target.places:
        holders.setdefault(identity(place.tensor), []).append(place)
    taken: set[object] = set()
    new: list[tuple[ModuleSlot, torch.Tensor]] = []
    with so_far.telling(lambda: "the model has its own tensors", maker.checkpoint.path):
        for name, entry in in_file_order(fit):
            old = fit.target.tensors[name]
            value = torch_way.placed(maker(entry).detach(), old)
            where = same_place(entry)
            if where in taken:
                # The file ties tensors that the model does not tie: training one must not change the other.
                value = value.clone()
            if where is not None:
                taken.add(where)
            given = torch.nn.Parameter(value, old.requires_grad) if isinstance(old, torch.nn.Parameter) else value
            new += [(place, given) for place in holders[identity(old)]]
        maker.reading.refuse_changes()
        with put_back(place for place, _ in new):
            for place, given in new:
                setattr(place.module, place.name, given)
            _set_extra_state(fit, extra, [])
