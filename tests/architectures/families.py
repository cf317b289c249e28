"""All architectures, and all pairs of their styles."""

from __future__ import annotations

from architectures import gpt, lstm, mobilenet, resnet, transformer, vgg
from architectures.family import Family, Pair, pairs

FAMILIES: tuple[Family, ...] = (
    vgg.VGG,
    vgg.VGG_BN,
    resnet.BASIC,
    resnet.BOTTLENECK,
    mobilenet.MOBILENET,
    lstm.TAGGER,
    lstm.LANGUAGE,
    transformer.ENCODER,
    gpt.GPT,
    gpt.LLAMA,
    gpt.GROUPED,
)

PAIRS: list[Pair] = [pair for family in FAMILIES for pair in pairs(family)]
