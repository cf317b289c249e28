"""Plain weights from quantized ones: bit for bit what the code of each scheme computes.

The references are element by element, from the source that the table of schemes names, and share nothing with the
implementation.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.torch
import torch
from quantized_files import BESIDE, FP8, KINDS, fixtures, written

import ckptfix
from ckptfix.checkpoint.quantization import GGUF, SCHEMES, SUBCLASS, UNKNOWN
from ckptfix.elements.arrays import eight_bits, halves, nearest
from ckptfix.errors import CkptfixError, Refused, WouldLoseData
from ckptfix.ops.dequantize.own import TORCH
from ckptfix.ops.dequantize.table import DECODERS, REASONS

State = dict[str, torch.Tensor]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_every_scheme_is_computed_or_has_a_reason() -> None:
    ids = {scheme.id for scheme in (*SCHEMES, GGUF, SUBCLASS, UNKNOWN, TORCH)}
    assert not set(DECODERS) & set(REASONS)
    assert set(DECODERS) | set(REASONS) == ids


def plain(
    state: State, folder: Path, config: dict[str, Any] | None = None, dtype: Any = None
) -> tuple[State, ckptfix.ops.convert.ConvertResult]:
    """What convert --dequantize makes of a safetensors file."""
    folder.mkdir(exist_ok=True)
    source, dest = folder / "in.safetensors", folder / "out.safetensors"
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in state.items()}, source)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    result = ckptfix.convert(source, dest, dequantize=True, dtype=dtype, force=True)
    return safetensors.torch.load_file(dest), result


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


def i32(words: list[list[int]]) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def packed(codes: list[int], bits: int) -> list[int]:
    """A row of 32-bit words with the codes one after another, the first in the lowest bits."""
    stream = sum(code << (place * bits) for place, code in enumerate(codes))
    return [(stream >> shift) & 0xFFFFFFFF for shift in range(0, len(codes) * bits, 32)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", [(300, 130), (256, 256), (2, 200, 257)])
def test_fp8_blocks_as_deepseek(tmp_path: Path, shape: tuple[int, ...]) -> None:
    codes = torch.randn(shape).to(FP8)
    grid = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    scale = torch.rand(grid) + 0.01
    expected = torch.empty(shape)
    columns = torch.arange(shape[-1]) // 128
    for row in range(shape[-2]):
        expected[..., row, :] = codes[..., row, :].float() * scale[..., row // 128, columns]
    found, result = plain({"l.weight": codes, "l.weight_scale_inv": scale, "l.bias": torch.ones(3)}, tmp_path)
    assert sorted(found) == ["l.bias", "l.weight"]
    same(found["l.weight"], expected.bfloat16())
    same(plain({"l.weight": codes, "l.weight_scale_inv": scale}, tmp_path, dtype="fp32")[0]["l.weight"], expected)
    assert result.dequantized == {"l.weight": ("l.weight", "bfloat16")}
    assert result.companions == ("l.weight_scale_inv",) and result.exit_code == 0


def test_the_block_of_config_json_decides(tmp_path: Path) -> None:
    codes, scale = torch.randn(200, 64).to(FP8), torch.rand(2, 1) + 0.01
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [100, 64]}}
    expected = codes.float() * scale.repeat_interleave(100, 0)
    same(plain({"l.weight": codes, "l.weight_scale_inv": scale}, tmp_path, config, "fp32")[0]["l.weight"], expected)


def test_a_scale_of_float64_is_used_as_float32(tmp_path: Path) -> None:
    codes, scale = torch.randn(300, 130).to(FP8), torch.rand(3, 2, dtype=torch.float64) + 0.01
    wide = scale.float().repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :130]
    found, _ = plain({"l.weight": codes, "l.weight_scale_inv": scale}, tmp_path)
    same(found["l.weight"], (codes.float() * wide).bfloat16())


@pytest.mark.parametrize("shape", [(), (1,), (64, 1), (64,)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_rows_and_tensors(tmp_path: Path, shape: tuple[int, ...], kind: torch.dtype, codes: torch.dtype) -> None:
    weight, scale = torch.randn(64, 48).to(codes), (torch.rand(shape) + 0.01).to(kind)
    config = {"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}}
    by_row = scale.reshape(64, 1) if scale.numel() > 1 else scale
    found, _ = plain({"l.weight": weight, "l.weight_scale": scale}, tmp_path, config)
    same(found["l.weight"], weight.to(kind) * by_row)


GPTQ = {"quantization_config": {"quant_method": "gptq", "checkpoint_format": "gptq"}}
GPTQ_2 = {"quantization_config": {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}}


def gptq(bits: int, inputs: int, outputs: int, index: list[int], kind: torch.dtype, *, version: int = 1) -> Any:
    """Tensors of GPTQ, and the weight that GPTQModel computes from them."""
    groups = max(index) + 1
    codes = torch.randint(0, 1 << bits, (outputs, inputs))
    # A zero of version 1 is stored less one, so it is at least one.
    zeros = torch.randint(1, 1 << bits, (groups, outputs))
    scales = (torch.rand(groups, outputs) + 0.01).to(kind)
    state = {
        "m.qweight": i32([packed(row, bits) for row in codes.tolist()]).T.contiguous(),
        "m.qzeros": i32([packed([zero - (version == 1) for zero in row], bits) for row in zeros.tolist()]),
        "m.scales": scales,
        "m.g_idx": torch.tensor(index, dtype=torch.int32),
    }
    expected = torch.empty(outputs, inputs, dtype=kind)
    for column, group in enumerate(index):
        expected[:, column] = scales[group] * (codes[:, column] - zeros[group]).to(kind)
    return state, expected


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("order", ["groups", "act-order", "one group", "uneven"])
def test_gptq(tmp_path: Path, bits: int, version: int, order: str) -> None:
    index = {
        "groups": [place // 32 for place in range(128)],
        "act-order": torch.randperm(128).div(32, rounding_mode="floor").tolist(),
        "one group": [0] * 128,
        "uneven": [place // 50 for place in range(128)],
    }[order]
    state, expected = gptq(bits, 128, 96, index, torch.float16, version=version)
    config = GPTQ if version == 1 else GPTQ_2
    found, result = plain(state, tmp_path, config)
    assert list(found) == ["m.weight"]
    same(found["m.weight"], expected)
    assert result.companions == ("m.g_idx", "m.qzeros", "m.scales") or len(result.companions) == 3


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zeros_of_version_1_are_less_one_in_whole_words(tmp_path: Path, bits: int) -> None:
    """GPTQModel subtracts from whole words, so zeros of 0 borrow from their neighbors, and it adds likewise."""
    state, _ = gptq(bits, 32, 32, [0] * 32, torch.float16, version=2)
    zeros = torch.zeros_like(state["m.qzeros"])
    ones = sum(1 << shift for shift in range(0, 32, bits))
    second, _ = plain({**state, "m.qzeros": zeros}, tmp_path, GPTQ_2)
    first, _ = plain({**state, "m.qzeros": zeros - ones}, tmp_path, GPTQ)
    same(first["m.weight"], second["m.weight"])


def test_three_bits_of_version_1_as_gptqmodel_writes_them(tmp_path: Path) -> None:
    state, expected = gptq(3, 64, 96, [0] * 64, torch.float16, version=2)
    less = torch.tensor([0x24924924, 0x92492492, 0x49249249] * 3, dtype=torch.int64)
    state["m.qzeros"] = (state["m.qzeros"].long() - less).to(torch.int32)
    config = {"quantization_config": {**GPTQ["quantization_config"], "meta": {"quantizer": ["gptqmodel:4.0"]}}}
    same(plain(state, tmp_path, config)[0]["m.weight"], expected)


def test_gptq_without_g_idx_and_in_bfloat16(tmp_path: Path) -> None:
    state, expected = gptq(4, 128, 64, [place // 32 for place in range(128)], torch.bfloat16)
    del state["m.g_idx"]
    same(plain(state, tmp_path, GPTQ)[0]["m.weight"], expected)


@pytest.mark.parametrize(("inputs", "outputs", "groups"), [(128, 64, 4), (64, 8, 1), (96, 2048, 3)])
def test_awq(tmp_path: Path, inputs: int, outputs: int, groups: int) -> None:
    codes = torch.randint(0, 16, (inputs, outputs)).tolist()
    zeros = torch.randint(0, 16, (groups, outputs)).tolist()
    scales = (torch.rand(groups, outputs) + 0.01).half()
    # The first word of a row holds the outputs 0 2 4 6 1 3 5 7, from its lowest bits on.
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    words = [
        i32([[word for at in range(0, outputs, 8) for word in packed([row[at + k] for k in order], 4)] for row in rows])
        for rows in (codes, zeros)
    ]
    size = inputs // groups
    expected = torch.empty(outputs, inputs, dtype=torch.float16)
    for row in range(inputs):
        less = torch.tensor(codes[row]) - torch.tensor(zeros[row // size])
        expected[:, row] = less.half() * scales[row // size]
    found, _ = plain({"m.qweight": words[0], "m.qzeros": words[1], "m.scales": scales}, tmp_path)
    same(found["m.weight"], expected)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("zeros", ["none", "packed", "int8"])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_pack_quantized(tmp_path: Path, bits: int, zeros: str, kind: torch.dtype) -> None:
    rows, columns, size = 64, 96, 32
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (rows, columns))
    zero = torch.randint(-half, half, (rows, columns // size))
    scale = (torch.rand(rows, columns // size) + 0.01).to(kind)
    state = {
        "l.weight_packed": i32([packed([code + half for code in row], bits) for row in codes.tolist()]),
        "l.weight_scale": scale,
        "l.weight_shape": torch.tensor([rows, columns]),
    }
    if zeros == "packed":
        turned = [packed([code + half for code in row], bits) for row in zero.T.tolist()]
        state["l.weight_zero_point"] = i32(turned).T.contiguous()
    elif zeros == "int8":
        state["l.weight_zero_point"] = zero.to(torch.int8)
    expected = torch.empty(rows, columns, dtype=kind)
    for column in range(columns):
        less = codes[:, column] - (zero[:, column // size] if zeros != "none" else 0)
        expected[:, column] = less.to(kind) * scale[:, column // size]
    same(plain(state, tmp_path)[0]["l.weight"], expected)


def test_int8_as_bitsandbytes(tmp_path: Path) -> None:
    codes = torch.randint(-127, 128, (40, 33)).to(torch.int8)
    scale = torch.rand(40) * 9
    state = {"l.weight": codes, "l.SCB": scale, "l.weight_format": torch.tensor(0, dtype=torch.uint8)}
    same(plain(state, tmp_path)[0]["l.weight"], codes * scale.view(-1, 1) * 7.874015718698502e-3)
    state["l.weight_format"] = torch.tensor(2, dtype=torch.uint8)
    with pytest.raises(Refused, match="kernel") as refused:
        plain(state, tmp_path)
    assert refused.value.where == "l.weight_format"


@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
def test_int8_with_zeros(tmp_path: Path, kind: torch.dtype) -> None:
    codes, zero = torch.randint(-128, 128, (2, 40, 33)).to(torch.int8)[0], torch.randint(-128, 128, (40, 1))
    scale = (torch.rand(40, 1) + 0.01).to(kind)
    state = {"l.weight": codes, "l.weight_scale": scale, "l.weight_zero_point": zero.to(torch.int8)}
    same(plain(state, tmp_path)[0]["l.weight"], (codes.to(kind) - zero.to(kind)) * scale)


def four_bits(
    shape: tuple[int, ...], size: int, kind: str, dtype: str, *, nested: bool = False
) -> tuple[State, torch.Tensor]:
    numel = math.prod(shape)
    codes = torch.randint(0, 16, (numel + numel % 2,))
    table = torch.linspace(-1, 1, 16) ** 3
    if kind == "fp4":
        table[[0, 8]] = 0.0  # as in bitsandbytes' own, so that zeros have no sign
    blocks = -(-numel // size)
    absmax = torch.rand(blocks) + 0.01
    stated: dict[str, Any] = {"quant_type": kind, "blocksize": size, "dtype": dtype, "shape": list(shape)}
    state = {
        "l.weight": (codes[::2] * 16 + codes[1::2]).to(torch.uint8).unsqueeze(1),
        "l.weight.absmax": absmax,
        "l.weight.quant_map": table,
    }
    if nested:
        small, second = torch.randint(0, 256, (blocks,)), torch.rand(-(-blocks // 256))
        book = torch.linspace(-1, 1, 256)
        stated |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.7}
        state |= {
            "l.weight.absmax": small.to(torch.uint8),
            "l.weight.nested_absmax": second,
            "l.weight.nested_quant_map": book,
        }
        absmax = book[small] * second.repeat_interleave(256)[:blocks] + torch.tensor(0.7)
    text = json.dumps(stated).encode()
    state[f"l.weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    numbers = table[codes[:numel]] * absmax.repeat_interleave(size)[:numel]
    return state, numbers.to(getattr(torch, dtype)).reshape(shape)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(("shape", "size", "dtype"), [
    ((64, 128), 64, "bfloat16"), ((33, 65), 64, "float16"), ((3, 7), 128, "float32"), ((600, 64), 32, "bfloat16"),
])  # fmt: skip
def test_four_bits_as_bitsandbytes(
    tmp_path: Path, shape: tuple[int, ...], size: int, dtype: str, kind: str, nested: bool
) -> None:
    state, expected = four_bits(shape, size, kind, dtype, nested=nested)
    found, _ = plain(state, tmp_path)
    assert list(found) == ["l.weight"]
    assert torch.equal(torch.signbit(found["l.weight"]), torch.signbit(expected))
    same(found["l.weight"], expected)


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the first in the low bits."""
    return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)


