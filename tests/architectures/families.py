"""All architectures, and all pairs of their styles."""

from __future__ import annotations

from architectures import resnet, transformer, vgg
from architectures.family import Family, Pair, pairs

FAMILIES: tuple[Family, ...] = (
    vgg.VGG,
    vgg.VGG_BN,
    resnet.BASIC,
    resnet.BOTTLENECK,
    transformer.ENCODER,
)

PAIRS: list[Pair] = [pair for family in FAMILIES for pair in pairs(family)]
