"""A state dict for each row of the table of quantization schemes, and mappings that look like one and are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import ckptfix

State = dict[str, torch.Tensor]

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Fixture:
    """Quantized tensors of one scheme.

    Attributes:
        tensors: the codes first, then what belongs to them.
        method: what config.json calls it.
    """

    scheme: str
    tensors: State
    method: str | None = None

    @property
    def codes(self) -> str:
        return next(iter(self.tensors))


def _ints(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    info = torch.iinfo(torch.int32 if dtype is torch.uint32 else dtype)
    made = torch.randint(max(info.min, -(2**20)), min(info.max, 2**20), shape)
    return made.to(dtype)


def _floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.rand(shape) + 0.5).to(dtype)


def fixtures() -> list[Fixture]:
    """Layouts as the schemes' own code writes them, with 64 outputs and 128 inputs."""
    torch.manual_seed(0)
    u8, i8, i32 = torch.uint8, torch.int8, torch.int32
    half = torch.float16
    m = "model.layers.3.mlp.up"
    w = f"{m}.weight"
    fp8 = _floats(64, 128, dtype=FP8)
    packed = _ints(u8, 64, 64)
    e8 = _ints(u8, 64, 4)
    rows = [
        ("fp8-scale-inv", {w: fp8, f"{w}_scale_inv": _floats(1, 1)}, "fp8"),
        ("fp8-scale-inv", {w: _floats(300, 130, dtype=FP8), f"{w}_scale_inv": _floats(3, 2)}, "fp8"),
        ("fp8-scale-inv", {f"{m}.gate_up_proj": _floats(4, 64, 128, dtype=FP8),
                           f"{m}.gate_up_proj_scale_inv": _floats(4, 1, 1)}, "fp8"),
        ("fp8-scale", {w: fp8, f"{w}_scale": torch.tensor(0.5), f"{m}.input_scale": torch.tensor(1.0)}, "modelopt"),
        ("fp8-scale", {w: fp8, f"{w}_scale": _floats(64, 1, dtype=torch.bfloat16)}, "compressed-tensors"),
        ("fp8-scale", {w: fp8.to(torch.float8_e5m2), f"{w}_scale": _floats(1)}, "fp8"),
        ("fp8-module-scale", {w: fp8, f"{m}.scale": _floats(1, 1)}, None),
        ("fp8-scale-weight", {w: fp8, f"{m}.scale_weight": _floats(1)}, None),
        ("mxfp8", {w: fp8, f"{w}_scale": e8}, "modelopt"),
        ("nvfp4-modelopt", {w: packed, f"{w}_scale": _floats(64, 8, dtype=FP8), f"{w}_scale_2": torch.tensor(1.0)},
         "modelopt"),
        ("nvfp4-pack-quantized", {f"{w}_packed": packed, f"{w}_scale": _floats(64, 8, dtype=FP8),
                                  f"{w}_global_scale": _floats(1)}, "compressed-tensors"),
        ("mxfp4-pack-quantized", {f"{w}_packed": packed, f"{w}_scale": e8}, "compressed-tensors"),
        ("mxfp4-blocks", {f"{m}.down_proj_blocks": _ints(u8, 2, 64, 4, 16),
                          f"{m}.down_proj_scales": _ints(u8, 2, 64, 4)}, "mxfp4"),
        ("mx-pairs", {f"{w}.blocks": _ints(u8, 64, 4, 16), f"{w}.scales": e8}, None),
        ("bitsandbytes-int8", {w: _ints(i8, 64, 128), f"{m}.SCB": _floats(64), f"{m}.weight_format":
                               torch.tensor(0, dtype=u8)}, "bitsandbytes"),
        ("bitsandbytes-int8-attribute", {w: _ints(i8, 64, 128), f"{w}.SCB": _floats(64), f"{m}.weight_format":
                                         torch.tensor(0, dtype=u8)}, "bitsandbytes"),
        ("smoothquant", {w: _ints(i8, 64, 128), f"{m}.dequant_scale": torch.tensor(0.5)}, None),
        ("smoothquant", {w: _ints(i8, 64, 128), f"{m}.dequant_scale": torch.tensor(0.5),
                         f"{m}.quant_scale": torch.tensor(2.0)}, None),
        ("smoothquant", {w: _ints(i8, 64, 128), f"{m}.dequant_scale": _floats(3)}, None),
        ("smoothquant-qkv", {w: _ints(i8, 96, 128), **{f"{m}.{part}_dequant_scale": torch.tensor(0.5)
                                                       for part in "qkv"}}, None),
        *(("higgs", {w: _ints(torch.int16, 64 * bits // 16, 1024), f"{m}.scales": _floats(64, 4, dtype=half),
                     f"{m}.tables": _floats(2**bits, dtype=half),
                     f"{m}.tables2": _floats(2**bits, 2**bits, 2, dtype=half)}, "higgs") for bits in (2, 3, 4)),
        ("spqr", {f"{m}.dense_weights": _ints(torch.int64, 512), f"{m}.row_offsets": _ints(i32, 65),
                  f"{m}.col_vals": _ints(i32, 40), f"{m}.in_perm": _ints(i32, 64)}, "spqr"),
        ("spqr", {f"{m}.dense_weights": _ints(torch.int64, 512), f"{m}.row_offsets": _ints(i32, 65),
                  f"{m}.col_vals": _ints(i32, 40)}, None),
        *(("gptq-zeros", {f"{m}.qweight": _ints(i32, 128 * bits // 32, 64), f"{m}.scales": _floats(64, 1),
                          f"{m}.zeros": _floats(64, 1)}, None) for bits in (2, 3, 4, 8)),
        ("bitsandbytes-4bit", {w: _ints(u8, 4096, 1), f"{w}.absmax": _floats(128), f"{w}.quant_map": _floats(16),
                               f"{w}.quant_state.bitsandbytes__nf4": _ints(u8, 80)}, "bitsandbytes"),
        ("bitsandbytes-4bit", {w: _ints(u8, 4096, 1), f"{w}.absmax": _ints(u8, 128), f"{w}.quant_map": _floats(16),
                               f"{w}.nested_absmax": _floats(1), f"{w}.nested_quant_map": _floats(256),
                               f"{w}.quant_state.bitsandbytes__fp4": _ints(u8, 80)}, "bitsandbytes"),
        *(("gptq", {f"{m}.qweight": _ints(i32, 128 * bits // 32, 64), f"{m}.qzeros": _ints(i32, 4, 64 * bits // 32),
                    f"{m}.scales": _floats(4, 64, dtype=half), f"{m}.g_idx": _ints(i32, 128)}, "gptq")
          for bits in (2, 3, 4, 8)),
        ("gptq", {f"{m}.qweight": _ints(i32, 16, 64), f"{m}.qzeros": _ints(i32, 4, 8),
                  f"{m}.scales": _floats(4, 64, dtype=half)}, None),
        ("awq", {f"{m}.qweight": _ints(i32, 128, 8), f"{m}.qzeros": _ints(i32, 4, 8),
                 f"{m}.scales": _floats(4, 64, dtype=half)}, "awq"),
        ("pack-quantized", {f"{w}_packed": _ints(i32, 64, 16), f"{w}_scale": _floats(64, 4, dtype=torch.bfloat16),
                            f"{w}_shape": torch.tensor([64, 128])}, "compressed-tensors"),
        ("pack-quantized", {f"{w}_packed": _ints(i32, 64, 16), f"{w}_scale": _floats(64, 4),
                            f"{w}_shape": torch.tensor([64, 128]), f"{w}_zero_point": _ints(i32, 8, 4)},
         "compressed-tensors"),
        ("awq-fast", {f"{m}.qweight": _ints(torch.int16, 16, 128), f"{m}.qzeros": _floats(4, 64, dtype=half),
                      f"{m}.scales": _floats(4, 64, dtype=half)}, "awq"),
        ("awq-fast", {f"{m}.qweight": _ints(torch.int16, 16, 128), f"{m}.scaled_zeros": _floats(4, 64, dtype=half),
                      f"{m}.scales": _floats(4, 64, dtype=half)}, None),
        ("nunchaku", {f"{m}.qweight": _ints(i8, 64, 64), f"{m}.wscales": _floats(2, 64, dtype=torch.bfloat16),
                      f"{m}.smooth_factor": _floats(128, dtype=torch.bfloat16)}, None),
        ("marlin-24", {f"{w}_packed": _ints(i32, 4, 128), f"{m}.scale_packed": _floats(1, 64, dtype=half),
                       f"{m}.meta": _ints(torch.int16, 64, 4)}, "compressed-tensors"),
        ("marlin-sparse", {f"{m}.B_24": _ints(i32, 4, 128), f"{m}.s": _floats(1, 64, dtype=half),
                           f"{m}.B_meta": _ints(torch.int16, 64, 4)}, None),
        ("fp8-scale", {w: fp8, f"{w}_scale": _floats(128)}, "fp8"),
        ("fp8-scale", {f"{m}.w13_weight": _floats(4, 64, 128, dtype=FP8), f"{m}.w13_weight_scale": _floats(4, 2)},
         "fp8"),
        ("fp8-scale-weight", {w: _floats(64, 128, 3, 3, dtype=FP8), f"{m}.scale_weight": _floats(1)}, None),
        ("int8-scales", {w: _ints(i8, 64, 128), f"{m}.scales": _floats(64, dtype=torch.bfloat16)}, None),
        ("int4-scales-and-zeros", {w: _ints(i32, 8, 1, 32, 4),
                                   f"{m}.scales_and_zeros": _floats(4, 64, 2, dtype=torch.bfloat16)}, None),
        ("vptq", {f"{m}.indices": _ints(torch.int16, 1, 16, 64), f"{m}.centroids.weight": _floats(1, 2048),
                  f"{m}.weight_scale": _floats(128, dtype=half), f"{m}.weight_bias": _floats(128, dtype=half)}, "vptq"),
        ("int8-scale", {w: _ints(i8, 64, 128), f"{w}_scale": _floats(64, 1)}, "compressed-tensors"),
        ("eetq", {w: _ints(i8, 128, 64), f"{m}.weight_scales": _floats(64, dtype=half)}, "eetq"),
        ("bitnet", {w: _ints(u8, 16, 128), f"{w}_scale": _floats(1, dtype=torch.bfloat16)}, "bitnet"),
        ("int4-modelopt", {w: _ints(u8, 32, 128), f"{w}_scale": _floats(64, 1)}, "modelopt"),
        ("quanto", {f"{w}._data": _ints(i8, 64, 128), f"{w}._scale": _floats(64, 1)}, "quanto"),
        ("quanto-packed", {f"{w}._data._data": _ints(u8, 32, 72), f"{w}._scale": _floats(64, 1),
                           f"{w}._shift": _floats(64, 1)}, "quanto"),
        ("torchao-flattened", {f"{m}._weight_qdata": fp8, f"{m}._weight_scale": _floats(64, 1)}, "torchao"),
        ("torchao-colon", {f"{w}:qdata": _ints(i8, 64, 128), f"{w}:scale": _floats(64, 1),
                           f"{w}:zero_point": _ints(i8, 64, 1)}, "torchao"),
        ("mlx", {w: _ints(torch.uint32, 64, 16), f"{m}.scales": _floats(64, 2, dtype=half),
                 f"{m}.biases": _floats(64, 2, dtype=half)}, None),
        ("mlx-mx", {w: _ints(torch.uint32, 64, 16), f"{m}.scales": _ints(u8, 64, 4)}, None),
        ("hqq", {f"{m}.W_q": _ints(u8, 64, 64), f"{m}.scale": _floats(1, 128), f"{m}.zero": _floats(1, 128)}, "hqq"),
        ("marlin", {f"{m}.B": _ints(i32, 8, 128), f"{m}.s": _floats(1, 64, dtype=half)}, None),
        ("exl2", {f"{m}.q_weight": _ints(i32, 16, 64), f"{m}.q_scale": _ints(i32, 4, 8),
                  f"{m}.q_scale_max": _floats(4, dtype=half)}, None),
        ("exl3", {f"{m}.trellis": _ints(torch.int16, 8, 4, 64), f"{m}.suh": _floats(128, dtype=half),
                  f"{m}.svh": _floats(64, dtype=half)}, None),
        ("aqlm", {f"{m}.codes": _ints(torch.int16, 64, 16, 1), f"{m}.codebooks": _floats(1, 256, 1, 8, dtype=half),
                  f"{m}.scales": _floats(64, 1, 1, 1, dtype=half)}, "aqlm"),
        ("quip", {f"{m}.Qidxs": _ints(torch.int64, 64, 16), f"{m}.SU": _floats(128, dtype=half),
                  f"{m}.SV": _floats(64, dtype=half)}, "quip"),
    ]  # fmt: skip
    return [Fixture(*row) for row in rows]


PLAIN: dict[str, Callable[[], State]] = {
    "layer_scale": lambda: {"blocks.0.layer_scale": torch.rand(8), "blocks.0.weight": torch.rand(8, 8)},
    "logit_scale": lambda: {"logit_scale": torch.tensor(2.0), "logit.weight": torch.rand(4, 4)},
    "RMSNorm's scale": lambda: {"norm.scale": torch.rand(8), "fc.weight": torch.rand(8, 8)},
    "an int8 buffer": lambda: {"mask.weight": torch.ones(4, 4, dtype=torch.int8), "mask.scale": torch.rand(4)},
    "a float weight beside a weight_scale": lambda: {"l.weight": torch.rand(4, 4), "l.weight_scale": torch.rand(4, 1)},
    "a float weight beside a weight_scale_inv": lambda: {
        "l.weight": torch.rand(4, 4, dtype=torch.float16), "l.weight_scale_inv": torch.rand(1, 1),
    },
    "a float weight beside scales and biases": lambda: {
        "l.weight": torch.rand(8, 4), "l.scales": torch.rand(8, 2), "l.biases": torch.rand(8, 2),
    },
    "group norm": lambda: {"gn.weight": torch.rand(8), "gn.bias": torch.rand(8), "gn.scale_shift": torch.rand(2, 8)},
    "batch norm": lambda: torch.nn.BatchNorm2d(4).state_dict(),
    "fp8 alone": lambda: {"l.weight": torch.rand(8, 8).to(FP8), "l.bias": torch.rand(8)},
    "int32 positions": lambda: {"pos.index": torch.arange(8, dtype=torch.int32), "pos.scales": torch.rand(8)},
    "codes of tokens": lambda: {"tok.codes": torch.arange(8, dtype=torch.int32), "tok.scales": torch.rand(8)},
    "an int8 buffer beside dequant_scale": lambda: {
        "mask.codes": torch.ones(4, 4, dtype=torch.int8), "mask.dequant_scale": torch.tensor(0.5),
    },
    "a float weight beside dequant_scale": lambda: {"l.weight": torch.rand(4, 4), "l.dequant_scale": torch.rand(1)},
    "two of three dequant_scales": lambda: {
        "l.weight": torch.ones(4, 4, dtype=torch.int8), "l.q_dequant_scale": torch.rand(1),
        "l.k_dequant_scale": torch.rand(1),
    },
    "a float weight beside SCB": lambda: {"l.weight": torch.rand(4, 4), "l.weight.SCB": torch.rand(4)},
    "a float weight beside tables": lambda: {
        "l.weight": torch.rand(4, 64), "l.scales": torch.rand(16, 1), "l.tables": torch.rand(16),
        "l.tables2": torch.rand(16, 16, 2),
    },
    "int16 samples beside scales": lambda: {
        "audio.weight": torch.ones(4, 64, dtype=torch.int16), "audio.scales": torch.rand(16, 1),
    },
    "rows of a sparse matrix": lambda: {
        "csr.row_offsets": torch.arange(5, dtype=torch.int32), "csr.col_vals": torch.arange(9, dtype=torch.int32),
    },
    "float dense_weights": lambda: {
        "l.dense_weights": torch.rand(16), "l.row_offsets": torch.arange(5, dtype=torch.int32),
        "l.col_vals": torch.arange(9, dtype=torch.int32),
    },
    "zeros beside a float weight": lambda: {
        "l.qweight": torch.rand(8, 8), "l.scales": torch.rand(8, 1), "l.zeros": torch.zeros(8, 1),
    },
    "s and B of other dtypes": lambda: {"ssm.B": torch.rand(8, 8), "ssm.s": torch.rand(8)},
}  # fmt: skip
"""Names, dtypes or shapes of a scheme, but never the first two."""

ODD: dict[str, Callable[[], State]] = {
    f"{codes} {suffix} {shape}": lambda codes=codes, suffix=suffix, shape=shape: {  # type: ignore[misc]
        "l.weight": torch.ones(8, 8).to(codes), f"l.{suffix}": torch.rand(shape),
    }
    for codes, suffix in (
        (FP8, "weight_scale"), (torch.float8_e5m2, "weight_scale_inv"), (FP8, "scale_weight"),
        (torch.int8, "weight_scale"), (torch.int8, "SCB"), (torch.uint8, "weight_scale"), (torch.int8, "weight.SCB"),
        (torch.int8, "dequant_scale"),
    )
    for shape in ((7,), (3, 5, 2), (9, 9))
}  # fmt: skip
"""Codes with a scale by name and dtype, whose shape is that of no scheme."""

BESIDE: State = {"model.norm.weight": torch.ones(16), "model.embed.bias": torch.zeros(16)}
"""What is in a file beside the quantized weights."""


def written(state: State, folder: Path, kind: str, method: str | None = None) -> Path:
    """A checkpoint of `state` in one of `KINDS`."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "zip":
        torch.save(state, folder / "model.pth")
        return folder / "model.pth"
    whole = folder / "model.safetensors"
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in state.items()}, whole, {"format": "pt"})
    if kind == "safetensors":
        return whole
    if kind == "hf":
        ckptfix.convert(whole, folder / "shards", to="hf", shard_size=4096)
        return folder / "shards"
    config: dict[str, Any] = {"model_type": "llama"}
    if method is not None:
        config["quantization_config"] = {"quant_method": method}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


KINDS = ("zip", "safetensors", "hf", "folder")
