"""The wrappers that put their names before every key of a state dict, and the processes that DDP needs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import distributed, nn
from torch._dynamo import OptimizedModule
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

Argument = TypeVar("Argument")


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A way to wrap a model.

    Attributes:
        about: one line for the help.
        attribute: what it calls the model inside; this stands before every key.
        wrap: does it.
    """

    about: str
    attribute: str
    wrap: Callable[[nn.Module], nn.Module]


def data_parallel(model: nn.Module) -> nn.Module:
    """nn.DataParallel over every GPU; without one it passes batches on, and names keys all the same."""
    return nn.DataParallel(model)


def distributed_data_parallel(model: nn.Module) -> nn.Module:
    """DistributedDataParallel in the group of this process, which `launch` has made."""
    return DistributedDataParallel(model)


def compiled(model: nn.Module) -> nn.Module:
    """torch.compile as far as the graph: it needs no C++ compiler and names keys as every backend does."""
    return cast(nn.Module, torch.compile(model, backend="eager"))


WRAPPERS: dict[str, Wrapper] = {
    "dp": Wrapper("nn.DataParallel", "module", data_parallel),
    "ddp": Wrapper("DistributedDataParallel, in processes of their own", "module", distributed_data_parallel),
    "compile": Wrapper("torch.compile", "_orig_mod", compiled),
}


def wrap(model: nn.Module, wrappers: Sequence[str]) -> nn.Module:
    """`model` within these wrappers of the table, the first one innermost."""
    for name in wrappers:
        model = WRAPPERS[name].wrap(model)
    return model


def inner(model: nn.Module) -> nn.Module:
    """The model within all its wrappers."""
    while isinstance(model, nn.DataParallel | DistributedDataParallel | OptimizedModule):
        model = model._orig_mod if isinstance(model, OptimizedModule) else model.module
    return model


def rank() -> int:
    """The number of this process in its group; 0 where there is none."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def world() -> int:
    """Processes in the group; 1 where there is none."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def device() -> torch.device:
    """Where this process trains: its own GPU where there are as many as processes, else the CPU."""
    if torch.cuda.device_count() < world():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank())))


def launch(work: Callable[[Argument], object], argument: Argument, processes: int) -> None:
    """Call `work(argument)` in every process of a group: nccl where each has a GPU, gloo elsewhere.

    Under torchrun this process is one of the group; otherwise `processes` are started here, and have ended at
    the return. `work` must be importable: a function at the top of a module.
    """
    if "LOCAL_RANK" in os.environ:
        share(work, argument, int(os.environ["WORLD_SIZE"]))
        return
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder, "meeting").as_uri()
        spawn(member, (processes, meeting, work, argument), nprocs=processes)


def member(number: int, processes: int, meeting: str, work: Callable[[Argument], object], argument: Argument) -> None:
    """The whole life of process `number`, which meets the others at a file."""
    # With a thread for every core in each, they would wait for one another.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    share(work, argument, processes, meeting, number)


def share(
    work: Callable[[Argument], object], argument: Argument, processes: int, meeting: str = "env://", number: int = -1
) -> None:
    """Do the work of one process; -1 leaves its number to the environment."""
    backend = "nccl" if torch.cuda.device_count() >= processes else "gloo"
    distributed.init_process_group(backend, init_method=meeting, rank=number, world_size=processes)
    try:
        work(argument)
    finally:
        distributed.destroy_process_group()
