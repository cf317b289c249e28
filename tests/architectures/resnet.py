"""ResNet with basic and with bottleneck blocks. 3x16x16 images, 10 classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from architectures.family import Family, Style, noise
from torch import Tensor, nn
from torch.nn import functional

STEM = 8
CLASSES = 10
WIDTHS = (8, 16, 16)
EXPANSION = 2
"""Of a bottleneck: channels out over channels within."""
SHORTCUT = 0.5
"""Its part in the sum. With 1, the biases of the two norms before the sum could change places unseen."""


def conv(inside: int, outside: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, kernel, stride, padding=kernel // 2, bias=False)


def blocks(depth: int, bottleneck: bool) -> Iterator[tuple[int, int, int, int, int, int]]:
    """(stage, block, channels in, within, out, stride); stages and blocks counted from 0."""
    before = STEM
    for stage, width in enumerate(WIDTHS):
        outside = width * EXPANSION if bottleneck else width
        for block in range(depth if stage == len(WIDTHS) - 1 else 2):
            yield stage, block, before, width, outside, 2 if stage and not block else 1
            before = outside


def convolutions(inside: int, within: int, outside: int, stride: int, bottleneck: bool) -> list[nn.Conv2d]:
    """Names of a block's layers on its main path."""
    if bottleneck:
        return [conv(inside, within, 1), conv(within, within, 3, stride), conv(within, outside, 1)]
    return [conv(inside, within, 3, stride), conv(within, outside, 3)]


