"""Adapters for models with two sets of names: one set has query, key and value in one tensor, the other in three."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import Made, Tensors, write
from safetensors.torch import load_file, save_file

import ckptfix
from ckptfix.errors import Refused

WIDE = 8

FLUX = {
    "double_blocks.0.img_attn.qkv": {"transformer_blocks.0.attn.to_q": 8, "transformer_blocks.0.attn.to_k": 8,
                                     "transformer_blocks.0.attn.to_v": 8},
    "double_blocks.0.txt_attn.qkv": {"transformer_blocks.0.attn.add_q_proj": 8,
                                     "transformer_blocks.0.attn.add_k_proj": 8,
                                     "transformer_blocks.0.attn.add_v_proj": 8},
    "double_blocks.0.img_attn.proj": {"transformer_blocks.0.attn.to_out.0": 8},
    "double_blocks.0.txt_mod.lin": {"transformer_blocks.0.norm1_context.linear": 48},
    "single_blocks.0.linear1": {"single_transformer_blocks.0.attn.to_q": 8, "single_transformer_blocks.0.attn.to_k": 8,
                                "single_transformer_blocks.0.attn.to_v": 8, "single_transformer_blocks.0.proj_mlp": 32},
    "single_blocks.0.linear2": {"single_transformer_blocks.0.proj_out": 8},
    "final_layer.adaLN_modulation.1": {"norm_out.linear": -16},
}  # fmt: skip
"""Original path -> diffusers' paths with their rows; negative where the two halves are turned round."""

SD3 = {
    "joint_blocks.0.x_block.attn.qkv": {"transformer_blocks.0.attn.to_q": 8, "transformer_blocks.0.attn.to_k": 8,
                                        "transformer_blocks.0.attn.to_v": 8},
    "joint_blocks.0.context_block.mlp.fc1": {"transformer_blocks.0.ff_context.net.0.proj": 32},
    "joint_blocks.0.x_block.adaLN_modulation.1": {"transformer_blocks.0.norm1.linear": 48},
    "joint_blocks.1.context_block.adaLN_modulation.1": {"transformer_blocks.1.norm1_context.linear": -16},
}  # fmt: skip

MODELS = {"Flux": FLUX, "SD3": SD3}


def original(model: str) -> Tensors:
    made = torch.Generator().manual_seed(0)
    rows = {path: sum(map(abs, parts.values())) for path, parts in MODELS[model].items()}
    return {f"{path}.weight": torch.randn(count, WIDE, generator=made) for path, count in rows.items()}


def of_diffusers(model: str, state: Tensors) -> Tensors:
    made: Tensors = {}
    for path, parts in MODELS[model].items():
        whole = state[f"{path}.weight"]
        if min(parts.values()) < 0:
            whole = torch.cat(whole.chunk(2)[::-1])
        pieces = torch.split(whole, [abs(count) for count in parts.values()])
        made |= {f"{name}.weight": piece.contiguous() for name, piece in zip(parts, pieces, strict=True)}
    return made


def kohya(state: Tensors) -> Tensors:
    made, out = torch.Generator().manual_seed(1), {}
    for key, value in state.items():
        name = f"lora_unet_{key.removesuffix('.weight').replace('.', '_')}"
        out[f"{name}.lora_down.weight"] = torch.randn(2, WIDE, generator=made)
        out[f"{name}.lora_up.weight"] = torch.randn(len(value), 2, generator=made)
        out[f"{name}.alpha"] = torch.tensor(1.0)
    return out


def sums(state: Tensors, adapter: Tensors) -> Tensors:
    made = {}
    for key, value in state.items():
        name = f"lora_unet_{key.removesuffix('.weight').replace('.', '_')}"
        up, down = adapter[f"{name}.lora_up.weight"].double(), adapter[f"{name}.lora_down.weight"].double()
        made[key] = (value.double() + 0.5 * (up @ down)).float()
    return made


