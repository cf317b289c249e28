"""A small reference trainer: real checkpoints of real training, wrapped as DataParallel, DDP and compile wrap them.

`models` says what is trained and on which data, `parallel` wraps, `train` trains, `save` writes. It runs on the CPU
alone, and on GPUs where there are some. ``python -m ckptfix.trainer --help`` is its command line.
"""

from ckptfix.trainer.models import TASKS, Task
from ckptfix.trainer.parallel import WRAPPERS, inner, launch, wrap
from ckptfix.trainer.save import FORMATS, save
from ckptfix.trainer.train import Job, Training, fit, outputs, run

__all__ = [
    "FORMATS",
    "TASKS",
    "WRAPPERS",
    "Job",
    "Task",
    "Training",
    "fit",
    "inner",
    "launch",
    "outputs",
    "run",
    "save",
    "wrap",
]
