"""The quantization settings beside a checkpoint: ``config.json``, and files that some tools write instead of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from ckptfix.checkpoint import Checkpoint
from ckptfix.dataclass import dataclass
from ckptfix.ops import quantized

NAMES = ("quantization_config", "compression_config", "quantization")
"""Keys of config.json that hold the settings: of transformers, of early compressed-tensors, and of mlx_lm."""

OTHERS = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
"""Files that hold only settings: of AutoGPTQ, of llm-awq, and of ModelOpt."""

COMFY = "_quantization_metadata"
"""The pair of a safetensors file in which ComfyUI states the format of each layer, as ``{"layers": {NAME: {...}}}``
(comfy/utils.py ``convert_old_quants``)."""

FLOATS = frozenset({"float32", "float16", "bfloat16"})


@dataclass(frozen=True, slots=True)
class Settings:
    """The quantization settings beside a checkpoint.

    Attributes:
        rows: the settings; empty if there are none.
        dtype: of the model before it was quantized, as config.json states it; None if it does not.
        metadata: string pairs of the file itself.
        hidden_size: of the model, as config.json states it; None if it does not, or states several.
    """

    rows: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    hidden_size: int | None = None

    def text(self, *names: str) -> str | None:
        """Return the first of these settings that is a string."""
        return next((value for name in names if isinstance(value := self.rows.get(name), str)), None)

    def number(self, name: str, module: str = "") -> int | None:
        """Return a setting that is an integer: that of a module, if it has one of its own, or that of all."""
        own = self.rows.get(module)
        for row in (own if isinstance(own, dict) else {}, self.rows):
            value = row.get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return None

    def of_comfy(self, module: str) -> Mapping[str, Any]:
        """Return what ComfyUI's metadata states about a layer; empty without it."""
        layers = object_of(self.metadata.get(COMFY, "")).get("layers")
        for name, row in layers.items() if isinstance(layers, dict) else ():
            if isinstance(row, dict) and (module == name or module.endswith(f".{name}")):
                return row
        return {}

    def is_written_by(self, tool: str) -> bool:
        """Return whether ``meta.quantizer`` of the settings names this tool, as ``gptqmodel:5.0``."""
        meta = self.rows.get("meta")
        named = meta.get("quantizer") if isinstance(meta, dict) else None
        names = named if isinstance(named, list) else [named]
        return any(isinstance(name, str) and name.lower().startswith(tool) for name in names)

    def of_weights(self, name: str) -> int | None:
        """Return a setting of the weights in compressed-tensors' ``config_groups``, if all groups agree on it."""
        groups = self.rows.get("config_groups")
        rows = list(groups.values()) if isinstance(groups, dict) else []
        inner = [row.get("weights") for row in rows if isinstance(row, dict)]
        found = {row.get(name) for row in inner if isinstance(row, dict) and type(row.get(name)) is int}
        return found.pop() if len(found) == 1 and len(inner) == len(rows) else None

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return a setting that is a list of positive integers; empty if it is not."""
        value = self.rows.get(name)
        whole = isinstance(value, list) and all(type(one) is int and one > 0 for one in value)
        return tuple(value) if whole and isinstance(value, list) else ()


def object_of(text: str) -> dict[str, Any]:
    """Return the object of a JSON text; empty if it is not one."""
    try:
        made = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return made if isinstance(made, dict) else {}


def settings_of(checkpoint: Checkpoint) -> Settings:
    """Return the quantization settings beside a checkpoint."""
    config = quantized.json_beside(checkpoint, quantized.CONFIG)
    rows: dict[str, Any] = {}
    dtype: str | None = None
    for holder in quantized.holders_of(config):
        for name in NAMES:
            row = holder.get(name)
            if isinstance(row, dict) and not rows:
                rows = row
        for name in ("torch_dtype", "dtype"):
            value = holder.get(name)
            if isinstance(value, str) and dtype is None:
                dtype = value.removeprefix("torch.")
    for name in OTHERS:
        if not rows:
            found = quantized.json_beside(checkpoint, name)
            inner = found.get("quantization")
            rows = inner if isinstance(inner, dict) else found
    holders = (config, *(row for row in config.values() if isinstance(row, dict)))
    hidden = {size for row in holders if type(size := row.get("hidden_size")) is int and size > 0}
    only = hidden.pop() if len(hidden) == 1 else None
    return Settings(rows, dtype if dtype in FLOATS else None, checkpoint.metadata, only)


def without(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without its quantization settings."""
    made = {key: value for key, value in config.items() if key not in NAMES}
    inner = made.get("text_config")
    if isinstance(inner, dict):
        made["text_config"] = {key: value for key, value in inner.items() if key not in NAMES}
    return made
