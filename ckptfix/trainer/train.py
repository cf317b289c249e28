"""Training: a task, wrapped as asked, on synthetic data; the same seed gives the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR

from ckptfix.trainer.models import SAMPLES, TASKS, Task
from ckptfix.trainer.parallel import device, inner, rank, world, wrap
from ckptfix.trainer.save import save

BATCH = 32
"""Samples of one step, over all processes together."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one run is to do.

    Attributes:
        model: name in `TASKS`.
        parallel: names in `WRAPPERS`, the innermost first.
        epochs: passes over the data.
        seed: of the model, the data and its order.
        save: the checkpoint to write; None for none.
        wrapped, nested, container: see `ckptfix.trainer.save.save`.
        outputs: file for what the trained model makes of the first samples; None for none.
        log: told the loss of each epoch, by the first process only.
    """

    model: str = "demo"
    parallel: tuple[str, ...] = ()
    epochs: int = 2
    seed: int = 0
    save: Path | None = None
    wrapped: bool = True
    nested: bool = False
    container: str = "zip"
    outputs: Path | None = None
    log: Callable[[str], None] = field(default=print)


@dataclass(frozen=True, slots=True)
class Training:
    """A trained model, still wrapped, and what resuming needs; `losses` has the mean of each epoch."""

    model: nn.Module
    optimizer: Adam
    scheduler: StepLR
    losses: tuple[float, ...]


def run(job: Job) -> Training:
    """Train as `job` says and write what it asks for. With DDP, call this through `parallel.launch`."""
    torch.manual_seed(job.seed)
    task = TASKS[job.model]
    model = wrap(task.model().to(device()), job.parallel)
    training = fit(model, task, epochs=job.epochs, seed=job.seed, log=job.log)
    if rank() == 0:
        if job.save is not None:
            save(training, job.save, wrapped=job.wrapped, nested=job.nested, container=job.container)
        if job.outputs is not None:
            torch.save(outputs(inner(model), task, job.seed), job.outputs)
    return training


def fit(
    model: nn.Module, task: Task, *, epochs: int, seed: int = 0, log: Callable[[str], None] = lambda line: None
) -> Training:
    """Train `model`, which may be wrapped, on its device; in a group, each process takes its share of each batch."""
    where = next(model.parameters()).device
    inputs, targets = (tensor.to(where) for tensor in samples(task, seed))
    optimizer = Adam(model.parameters(), lr=task.rate)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.5)
    losses = []
    model.train()
    for epoch in range(epochs):
        total = torch.zeros((), device=where)
        for chosen in batches(seed + epoch):
            share = chosen[rank() :: world()].to(where)
            loss = task.loss(model(inputs[share]), targets[share])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(share) / SAMPLES
        scheduler.step()
        if distributed.is_initialized():
            distributed.all_reduce(total)
        losses.append(total.item())
        if rank() == 0:
            log(f"epoch {epoch + 1}/{epochs}  loss {losses[-1]:.4f}")
    return Training(model, optimizer, scheduler, tuple(losses))


def samples(task: Task, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of `task`, the same ones for the same seed."""
    return task.data(torch.Generator().manual_seed(seed))


def batches(seed: int) -> Iterator[Tensor]:
    """Indices of the samples of each batch, in an order of this seed's own."""
    yield from torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed)).split(BATCH)


@torch.no_grad()
def outputs(model: nn.Module, task: Task, seed: int = 0) -> Tensor:
    """What `model` makes of the first batch of samples, in evaluation mode, on the CPU."""
    where = next(model.parameters()).device
    made: Tensor = model.eval()(samples(task, seed)[0][:BATCH].to(where))
    return made.cpu()
