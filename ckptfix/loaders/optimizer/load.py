"""Resuming an optimizer: each parameter gets its own state back, or nothing is loaded."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from typing import TYPE_CHECKING, Any

from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, Refused, file_name, printable
from ckptfix.extras import need_torch
from ckptfix.formats.members import optimizer_of
from ckptfix.loaders.model.report import named
from ckptfix.loaders.model.torch_way import placed
from ckptfix.loaders.open_for_loading import opened, opens_once, refuse_swapped_arguments
from ckptfix.loaders.optimizer.classes import (
    FLAT,
    MACHINE,
    PARAMETER_SHAPED,
    SCHEDULED,
    refuse_not_an_optimizer,
    refuse_other_options,
    refuse_other_state,
    refuse_swapped,
)
from ckptfix.loaders.optimizer.parameters import Key, MatchedParameters, OptimizerParameters, SavedGroup, State, matched
from ckptfix.loaders.optimizer.saved import parts, saved_optimizer, was_flattened
from ckptfix.loaders.tensors import TensorMaker, caller, restore_location, unmoved
from ckptfix.ops.rank_shards import refuse_flat_partition
from ckptfix.shown import html
from ckptfix.words import plural

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ckptfix.loaders.tensors import MapLocation


@dataclass(frozen=True, slots=True)
class GroupReport:
    """Report on one parameter group.

    Attributes:
        index: number of the group in the optimizer.
        saved: number of the group in the file; None where its parameters are grouped differently there.
        parameters: count of its parameters.
        restored: option -> (value before, value from the file), for those that changed.
        kept: options that the file does not have, and those that say how to compute on this machine (foreach, fused,
            capturable, differentiable) and differ in the file.
    """

    index: int
    saved: int | None
    parameters: int
    restored: Mapping[str, tuple[object, object]]
    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class OptimizerReport:
    """Report of what `load_optimizer` did.

    Attributes:
        path, at: the file, and the address of the optimizer's state in it.
        by: how parameters were identified: by ``"param_names"`` or ``"names"`` (if the file has them), by ``"model
            order"`` (that of the model's state dict in the file), or by ``"order"`` (the optimizer's own, as in torch).
        rule: how names were matched, as in `LoadReport`; ``""`` if there were no names.
        restored: parameters that got their state.
        fresh: parameters for which the file has no state, because they had no step yet.
        dropped: parameters of the file, without state, that this optimizer does not hold.
        added: parameters that the file lacks; they start without state (only with ``strict=False``, as the next two).
        frozen: parameters of the model whose state was left out, because the optimizer does not hold them.
        removed: parameters of the file whose state was left out, because the model does not have them.
        groups: reports on the options of each group.
    """

    path: str
    at: str
    by: str
    rule: str
    restored: tuple[str, ...]
    fresh: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    groups: tuple[GroupReport, ...] = field(default=())

    @property
    def lines(self) -> tuple[str, ...]:
        """The report as text."""
        place = f" ({self.at})" if self.at else ""
        how = f"{self.by}, {self.rule}" if self.rule else self.by
        rows = [f"restored the state of {plural(len(self.restored), 'parameter')} from {self.path}{place}: by {how}"]
        if self.fresh:
            rows.append(f"without state in the file: {named(self.fresh)}")
        if self.dropped:
            rows.append(f"not held by the optimizer, and without state: {named(self.dropped)}")
        if self.added:
            rows.append(f"not in the file, and start without state: {named(self.added)}")
        if self.frozen:
            rows.append(f"not held by the optimizer; their state was left out: {named(self.frozen)}")
        if self.removed:
            rows.append(f"not in the model; their state was left out: {named(self.removed)}")
        for group in self.groups:
            if group.saved is None:
                rows.append(f"group {group.index}: grouped differently in the file, so it keeps its own options")
                continue
            if group.restored:
                changes = ", ".join(f"{key} {old!r} -> {new!r}" for key, (old, new) in group.restored.items())
                rows.append(f"group {group.index}: {changes}")
            if group.kept:
                rows.append(f"group {group.index}: unchanged: {', '.join(group.kept)}")
        return tuple(map(printable, rows))

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def __repr__(self) -> str:
        return f"<OptimizerReport of {self.path!r}: {plural(len(self.restored), 'parameter')} by {self.by}>"

    def _repr_html_(self) -> str:
        rows = [
            (group.index, key, old, new) for group in self.groups for key, (old, new) in group.restored.items()
        ]
        return html(self.lines, [("options", ("group", "option", "before", "from the file"), rows)])

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON; option values that JSON does not support become text."""
        found = asdict(self)
        for row in found["groups"]:
            row["restored"] = {key: [_plain(old), _plain(new)] for key, (old, new) in row["restored"].items()}
        return {**found, "lines": list(self.lines)}


