"""All architectures, and all pairs of their styles."""

from __future__ import annotations

from architectures import clip, convnext, gpt, llama, lstm, mobilenet, normed, resnet, transformer, unet, vgg, vit
from architectures.family import Family, Pair, pairs

FAMILIES: tuple[Family, ...] = (
    vgg.VGG,
    vgg.VGG_BN,
    resnet.BASIC,
    resnet.BOTTLENECK,
    mobilenet.MOBILENET,
    convnext.CONVNEXT,
    unet.UNET,
    normed.WEIGHT_NORM,
    normed.SPECTRAL_NORM,
    lstm.TAGGER,
    lstm.LANGUAGE,
    transformer.ENCODER,
    gpt.GPT,
    llama.LLAMA,
    llama.GROUPED,
    vit.VIT,
    vit.VIT_WITHOUT_BIAS,
    clip.CLIP,
)

PAIRS: list[Pair] = [pair for family in FAMILIES for pair in pairs(family)]