class FrozenBatchNorm(nn.Module):
    """Weights and statistics are buffers, and nothing counts batches, as in detectron2."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(channels))
        self.register_buffer("bias", torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Any:
        return functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


class TorchvisionBlock(nn.Module):
    """conv1, bn1, ..., and downsample.0 and .1 at the end."""

    def __init__(self, inside: int, within: int, outside: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        self.count = 0
        for number, layer in enumerate(convolutions(inside, within, outside, stride, bottleneck), 1):
            self.add_module(f"conv{number}", layer)
            self.add_module(f"bn{number}", nn.BatchNorm2d(layer.out_channels))
            self.count = number
        self.downsample: nn.Module | None = None
        if stride > 1 or inside != outside:
            self.downsample = nn.Sequential(conv(inside, outside, 1, stride), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Any:
        kept = x if self.downsample is None else self.downsample(x)
        for number in range(1, self.count + 1):
            x = self.get_submodule(f"bn{number}")(self.get_submodule(f"conv{number}")(x))
            x = functional.relu(x if number < self.count else x + SHORTCUT * kept)
        return x


class Torchvision(nn.Module):
    """conv1, bn1, layer1.0.conv1 ... fc; OpenMMLab has the same under backbone., and head.fc."""

    def __init__(self, depth: int, bottleneck: bool) -> None:
        super().__init__()
        self.conv1 = conv(3, STEM, 7)
        self.bn1 = nn.BatchNorm2d(STEM)
        outside = STEM
        for stage in range(len(WIDTHS)):
            mine = [row for row in blocks(depth, bottleneck) if row[0] == stage]
            self.add_module(
                f"layer{stage + 1}",
                nn.Sequential(
                    *(TorchvisionBlock(inside, within, outside, stride, bottleneck)
                      for _, _, inside, within, outside, stride in mine)
                ),
            )  # fmt: skip
            outside = mine[-1][4]
        self.fc: nn.Module = nn.Linear(outside, CLASSES)

    def features(self, x: Tensor) -> Any:
        x = functional.max_pool2d(functional.relu(self.bn1(self.conv1(x))), 2)
        for stage in range(len(WIDTHS)):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        return x.mean((2, 3))

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.features(x))


class OpenMMLab(nn.Module):
    """backbone.conv1 ... and head.fc."""

    def __init__(self, depth: int, bottleneck: bool) -> None:
        super().__init__()
        self.backbone = Torchvision(depth, bottleneck)
        self.head = nn.Module()
        self.head.fc = self.backbone.fc
        self.backbone.fc = nn.Identity()

    def forward(self, x: Tensor) -> Any:
        return self.get_submodule("head.fc")(self.backbone(x))


class NormedConv(nn.Conv2d):
    """A convolution whose norm is its child."""

    def __init__(self, like: nn.Conv2d) -> None:
        kernel, stride = like.kernel_size[0], like.stride[0]
        super().__init__(like.in_channels, like.out_channels, kernel, stride, padding=kernel // 2, bias=False)
        self.norm = FrozenBatchNorm(like.out_channels)

    def forward(self, input: Tensor) -> Any:
        return self.norm(super().forward(input))


class Detectron2Block(nn.Module):
    """shortcut first, then conv1, conv2 ..., each with its norm inside."""

    def __init__(self, inside: int, within: int, outside: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        self.shortcut: nn.Module | None = None
        if stride > 1 or inside != outside:
            self.shortcut = NormedConv(conv(inside, outside, 1, stride))
        self.count = 0
        for number, layer in enumerate(convolutions(inside, within, outside, stride, bottleneck), 1):
            self.add_module(f"conv{number}", NormedConv(layer))
            self.count = number

    def forward(self, x: Tensor) -> Any:
        kept = x if self.shortcut is None else self.shortcut(x)
        for number in range(1, self.count + 1):
            x = self.get_submodule(f"conv{number}")(x)
            x = functional.relu(x if number < self.count else x + SHORTCUT * kept)
        return x


class Detectron2(nn.Module):
    """stem.conv1, res2.0.conv1, res2.0.conv1.norm ... linear."""

    def __init__(self, depth: int, bottleneck: bool) -> None:
        super().__init__()
        self.stem = nn.Module()
        self.stem.conv1 = NormedConv(conv(3, STEM, 7))
        outside = STEM
        for stage in range(len(WIDTHS)):
            mine = [row for row in blocks(depth, bottleneck) if row[0] == stage]
            self.add_module(
                f"res{stage + 2}",
                nn.Sequential(
                    *(Detectron2Block(inside, within, outside, stride, bottleneck)
                      for _, _, inside, within, outside, stride in mine)
                ),
            )  # fmt: skip
            outside = mine[-1][4]
        self.linear = nn.Linear(outside, CLASSES)

    def forward(self, x: Tensor) -> Any:
        x = functional.max_pool2d(functional.relu(self.get_submodule("stem.conv1")(x)), 2)
        for stage in range(len(WIDTHS)):
            x = self.get_submodule(f"res{stage + 2}")(x)
        return self.linear(x.mean((2, 3)))


class TransformersConv(nn.Module):
    """convolution and normalization."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.convolution = layer
        self.normalization = nn.BatchNorm2d(layer.out_channels)

    def forward(self, x: Tensor) -> Any:
        return self.normalization(self.convolution(x))


class TransformersBlock(nn.Module):
    """shortcut first, then layer.0, layer.1 ..."""

    def __init__(self, inside: int, within: int, outside: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inside != outside:
            self.shortcut = TransformersConv(conv(inside, outside, 1, stride))
        self.layer = nn.Sequential(
            *(TransformersConv(layer) for layer in convolutions(inside, within, outside, stride, bottleneck))
        )

    def forward(self, x: Tensor) -> Any:
        kept = self.shortcut(x)
        *layers, last = self.layer
        for layer in layers:
            x = functional.relu(layer(x))
        return functional.relu(last(x) + SHORTCUT * kept)


class Transformers(nn.Module):
    """resnet.embedder.embedder, resnet.encoder.stages.0.layers.0.layer.0.convolution ... classifier.1."""

    def __init__(self, depth: int, bottleneck: bool) -> None:
        super().__init__()
        self.resnet = nn.Module()
        self.resnet.embedder = nn.Module()
        self.resnet.embedder.embedder = TransformersConv(conv(3, STEM, 7))
        self.resnet.encoder = nn.Module()
        found = nn.ModuleList()
        outside = STEM
        for stage in range(len(WIDTHS)):
            mine = [row for row in blocks(depth, bottleneck) if row[0] == stage]
            held = nn.Module()
            held.layers = nn.Sequential(
                *(TransformersBlock(inside, within, outside, stride, bottleneck)
                  for _, _, inside, within, outside, stride in mine)
            )  # fmt: skip
            found.append(held)
            outside = mine[-1][4]
        self.resnet.encoder.stages = found
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(outside, CLASSES))

    def forward(self, x: Tensor) -> Any:
        x = functional.max_pool2d(functional.relu(self.get_submodule("resnet.embedder.embedder")(x)), 2)
        for stage in range(len(WIDTHS)):
            x = self.get_submodule(f"resnet.encoder.stages.{stage}.layers")(x)
        return self.classifier(x.mean((2, 3)))


