"""The tables of formats with names of their own: GGUF's names of small models, and transformers' weights back.

`gguf_names.json` holds the names and shapes of models with one layer, as transformers has them and as llama.cpp's
convert_hf_to_gguf.py writes them. What that script does to the values is computed here as its source states it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_files import gguf
from safetensors.numpy import load_file, save_file

import ckptfix
from ckptfix import errors
from ckptfix.names import tables

MODELS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "gguf_names.json").read_text("utf-8"))
HEADS, KV = 4, 2

Array = np.ndarray[Any, np.dtype[np.float32]]


def weights(family: str) -> dict[str, Array]:
    """The tensors of a small model in transformers' names; no two elements are the same."""
    made, start = {}, 0
    for key, shape in MODELS[family]["hf"].items():
        count = int(np.prod(shape))
        made[key] = np.arange(start, start + count, dtype="f4").reshape(shape)
        start += count
    return made


def permuted(value: Array, heads: int) -> Array:
    """LlamaModel.permute of conversion/llama.py."""
    return value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def converted(family: str, key: str, value: Array) -> Array:
    """What convert_hf_to_gguf.py makes of a tensor that it does not join with others."""
    kind = key.split(".")[-2]
    if family in ("llama", "mixtral") and kind in ("q_proj", "k_proj"):
        return permuted(value, HEADS if kind == "q_proj" else KV)
    if family.startswith("gemma") and key.endswith("norm.weight"):
        return value + 1
    if family == "gpt2" and kind in ("c_attn", "c_proj", "c_fc") and key.endswith("weight"):
        return value.T
    if family == "gpt_neox" and kind == "query_key_value":
        parts = value.reshape(HEADS, 3, -1, *value.shape[1:])
        return np.concatenate([parts[:, part].reshape(-1, *value.shape[1:]) for part in range(3)])
    return value


def of_values(arrays: dict[str, Array]) -> dict[bytes, str]:
    return {np.ascontiguousarray(value).tobytes(): key for key, value in arrays.items()}


def in_gguf(family: str, folder: Path) -> Path:
    """The model in a GGUF file, made by the table run backwards."""
    save_file(weights(family), folder / "hf.safetensors")
    names = f"{family}/hf:gguf"
    ckptfix.rename(folder / "hf.safetensors", folder / "g.safetensors", names=names, heads=HEADS, kv_heads=KV)
    arrays = load_file(folder / "g.safetensors")
    kind = MODELS[family]["architecture"]
    heads = {f"{kind}.attention.head_count": HEADS, f"{kind}.attention.head_count_kv": KV}
    gguf(arrays, folder / "m.gguf", architecture=kind, numbers=heads)
    return folder / "m.gguf"


@pytest.mark.parametrize("family", MODELS)
def test_weights_of_gguf_get_the_names_of_transformers(family: str, tmp_path: Path) -> None:
    path, wanted = in_gguf(family, tmp_path), weights(family)
    made = load_file(tmp_path / "g.safetensors")
    assert {key: list(value.shape) for key, value in made.items()} == MODELS[family]["gguf"]
    by_value = of_values(made)
    single = {key: value for key, value in wanted.items() if ".experts." not in key and not key.startswith("pooler.")}
    for key, value in single.items():
        assert np.ascontiguousarray(converted(family, key, value)).tobytes() in by_value, key
    result = ckptfix.convert(path, tmp_path / "back.safetensors", names="hf")
    back = load_file(tmp_path / "back.safetensors")
    assert result.exit_code == 0 and not [key for key in wanted.keys() - back.keys() if not key.startswith("pooler.")]
    for key, value in back.items():
        assert np.array_equal(value, wanted[key]), key


def test_every_family_of_the_table_has_a_model() -> None:
    rows = [one for one in tables.shipped() if one.path == "gguf.rules"]
    assert [one.family for one in rows] == list(dict.fromkeys(one.family for one in rows))
    assert sorted(one.family for one in rows) == sorted(MODELS)
    for one in rows:
        assert MODELS[one.family]["architecture"] in one.types


def test_two_tables_lead_from_gguf_to_meta(tmp_path: Path) -> None:
    path = in_gguf("mixtral", tmp_path)
    with pytest.raises(errors.Refused, match="no table has names of 'meta'"):
        ckptfix.convert(path, tmp_path / "out.pth", names="mixtral/gguf:meta")
    arrays = {key: value for key, value in weights("llama").items() if "bias" not in key}
    save_file(arrays, tmp_path / "hf.safetensors")
    for names in ("hf:gguf", "hf:meta"):
        out = tmp_path / f"{names[3:]}.safetensors"
        ckptfix.rename(tmp_path / "hf.safetensors", out, names=f"llama/{names}", heads=HEADS, kv_heads=KV)
    numbers = {"llama.attention.head_count": HEADS, "llama.attention.head_count_kv": KV}
    gguf(load_file(tmp_path / "gguf.safetensors"), tmp_path / "l.gguf", numbers=numbers)
    ckptfix.convert(tmp_path / "l.gguf", tmp_path / "out.safetensors", names="meta")
    made, wanted = load_file(tmp_path / "out.safetensors"), load_file(tmp_path / "meta.safetensors")
    assert made.keys() == wanted.keys() and all(np.array_equal(made[key], wanted[key]) for key in made)


def test_an_architecture_without_a_table_is_named(tmp_path: Path) -> None:
    save_file(weights("qwen2"), tmp_path / "hf.safetensors")
    ckptfix.rename(tmp_path / "hf.safetensors", tmp_path / "g.safetensors", names="qwen2/hf:gguf")
    gguf(load_file(tmp_path / "g.safetensors"), tmp_path / "m.gguf", architecture="other")
    with pytest.raises(errors.Refused, match="the file says architecture 'other'"):
        ckptfix.convert(tmp_path / "m.gguf", tmp_path / "out.safetensors", names="hf")


def test_heads_that_no_file_states_are_asked_for(tmp_path: Path) -> None:
    save_file(weights("llama"), tmp_path / "hf.safetensors")
    names = "llama/hf:gguf"
    ckptfix.rename(tmp_path / "hf.safetensors", tmp_path / "g.safetensors", names=names, heads=HEADS, kv_heads=KV)
    gguf(load_file(tmp_path / "g.safetensors"), tmp_path / "m.gguf")
    with pytest.raises(errors.CkptfixError, match="@heads is not known"):
        ckptfix.convert(tmp_path / "m.gguf", tmp_path / "out.safetensors", names="hf")
    ckptfix.convert(tmp_path / "m.gguf", tmp_path / "out.safetensors", names="hf", heads=HEADS, kv_heads=KV)
    made, wanted = load_file(tmp_path / "out.safetensors"), weights("llama")
    assert made.keys() == wanted.keys() and all(np.array_equal(made[key], wanted[key]) for key in made)
