"""A model as a loader sees it: the keys of its state dict, and the tensors behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING

from ckptfix.dataclass import dataclass
from ckptfix.errors import WrongType
from ckptfix.loaders.sources import EXTRA_STATE
from ckptfix.names.slots import Slot

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, slots=True)
class ModuleSlot:
    """A place where a module holds a tensor: ``module.name``, with `key` as its key in the state dict."""

    key: str
    module: nn.Module
    name: str
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Target:
    """The values that can be loaded into a model.

    Attributes:
        model: the model, wrapped or not.
        tensors: key in its state dict -> parameter or persistent buffer, in definition order.
        extra: key of a value that is not a tensor -> the module whose extra state it is; None for any other value.
        places: the places where its modules hold these tensors. Their keys are module paths, and may contain wrapper
            names that the state dict does not have.
        aliases: key -> first key of the same tensor, for every further key of a tied tensor.
        own_way: whether a module saves or loads in its own way (a hook, an overridden method), so that only torch's
            own walk through all modules is right for it.
        reshaped: keys whose shape a hook or method may change on loading, in their own module or one above it.
    """

    model: nn.Module
    tensors: dict[str, torch.Tensor]
    extra: dict[str, nn.Module | None]
    places: tuple[ModuleSlot, ...]
    aliases: dict[str, str]
    own_way: bool
    reshaped: frozenset[str] = frozenset()

    @property
    def names(self) -> list[str]:
        return [*self.tensors, *self.extra]

    def leaves(self) -> frozenset[str]:
        """Return the last components of the keys of values that are not tensors."""
        return frozenset(name.rpartition(".")[2] for name in self.extra) | {EXTRA_STATE}

    def slots(self) -> list[Slot]:
        """Return a slot per tensor, for the matchers."""
        return [
            Slot(name, shape_of(tensor) or (), dtype_of(tensor), self.aliases.get(name))
            for name, tensor in self.tensors.items()
        ]


def target(model: nn.Module) -> Target:
    """Return `model` as a target to load into, without touching its tensors.

    Raises:
        WrongType: it is not an nn.Module.
    """
    from torch import nn

    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        hint = "pass the model itself, not its state dict"
        raise WrongType(f"the model is not a torch.nn.Module but a {kind}", hint=hint)
    places = tuple(_places(model))
    takers: dict[str, nn.Module | None] = {
        f"{path}{EXTRA_STATE}": module for path, module in _paths(model) if overrides(module, "set_extra_state")
    }
    own_way = any(_own_way(module) for module in model.modules()) or overrides(model, "load_state_dict")
    if not own_way:
        tensors = {place.key: place.tensor for place in places}
        return Target(model, tensors, takers, places, _aliases(tensors), False)
    tensors = {}
    extra: dict[str, nn.Module | None] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if name.rpartition(".")[2] == EXTRA_STATE or not is_tensor_like(value):
            extra[name] = takers.get(name)
        else:
            tensors[name] = value
    if overrides(model, "load_state_dict"):
        return Target(model, tensors, extra, places, _aliases(tensors), True)
    ways = tuple(path for path, module in _paths(model) if loads_own_way(module))
    changing = {identity(place.tensor) for place in places if place.key.startswith(ways)} if ways else set()
    reshaped = frozenset(name for name, tensor in tensors.items() if identity(tensor) in changing)
    return Target(model, tensors, extra, places, _aliases(tensors), True, reshaped)


def _aliases(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return key -> first key of the same tensor, for every further key of a tied tensor."""
    first: dict[object, str] = {}
    firsts = {name: first.setdefault(identity(tensor), name) for name, tensor in tensors.items()}
    return {name: known for name, known in firsts.items() if known != name}


def _paths(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path with a trailing dot, module) in state dict order; a shared module occurs at each of its paths."""
    stack: list[tuple[str, nn.Module]] = [("", model)]
    while stack:
        path, module = stack.pop()
        yield path, module
        children = [(f"{path}{name}.", child) for name, child in module._modules.items() if child is not None]
        stack.extend(reversed(children))


def _places(model: nn.Module) -> Iterator[ModuleSlot]:
    for path, module in _paths(model):
        for name, tensor in local_tensors(module).items():
            yield ModuleSlot(path + name, module, name, tensor)


def local_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of `module` itself."""
    passing = module._non_persistent_buffers_set
    buffers = {name: value for name, value in module._buffers.items() if name not in passing}
    return {name: value for name, value in (*module._parameters.items(), *buffers.items()) if value is not None}


def loads_own_way(module: nn.Module) -> bool:
    """Return whether `module` loads its own tensors in a different way than nn.Module does."""
    if module._load_state_dict_pre_hooks:
        return True
    if not overrides(module, "_load_from_state_dict"):
        return False
    from torch.nn.modules.batchnorm import _NormBase

    return type(module)._load_from_state_dict is not _NormBase._load_from_state_dict


_HOOKS = ("_load_state_dict_post_hooks", "_state_dict_hooks", "_state_dict_pre_hooks")
_METHODS = ("_save_to_state_dict", "state_dict")


def _own_way(module: nn.Module) -> bool:
    """Return whether `module` saves or loads in a different way than nn.Module does.

    BatchNorm does not count: it overrides a method only to allow files without ``num_batches_tracked``, which is a rule
    here.
    """
    if loads_own_way(module) or any(getattr(module, hooks, None) for hooks in _HOOKS):
        return True
    return any(overrides(module, name) for name in _METHODS)


def overrides(module: nn.Module, method: str) -> bool:
    from torch import nn

    if method in vars(module):
        return True
    return getattr(type(module), method) is not getattr(nn.Module, method)


@contextmanager
def put_back(places: Iterable[ModuleSlot]) -> Iterator[None]:
    """Restore the tensors that the modules hold now, after an error."""
    before = [(place, getattr(place.module, place.name)) for place in places]
    try:
        yield
    except BaseException:
        for place, tensor in before:
            if getattr(place.module, place.name, None) is not tensor:
                with suppress(Exception):  # the others still get theirs
                    setattr(place.module, place.name, tensor)
        raise


def is_tensor_like(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def is_lazy(tensor: torch.Tensor) -> bool:
    """Return whether a parameter has no shape yet and takes that of the file."""
    return bool(_without_shape()(tensor))


@cache
def _without_shape() -> Callable[[torch.Tensor], bool]:
    """Return torch's function; importing it for each tensor would take longer than the call."""
    from torch.nn import parameter

    return parameter.is_lazy


def shape_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the shape, or None if any shape fits."""
    return None if is_lazy(tensor) else tuple(tensor.shape)


def dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def identity(tensor: torch.Tensor) -> object:
    """Return an id that is equal for the same tensor object, and for tensors on the same part of the same memory."""
    import torch

    if tensor.is_meta or is_lazy(tensor) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return id(tensor)
    if tensor.layout != torch.strided or tensor.is_quantized or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
