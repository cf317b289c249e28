"""Adapters with other keys, shapes and configurations than any library writes: a result or a CkptfixError."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import LONG
from safetensors.numpy import save_file

import ckptfix
from ckptfix.errors import CkptfixError
from ckptfix.names import adapters

FRONTS = ("", "base_model.model.", "base_model.model.base_model.model.", "lora_unet_", "lora_te1_", "lycoris_", "unet.",
          "diffusion_model.", "transformer.", "text_encoders.clip_l.")  # fmt: skip
PATHS = ("fc1", "double_blocks.0.img_attn.qkv", "single_blocks.3.linear1", "final_layer.adaLN_modulation.1",
         "h.0.attn.qkv", "transformer_blocks.0.attn.to_q", "layers.0.attn.q_proj",
         "text_model.encoder.layers.0.self_attn.k_proj")  # fmt: skip
ENDS = (".lora_A.weight", ".lora_B.weight", ".lora_A.default.weight", ".lora_B.default.weight", ".lora_down.weight",
        ".lora_up.weight", ".lora_mid.weight", ".alpha", ".dora_scale", ".lora_magnitude_vector", ".lora_embedding_A",
        ".lora_embedding_B", ".hada_w1_a", ".hada_w1_b", ".hada_w2_a", ".hada_w2_b", ".hada_t1", ".lokr_w1", ".lokr_w2",
        ".lokr_w1_a", ".lokr_w1_b", ".lokr_w2_a", ".lokr_w2_b", ".lokr_t2", ".diff", ".diff_b", ".w_norm", ".lora_A",
        ".lora_B", ".lora_a", ".lora_b", ".lora_a.weight", ".lora_b.weight", ".weight", ".base_layer.weight", ".m",
        ".lora_B.bias", ".on_input", ".oft_r", ".adapter.linear_in.weight",
        ".modules_to_save.default.weight")  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, 0, -1, 3, 1 << 40, 1e308, float("nan"), "3", "", [], {}, True, [None], ["fc1", 3], {"fc1": 2}, {"(": 1},
    {"fc1": "x"}, "(a+)+$", "(", "all-linear", "pissa", {"a": {"b": [1]}},
)  # fmt: skip
SETTINGS = ("r", "lora_alpha", "alpha", "rank_pattern", "alpha_pattern", "target_modules", "use_rslora",
            "fan_in_fan_out", "base_model_name_or_path", "init_lora_weights", "lora_parameters", "modules_to_save",
            "peft_type",
            "model_type", "num_attention_heads", "num_key_value_heads", "use_dora", "target_parameters")  # fmt: skip
LINES = ("lora_query: true", "lora_key: maybe", "lora_value: 1e999", "lora_alpha: -", "n_head: 4", "head_size: 0",
         "n_query_groups: 2.5", "n_embd: 12", "lora_alpha: 8", ":::", "lora_value: true")  # fmt: skip
MESSAGES = ("lora key not loaded: a.b", "Found missing adapter keys while loading the checkpoint: ['a.b']",
            "Invalid LoRA checkpoint", "size mismatch for a.lora_A.default.weight: copying a param with shape "
            "torch.Size([2, 4]) from checkpoint, the shape in current model is torch.Size([8, 4]).")  # fmt: skip


def write(folder: Path, dice: random.Random) -> None:
    sizes = (0, 1, 2, 3, 4, 6, 8, 12)
    tensors, base = {}, {}
    for _ in range(dice.randint(1, 3)):
        front, path = dice.choice(FRONTS), dice.choice(PATHS)
        name = front + (path.replace(".", "_") if front.endswith("_") else path)
        first = dice.randrange(len(ENDS))
        for end in {*ENDS[first : first + dice.randint(1, 4)], *dice.sample(ENDS, dice.randint(0, 2))}:
            shape = tuple(dice.choice(sizes) for _ in range(dice.choice((0, 1, 2, 2, 2, 2, 3, 4))))
            tensors[name + end] = np.ones(shape, dice.choice((np.float32, np.float32, np.float16, np.int8)))
        base[f"{path}.weight"] = np.ones((dice.choice(sizes[1:]), dice.choice(sizes[1:])), np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    save_file(base, folder / "base/model.safetensors")
    for place in (folder, folder / "base"):
        config = {key: dice.choice(VALUES) for key in dice.sample(SETTINGS, dice.randint(0, 6))}
        config |= {"r": 2, "lora_alpha": 4} if dice.random() < 0.5 else {}
        config |= {"model_type": "llama"} if dice.random() < 0.3 else {}
        name = "adapter_config.json" if place == folder else "config.json"
        (place / name).write_text(json.dumps(config) if dice.random() < 0.95 else "[" * 9999)
    for name in ("hyperparameters.yaml", "model_config.yaml"):
        (folder / name).write_text("\n".join(dice.sample(LINES, 5)))


def survives(folder: Path, dice: random.Random) -> int:
    """Run the commands on an adapter, and return how many had a result."""
    source, base, done = folder / "adapter_model.safetensors", folder / "base/model.safetensors", 0
    to: Any = dice.choice(("peft", "kohya", "diffusers", "comfy"))
    out = folder / "out"
    like = dice.choice((None, folder / "base"))
    calls = (
        lambda: str(ckptfix.lora_info(source)),
        lambda: str(ckptfix.doctor(source, error=dice.choice((None, *MESSAGES)))),
        lambda: ckptfix.fix(source, out, dry_run=True),
        lambda: ckptfix.lora_merge(base, [source], out, alpha=dice.choice((None, 2.0)), dry_run=dice.random() < 0.5,
                                   force=True),
        lambda: ckptfix.lora_convert(source, folder / f"new.{to}", to=to, like=like, dry_run=True, alpha=1.0),
        lambda: ckptfix.lora_resize(source, folder / "less", rank=1, dry_run=True),
    )  # fmt: skip
    for call in calls:
        try:
            call()
            done += 1
        except CkptfixError as error:
            assert error.message and "Traceback" not in error.message
    return done


def run(folder: Path, seed: int, count: int) -> int:
    (folder / "base").mkdir(exist_ok=True)
    done = 0
    for number in range(count):
        dice = random.Random(seed * 100_000 + number)
        write(folder, dice)
        try:
            done += survives(folder, dice)
        except Exception as error:
            raise AssertionError(f"seed {seed}, adapter {number}") from error
    return done


@pytest.mark.slow
def test_adapters_that_no_library_writes(tmp_path: Path) -> None:
    assert run(tmp_path, 0, 60) > 60


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(1, 5 if LONG else 3))
def test_many_adapters_that_no_library_writes(tmp_path: Path, seed: int) -> None:
    assert run(tmp_path, seed, 1000 if LONG else 120) > 120


def test_the_mutants_have_every_ending() -> None:
    """A new row of the table is tried too."""
    rows = [adapters.parsed(f"fc1{end}") for end in ENDS]
    roles = {row.role for row in rows if row is not None}
    assert roles >= {"down", "up", "mid", "alpha", "magnitude", "w1_a", "w2", "t1", "t2", "difference", "added bias"}