def e2m1(codes: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([*E2M1, *(-number for number in E2M1)])
    return table[codes]


@pytest.mark.parametrize("divided", [True, False])
def test_nvfp4(tmp_path: Path, divided: bool) -> None:
    codes = torch.randint(0, 16, (32, 64))
    scale, most = (torch.rand(32, 4) * 100 + 1).to(FP8), torch.tensor([37.25])
    names = ("_packed", "_global_scale") if divided else ("", "_scale_2")
    state = {f"l.weight{names[0]}": nibbles(codes), "l.weight_scale": scale, f"l.weight{names[1]}": most}
    whole = scale.float() / most if divided else scale.float() * most
    # ModelOpt's table has no negative zero, and that of compressed-tensors has one.
    expected = (e2m1(codes) if divided else e2m1(codes) + 0) * whole.repeat_interleave(16, 1)
    same(plain(state, tmp_path)[0]["l.weight"], expected.bfloat16())
    same(plain(state, tmp_path, dtype="fp32")[0]["l.weight"], expected)


@pytest.mark.parametrize("settings", [{"quant_method": "modelopt", "quant_algo": "FP8"}, {"quant_method": "fp8"}])
@pytest.mark.parametrize("shape", [(), (32, 1)])
def test_modelopt_rounds_the_scale_of_fp8(tmp_path: Path, shape: tuple[int, ...], settings: dict[str, str]) -> None:
    weight, scale = torch.randn(32, 64).to(FP8), torch.rand(shape) + 0.0123
    config = {"quantization_config": settings}
    state = {"l.weight": weight, "l.weight_scale": scale}
    first = scale.bfloat16().float() if settings["quant_method"] == "modelopt" else scale
    same(plain(state, tmp_path, config)[0]["l.weight"], (weight.float() * first).bfloat16())
    same(plain(state, tmp_path, config, dtype="fp32")[0]["l.weight"], weight.float() * scale)


@pytest.mark.parametrize("four", [True, False])
def test_mx_with_scales_in_the_shape_of_groups(tmp_path: Path, four: bool) -> None:
    powers = torch.randint(100, 140, (32, 2)).to(torch.uint8)
    two = torch.tensor(2.0) ** (powers.float() - 127)
    if four:
        codes = torch.randint(0, 16, (32, 64))
        state, numbers = {"l.weight_packed": nibbles(codes), "l.weight_scale": powers}, e2m1(codes)
    else:
        weight = torch.randn(32, 64).to(FP8)
        state, numbers = {"l.weight": weight, "l.weight_scale": powers}, weight.float()
    same(plain(state, tmp_path)[0]["l.weight"], (numbers * two.repeat_interleave(32, 1)).bfloat16())


def stated(settings: dict[str, Any]) -> torch.Tensor:
    """ComfyUI's statement about a weight, as its files hold it."""
    return torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)


