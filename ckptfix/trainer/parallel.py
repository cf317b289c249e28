"""Wrappers for several GPUs or processes, and the effect of each on the keys of a state dict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from ckptfix.dataclass import dataclass
from ckptfix.errors import Refused
from ckptfix.trainer.devices import CPU, TrainingDevice
from ckptfix.trainer.processes import world
from ckptfix.trainer.replicas import Replicas


@dataclass(frozen=True, slots=True)
class WrapMethod:
    """A way to wrap a model.

    Attributes:
        about: one line for the help.
        attribute: its name for the model inside, which begins every key; empty if keys are unchanged.
        wrap: function that wraps a model.
        spreads: whether it distributes the work to GPUs or processes; a stack has at most one such wrapper.
        in_group: whether it works in a group of processes, which `processes.launch` makes.
        innermost: whether it accepts only a bare model.
    """

    about: str
    attribute: str
    wrap: Callable[[nn.Module, TrainingDevice], nn.Module]
    spreads: bool = False
    in_group: bool = False
    innermost: bool = False


def data_parallel(model: nn.Module, place: TrainingDevice) -> nn.Module:
    """Wrap in nn.DataParallel over the GPUs of `place`; without GPUs it only passes batches on and renames keys."""
    if place.replicas is not None:
        ids = place.ids if len(place.ids) == place.replicas else None
        return Replicas(model, place.replicas, device_ids=ids, output_device=place.output, steps=place.steps)
    if not place.ids:
        return nn.DataParallel(model)
    return nn.DataParallel(model, device_ids=list(place.ids), output_device=place.output)


def distributed_data_parallel(model: nn.Module, place: TrainingDevice) -> nn.Module:
    """Wrap in DistributedDataParallel in the group of this process. All ranks then get rank 0's parameters."""
    return DistributedDataParallel(model, device_ids=[place.device] if place.ids else None)


def sharded(model: nn.Module, place: TrainingDevice) -> nn.Module:
    """Partition with FSDP2 over the group: the same module, whose parameters become DTensors with a part per process.

    The whole model is one unit, which is gathered for each pass, because parameters tied across submodules must be in
    the same unit.
    """
    mesh = init_device_mesh(place.device.type, (world(),))
    return cast(nn.Module, fully_shard(model, mesh=mesh))


def compiled(model: nn.Module, place: TrainingDevice) -> nn.Module:
    """Apply torch.compile with a backend that needs no C++ compiler; the keys are those of every backend."""
    return cast(nn.Module, torch.compile(model, backend="eager"))


def checkpointed(model: nn.Module, place: TrainingDevice) -> nn.Module:
    """Apply activation checkpointing to each child of `model` that has parameters.

    The wrapper's name, `_checkpoint_wrapped_module`, is hidden in a state dict. It shows in `named_parameters()` (so in
    the `param_names` of an optimizer made from them), in `_metadata` and in whole pickled modules. Children with
    BatchNorm are left alone: recomputing their forward pass would count every batch twice.
    """
    children = {
        child
        for child in model.children()
        if any(True for _ in child.parameters()) and not any(isinstance(part, _BatchNorm) for part in child.modules())
    }
    apply_activation_checkpointing(model, check_fn=lambda module: module in children)
    return model


WRAPPERS: dict[str, WrapMethod] = {
    "dp": WrapMethod("nn.DataParallel", "module", data_parallel, spreads=True),
    "ddp": WrapMethod(
        "DistributedDataParallel, in processes", "module", distributed_data_parallel, spreads=True, in_group=True
    ),
    "fsdp2": WrapMethod(
        "fully_shard, in processes; gathered keys are clean", "", sharded, spreads=True, in_group=True
    ),
    "compile": WrapMethod("torch.compile", "_orig_mod", compiled),
    "checkpoint": WrapMethod("activation checkpointing of each child", "", checkpointed, innermost=True),
}


def check(wrappers: Sequence[str]) -> None:
    """Refuse a stack of wrappers that torch does not run.

    Raises:
        Refused: a name is repeated, two wrappers distribute the work, or one that must be innermost is outside.
    """
    spreading = [name for name in wrappers if WRAPPERS[name].spreads]
    if len(spreading) > 1:
        raise Refused(f"{' and '.join(spreading)} each distribute the work: choose one")
    for position, name in enumerate(wrappers):
        if name in wrappers[:position]:
            raise Refused(f"{name} is named twice")
        if position and WRAPPERS[name].innermost:
            raise Refused(f"{name} accepts only the bare model: name it first, before {wrappers[0]}")


def in_group(wrappers: Sequence[str]) -> bool:
    """Return whether this stack works in a group of processes."""
    return any(WRAPPERS[name].in_group for name in wrappers)


def wrap(model: nn.Module, wrappers: Sequence[str], place: TrainingDevice = CPU) -> nn.Module:
    """Return `model` wrapped in these wrappers of the table, the first one innermost."""
    for name in wrappers:
        model = WRAPPERS[name].wrap(model, place)
    return model


def inner(model: nn.Module) -> nn.Module:
    """Return the model inside all its wrappers."""
    while isinstance(model, nn.DataParallel | DistributedDataParallel | OptimizedModule):
        model = model._orig_mod if isinstance(model, OptimizedModule) else model.module
    return model


def is_sharded(model: nn.Module) -> bool:
    """Return whether the parameters are distributed over the processes."""
    return any(isinstance(part, FSDPModule) for part in model.modules())
