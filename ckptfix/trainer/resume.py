"""Resuming from a checkpoint of this trainer, in any container and with any parallelism.

A training checkpoint restores everything: weights, optimizer, scheduler, gradient scaler, averages, epoch, losses, and
the state of the random generators of every process. With as many processes as before, the next epochs have exactly the
losses that they would have had without the stop. A bare checkpoint restores only weights. No pickle is run: weights are
read by ckptfix's own loader, which also reads the parameters in a whole pickled module, and the rest by
``torch.load(weights_only=True)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ckptfix.commands import command
from ckptfix.dataclass import dataclass
from ckptfix.errors import LoadMismatch, Refused
from ckptfix.formats import open_checkpoint
from ckptfix.loaders.state_dict import load_state_dict
from ckptfix.names import wrappers
from ckptfix.trainer import dcp
from ckptfix.trainer.parallel import inner
from ckptfix.trainer.processes import rank, world

if TYPE_CHECKING:
    from ckptfix.trainer.job import Training

STATE = "model_state_dict"
AVERAGED = "averaged_state_dict"
NEEDED = frozenset({"epoch", "optimizer_state_dict", "scheduler_state_dict", "rng_state", "losses", "args"})
"""Keys that a training checkpoint of this trainer has beside its state dict."""

MODULE_PARTS = ("_parameters", "_buffers")
"""Attributes in which a pickled nn.Module holds its tensors."""


@dataclass(frozen=True, slots=True)
class ResumeState:
    """The content of a checkpoint to resume from.

    Attributes:
        path: of the checkpoint.
        weights: tensors by the names of the model inside all wrappers.
        rest: the other values of a training checkpoint, by key; None for a bare one.
        averaged: the state dict of the averaged model in it, or None.
        args: settings of the run that saved it; empty for a bare one.
    """

    path: Path
    weights: dict[str, Tensor]
    rest: dict[str, Any] | None = None
    averaged: dict[str, Any] | None = None
    args: dict[str, Any] = field(default_factory=dict)


def read(path: Path) -> ResumeState:
    """Read the checkpoint at `path`, to the CPU.

    Raises:
        Refused: it is a checkpoint, but not this trainer's.
        CkptfixError: it is not a checkpoint, or is damaged.
    """
    if path.is_dir():
        return split(path, dcp.read(path))
    checkpoint = open_checkpoint(path)
    places = list(dict.fromkeys(entry.at for entry in checkpoint.entries))
    if STATE in places:
        return split(path, plain(path), load_state_dict(path, at=STATE, map_location="cpu"))
    if places == [""]:
        return ResumeState(path, named(load_state_dict(path, map_location="cpu")))
    parts = [place for place in places if place.split("/")[-1] in MODULE_PARTS]
    if parts:
        return ResumeState(path, named(of_module(path, parts)))
    raise foreign(path, "it has no model_state_dict, and is neither a state dict nor a module")


def foreign(path: Path, why: str) -> Refused:
    return Refused(
        f"this trainer did not write it: {why}",
        path=path,
        hint=f"run {command('inspect', path)} to see its content; --resume also accepts a state dict from any writer",
    )


def plain(path: Path) -> Any:
    """Load the whole object in a torch file that holds only plain values and tensors."""
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        # The class of the error depends on the container; all that matters is that reading it would need code to run.
        raise foreign(path, f"torch.load(weights_only=True) refuses it ({type(error).__name__})") from error


def split(path: Path, found: Mapping[str, Any], weights: Mapping[str, Tensor] | None = None) -> ResumeState:
    """Split a loaded object into its parts; `weights` are given if they have been read already."""
    if STATE not in found:
        if not all(isinstance(value, Tensor) for value in found.values()):
            raise foreign(path, f"it has no {STATE}")
        return ResumeState(path, named(found))
    missing = sorted(NEEDED - found.keys())
    if missing:
        raise foreign(path, f"it lacks {', '.join(missing)}")
    if not isinstance(found["args"], Mapping):
        raise foreign(path, "its args are not a dict")
    rest = {name: value for name, value in found.items() if name not in (STATE, AVERAGED)}
    return ResumeState(
        path, named(found[STATE] if weights is None else weights), rest, found.get(AVERAGED), rest["args"]
    )


def named(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return `state` under the names of the model inside all wrappers, without the entries that AveragedModel adds."""
    return {wrappers.unwrapped(name): value for name, value in state.items() if name not in wrappers.COMPANIONS}


def of_module(path: Path, places: Sequence[str]) -> dict[str, Tensor]:
    """Return the parameters and buffers in a pickled module, under their names in the model inside all wrappers."""
    found: dict[str, Tensor] = {}
    for place in places:
        # _modules/NAME leads to a submodule, and ()/0 to the argument from which torch.compile's module is made.
        steps = iter(place.split("/"))
        module = [name for step, name in zip(steps, steps, strict=False) if step == "_modules"]
        for name, value in load_state_dict(path, at=place, strip=None, map_location="cpu").items():
            found[wrappers.unwrapped(".".join([*module, name]))] = value
    return found


