"""MobileNetV2: inverted residuals. 3x16x16 images, 10 classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from architectures.family import Family, Style, noise
from torch import Tensor, nn
from torch.nn import functional

STEM = 8
HEAD = 24
CLASSES = 10


@dataclass(frozen=True, slots=True)
class Block:
    """Channels in, within and out; one that does not widen has no first convolution."""

    stage: int
    place: int
    inside: int
    within: int
    outside: int
    stride: int

    @property
    def widens(self) -> bool:
        return self.within != self.inside

    @property
    def residual(self) -> bool:
        return self.stride == 1 and self.inside == self.outside


BLOCKS = (
    Block(0, 0, STEM, STEM, 4, 1),
    Block(1, 0, 4, 12, 8, 2),
    Block(1, 1, 8, 24, 8, 1),
    Block(2, 0, 8, 24, 8, 1),
    Block(2, 1, 8, 24, 8, 1),
)


def conv(inside: int, outside: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inside, outside, kernel, stride, kernel // 2, groups=groups, bias=False)


def depthwise(block: Block) -> nn.Conv2d:
    return conv(block.within, block.within, 3, block.stride, block.within)


def normed(layer: nn.Conv2d) -> nn.Sequential:
    """The convolution as 0, its norm as 1."""
    return nn.Sequential(layer, nn.BatchNorm2d(layer.out_channels), nn.ReLU6())


class TorchvisionBlock(nn.Module):
    """conv.0.0, conv.0.1, conv.1.0, conv.1.1, conv.2, conv.3."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.residual = block.residual
        layers: list[nn.Module] = [normed(conv(block.inside, block.within))] if block.widens else []
        layers.append(normed(depthwise(block)))
        layers += [conv(block.within, block.outside), nn.BatchNorm2d(block.outside)]
        self.conv = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Any:
        return x + self.conv(x) if self.residual else self.conv(x)


class Torchvision(nn.Module):
    """features.0.0 ... classifier.1."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            normed(conv(3, STEM, 3, 2)),
            *map(TorchvisionBlock, BLOCKS),
            normed(conv(BLOCKS[-1].outside, HEAD)),
        )
        self.classifier = nn.Sequential(nn.Dropout(), nn.Linear(HEAD, CLASSES))

    def forward(self, x: Tensor) -> Any:
        return self.classifier(self.features(x).mean((2, 3)))


class TransformersConv(nn.Module):
    """convolution and normalization."""

    def __init__(self, layer: nn.Conv2d, active: bool = True) -> None:
        super().__init__()
        self.convolution = layer
        self.normalization = nn.BatchNorm2d(layer.out_channels)
        self.active = active

    def forward(self, x: Tensor) -> Any:
        x = self.normalization(self.convolution(x))
        return functional.relu6(x) if self.active else x


class TransformersBlock(nn.Module):
    """expand_1x1, conv_3x3, reduce_1x1."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.residual = block.residual
        self.expand_1x1 = TransformersConv(conv(block.inside, block.within))
        self.conv_3x3 = TransformersConv(depthwise(block))
        self.reduce_1x1 = TransformersConv(conv(block.within, block.outside), active=False)

    def forward(self, x: Tensor) -> Any:
        y = self.reduce_1x1(self.conv_3x3(self.expand_1x1(x)))
        return x + y if self.residual else y


