"""VGG, with and without BatchNorm. 3x16x16 images, 10 classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from architectures.family import Family, Style, noise
from torch import Tensor, nn
from torch.nn import functional

CHANNELS = 3
FEATURES = 16 * 2 * 2
HIDDEN = 32
CLASSES = 10


def stages(depth: int) -> tuple[tuple[int, ...], ...]:
    """Widths of the convolutions, stage by stage; `depth` of them in the last one."""
    return (8, 8), (16, 16), (16,) * depth


def convolutions(depth: int) -> Iterator[tuple[int, int, int, int]]:
    """(stage, place in it, channels in, channels out), both counted from 1."""
    before = CHANNELS
    for stage, widths in enumerate(stages(depth), 1):
        for place, width in enumerate(widths, 1):
            yield stage, place, before, width
            before = width


class Torchvision(nn.Module):
    """Everything numbered: features.N, where activations and pools count too, and classifier.N."""

    def __init__(self, depth: int, norm: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 1
        for stage, _, inside, outside in convolutions(depth):
            if stage > before:
                layers.append(nn.MaxPool2d(2))
            before = stage
            layers.append(nn.Conv2d(inside, outside, 3, padding=1))
            layers += [nn.BatchNorm2d(outside)] if norm else []
            layers.append(nn.ReLU())
        layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(FEATURES, HIDDEN),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(HIDDEN, CLASSES),
        )

    def forward(self, x: Tensor) -> Any:
        return self.classifier(self.features(x).flatten(1))


class Caffe(nn.Module):
    """conv1_1 ... fc6, fc7, fc8, all at the top; norms are bn1_1 ..."""

    def __init__(self, depth: int, norm: bool) -> None:
        super().__init__()
        self.depth, self.norm = depth, norm
        for stage, place, inside, outside in convolutions(depth):
            self.add_module(f"conv{stage}_{place}", nn.Conv2d(inside, outside, 3, padding=1))
            if norm:
                self.add_module(f"bn{stage}_{place}", nn.BatchNorm2d(outside))
        self.fc6 = nn.Linear(FEATURES, HIDDEN)
        self.fc7 = nn.Linear(HIDDEN, HIDDEN)
        self.fc8 = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Any:
        before = 1
        for stage, place, *_ in convolutions(self.depth):
            if stage > before:
                x = functional.max_pool2d(x, 2)
            before = stage
            x = self.get_submodule(f"conv{stage}_{place}")(x)
            if self.norm:
                x = self.get_submodule(f"bn{stage}_{place}")(x)
            x = functional.relu(x)
        x = functional.max_pool2d(x, 2).flatten(1)
        return self.fc8(functional.relu(self.fc7(functional.relu(self.fc6(x)))))


class Keras(nn.Module):
    """block1.conv1 ... then fc1, fc2, predictions; a block holds its convolutions first, then their norms."""

    def __init__(self, depth: int, norm: bool) -> None:
        super().__init__()
        self.depth, self.norm = depth, norm
        for stage in range(1, len(stages(depth)) + 1):
            block = nn.Module()
            mine = [row for row in convolutions(depth) if row[0] == stage]
            for _, place, inside, outside in mine:
                block.add_module(f"conv{place}", nn.Conv2d(inside, outside, 3, padding=1))
            for _, place, _, outside in mine if norm else ():
                block.add_module(f"norm{place}", nn.BatchNorm2d(outside))
            self.add_module(f"block{stage}", block)
        self.fc1 = nn.Linear(FEATURES, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, HIDDEN)
        self.predictions = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Any:
        for stage, place, *_ in convolutions(self.depth):
            if place == 1 and stage > 1:
                x = functional.max_pool2d(x, 2)
            x = self.get_submodule(f"block{stage}.conv{place}")(x)
            if self.norm:
                x = self.get_submodule(f"block{stage}.norm{place}")(x)
            x = functional.relu(x)
        x = functional.max_pool2d(x, 2).flatten(1)
        return self.predictions(functional.relu(self.fc2(functional.relu(self.fc1(x)))))


class ConvModule(nn.Module):
    """Convolution, norm and activation as one, as OpenMMLab has it."""

    def __init__(self, inside: int, outside: int, norm: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, 3, padding=1)
        self.bn = nn.BatchNorm2d(outside) if norm else None

    def forward(self, x: Tensor) -> Any:
        x = self.conv(x)
        return functional.relu(x if self.bn is None else self.bn(x))


class OpenMMLab(nn.Module):
    """backbone.features.N.conv and .bn, where pools count, and a classifier in the backbone."""

    def __init__(self, depth: int, norm: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for stage, place, inside, outside in convolutions(depth):
            if place == 1 and stage > 1:
                layers.append(nn.MaxPool2d(2))
            layers.append(ConvModule(inside, outside, norm))
        self.backbone = nn.Module()
        self.backbone.features = nn.Sequential(*layers, nn.MaxPool2d(2))
        self.backbone.classifier = nn.Sequential(
            nn.Linear(FEATURES, HIDDEN),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(HIDDEN, CLASSES),
        )

    def forward(self, x: Tensor) -> Any:
        x = self.get_submodule("backbone.features")(x)
        return self.get_submodule("backbone.classifier")(x.flatten(1))


def image() -> tuple[Tensor, ...]:
    return (noise(2, CHANNELS, 16, 16),)


VGG = Family(
    "VGG",
    (
        Style("torchvision", lambda depth: Torchvision(depth, norm=False)),
        Style("caffe", lambda depth: Caffe(depth, norm=False)),
        Style("keras", lambda depth: Keras(depth, norm=False)),
        Style("OpenMMLab", lambda depth: OpenMMLab(depth, norm=False)),
    ),
    image,
    depth=3,
)

VGG_BN = Family(
    "VGG with BatchNorm",
    (
        Style("torchvision", lambda depth: Torchvision(depth, norm=True)),
        Style("caffe", lambda depth: Caffe(depth, norm=True)),
        Style("keras", lambda depth: Keras(depth, norm=True)),
        Style("OpenMMLab", lambda depth: OpenMMLab(depth, norm=True)),
    ),
    image,
    depth=3,
)
