"""Tiny adapters in the layouts of libraries, with the update that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

PATHS = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj")
RANK, ALPHA = 3, 6.0


def base(dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensors:
    """A model with three linear layers and a norm."""
    made = torch.Generator().manual_seed(seed)
    shapes = {PATHS[0]: (8, 6), PATHS[1]: (8, 6), PATHS[2]: (6, 10)}
    state = {f"{path}.weight": torch.randn(shape, generator=made) for path, shape in shapes.items()}
    return {name: value.to(dtype) for name, value in {**state, "model.norm.weight": torch.ones(6)}.items()}


class Made(NamedTuple):
    """An adapter, the configuration beside it, its metadata, and whether alpha has to be given."""

    tensors: Tensors
    config: Mapping[str, Any] | None = None
    metadata: Mapping[str, str] | None = None
    alpha: bool = False


def factors(state: Tensors) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Module -> (down, up)."""
    made = torch.Generator().manual_seed(7)
    return {
        path: (torch.randn(RANK, state[f"{path}.weight"].shape[1], generator=made),
               torch.randn(state[f"{path}.weight"].shape[0], RANK, generator=made))
        for path in PATHS
    }  # fmt: skip


def merged(state: Tensors, scale: float = ALPHA / RANK) -> Tensors:
    """The sums in float64, rounded to float32 and to the dtype of each weight."""
    out = dict(state)
    for path, (down, up) in factors(state).items():
        whole = state[f"{path}.weight"].double() + scale * (up.double() @ down.double())
        out[f"{path}.weight"] = whole.float().to(state[f"{path}.weight"].dtype)
    return out


def _each(state: Tensors, down: str, up: str, name: Callable[[str], str] = str, *, alpha: str = "") -> Tensors:
    made: Tensors = {}
    for path, (one, two) in factors(state).items():
        made[f"{name(path)}{down}"] = one
        made[f"{name(path)}{up}"] = two
        if alpha:
            made[f"{name(path)}{alpha}"] = torch.tensor(ALPHA)
    return made


PEFT = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "base_model_name_or_path": "small/model"}


def peft(state: Tensors, name: str = "") -> Made:
    """As `PeftModel.save_pretrained` writes it; with a name as in the state dict of the model."""
    tensors = _each(state, f".lora_A{name}.weight", f".lora_B{name}.weight", "base_model.model.{}".format)
    return Made(tensors, PEFT)


def _flat(path: str) -> str:
    return f"lora_te_{path.replace('.', '_')}"


def _folded(state: Tensors, name: Callable[[str], str], down: str, up: str) -> Tensors:
    made = _each(state, down, up, name)
    return {key: value * (ALPHA / RANK) if key.endswith(up) else value for key, value in made.items()}


def _mlx(state: Tensors) -> Tensors:
    made = _each(state, ".lora_a", ".lora_b")
    return {key: value.T.contiguous() for key, value in made.items()}


LAYOUTS: dict[str, Callable[[Tensors], Made]] = {
    "peft": peft,
    "peft, a name in the keys": lambda state: peft(state, ".default"),
    "peft, rsLoRA": lambda state: Made(
        peft(state).tensors, {**PEFT, "use_rslora": True, "lora_alpha": ALPHA / RANK**0.5}
    ),
    "peft, patterns": lambda state: Made(
        peft(state).tensors, {**PEFT, "r": 9, "lora_alpha": 1.0, "rank_pattern": {"q_proj": RANK, "mlp.*": RANK},
                              "alpha_pattern": {"1.self_attn.q_proj": ALPHA, "[qv]_proj": ALPHA, ".*down_proj": ALPHA}}
    ),
    "kohya": lambda state: Made(
        _each(state, ".lora_down.weight", ".lora_up.weight", _flat, alpha=".alpha"), None, {"ss_sd_model_name": "a"}
    ),
    "comfy": lambda state: Made(
        _each(state, ".lora_A.weight", ".lora_B.weight", "diffusion_model.{}".format, alpha=".alpha")
    ),
    "diffusers": lambda state: Made(
        _each(state, ".lora_A.weight", ".lora_B.weight", "transformer.{}".format), None,
        {"lora_adapter_metadata": json.dumps({"transformer.r": RANK, "transformer.lora_alpha": ALPHA})},
    ),
    "diffusers-old": lambda state: Made(
        _folded(state, "text_encoder.{}".format, ".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight")
    ),
    "torchtune": lambda state: Made(_each(state, ".lora_a.weight", ".lora_b.weight"), PEFT),
    "litgpt": lambda state: Made(_each(state, ".lora_A", ".lora_B"), alpha=True),
    "mlx": lambda state: Made(_mlx(state), {"lora_parameters": {"rank": RANK, "scale": ALPHA / RANK}}),
    "nemo": lambda state: Made(
        _each(state, ".adapter.linear_in.weight", ".adapter.linear_out.weight"), alpha=True
    ),
}  # fmt: skip
"""Layout, and after a comma what is special -> the same adapter in it."""


def write(made: Made, folder: Path) -> Path:
    """Write an adapter to a new folder, and return the file."""
    folder.mkdir()
    tensors = {name: value.contiguous() for name, value in made.tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors", dict(made.metadata or {"format": "pt"}))
    if made.config is not None:
        (folder / "adapter_config.json").write_text(json.dumps(made.config))
    return folder / "adapter_model.safetensors"
