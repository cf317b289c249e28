"""What is trained: each task is a model and synthetic data that it can learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

SAMPLES = 512
CLASSES = 4


@dataclass(frozen=True, slots=True)
class Task:
    """A model and what it learns.

    Attributes:
        name: as on the command line.
        about: one line for its help.
        model: makes it, freshly initialised from torch's default generator.
        data: inputs and targets, `SAMPLES` of each, from a generator.
        loss: of outputs and targets, averaged.
        rate: learning rate for Adam.
    """

    name: str
    about: str
    model: Callable[[], nn.Module]
    data: Callable[[Generator], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    rate: float


class Demo(nn.Module):
    """One linear layer, ``fc``, from 3 features to 5."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.fc(inputs)
        return outputs


class MLP(nn.Module):
    """Two linear layers around a BatchNorm, whose buffers (running statistics, a count of batches) are saved too."""

    def __init__(self, features: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, hidden), nn.BatchNorm1d(hidden), nn.ReLU())
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(inputs))
        return outputs


class VGG(nn.Module):
    """A narrow VGG for 3 x 16 x 16 images; its layers stand where those of the larger ones do.

    Args:
        widths: channels of each convolution, ``"M"`` for a pooling, as in the published configurations.
    """

    def __init__(self, widths: tuple[int | str, ...] = (8, "M", 16, "M", 32, 32, "M"), hidden: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in widths:
            if isinstance(width, str):
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(
            nn.Linear(channels * 4, hidden),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(hidden, CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.classifier(self.avgpool(self.features(images)).flatten(1))
        return outputs


def linear_data(generator: Generator) -> tuple[Tensor, Tensor]:
    """Points, and what a fixed linear map makes of them."""
    weight = torch.randn(3, 5, generator=generator)
    inputs = torch.randn(SAMPLES, 3, generator=generator)
    return inputs, inputs @ weight + 1


def clusters(*shape: int) -> Callable[[Generator], tuple[Tensor, Tensor]]:
    """Data of `CLASSES` classes, each scattered around a centre of this shape."""

    def data(generator: Generator) -> tuple[Tensor, Tensor]:
        centres = torch.randn(CLASSES, *shape, generator=generator)
        labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        return centres[labels] + torch.randn(SAMPLES, *shape, generator=generator), labels

    return data


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("demo", "one linear layer, fc, 3 -> 5", Demo, linear_data, nn.functional.mse_loss, 0.05),
        Task("mlp", "two linear layers around a BatchNorm", MLP, clusters(16), nn.functional.cross_entropy, 0.01),
        Task("vgg", "a narrow VGG for 16 x 16 images", VGG, clusters(3, 16, 16), nn.functional.cross_entropy, 0.003),
    )
}