COMFY: list[tuple[State, dict[str, Any]]] = [
    ({"l.weight": torch.zeros(128, 32, dtype=torch.uint8), "l.weight_scale": torch.ones(128, 4).to(FP8),
      "l.weight_scale_2": torch.tensor(1.0)}, {"format": "nvfp4"}),
    ({"l.weight": torch.ones(128, 128).to(FP8), "l.weight_scale": torch.ones(128, 4, dtype=torch.uint8)},
     {"format": "mxfp8"}),
    ({"l.weight": torch.ones(8, 4, dtype=torch.int8), "l.weight_scale": torch.ones(8, 1)},
     {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 4}),
    ({"l.weight": torch.ones(8, 4, dtype=torch.int8), "l.weight_scale": torch.ones(8, 1)}, {"format": "of next year"}),
]  # fmt: skip
"""Weights in ComfyUI's formats, whose names, dtypes and shapes are those of other schemes."""


@pytest.mark.parametrize("row", COMFY, ids=lambda row: row[1]["format"])
@pytest.mark.parametrize("where", ["tensor", "metadata"])
def test_comfyui_orders_for_kernels_are_refused(tmp_path: Path, row: Any, where: str) -> None:
    state, settings = row
    metadata = {"_quantization_metadata": json.dumps({"layers": {"l": settings}})} if where == "metadata" else None
    beside = {"m.l.comfy_quant": stated(settings)} if where == "tensor" else {}
    named = {f"m.{key}": value for key, value in state.items()}
    safetensors.torch.save_file(named | beside, tmp_path / "in.safetensors", metadata)
    with pytest.raises(Refused, match=f"ComfyUI stored it as {settings['format']}"):
        ckptfix.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", dequantize=True)


