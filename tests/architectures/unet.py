"""U-Net of two levels. 3x16x16 images in, 2 planes out."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from architectures.family import Family, Style, noise
from torch import Tensor, nn
from torch.nn import functional

WIDTHS = (8, 12, 16)
PLANES = 2


def double(inside: int, outside: int) -> nn.Sequential:
    """Convolution 0, norm 1, convolution 3, norm 4."""
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1, bias=False),
        nn.BatchNorm2d(outside),
        nn.ReLU(),
        nn.Conv2d(outside, outside, 3, padding=1, bias=False),
        nn.BatchNorm2d(outside),
        nn.ReLU(),
    )


def doubling(inside: int, outside: int) -> nn.ConvTranspose2d:
    return nn.ConvTranspose2d(inside, outside, 2, 2)


class DoubleConv(nn.Module):
    """double_conv.0 ..., as in milesial's Pytorch-UNet."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.double_conv = double(inside, outside)

    def forward(self, x: Tensor) -> Any:
        return self.double_conv(x)


class Down(nn.Module):
    """maxpool_conv.1.double_conv."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.maxpool_conv = nn.Sequential(nn.MaxPool2d(2), DoubleConv(inside, outside))

    def forward(self, x: Tensor) -> Any:
        return self.maxpool_conv(x)


class Up(nn.Module):
    """up, conv.double_conv."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.up = doubling(inside, outside)
        self.conv = DoubleConv(2 * outside, outside)

    def forward(self, x: Tensor, kept: Tensor) -> Any:
        return self.conv(torch.cat([kept, self.up(x)], 1))


class Milesial(nn.Module):
    """inc, down1, down2, up1, up2, outc.conv."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inc = DoubleConv(3, WIDTHS[0])
        self.down1 = Down(WIDTHS[0], WIDTHS[1])
        self.down2 = Down(WIDTHS[1], WIDTHS[2])
        self.up1 = Up(WIDTHS[2], WIDTHS[1])
        self.up2 = Up(WIDTHS[1], WIDTHS[0])
        self.outc = nn.ModuleDict({"conv": nn.Conv2d(WIDTHS[0], PLANES, 1)})

    def forward(self, x: Tensor) -> Any:
        first = self.inc(x)
        second = self.down1(first)
        return self.outc["conv"](self.up2(self.up1(self.down2(second), second), first))


def named(inside: int, outside: int, name: str) -> nn.Sequential:
    """NAMEconv1, NAMEnorm1, NAMEconv2, NAMEnorm2, as the brain segmentation U-Net of the PyTorch hub."""
    layers = list(double(inside, outside))
    names = [f"{name}{layer}{place}" for place in (1, 2) for layer in ("conv", "norm", "relu")]
    return nn.Sequential(OrderedDict(zip(names, layers, strict=True)))


class Hub(nn.Module):
    """encoder1.enc1conv1 ..., bottleneck.bottleneckconv1, upconv2, decoder2.dec2conv1 ..., conv."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.encoder1 = named(3, WIDTHS[0], "enc1")
        self.encoder2 = named(WIDTHS[0], WIDTHS[1], "enc2")
        self.bottleneck = named(WIDTHS[1], WIDTHS[2], "bottleneck")
        self.upconv2 = doubling(WIDTHS[2], WIDTHS[1])
        self.decoder2 = named(2 * WIDTHS[1], WIDTHS[1], "dec2")
        self.upconv1 = doubling(WIDTHS[1], WIDTHS[0])
        self.decoder1 = named(2 * WIDTHS[0], WIDTHS[0], "dec1")
        self.conv = nn.Conv2d(WIDTHS[0], PLANES, 1)

    def forward(self, x: Tensor) -> Any:
        first = self.encoder1(x)
        second = self.encoder2(functional.max_pool2d(first, 2))
        x = self.bottleneck(functional.max_pool2d(second, 2))
        x = self.decoder2(torch.cat([second, self.upconv2(x)], 1))
        return self.conv(self.decoder1(torch.cat([first, self.upconv1(x)], 1)))


class Lists(nn.Module):
    """ups before downs: ups.0 doubles, ups.1 is a double convolution; then bottleneck and final_conv."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.ups = nn.ModuleList()
        self.downs = nn.ModuleList()
        inside = 3
        for width in WIDTHS[:-1]:
            self.downs.append(double(inside, width))
            inside = width
        for place in range(len(WIDTHS) - 1, 0, -1):
            self.ups.append(doubling(WIDTHS[place], WIDTHS[place - 1]))
            self.ups.append(double(2 * WIDTHS[place - 1], WIDTHS[place - 1]))
        self.bottleneck = double(*WIDTHS[-2:])
        self.final_conv = nn.Conv2d(WIDTHS[0], PLANES, 1)

    def forward(self, x: Tensor) -> Any:
        kept = []
        for down in self.downs:
            kept.append(down(x))
            x = functional.max_pool2d(kept[-1], 2)
        x = self.bottleneck(x)
        for place in range(0, len(self.ups), 2):
            x = self.ups[place + 1](torch.cat([kept.pop(), self.ups[place](x)], 1))
        return self.final_conv(x)


UNET = Family(
    "U-Net",
    (Style("milesial", Milesial), Style("hub", Hub), Style("lists", Lists)),
    lambda: (noise(2, 3, 16, 16),),
    shallower=False,
)
