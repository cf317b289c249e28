"""Matching the saved parameters of an optimizer to the parameters of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, TypeAlias

from ckptfix.checkpoint import Checkpoint
from ckptfix.dataclass import dataclass
from ckptfix.errors import Refused
from ckptfix.loaders.model.fitting import by_names
from ckptfix.loaders.model.places import target
from ckptfix.loaders.model.report import named
from ckptfix.loaders.optimizer.classes import PARAMETER_SHAPED
from ckptfix.loaders.sources import sources
from ckptfix.names import bases

if TYPE_CHECKING:
    import torch
    from torch import nn


Key: TypeAlias = int | str
"""Identifier of a parameter in the file: its number or its name."""

State: TypeAlias = Mapping[Key, Mapping[str, object]]
"""The values that an optimizer keeps for each parameter."""


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A parameter group of the file: `ids` are its ``params`` (numbers or names), `names` its ``param_names``."""

    ids: list[Key]
    names: list[str] | None
    options: Mapping[str, object]

    def owned(self, found: MatchedParameters) -> bool:
        """Return whether any of its parameters belongs to the optimizer."""
        return any(key in found.owners for key in self.ids)


@dataclass(frozen=True, slots=True)
class OptimizerParameters:
    """The parameters of an optimizer by group, with their names in the model.

    Attributes:
        names: id of a parameter -> its keys in the model's state dict, several if it is tied; empty if unknown.
        places: id of a parameter -> its number in the optimizer.
    """

    groups: tuple[tuple[torch.Tensor, ...], ...]
    names: Mapping[int, tuple[str, ...]]
    places: Mapping[int, int]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, model: nn.Module | None) -> OptimizerParameters:
        """Collect the parameters of `optimizer`, with names from `model` or from its own ``param_names``.

        Raises:
            Refused: it holds parameters that are not the model's.
        """
        groups = tuple(tuple(group["params"]) for group in optimizer.param_groups)
        names: dict[int, tuple[str, ...]] = {}
        if model is not None:
            for name, tensor in target(model).tensors.items():
                names[id(tensor)] = (*names.get(id(tensor), ()), name)
            strange = sum(id(parameter) not in names for group in groups for parameter in group)
            if strange:
                hint = "build the optimizer from model.parameters(), after the model is wrapped, moved or assigned to"
                raise Refused(f"{strange} parameters of the optimizer are not the model's", hint=hint)
        elif all("param_names" in group for group in optimizer.param_groups):
            for group in optimizer.param_groups:
                pairs = zip(group["params"], group["param_names"], strict=True)
                names.update((id(parameter), (name,)) for parameter, name in pairs)
        everything = [parameter for group in groups for parameter in group]
        numbers = {id(parameter): number for number, parameter in enumerate(everything)}
        return cls(groups, names, numbers)

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.groups for parameter in group]

    def name(self, parameter: torch.Tensor) -> str:
        """Return the first name of a parameter, or else its number as text."""
        known = self.names.get(id(parameter))
        if known:
            return known[0]
        return f"parameter {self.places[id(parameter)]}"


@dataclass(frozen=True, slots=True)
class MatchedParameters:
    """The result of matching.

    Attributes:
        owners: saved key -> the matching parameter, in the order of the file.
        by, rule: the way in which they were matched.
        dropped: parameters of the file, without state, that the optimizer does not hold.
        added: parameters of the optimizer that the file lacks.
        frozen, removed: parameters of the file, with state, that the model has and the optimizer does not hold, and
            those that the model lacks. All three are empty with ``strict=True``.
    """

    owners: Mapping[Key, torch.Tensor]
    by: str
    rule: str = ""
    dropped: tuple[str, ...] = field(default=())
    added: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


def matched(
    checkpoint: Checkpoint,
    held: OptimizerParameters,
    groups: Sequence[SavedGroup],
    state: State,
    model: nn.Module | None,
    *,
    strict: bool = True,
) -> MatchedParameters:
    """Match the saved parameters to the optimizer's.

    Args:
        strict: refuse parameters of only one side; otherwise they are listed, if names are known.

    Raises:
        Refused: the match is not certain; the message says what is missing.
    """
    keys = [key for group in groups for key in group.ids]
    if all(group.names is not None for group in groups) and keys:
        names = {key: name for group in groups for key, name in zip(group.ids, group.names or (), strict=True)}
        return _by_name(held, names, state, "param_names", strict=strict)
    texts: dict[Key, str] = {key: key for key in keys if isinstance(key, str)}
    if keys and len(texts) == len(keys):
        return _by_name(held, texts, state, "names", strict=strict)
    order = None if model is None else _file_order(checkpoint, held, model, strict=strict)
    if order is not None and model is not None and _sizes(groups) != [len(group) for group in held.groups]:
        # It held other parameters when it was saved, or the same ones in other groups.
        numbered = _named_by_shapes(groups, state, order, model)
        if numbered is not None:
            return replace(_by_name(held, numbered, state, "model order", strict=strict), rule="")
    if order is None:
        _same_sizes(held, groups)
        return MatchedParameters(dict(zip(keys, held.parameters, strict=True)), "order")
    return _by_order(held, groups, order)