def _plain(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | str | type(None)) else repr(value)


@opens_once
def load_optimizer(
    optimizer: torch.optim.Optimizer,
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    at: str | None = None,
    strict: bool = True,
    map_location: MapLocation = None,
    verify: bool = True,
) -> OptimizerReport:
    """Load the optimizer's state from the checkpoint at `path`, matching each saved state to its parameter.

    If `path` is a trainer's folder, such as ``checkpoint-500``, the optimizer's file in it is loaded.

    Parameters are matched by name if the file has names (``param_names`` in its groups, or state keyed by name), with
    wrapper and base prefixes allowed on either side. Otherwise the numbers get names from the order of the model's
    state dict in the same file, so the model may now define its parameters in a different order. This assumes that the
    numbers were given in the order of ``model.parameters()``. If there are no names anywhere, only the order counts,
    with a warning if parameters of the same shape could be swapped.

    Options of the groups (lr, betas, ...) come from the file, except those that say how to compute on this machine
    (foreach, fused, capturable, differentiable). All or nothing: on an error the optimizer is unchanged.

    Args:
        model: the model whose parameters `optimizer` holds, wrapped or not. Without it, names come from the
            optimizer's own ``param_names``; without those, only the order counts, as in torch.
        at: address of the optimizer's state, if the file has several.
        strict: every parameter must be on both sides, in the same groups. With False, where names are known, parameters
            that were added start without state, the state of frozen and removed ones is left out, and a group whose
            parameters are grouped differently in the file keeps its own options; the report names each.
        map_location: a callable is called for each storage; the state moves to its parameter's device in any case.
        verify: as for `load_into`.

    Raises:
        Refused: it is not certain which state belongs to which parameter: counts, groups or shapes differ, or names are
            missing; the message says which. Or the state belongs to an optimizer of a different class. Or the file
            holds no optimizer, or several while `at` is not given.
        NoSuchTensor: there is no optimizer at `at`.
        DamagedFile: a checksum does not match, or the file was written to while it was read.
        MissingExtra: torch is not installed.
    """
    need_torch("load_optimizer")
    refuse_swapped_arguments(optimizer, path, "optimizer")
    refuse_not_an_optimizer(optimizer)
    checkpoint = opened(optimizer_of(file_name(path)) or path)
    refuse_flat_partition(checkpoint)
    restore = restore_location(map_location)
    maker = TensorMaker(checkpoint, restore if callable(map_location) else unmoved, verify=verify)
    place, saved = saved_optimizer(checkpoint, maker, at)
    try:
        groups, state = parts(saved)
        held = OptimizerParameters.of(optimizer, model)
        named_by = None if was_flattened(saved, groups) else model
        found = matched(checkpoint, held, groups, state, named_by, strict=strict)
        _refuse_loose(groups, state)
        _refuse_shapes(held, found, state)
        now = [_own(group) for group in optimizer.param_groups]
        pairing: Mapping[int, int | None]
        if strict or found.by == "order":
            pairing = _paired_groups(held, groups, found, now)
        else:
            pairing = _regrouped(held, groups, found, now)
        options, reports = _options(optimizer, groups, held, pairing)
        refuse_other_state(optimizer, {held.name(owner): state.get(key) or {} for key, owner in found.owners.items()})
        sizes = [len(group.ids) for group in groups]
        if len(groups) > 1 and found.by in ("order", "model order") and sizes == [len(group) for group in held.groups]:
            refuse_swapped([group.options for group in groups], now)
        _refuse_flat(held, found, state)
    except CkptfixError as error:
        error.path = error.path or checkpoint.path
        error.where = error.where or place or None
        raise
    if found.by == "order" and _interchangeable(found, state):
        warnings.warn(
            f"{checkpoint.path}: there are no names to match parameters by, so the order alone was used, as torch does"
            + ("" if model is not None else " (pass model= to use the names of a model's state dict in the file)"),
            stacklevel=caller(),
        )
    order = {id(parameter): index for index, parameter in enumerate(held.parameters)}
    new = {key: value for key, value in saved.items() if key not in ("state", "param_groups")}
    known = {key for group in groups for key in group.ids}
    states: dict[Key, object] = {key: value for key, value in state.items() if key not in known}
    given: set[int] = set()
    for key, parameter in found.owners.items():
        if state.get(key):
            states[order[id(parameter)]] = _own_copy(state[key], parameter, given)
    new["state"] = states
    new["param_groups"] = options
    maker.reading.refuse_changes()
    _give(optimizer, new, checkpoint.path)
    named_now = [(held.name(parameter), bool(state.get(key))) for key, parameter in found.owners.items()]
    return OptimizerReport(
        path=checkpoint.path,
        at=place,
        by=found.by,
        rule=found.rule,
        restored=tuple(name for name, has in named_now if has),
        fresh=tuple(name for name, has in named_now if not has),
        dropped=found.dropped,
        added=found.added,
        frozen=found.frozen,
        removed=found.removed,
        groups=reports,
    )