def same(out: Path, truth: Tensors) -> None:
    found = load_file(out)
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[key], truth[key]) for key in truth)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    name: str = request.param
    state = original(name)
    save_file(state, tmp_path / "original.safetensors")
    save_file(of_diffusers(name, state), tmp_path / "diffusers.safetensors")
    write(Made(kohya(state)), tmp_path / "k").rename(tmp_path / "kohya.safetensors")
    return name


@pytest.mark.parametrize("to", ["kohya", "diffusers", "comfy", "peft"])
def test_every_layout_merges_into_both(model: str, tmp_path: Path, to: Any) -> None:
    adapter = tmp_path / ("new" if to == "peft" else "new.safetensors")
    ckptfix.lora_convert(tmp_path / "kohya.safetensors", adapter, to=to)
    truth = sums(original(model), load_file(tmp_path / "kohya.safetensors"))
    ckptfix.lora_merge(tmp_path / "original.safetensors", [adapter], tmp_path / "a.safetensors")
    same(tmp_path / "a.safetensors", truth)
    ckptfix.lora_merge(tmp_path / "diffusers.safetensors", [adapter], tmp_path / "b.safetensors")
    same(tmp_path / "b.safetensors", of_diffusers(model, truth))


def test_names_of_diffusers_become_original_ones(model: str, tmp_path: Path) -> None:
    ckptfix.lora_convert(tmp_path / "kohya.safetensors", tmp_path / "d.safetensors", to="diffusers")
    names = set(load_file(tmp_path / "d.safetensors"))
    parts = [name for row in MODELS[model].values() for name in row]
    assert names == {f"transformer.{name}.lora_{side}.weight" for name in parts for side in "AB"}
    like = tmp_path / "original.safetensors" if model == "SD3" else None
    if like is not None:
        with pytest.raises(Refused, match="diffusers has for Flux, SD3"):
            ckptfix.lora_convert(tmp_path / "d.safetensors", tmp_path / "x.safetensors", to="kohya")
    ckptfix.lora_convert(tmp_path / "d.safetensors", tmp_path / "back.safetensors", to="kohya", like=like)
    assert load_file(tmp_path / "back.safetensors").keys() == load_file(tmp_path / "kohya.safetensors").keys()
    ckptfix.lora_merge(tmp_path / "original.safetensors", [tmp_path / "back.safetensors"], tmp_path / "a.safetensors")
    same(tmp_path / "a.safetensors", sums(original(model), load_file(tmp_path / "kohya.safetensors")))


def test_a_second_attention_alone_is_not_that_of_sd3(tmp_path: Path) -> None:
    """LTX and others have attn1 and attn2 in each block, under the same names in all programs."""
    names = [f"transformer_blocks.9.attn2.to_{part}" for part in "qv"]
    tensors = {f"transformer.{name}.lora_{side}.weight": torch.ones(2, 2) for name in names for side in "AB"}
    source = write(Made(tensors), tmp_path / "x").rename(tmp_path / "x.safetensors")
    ckptfix.lora_convert(source, tmp_path / "c.safetensors", to="comfy")
    found = {key for key in load_file(tmp_path / "c.safetensors") if not key.endswith("alpha")}
    assert found == {key.replace("transformer.", "diffusion_model.", 1) for key in tensors}