def _by_name(
    held: OptimizerParameters, names: Mapping[Key, str], state: State, by: str, *, strict: bool
) -> MatchedParameters:
    if not held.names:
        raise Refused("the file has names, but the optimizer does not", hint="pass model=, whose parameters it holds")
    if len(set(names.values())) != len(names):
        raise Refused("two parameters of the file have the same name")
    owner = {name: parameter for parameter in held.parameters for name in held.names[id(parameter)]}

    def complete(new: Mapping[str, str]) -> bool:
        reached = [id(owner[name]) for name in new.values() if name in owner]
        return len(reached) == len(set(reached)) == len(held.parameters)

    renaming = bases.find(list(names.values()), list(owner), complete)
    owners: dict[Key, torch.Tensor] = {}
    taken: dict[int, str] = {}
    over = []
    for key, name in names.items():
        parameter = owner.get(renaming.names[name])
        if parameter is None:
            over.append((name, bool(state.get(key))))
        elif id(parameter) in taken:
            message = f"{taken[id(parameter)]} and {name} of the file are the same parameter in the model"
            raise Refused(message, hint="the model ties parameters that were trained separately")
        else:
            taken[id(parameter)] = name
            owners[key] = parameter
    missing = [held.name(parameter) for parameter in held.parameters if id(parameter) not in taken]
    lost = [name for name, has_state in over if has_state]
    if not strict and owners and not renaming.rivals:
        known = {name for names_of in held.names.values() for name in names_of}
        frozen = tuple(name for name in lost if renaming.names[name] in known)
        removed = tuple(name for name in lost if renaming.names[name] not in known)
        dropped = tuple(name for name, has_state in over if not has_state)
        return MatchedParameters(owners, by, renaming.rule, dropped, tuple(missing), frozen, removed)
    if missing or lost:
        reasons = [f"not in the file: {named(missing)}"] if missing else []
        reasons += [f"not held by the optimizer: {named(lost)}"] if lost else []
        hint = (
            "use the same parameters as when the file was saved, or pass strict=False to restore the state of those "
            "that agree; load_into(..., match=...) works only on the model"
        )
        raise Refused(f"parameters do not agree (names {renaming.rule}); {'; '.join(reasons)}", hint=hint)
    return MatchedParameters(owners, by, renaming.rule, tuple(name for name, _ in over))


def _file_order(
    checkpoint: Checkpoint, held: OptimizerParameters, model: nn.Module, *, strict: bool
) -> list[str] | None:
    """Return the first keys of the model's parameters in the order of the file's state dict.

    The result is None if the file has no state dict of this model.

    Raises:
        Refused: it has several, in different orders.
    """
    goal = target(model)
    parameters = {id(parameter) for parameter in model.parameters()}
    try:
        fits = [by_names(source, goal) for source in sources(checkpoint)]
    except Refused:
        return None
    most = max(len(fit.pairs) for fit in fits)
    orders = []
    for fit in fits:
        if len(fit.pairs) < most or not most:
            continue
        back = {old: name for name, old in fit.pairs.items() if name in goal.tensors}
        names = [back[old] for old in fit.source.entries if old in back]
        first = {id(goal.tensors[name]): name for name in reversed(list(goal.tensors))}
        found = [first[id(goal.tensors[name])] for name in names if id(goal.tensors[name]) in parameters]
        orders.append(list(dict.fromkeys(found)))
    if not orders:
        return None
    if any(order != orders[0] for order in orders[1:]):
        raise Refused("the state dicts of the file have the model's parameters in different orders")
    held_names = {held.name(parameter) for parameter in held.parameters}
    lacking = held_names - set(orders[0])
    missing = [name for name in goal.tensors if name in lacking]
    if missing and strict:
        message = f"the optimizer's numbers have no names, and the file's state dict lacks {named(missing)}"
        raise Refused(message, hint="it is not certain which state belongs to which parameter")
    return orders[0]