_REGROUP = (
    "group the parameters as they were when the file was saved, or pass strict=False (and model=) to restore their "
    "state and keep the options of the new groups"
)


def _own(group: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _refuse_loose(groups: Sequence[SavedGroup], state: State) -> None:
    """Refuse state of a parameter that is in no group, since it would be lost. Other state under text keys may stay."""
    known = {key for group in groups for key in group.ids}
    loose = [
        str(key) for key, own in state.items()
        if key not in known and (not isinstance(key, str) or _is_of_a_parameter(own))
    ]  # fmt: skip
    if loose:
        hint = "the groups of the file do not belong to its state"
        raise Refused(f"the state has parameters that are in no group: {named(loose)}", hint=hint)


def _is_of_a_parameter(own: object) -> bool:
    return isinstance(own, Mapping) and not PARAMETER_SHAPED.isdisjoint(own)


def _refuse_flat(held: OptimizerParameters, found: MatchedParameters, state: State) -> None:
    """Refuse state that covers all parameters in one flat tensor, unless their order is unchanged."""
    flat = any(FLAT & set(state.get(key) or ()) for key in found.owners)
    if flat and [id(owner) for owner in found.owners.values()] != [id(one) for one in held.parameters]:
        message = "its state covers all parameters in one flat tensor, and their order has changed"
        raise Refused(message, hint="define the model and its optimizer in their original order")


def _interchangeable(found: MatchedParameters, state: State) -> bool:
    """Return whether two parameters of the same shape have state, so that swapping them would go unnoticed."""
    shapes = [tuple(parameter.shape) for key, parameter in found.owners.items() if state.get(key)]
    return len(shapes) > len(set(shapes))


def _refuse_shapes(held: OptimizerParameters, found: MatchedParameters, state: State) -> None:
    from torch import Tensor

    wrong = []
    for key, parameter in found.owners.items():
        own = state.get(key) or {}
        if not isinstance(own, Mapping):
            raise Refused(f"the state of {held.name(parameter)} is not a dict")
        for name, value in own.items():
            if name in PARAMETER_SHAPED and isinstance(value, Tensor) and value.shape != parameter.shape:
                shapes = f"{list(value.shape)} in the file, {list(parameter.shape)} in the model"
                wrong.append(f"{name} of {held.name(parameter)}: {shapes}")
    if wrong:
        hint = "the file may hold different parameters, or the same ones in a different order"
        raise Refused(f"the state does not fit its parameter: {named(wrong)}", hint=hint)


def _paired_groups(
    held: OptimizerParameters,
    groups: Sequence[SavedGroup],
    found: MatchedParameters,
    now: Sequence[Mapping[str, object]],
) -> dict[int, int]:
    """Return index of a group of the optimizer -> index of the saved group with the same parameters.

    Saved groups with equal options may be merged into one group here, since its options are still certain, and one may
    be split over groups whose options are equal.

    Args:
        now: the options of the optimizer's groups.
    """
    saved_in = {key: index for index, group in enumerate(groups) for key in group.ids}
    origin = {id(parameter): saved_in[key] for key, parameter in found.owners.items()}
    pairing: dict[int, int] = {}
    into: dict[int, list[int]] = {}
    for index, parameters in enumerate(held.groups):
        sources = {origin[id(parameter)] for parameter in parameters}
        for source in sources:
            into.setdefault(source, []).append(index)
        first = min(sources, default=0)
        if any(not _same_options(groups[first].options, groups[other].options) for other in sources):
            mixed = " and ".join(map(str, sorted(sources)))
            message = f"group {index} has parameters of groups {mixed} of the file"
            raise Refused(message, hint=_REGROUP)
        if sources:
            pairing[index] = first
    twice = [source for source, parts in into.items() if not _are_same(now, parts)]
    if twice:
        message = f"the optimizer has the parameters of the file's group {twice[0]} in several groups"
        raise Refused(message, hint=_REGROUP)
    # Groups without parameters have nothing but their order.
    rest = [index for index in range(len(groups)) if index not in pairing.values() and not groups[index].owned(found)]
    for index in range(len(held.groups)):
        if index not in pairing:
            if not rest:
                raise Refused(f"group {index} holds no parameters, and the file has no such group")
            pairing[index] = rest.pop(0)
    return pairing


def _are_same(now: Sequence[Mapping[str, object]], groups: Sequence[int]) -> bool:
    """Return whether the options of these groups are equal."""
    first, *others = groups
    return all(_same_options(now[first], now[other]) for other in others)


def _regrouped(
    held: OptimizerParameters,
    groups: Sequence[SavedGroup],
    found: MatchedParameters,
    now: Sequence[Mapping[str, object]],
) -> dict[int, int | None]:
    """Return index of a group of the optimizer -> index of the saved group whose options it takes.

    None means that the group keeps its own options: its parameters come from groups with different options, or are
    only a part of a saved group whose other parameters are now in a group with different options, or are all new.
    """
    saved_in = {key: index for index, group in enumerate(groups) for key in group.ids}
    origin = {id(parameter): saved_in[key] for key, parameter in found.owners.items()}
    sources = [{origin[id(one)] for one in group if id(one) in origin} for group in held.groups]
    into = {source: [index for index, own in enumerate(sources) if source in own] for source in set().union(*sources)}
    pairing: dict[int, int | None] = {}
    for index, own in enumerate(sources):
        first = min(own, default=None)
        certain = first is not None and all(
            _are_same(now, into[other]) and _same_options(groups[first].options, groups[other].options)
            for other in own
        )
        pairing[index] = first if certain else None
    return pairing


def _options(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[SavedGroup],
    held: OptimizerParameters,
    pairing: Mapping[int, int | None],
) -> tuple[list[dict[str, object]], tuple[GroupReport, ...]]:
    """Return the groups of the new state dict, and a report on their options.

    Raises:
        Refused: the options belong to a different optimizer.
    """
    made: list[dict[str, object]] = []
    reports = []
    first = 0
    for index, current in enumerate(optimizer.param_groups):
        place = pairing[index]
        saved = groups[place or 0].options
        own = _own(current)
        refuse_other_options(optimizer, saved, own)
        saved = own if place is None else saved
        taken = {key: value for key, value in saved.items() if key not in MACHINE}
        count = len(current["params"])
        group = {**own, **taken, "params": list(range(first, first + count))}
        if "param_names" in current:
            group["param_names"] = list(current["param_names"])
        made.append(group)
        changed = {key: (own.get(key), value) for key, value in taken.items() if not _same(own.get(key), value)}
        kept = [key for key in own if key not in SCHEDULED and (key not in saved or _kept(key, own, saved))]
        reports.append(GroupReport(index, place, count, changed, tuple(sorted(kept))))
        first += count
    return made, tuple(reports)


def _same_options(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)


def _kept(key: str, own: Mapping[str, object], saved: Mapping[str, object]) -> bool:
    return key in MACHINE and not _same(own[key], saved[key])


def _same(one: object, other: object) -> bool:
    from torch import Tensor

    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool((one.cpu() == other.cpu()).all())
    return type(one) is type(other) and bool(one == other)


def _own_copy(value: object, parameter: torch.Tensor, given: set[int]) -> object:
    """Return the state with tensors that share no memory with other state, because an optimizer writes into it.

    Args:
        given: addresses of the memory that was handed out without a copy.
    """
    from torch import Tensor

    if isinstance(value, Tensor):
        own = placed(value, parameter) if value.shape == parameter.shape else value
        own = own.detach()
        if type(own) is not Tensor or not _is_all_of_its_memory(own) or own.data_ptr() in given:
            return own.clone()
        given.add(own.data_ptr())
        return own
    if isinstance(value, Mapping):
        return {key: _own_copy(item, parameter, given) for key, item in value.items()}
    if isinstance(value, list):
        return [_own_copy(item, parameter, given) for item in value]
    return value


def _is_all_of_its_memory(tensor: torch.Tensor) -> bool:
    from torch import strided

    if tensor.layout != strided or tensor.is_quantized or tensor.is_meta or not tensor.is_contiguous():
        return False
    return bool(tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() > 0)


def _give(optimizer: torch.optim.Optimizer, new: dict[str, object], path: str) -> None:
    """Call optimizer.load_state_dict, and undo it if it fails."""
    before = dict(vars(optimizer))
    groups = [dict(group) for group in optimizer.param_groups]
    state = {key: dict(value) if isinstance(value, dict) else value for key, value in optimizer.state.items()}
    try:
        optimizer.load_state_dict(new)
    except BaseException as error:
        vars(optimizer).clear()
        vars(optimizer).update(before)
        optimizer.param_groups[:] = groups
        optimizer.state.clear()
        optimizer.state.update(state)
        if not isinstance(error, Exception):
            raise
        message = f"{type(optimizer).__name__} rejects the state: {' '.join(str(error).split())}"
        raise Refused(message, path=path) from error