@pytest.mark.parametrize("codes", [FP8, torch.float8_e5m2, torch.int8])
def test_comfyui_codes_times_scale(tmp_path: Path, codes: torch.dtype) -> None:
    name = "int8_tensorwise" if codes == torch.int8 else str(codes).removeprefix("torch.")
    weight = (torch.randn(8, 4) * 3).to(codes)
    state = {"l.weight": weight, "l.weight_scale": torch.tensor(0.5), "l.comfy_quant": stated({"format": name})}
    metadata = {"_quantization_metadata": json.dumps({"layers": {"l": {"format": name}}}), "kept": "yes"}
    safetensors.torch.save_file(state, tmp_path / "in.safetensors", metadata)
    ckptfix.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", dequantize=True, dtype="fp32")
    made = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert list(made) == ["l.weight"] and torch.equal(made["l.weight"], weight.float() * 0.5)
    with safetensors.safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "kept": "yes"}


@pytest.mark.parametrize(("name", "turned"), [("gate_up_proj", True), ("down_proj", True), ("mlp1_weight", False)])
def test_blocks_of_gpt_oss(tmp_path: Path, name: str, turned: bool) -> None:
    """Transformers turns the projections of its experts around; gpt-oss itself does not."""
    experts, outputs, groups = 3, 20, 3
    codes = torch.randint(0, 16, (experts, outputs, groups, 32))
    powers = torch.randint(100, 140, (experts, outputs, groups)).to(torch.uint8)
    mark = "_" if turned else "."
    state = {f"m.{name}{mark}blocks": nibbles(codes), f"m.{name}{mark}scales": powers}
    numbers = e2m1(codes).bfloat16()
    for place in range(32):
        numbers[..., place] *= (2.0 ** (powers.double() - 127)).bfloat16()  # exact: each is a power of two
    whole = numbers.reshape(experts, outputs, groups * 32)
    same(plain(state, tmp_path)[0][f"m.{name}"], whole.transpose(1, 2) if turned else whole)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