class NumberedBlock(nn.Module):
    """All convolutions, then all norms: conv_a, conv_b, bn_a, bn_b; the shortcut is proj and proj_bn."""

    def __init__(self, inside: int, within: int, outside: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        layers = dict(zip("abc", convolutions(inside, within, outside, stride, bottleneck), strict=False))
        self.letters = "".join(layers)
        for letter, layer in layers.items():
            self.add_module(f"conv_{letter}", layer)
        for letter, layer in layers.items():
            self.add_module(f"bn_{letter}", nn.BatchNorm2d(layer.out_channels))
        self.proj: nn.Module | None = None
        if stride > 1 or inside != outside:
            self.proj = conv(inside, outside, 1, stride)
            self.proj_bn = nn.BatchNorm2d(outside)

    def forward(self, x: Tensor) -> Any:
        kept = x if self.proj is None else self.proj_bn(self.proj(x))
        for letter in self.letters:
            x = self.get_submodule(f"bn_{letter}")(self.get_submodule(f"conv_{letter}")(x))
            x = functional.relu(x if letter != self.letters[-1] else x + SHORTCUT * kept)
        return x


class Lettered(nn.Module):
    """conv_1_3x3, bn_1, stage_1.0.conv_a ... classifier, as CIFAR training codes have it."""

    def __init__(self, depth: int, bottleneck: bool) -> None:
        super().__init__()
        self.conv_1_3x3 = conv(3, STEM, 7)
        self.bn_1 = nn.BatchNorm2d(STEM)
        outside = STEM
        for stage in range(len(WIDTHS)):
            mine = [row for row in blocks(depth, bottleneck) if row[0] == stage]
            self.add_module(
                f"stage_{stage + 1}",
                nn.Sequential(
                    *(NumberedBlock(inside, within, outside, stride, bottleneck)
                      for _, _, inside, within, outside, stride in mine)
                ),
            )  # fmt: skip
            outside = mine[-1][4]
        self.classifier = nn.Linear(outside, CLASSES)

    def forward(self, x: Tensor) -> Any:
        x = functional.max_pool2d(functional.relu(self.bn_1(self.conv_1_3x3(x))), 2)
        for stage in range(len(WIDTHS)):
            x = self.get_submodule(f"stage_{stage + 1}")(x)
        return self.classifier(x.mean((2, 3)))


def image() -> tuple[Tensor, ...]:
    return (noise(2, 3, 16, 16),)


BASIC = Family(
    "ResNet, basic blocks",
    (
        Style("torchvision", lambda depth: Torchvision(depth, bottleneck=False)),
        Style("detectron2", lambda depth: Detectron2(depth, bottleneck=False)),
        Style("transformers", lambda depth: Transformers(depth, bottleneck=False)),
        Style("OpenMMLab", lambda depth: OpenMMLab(depth, bottleneck=False)),
        Style("lettered", lambda depth: Lettered(depth, bottleneck=False)),
    ),
    image,
)

BOTTLENECK = Family(
    "ResNet, bottlenecks",
    (
        Style("torchvision", lambda depth: Torchvision(depth, bottleneck=True)),
        Style("detectron2", lambda depth: Detectron2(depth, bottleneck=True)),
        Style("transformers", lambda depth: Transformers(depth, bottleneck=True)),
        Style("lettered", lambda depth: Lettered(depth, bottleneck=True)),
    ),
    image,
)
