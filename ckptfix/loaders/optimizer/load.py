"""Resuming an optimizer: its state is loaded to the parameters that it belongs to, or not at all."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ckptfix.errors import CkptfixError, Refused, file_name, printable
from ckptfix.extras import need_torch
from ckptfix.formats.members import optimizer_of
from ckptfix.loaders.model.report import named
from ckptfix.loaders.model.torch_way import placed
from ckptfix.loaders.opened import opened, opens_once, refuse_swapped_arguments
from ckptfix.loaders.optimizer.classes import (
    FLAT,
    MACHINE,
    SCHEDULED,
    refuse_not_an_optimizer,
    refuse_other_options,
    refuse_other_state,
    refuse_swapped,
)
from ckptfix.loaders.optimizer.parameters import Held, Key, Matched, SavedGroup, State, matched
from ckptfix.loaders.optimizer.saved import parts, saved_optimizer, was_flattened
from ckptfix.loaders.tensors import TensorMaker, caller, restore_location, unmoved
from ckptfix.ops.pieces import refuse_flat_partition
from ckptfix.shown import html
from ckptfix.words import plural

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ckptfix.loaders.tensors import MapLocation


@dataclass(frozen=True, slots=True)
class GroupReport:
    """What became of a parameter group.

    Attributes:
        index: in the optimizer.
        saved: in the file.
        parameters: how many it holds.
        restored: option -> (value before, value from the file), for those that changed.
        kept: options that the file does not have, and those that say how to compute on this machine (foreach, fused,
            capturable, differentiable) and are others in the file.
    """

    index: int
    saved: int
    parameters: int
    restored: Mapping[str, tuple[object, object]]
    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class OptimizerReport:
    """What `load_optimizer` did.

    Attributes:
        path, at: the file, and the address of the optimizer's state in it.
        by: what identified parameters: ``"param_names"`` or ``"names"`` (if the file has them), ``"model order"`` (the
            order of the model's state dict in the file), ``"order"`` (the optimizer's own, as torch does).
        rule: how names were matched, as in `LoadReport`; ``""`` where there were none.
        restored: parameters that got their state.
        fresh: parameters for which the file has no state, as they had no step yet.
        dropped: parameters of the file, without state, that this optimizer does not hold.
        groups: what became of each group's options.
    """

    path: str
    at: str
    by: str
    rule: str
    restored: tuple[str, ...]
    fresh: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
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
            rows.append(f"not held here, and without state: {named(self.dropped)}")
        for group in self.groups:
            if group.restored:
                changes = ", ".join(f"{key} {old!r} -> {new!r}" for key, (old, new) in group.restored.items())
                rows.append(f"group {group.index}: {changes}")
            if group.kept:
                rows.append(f"group {group.index}: as they are here: {', '.join(group.kept)}")
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
        """The same for JSON; option values that JSON does not have become text."""
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
    map_location: MapLocation = None,
    verify: bool = True,
) -> OptimizerReport:
    """Load the optimizer's state from the checkpoint at `path`, each parameter's to that parameter.

    Of a trainer's folder, such as ``checkpoint-500``, it is the file of the optimizer.

    Parameters are found by name where the file has names (``param_names`` in its groups, or state keyed by name), with
    wrappers' and base prefixes on either side. Where it has none, the order of the model's state dict in the same file
    gives names to the numbers; so the model may define its parameters in another order now. Options of the groups
    (lr, betas, ...) come from the file, but for those that say how to compute on this machine (foreach, fused,
    capturable, differentiable). Numbers are taken to have been given in the model's order, as ``model.parameters()``
    gives them. Where nothing has names, the order alone counts, with a warning if parameters of one shape might be
    swapped. All or nothing: on an error the optimizer is as it was.

    Args:
        model: the model whose parameters `optimizer` holds, wrapped or not. Without it, names come from the
            optimizer's own ``param_names``, and without those the order alone counts, as in torch.
        at: address of the optimizer's state, when the file has several.
        map_location: asked for each storage if it is a callable; state is moved to its parameter's device anyway.
        verify: as for `load_into`.

    Raises:
        Refused: what belongs to which parameter is not certain: counts, groups or shapes differ, or names are
            missing; the message says which. Or the state belongs to an optimizer of another class, or the file holds
            no optimizer, or several and no `at`.
        NoSuchTensor: no optimizer at `at`.
        DamagedFile: what is read has another checksum than the file states, or the file was written to meanwhile.
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
        held = Held.of(optimizer, model)
        found = matched(checkpoint, held, groups, state, None if was_flattened(saved, groups) else model)
        _refuse_loose(groups, state)
        _refuse_shapes(held, found, state)
        pairing = _paired_groups(held, groups, found)
        options, reports = _options(optimizer, groups, held, pairing)
        refuse_other_state(optimizer, {held.name(owner): state.get(key) or {} for key, owner in found.owners.items()})
        if len(groups) > 1 and found.by in ("order", "model order"):
            refuse_swapped([group.options for group in groups], [_own(group) for group in optimizer.param_groups])
        _refuse_flat(held, found, state)
    except CkptfixError as error:
        error.path = error.path or checkpoint.path
        error.where = error.where or place or None
        raise
    if found.by == "order" and _interchangeable(found, state):
        warnings.warn(
            f"{checkpoint.path}: no names say whose state is whose: it was loaded by order alone, as torch does"
            + ("" if model is not None else " (model= takes the names that a file with the model's state dict has)"),
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
        groups=reports,
    )


PARAMETER_SHAPED = frozenset((
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum"),
    *("exp_inf", "prev", "step_size", "ax", "mu_product_buffer"),
))  # fmt: skip
"""State that torch.optim keeps in the shape of its parameter (torch/optim/*.py). Others' may have any shape."""


