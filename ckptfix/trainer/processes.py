"""The group of processes in which DDP and FSDP2 train: started by torchrun, or here."""

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
    """Return the number of this process in its group; 0 without a group."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def world() -> int:
    """Return the number of processes in the group; 1 without a group."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def show_error(error: CkptfixError) -> None:
    """Print an error as the command line shows it: one line, and another with the hint."""
    print(f"ckptfix.trainer: error: {error}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)


def launch(work: Callable[[Argument], object], argument: Argument, processes: int, gpus: tuple[int, ...] = ()) -> int:
    """Call `work(argument)` in every process of a group, with nccl if each process has a GPU, and otherwise gloo.

    Under torchrun, this process is one of the group. Otherwise `processes` are started here, and have ended when this
    returns. `work` must be importable: a function at the top level of a module.

    Returns:
        0, or the exit status of the first process that stopped with an error; that process has printed the error.
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
    """Run process `number` from start to end; it meets the others at a file."""
    # These are the variables that torchrun sets for its processes; `devices` reads them.
    os.environ.update(LOCAL_RANK=str(number), LOCAL_WORLD_SIZE=str(processes))
    # With one thread per core in each process, they would wait for each other.
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
    """Do the work of one process; with -1, its number comes from the environment."""
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