def test_parts_that_an_adapter_lacks_stay(tmp_path: Path) -> None:
    state = original("Flux")
    save_file(state, tmp_path / "original.safetensors")
    made = torch.Generator().manual_seed(2)
    tensors: Tensors = {}
    for name in ("transformer_blocks.0.attn.to_v", "single_transformer_blocks.0.attn.to_k"):
        tensors[f"transformer.{name}.lora_A.weight"] = torch.randn(2, WIDE, generator=made)
        tensors[f"transformer.{name}.lora_B.weight"] = torch.randn(8, 2, generator=made)
    source = write(Made(tensors), tmp_path / "x").rename(tmp_path / "x.safetensors")
    with pytest.raises(Refused, match=r"has the rows of single_transformer_blocks.0.proj_mlp too"):
        ckptfix.lora_convert(source, tmp_path / "k.safetensors", to="kohya")
    base = tmp_path / "original.safetensors"
    ckptfix.lora_convert(source, tmp_path / "k.safetensors", to="kohya", like=base)
    for number, adapter in enumerate((source, tmp_path / "k.safetensors")):
        out = tmp_path / f"{number}.safetensors"
        ckptfix.lora_merge(base, [adapter], out)
        found = load_file(out)
        for key, first in (("double_blocks.0.img_attn.qkv", 16), ("single_blocks.0.linear1", 8)):
            old, new = state[f"{key}.weight"], found[f"{key}.weight"]
            changed = (old != new).any(1).nonzero().flatten().tolist()
            assert changed == list(range(first, first + 8))


def test_text_encoders_of_a_single_file(tmp_path: Path) -> None:
    """Stable Diffusion XL has CLIP under the names of transformers, and OpenCLIP with a fused projection."""
    small = "conditioner.embedders.0.transformer.text_model.encoder.layers.0.self_attn.k_proj.weight"
    large = "conditioner.embedders.1.model.transformer.resblocks.0."
    state = {small: torch.zeros(4, 4), f"{large}attn.in_proj_weight": torch.zeros(18, 6),
             f"{large}mlp.c_fc.weight": torch.zeros(24, 6)}  # fmt: skip
    save_file(state, tmp_path / "xl.safetensors")
    tensors: Tensors = {}
    for name, rows, wide in (("te1_text_model_encoder_layers_0_self_attn_k_proj", 4, 4),
                             ("te2_text_model_encoder_layers_0_self_attn_k_proj", 6, 6),
                             ("te2_text_model_encoder_layers_0_mlp_fc1", 24, 6)):  # fmt: skip
        tensors |= {f"lora_{name}.lora_down.weight": torch.ones(1, wide),
                    f"lora_{name}.lora_up.weight": torch.ones(rows, 1)}  # fmt: skip
    source = write(Made(tensors), tmp_path / "x").rename(tmp_path / "style.safetensors")
    layouts: list[Any] = ["kohya", "comfy", "diffusers"]
    for to in layouts:
        adapter = tmp_path / f"{to}.safetensors"
        ckptfix.lora_convert(source, adapter, to=to)
        ckptfix.lora_merge(tmp_path / "xl.safetensors", [adapter], tmp_path / f"{to}.out.safetensors")
        found = load_file(tmp_path / f"{to}.out.safetensors")
        assert found[small].eq(1).all() and found[f"{large}mlp.c_fc.weight"].eq(1).all()
        total = found[f"{large}attn.in_proj_weight"].sum(1)
        assert total.tolist() == [0.0] * 6 + [6.0] * 6 + [0.0] * 6


HEADS, GROUPS, SIZE = 4, 2, 4
ROWS = (HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE)


def litgpt(folder: Path, trained: tuple[int, ...], *, told: bool = True) -> tuple[Path, Tensors]:
    """An adapter of LitGPT for some of query, key and value; and the sums, as its own code defines them."""
    made = torch.Generator().manual_seed(3)
    width = 16
    base = torch.randn(sum(ROWS), width, generator=made)
    down = torch.randn(2 * len(trained), width, generator=made)
    up = torch.randn(sum(ROWS[one] for one in trained), 2, generator=made)
    folder.mkdir()
    key = "transformer.h.0.attn.qkv"
    torch.save({f"{key}.lora_A": down, f"{key}.lora_B": up}, folder / "lit_model.pth.lora")
    if told:
        words = ("lora_query", "lora_key", "lora_value")
        lines = [f"{word}: {str(number in trained).lower()}" for number, word in enumerate(words)]
        (folder / "hyperparameters.yaml").write_text("\n".join(["lora_alpha: 6", *lines, ""]))
        (folder / "model_config.yaml").write_text(f"n_head: {HEADS}\nn_query_groups: {GROUPS}\nhead_size: {SIZE}\n")
    save_file({f"{key}.weight": base}, folder.parent / "lit.safetensors")
    truth = base.double()
    starts, first = (0, ROWS[0], ROWS[0] + ROWS[1]), 0
    for number, one in enumerate(trained):
        rows = slice(starts[one], starts[one] + ROWS[one])
        truth[rows] += 3 * up[first : first + ROWS[one]].double() @ down[2 * number : 2 * number + 2].double()
        first += ROWS[one]
    return folder / "lit_model.pth.lora", {f"{key}.weight": truth.float()}