def _own(group: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _refuse_loose(groups: Sequence[SavedGroup], state: State) -> None:
    """State of a parameter that no group has would be lost; other state under a text is the optimizer's own affair."""
    known = {key for group in groups for key in group.ids}
    loose = [
        str(key) for key, own in state.items()
        if key not in known and (not isinstance(key, str) or _is_of_a_parameter(own))
    ]  # fmt: skip
    if loose:
        hint = "the groups of the file are not those that its state was saved with"
        raise Refused(f"state of parameters that are in no group: {named(loose)}", hint=hint)


def _is_of_a_parameter(own: object) -> bool:
    return isinstance(own, Mapping) and not PARAMETER_SHAPED.isdisjoint(own)


def _refuse_flat(held: Held, found: Matched, state: State) -> None:
    """State of all parameters in one piece is right only for the same parameters in the same order."""
    flat = any(FLAT & set(state.get(key) or ()) for key in found.owners)
    if flat and [id(owner) for owner in found.owners.values()] != [id(one) for one in held.parameters]:
        message = "its state is of all parameters in one piece, and their order is another now"
        raise Refused(message, hint="define the model and its optimizer in the order that they had")


def _interchangeable(found: Matched, state: State) -> bool:
    """Whether two parameters of one shape have a state, so that nothing would show if the two were swapped."""
    shapes = [tuple(parameter.shape) for key, parameter in found.owners.items() if state.get(key)]
    return len(shapes) > len(set(shapes))


def _refuse_shapes(held: Held, found: Matched, state: State) -> None:
    from torch import Tensor

    wrong = []
    for key, parameter in found.owners.items():
        own = state.get(key) or {}
        if not isinstance(own, Mapping):
            raise Refused(f"the state of {held.name(parameter)} is not a mapping")
        for name, value in own.items():
            if name in PARAMETER_SHAPED and isinstance(value, Tensor) and value.shape != parameter.shape:
                shapes = f"{list(value.shape)} in the file, {list(parameter.shape)} in the model"
                wrong.append(f"{name} of {held.name(parameter)}: {shapes}")
    if wrong:
        hint = "the file's parameters are other ones, or in another order than was found"
        raise Refused(f"state that does not fit its parameter: {named(wrong)}", hint=hint)


def _paired_groups(held: Held, groups: Sequence[SavedGroup], found: Matched) -> dict[int, int]:
    """Index of a group of the optimizer -> index of the saved one with the same parameters.

    Saved groups with equal options may be one here: it is certain what its options were.
    """
    saved_in = {key: index for index, group in enumerate(groups) for key in group.ids}
    origin = {id(parameter): saved_in[key] for key, parameter in found.owners.items()}
    pairing: dict[int, int] = {}
    split: Counter[int] = Counter()
    for index, parameters in enumerate(held.groups):
        sources = {origin[id(parameter)] for parameter in parameters}
        split.update(sources)
        first = min(sources, default=0)
        if any(not _same_options(groups[first].options, groups[other].options) for other in sources):
            mixed = " and ".join(map(str, sorted(sources)))
            message = f"group {index} has parameters of the groups {mixed} of the file"
            raise Refused(message, hint="group the parameters as they were when the file was saved")
        if sources:
            pairing[index] = first
    twice = [index for index, times in split.items() if times > 1]
    if twice:
        message = f"the parameters of group {twice[0]} of the file are in several groups here"
        raise Refused(message, hint="group the parameters as they were when the file was saved")
    # Groups without parameters have nothing but their order.
    rest = [index for index in range(len(groups)) if index not in pairing.values() and not groups[index].owned(found)]
    for index in range(len(held.groups)):
        if index not in pairing:
            if not rest:
                raise Refused(f"group {index} holds no parameters, and the file has no such group")
            pairing[index] = rest.pop(0)
    return pairing


def _options(
    optimizer: torch.optim.Optimizer, groups: Sequence[SavedGroup], held: Held, pairing: Mapping[int, int]
) -> tuple[list[dict[str, object]], tuple[GroupReport, ...]]:
    """The groups of the new state dict, and what of their options changes.

    Raises:
        Refused: the options belong to another optimizer.
    """
    made: list[dict[str, object]] = []
    reports = []
    first = 0
    for index, current in enumerate(optimizer.param_groups):
        saved = groups[pairing[index]].options
        own = _own(current)
        refuse_other_options(optimizer, saved, own)
        taken = {key: value for key, value in saved.items() if key not in MACHINE}
        count = len(current["params"])
        group = {**own, **taken, "params": list(range(first, first + count))}
        if "param_names" in current:
            group["param_names"] = list(current["param_names"])
        made.append(group)
        changed = {key: (own.get(key), value) for key, value in taken.items() if not _same(own.get(key), value)}
        kept = [key for key in own if key not in SCHEDULED and (key not in saved or _kept(key, own, saved))]
        reports.append(GroupReport(index, pairing[index], count, changed, tuple(sorted(kept))))
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
    """The state with tensors that no other state shares memory with: an optimizer writes into it.

    Args:
        given: addresses of the memory that was given out as it is.
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
    """Optimizer.load_state_dict, undone if it fails."""
    before = dict(vars(optimizer))
    groups = [dict(group) for group in optimizer.param_groups]
    state = {key: dict(value) if isinstance(value, dict) else value for key, value in optimizer.state.items()}
    try:
        optimizer.load_state_dict(new)
    except Exception as error:
        vars(optimizer).clear()
        vars(optimizer).update(before)
        optimizer.param_groups[:] = groups
        optimizer.state.clear()
        optimizer.state.update(state)
        message = f"{type(optimizer).__name__} does not take it: {' '.join(str(error).split())}"
        raise Refused(message, path=path) from error
