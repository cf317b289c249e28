"""Finding and reading the optimizer states in a file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import TypeAlias

from ckptfix.checkpoint import Checkpoint, tree
from ckptfix.checkpoint.address import given, join, shown
from ckptfix.checkpoint.tree import Item, TensorValue
from ckptfix.errors import NoSuchTensor, Refused
from ckptfix.formats.torch import calls
from ckptfix.formats.torch.object import MAX_ADDRESS
from ckptfix.loaders.model.report import named
from ckptfix.loaders.objects import Builder, has_parts, tree_of
from ckptfix.loaders.optimizer.parameters import Key, SavedGroup, State
from ckptfix.loaders.tensors import TensorMaker
from ckptfix.loaders.values import ForeignObject
from ckptfix.names import kinds
from ckptfix.ops import tensor_classes
from ckptfix.words import where_else

Saved: TypeAlias = Mapping[str, object]
Build: TypeAlias = Callable[[], tuple[Saved, list[object]]]


def optimizers_in(checkpoint: Checkpoint, maker: TensorMaker) -> Iterator[tuple[str, Build]]:
    """Yield (address, function that builds it) for every dict with ``state`` and ``param_groups``, flattened or not.

    The function returns the dict, and all values that were made for it.
    """
    seen: set[int] = set()
    stack: list[tuple[str, Item]] = [("", tree_of(checkpoint).root)]
    while stack:
        at, item = stack.pop()
        if not has_parts(item) or item.identity in seen or isinstance(item, TensorValue):
            continue
        seen.add(item.identity)
        if kinds.is_optimizer(tree.named(item).keys()):
            yield at, partial(_built, checkpoint, maker, item)
        elif len(at) <= MAX_ADDRESS:
            stack += [(join(at, name), child) for name, child in reversed(list(item.children()))]


def _built(checkpoint: Checkpoint, maker: TensorMaker, item: Item) -> tuple[Saved, list[object]]:
    builder = Builder(checkpoint, maker)
    value = builder.build(item)
    made = list(builder.made.values())
    if not isinstance(value, Mapping):  # an object of a foreign class, which the caller refuses
        return {}, made
    return _as_torch_has_it(value), made


def _as_torch_has_it(value: Saved) -> Saved:
    return value if value.keys() >= kinds.OPTIMIZER else _nested(value)


_STATE, _GROUPS = "state.", "param_groups."


def _nested(flat: Mapping[str, object]) -> dict[str, object]:
    """Return a flattened state in the form of torch.optim, with one group for each parameter, and names as keys.

    Raises:
        Refused: a parameter has state but no group, or the names are not those of torch.distributed.checkpoint.
    """
    other = [key for key in flat if not key.startswith((_STATE, _GROUPS))]
    if other:
        raise Refused(f"the optimizer's state is flattened, but not by torch.distributed.checkpoint: {named(other)}")
    found: dict[str, dict[str, dict[str, object]]] = {_STATE: {}, _GROUPS: {}}
    for key, value in flat.items():
        kind = _STATE if key.startswith(_STATE) else _GROUPS
        name, _, option = key.removeprefix(kind).rpartition(".")
        found[kind].setdefault(name, {})[option] = value
    loose = [name for name in found[_STATE] if name not in found[_GROUPS]]
    if loose:
        raise Refused(f"the state has parameters that are in no group: {named(loose)}")
    groups = [{**options, "params": [name]} for name, options in found[_GROUPS].items()]
    return {"state": found[_STATE], "param_groups": groups}


def saved_optimizer(checkpoint: Checkpoint, maker: TensorMaker, at: str | None) -> tuple[str, Mapping[str, object]]:
    """Return (address, saved state) of the optimizer in the file."""
    found = list(optimizers_in(checkpoint, maker))
    addresses = [address for address, _ in found]
    if at is not None:
        found = [row for row in found if row[0] == given(at)]
        if not found:
            hint = where_else(addresses) if addresses else "the file holds no optimizer"
            raise NoSuchTensor(f"no optimizer at {at!r}", path=checkpoint.path, hint=hint)
    if not found:
        hint = "a training checkpoint has one beside the model's state dict; run `ckptfix inspect` to see what it holds"
        raise Refused("it has no optimizer state", path=checkpoint.path, hint=hint)
    if len(found) > 1:
        hint = f"choose one with at={found[0][0]!r}"
        listed = ", ".join(shown(at, to_type=True) for at in addresses)
        raise Refused(f"it holds {len(found)} optimizers: {listed}", path=checkpoint.path, hint=hint)
    address, build = found[0]
    saved, made = build()
    foreign = next((value for value in made if isinstance(value, ForeignObject)), None)
    if foreign is not None:
        what = _class_of(foreign)
        library = tensor_classes.library_of(what)
        message = f"it holds an object of class {what}, which is not imported"
        advice: str | None = None
        if library is not None:
            message = f"it holds tensors of class {what}, which only {library.name} can rebuild"
            advice = f"run `{library.statement}`, then torch.load(..., weights_only=True) and optimizer.load_state_dict"
        raise Refused(message, path=checkpoint.path, where=address, hint=advice)
    return address, saved


def _class_of(foreign: ForeignObject) -> str:
    """Return the class of a foreign object. For a tensor made by a rebuild call of torch, the tensor's class."""
    name = f"{foreign.module}.{foreign.name}"
    place = {calls.FROM_TYPE.full: 1, calls.FROM_TYPE_V1.full: 1, calls.WRAPPER.full: 0}.get(name)
    given = foreign.args[place] if place is not None and len(foreign.args) > place else None
    return f"{given.module}.{given.name}" if isinstance(given, ForeignObject) else name