def mismatch(saved: ResumeState, model: nn.Module) -> None:
    """Refuse weights that do not fit `model`.

    Raises:
        LoadMismatch: names or shapes differ.
    """
    wanted = model.state_dict()
    # A pickled module also has buffers that are in no state dict.
    extra = saved.weights.keys() - wanted.keys() - {name for name, _ in model.named_buffers()}
    groups = {
        "missing": sorted(wanted.keys() - saved.weights.keys()),
        "unexpected": sorted(extra),
        "of a different shape": sorted(
            name for name in wanted.keys() & saved.weights.keys() if wanted[name].shape != saved.weights[name].shape
        ),
    }
    misfits = [f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
            for what, names in groups.items() if names]  # fmt: skip
    if misfits:
        raise LoadMismatch(
            f"its tensors do not fit this model: {'; '.join(misfits)}",
            path=saved.path,
            hint="use --model (and --full-size) to choose the model that was saved",
        )


def load_weights(saved: ResumeState, model: nn.Module) -> None:
    """Copy the weights into `model`, which is not wrapped yet.

    Raises:
        LoadMismatch: names or shapes differ.
    """
    mismatch(saved, model)
    wanted = model.state_dict()
    model.load_state_dict({name: value for name, value in saved.weights.items() if name in wanted})


def restore(saved: ResumeState, training: Training) -> list[str]:
    """Restore everything but the weights, and return lines for the log.

    Raises:
        LoadMismatch: the optimizer's state does not fit this model, or another part has an unexpected form.
    """
    if saved.rest is None:
        return [f"resumed {saved.path}: a bare state dict, so only the weights; optimizer, epoch and seeds start anew"]
    rest, names = saved.rest, ["optimizer", "scheduler"]
    try:
        training.optimizer.load_state_dict(optimizer_state(rest["optimizer_state_dict"], training))
        training.scheduler.load_state_dict(rest["scheduler_state_dict"])
        if training.scaler.is_enabled() and "scaler_state_dict" in rest:
            training.scaler.load_state_dict(rest["scaler_state_dict"])
            names.append("gradient scaler")
        if training.averaged is not None and saved.averaged is not None:
            training.averaged.load_state_dict(saved.averaged)
            names.append("averages")
        lines = restore_rng(rest["rng_state"], rest["args"].get("seed", 0) + rest["epoch"])
        training.losses[:] = map(float, rest["losses"])
    except (ValueError, LookupError, RuntimeError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise LoadMismatch(f"its training state does not fit: {reason}", path=saved.path) from error
    return [f"resumed {saved.path}: after epoch {rest['epoch']}, with {', '.join(names)} and RNG state", *lines]


def optimizer_state(saved: Mapping[str, Any], training: Training) -> dict[str, Any]:
    """Return an optimizer's state dict for the parameters of `training`, in the order of its optimizer.

    FSDP2 saves the state by parameter name, everything else by parameter number. Sharded parameters get their part of
    each whole tensor.
    """
    model = inner(training.model)
    parameters = list(model.parameters())
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    # In a checkpoint directory, every dict key is text.
    by_name: dict[Any, int] = {str(number): number for number in range(len(parameters))} | {
        wrappers.unwrapped(name): numbers[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    state = {}
    for key, values in saved["state"].items():
        number = by_name.get(key, key)
        state[number] = {name: part(value, parameters[number]) for name, value in values.items()}
    groups = [
        {**group, "params": [by_name.get(name, name) for name in group["params"]]} for group in saved["param_groups"]
    ]
    if all("param_names" not in group for group in training.optimizer.state_dict()["param_groups"]):
        for group in groups:
            group.pop("param_names", None)
    return {"state": state, "param_groups": groups}


def part(value: Any, parameter: Tensor) -> Any:
    """Return the part of an optimizer's state value that this process keeps."""
    if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape:
        return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
    return value


def restore_rng(saved: Mapping[str, Sequence[Any]], seed: int) -> list[str]:
    """Restore torch's generators, and return lines for the log. A process without a saved state starts from `seed`."""
    states, cuda = saved["torch"], saved["cuda"]
    if rank() >= len(states):
        torch.manual_seed(seed + rank())
    else:
        torch.set_rng_state(states[rank()])
        if torch.cuda.is_available():
            for number, state in enumerate(cuda[rank()][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(state, number)
    if len(states) != world():
        return [f"RNG state is from {len(states)} processes, and this run has {world()}: dropout masks will differ"]
    return []
