"""The two sets of names of Flux, SD3 and OpenCLIP: of the original code, and of diffusers or transformers.

ComfyUI and kohya's scripts have the original names, with query, key and value in one tensor; diffusers has them apart.
Sources: huggingface/diffusers ``scripts/convert_flux_to_diffusers.py``, ``scripts/convert_sd3_to_diffusers.py`` and
``loaders/lora_conversion_utils.py``; transformers ``models/clip/convert_clip_original_pytorch_to_hf.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import NamedTuple


class NamedTwice(NamedTuple):
    """A module of the original code, and what it is elsewhere.

    Attributes:
        original: its path; ``{}`` is the number of the layer.
        others: paths of the parts, in the order of their rows.
        halves: where it has twice as many rows as columns, the two halves are the other way round: diffusers has the
            scale of an adaptive norm before the shift.
    """

    original: str
    others: tuple[str, ...]
    halves: bool = False


def _block(old: str, new: str, pairs: Iterable[tuple[str, str]]) -> tuple[NamedTwice, ...]:
    return tuple(
        NamedTwice(f"{old}{left}", tuple(f"{new}{part}" for part in right.split()), left.endswith("adaLN_modulation.1"))
        for left, right in pairs
    )


_FLUX = (
    *_block("double_blocks.{}.", "transformer_blocks.{}.", (
        ("img_attn.qkv", "attn.to_q attn.to_k attn.to_v"), ("img_attn.proj", "attn.to_out.0"),
        ("img_mlp.0", "ff.net.0.proj"), ("img_mlp.2", "ff.net.2"), ("img_mod.lin", "norm1.linear"),
        ("txt_attn.qkv", "attn.add_q_proj attn.add_k_proj attn.add_v_proj"), ("txt_attn.proj", "attn.to_add_out"),
        ("txt_mlp.0", "ff_context.net.0.proj"), ("txt_mlp.2", "ff_context.net.2"),
        ("txt_mod.lin", "norm1_context.linear"),
    )),
    *_block("single_blocks.{}.", "single_transformer_blocks.{}.", (
        ("linear1", "attn.to_q attn.to_k attn.to_v proj_mlp"), ("linear2", "proj_out"),
        ("modulation.lin", "norm.linear"),
    )),
    *_block("", "", (
        ("img_in", "x_embedder"), ("txt_in", "context_embedder"),
        ("time_in.in_layer", "time_text_embed.timestep_embedder.linear_1"),
        ("time_in.out_layer", "time_text_embed.timestep_embedder.linear_2"),
        ("vector_in.in_layer", "time_text_embed.text_embedder.linear_1"),
        ("vector_in.out_layer", "time_text_embed.text_embedder.linear_2"),
        ("guidance_in.in_layer", "time_text_embed.guidance_embedder.linear_1"),
        ("guidance_in.out_layer", "time_text_embed.guidance_embedder.linear_2"),
        ("final_layer.linear", "proj_out"), ("final_layer.adaLN_modulation.1", "norm_out.linear"),
    )),
)  # fmt: skip

_SD3 = (
    *_block("joint_blocks.{}.", "transformer_blocks.{}.", (
        ("x_block.attn.qkv", "attn.to_q attn.to_k attn.to_v"), ("x_block.attn.proj", "attn.to_out.0"),
        ("x_block.attn2.qkv", "attn2.to_q attn2.to_k attn2.to_v"), ("x_block.attn2.proj", "attn2.to_out.0"),
        ("x_block.mlp.fc1", "ff.net.0.proj"), ("x_block.mlp.fc2", "ff.net.2"),
        ("x_block.adaLN_modulation.1", "norm1.linear"),
        ("context_block.attn.qkv", "attn.add_q_proj attn.add_k_proj attn.add_v_proj"),
        ("context_block.attn.proj", "attn.to_add_out"),
        ("context_block.mlp.fc1", "ff_context.net.0.proj"), ("context_block.mlp.fc2", "ff_context.net.2"),
        ("context_block.adaLN_modulation.1", "norm1_context.linear"),
    )),
    *_block("", "", (
        ("x_embedder.proj", "pos_embed.proj"), ("context_embedder", "context_embedder"),
        ("t_embedder.mlp.0", "time_text_embed.timestep_embedder.linear_1"),
        ("t_embedder.mlp.2", "time_text_embed.timestep_embedder.linear_2"),
        ("y_embedder.mlp.0", "time_text_embed.text_embedder.linear_1"),
        ("y_embedder.mlp.2", "time_text_embed.text_embedder.linear_2"),
        ("final_layer.linear", "proj_out"), ("final_layer.adaLN_modulation.1", "norm_out.linear"),
    )),
)  # fmt: skip

_OPENCLIP = _block("transformer.resblocks.{}.", "text_model.encoder.layers.{}.", (
    ("attn.in_proj", "self_attn.q_proj self_attn.k_proj self_attn.v_proj"), ("attn.out_proj", "self_attn.out_proj"),
    ("mlp.c_fc", "mlp.fc1"), ("mlp.c_proj", "mlp.fc2"),
))  # fmt: skip

MODELS: Mapping[str, tuple[NamedTwice, ...]] = {"Flux": _FLUX, "SD3": _SD3, "OpenCLIP": _OPENCLIP}
"""Model -> its modules with two names."""

SIGNS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "Flux": (r"(?:double|single)_blocks[._]\d", (r"single_transformer_blocks[._]\d",)),
    "SD3": (r"joint_blocks[._]\d", (r"transformer_blocks[._]\d+[._]attn2[._]to_", r"pos_embed[._]proj")),
    "OpenCLIP": (r"resblocks[._]\d", ()),
}
"""Model -> what its original names have in them, and what only its other names have."""


class Row(NamedTuple):
    """A name of a module, as a row of the table has it.

    Attributes:
        row: the row.
        number: of the layer; empty without one.
        part: which of `others` the name is; None for the original.
    """

    row: NamedTwice
    number: str
    part: int | None

    @property
    def original(self) -> str:
        """The original path."""
        return self.row.original.format(self.number)

    @property
    def others(self) -> tuple[str, ...]:
        """The paths elsewhere."""
        return tuple(path.format(self.number) for path in self.row.others)


_NUMBER = re.compile(r"\d+")


@cache
def _tables(model: str) -> tuple[Mapping[str, Row], Mapping[str, Row]]:
    old = {row.original: Row(row, "", None) for row in MODELS[model]}
    new = {path: Row(row, "", part) for row in MODELS[model] for part, path in enumerate(row.others)}
    return old, new


def _found(table: Mapping[str, Row], path: str) -> Row | None:
    found = _NUMBER.search(path)
    if found is not None:
        row = table.get(f"{path[: found.start()]}{{}}{path[found.end() :]}")
        if row is not None:
            return row._replace(number=found[0])
    return table.get(path)


def original_row(model: str, path: str) -> Row | None:
    """Return the row of a path of the original code."""
    return _found(_tables(model)[0], path)


def other_row(model: str, path: str) -> Row | None:
    """Return the row of a path of diffusers or transformers."""
    return _found(_tables(model)[1], path)


def original_models(paths: Iterable[str]) -> list[str]:
    """Return the models whose original names some of the paths are."""
    text = list(paths)
    return [model for model, (sign, _) in SIGNS.items() if any(re.search(sign, path) for path in text)]


def other_models(paths: Iterable[str]) -> list[str]:
    """Return the models whose other names some of the paths may be: the one that signs decide, or each of several."""
    text = list(paths)
    sure = [name for name, (_, signs) in SIGNS.items() if any(re.search(sign, path) for sign in signs for path in text)]
    found = sure or [name for name in MODELS if any(other_row(name, path) is not None for path in text)]
    # SD3 has attn2 beside attn; LTX, PixArt, Sana and U-Nets have it beside attn1.
    second = any("attn2" in path for path in text) and not any(re.search(r"[._]attn[._]", path) for path in text)
    return [name for name in found if name != "SD3" or not second]


def tails(path: str, most: int = 4) -> Iterator[tuple[str, str]]:
    """Yield the beginnings of a path that a larger model may have put before it, and what is left."""
    parts = path.split(".")
    for count in range(min(most, len(parts) - 1) + 1):
        front = ".".join(parts[:count])
        yield f"{front}." if front else "", ".".join(parts[count:])
