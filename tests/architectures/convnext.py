"""ConvNeXt: depthwise convolutions, norms over channels, a scale for each layer. 3x16x16 images, 10 classes."""

from __future__ import annotations

from typing import Any

import torch
from architectures.family import Family, Style, noise
from torch import Tensor, nn
from torch.nn import functional

WIDTHS = (8, 16)
CLASSES = 10


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the second of four axes."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def stem() -> nn.Conv2d:
    return nn.Conv2d(3, WIDTHS[0], 2, 2)


def halving(stage: int) -> nn.Conv2d:
    return nn.Conv2d(WIDTHS[stage - 1], WIDTHS[stage], 2, 2)


def depthwise(width: int) -> nn.Conv2d:
    return nn.Conv2d(width, width, 3, padding=1, groups=width)


class Block(nn.Module):
    """A block; PARTS are its scale, depthwise convolution, norm and the two linear layers, as a style calls them."""

    PARTS: tuple[str, str, str, str, str]

    def forward(self, x: Tensor) -> Any:
        scale, depthwise, norm, up, down = self.PARTS
        y = self.get_submodule(depthwise)(x).permute(0, 2, 3, 1)
        y = self.get_submodule(down)(functional.gelu(self.get_submodule(up)(self.get_submodule(norm)(y))))
        return x + (self.get_parameter(scale) * y).permute(0, 3, 1, 2)


class MetaBlock(Block):
    """gamma, dwconv, norm, pwconv1, pwconv2."""

    PARTS = ("gamma", "dwconv", "norm", "pwconv1", "pwconv2")

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))
        self.dwconv = depthwise(width)
        self.norm = nn.LayerNorm(width)
        self.pwconv1 = nn.Linear(width, 3 * width)
        self.pwconv2 = nn.Linear(3 * width, width)


class Meta(nn.Module):
    """All of downsample_layers (the stem is the first; a later one has its norm first), then all stages; norm, head."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.downsample_layers = nn.ModuleList(
            nn.Sequential(ChannelNorm(WIDTHS[stage - 1]), halving(stage))
            if stage
            else nn.Sequential(stem(), ChannelNorm(WIDTHS[0]))
            for stage in range(len(WIDTHS))
        )
        self.stages = nn.ModuleList(
            nn.Sequential(*(MetaBlock(width) for _ in range(depth if width == WIDTHS[-1] else 2))) for width in WIDTHS
        )
        self.norm = nn.LayerNorm(WIDTHS[-1])
        self.head = nn.Linear(WIDTHS[-1], CLASSES)

    def forward(self, x: Tensor) -> Any:
        for down, stage in zip(self.downsample_layers, self.stages, strict=True):
            x = stage(down(x))
        return self.head(self.norm(x.mean((2, 3))))


class TimmBlock(Block):
    """gamma, conv_dw, norm, mlp.fc1, mlp.fc2."""

    PARTS = ("gamma", "conv_dw", "norm", "mlp.fc1", "mlp.fc2")

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))
        self.conv_dw = depthwise(width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, 3 * width), "fc2": nn.Linear(3 * width, width)})


class TimmStage(nn.Module):
    """downsample.0, downsample.1, blocks.N."""

    def __init__(self, stage: int, depth: int) -> None:
        super().__init__()
        self.downsample: nn.Module = nn.Identity()
        if stage:
            self.downsample = nn.Sequential(ChannelNorm(WIDTHS[stage - 1]), halving(stage))
        self.blocks = nn.Sequential(*(TimmBlock(WIDTHS[stage]) for _ in range(depth)))

    def forward(self, x: Tensor) -> Any:
        return self.blocks(self.downsample(x))


class Timm(nn.Module):
    """stem.0, stem.1, stages.N, head.norm, head.fc."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(stem(), ChannelNorm(WIDTHS[0]))
        self.stages = nn.Sequential(*(TimmStage(n, depth if n == len(WIDTHS) - 1 else 2) for n in range(len(WIDTHS))))
        self.head = nn.Sequential()
        self.head.add_module("norm", nn.LayerNorm(WIDTHS[-1]))
        self.head.add_module("fc", nn.Linear(WIDTHS[-1], CLASSES))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


class TransformersBlock(Block):
    """layer_scale_parameter, dwconv, layernorm, pwconv1, pwconv2."""

    PARTS = ("layer_scale_parameter", "dwconv", "layernorm", "pwconv1", "pwconv2")

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = depthwise(width)
        self.layernorm = nn.LayerNorm(width)
        self.pwconv1 = nn.Linear(width, 3 * width)
        self.pwconv2 = nn.Linear(3 * width, width)
        self.layer_scale_parameter = nn.Parameter(torch.ones(width))


class TransformersStage(nn.Module):
    """downsampling_layer.0, downsampling_layer.1, layers.N."""

    def __init__(self, stage: int, depth: int) -> None:
        super().__init__()
        self.downsampling_layer: nn.Module = nn.Identity()
        if stage:
            self.downsampling_layer = nn.Sequential(ChannelNorm(WIDTHS[stage - 1]), halving(stage))
        self.layers = nn.Sequential(*(TransformersBlock(WIDTHS[stage]) for _ in range(depth)))

    def forward(self, x: Tensor) -> Any:
        return self.layers(self.downsampling_layer(x))


class Transformers(nn.Module):
    """convnext.embeddings.patch_embeddings, convnext.encoder.stages.N, convnext.layernorm, classifier."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        stages = [TransformersStage(n, depth if n == len(WIDTHS) - 1 else 2) for n in range(len(WIDTHS))]
        embeddings, encoder = nn.Sequential(), nn.Sequential()
        embeddings.add_module("patch_embeddings", stem())
        embeddings.add_module("layernorm", ChannelNorm(WIDTHS[0]))
        encoder.add_module("stages", nn.Sequential(*stages))
        layernorm = nn.LayerNorm(WIDTHS[-1])
        self.convnext = nn.ModuleDict({"embeddings": embeddings, "encoder": encoder, "layernorm": layernorm})
        self.classifier = nn.Linear(WIDTHS[-1], CLASSES)

    def forward(self, x: Tensor) -> Any:
        x = self.convnext["encoder"](self.convnext["embeddings"](x))
        return self.classifier(self.convnext["layernorm"](x.mean((2, 3))))


CONVNEXT = Family(
    "ConvNeXt",
    (Style("Meta", Meta), Style("timm", Timm), Style("transformers", Transformers)),
    lambda: (noise(2, 3, 16, 16),),
)
