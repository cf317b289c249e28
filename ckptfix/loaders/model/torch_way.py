"""Loading module by module as torch does, for models with a module that loads in its own way.

The walk is that of ``torch.nn.Module.load_state_dict`` (torch/nn/modules/module.py): each module sees the keys below
it, after the hooks of the modules above. The walk is rehearsed first, on copies of such modules without tensor data.
"""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import copy as copied
from types import MethodType
from typing import TYPE_CHECKING, Any

from ckptfix.checkpoint import TensorEntry
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, LoadMismatch
from ckptfix.loaders.model.fitting import Fit, shapes_differ
from ckptfix.loaders.model.overflow import out_of_range
from ckptfix.loaders.model.places import (
    ModuleSlot,
    identity,
    is_lazy,
    loads_own_way,
    local_tensors,
    overrides,
    put_back,
    shape_of,
)
from ckptfix.loaders.model.report import Mismatch
from ckptfix.loaders.model.so_far import listed, telling
from ckptfix.loaders.sources import EXTRA_STATE
from ckptfix.loaders.tensors import TensorMaker
from ckptfix.names import wrappers

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, slots=True)
class _Later:
    """A tensor that is not made yet, with the model's tensor that it is for."""

    entry: TensorEntry
    like: torch.Tensor | None


class LazyStateDict(MutableMapping[str, object]):
    """A state dict whose tensors are made on access. Assigned values are kept.

    Attributes:
        keeps: whether the model keeps the tensors, so that ties must survive; otherwise it copies them.
        given: keys accessed so far, here and in all state dicts that share this one's values -> count of numbers out of
            range for the model's dtype.
    """

    def __init__(
        self, maker: TensorMaker, values: dict[str, object], keeps: bool, given: dict[str, int] | None = None
    ) -> None:
        self.maker = maker
        self.raw = values
        self.keeps = keeps
        self.given = {} if given is None else given

    def __getitem__(self, key: str) -> object:
        value = self.raw[key]
        if not isinstance(value, _Later):
            return value
        made = self.maker(value.entry) if self.keeps else self.maker.once(value.entry)
        self.given[key] = 0
        if not self.keeps:
            self.maker.forget(value.entry)
            self.given[key] = 0 if value.like is None else out_of_range(made, value.like.dtype)
        return made if value.like is None else placed(made, value.like)

    def __setitem__(self, key: str, value: object) -> None:
        self.raw[key] = value

    def __delitem__(self, key: str) -> None:
        del self.raw[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def __len__(self) -> int:
        return len(self.raw)

    def __contains__(self, key: object) -> bool:
        return key in self.raw

    def blank(self, key: str) -> None:
        """Replace a plain tensor under `key` by one without data; the data is only verified."""
        import torch

        value = self.raw.get(key)
        if isinstance(value, _Later):
            if value.entry.kind == "dense" and not hasattr(value.like, "device_mesh"):
                self.maker.check((value.entry,))
                self.raw[key] = self.maker.meta(value.entry)
        elif type(value) in (torch.Tensor, torch.nn.Parameter):
            assert isinstance(value, torch.Tensor)
            if value.layout == torch.strided and not value.is_quantized:
                self.raw[key] = value.detach().to("meta")

    def shape(self, key: str) -> tuple[int, ...] | None:
        """Return the shape of the tensor under `key` without making it; None if there is no tensor."""
        value = self.raw.get(key)
        found = value.entry.shape if isinstance(value, _Later) else getattr(value, "shape", None)
        return None if found is None else tuple(found)

    def below(self, prefix: str) -> dict[str, LazyStateDict]:
        """Return child module -> the state dict with the keys below it."""
        rows: dict[str, dict[str, object]] = {}
        for key, value in self.raw.items():
            if key.startswith(prefix):
                child, dot, _ = key[len(prefix) :].partition(".")
                if dot:
                    rows.setdefault(child, {})[key] = value
        return {child: LazyStateDict(self.maker, values, self.keeps, self.given) for child, values in rows.items()}


Visit = Callable[["nn.Module", LazyStateDict, str], AbstractContextManager[None]]


def _walk(module: nn.Module, tensors: LazyStateDict, prefix: str, visit: Visit) -> None:
    """Visit `module`, then all modules below it while its visit lasts."""
    with visit(module, tensors, prefix):
        below = tensors.below(prefix)
        for name, child in module._modules.items():
            if child is not None:
                own = below.get(name, LazyStateDict(tensors.maker, {}, tensors.keeps))
                _walk(child, own, f"{prefix}{name}.", visit)


def _end(module: nn.Module, missing: list[str], unexpected: list[str]) -> None:
    """Run the hooks after a load. They may change both lists, and may end what the hooks before it began, as FSDP's."""
    from torch.nn.modules.module import _IncompatibleKeys

    for hook in module._load_state_dict_post_hooks.values():
        hook(module, _IncompatibleKeys(missing, unexpected))


def _state(fit: Fit, maker: TensorMaker, extra: Mapping[str, object], *, keeps: bool) -> LazyStateDict:
    """Return the state dict for the model: all of the file's entries under their new keys, except known misfits.

    It includes keys that the model does not have, since hooks may use them.
    """
    wrong = {mismatch.source for mismatch in fit.mismatched} | {mismatch.name for mismatch in fit.mismatched}
    values: dict[str, object] = {}
    for old, entry in fit.source.entries.items():
        new = fit.names.get(old)
        if new is not None and old not in wrong and new not in wrong:
            values[new] = _Later(entry, fit.target.tensors.get(new))
    for name, lead in fit.tied.items():
        if lead in values:
            values[name] = values[lead]
    values.update(extra)
    return LazyStateDict(maker, values, keeps)


def _versions(fit: Fit, assign: bool) -> Callable[[str], dict[str, object]]:
    modules = wrappers.renamed_modules(dict(fit.names))
    versions = {modules.get(path, path): value for path, value in fit.source.versions.items()}

    def local(prefix: str) -> dict[str, object]:
        found = dict(versions.get(prefix[:-1], {}))
        if assign:
            found["assign_to_params_buffers"] = True
        return found

    return local


def rehearse(fit: Fit, maker: TensorMaker, extra: Mapping[str, object], *, assign: bool) -> None:
    """Correct `fit` for what the model's own hooks and methods do with keys and shapes; the model is not changed."""
    # On a map of the file, storages cost no memory, so none has to be released.
    state = _state(fit, maker, extra, keeps=True)
    if overrides(fit.target.model, "load_state_dict"):
        maker.check(value.entry for value in state.raw.values() if isinstance(value, _Later))
        return
    missing: list[str] = []
    unexpected: list[str] = []
    wrong: list[Mismatch] = []
    versions = _versions(fit, assign)

    @contextmanager
    def visit(module: nn.Module, tensors: LazyStateDict, prefix: str) -> Iterator[None]:
        own_way = loads_own_way(module) and not any(map(is_lazy, local_tensors(module).values()))
        standin = _standin(module) if own_way or module._load_state_dict_post_hooks else module
        try:
            if own_way:
                errors: list[str] = []
                _load_blank(standin, tensors, prefix, versions(prefix), missing, unexpected, errors)
                wrong.extend(_as_mismatch(error, prefix, module, tensors) for error in errors)
            else:
                _check(module, tensors, prefix, missing, unexpected, wrong)
            yield
        finally:
            if own_way or missing or unexpected:
                with suppress(Exception):  # it concerns only the copy
                    _end(standin, missing, unexpected)

    _walk(fit.target.model, state, "", visit)
    _correct(fit, missing, unexpected, wrong)


def _load_blank(
    standin: nn.Module,
    tensors: LazyStateDict,
    prefix: str,
    version: dict[str, object],
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Load a copy of a module in its own way, but without data."""

    def blank(*_: object) -> None:
        # torch warns if it copies data to the meta device.
        for name, tensor in local_tensors(standin).items():
            if tensor.is_meta:
                tensors.blank(prefix + name)

    standin._load_state_dict_pre_hooks[-1] = blank
    try:
        standin._load_from_state_dict(tensors, prefix, version, True, missing, unexpected, errors)
    except CkptfixError:
        raise
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")


def _correct(fit: Fit, missing: list[str], unexpected: list[str], wrong: list[Mismatch]) -> None:
    """Translate the keys that torch's walk found missing or unexpected into the terms of `fit`."""
    known = set(fit.target.names)
    passed = {skip.name for skip in fit.skipped} | {mismatch.name for mismatch in fit.mismatched}
    back = {new: old for old, new in fit.names.items()}
    spelled = {name: name if name in known else wrappers.without_anywhere(name) for name in (*missing, *unexpected)}
    fit.missing = [name for name in dict.fromkeys(spelled[name] for name in missing) if name not in passed]
    over = [back.get(spelled[name], back.get(name, name)) for name in unexpected]
    fit.unexpected = [name for name in dict.fromkeys(over) if name not in passed]
    fit.mismatched += wrong
    lost = {*fit.missing, *(mismatch.name for mismatch in fit.mismatched)}
    pairs = {name: old for name, old in fit.pairs.items() if name not in lost}
    # Keys that hooks made from other keys of the file have no single source, so each is paired with itself.
    for name in fit.target.names:
        if name not in lost and name not in passed and name not in fit.tied:
            pairs.setdefault(name, name)
    fit.pairs = pairs


def _check(
    module: nn.Module,
    tensors: LazyStateDict,
    prefix: str,
    missing: list[str],
    unexpected: list[str],
    wrong: list[Mismatch],
) -> None:
    """Record the missing, unexpected and misshapen keys that torch's own method would report."""
    local = local_tensors(module)
    for name, tensor in local.items():
        key = prefix + name
        found, shape = tensors.shape(key), shape_of(tensor)
        if key not in tensors:
            missing.append(key)
        elif found is None:
            wrong.append(Mismatch(key, key, shape, None, "the file has no tensor there"))
        elif shape is not None and found != shape and not (shape == () and found == (1,)):
            wrong.append(Mismatch(key, key, shape, found, shapes_differ(found, shape)))
    takes = overrides(module, "set_extra_state")
    if takes and prefix + EXTRA_STATE not in tensors:
        missing.append(prefix + EXTRA_STATE)
    for key in tensors:
        name, dot, _ = key[len(prefix) :].partition(".")
        known = name in module._modules if dot else name in local or (takes and name == EXTRA_STATE)
        if key.startswith(prefix) and not known:
            unexpected.append(key)


def _standin(module: nn.Module) -> nn.Module:
    """Return a copy of `module` alone with empty tensors, so that loading it has no effect on the model."""
    import torch

    copy = object.__new__(type(module))
    for name, value in module.__dict__.items():
        copy.__dict__[name] = copied(value) if type(value) in (dict, list, set, OrderedDict) else value

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        try:
            made = torch.empty_like(tensor, device="meta")
        except (RuntimeError, NotImplementedError):
            made = tensor.detach().clone()
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made

    for held in (copy.__dict__["_parameters"], copy.__dict__["_buffers"]):
        held.update({name: empty(tensor) for name, tensor in held.items() if tensor is not None})
    for hooks in (copy.__dict__["_load_state_dict_pre_hooks"], copy.__dict__["_load_state_dict_post_hooks"]):
        hooks.update({key: _rebound(hook, module, copy) for key, hook in hooks.items()})
    return copy


def _rebound(hook: Any, module: nn.Module, standin: nn.Module) -> Any:
    """Return `hook` as it would have been registered on `standin`, so that it cannot change the model."""
    if isinstance(hook, MethodType):
        return MethodType(hook.__func__, standin) if hook.__self__ is module else hook
    if not hasattr(hook, "with_module"):
        return hook
    new = copied(hook)
    new.hook = _rebound(hook.hook, module, standin)
    if hook.with_module and hook.module() is module:
        new.module = weakref.ref(standin)
    return new


def _as_mismatch(error: str, prefix: str, module: nn.Module, tensors: LazyStateDict) -> Mismatch:
    """Turn an error message of torch into a mismatch with the key and the shapes that it is about."""
    for name, tensor in local_tensors(module).items():
        key = prefix + name
        if key in tensors and f"{key}:" in error.partition("copying")[0]:
            shape, found = tuple(tensor.shape), tensors.shape(key) or ()
            return Mismatch(key, key, shape, found, shapes_differ(found, shape))
    return Mismatch(prefix.removesuffix(".") or "the model", "", None, None, " ".join(error.split()))


def perform(fit: Fit, maker: TensorMaker, extra: Mapping[str, object], *, assign: bool) -> dict[str, int]:
    """Load what fits, in torch's way.

    With `assign`, the model gets its own tensors back after an error.

    Returns:
        Key of the model -> count of numbers that left the range of its dtype, for each copied tensor.

    Raises:
        LoadMismatch: a module refused what it accepted in the rehearsal.
        DamagedFile: the file changed in the meantime. Each error lists what the modules had received.
    """
    state = _state(fit, maker, extra, keeps=assign)

    def given() -> str:
        if assign:
            return "the model has its own tensors again"
        names = listed(list(state.given), [*state.given, *fit.target.names]) if state.given else "nothing"
        return f"the model's modules had already received {names}"

    with telling(given, maker.checkpoint.path), put_back(fit.target.places if assign else ()):
        _perform(fit, state, assign=assign)
        maker.reading.refuse_changes()
    return dict(state.given)


def _perform(fit: Fit, state: LazyStateDict, *, assign: bool) -> None:
    model = fit.target.model
    before: dict[object, list[ModuleSlot]] = {}
    for place in fit.target.places:
        before.setdefault(identity(place.tensor), []).append(place)
    errors: list[str] = []
    if overrides(model, "load_state_dict"):
        how: dict[str, bool] = {"assign": True} if assign else {}
        model.load_state_dict(state, strict=False, **how)
    else:
        _torch_walk(model, state, _versions(fit, assign), errors)
    if errors and not fit.mismatched:
        message = "; ".join(" ".join(error.split()) for error in errors[:5])
        raise LoadMismatch(message, path=state.maker.checkpoint.path)
    for places in before.values() if assign else ():
        first = getattr(places[0].module, places[0].name)
        for place in places[1:]:
            setattr(place.module, place.name, first)


def _torch_walk(
    model: nn.Module, state: LazyStateDict, versions: Callable[[str], dict[str, object]], errors: list[str]
) -> None:
    missing: list[str] = []
    unexpected: list[str] = []

    @contextmanager
    def visit(module: nn.Module, tensors: LazyStateDict, prefix: str) -> Iterator[None]:
        try:
            module._load_from_state_dict(tensors, prefix, versions(prefix), True, missing, unexpected, errors)
            yield
        except BaseException:
            with suppress(Exception):
                _end(module, missing, unexpected)
            raise
        _end(module, missing, unexpected)

    _walk(model, state, "", visit)


def placed(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `value` with the number of dimensions of `like`, and distributed in the same way (DTensor)."""
    if value.dim() == 1 and not is_lazy(like) and like.dim() == 0:
        value = value[0]
    mesh = getattr(like, "device_mesh", None)
    if mesh is None:
        return value
    try:
        from torch.distributed.tensor import distribute_tensor
    except ImportError:  # before torch 2.5
        from torch.distributed._tensor import distribute_tensor  # type: ignore[attr-defined]

    # Every rank has read the file itself, so nothing is sent. Before torch 2.7, the first rank sends what it read.
    nothing_sent = "src_data_rank" in inspect.signature(distribute_tensor).parameters
    options = {"src_data_rank": None} if nothing_sent else {}
    return distribute_tensor(value.to(mesh.device_type), mesh, getattr(like, "placements", None), **options)
