"""Training of a task, wrapped as requested, on synthetic data. The same seed gives the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

from ckptfix.errors import Refused
from ckptfix.trainer import devices, resume
from ckptfix.trainer import save as saving
from ckptfix.trainer.job import Training, TrainingJob
from ckptfix.trainer.parallel import inner, is_sharded, wrap
from ckptfix.trainer.processes import rank, world
from ckptfix.trainer.replicas import Replicas
from ckptfix.trainer.tasks import TASKS, LearningTask

SHOWN = 4
"""Batches of the first epoch whose replicas are logged: all batches of the tutorial."""

HALF = {"cuda": torch.float16, "cpu": torch.bfloat16}
"""The dtype that autocast computes in; float16 is slow on a CPU."""


def resolved(job: TrainingJob) -> tuple[TrainingJob, resume.ResumeState | None]:
    """Return `job` with every setting filled in, and the checkpoint that it resumes.

    Raises:
        Refused: the checkpoint has a different model or seed than the job, or a model that this trainer does not have.
        CkptfixError: the checkpoint cannot be read, or is not this trainer's.
    """
    saved = None if job.resume is None else resume.read(job.resume)
    args = saved.args if saved else {}
    for name in ("model", "seed"):
        asked = getattr(job, name)
        if saved and name in args and asked not in (None, args[name]):
            raise Refused(f"it was trained with {name} {args[name]}, not {asked}", path=saved.path)
    model = job.model or args.get("model", "demo")
    if model not in TASKS:
        raise Refused(f"its model is {model!r}, which this trainer does not have", path=saved.path if saved else None)
    job = replace(
        job,
        model=model,
        seed=args.get("seed", 0) if job.seed is None else job.seed,
        amp=job.amp or bool(args.get("amp")),
        averaged=job.averaged or bool(args.get("averaged")),
        full_size=job.full_size or bool(args.get("full_size")),
    )
    return job, saved


def built(job: TrainingJob) -> tuple[LearningTask, nn.Module]:
    """Return the task of a resolved job, and its model, initialized from the job's seed.

    Raises:
        Refused: the model has no full size.
    """
    task = TASKS[job.model or "demo"]
    if job.full_size:
        if task.full is None:
            sizes = ", ".join(name for name, other in TASKS.items() if other.full)
            raise Refused(f"{task.name} has only one size; --full-size is for {sizes}")
        task = task.full_size()
    torch.manual_seed(job.seed or 0)
    return task, task.model()


def run(job: TrainingJob) -> Training:
    """Train as `job` says, and write the requested files. With DDP or FSDP2, call this through `processes.launch`.

    Raises:
        CkptfixError: the job cannot be done; nothing has been written then.
    """
    log = job.log if rank() == 0 else silent
    job, saved = resolved(job)
    task, model = built(job)
    place = replace(devices.choose(job.gpus, job.output_device), replicas=job.replicas, steps=job.log_steps)
    for line in devices.notes(place, job.gpus, job.output_device):
        log(line)
    if saved:
        resume.load_weights(saved, model)
    training = start(wrap(model.to(place.device), job.parallel, place), task, job)
    if rank():
        # Each process draws its own dropout masks.
        torch.manual_seed((job.seed or 0) + rank())
    if saved:
        for line in resume.restore(saved, training):
            log(line)
    if job.rate is not None:
        set_rate(training, job.rate)
    fit(training, task, job, log)
    if job.save is not None:
        saving.save(training, job.save, wrapped=job.wrapped, nested=job.nested, container=job.container)
        if rank() == 0:
            log(f"saved {job.save}")
    if job.outputs is not None:
        whole = saving.state_dict(training.model) if is_sharded(training.model) else None
        if rank() == 0:
            write_outputs(training, whole, task, job)
    return training


def silent(line: str) -> None:
    """Log nothing."""


def start(model: nn.Module, task: LearningTask, job: TrainingJob) -> Training:
    """Return the training state of `model`, which may be wrapped, before the first step."""
    where = next(model.parameters()).device
    parameters: Any = model.named_parameters() if job.param_names else model.parameters()
    optimizer = Adam(parameters, lr=task.rate if job.rate is None else job.rate)
    args = {name: getattr(job, name) for name in ("model", "seed", "amp", "averaged", "full_size")}
    return Training(
        model,
        optimizer,
        StepLR(optimizer, step_size=2, gamma=0.5),
        torch.amp.GradScaler(where.type, enabled=job.amp),
        AveragedModel(inner(model)) if job.averaged else None,
        args={**args, "parallel": ",".join(job.parallel)},
    )


def set_rate(training: Training, rate: float) -> None:
    """Make `rate` the learning rate from here on; the scheduler continues from it."""
    for group in training.optimizer.param_groups:
        group["lr"] = group["initial_lr"] = rate
    training.scheduler.base_lrs = [rate] * len(training.optimizer.param_groups)
    training.scheduler._last_lr = list(training.scheduler.base_lrs)


def fit(training: Training, task: LearningTask, job: TrainingJob, log: Callable[[str], None] = silent) -> None:
    """Train to the end of the job's last epoch. In a group, each process trains on its share of each batch."""
    model, optimizer, scaler, losses = training.model, training.optimizer, training.scaler, training.losses
    where = next(model.parameters()).device
    inputs, targets = samples(task, job.seed or 0)
    inputs, targets = tuple(tensor.to(where) for tensor in inputs), targets.to(where)
    model.train()
    if len(losses) >= job.epochs:
        log(f"nothing to train: {len(losses)} epochs are done, and --epochs is {job.epochs}")
    for epoch in range(len(losses), job.epochs):
        # The sum of the losses of all samples, and their number.
        total = torch.zeros(2, device=where, dtype=torch.float64)
        for number, chosen in enumerate(batches(task, (job.seed or 0) + epoch)):
            show(model, log if job.log_replicas or (epoch == 0 and number < SHOWN) else None)
            share = shared(chosen, rank(), world()).to(where)
            with torch.autocast(where.type, HALF[where.type], enabled=job.amp):
                loss = loss_of(model, task, tuple(tensor[share] for tensor in inputs), targets[share])
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if training.averaged is not None:
                training.averaged.update_parameters(inner(model))
            total += torch.stack([loss.detach() * len(share), torch.full_like(loss, len(share))]).to(where)
        training.scheduler.step()
        if distributed.is_initialized():
            distributed.all_reduce(total)
        losses.append((total[0] / total[1]).item())
        log(f"epoch {epoch + 1}/{job.epochs}  loss {losses[-1]:.4f}")


