"""A small reference trainer: real checkpoints of real training, wrapped as DataParallel, DDP, FSDP2 and compile do.

`tasks` says what is trained and on which data, `devices` where, `parallel` wraps, `processes` starts what runs in
several of them, `train` trains, `save` writes and `resume` continues from what was written. It runs on the CPU alone,
and on GPUs where there are some. ``python -m ckptfix.trainer --help`` is its command line.
"""

from ckptfix.trainer.parallel import WRAPPERS, inner, wrap
from ckptfix.trainer.processes import launch
from ckptfix.trainer.save import CONTAINERS
from ckptfix.trainer.tasks import TASKS, Task
from ckptfix.trainer.train import Job, Training, outputs, run

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
