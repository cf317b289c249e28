"""Proof of a matching: both models, with the same random weights, must give the same outputs.

The model of IN gets random weights. These are saved, matched and written exactly as IN itself would be, and loaded into
the model of TARGET. If the outputs for one input are equal, the matching is right for any weights, so the values in IN
do not matter. Where several matchings are possible, the ones tried are the first proposals, and the order in which each
model uses its tensors. Only this module runs both models, and imports torch, when it is called.
"""

from __future__ import annotations

import copy
import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptfix.align.result import MatchedPair, Matching
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, NoMatch, Refused
from ckptfix.extras import need_torch
from ckptfix.names.slots import Slot
from ckptfix.ops.match.fused import Operations

if TYPE_CHECKING:
    import torch

SAME = 1e-6
"""Relative difference of outputs in float64 up to which they are equal. Other values of eps make less; one exchanged
tensor of random weights makes much more."""

NOTHING = 1e-12
"""Greatest gradient up to which a tensor does not matter: the bias of keys changes no attention, but for rounding."""

PROVED = "verified on outputs"
"""Reason to pair tensors; it overrides all others."""

SEED = 20260117

Convert = Callable[[str, Matching, Operations], "Mapping[str, torch.Tensor]"]
"""Return the weights of a file under the names of the target, as the matching writes them."""


@dataclass(slots=True)
class Models:
    """The two models to run, and their input.

    Attributes:
        source, target: modules in float64 and evaluation mode, on the CPU.
        given: positional and named arguments of both; None to derive them from the source.
    """

    source: torch.nn.Module
    target: torch.nn.Module
    given: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None


@dataclass(slots=True)
class Verdict:
    """A matching, and the difference of the outputs that it gives.

    Attributes:
        difference: the greatest difference, relative to the greatest output; None if they cannot be compared.
        why: the reason for which they cannot be compared.
        matching, operations: the matching that gives equal outputs.
    """

    matching: Matching
    operations: Operations
    difference: float | None = None
    why: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def equal(self) -> bool:
        return self.difference is not None and self.difference <= SAME


def models(source: object, target: object, given: object = None) -> Models:
    """Return copies of two modules to run.

    Args:
        given: a tensor, a sequence of arguments, or a mapping of named ones; None to derive an input.

    Raises:
        Refused: one of them is not a module.
    """
    need_torch("verifying")
    import torch

    for which, one in (("source", source), ("target", target)):
        if not isinstance(one, torch.nn.Module):
            raise Refused(f"the {which} to verify is a {type(one).__name__}, not a torch.nn.Module")
    made = [copy.deepcopy(one).to("cpu", torch.float64).eval() for one in (source, target)]  # type: ignore[attr-defined]
    return Models(made[0], made[1], None if given is None else _arguments(given))


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


def _arguments(given: object) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(given, Mapping):
        return (), {name: _double(value) for name, value in given.items()}
    if isinstance(given, list | tuple):
        return tuple(map(_double, given)), {}
    return (_double(given),), {}


def _double(value: object) -> object:
    import torch

    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def prove(both: Models, matching: Matching, operations: Operations, slots: Sequence[Slot], convert: Convert) -> Verdict:
    """Return the first of the possible matchings that gives equal outputs, or the verdict on the first proposals.

    Args:
        slots: of the source.

    Raises:
        Refused: the model of IN lacks a key of IN, or has another shape there; or it cannot run.
    """
    with _prepared(both, slots) as trial:
        first: Verdict | None = None
        for label, candidate in _candidates(both, trial.arguments, matching, operations, slots):
            filled = partial(convert, trial.file, candidate, operations)
            done = trial.verdict(Verdict(candidate, operations), filled, label)
            if done.equal:
                done.matching = _settled(candidate, matching, _mattering(both.source, trial.arguments))
                done.operations = replace(operations, refused=False)
                return done
            first = first or done
        assert first is not None
        if first.difference is not None:
            made = convert(trial.file, first.matching, operations)
            first.notes = tuple(_first_apart(both, trial.arguments, first.matching, made))
        return first


def compare(both: Models, slots: Sequence[Slot], convert: Callable[[str], Mapping[str, Any]]) -> Verdict:
    """Return the verdict on one way to convert the weights of the source.

    Args:
        slots: of the source.
        convert: returns the weights of a file under the names of the target.

    Raises:
        Refused: as `prove`.
    """
    with _prepared(both, slots) as trial:
        done = Verdict(Matching("rules", (), ()), Operations())
        return trial.verdict(done, partial(convert, trial.file), "the rules")


