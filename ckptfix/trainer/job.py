"""Description of one training run, and its state while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

from ckptfix.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """The settings of one run.

    Attributes:
        model: name in `TASKS`; None uses the resumed training checkpoint's, or the demo.
        parallel: names in `WRAPPERS`, the innermost first.
        epochs: passes over the data, including those before a resumed checkpoint.
        seed: seed of the model, the data and its order; None uses the resumed checkpoint's, or 0.
        rate: learning rate from here on; None keeps the task's, or the resumed one.
        gpus: ids of GPUs; empty for all.
        output_device: the GPU on which DataParallel gathers outputs; None for its first one.
        replicas: run DataParallel as this many copies, and log what each sees in the first batches; None for
            DataParallel itself.
        log_replicas: log the copies in all batches.
        log_steps: log the four steps of DataParallel too.
        amp: use autocast, with a gradient scaler.
        averaged: keep a running average of the weights.
        full_size: use the model with its published shapes.
        param_names: make the optimizer from ``named_parameters()``, so that its state dict lists their names.
        resume: checkpoint to resume from, or None.
        save: checkpoint to write, or None.
        wrapped, nested, container: see `ckptfix.trainer.save.save`.
        outputs: file for the trained model's outputs on the first samples, or None.
        log: called with progress lines, by the first process only.
    """

    model: str | None = None
    parallel: tuple[str, ...] = ()
    epochs: int = 2
    seed: int | None = None
    rate: float | None = None
    gpus: tuple[int, ...] = ()
    output_device: int | None = None
    replicas: int | None = None
    log_replicas: bool = False
    log_steps: bool = False
    amp: bool = False
    averaged: bool = False
    full_size: bool = False
    param_names: bool = False
    resume: Path | None = None
    save: Path | None = None
    wrapped: bool = True
    nested: bool = False
    container: str = "zip"
    outputs: Path | None = None
    log: Callable[[str], None] = field(default=print)


@dataclass(frozen=True, slots=True)
class Training:
    """A model in training, still wrapped, with everything that resuming needs.

    Attributes:
        losses: mean loss of each epoch so far.
        averaged: the running average of the weights, or None.
        args: the settings of the job that a checkpoint stores.
    """

    model: nn.Module
    optimizer: Adam
    scheduler: StepLR
    scaler: torch.amp.GradScaler
    averaged: AveragedModel | None = None
    losses: list[float] = field(default_factory=list)
    args: dict[str, Any] = field(default_factory=dict)