MOST_WAYS = 2000
"""Ways to number the parameters that are tried at the same time."""


def _named_by_shapes(
    groups: Sequence[SavedGroup], state: State, order: list[str], model: nn.Module
) -> dict[Key, str] | None:
    """Return saved key -> name, if all parameters have a state in their shapes and only one numbering fits them.

    Each group is in the order of the file's model, as a list of ``model.named_parameters()`` with a condition is: the
    usual groups with and without weight decay differ in shapes, so that only one way puts them together. The optimizer
    may have held only parameters that require gradients.

    Args:
        order: first keys of the model's parameters, in the order of the file.
    """
    if len(groups) == 1 and len(groups[0].ids) == len(order):
        return dict(zip(groups[0].ids, order, strict=True))
    tensors = target(model).tensors
    total = sum(_sizes(groups))
    parts = (order, [name for name in order if tensors[name].requires_grad])
    names = next((part for part in parts if len(part) == total), None)
    saved = [[_shape_of(state.get(key)) for key in group.ids] for group in groups]
    if names is None or any(shape is None for row in saved for shape in row):
        return None
    ways: dict[tuple[int, ...], list[int] | None] = {(0,) * len(groups): []}  # None for several ways
    for name in names:
        shape, after = tuple(tensors[name].shape), dict[tuple[int, ...], list[int] | None]()
        for places, way in ways.items():
            for group, place in enumerate(places):
                if place < len(saved[group]) and saved[group][place] == shape:
                    new = (*places[:group], place + 1, *places[group + 1 :])
                    after[new] = None if new in after or way is None else [*way, group]
        if not after or len(after) > MOST_WAYS:
            return None
        ways = after
    (found,) = ways.values()
    if found is None:
        return None
    keys = [iter(group.ids) for group in groups]
    return {next(keys[group]): name for group, name in zip(found, names, strict=True)}


def _shape_of(own: object) -> tuple[int, ...] | None:
    """Return the shape of a parameter by its state; None if the state does not show it."""
    from torch import Tensor

    rows = own.items() if isinstance(own, Mapping) else ()
    known = PARAMETER_SHAPED | {"state1"}  # bitsandbytes has as many codes as the parameter has elements
    shapes = {tuple(value.shape) for name, value in rows if name in known and isinstance(value, Tensor)}
    return shapes.pop() if len(shapes) == 1 else None


def _sizes(groups: Sequence[SavedGroup]) -> list[int]:
    return [len(group.ids) for group in groups]


def _by_order(held: OptimizerParameters, groups: Sequence[SavedGroup], order: list[str]) -> MatchedParameters:
    """Match by number: the numbers count the model's parameters in the order of the file."""
    _same_sizes(held, groups)
    at = {name: place for place, name in enumerate(order)}
    now = {name: place for place, name in enumerate(_model_order(held))}
    owners: dict[Key, torch.Tensor] = {}
    for index, (group, parameters) in enumerate(zip(groups, held.groups, strict=True)):
        in_file = sorted(parameters, key=lambda parameter: at[held.name(parameter)])
        in_model = sorted(parameters, key=lambda parameter: now[held.name(parameter)])
        if _ids(in_model) == _ids(parameters):
            meant: Sequence[torch.Tensor] = in_file
        elif _ids(in_file) == _ids(in_model):
            meant = parameters
        else:
            message = f"group {index} has its own order, and the model's order has changed since the file was saved"
            raise Refused(message, hint="it is not certain which state belongs to which parameter")
        owners.update(zip(group.ids, meant, strict=True))
    return MatchedParameters(owners, "model order")


def _model_order(held: OptimizerParameters) -> list[str]:
    """Return the first keys of all tensors in the order of the model, which is the order of `names`."""
    return [names[0] for names in held.names.values()]


def _ids(parameters: Sequence[torch.Tensor]) -> list[int]:
    return [id(parameter) for parameter in parameters]


def _same_sizes(held: OptimizerParameters, groups: Sequence[SavedGroup]) -> None:
    sizes, own = [len(group.ids) for group in groups], [len(group) for group in held.groups]
    if sizes != own:
        message = f"the file has groups of {sizes} parameters without names, but the optimizer has groups of {own}"
        raise Refused(message, hint="give it the same parameters in the same groups as when the file was saved")