@dataclass(frozen=True, slots=True)
class _Trial:
    """Both models with random weights, and what the source makes of the input.

    Attributes:
        file: the weights of the source.
        arguments: positional and named arguments of both models.
        wanted: outputs of the source.
    """

    both: Models
    file: str
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]]
    wanted: Sequence[Any]

    def verdict(self, done: Verdict, convert: Callable[[], Mapping[str, Any]], label: str) -> Verdict:
        """Compare the outputs that converted weights give, and note the result in `done`."""
        import torch

        try:
            self.both.target.load_state_dict(convert(), strict=False)
            made = _outputs(self.both.target, self.arguments, "the model of --like")
            done.difference, done.why = _compared(self.wanted, made)
        except (CkptfixError, RuntimeError) as error:
            done.why = str(error).splitlines()[0]
        if done.equal:
            given = (*self.arguments[0], *self.arguments[1].values())
            shown = ", ".join(str(list(one.shape)) for one in given if isinstance(one, torch.Tensor))
            done.notes = (f"{PROVED}: they differ by {done.difference:.1g} for an input of {shown} ({label})",)
        return done


@contextmanager
def _prepared(both: Models, slots: Sequence[Slot]) -> Iterator[_Trial]:
    """Set random weights in both models, run the source, and yield what a trial needs."""
    import torch

    both.source = _held_as(both.source, [slot.name for slot in slots])
    with (
        redirect_stdout(sys.stderr), _plain_attention(), _uncompiled(), torch.no_grad(),
        tempfile.TemporaryDirectory() as folder,
    ):  # fmt: skip
        _draw(both.source, SEED)
        _draw(both.target, SEED + 1)  # what no pair fills must not be equal by accident
        state = both.source.state_dict()
        for slot in slots:
            if slot.name not in state or tuple(state[slot.name].shape) != slot.shape:
                hint = "--source is the model that IN was saved from"
                raise Refused("the model of --source has no such key of this shape", where=slot.name, hint=hint)
        file = str(Path(folder, "source.pth"))
        torch.save({slot.name: state[slot.name] for slot in slots}, file)
        arguments = both.given or _guessed(both.source)
        yield _Trial(both, file, arguments, _outputs(both.source, arguments, "the model of --source"))