def test_mlx(tmp_path: Path, bits: int, kind: torch.dtype) -> None:
    rows, columns, size = 16, 128, 32
    codes = torch.randint(0, 1 << bits, (rows, columns))
    scale, bias = torch.rand(2, rows, columns // size).to(kind)
    state = {
        "m.weight": i32([packed(row, bits) for row in codes.tolist()]).view(torch.uint32),
        "m.scales": scale,
        "m.biases": bias,
    }
    wide = [one.repeat_interleave(size, 1) for one in (scale, bias)]
    own = {"bits": bits, "group_size": size}
    config = {"quantization": {"bits": 12 - bits, "group_size": 64, "m": own}}
    same(plain(state, tmp_path, config)[0]["m.weight"], codes.to(kind) * wide[0] + wide[1])
    (tmp_path / "config.json").unlink()
    with pytest.raises(Refused, match="number of bits"):
        plain(state, tmp_path)


SETTINGS = {"bitsandbytes-4bit", "mlx", "bitnet", "hqq", "torchao-flattened", "torchao-colon"}
"""Schemes whose fixtures lack settings that the computation needs: of config.json, metadata, or a tensor."""

KNOWN = [row for row in fixtures() if row.scheme in DECODERS and row.scheme not in SETTINGS]


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("row", KNOWN, ids=[f"{number}-{row.scheme}" for number, row in enumerate(KNOWN)])
def test_the_same_weights_in_every_format(tmp_path: Path, row: Any) -> None:
    tensors = dict(row.tensors)
    for name in [name for name in tensors if name.endswith("g_idx")]:
        tensors[name] = torch.arange(128, dtype=torch.int32) // 32
    found: dict[str, State] = {}
    for kind in KINDS:
        source = written({**tensors, **BESIDE}, tmp_path / kind, kind)
        dest = tmp_path / f"{kind}-out{source.suffix}"
        done = ckptfix.convert(source, dest, dequantize=True, to="hf" if source.is_dir() else None, dtype="fp32")
        assert (done.exit_code, done.account.lost) == (0, ())
        found[kind] = ckptfix.load_state_dict(dest)
        assert not ckptfix.inspect(dest).quantization
    (key,) = set(found["zip"]) - set(BESIDE)
    for other in found.values():
        assert set(other) == {key, *BESIDE}
        same(other[key].nan_to_num(), found["zip"][key].nan_to_num())
        assert all(torch.equal(other[name], tensor) for name, tensor in BESIDE.items())


REFUSED = [row for row in fixtures() if row.scheme in REASONS]


@pytest.mark.parametrize("row", REFUSED, ids=[f"{number}-{row.scheme}" for number, row in enumerate(REFUSED)])
def test_other_schemes_are_named_and_refused(tmp_path: Path, row: Any) -> None:
    source = written({**row.tensors, **BESIDE}, tmp_path, "safetensors")
    with pytest.raises(Refused, match="known but not dequantized") as refused:
        ckptfix.convert(source, tmp_path / "out.safetensors", dequantize=True)
    assert refused.value.where in row.tensors and not (tmp_path / "out.safetensors").exists()


def test_a_state_dict_inside_a_torch_file(tmp_path: Path) -> None:
    state, expected = gptq(4, 64, 32, [0] * 64, torch.float16)
    inner: dict[str, Any] = {"model_state_dict": {**state, **BESIDE}, "epoch": 3}
    torch.save(inner, tmp_path / "in.pth")
    ckptfix.convert(tmp_path / "in.pth", tmp_path / "out.pth", dequantize=True)
    found = torch.load(tmp_path / "out.pth")
    assert found["epoch"] == 3 and set(found["model_state_dict"]) == {"m.weight", *BESIDE}
    same(found["model_state_dict"]["m.weight"], expected)
    ckptfix.convert(tmp_path / "in.pth", tmp_path / "out.safetensors", dequantize=True)
    same(safetensors.torch.load_file(tmp_path / "out.safetensors")["m.weight"], expected)
    with pytest.raises(Refused, match="new object"):
        ckptfix.convert(tmp_path / "in.pth", tmp_path / "out.legacy.pth", to="legacy", dequantize=True)


@pytest.mark.filterwarnings("ignore:.*quantiz")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_quantized_tensors_of_torch(tmp_path: Path, dtype: torch.dtype, suffix: str) -> None:
    state = {f"by.{axis}": torch.quantize_per_channel(
        torch.randn(4, 5, 6, 7), torch.rand(size) + 0.01, torch.arange(size), axis, dtype
    ) for axis, size in enumerate((4, 5, 6, 7))}  # fmt: skip
    state |= {"whole": torch.quantize_per_tensor(torch.randn(9, 3), 0.037, 5, dtype), "bias": torch.ones(3)}
    state |= {"one": torch.quantize_per_tensor(torch.tensor(3.0), 0.1, 2, dtype)}
    torch.save(state, tmp_path / "in.pth")
    done = ckptfix.convert(tmp_path / "in.pth", tmp_path / f"out.{suffix}", dequantize=True)
    assert (done.exit_code, done.account.lost, len(done.dequantized)) == (0, (), 6)
    found = ckptfix.load_state_dict(tmp_path / f"out.{suffix}")
    assert set(found) == set(state)
    for name, tensor in state.items():
        same(found[name], tensor.dequantize())


@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_packed_params_are_named_and_refused(tmp_path: Path) -> None:
    """torch.ao's quantized Linear has its weight and bias in a tuple."""
    packed = (torch.quantize_per_tensor(torch.randn(4, 3), 0.1, 0, torch.qint8), torch.ones(4))
    state = {"conv.weight": torch.ones(2, 2), "fc.scale": torch.tensor(1.0), "fc._packed_params._packed_params": packed}
    torch.save(state, tmp_path / "in.pth")
    with pytest.raises(Refused, match="none is in the state dict") as refused:
        ckptfix.convert(tmp_path / "in.pth", tmp_path / "out.safetensors", dequantize=True)
    assert refused.value.where == "fc._packed_params._packed_params/0" and "_packed_params" in str(refused.value.hint)


REFERENCES = {
    "transformers 5.23, compressed-tensors 0.20, vLLM 0.33, ModelOpt 0.47": ["fp8-scale-inv", "fp8-scale"],
    "compressed-tensors 0.20": [
        "mxfp8", "mxfp4-pack-quantized", "nvfp4-pack-quantized", "int8-scale", "pack-quantized",
    ],
    "bitsandbytes 0.50 on a CPU": ["bitsandbytes-int8", "bitsandbytes-int8-attribute", "bitsandbytes-4bit"],
    "mlx 0.32 on a CPU": ["mlx", "mlx-mx"],
    "hqq 0.2.8": ["hqq"],
    "optimum-quanto 0.2.7": ["quanto", "quanto-packed"],
    "torchao 0.18": ["torchao-flattened", "torchao-colon", "tensor-class"],
    "transformers 5.23": ["bitnet"],
    "torch": ["torch-quantized"],
    "gguf 0.19": ["gguf-blocks"],
    "ModelOpt 0.47, and vLLM 0.33 but for the sign of zeros": ["nvfp4-modelopt"],
    "dequantize_weight of GPTQModel 7.7, run from its source on a CPU": ["gptq"],
    "dequantize_gemm of AutoAWQ 0.2.9, run from its source on a CPU": ["awq"],
    "loops from the source that the table of schemes names": [
        "fp8-module-scale", "fp8-scale-weight", "int8-scales", "mxfp4-blocks", "mx-pairs", "int4-modelopt",
    ],
}  # fmt: skip
"""What the weights of each scheme were compared with, bit for bit; the loops of these tests say the same."""


def test_every_scheme_has_a_reference() -> None:
    assert sorted(id for ids in REFERENCES.values() for id in ids) == sorted(DECODERS)


def test_config_json_of_a_folder_becomes_that_of_a_plain_model(tmp_path: Path) -> None:
    state, expected = gptq(4, 64, 32, [0] * 64, torch.float16)
    whole = tmp_path / "whole.safetensors"
    safetensors.torch.save_file(state | BESIDE, whole)
    source, dest = tmp_path / "in", tmp_path / "out"
    ckptfix.convert(whole, source, to="hf", shard_size=1024)
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}, "vocab_size": 3}
    (source / "config.json").write_text(json.dumps(config))
    (source / "quantize_config.json").write_text("{}")
    (source / "tokenizer.json").write_text("{}")
    ckptfix.convert(source, dest, to="hf", dequantize=True)
    assert json.loads((dest / "config.json").read_text()) == {"model_type": "llama", "vocab_size": 3}
    assert (dest / "tokenizer.json").exists() and not (dest / "quantize_config.json").exists()
    assert "quantization_config" in (source / "config.json").read_text()
    same(ckptfix.load_state_dict(dest)["m.weight"], expected)


