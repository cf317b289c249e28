"""Damaged quantized weights of every scheme are refused by name, and nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from quantized_files import BESIDE, Fixture, fixtures
from unit.ops.test_dequantize_libraries import AO, hqq

import ckptfix
from ckptfix.checkpoint.quantization_signs import FLOATS
from ckptfix.errors import CkptfixError
from ckptfix.ops.dequantize.table import DECODERS

State = dict[str, torch.Tensor]
M = "model.layers.3.mlp.up"
W = f"{M}.weight"


def four_bits() -> State:
    """A weight of 4 x 64 as bitsandbytes writes it."""
    about = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [4, 64]}
    return {
        W: torch.randint(0, 255, (128, 1), dtype=torch.uint8), f"{W}.absmax": torch.rand(4),
        f"{W}.quant_map": torch.linspace(-1, 1, 16),
        f"{W}.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8),
    }  # fmt: skip


def good() -> Iterator[tuple[str, State, dict[str, Any], dict[str, str]]]:
    """(scheme, tensors, settings of config.json, metadata) of whole weights."""
    for row in fixtures():
        if row.scheme not in DECODERS or row.scheme in ("bitsandbytes-4bit", "hqq", "torchao-flattened"):
            continue
        yield row.scheme, whole(row), *beside(row)
    yield "bitsandbytes-4bit", four_bits(), {"quant_method": "bitsandbytes"}, {}
    yield "hqq", {name.replace("l.", f"{M}."): tensor for name, tensor in hqq(4, 1)[0].items()
                  if "bias" not in name}, {"quant_method": "hqq"}, {}  # fmt: skip
    about = {"_type": "Int8Tensor", "_data": {"dtype": {"_data": "bfloat16"}}}
    yield ("torchao-flattened", {f"{M}._weight_{name}": tensor for name, tensor in AO["Int8Tensor"]().items()},
           {"quant_method": "torchao"}, {W: json.dumps(about)})  # fmt: skip


def whole(row: Fixture) -> State:
    tensors = dict(row.tensors)
    if f"{M}.g_idx" in tensors:
        tensors[f"{M}.g_idx"] = torch.arange(128, dtype=torch.int32) // 32
    for name, tensor in tensors.items():
        if tensor.dtype == torch.uint8 and tensor.dim() and name.endswith(("scale", "scales")):
            tensors[name] = tensor.clamp(100, 150)
    return tensors


def beside(row: Fixture) -> tuple[dict[str, Any], dict[str, str]]:
    config: dict[str, Any] = {"quant_method": row.method or "none"}
    if row.scheme == "mlx":
        config |= {"bits": 4, "group_size": 64}
    if row.scheme == "pack-quantized":
        config |= {"config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 32}}}}
    about = {"_type": "Int8Tensor", "_data": {"dtype": {"_data": "bfloat16"}}}
    return config, {W: json.dumps(about)} if row.scheme == "torchao-colon" else {}


def absent(tensor: torch.Tensor) -> torch.Tensor | None:
    return None


def longer(tensor: torch.Tensor) -> torch.Tensor:
    """One more column, or one more number."""
    return torch.cat([tensor, tensor[..., :1]], dim=-1) if tensor.dim() else tensor.repeat(7)


def taller(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor[:1]]) if tensor.dim() else tensor.reshape(1, 1).repeat(3, 3)


def deeper(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.repeat(3, *[1] * (tensor.dim() + 1))


def filled(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def fill(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor.clone()
        made.view(-1)[-1] = value
        return made

    return fill


SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "absent": absent, "longer": longer, "taller": taller, "deeper": deeper,
}  # fmt: skip
VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "nan": filled(float("nan")), "inf": filled(float("inf")),
}  # fmt: skip

OPTIONAL = ("input_scale", "weight_format", "output_scale", "_activation_scale", "g_idx", "_zero_point")
"""Companions that the computation does without."""

FREE = ("fp8", "int8", "bitnet", "quanto", "torchao", "int4-modelopt", "bitsandbytes-int8")
"""Beginnings of schemes whose codes may have any number of rows or columns that the scale divides."""

GROUPED = {
    ("fp8-scale-inv", "longer"), ("fp8-scale-inv", "taller"), ("fp8-scale", "longer"), ("fp8-scale", "taller"),
    ("fp8-module-scale", "longer"), ("fp8-module-scale", "taller"), ("fp8-scale-weight", "longer"),
    ("fp8-scale-weight", "taller"), ("int8-scale", "longer"), ("int4-modelopt", "longer"),
}  # fmt: skip
"""A scale with twice as many numbers is one for half as many rows or columns."""

PADDED = {("bitsandbytes-4bit", "taller"), ("gptq", "taller")}
"""Codes with a few more bytes at their end, or another row of inputs in the last group."""

UNUSED = (
    "nbits", "group_size", "unpack_view_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config",
    "channel_wise", "optimize", "round_zero",
)  # fmt: skip
"""Settings of hqq that the computation does without."""


def legitimate(scheme: str, name: str, how: str, *, codes: bool) -> bool:
    """Whether the tensors still are a weight of the scheme, if a different one."""
    if name.endswith(("input_scale", *UNUSED)):
        return True
    if how == "absent":
        return name.endswith((*OPTIONAL, "zero_point"))
    if codes:
        return scheme.startswith(FREE) or (scheme, how) in PADDED
    return name.endswith("weight_format") or (scheme, how) in GROUPED


def converted(folder: Path, state: State, config: dict[str, Any], metadata: dict[str, str]) -> CkptfixError | None:
    """The error of a dequantization, with nothing written; None if there is none."""
    source, dest = folder / "in.safetensors", folder / "out.safetensors"
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in state.items()}, source, metadata)
    key = "quantization" if "bits" in config else "quantization_config"
    (folder / "config.json").write_text(json.dumps({key: config}))
    try:
        ckptfix.convert(source, dest, dequantize=True)
    except CkptfixError as error:
        assert not dest.exists() and sorted(path.name for path in folder.iterdir()) == ["config.json", "in.safetensors"]
        return error
    dest.unlink()
    return None


GOOD = list(good())


def test_every_scheme_that_is_computed_is_tried() -> None:
    assert {scheme for scheme, *_ in GOOD} == set(DECODERS) - {"torch-quantized", "tensor-class", "gguf-blocks"}


@pytest.mark.sampled(40)
@pytest.mark.parametrize(("scheme", "state", "config", "metadata"), GOOD,
                         ids=[f"{number}-{row[0]}" for number, row in enumerate(GOOD)])  # fmt: skip
def test_damage_is_refused_by_name(
    tmp_path: Path, scheme: str, state: State, config: dict[str, Any], metadata: dict[str, str]
) -> None:
    assert converted(tmp_path, {**state, **BESIDE}, config, metadata) is None
    wrong: list[str] = []
    for name, tensor in state.items():
        floats = str(tensor.dtype).removeprefix("torch.") in FLOATS
        codes = name == next(iter(state))
        for how, damage in {**SHAPES, **(VALUES if floats else {})}.items():
            made = damage(tensor)
            others = {other: one for other, one in state.items() if other != name}
            whole = {**others, **({} if made is None else {name: made}), **BESIDE}
            error = converted(tmp_path, whole, config, metadata)
            if error is not None:
                named = error.where in state or "no quantized weights" in error.message
                assert named and error.message, (name, how, error.where, error.message)
            elif not legitimate(scheme, name, how, codes=codes):
                wrong.append(f"{name} {how}")
    assert wrong == [], scheme
