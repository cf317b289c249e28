"""A small reference trainer: real checkpoints of real training, wrapped as DataParallel, DDP, FSDP2 and compile do.

`tasks` says what is trained and on which data, `devices` where, `parallel` wraps, `processes` starts what runs in
several of them, `train` trains, `save` writes and `resume` continues from what was written. It runs on the CPU alone,
and on GPUs where there are some. ``python -m ckptfix.trainer --help`` is its command line.
"""

import sys

from ckptfix.errors import MissingExtra
from ckptfix.extras import need_torch

try:
    need_torch("the trainer")
except MissingExtra as error:
    # While `python -m` looks for the module that it is to run, argv[0] is "-m": no caller is there to catch an error.
    if sys.argv[:1] != ["-m"]:
        raise
    print(f"ckptfix.trainer: error: {error}\nhint: {error.hint}", file=sys.stderr)
    sys.exit(2)

from ckptfix.trainer.job import Job, Training
from ckptfix.trainer.parallel import WRAPPERS, inner, wrap
from ckptfix.trainer.processes import launch
from ckptfix.trainer.save import CONTAINERS
from ckptfix.trainer.tasks import TASKS, Task
from ckptfix.trainer.train import outputs, run

__all__ = [
    "CONTAINERS",
    "TASKS",
    "WRAPPERS",
    "Job",
    "Task",
    "Training",
    "inner",
    "launch",
    "outputs",
    "run",
    "wrap",
]