def bad(change: Callable[[State], None]) -> State:
    state: State = gptq(4, 64, 32, [place // 16 for place in range(64)], torch.float16)[0]
    change(state)
    return state


def four(change: Callable[[State], None]) -> State:
    state, _ = four_bits((16, 64), 64, "nf4", "bfloat16")
    change(state)
    return state


def fp8(scale: torch.Tensor) -> State:
    return {"l.weight": torch.randn(64, 48).to(FP8), "l.weight_scale_inv": scale}


def without(name: str) -> Callable[[State], None]:
    return lambda state: (state.pop(name), None)[1]


def with_(**tensors: torch.Tensor) -> Callable[[State], None]:
    return lambda state: state.update({name.replace("__", "."): tensor for name, tensor in tensors.items()})


BAD: dict[str, tuple[Callable[[], State], str, str]] = {
    "missing zeros": (lambda: bad(without("m.qzeros")), "m.qweight", "missing"),
    "zeros of too many groups": (
        lambda: bad(with_(m__qzeros=torch.zeros(5, 4, dtype=torch.int32))), "m.qweight", "do not fit"),
    "bits that no width fits": (
        lambda: bad(with_(m__qweight=torch.zeros(7, 32, dtype=torch.int32))), "m.g_idx", "g_idx"),
    "g_idx outside the groups": (
        lambda: bad(with_(m__g_idx=torch.full((64,), 4, dtype=torch.int32))), "m.g_idx", "outside"),
    "g_idx below the groups": (
        lambda: bad(with_(m__g_idx=torch.full((64,), -1, dtype=torch.int32))), "m.g_idx", "outside"),
    "a short g_idx": (lambda: bad(with_(m__g_idx=torch.zeros(63, dtype=torch.int32))), "m.g_idx", "inputs"),
    "an infinite scale": (
        lambda: bad(with_(m__scales=torch.full((4, 32), torch.inf, dtype=torch.float16))), "m.scales", "not finite"),
    "NaN among fp8 scales": (lambda: fp8(torch.tensor([[torch.nan]])), "l.weight_scale_inv", "not finite"),
    "a scale of a wrong shape": (lambda: fp8(torch.ones(9, 5)), "l.weight", "layout"),
    "blocks without bytes": (
        lambda: {"m.down_proj_blocks": torch.zeros(2, 4, 3, 0, dtype=torch.uint8),
                 "m.down_proj_scales": torch.zeros(2, 4, 3, dtype=torch.uint8)}, "m.down_proj_blocks", "does not fit"),
    "zeros of groups for one scale": (
        lambda: {"l.weight_packed": torch.zeros(64, 16, dtype=torch.int32), "l.weight_scale": torch.ones(1),
                 "l.weight_shape": torch.tensor([64, 128]),
                 "l.weight_zero_point": torch.zeros(8, 4, dtype=torch.int32)}, "l.weight_packed", "does not fit"),
    "no state": (lambda: four(without("l.weight.quant_state.bitsandbytes__nf4")), "l.weight", "state is missing"),
    "too few codes": (
        lambda: four(with_(l__weight=torch.zeros(100, 1, dtype=torch.uint8))), "l.weight", "do not fit"),
    "too few scales": (lambda: four(with_(l__weight__absmax=torch.ones(15))), "l.weight", "do not fit"),
    "a codebook of eight": (lambda: four(with_(l__weight__quant_map=torch.ones(8))), "l.weight.quant_map", "codebook"),
    "an infinite absmax": (
        lambda: four(with_(l__weight__absmax=torch.full((16,), torch.inf))), "l.weight.absmax", "not finite"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("kind", ["safetensors", "zip"])
def test_bad_input_is_refused_by_name(tmp_path: Path, name: str, kind: str) -> None:
    make, where, why = BAD[name]
    source = written({**make(), **BESIDE}, tmp_path / "in", kind)
    dest = tmp_path / f"out{source.suffix}"
    with pytest.raises(CkptfixError, match=why) as refused:
        ckptfix.convert(source, dest, dequantize=True)
    assert refused.value.where == where
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_number_out_of_range_is_refused(tmp_path: Path) -> None:
    state = {"l.weight": torch.full((4, 4), 448.0).to(FP8), "l.weight_scale_inv": torch.full((1, 1), 1000.0)}
    with pytest.raises(WouldLoseData, match="out of the range") as refused:
        plain(state, tmp_path, dtype="fp16")
    assert refused.value.where == "l.weight" and not (tmp_path / "out.safetensors").exists()


def test_numbers_are_rounded_to_float16_as_torch_does() -> None:
    """All halves, the numbers next to them and between them, and random bits."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    every = every[every.isfinite()].sort().values
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 18,)).to(torch.int32).view(torch.float32)
    odd = [every, (every[1:] + every[:-1]) / 2, bits[~bits.isnan()], torch.tensor([65519.99, 65520.0, torch.inf])]
    odd += [torch.nextafter(one, torch.tensor(end)) for one in odd[:2] for end in (torch.inf, -torch.inf)]
    for one in odd:
        made = numpy.empty(len(one), numpy.uint16)
        infinite = halves(one.numpy(), made)
        assert numpy.array_equal(made, one.half().view(torch.uint16).numpy())
        assert infinite == bool(one.half().isinf().any())
        for kind in (torch.float16, torch.bfloat16):
            found = torch.from_numpy(nearest(one.numpy(), str(kind).removeprefix("torch.")))
            assert torch.equal(found.view(torch.int32), one.to(kind).float().view(torch.int32))


def test_a_code_that_no_element_has_is_not_out_of_range(tmp_path: Path) -> None:
    """A table has the numbers of all codes of a group, and only those of its elements count."""
    codes = torch.randint(2, 14, (8, 128))
    scale = torch.full((8, 1), 10_000.0, dtype=torch.bfloat16)
    for most in (13, 15):
        codes[3, 5] = most
        words = torch.zeros(8, 16, dtype=torch.int64)
        for place in range(128):
            words[:, place // 8] |= codes[:, place] << (4 * (place % 8))
        state = {"l.weight_packed": words.to(torch.uint32).view(torch.int32), "l.weight_scale": scale,
                 "l.weight_shape": torch.tensor([8, 128])}  # fmt: skip
        if most == 15:
            with pytest.raises(WouldLoseData):
                plain(state, tmp_path, dtype="fp16")
        else:
            found, _ = plain(state, tmp_path, dtype="fp16")
            same(found["l.weight"], ((codes - 8) * scale.float()).half())


def test_a_file_without_quantized_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no quantized weights"):
        plain({"l.weight": torch.ones(3)}, tmp_path)


@pytest.mark.slow
def test_a_large_weight_is_computed_in_blocks(tmp_path: Path) -> None:
    """More than one task, with a rest: the threads put their blocks in order."""
    codes, scale = torch.randint(-127, 128, (3001, 1409)).to(torch.int8), torch.rand(3001)
    found, _ = plain({"l.weight": codes, "l.SCB": scale}, tmp_path)
    same(found["l.weight"], codes * scale.view(-1, 1) * 7.874015718698502e-3)
    state, expected = gptq(4, 1024, 4128, [place // 128 for place in range(1024)], torch.float16)
    same(plain(state, tmp_path, GPTQ)[0]["m.weight"], expected)


@pytest.mark.parametrize("seed", range(6))
def test_random_sizes(tmp_path: Path, seed: int) -> None:
    """Any number of rows, columns, groups and blocks, all in one file."""
    some = random.Random(seed)
    state: State = {}
    expected: State = {}
    for bits in (2, 3, 4, 8):
        inputs, outputs = 32 * some.randint(1, 9), 32 * some.randint(1, 5)
        index = [some.randrange(some.randint(1, 7)) for _ in range(inputs - 1)]
        made, weight = gptq(bits, inputs, outputs, [*index, 6], torch.float16)
        state |= {f"{bits}.{name}": tensor for name, tensor in made.items()}
        expected[f"{bits}.m.weight"] = weight
    shape = (some.randint(1, 70), some.randint(1, 70))
    made, weight = four_bits(shape, some.choice([32, 64, 128]), "nf4", "float16", nested=some.random() < 0.5)
    state |= {f"four.{name}": tensor for name, tensor in made.items()}
    expected["four.l.weight"] = weight
    rows, columns = some.randint(1, 400), some.randint(1, 400)
    codes = torch.randn(rows, columns).to(FP8)
    scale = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.01
    state |= {"eight.weight": codes, "eight.weight_scale_inv": scale}
    wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    expected["eight.weight"] = (codes.float() * wide).bfloat16()
    found, _ = plain(state, tmp_path, GPTQ)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        same(found[name], tensor)


def test_inspect_and_doctor_state_bits_groups_and_parameters(tmp_path: Path) -> None:
    state, _ = gptq(4, 128, 96, [place // 32 for place in range(128)], torch.float16)
    source = tmp_path / "in.safetensors"
    safetensors.torch.save_file(state | BESIDE, source)
    found = ckptfix.inspect(source)
    (row,) = found.quantized
    assert (row.scheme, row.weights, row.bits, row.group, row.parameters) == ("GPTQ", 1, 4, (1, 32), 128 * 96)
    assert found.plain_parameters == 128 * 96 + 32
    assert [(name, shape) for name, shape in found.plain_shapes.items()] == [("m.qweight", (96, 128))]
    assert "codes of [96, 128]" in str(found)
    assert "4 bits, groups of 32" in str(found) and f"{128 * 96 + 32:,} parameters" in str(found)
    (note,) = [one for one in ckptfix.doctor(source).findings if one.id == "quantized"]
    assert "4 bits, groups of 32" in note.message and note.where == "m.qweight"
    assert ckptfix.inspect(source).as_dict()["quantized"] == [row.as_dict()]


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_weights_are_tied_if_codes_and_scales_are_the_same(tmp_path: Path, suffix: str) -> None:
    """Codes that are views of one storage, as in a flat buffer, are different weights."""
    flat = torch.randn(128, 64).to(FP8)
    state = {"a.weight": flat[:64], "b.weight": flat[64:], "c.weight": flat[:64], "d.weight": flat[:64],
             "e.bias": flat[:64].view(torch.uint8)[:4]}  # fmt: skip
    scales = {f"{name}.weight_scale": torch.rand(64, 1) for name in "abd"}
    scales["c.weight_scale"] = scales["a.weight_scale"]
    torch.save({**state, **scales}, tmp_path / "in.pth")
    ckptfix.convert(tmp_path / "in.pth", tmp_path / f"out.{suffix}", dequantize=True, dtype="fp32")
    found = ckptfix.load_state_dict(tmp_path / f"out.{suffix}")
    for name in "abcd":
        same(found[f"{name}.weight"], state[f"{name}.weight"].float() * scales[f"{name}.weight_scale"])
    same(found["e.bias"], state["e.bias"])
    places = {name: found[f"{name}.weight"].data_ptr() for name in "abcd"}
    assert places["a"] == places["c"] and len(set(places.values())) == 3


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_ties_that_metadata_states_are_dequantized_too(tmp_path: Path, suffix: str) -> None:
    codes, scale = torch.randn(64, 32).to(FP8), torch.rand(64, 1)
    state = {name: {"weight": codes, "weight_scale": scale}[name[2:]]
             for name in ("a.weight", "a.weight_scale", "b.weight", "b.weight_scale")}  # fmt: skip
    torch.save({**state, "n.bias": torch.ones(3)}, tmp_path / "in.pth")
    ckptfix.convert(tmp_path / "in.pth", tmp_path / "in.safetensors")
    assert set(safetensors.torch.load_file(tmp_path / "in.safetensors")) == {"a.weight", "a.weight_scale", "n.bias"}
    for source in ("in.pth", "in.safetensors"):
        assert ckptfix.inspect(tmp_path / source).plain_parameters == 64 * 32 + 3
        rows = {row.name: row.moments for row in ckptfix.stats(tmp_path / source).rows}
        assert rows["a.weight"] is rows["b.weight"] is None
        ckptfix.convert(tmp_path / source, tmp_path / f"out.{suffix}", dequantize=True, dtype="fp32", force=True)
        found = ckptfix.load_state_dict(tmp_path / f"out.{suffix}")
        assert sorted(found) == ["a.weight", "b.weight", "n.bias"]
        same(found["a.weight"], codes.float() * scale)
        assert found["a.weight"].data_ptr() == found["b.weight"].data_ptr()


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_bytes_are_numbers_as_torch_says(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, flushed: bool
) -> None:
    if flushed:
        monkeypatch.setattr("ckptfix.elements.arrays._subnormal", lambda: numpy.float32(0))
    codes = numpy.arange(256, dtype=numpy.uint8)
    found = torch.from_numpy(eight_bits(codes, str(dtype).removeprefix("torch.")))
    expected = torch.from_numpy(codes).view(dtype).float()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num().view(torch.int32), expected.nan_to_num().view(torch.int32))
