"""Models for points and images: one linear layer, a BatchNorm between two layers, and VGGs of every size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from ckptfix.dataclass import dataclass

CLASSES = 4
"""Number of classes for the points and images of the small models."""


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


class Tutorial(nn.Module):
    """One linear layer, ``fc``, from 5 features to 2, as in PyTorch's tutorial on DataParallel.

    https://docs.pytorch.org/tutorials/beginner/blitz/data_parallel_tutorial.html has a model that prints what it sees.
    Here `ckptfix.trainer.replicas` logs that for any model.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.fc(inputs)
        return outputs


Blocks = tuple[tuple[int, ...], ...]
"""Channels of each convolution, in blocks that each end with a pooling."""

NARROW: Blocks = ((8,), (16,), (32, 32))
NARROW_DEEPER: Blocks = ((8,), (16,), (32, 32, 32))
VGG16: Blocks = ((64,) * 2, (128,) * 2, (256,) * 3, (512,) * 3, (512,) * 3)
"""Configuration D of https://arxiv.org/abs/1409.1556; `VGG19` is its E."""
VGG19: Blocks = ((64,) * 2, (128,) * 2, (256,) * 4, (512,) * 4, (512,) * 4)


@dataclass(frozen=True, slots=True)
class Head:
    """The layers after the convolutions of a VGG: pooling to `side` x `side`, three linear layers, dropout between."""

    side: int
    hidden: int
    classes: int
    dropout: float


SMALL_HEAD = Head(side=2, hidden=64, classes=CLASSES, dropout=0.1)
PUBLISHED_HEAD = Head(side=7, hidden=4096, classes=1000, dropout=0.5)
"""From the same paper: 224 x 224 images leave the last pooling as 7 x 7; ImageNet has 1000 classes."""


def convolution(channels: int, width: int) -> nn.Conv2d:
    """Return a 3 x 3 convolution, initialized so that a stack of sixteen still lets a signal through."""
    made = nn.Conv2d(channels, width, 3, padding=1)
    nn.init.kaiming_normal_(made.weight, mode="fan_out", nonlinearity="relu")
    nn.init.zeros_(cast(Tensor, made.bias))
    return made


class VGG(nn.Module):
    """A VGG with the keys of torchvision's: ``features.N`` and ``classifier.N``.

    Images are [N, 3, H, W]. Each block needs a factor of 2 in the sides: at least 8 for the narrow models, 32 for the
    published ones.
    """

    def __init__(self, blocks: Blocks = NARROW, head: Head = SMALL_HEAD) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for block in blocks:
            for width in block:
                layers += [convolution(channels, width), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(head.side)
        self.classifier = nn.Sequential(
            nn.Linear(channels * head.side**2, head.hidden),
            nn.ReLU(),
            nn.Dropout(head.dropout),
            nn.Linear(head.hidden, head.hidden),
            nn.ReLU(),
            nn.Dropout(head.dropout),
            nn.Linear(head.hidden, head.classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.classifier(self.avgpool(self.features(images)).flatten(1))
        return outputs


class NamedVGG(nn.Module):
    """The same layers as in `VGG`, in the same order, under the names of the paper's authors: conv1_1 to fc8.

    It computes the same function, so parameters transferred to it by position must give the same outputs.
    """

    def __init__(self, blocks: Blocks = NARROW, head: Head = SMALL_HEAD) -> None:
        super().__init__()
        self.blocks = blocks
        self.head = head
        channels = 3
        for name, width in self.convolutions():
            self.add_module(name, convolution(channels, width))
            channels = width
        self.fc6 = nn.Linear(channels * head.side**2, head.hidden)
        self.fc7 = nn.Linear(head.hidden, head.hidden)
        self.fc8 = nn.Linear(head.hidden, head.classes)

    def convolutions(self) -> Iterator[tuple[str, int]]:
        """Yield the name and the channels of each convolution: ``conv3_2`` is the second of the third block."""
        for number, block in enumerate(self.blocks, 1):
            for place, width in enumerate(block, 1):
                yield f"conv{number}_{place}", width

    def forward(self, images: Tensor) -> Tensor:
        features = images
        for number, block in enumerate(self.blocks, 1):
            for place in range(1, len(block) + 1):
                features = functional.relu(self.get_submodule(f"conv{number}_{place}")(features))
            features = functional.max_pool2d(features, 2)
        hidden = functional.adaptive_avg_pool2d(features, self.head.side).flatten(1)
        for layer in (self.fc6, self.fc7):
            hidden = functional.dropout(functional.relu(layer(hidden)), self.head.dropout, self.training)
        outputs: Tensor = self.fc8(hidden)
        return outputs


def deeper_vgg() -> VGG:
    """Return the narrow `VGG` with one more convolution."""
    return VGG(NARROW_DEEPER)


def vgg16() -> VGG:
    """Return the published 16-layer VGG: 138,357,544 parameters, 528 MiB."""
    return VGG(VGG16, PUBLISHED_HEAD)


def vgg19() -> VGG:
    """Return the published 19-layer VGG: 143,667,240 parameters, 548 MiB."""
    return VGG(VGG19, PUBLISHED_HEAD)


def named_vgg16() -> NamedVGG:
    """Return a model with the shapes of `vgg16` under different names."""
    return NamedVGG(VGG16, PUBLISHED_HEAD)