def loss_of(model: nn.Module, task: LearningTask, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
    """Return the loss of a batch on the outputs' device, averaged over replicas if each has its own."""
    made = model(*inputs, targets) if task.with_targets else model(*inputs)
    first: Tensor = made[0] if isinstance(made, tuple) else made
    return task.loss(made, targets.to(first.device)).mean()


def show(model: nn.Module, log: Callable[[str], None] | None) -> None:
    """Make the replicas in `model`, if any, log what they see to `log`."""
    for part in model.modules():
        if isinstance(part, Replicas):
            part.log = log


def samples(task: LearningTask, seed: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return inputs and targets of `task`; the same seed gives the same ones."""
    return task.data(torch.Generator().manual_seed(seed), task.samples)


def batches(task: LearningTask, seed: int) -> Iterator[Tensor]:
    """Yield the indices of the samples of each batch, in an order that depends on the seed."""
    yield from torch.randperm(task.samples, generator=torch.Generator().manual_seed(seed)).split(task.batch)


def shared(chosen: Tensor, number: int, processes: int) -> Tensor:
    """Return the part of a batch for process `number`. Parts are equally large; the first samples repeat if needed.

    torch's DistributedSampler does the same. With unequal parts, a mean of gradients would not be the mean over the
    samples, and a process without any samples would wait forever.
    """
    each = math.ceil(len(chosen) / processes)
    return chosen.repeat(math.ceil(each * processes / len(chosen)))[: each * processes][number::processes]


def write_outputs(training: Training, whole: dict[str, Tensor] | None, task: LearningTask, job: TrainingJob) -> None:
    """Save the trained model's outputs on the first samples; `whole` is its state dict if it is sharded."""
    assert job.outputs is not None
    model = inner(training.model) if training.averaged is None or job.nested else training.averaged
    if whole is not None:
        _, model = built(job)
        model.load_state_dict(whole)
    with saving.complete(job.outputs) as beside:
        saving.torch_zip(outputs(model, task, job.seed or 0), beside)


@torch.no_grad()
def outputs(model: nn.Module, task: LearningTask, seed: int = 0) -> Tensor:
    """Return the outputs of `model` on the first batch of samples, in evaluation mode, on the CPU."""
    where = next(model.parameters()).device
    inputs, _ = samples(task, seed)
    made: Tensor = model.eval()(*(tensor[: task.batch].to(where) for tensor in inputs))
    return made.cpu()
