"""LoHa, LoKr and differences as LyCORIS writes them are merged by their definition, and converted where one can."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import Made, Tensors, write
from safetensors.torch import load_file, save_file

import ckptfix
from ckptfix.errors import Refused
from ckptfix.ops.lora.peft_lokr import factorization, peft_lokr

NAME = "lora_unet_fc1"
ROWS, COLUMNS, RANK, ALPHA = 12, 20, 2, 1.0


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def loha(kernel: tuple[int, ...], *, core: bool) -> tuple[Tensors, torch.Tensor]:
    if core:
        tensors = {f"w{n}_a": numbers(RANK, ROWS) for n in "12"} | {f"w{n}_b": numbers(RANK, COLUMNS) for n in "12"}
        tensors |= {f"t{n}": numbers(RANK, RANK, *kernel) + int(n) for n in "12"}
        parts = [torch.einsum("ij...,jr,ip->pr...", tensors[f"t{n}"].double(), tensors[f"w{n}_b"].double(),
                              tensors[f"w{n}_a"].double()) for n in "12"]  # fmt: skip
    else:
        wide = COLUMNS * torch.Size(kernel).numel()
        tensors = {f"w{n}_a": numbers(ROWS, RANK) + int(n) for n in "12"}
        tensors |= {f"w{n}_b": numbers(RANK, wide) for n in "12"}
        parts = [tensors[f"w{n}_a"].double() @ tensors[f"w{n}_b"].double() for n in "12"]
    delta = (parts[0] * parts[1]).reshape(ROWS, COLUMNS, *kernel)
    return {f"hada_{key}": value for key, value in tensors.items()}, delta * ALPHA / RANK


def lokr(kernel: tuple[int, ...], *, first: bool, second: bool, rank: int = 1) -> tuple[Tensors, torch.Tensor]:
    """Factors of 3 x 4 and 4 x 5, each whole or a product."""
    tensors: Tensors = {}
    if first:
        tensors["w1"] = numbers(3, 4)
    else:
        tensors |= {"w1_a": numbers(3, rank), "w1_b": numbers(rank, 4)}
    if second:
        tensors["w2"] = numbers(4, 5, *kernel)
    else:
        tensors |= {"w2_a": numbers(4, rank), "w2_b": numbers(rank, 5)}
    whole = [tensors[f"w{n}"] if f"w{n}" in tensors else tensors[f"w{n}_a"] @ tensors[f"w{n}_b"] for n in "12"]
    one, two = (value.double() for value in whole)
    delta = torch.kron(one.reshape(*one.shape, *(1,) * len(kernel)), two)
    scale = 1.0 if first and second else ALPHA / rank
    return {f"lokr_{key}": value for key, value in tensors.items()}, delta * scale


CASES: dict[str, tuple[tuple[int, ...], Callable[[], tuple[Tensors, torch.Tensor]]]] = {
    "LoHa": ((), lambda: loha((), core=False)),
    "LoHa of a convolution": ((3, 3), lambda: loha((3, 3), core=False)),
    "LoHa with cores": ((3, 3), lambda: loha((3, 3), core=True)),
    "LoKr": ((), lambda: lokr((), first=True, second=False)),
    "LoKr, two products": ((), lambda: lokr((), first=False, second=False)),
    "LoKr, whole": ((3, 3), lambda: lokr((3, 3), first=True, second=True)),
}


STARTS = {"comfy": "diffusion_model", "kohya": "lora_unet"}


def files(tmp_path: Path, case: str) -> tuple[Path, Tensors]:
    kernel, make = CASES[case]
    tensors, delta = make()
    base = numbers(ROWS, COLUMNS, *kernel)
    save_file({"fc1.weight": base}, tmp_path / "base.safetensors")
    made = {f"{NAME}.{key}": value for key, value in tensors.items()} | {f"{NAME}.alpha": torch.tensor(ALPHA)}
    source = write(Made(made), tmp_path / "x").rename(tmp_path / "style.safetensors")
    return source, {"fc1.weight": (base.double() + delta).float()}


def same(out: Path, truth: Tensors) -> None:
    found = load_file(out)
    assert found.keys() == truth.keys()
    assert all(torch.allclose(found[key], truth[key], rtol=1e-6, atol=1e-6) for key in truth)


@pytest.mark.parametrize("case", CASES)
def test_products_are_merged_and_converted(tmp_path: Path, case: str) -> None:
    source, truth = files(tmp_path, case)
    base = tmp_path / "base.safetensors"
    ckptfix.lora_merge(base, [source], tmp_path / "out.safetensors")
    same(tmp_path / "out.safetensors", truth)
    chain: list[tuple[Any, str]] = [("comfy", "c.safetensors"), ("peft", "p"), ("kohya", "k.safetensors")]
    last = source
    for to, name in chain:
        like = base if last == source else None
        ckptfix.lora_convert(last, tmp_path / name, to=to, like=like, prefix=STARTS.get(to))
        last = tmp_path / name
        ckptfix.lora_merge(base, [last], tmp_path / f"{to}.safetensors")
        same(tmp_path / f"{to}.safetensors", truth)
    assert load_file(last).keys() == load_file(source).keys()
    config = json.loads((tmp_path / "p/adapter_config.json").read_text())
    assert config["peft_type"] == case[:4].upper() and config["target_modules"] == ["fc1"]
    with pytest.raises(Refused, match=f"diffusers has no spelling for {case[:4]}: fc1"):
        ckptfix.lora_convert(source, tmp_path / "d.safetensors", to="diffusers", like=base)


def test_what_peft_cannot_make_is_refused(tmp_path: Path) -> None:
    assert [factorization(128, -1), factorization(127, -1), factorization(250, 4)] == [(8, 16), (1, 127), (2, 125)]
    with pytest.raises(Refused, match="PEFT does not make a LoKr with the factors 2 x 4 and 6 x 5"):
        peft_lokr({"w1": (2, 4), "w2": (6, 5)}, "fc")
    with pytest.raises(Refused, match="of rank 4"):
        peft_lokr({"w1": (3, 4), "w2_a": (4, 4), "w2_b": (4, 5)}, "fc")
    source, _ = files(tmp_path, "LoHa")
    tensors = load_file(source) | {f"{NAME}.dora_scale": torch.ones(ROWS, 1)}
    other = write(Made(tensors), tmp_path / "dora")
    with pytest.raises(Refused, match="PEFT has no magnitude of DoRA beside LoHa: fc1"):
        ckptfix.lora_convert(other, tmp_path / "p", to="peft")
    with pytest.raises(Refused, match="only LoRA has another rank"):
        ckptfix.lora_resize(source, tmp_path / "r.safetensors", rank=1)


OTHERS: dict[str, dict[str, tuple[int, ...]]] = {
    "IA3": {"weight": (COLUMNS,), "on_input": ()},
    "GLoRA": {"a1.weight": (RANK, COLUMNS), "a2.weight": (COLUMNS, RANK), "b1.weight": (RANK, ROWS)},
    "OFT": {"oft_blocks": (3, 4, 4), "alpha": ()},
    "OFT of PEFT": {"oft_R.weight": (3, 6)},
    "BOFT": {"oft_blocks": (2, 3, 4, 4), "alpha": ()},
    "BOFT of PEFT": {"boft_R": (1, 3, 4, 4), "boft_s": (ROWS, 1)},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_methods_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    save_file({"fc1.weight": numbers(ROWS, COLUMNS)}, tmp_path / "base.safetensors")
    tensors = {f"{NAME}.{end}": torch.ones(shape) for end, shape in OTHERS[kind].items()}
    source = write(Made(tensors), tmp_path / "x").rename(tmp_path / "style.safetensors")
    with pytest.raises(Refused, match=f"of a kind that is not merged: {kind.partition(' ')[0]}$"):
        ckptfix.lora_merge(tmp_path / "base.safetensors", [source], tmp_path / "o.safetensors")


def test_differences_alone_are_an_adapter(tmp_path: Path) -> None:
    base = {"fc1.weight": numbers(4, 3), "fc1.bias": numbers(4), "norm.weight": numbers(3), "norm.bias": numbers(3)}
    save_file(base, tmp_path / "base.safetensors")
    tensors = {f"{NAME}.diff": torch.ones(4, 3), f"{NAME}.diff_b": torch.ones(4),
               "lora_unet_norm.w_norm": torch.ones(3), "lora_unet_norm.b_norm": torch.ones(3)}  # fmt: skip
    source = write(Made(tensors), tmp_path / "x").rename(tmp_path / "style.safetensors")
    assert ckptfix.lora_info(source).as_dict()["layout"] == "kohya"
    ckptfix.lora_merge(tmp_path / "base.safetensors", [source], tmp_path / "o.safetensors", scale=0.5)
    found = load_file(tmp_path / "o.safetensors")
    assert all(torch.equal(found[key], base[key] + 0.5) for key in base)
    with pytest.raises(Refused, match="is a difference, and only"):
        ckptfix.lora_convert(source, tmp_path / "p", to="peft")
