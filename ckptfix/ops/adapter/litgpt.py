"""LoRA of LitGPT for the fused query, key and value: the factors of the parts that it was trained for, stacked.

``lora_A`` has the rank once for each trained part, and ``lora_B`` the rows of those parts (Lightning-AI/litgpt
``lora.py LoRAQKVLinear``). hyperparameters.yaml beside the file says which parts, and config.json or model_config.yaml
the number of heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ckptfix.checkpoint import Checkpoint, TensorEntry, contiguous_stride
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError
from ckptfix.formats.yaml_lines import plain_values
from ckptfix.io.source import open_source
from ckptfix.names.adapters import Role
from ckptfix.ops.quantized import file_beside, json_beside

PARTS = ("q_proj", "k_proj", "v_proj")
"""Names of the parts, for which LitGPT has none."""

_WORDS = ("lora_query", "lora_key", "lora_value")
_MOST = 1 << 20

Roles = Mapping[Role, TensorEntry]


@dataclass(frozen=True, slots=True)
class LitGptSettings:
    """The statements of the files beside an adapter of LitGPT.

    Attributes:
        alpha: None if it is not stated.
        parts: numbers of the parts that were trained; None if it is not stated.
        rows: rows of query, key and value; None if the heads are not stated.
    """

    alpha: float | None
    parts: tuple[int, ...] | None
    rows: tuple[int, int, int] | None

    @classmethod
    def beside(cls, checkpoint: Checkpoint) -> LitGptSettings:
        """Read the files beside a checkpoint."""
        training, model = _pairs(checkpoint, "hyperparameters.yaml"), _pairs(checkpoint, "model_config.yaml")
        parts = tuple(number for number, word in enumerate(_WORDS) if training.get(word))
        config = json_beside(checkpoint, "config.json")
        heads = _whole(model.get("n_head"), config.get("num_attention_heads"))
        groups = _whole(model.get("n_query_groups"), config.get("num_key_value_heads"), heads)
        wide = _whole(model.get("n_embd"), config.get("hidden_size"))
        size = _whole(model.get("head_size"), config.get("head_dim"), wide // heads if wide and heads else None)
        rows = (heads * size, groups * size, groups * size) if heads and groups and size else None
        alpha = training.get("lora_alpha")
        return cls(None if alpha is None else float(alpha), parts if training.keys() & set(_WORDS) else None, rows)


def _whole(*values: object) -> int | None:
    return next((int(one) for one in values if isinstance(one, int | float) and one >= 1 and one == int(one)), None)


def _pairs(checkpoint: Checkpoint, name: str) -> dict[str, float]:
    """Return the numbers at the top of a YAML file beside a checkpoint; true is 1."""
    path = file_beside(checkpoint, name)
    if path is None:
        return {}
    try:
        with open_source(path) as source:
            text = bytes(source.read(0, min(source.size, _MOST))).decode("utf-8", "replace")
    except (CkptfixError, OSError):
        return {}
    return {key: float(value) for key, value in plain_values(text).items() if isinstance(value, int | float)}


def is_fused(module: str, roles: Roles) -> bool:
    """Return whether the factors are those of several parts, or of some of query, key and value."""
    down, up = roles.get("down"), roles.get("up")
    if down is None or up is None or len(down.shape) != 2 or len(up.shape) != 2:
        return False
    return module.endswith((".qkv", ".attn.attn"))


def parts_of(module: str, roles: Roles, settings: LitGptSettings) -> dict[str, dict[Role, TensorEntry]] | str:
    """Return the factors of each part under a name of its own, or a sentence that says why they are not known."""
    down, up = roles["down"], roles["up"]
    rank = up.shape[1]
    count = down.shape[0] // rank if rank and down.shape[0] % rank == 0 else 0
    if module.endswith(".attn.attn"):
        return f"{module}: LitGPT before 0.5 has query, key and value head by head in it"
    if not 1 <= count <= 3:
        return f"{module}: lora_A has {down.shape[0]} rows, and lora_B the rank {rank}"
    parts = settings.parts if settings.parts is not None else (0, 1, 2) if count == 3 else None
    if parts is None or len(parts) != count:
        return f"{module}: hyperparameters.yaml, which says which of query, key and value were trained, is missing"
    if settings.rows is None and count > 1:
        return f"{module}: model_config.yaml or config.json, which state the number of heads, are missing"
    rows = [up.shape[0]] if count == 1 else [settings.rows[one] for one in parts] if settings.rows else []
    if sum(rows) != up.shape[0]:
        return f"{module}: lora_B has {up.shape[0]} rows, and the heads of the configuration have {sum(rows)}"
    return dict(_cut(module, down, up, parts, rows))


def _cut(
    module: str, down: TensorEntry, up: TensorEntry, parts: tuple[int, ...], rows: list[int]
) -> Iterator[tuple[str, dict[Role, TensorEntry]]]:
    rank, first = up.shape[1], 0
    for number, (part, size) in enumerate(zip(parts, rows, strict=True)):
        name = f"{module.removesuffix('qkv')}{PARTS[part]}"
        yield name, {"down": _rows(down, number * rank, rank), "up": _rows(up, first, size)}
        first += size


def _rows(entry: TensorEntry, first: int, count: int) -> TensorEntry:
    """Return some rows of a tensor, as a tensor."""
    stride = entry.stride or contiguous_stride(entry.shape)
    return replace(entry, shape=(count, *entry.shape[1:]), offset=entry.offset + first * stride[0])
