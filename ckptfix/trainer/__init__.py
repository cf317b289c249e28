"""A small reference trainer: it makes real checkpoints by real training, wrapped as by DataParallel, DDP and FSDP2.

`tasks` defines the models and their data, `devices` chooses devices, `parallel` wraps, `processes` starts groups of
processes, `train` trains, `save` writes checkpoints, and `resume` continues from them. The trainer runs on the CPU
alone, and uses GPUs if there are any. ``python -m ckptfix.trainer --help`` shows its command line.
"""

import sys

from ckptfix.errors import MissingExtra
from ckptfix.extras import need_torch

try:
    need_torch("the trainer")
except MissingExtra as error:
    # While `python -m` looks for the module to run, argv[0] is "-m", and no caller is there to catch an error.
    if sys.argv[:1] != ["-m"]:
        raise
    print(f"ckptfix.trainer: error: {error}\nhint: {error.hint}", file=sys.stderr)
    sys.exit(2)

from ckptfix.trainer.job import Training, TrainingJob
from ckptfix.trainer.parallel import WRAPPERS, inner, wrap
from ckptfix.trainer.processes import launch
from ckptfix.trainer.save import CONTAINERS
from ckptfix.trainer.tasks import TASKS, LearningTask
from ckptfix.trainer.train import outputs, run

__all__ = [
    "CONTAINERS",
    "TASKS",
    "WRAPPERS",
    "LearningTask",
    "Training",
    "TrainingJob",
    "inner",
    "launch",
    "outputs",
    "run",
    "wrap",
]
