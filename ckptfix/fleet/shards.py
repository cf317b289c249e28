"""The shard that a scheduler has assigned to this process, according to its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ckptfix.fleet.states import PlanShard
from ckptfix.numbers import whole_number


def from_environment(environment: Mapping[str, str] | None = None) -> PlanShard | None:
    """Return the shard from the task of a Slurm array, or else from the rank of torchrun or an MPI-like launcher.

    None if neither is set.
    """
    values = os.environ if environment is None else environment

    def number(name: str) -> int | None:
        return whole_number(values.get(name))

    task, tasks = number("SLURM_ARRAY_TASK_ID"), number("SLURM_ARRAY_TASK_COUNT")
    if task is not None and tasks:
        first, step = number("SLURM_ARRAY_TASK_MIN") or 0, number("SLURM_ARRAY_TASK_STEP") or 1
        index = (task - first) // step
        return PlanShard(index, tasks) if 0 <= index < tasks else None
    rank, size = number("RANK"), number("WORLD_SIZE")
    return PlanShard(rank, size) if rank is not None and size and rank < size else None