@pytest.mark.parametrize("trained", [(0, 2), (0, 1, 2), (1,), (0, 1)])
def test_the_fused_projection_of_litgpt(tmp_path: Path, trained: tuple[int, ...]) -> None:
    source, truth = litgpt(tmp_path / "lit", trained)
    ckptfix.lora_merge(tmp_path / "lit.safetensors", [source], tmp_path / "out.safetensors")
    same(tmp_path / "out.safetensors", truth)
    home = tmp_path / "hf"
    home.mkdir()
    (whole,) = truth.values()
    (base,) = load_file(tmp_path / "lit.safetensors").values()
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    parts = [dict(zip(names, map(torch.clone, torch.split(one, list(ROWS))), strict=True)) for one in (base, whole)]
    save_file(parts[0], home / "model.safetensors")
    (home / "config.json").write_text(
        f'{{"model_type": "llama", "num_attention_heads": {HEADS}, "num_key_value_heads": {GROUPS}}}'
    )
    ckptfix.lora_convert(source, tmp_path / "peft", to="peft", like=home)
    ckptfix.lora_merge(home / "model.safetensors", [tmp_path / "peft"], tmp_path / "o.safetensors")
    same(tmp_path / "o.safetensors", parts[1])


def test_what_litgpt_does_not_say_is_asked_for(tmp_path: Path) -> None:
    source, _ = litgpt(tmp_path / "lit", (0, 2), told=False)
    with pytest.raises(Refused, match=r"hyperparameters\.yaml, which says which of query, key and value"):
        ckptfix.lora_merge(tmp_path / "lit.safetensors", [source], tmp_path / "out.safetensors", alpha=6.0)


def test_rows_of_torchtune_get_the_order_of_transformers(tmp_path: Path) -> None:
    made = torch.Generator().manual_seed(4)
    ups = {"q": torch.randn(ROWS[0], 2, generator=made), "k": torch.randn(ROWS[1], 2, generator=made),
           "v": torch.randn(ROWS[2], 2, generator=made)}  # fmt: skip
    tensors: Tensors = {}
    for name, up in ups.items():
        tensors |= {f"layers.0.attn.{name}_proj.lora_a.weight": torch.ones(2, 16),
                    f"layers.0.attn.{name}_proj.lora_b.weight": up}  # fmt: skip
    source = write(Made(tensors), tmp_path / "t")
    home = tmp_path / "hf"
    home.mkdir()
    save_file({f"model.layers.0.self_attn.{name}_proj.weight": torch.zeros(len(up), 16) for name, up in ups.items()},
              home / "model.safetensors")  # fmt: skip
    (home / "config.json").write_text(
        f'{{"model_type": "llama", "num_attention_heads": {HEADS}, "num_key_value_heads": {GROUPS}}}'
    )
    ckptfix.lora_convert(source, tmp_path / "peft", to="peft", like=home, alpha=2.0)
    found = load_file(tmp_path / "peft/adapter_model.safetensors")
    for name, up in ups.items():
        heads = {"q": HEADS, "k": GROUPS}.get(name)
        wanted = up if heads is None else up.view(heads, SIZE // 2, 2, 2).transpose(1, 2).reshape(up.shape)
        assert torch.equal(found[f"base_model.model.model.layers.0.self_attn.{name}_proj.lora_B.weight"], wanted)
