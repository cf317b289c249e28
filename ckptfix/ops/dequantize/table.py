"""The decoder of each scheme in `checkpoint.quantization`, or the reason why it has no decoder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ckptfix.ops.dequantize import blockwise, ggml, libraries, own, packed, scaled
from ckptfix.ops.dequantize.layout import Opener

DECODERS: Mapping[str, Opener] = {
    "fp8-scale-inv": scaled.fp8,
    "fp8-scale": scaled.fp8,
    "fp8-module-scale": scaled.fp8,
    "fp8-scale-weight": scaled.fp8,
    "mxfp8": scaled.mxfp8,
    "mxfp4-pack-quantized": scaled.mxfp4,
    "mxfp4-blocks": scaled.mx_blocks,
    "mx-pairs": scaled.mx_blocks,
    "nvfp4-modelopt": partial(scaled.nvfp4, second="_scale_2", divided=False),
    "nvfp4-pack-quantized": partial(scaled.nvfp4, second="_global_scale", divided=True),
    "int8-scale": scaled.int8,
    "int8-scales": scaled.int8,
    "bitsandbytes-int8": scaled.bitsandbytes_int8,
    "bitsandbytes-int8-attribute": scaled.bitsandbytes_int8,
    "bitsandbytes-4bit": blockwise.bitsandbytes_4bit,
    "gptq": packed.gptq,
    "awq": packed.awq,
    "pack-quantized": packed.pack_quantized,
    "mlx": packed.mlx,
    "mlx-mx": libraries.mlx_mx,
    "hqq": libraries.hqq,
    "quanto": libraries.quanto,
    "quanto-packed": libraries.quanto_packed,
    "torchao-flattened": libraries.flattened,
    "torchao-colon": libraries.flattened,
    "tensor-class": libraries.subclass,
    "int4-modelopt": libraries.int4_modelopt,
    "bitnet": libraries.bitnet,
    own.TORCH.id: own.own,
    "gguf-blocks": ggml.blocks,
}
"""Id of a scheme -> the function that lays out its weights."""

_KERNEL = "the codes are in the order of a kernel, which is not known here"
_CODEBOOK = "the weights are sums of vectors of a codebook"

REASONS: Mapping[str, str] = {
    "smoothquant": "the scale has that of the activations in it",
    "smoothquant-qkv": "the scale has that of the activations in it",
    "higgs": _KERNEL,
    "spqr": "outliers are stored apart from the codes",
    "gptq-zeros": "the layout of early 2023 has several versions, which its files do not tell apart",
    "awq-fast": _KERNEL,
    "nunchaku": _KERNEL,
    "marlin-24": _KERNEL,
    "marlin": _KERNEL,
    "marlin-sparse": _KERNEL,
    "eetq": _KERNEL,
    "int4-scales-and-zeros": _KERNEL,
    "exl2": "its groups differ in bits",
    "exl3": "its codes are paths of a trellis",
    "aqlm": _CODEBOOK,
    "vptq": _CODEBOOK,
    "quip": _CODEBOOK,
    "unknown-layout": "a shape does not fit the scheme that its names and dtypes suggest",
}
"""Id of a scheme that is recognized and not computed -> the reason."""
