"""The group of processes that DDP and FSDP2 train in: torchrun's, or one started here."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import distributed
from torch.multiprocessing.spawn import ProcessExitedException, spawn

from ckptfix.errors import CkptfixError
from ckptfix.trainer import devices

Argument = TypeVar("Argument")


def rank() -> int:
    """The number of this process in its group; 0 where there is none."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def world() -> int:
    """Processes in the group; 1 where there is none."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def show_error(error: CkptfixError) -> None:
    """Print an error as the command line shows it: one line, and one with what to do."""
    print(f"ckptfix.trainer: error: {error}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)


def launch(work: Callable[[Argument], object], argument: Argument, processes: int, gpus: tuple[int, ...] = ()) -> int:
    """Call `work(argument)` in every process of a group: nccl where each has a GPU, gloo elsewhere.

    Under torchrun this process is one of the group; otherwise `processes` are started here, and have ended at
    the return. `work` must be importable: a function at the top of a module.

    Returns:
        0, or the exit status of the first process that stopped at an error, which it has printed.
    """
    if devices.in_group():
        share(work, argument, int(os.environ["WORLD_SIZE"]), gpus=gpus)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder, "meeting").as_uri()
        try:
            spawn(member, (processes, meeting, gpus, work, argument), nprocs=processes)
        except ProcessExitedException as error:
            return error.exit_code
    return 0


def member(
    number: int,
    processes: int,
    meeting: str,
    gpus: tuple[int, ...],
    work: Callable[[Argument], object],
    argument: Argument,
) -> None:
    """The whole life of process `number`, which meets the others at a file."""
    # What torchrun sets for its processes; `devices` reads it.
    os.environ.update(LOCAL_RANK=str(number), LOCAL_WORLD_SIZE=str(processes))
    # With a thread for every core in each, they would wait for one another.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    try:
        share(work, argument, processes, meeting, number, gpus)
    except CkptfixError as error:
        show_error(error)
        raise SystemExit(2) from None


def share(
    work: Callable[[Argument], object],
    argument: Argument,
    processes: int,
    meeting: str = "env://",
    number: int = -1,
    gpus: tuple[int, ...] = (),
) -> None:
    """Do the work of one process; -1 leaves its number to the environment."""
    place = devices.choose(gpus)
    if place.device.type == "cuda":
        # Collectives of Python objects go through the current device.
        torch.cuda.set_device(place.device)
    backend = "nccl" if place.device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=meeting, rank=number, world_size=processes)
    try:
        work(argument)
    finally:
        distributed.destroy_process_group()