def parts(saved: Mapping[str, object]) -> tuple[list[SavedGroup], State]:
    """Return the groups and the state in an optimizer's state dict.

    Raises:
        Refused: it does not have the form that torch.optim writes.
    """
    groups, state = saved["param_groups"], saved["state"]
    if not isinstance(groups, list | tuple) or not isinstance(state, Mapping):
        raise Refused("the optimizer's state does not have the form that torch.optim writes")
    found = []
    for group in groups:
        if not isinstance(group, Mapping) or not isinstance(group.get("params"), list | tuple):
            raise Refused("a parameter group has no list of parameters")
        ids, names = list(group["params"]), group.get("param_names")
        if names is not None and (not isinstance(names, list | tuple) or len(names) != len(ids)):
            raise Refused("a parameter group has a different number of names than of parameters")
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        found.append(SavedGroup(ids, None if names is None else [str(name) for name in names], options))
    everything = [key for group in found for key in group.ids]
    if not all(isinstance(key, int | str) for key in everything):
        raise Refused("a parameter is neither a number nor a name")
    if len(set(everything)) != len(everything):
        raise Refused("a parameter is in two groups")
    return found, _numbered(state, everything)


def _numbered(state: State, keys: Collection[Key]) -> State:
    """Return the state under the keys of the groups, if its own keys are the same numbers as text (`was_flattened`)."""
    names = {str(key): key for key in keys if isinstance(key, int) and key not in state}
    return {names.get(str(key), key) if isinstance(key, str) and key not in keys else key: own
            for key, own in state.items()}  # fmt: skip


def was_flattened(saved: Mapping[str, object], groups: Iterable[SavedGroup]) -> bool:
    """Return whether numbers became text, as in torch.distributed.checkpoint, so that no order is that of the model.

    It flattens an object into names such as ``optim.state.0.exp_avg``, lists what each rank wrote, and rebuilds the
    object in that order.
    """
    state, keys = saved["state"], {key for group in groups for key in group.ids}
    return isinstance(state, Mapping) and any(isinstance(key, int) and str(key) in state for key in keys)
