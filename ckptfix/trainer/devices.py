"""Choice of the device on which each process trains, and of its tag in the checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from ckptfix.dataclass import dataclass
from ckptfix.errors import Refused


@dataclass(frozen=True, slots=True)
class TrainingDevice:
    """The device or devices on which one process trains.

    Attributes:
        device: device of the parameters and the inputs.
        ids: GPUs that DataParallel spreads over; the first of them is `device`. Empty on the CPU.
        output: the GPU on which DataParallel gathers outputs; None for the first one.
        replicas: number of copies for `replicas.Replicas` in place of DataParallel; None for DataParallel itself.
        steps: whether the log also has the steps of DataParallel.
    """

    device: torch.device
    ids: tuple[int, ...] = ()
    output: int | None = None
    replicas: int | None = None
    steps: bool = False


CPU = TrainingDevice(torch.device("cpu"))


def in_group() -> bool:
    """Return whether torchrun or `processes.launch` started this process."""
    return "LOCAL_RANK" in os.environ


def visible() -> int:
    """Return the number of GPUs that CUDA shows to this process."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose(gpus: tuple[int, ...] = (), output: int | None = None) -> TrainingDevice:
    """Return the place of this process among the GPUs `gpus`, or among all if none are listed.

    A single process takes the first GPU and leaves the others to DataParallel. In a group, each process takes the GPU
    with its own number. If there are fewer GPUs than processes on this machine, all processes train on the CPU.

    Raises:
        Refused: an id does not belong to a visible GPU.
    """
    count = visible()
    if not count:
        return CPU
    ids = gpus or tuple(range(count))
    for number in (*ids, *(() if output is None else (output,))):
        if number >= count:
            raise Refused(
                f"there is no GPU {number}: {count} visible, numbered from 0",
                hint="CUDA_VISIBLE_DEVICES renumbers the GPUs that it leaves visible",
            )
    if not in_group():
        return TrainingDevice(torch.device("cuda", ids[0]), ids, output)
    if len(ids) < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return CPU
    own = ids[int(os.environ["LOCAL_RANK"])]
    return TrainingDevice(torch.device("cuda", own), (own,))


def automatic(gpus: tuple[int, ...] = ()) -> tuple[str, ...]:
    """Choose DDP for a process of a group, DataParallel if there are several GPUs, and otherwise nothing."""
    if in_group():
        return ("ddp",)
    several = len(gpus) > 1 if gpus else visible() > 1
    return ("dp",) if visible() and several else ()


def notes(place: TrainingDevice, gpus: tuple[int, ...] = (), output: int | None = None) -> Iterator[str]:
    """Yield lines for the log: requested devices that are missing, and the numbering of visible GPUs."""
    if place.device.type == "cpu" and (gpus or output is not None):
        why = "this machine has no GPU" if not visible() else "there are fewer GPUs than processes"
        asked = ([f"--gpu_ids {','.join(map(str, gpus))}"] if gpus else []) + (
            [] if output is None else [f"--output-device {output}"]
        )
        yield f"{why}: training on the CPU, without {' and '.join(asked)}"
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return
    if place.device.type == "cpu":
        yield f"CUDA_VISIBLE_DEVICES={shown}, but training runs on the CPU: tensors will be tagged cpu"
        return
    names = [name.strip() for name in shown.split(",")]
    index = place.device.index
    physical = names[index] if index < len(names) else "?"
    yield (
        f"CUDA_VISIBLE_DEVICES={shown} renumbers: GPU {physical} is visible as {index}, "
        f"and tensors will be tagged cuda:{index}"
    )