class TransformersStem(nn.Module):
    """The first block belongs to it: first_conv, conv_3x3, reduce_1x1."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.first_conv = TransformersConv(conv(3, STEM, 3, 2))
        self.conv_3x3 = TransformersConv(depthwise(block))
        self.reduce_1x1 = TransformersConv(conv(block.within, block.outside), active=False)

    def forward(self, x: Tensor) -> Any:
        return self.reduce_1x1(self.conv_3x3(self.first_conv(x)))


class Transformers(nn.Module):
    """mobilenet_v2.conv_stem, mobilenet_v2.layer.N, mobilenet_v2.conv_1x1, classifier."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.mobilenet_v2 = nn.Sequential()
        self.mobilenet_v2.add_module("conv_stem", TransformersStem(BLOCKS[0]))
        self.mobilenet_v2.add_module("layer", nn.Sequential(*map(TransformersBlock, BLOCKS[1:])))
        self.mobilenet_v2.add_module("conv_1x1", TransformersConv(conv(BLOCKS[-1].outside, HEAD)))
        self.classifier = nn.Linear(HEAD, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.classifier(self.mobilenet_v2(x).mean((2, 3)))


class TimmSeparable(nn.Module):
    """conv_dw, bn1, conv_pw, bn2: here conv_pw narrows."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.conv_dw = depthwise(block)
        self.bn1 = nn.BatchNorm2d(block.within)
        self.conv_pw = conv(block.within, block.outside)
        self.bn2 = nn.BatchNorm2d(block.outside)

    def forward(self, x: Tensor) -> Any:
        return self.bn2(self.conv_pw(functional.relu6(self.bn1(self.conv_dw(x)))))


class TimmBlock(nn.Module):
    """conv_pw, bn1, conv_dw, bn2, conv_pwl, bn3: here conv_pw widens."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.residual = block.residual
        self.conv_pw = conv(block.inside, block.within)
        self.bn1 = nn.BatchNorm2d(block.within)
        self.conv_dw = depthwise(block)
        self.bn2 = nn.BatchNorm2d(block.within)
        self.conv_pwl = conv(block.within, block.outside)
        self.bn3 = nn.BatchNorm2d(block.outside)

    def forward(self, x: Tensor) -> Any:
        y = functional.relu6(self.bn1(self.conv_pw(x)))
        y = self.bn3(self.conv_pwl(functional.relu6(self.bn2(self.conv_dw(y)))))
        return x + y if self.residual else y


class Timm(nn.Module):
    """conv_stem, bn1, blocks.STAGE.PLACE, conv_head, bn2, classifier."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.conv_stem = conv(3, STEM, 3, 2)
        self.bn1 = nn.BatchNorm2d(STEM)
        stages = [[block for block in BLOCKS if block.stage == stage] for stage in range(BLOCKS[-1].stage + 1)]
        self.blocks = nn.Sequential(
            *(nn.Sequential(*(TimmBlock(b) if b.widens else TimmSeparable(b) for b in stage)) for stage in stages)
        )
        self.conv_head = conv(BLOCKS[-1].outside, HEAD)
        self.bn2 = nn.BatchNorm2d(HEAD)
        self.classifier = nn.Linear(HEAD, CLASSES)

    def forward(self, x: Tensor) -> Any:
        x = self.blocks(functional.relu6(self.bn1(self.conv_stem(x))))
        return self.classifier(functional.relu6(self.bn2(self.conv_head(x))).mean((2, 3)))


class Keras(nn.Module):
    """Conv1, bn_Conv1, expanded_conv_depthwise, block_1_expand, block_1_expand_BN ... Conv_1, predictions, all flat."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.Conv1 = conv(3, STEM, 3, 2)
        self.bn_Conv1 = nn.BatchNorm2d(STEM)
        for number, block in enumerate(BLOCKS):
            prefix = f"block_{number}" if number else "expanded_conv"
            layers = {"expand": conv(block.inside, block.within)} if block.widens else {}
            layers |= {"depthwise": depthwise(block), "project": conv(block.within, block.outside)}
            for name, layer in layers.items():
                self.add_module(f"{prefix}_{name}", layer)
                self.add_module(f"{prefix}_{name}_BN", nn.BatchNorm2d(layer.out_channels))
        self.Conv_1 = conv(BLOCKS[-1].outside, HEAD)
        self.Conv_1_bn = nn.BatchNorm2d(HEAD)
        self.predictions = nn.Linear(HEAD, CLASSES)

    def forward(self, x: Tensor) -> Any:
        x = functional.relu6(self.bn_Conv1(self.Conv1(x)))
        for number, block in enumerate(BLOCKS):
            prefix = f"block_{number}" if number else "expanded_conv"
            y = x
            for name in ("expand", "depthwise", "project")[not block.widens :]:
                y = self.get_submodule(f"{prefix}_{name}_BN")(self.get_submodule(f"{prefix}_{name}")(y))
                y = y if name == "project" else functional.relu6(y)
            x = x + y if block.residual else y
        return self.predictions(functional.relu6(self.Conv_1_bn(self.Conv_1(x))).mean((2, 3)))


MOBILENET = Family(
    "MobileNetV2",
    (
        Style("torchvision", Torchvision),
        Style("transformers", Transformers),
        Style("timm", Timm),
        Style("keras", Keras),
    ),
    lambda: (noise(2, 3, 16, 16),),
    shallower=False,
)