def _bare(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model in the wrappers DataParallel, DistributedDataParallel and torch.compile."""
    children = dict(model.named_children())
    while len(children) == 1 and children.keys() <= _WRAPPERS and not [*model.parameters(recurse=False)]:
        (model,) = children.values()
        children = dict(model.named_children())
    return model


def _held_as(model: torch.nn.Module, names: Sequence[str]) -> torch.nn.Module:
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


def _uncompiled() -> AbstractContextManager[object]:
    """Run the modules that torch.compile wraps as they are: compiling takes minutes, and outputs are the same."""
    import torch

    stance = getattr(torch.compiler, "set_stance", None)  # since torch 2.6
    return stance("force_eager") if stance is not None else nullcontext()


def _settled(found: Matching, before: Matching, mattering: set[str]) -> Matching:
    """Return the matching with the proved pairs certain: those in modules that change the outputs.

    A tensor that does not matter for the input, such as an expert that is not chosen, stays as open as it was.
    """
    modules = {(_module(pair.source), _module(pair.target)) for pair in found.pairs if pair.source in mattering}
    doubts = {pair.source: pair.instead for pair in before.pairs}
    pairs = [
        replace(pair, confidence=1.0, why=PROVED, instead=())
        if pair.source in mattering or (_module(pair.source), _module(pair.target)) in modules
        else replace(pair, instead=doubts.get(pair.source, ()))
        for pair in found.pairs
    ]
    return replace(found, pairs=tuple(pairs))


def _module(name: str) -> str:
    return name.rpartition(".")[0] or name


def _mattering(model: torch.nn.Module, arguments: tuple[tuple[Any, ...], Mapping[str, Any]]) -> set[str]:
    """Return the names of the tensors that change the outputs of a model: by gradient, and buffers by use."""
    import torch

    state = model.state_dict(keep_vars=True)
    found = {name for name in _used(model, arguments) if not isinstance(state[name], torch.nn.Parameter)}
    parameters = [one for one in state.values() if isinstance(one, torch.nn.Parameter) and one.is_floating_point()]
    weights = {id(one): one for one in parameters}
    for weight in weights.values():
        weight.requires_grad_(True)
        weight.grad = None
    with torch.enable_grad():
        made = [one for one in _outputs(model, arguments, "the model of --source") if one.requires_grad]
        generator = torch.Generator().manual_seed(SEED)
        sums = [(one * torch.randn(one.shape, generator=generator, dtype=one.dtype)).sum() for one in made]
        if sums:
            torch.autograd.backward(sums)
    changing = {key for key, one in weights.items() if one.grad is not None and float(one.grad.abs().max()) > NOTHING}
    return found | {name for name, tensor in state.items() if id(tensor) in changing}


def _draw(model: torch.nn.Module, seed: int) -> None:
    """Set random weights under which every tensor matters and no output is saturated."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict(keep_vars=True).items():
        learned = isinstance(tensor, torch.nn.Parameter) or name.endswith(("running_mean", "running_var"))
        if not (isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and learned):
            continue
        drawn = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        if tensor.dim() > 1:
            tensor.data.copy_(drawn * (1.5 / max(1, tensor[0].numel())) ** 0.5)
        else:
            tensor.data.copy_(0.8 + 0.2 * drawn.abs())


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Run attention layer by layer, so that it can be seen which tensors it uses."""
    import torch

    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _guessed(model: torch.nn.Module) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return an input for a model, judging by its first layer.

    Raises:
        Refused: the first layer does not show what the model takes.
    """
    import torch

    generator = torch.Generator().manual_seed(SEED)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            length = min(8, *(one.num_embeddings for one in model.modules() if isinstance(one, torch.nn.Embedding)
                              if one.num_embeddings > 2))  # fmt: skip
            return (torch.randint(0, module.num_embeddings, (1, length), generator=generator),), {}
        if isinstance(module, torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d):
            sides = len(module.kernel_size)
            size = _image_size(model) or {1: 4000, 2: 64, 3: 32}[sides]
            shape = (1, module.in_channels, *[size] * sides)
            return (torch.randn(shape, generator=generator, dtype=torch.float64),), {}
        if isinstance(module, torch.nn.Linear):
            return (torch.randn(2, module.in_features, generator=generator, dtype=torch.float64),), {}
    raise Refused("the models do not show which input they take", hint="add --input FILE, or --input module:factory")


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


def _outputs(model: torch.nn.Module, arguments: tuple[tuple[Any, ...], Mapping[str, Any]], who: str) -> list[Any]:
    """Return the floating-point tensors of a model's output, in order.

    Raises:
        Refused: it cannot run.
    """
    try:
        taken = {name: value for name, value in arguments[1].items() if _takes(model, name)}
        made = model(*arguments[0], **(taken if len(taken) else arguments[1]))
    except Exception as error:
        shown = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        hint = "--input FILE or --input module:factory gives the input"
        raise Refused(f"{who} cannot run on the input: {shown}", hint=hint) from error
    found: list[Any] = []
    _collect(made, found)
    return found


def _takes(model: torch.nn.Module, name: str) -> bool:
    parameters = inspect.signature(_bare(model).forward).parameters
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def _collect(value: object, found: list[Any]) -> None:
    import torch

    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            found.append(value)
    elif isinstance(value, Mapping):
        for one in value.values():
            _collect(one, found)
    elif isinstance(value, list | tuple):
        for one in value:
            _collect(one, found)


def _compared(wanted: Sequence[Any], made: Sequence[Any]) -> tuple[float | None, str]:
    """Return the greatest relative difference of outputs, or why there is none.

    If one model gives more tensors than the other, the first of each are compared.
    """
    if not wanted or not made:
        return None, "a model returns no floating-point tensor"
    pairs = list(zip(wanted, made, strict=False)) if len(wanted) == len(made) else [(wanted[0], made[0])]
    worst = 0.0
    for one, other in pairs:
        if one.squeeze().shape != other.squeeze().shape:
            return None, f"the outputs have the shapes {list(one.shape)} and {list(other.shape)}"
        difference = _difference(one, other)
        if difference != difference:
            return None, "an output is not a number"
        worst = max(worst, difference)
    return worst, ""


def _difference(one: Any, other: Any) -> float:
    one, other = one.squeeze(), other.squeeze()
    largest = float(one.abs().max()) if one.numel() else 0.0
    return float((one - other).abs().max()) / (largest or 1.0) if one.numel() else 0.0


def _candidates(
    both: Models,
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]],
    matching: Matching,
    operations: Operations,
    slots: Sequence[Slot],
) -> Iterator[tuple[str, Matching]]:
    """Yield the possible matchings: the first proposals, then by order of use what is open, then everything."""
    yield "the first proposals", matching
    if operations.taken and not matching.ambiguous:
        return
    try:
        used = [_used(model, arguments) for model in (both.source, both.target)]
    except Refused:
        return
    open_ = {pair.source for pair in matching.ambiguous}, {pair.target for pair in matching.ambiguous}
    if open_[0]:
        made = _by_use(used, matching, slots, both, *open_)
        if made is not None:
            yield "open pairs in the order of use", made
    if not operations.taken:
        every = {slot.name for slot in slots}, set(both.target.state_dict())
        made = _by_use(used, matching, slots, both, *every)
        if made is not None:
            yield "the order of use", made


