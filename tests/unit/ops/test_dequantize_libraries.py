"""Plain weights from the files of torchao, quanto, hqq, ModelOpt, BitNet and MLX, against loops over elements.

Each was compared bit for bit with its library on a CPU: torchao 0.18, optimum-quanto 0.2.7, hqq 0.2.8, transformers
5.23 (BitNet) and mlx 0.32. ModelOpt has no code for its int4 on a CPU; the
formula is in modelopt/torch/export/quant_utils.py.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import safetensors.torch
import torch
from quantized_files import FP8

import ckptfix
from ckptfix.errors import Refused

State = dict[str, torch.Tensor]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def plain(
    state: State, folder: Path, config: dict[str, Any] | None = None, metadata: dict[str, str] | None = None
) -> State:
    folder.mkdir(exist_ok=True)
    source, dest = folder / "in.safetensors", folder / "out.safetensors"
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in state.items()}, source, metadata)
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    ckptfix.convert(source, dest, dequantize=True, force=True)
    return safetensors.torch.load_file(dest)


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert torch.equal(found.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))


HQQ = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}


def letters(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def hqq(bits: int, axis: int, kind: torch.dtype = torch.float16) -> tuple[State, torch.Tensor]:
    """A weight of 24 x 40 in groups of 32, as hqq writes it, and what it stands for."""
    groups = 24 * 40 // 32
    shape = (groups, 32) if axis == 1 else (32, groups)
    codes = torch.randint(0, 1 << bits, shape)
    scale = (torch.rand((groups, 1) if axis == 1 else (1, groups)) + 0.01).to(kind)
    zero = (torch.rand(scale.shape) * (1 << bits)).to(kind)
    per = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}[bits]
    step = -(-shape[0] // per)
    packed = torch.zeros(step, shape[1], dtype=torch.int64)
    for row in range(shape[0]):
        packed[row % step] |= codes[row] << (bits * (per - 1 - row // step))
    state = {
        "l.W_q": packed.to(torch.int32 if bits == 3 else torch.uint8), "l.scale": scale, "l.zero": zero,
        "l.shape": torch.tensor([24, 40]), "l.axis": torch.tensor(axis, dtype=torch.int32),
        "l.packing": letters(HQQ[bits]), "l.compute_dtype": letters(str(kind)),
        **{f"l.{name}": torch.tensor(0, dtype=torch.uint8) for name in ("view_as_float", "quant_scale", "quant_zero")},
        "l.nbits": torch.tensor(bits, dtype=torch.int32), "l.stores_quant_config": torch.tensor(1, dtype=torch.uint8),
        "l.bias": torch.ones(24),
    }  # fmt: skip
    return state, ((codes.to(kind) - zero) * scale).reshape(24, 40)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", HQQ)
def test_hqq(tmp_path: Path, bits: int, axis: int, kind: torch.dtype) -> None:
    state, wanted = hqq(bits, axis, kind)
    found = plain(state, tmp_path)
    assert sorted(found) == ["l.bias", "l.weight"]
    same(found["l.weight"], wanted)


@pytest.mark.parametrize("codes", [torch.int8, FP8, torch.float8_e5m2])
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32])
def test_quanto(tmp_path: Path, codes: torch.dtype, kind: torch.dtype) -> None:
    data = torch.randint(-128, 128, (24, 40)).to(codes)
    scale = (torch.rand(24, 1) + 0.01).to(kind)
    beside = {"l.input_scale": torch.tensor(1.0), "l.output_scale": torch.tensor(1.0), "l.bias": torch.ones(24)}
    found = plain({"l.weight._data": data, "l.weight._scale": scale, **beside}, tmp_path)
    assert sorted(found) == ["l.bias", "l.weight"]
    same(found["l.weight"], scale * data.to(kind))


def quanto_packed(
    shape: tuple[int, ...], group: int | None, bits: int, kind: torch.dtype, floats: bool
) -> tuple[State, torch.Tensor]:
    """A weight as optimum-quanto packs it, and its `dequantize`."""
    inner = (group,) if group else shape[1:]
    rows = math.prod(shape) // math.prod(inner)
    codes = torch.randint(0, 1 << bits, (rows, *inner), dtype=torch.uint8)
    one = (rows, *[1] * len(inner))
    scale = (torch.rand(one) + 0.01).to(kind)
    shift = (torch.rand(one) * 3).to(kind) if floats else torch.randint(0, 1 << bits, one, dtype=torch.uint8)
    step = -(-rows * bits // 8)
    packed = torch.zeros(step, *inner, dtype=torch.uint8)
    for row in range(rows):
        packed[row % step] |= codes[row] << (bits * (row // step))
    wanted = scale * codes - shift if floats else scale * (codes.to(torch.int8) - shift.to(torch.int8))
    return {"l.weight._data._data": packed, "l.weight._scale": scale, "l.weight._shift": shift}, wanted.reshape(shape)


SHAPES: list[tuple[tuple[int, ...], int | None]] = [
    ((7, 256), 128), ((5, 160), 32), ((9, 100), None), ((3, 5, 3, 3), None)
]  # fmt: skip


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(("shape", "group"), SHAPES)
def test_quanto_with_several_codes_in_a_byte(tmp_path: Path, bits: int, shape: Any, group: int | None) -> None:
    bias = {"l.bias": torch.ones(shape[0])} if group else {}
    for kind in (torch.float16, torch.bfloat16, torch.float32):
        for floats in (True, False):
            state, wanted = quanto_packed(shape, group, bits, kind, floats)
            found = plain({**state, **bias, "l.input_scale": torch.tensor(1.0)}, tmp_path)
            assert sorted(found) == [*bias, "l.weight"]
            same(found["l.weight"], wanted)


@pytest.mark.parametrize(("name", "hidden", "shape"), [
    ("q_proj", 256, (96, 256)), ("down_proj", 256, (256, 640)), ("q_proj", 384, None), ("other", 256, None),
    ("q_proj", None, None), ("conv_q_proj", 256, None),
])  # fmt: skip
def test_quanto_takes_a_side_from_config_json(
    tmp_path: Path, name: str, hidden: int | None, shape: tuple[int, int] | None
) -> None:
    state, wanted = quanto_packed(shape or (64, 256), 128, 4, torch.float16, True)
    state = {key.replace("l.", f"m.{name}."): tensor for key, tensor in state.items()}
    safetensors.torch.save_file(state, tmp_path / "in.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": hidden} if hidden else {}))
    if shape is None:
        with pytest.raises(Refused, match="states the shape") as refused:
            ckptfix.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", dequantize=True)
        assert refused.value.where == f"m.{name}.weight._data._data"
        return
    ckptfix.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", dequantize=True)
    same(safetensors.torch.load_file(tmp_path / "out.safetensors")[f"m.{name}.weight"], wanted)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("smoothed", [False, True])
def test_modelopt_int4(tmp_path: Path, kind: torch.dtype, smoothed: bool) -> None:
    codes = torch.randint(-8, 8, (6, 64))
    scale, columns = (torch.rand(6, 2) + 0.01).to(kind), (torch.rand(64) + 0.5).to(kind)
    packed = ((codes[0::2] & 15) | ((codes[1::2] & 15) << 4)).to(torch.uint8)
    state = {"l.weight": packed, "l.weight_scale": scale, **({"l.pre_quant_scale": columns} if smoothed else {})}
    wanted = codes.float() * scale.float().repeat_interleave(32, 1)
    found = plain(state, tmp_path, {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"})
    assert list(found) == ["l.weight"]
    same(found["l.weight"], (wanted * columns.float() if smoothed else wanted).to(kind))


@pytest.mark.parametrize("linear", [None, "bitlinear", "autobitlinear"])
def test_bitnet_divides_or_multiplies_as_config_json_states(tmp_path: Path, linear: str | None) -> None:
    codes, scale = torch.randint(0, 3, (24, 40)), torch.tensor([1.7], dtype=torch.bfloat16)
    packed = torch.zeros(6, 40, dtype=torch.int64)
    for row in range(24):
        packed[row % 6] |= codes[row] << (2 * (row // 6))
    state = {"l.weight": packed.to(torch.uint8), "l.weight_scale": scale}
    config = {"quant_method": "bitnet", **({"linear_class": linear} if linear else {})}
    ternary = codes.bfloat16() - 1
    found = plain(state, tmp_path, config)["l.weight"]
    same(found, ternary * scale if linear == "autobitlinear" else ternary / scale)
    with pytest.raises(Refused, match=r"config\.json"):
        plain(state, tmp_path / "alone")


@pytest.mark.parametrize(("bits", "size"), [(4, 32), (8, 32), (4, 16)])
def test_mlx_mx(tmp_path: Path, bits: int, size: int) -> None:
    codes = torch.randint(0, 1 << bits, (6, 64)) & (0x3F if bits == 8 else 15)
    words = torch.zeros(6, 64 * bits // 32, dtype=torch.int64)
    for column in range(64):
        words[:, column * bits // 32] |= codes[:, column] << (column * bits % 32)
    numbers = torch.tensor(E2M1)[codes] if bits == 4 else codes.to(torch.uint8).view(FP8).float()
    exponents = torch.randint(110, 130, (6, 64 // size), dtype=torch.uint8)
    scale = torch.pow(2.0, exponents.float() - 127) if size == 32 else exponents.view(FP8).float()
    state = {"l.weight": words.to(torch.uint32), "l.scales": exponents}
    same(plain(state, tmp_path)["l.weight"], (numbers * scale.repeat_interleave(size, 1)).bfloat16())


AO: dict[str, Callable[[], State]] = {
    "Int8Tensor": lambda: {"qdata": torch.randint(-128, 128, (8, 64), dtype=torch.int8), "scale": torch.rand(8, 1),
                           "zero_point": torch.randint(-9, 9, (8, 1), dtype=torch.int8)},
    "IntxUnpackedToInt8Tensor": lambda: {"qdata": torch.randint(-8, 8, (8, 64), dtype=torch.int8),
                                         "scale": torch.rand(8, 2).bfloat16(),
                                         "zero_point": torch.randint(-8, 8, (8, 2), dtype=torch.int8)},
    "Float8Tensor": lambda: {"qdata": torch.randn(8, 64).to(FP8), "scale": torch.rand(8, 1)},
}  # fmt: skip


def stands_for(parts: State) -> torch.Tensor:
    groups = parts["scale"].shape[1]
    zero = parts.get("zero_point", torch.zeros(8, groups)).float().repeat_interleave(64 // groups, 1)
    return ((parts["qdata"].float() - zero) * parts["scale"].float().repeat_interleave(64 // groups, 1)).bfloat16()


@pytest.mark.parametrize("mark", ["._weight_", ".weight:"])
@pytest.mark.parametrize("name", AO)
def test_torchao_in_safetensors(tmp_path: Path, name: str, mark: str) -> None:
    parts = AO[name]()
    state = {f"l{mark}{part}": tensor for part, tensor in parts.items()}
    about = {"_type": name, "_data": {"block_size": [1, 64], "dtype": {"_type": "torch.dtype", "_data": "bfloat16"}}}
    found = plain(state, tmp_path, metadata={"l.weight": json.dumps(about)})
    assert list(found) == ["l.weight"]
    same(found["l.weight"], stands_for(parts))
    for wrong in (None, "{", "[]", json.dumps({**about, "_type": "Int4Tensor"})):
        with pytest.raises(Refused, match="class"):
            plain(state, tmp_path / "wrong", metadata=None if wrong is None else {"l.weight": wrong})


class _Wrapper(torch.Tensor):
    """A tensor of parts, pickled as those of torchao are."""

    @staticmethod
    def __new__(cls: type, parts: State) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, parts["qdata"].shape, dtype=torch.bfloat16)

    def __init__(self, parts: State) -> None:
        self.__dict__.update(parts)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(func)


@pytest.fixture
def torchao() -> Iterator[Callable[[str, State], torch.Tensor]]:
    """A function that makes tensors of a class of this name in torchao.quantization."""
    names = ["torchao", "torchao.quantization"]
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = ModuleType(name)

    def make(name: str, parts: State) -> torch.Tensor:
        kind = type(name, (_Wrapper,), {"__module__": "torchao.quantization"})
        setattr(sys.modules["torchao.quantization"], name, kind)
        made: torch.Tensor = kind(parts)
        return made

    yield make
    for name, old in before.items():
        del sys.modules[name]
        if old is not None:
            sys.modules[name] = old


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
@pytest.mark.parametrize("name", AO)
def test_torchao_in_a_torch_file(
    tmp_path: Path, torchao: Callable[[str, State], torch.Tensor], name: str, suffix: str
) -> None:
    parts = AO[name]()
    torch.save({"l.weight": torchao(name, parts), "l.bias": torch.ones(8)}, tmp_path / "in.pth")
    (row,) = ckptfix.inspect(tmp_path / "in.pth").quantized
    assert (row.bits, row.parameters) == (8, 512) and name in row.scheme
    done = ckptfix.convert(tmp_path / "in.pth", tmp_path / f"out.{suffix}", dequantize=True)
    found = ckptfix.load_state_dict(done.dest)
    assert sorted(found) == ["l.bias", "l.weight"] and done.exit_code == 0
    same(found["l.weight"], stands_for(parts))
    assert all(row.moments is not None for row in ckptfix.stats(tmp_path / "in.pth", dequantized=True).rows)


@pytest.mark.parametrize("wrong", ["Int4Tensor", "act_pre_scale", "dtype"])
def test_other_torchao_tensors_are_refused_by_name(
    tmp_path: Path, torchao: Callable[[str, State], torch.Tensor], wrong: str
) -> None:
    parts = AO["Int8Tensor"]()
    if wrong == "act_pre_scale":
        parts[wrong] = torch.ones(64)
    if wrong == "dtype":
        parts["qdata"] = torch.zeros(8, 64, dtype=torch.int32)
    name = "Int4Tensor" if wrong == "Int4Tensor" else "Int8Tensor"
    torch.save({"l.weight": torchao(name, parts)}, tmp_path / "in.pth")
    with pytest.raises(Refused) as error:
        ckptfix.convert(tmp_path / "in.pth", tmp_path / "out.pth", dequantize=True)
    assert {"dtype": "int32"}.get(wrong, wrong) in error.value.message and not (tmp_path / "out.pth").exists()
