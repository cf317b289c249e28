"""The wrappers for several GPUs or processes, and what each does to the keys of a state dict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from ckptfix.errors import Refused
from ckptfix.trainer.devices import CPU, Place
from ckptfix.trainer.processes import world
from ckptfix.trainer.replicas import Replicas


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A way to wrap a model.

    Attributes:
        about: one line for the help.
        attribute: what it calls the model inside, which stands before every key; empty where keys are unchanged.
        wrap: does it.
        spreads: it shares the work out, to GPUs or processes: a stack has one such wrapper at most.
        in_group: it works in a group of processes, which `processes.launch` makes.
        innermost: it takes a bare model only.
    """

    about: str
    attribute: str
    wrap: Callable[[nn.Module, Place], nn.Module]
    spreads: bool = False
    in_group: bool = False
    innermost: bool = False


def data_parallel(model: nn.Module, place: Place) -> nn.Module:
    """nn.DataParallel over the GPUs of `place`; without one it passes batches on, and names keys all the same."""
    if place.replicas is not None:
        ids = place.ids if len(place.ids) == place.replicas else None
        return Replicas(model, place.replicas, device_ids=ids, output_device=place.output, steps=place.steps)
    if not place.ids:
        return nn.DataParallel(model)
    return nn.DataParallel(model, device_ids=list(place.ids), output_device=place.output)


def distributed_data_parallel(model: nn.Module, place: Place) -> nn.Module:
    """DistributedDataParallel in the group of this process. A parameter of rank 0 is every rank's from then on."""
    return DistributedDataParallel(model, device_ids=[place.device] if place.ids else None)


def sharded(model: nn.Module, place: Place) -> nn.Module:
    """FSDP2 over the group: the same module, its parameters now DTensors of which each process has a part.

    All of the model is one unit, which is gathered whole for each pass: parameters tied across submodules must
    be of one unit.
    """
    mesh = init_device_mesh(place.device.type, (world(),))
    return cast(nn.Module, fully_shard(model, mesh=mesh))


def compiled(model: nn.Module, place: Place) -> nn.Module:
    """torch.compile as far as the graph: it needs no C++ compiler and names keys as every backend does."""
    return cast(nn.Module, torch.compile(model, backend="eager"))


def checkpointed(model: nn.Module, place: Place) -> nn.Module:
    """Activation checkpointing of each child of `model` that has parameters.

    Its name, `_checkpoint_wrapped_module`, is hidden in a state dict, and shows in `named_parameters()` (so in the
    `param_names` of an optimizer made from them), in `_metadata` and in whole pickled modules. Children with
    BatchNorm are left alone: recomputing their pass would count every batch twice.
    """
    children = {
        child
        for child in model.children()
        if any(True for _ in child.parameters()) and not any(isinstance(part, _BatchNorm) for part in child.modules())
    }
    apply_activation_checkpointing(model, check_fn=lambda module: module in children)
    return model


WRAPPERS: dict[str, Wrapper] = {
    "dp": Wrapper("nn.DataParallel", "module", data_parallel, spreads=True),
    "ddp": Wrapper(
        "DistributedDataParallel, in processes", "module", distributed_data_parallel, spreads=True, in_group=True
    ),
    "fsdp2": Wrapper(
        "fully_shard, in processes; gathered keys are clean", "", sharded, spreads=True, in_group=True
    ),
    "compile": Wrapper("torch.compile", "_orig_mod", compiled),
    "checkpoint": Wrapper("activation checkpointing of each child", "", checkpointed, innermost=True),
}


def check(wrappers: Sequence[str]) -> None:
    """Refuse a stack that torch does not run.

    Raises:
        Refused: one name twice, two that spread the work, or one outside that must be innermost.
    """
    spreading = [name for name in wrappers if WRAPPERS[name].spreads]
    if len(spreading) > 1:
        raise Refused(f"{' and '.join(spreading)} each spread the work: choose one")
    for position, name in enumerate(wrappers):
        if name in wrappers[:position]:
            raise Refused(f"{name} is there twice")
        if position and WRAPPERS[name].innermost:
            raise Refused(f"{name} takes the bare model: name it first, before {wrappers[0]}")


def in_group(wrappers: Sequence[str]) -> bool:
    """Whether this stack works in a group of processes."""
    return any(WRAPPERS[name].in_group for name in wrappers)


def wrap(model: nn.Module, wrappers: Sequence[str], place: Place = CPU) -> nn.Module:
    """`model` within these wrappers of the table, the first one innermost."""
    for name in wrappers:
        model = WRAPPERS[name].wrap(model, place)
    return model


def inner(model: nn.Module) -> nn.Module:
    """The model within all its wrappers."""
    while isinstance(model, nn.DataParallel | DistributedDataParallel | OptimizedModule):
        model = model._orig_mod if isinstance(model, OptimizedModule) else model.module
    return model


def is_sharded(model: nn.Module) -> bool:
    """Whether the parameters are spread over the processes."""
    return any(isinstance(part, FSDPModule) for part in model.modules())