def _used(model: torch.nn.Module, arguments: tuple[tuple[Any, ...], Mapping[str, Any]]) -> list[str]:
    """Return the names of the tensors of a model in the order in which a run first uses them."""
    from torch.overrides import TorchFunctionMode

    state = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    order: dict[str, None] = {}

    def look(value: object) -> None:
        if isinstance(value, list | tuple):
            for one in value:
                look(one)
        elif isinstance(value, dict):
            look(list(value.values()))
        else:
            order.update(dict.fromkeys(names.get(id(value), ())))

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") != "__get__":
                look(args)
                look(kwargs or {})
            return func(*args, **(kwargs or {}))

    with Watch():
        _outputs(model, arguments, "the model")
    return list(order)


def _by_use(
    used: Sequence[Sequence[str]],
    matching: Matching,
    slots: Sequence[Slot],
    both: Models,
    ours: set[str],
    theirs: set[str],
) -> Matching | None:
    """Return the matching with the pairs among `ours` and `theirs` made anew: the n-th tensor used of each shape.

    None if the two use different numbers of some shape, or if nothing changes.
    """
    states = both.source.state_dict(), both.target.state_dict()
    rows: list[dict[object, list[str]]] = []
    for names, state, concerned in zip(used, states, (ours, theirs), strict=True):
        found: dict[object, list[str]] = {}
        for name in names:
            if name in concerned:
                leaf = name.rpartition(".")[2]
                key = tuple(state[name].shape), leaf if leaf.startswith("running_") else leaf == "bias"
                found.setdefault(key, []).append(name)
        rows.append(found)
    if {key: len(names) for key, names in rows[0].items()} != {key: len(names) for key, names in rows[1].items()}:
        return None
    to = {old: new for key, names in rows[0].items() for old, new in zip(names, rows[1][key], strict=True)}
    taken = set(to.values())
    before = {pair.source: pair for pair in matching.pairs}
    if any(pair.operation and (pair.source in to or pair.target in taken) for pair in matching.pairs):
        return None
    pairs = []
    for slot in slots:
        if slot.name in to:
            pairs.append(MatchedPair(slot.name, to[slot.name], 1.0, "order of use"))
        elif slot.name in before and before[slot.name].target not in taken:
            pairs.append(before[slot.name])
    if {(pair.source, pair.target) for pair in pairs} == {(pair.source, pair.target) for pair in matching.pairs}:
        return None
    done, filled = {pair.source for pair in pairs}, {pair.target for pair in pairs}
    return replace(
        matching,
        pairs=tuple(pairs),
        rules=(),
        left=tuple(name for name in matching.left if name not in done),
        missing=tuple(name for name in matching.missing if name not in filled),
    )


def _first_apart(
    both: Models,
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]],
    matching: Matching,
    filled: Mapping[str, Any],
) -> Iterator[str]:
    """Yield a sentence on the first module, in order of the run, whose output differs from its counterpart's."""
    both.target.load_state_dict(filled, strict=False)
    to = {pair.source.rpartition(".")[0]: pair.target.rpartition(".")[0] for pair in matching.pairs}
    seen: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    hooks = []
    for model, outputs, names in ((both.source, seen[0], to), (both.target, seen[1], set(to.values()))):
        for name, module in model.named_modules():
            if name and name in names:
                hooks.append(module.register_forward_hook(_keeper(outputs, name)))
    try:
        _outputs(both.source, arguments, "the model of --source")
        _outputs(both.target, arguments, "the model of --like")
    finally:
        for hook in hooks:
            hook.remove()
    for name, one in seen[0].items():
        other = seen[1].get(to[name])
        if other is not None and one.shape == other.shape and _difference(one, other) > SAME:
            yield f"the first layers that differ are {name} of IN and {to[name]} of TARGET"
            return


def _keeper(outputs: dict[str, Any], name: str) -> Callable[[Any, Any, Any], None]:
    def keep(module: object, given: object, made: object) -> None:
        found: list[Any] = []
        _collect(made, found)
        if found:
            outputs.setdefault(name, found[0].detach().clone())

    return keep


def refusal(done: Verdict) -> NoMatch:
    """Return the error for outputs that differ, or that cannot be compared."""
    if done.difference is None:
        return NoMatch(f"the outputs cannot be compared: {done.why}", lines=done.notes)
    message = f"the outputs of the two models differ by {done.difference:.1g} of the greatest one"
    hint = "equal keys and other settings (eps, activations) may be the reason; without --verify only names decide"
    return NoMatch(message, lines=done.notes, hint=hint)
