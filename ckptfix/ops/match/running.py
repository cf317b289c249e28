"""Two models that are run to compare what they compute: their weights, their input and their outputs.

Only this module, `verify` and `gradients` run models. They import torch when one of their functions is called.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, Refused
from ckptfix.extras import need_torch
from ckptfix.ops.target.model import failing

if TYPE_CHECKING:
    import torch

SEED = 20260117

STATISTICS = "running_mean", "running_var"
"""Buffers that are drawn as parameters are. They have no gradient, and matter if a run uses them."""

GIVE_INPUT = "--input FILE or --input module:factory gives the input"
"""The hint if a derived input does not do."""

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Positional and named arguments of both models."""


@dataclass(slots=True)
class Models:
    """The two models to run, and their input.

    Attributes:
        source, target: modules in float64 and evaluation mode, on the CPU.
        given: positional and named arguments of both; None to derive them from the source.
    """

    source: torch.nn.Module
    target: torch.nn.Module
    given: Arguments | None = None


def models(source: object, target: object, given: object = None) -> Models:
    """Return copies of two modules to run.

    Args:
        given: a tensor, a sequence of arguments, or a mapping of named ones; None to derive an input.

    Raises:
        Refused: one of them is not a module, or cannot be copied to the CPU in float64.
    """
    need_torch("verifying")
    import torch

    made = []
    for which, one in (("source", source), ("target", target)):
        if not isinstance(one, torch.nn.Module):
            raise Refused(f"the {which} to verify is a {type(one).__name__}, not a torch.nn.Module")
        what = f"the {which} to verify cannot be copied to the CPU in float64"
        with failing(partial(_refused, what, "without --verify only keys and shapes decide")):
            model = copy.deepcopy(one, _computed(one))
            model.to("cpu", torch.float64)
            model.eval()  # an overridden train() may return nothing
        made.append(model)
    return Models(made[0], made[1], None if given is None else _arguments(given))


def _computed(model: torch.nn.Module) -> dict[int, torch.Tensor]:
    """Return copies of the tensors that modules computed from parameters, which `copy.deepcopy` refuses, by their ids.

    The hook of ``torch.nn.utils.weight_norm`` leaves one in its module, and computes it anew in each run.
    """
    import torch

    held = (value for module in model.modules() for value in vars(module).values())
    return {id(one): one.detach().clone() for one in held if isinstance(one, torch.Tensor) and not one.is_leaf}


def read_input(path: str) -> object:
    """Return the input that torch.save wrote to `path`; no class is imported.

    Raises:
        CkptfixError: it cannot be read, or holds more than tensors and containers.
    """
    need_torch("verifying")
    import torch

    try:
        return torch.load(path, weights_only=True)
    except Exception as error:
        message = f"it is not an input that torch.save wrote: {type(error).__name__}"
        hint = "save a tensor, a tuple of arguments, or a dict of named ones"
        raise CkptfixError(message, path=path, hint=hint) from error


def _arguments(given: object) -> Arguments:
    if isinstance(given, Mapping):
        return (), {name: _double(value) for name, value in given.items()}
    if isinstance(given, list | tuple):
        return tuple(map(_double, given)), {}
    return (_double(given),), {}


def _double(value: object) -> object:
    import torch

    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _bare(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model in the wrappers DataParallel, DistributedDataParallel and torch.compile."""
    children = dict(model.named_children())
    while len(children) == 1 and children.keys() <= _WRAPPERS and not [*model.parameters(recurse=False)]:
        (model,) = children.values()
        children = dict(model.named_children())
    return model


def held_as(model: torch.nn.Module, names: Sequence[str]) -> torch.nn.Module:
    """Return a model whose keys begin with the wrappers that all `names` begin with, and with no others."""
    import torch

    if not names or set(names) <= model.state_dict().keys():
        return model
    inner = _bare(model)
    front: list[str] = []
    rest = list(names)
    while len(firsts := {name.partition(".")[0] for name in rest}) == 1 and firsts <= _WRAPPERS:
        front += firsts
        rest = [name.partition(".")[2] for name in rest]
    held = inner
    for name in reversed(front):
        holder = torch.nn.Module()
        holder.add_module(name, held)
        holder.forward = inner.forward
        held = holder.eval()
    return held


_WRAPPERS = {"module", "_orig_mod"}


def uncompiled() -> AbstractContextManager[object]:
    """Run the modules that torch.compile wraps as they are: compiling takes minutes, and outputs are the same."""
    import torch

    stance = getattr(torch.compiler, "set_stance", None)  # since torch 2.6
    return stance("force_eager") if stance is not None else nullcontext()


def draw(model: torch.nn.Module, seed: int) -> None:
    """Set random weights under which every tensor matters and no output is saturated."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict(keep_vars=True).items():
        learned = isinstance(tensor, torch.nn.Parameter) or name.endswith(STATISTICS)
        if not (isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and learned):
            continue
        drawn = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        if tensor.dim() > 1:
            tensor.data.copy_(drawn * (1.5 / max(1, tensor[0].numel())) ** 0.5)
        else:
            tensor.data.copy_(0.8 + 0.2 * drawn.abs())


@contextmanager
def kept_states(both: Models) -> Iterator[None]:
    """Restore the weights of the source afterwards."""
    import torch

    kept = {name: tensor.clone() for name, tensor in both.source.state_dict().items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in both.source.state_dict().items():
                tensor.copy_(kept[name])


@contextmanager
def plain_attention() -> Iterator[None]:
    """Run attention layer by layer, so that it can be seen which tensors it uses."""
    import torch

    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def guessed(both: Models) -> Arguments:
    """Return an input for both models, judging by the first layers of the source, then by those of the target.

    Raises:
        Refused: no such input runs; the error is that of the first one.
    """
    import torch

    trouble: Refused | None = None
    running: list[Arguments] = []
    for given in (*_guesses(both.source), *_guesses(both.target)):
        try:
            with torch.no_grad():
                outputs(both.source, given, "the model of --source")
                running.append(given)
                outputs(both.target, given, "the model of --like")
        except Refused as error:
            trouble = trouble or error
            continue
        return given
    if running:
        return running[0]
    trouble = trouble or Refused("the models do not show which input they take")
    trouble.hint = GIVE_INPUT
    raise trouble


def _guesses(model: torch.nn.Module) -> Iterator[Arguments]:
    """Yield inputs for a model, judging by its first layer."""
    import torch

    generator = torch.Generator().manual_seed(SEED)

    def numbers(*shape: int) -> Arguments:
        return (torch.randn(shape, generator=generator, dtype=torch.float64),), {}

    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            length = min(8, *(one.num_embeddings for one in model.modules() if isinstance(one, torch.nn.Embedding)
                              if one.num_embeddings > 2))  # fmt: skip
            yield (torch.randint(0, module.num_embeddings, (1, length), generator=generator),), {}
        elif isinstance(module, torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d):
            sides = len(module.kernel_size)
            size = _image_size(model) or {1: 4000, 2: 64, 3: 32}[sides]
            yield numbers(1, module.in_channels, *[size] * sides)
        elif isinstance(module, torch.nn.RNNBase):
            yield numbers(4, 5, module.input_size)
        elif isinstance(module, torch.nn.RNNCellBase):
            yield numbers(16, module.input_size)
        elif isinstance(module, torch.nn.Linear):
            yield numbers(16, module.in_features)
            yield numbers(4, 5, module.in_features)
        else:
            continue
        return


def _image_size(model: torch.nn.Module) -> int | None:
    """Return the size of images that a model names: `config.image_size` of transformers, `default_cfg` of timm."""
    model = _bare(model)
    embed = getattr(model, "patch_embed", None)
    for value in (getattr(getattr(model, "config", None), "image_size", None), getattr(embed, "img_size", None),
                  getattr(model, "image_size", None)):  # fmt: skip
        if isinstance(value, list | tuple) and value:
            value = value[-1]
        if isinstance(value, int):
            return value
    return None


def outputs(model: torch.nn.Module, arguments: Arguments, who: str) -> dict[str, Any]:
    """Return the floating-point tensors of a model's output, in order, by their keys or places in it.

    Raises:
        Refused: it cannot run.
    """
    with failing(partial(_refused, f"{who} cannot run on the input", None)):
        taken = {name: value for name, value in arguments[1].items() if _takes(model, name)}
        made = model(*arguments[0], **(taken if len(taken) else arguments[1]))
    return tensors_in(made)


def steady_outputs(model: torch.nn.Module, arguments: Arguments, who: str) -> dict[str, Any]:
    """Return `outputs`, of a model whose weights stay the same in a run.

    Raises:
        Refused: it cannot run, or changes its weights, as layers do that set theirs from the first input.
    """
    before = _sums(model)
    made = outputs(model, arguments, who)
    for name, total in _sums(model).items():
        if before.get(name, total) != total:
            hint = "its factory can load IN, or run the model once"
            raise Refused(f"{who} changes its weights when it runs", where=name, hint=hint)
    return made


def _sums(model: torch.nn.Module) -> dict[str, str]:
    """Return a text for each parameter of floating-point numbers, by which one shows that they changed."""
    return {name: str(float(tensor.detach().double().sum())) for name, tensor in model.named_parameters()
            if tensor.is_floating_point()}  # fmt: skip


def _refused(what: str, hint: str | None, error: BaseException) -> Refused:
    return Refused(f"{what}: {f'{type(error).__name__}: {error}'.splitlines()[0][:200]}", hint=hint)


def exits_refused() -> AbstractContextManager[None]:
    """Refuse models whose code ends the program; errors of it are refused where it is called."""
    return failing(partial(_refused, "the code of a model ends the run", None), (SystemExit,))


def _takes(model: torch.nn.Module, name: str) -> bool:
    parameters = inspect.signature(_bare(model).forward).parameters
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def tensors_in(value: object) -> dict[str, Any]:
    """Return the floating-point tensors in an output, in order, by their keys or places in it."""
    import torch

    if isinstance(value, torch.Tensor):
        return {"": value} if value.is_floating_point() else {}
    if isinstance(value, Mapping):
        rows = list(value.items())
    elif is_dataclass(value):
        rows = [(one.name, getattr(value, one.name)) for one in fields(value)]
    elif isinstance(value, list | tuple):
        rows = list(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    else:
        rows = []
    return {f"{key}/{name}": tensor for key, one in rows for name, tensor in tensors_in(one).items()}


def compared_names(wanted: Sequence[str], made: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the outputs of both models that are compared, by name, in the same order.

    Equal keys go together, and otherwise equal places. If one model returns more, only the first of each do.
    """
    if set(wanted) == set(made):
        return [*wanted], [*wanted]
    count = len(wanted) if len(wanted) == len(made) else 1
    return [*wanted[:count]], [*made[:count]]


def compared(wanted: Mapping[str, Any], made: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return the largest relative difference between the outputs, or the reason that they cannot be compared."""
    if not wanted or not made:
        return None, "a model returns no floating-point tensor"
    worst = 0.0
    for name, like in zip(*compared_names([*wanted], [*made]), strict=True):
        one, other = wanted[name], made[like]
        if one.squeeze().shape != other.squeeze().shape:
            return None, f"the outputs have the shapes {list(one.shape)} and {list(other.shape)}"
        apart = difference(one, other)
        if apart != apart:
            return None, "an output is not a number"
        worst = max(worst, apart)
    return worst, ""


def difference(one: Any, other: Any) -> float:
    """Return the greatest difference of two tensors, relative to the greatest number of the first."""
    one, other = one.squeeze(), other.squeeze()
    largest = float(one.abs().max()) if one.numel() else 0.0
    return float((one - other).abs().max()) / (largest or 1.0) if one.numel() else 0.0


def gradients(
    model: torch.nn.Module, arguments: Arguments, who: str, among: Sequence[str] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the outputs of a model, and the gradients of a random sum of them by the names of its parameters.

    Parameters that the run does not use have no gradient.

    Args:
        among: the outputs that count, by name, in order; None for all.

    Raises:
        Refused: it cannot run, or has no gradients.
    """
    import torch

    state = model.state_dict(keep_vars=True)
    kept = {name: one for name, one in state.items() if isinstance(one, torch.nn.Parameter) and one.is_floating_point()}
    for weight in kept.values():
        weight.requires_grad_(True)
        weight.grad = None
    with torch.enable_grad():
        made = outputs(model, arguments, who)
        sums = []
        for index, one in enumerate(made[name] for name in (made if among is None else among)):
            generator = torch.Generator().manual_seed(SEED + index)
            shape = one.squeeze().shape
            factors = torch.randn(shape, generator=generator, dtype=torch.float64).to(one.dtype)
            if one.requires_grad:
                sums.append((one.squeeze() * factors).sum())
        with failing(partial(_refused, f"{who} has no gradients", None)):
            if sums:
                torch.autograd.backward(sums)
    found = {name: one.grad.to_dense().detach() for name, one in kept.items() if one.grad is not None}
    for weight in kept.values():
        weight.grad = None
    return {name: one.detach() for name, one in made.items()}, found


_QUERIES = re.compile(r"n_?heads?|num_(?:attention_|q(?:uery)?_)?heads?|heads|encoder_attention_heads")
_KEYS = re.compile(r"(?:n|num)_(?:kv|key_value)_heads?|n_query_groups|num_query_groups|multi_query_group_num")


def head_counts(both: Models) -> list[tuple[int, int]]:
    """Return the possible numbers of query heads and of key and value heads, judging by attributes of the models."""
    found: dict[tuple[int, int], None] = {}
    for model in (both.source, both.target):
        for module in model.modules():
            for holder in (module, getattr(module, "config", None)):
                numbers = {name: value for name, value in getattr(holder, "__dict__", {}).items()
                           if type(value) is int and value > 0}  # fmt: skip
                queries = [value for name, value in numbers.items() if _QUERIES.fullmatch(name)]
                keys = [value for name, value in numbers.items() if _KEYS.fullmatch(name)]
                if getattr(holder, "multi_query", False) is True:
                    keys.append(1)
                found.update(dict.fromkeys((query, kv) for query in queries for kv in keys or [query]))
    return [one for one in found if one[0] > 1 and one[0] % one[1] == 0]
