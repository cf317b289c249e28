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
import torch
from array_files import WRITERS, gguf
from safetensors.numpy import load_file, save_file

import ckptfix
from ckptfix import errors
from ckptfix.names import tables

MODELS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "gguf_names.json").read_text("utf-8"))
HEADS, KV = 4, 2

Array = np.ndarray[Any, np.dtype[np.float32]]
Shapes = dict[str, tuple[int, ...]]


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


def numbered(shapes: Shapes) -> dict[str, Array]:
    """Arrays of these shapes; no two elements are the same."""
    made, start = {}, 0
    for key, shape in shapes.items():
        count = int(np.prod(shape))
        made[key] = np.arange(start, start + count, dtype="f4").reshape(shape)
        start += count
    return made


def as_torch(writer: str, shapes: Shapes, folder: Path) -> tuple[dict[str, Array], dict[str, Array]]:
    """The arrays of a file of another framework, and its tensors after the table."""
    if writer in ("hdf5", "keras"):
        pytest.importorskip("h5py")
    arrays, path = numbered(shapes), folder / f"in{WRITERS[writer].suffix}"
    WRITERS[writer].save(arrays, path)
    assert ckptfix.convert(path, folder / "out.safetensors", names="torch").exit_code == 0
    return arrays, load_file(folder / "out.safetensors")


def equal(made: dict[str, Array], wanted: dict[str, Array]) -> bool:
    return made.keys() == wanted.keys() and all(np.array_equal(made[key], value) for key, value in wanted.items())


def test_layers_of_flax(tmp_path: Path) -> None:
    arrays, made = as_torch("flax", {
        "params.conv.kernel": (3, 5, 2, 4), "params.conv.bias": (4,), "params.fc.kernel": (4, 6),
        "params.bn.scale": (4,),
        "params.bn.bias": (4,), "params.emb.embedding": (7, 4), "params.attn.query.kernel": (4, 4),
        **{f"params.cell.{gate}.kernel": (6, 3) for gate in ("ii", "if", "ig", "io")},
        **{f"params.cell.{gate}.kernel": (3, 3) for gate in ("hi", "hf", "hg", "ho")},
        **{f"params.cell.{gate}.bias": (3,) for gate in ("hi", "hf", "hg", "ho")},
        "batch_stats.bn.mean": (4,), "batch_stats.bn.var": (4,),
    }, tmp_path)  # fmt: skip
    gates = {side: [arrays[f"params.cell.{side}{gate}.kernel"].T for gate in "ifgo"] for side in "ih"}
    assert equal(made, {
        "conv.weight": arrays["params.conv.kernel"].transpose(3, 2, 0, 1), "conv.bias": arrays["params.conv.bias"],
        "fc.weight": arrays["params.fc.kernel"].T, "bn.weight": arrays["params.bn.scale"],
        "bn.bias": arrays["params.bn.bias"], "emb.weight": arrays["params.emb.embedding"],
        "attn.query.weight": arrays["params.attn.query.kernel"].T,
        "cell.weight_ih": np.concatenate(gates["i"]), "cell.weight_hh": np.concatenate(gates["h"]),
        "cell.bias_hh": np.concatenate([arrays[f"params.cell.h{gate}.bias"] for gate in "ifgo"]),
        "bn.running_mean": arrays["batch_stats.bn.mean"], "bn.running_var": arrays["batch_stats.bn.var"],
    })  # fmt: skip


@pytest.mark.parametrize("end", ["", ":0"])
def test_layers_of_keras_by_their_names(end: str, tmp_path: Path) -> None:
    arrays, made = as_torch("hdf5", {
        f"c.kernel{end}": (3, 5, 2, 4), f"c.bias{end}": (4,), f"d.kernel{end}": (4, 6), f"n.gamma{end}": (4,),
        f"n.beta{end}": (4,), f"n.moving_mean{end}": (4,), f"n.moving_variance{end}": (4,),
        f"e.embeddings{end}": (7, 4), f"l.lstm_cell.bias{end}": (12,),
        f"w.depthwise_kernel{end}": (3, 5, 4, 1), f"x.depthwise_conv2d_1.kernel{end}": (3, 5, 4, 1),
        f"l.lstm_cell.kernel{end}": (5, 12), f"l.lstm_cell.recurrent_kernel{end}": (3, 12),
    }, tmp_path)  # fmt: skip
    plain = {key.removesuffix(end): value for key, value in arrays.items()}
    assert equal(made, {
        "c.weight": plain["c.kernel"].transpose(3, 2, 0, 1), "c.bias": plain["c.bias"], "d.weight": plain["d.kernel"].T,
        "n.weight": plain["n.gamma"], "n.bias": plain["n.beta"], "n.running_mean": plain["n.moving_mean"],
        "n.running_var": plain["n.moving_variance"], "e.weight": plain["e.embeddings"],
        "w.weight": plain["w.depthwise_kernel"].transpose(2, 3, 0, 1),
        "x.depthwise_conv2d_1.weight": plain["x.depthwise_conv2d_1.kernel"].transpose(2, 3, 0, 1),
        "l.weight_ih_l0": plain["l.lstm_cell.kernel"].T, "l.weight_hh_l0": plain["l.lstm_cell.recurrent_kernel"].T,
        "l.bias_ih_l0": plain["l.lstm_cell.bias"],
    })  # fmt: skip


def test_layers_of_keras_by_their_classes(tmp_path: Path) -> None:
    arrays, made = as_torch("keras", {
        "layers.conv2d.vars.0": (3, 5, 2, 4), "layers.dense_1.vars.0": (4, 6), "layers.dense_1.vars.1": (6,),
        **{f"layers.batch_normalization.vars.{part}": (4,) for part in range(4)},
        "layers.depthwise_conv2d.vars.0": (3, 5, 4, 1), "layers.embedding.vars.0": (7, 4),
        **{f"layers.lstm.cell.vars.{part}": shape for part, shape in enumerate(((5, 12), (3, 12), (12,)))},
    }, tmp_path)  # fmt: skip
    norm = ("weight", "bias", "running_mean", "running_var")
    assert equal(made, {
        "layers.conv2d.weight": arrays["layers.conv2d.vars.0"].transpose(3, 2, 0, 1),
        "layers.dense_1.weight": arrays["layers.dense_1.vars.0"].T,
        "layers.dense_1.bias": arrays["layers.dense_1.vars.1"],
        **{f"layers.batch_normalization.{name}": arrays[f"layers.batch_normalization.vars.{part}"]
           for part, name in enumerate(norm)},
        "layers.depthwise_conv2d.weight": arrays["layers.depthwise_conv2d.vars.0"].transpose(2, 3, 0, 1),
        "layers.embedding.weight": arrays["layers.embedding.vars.0"],
        "layers.lstm.weight_ih_l0": arrays["layers.lstm.cell.vars.0"].T,
        "layers.lstm.weight_hh_l0": arrays["layers.lstm.cell.vars.1"].T,
        "layers.lstm.bias_ih_l0": arrays["layers.lstm.cell.vars.2"],
    })  # fmt: skip


@pytest.mark.parametrize("end", ["", "/.ATTRIBUTES/VARIABLE_VALUE"])
def test_layers_of_tensorflow(end: str, tmp_path: Path) -> None:
    shapes = {"net/c/kernel": (3, 5, 2, 4), "net/d/_kernel": (4, 6), "net/n/gamma": (4,), "net/n/moving_mean": (4,)}
    arrays, made = as_torch("tensorflow", {f"{key}{end}": shape for key, shape in shapes.items()}, tmp_path)
    assert equal(made, {
        "net/c/weight": arrays[f"net/c/kernel{end}"].transpose(3, 2, 0, 1),
        "net/d/weight": arrays[f"net/d/_kernel{end}"].T,
        "net/n/weight": arrays[f"net/n/gamma{end}"], "net/n/running_mean": arrays[f"net/n/moving_mean{end}"],
    })  # fmt: skip


def test_layers_of_mxnet(tmp_path: Path) -> None:
    shapes = {"arg:c_weight": (4, 2, 3, 3), "arg:n_gamma": (4,), "aux:n_moving_var": (4,)}
    arrays, made = as_torch("npz", shapes, tmp_path)
    names = {"arg:c_weight": "c.weight", "arg:n_gamma": "n.weight", "aux:n_moving_var": "n.running_var"}
    assert equal(made, {names[key]: value for key, value in arrays.items()})


def test_attention_of_three_dimensions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.msgpack"
    WRITERS["flax"].save({"params.a.query.kernel": np.ones((4, 2, 2), "f4")}, path)
    with pytest.raises(errors.Refused, match="3 dimensions"):
        ckptfix.convert(path, tmp_path / "out.safetensors", names="torch")


def test_layers_are_not_turned_back(tmp_path: Path) -> None:
    save_file({"a.weight": np.ones((2, 3), "f4")}, tmp_path / "in.safetensors")
    with pytest.raises(errors.Refused, match="no table leads from torch to flax"):
        ckptfix.rename(tmp_path / "in.safetensors", tmp_path / "out.safetensors", names="torch:flax")


@pytest.mark.parametrize("writer", ["flax", "keras", "tensorflow"])
def test_match_turns_kernels(writer: str, tmp_path: Path) -> None:
    """Square kernels too, which shapes cannot show; the modules have other names in torch."""
    if writer == "keras":
        pytest.importorskip("h5py")
    layers = {
        "flax": ["params.Conv_0.kernel", "params.Conv_0.bias", "params.Dense_0.kernel", "params.Dense_1.kernel"],
        "keras": ["layers.conv2d.vars.0", "layers.conv2d.vars.1", "layers.dense.vars.0", "layers.dense_1.vars.0"],
        "tensorflow": ["m/conv2d/kernel", "m/conv2d/bias", "m/dense/kernel", "m/dense_1/kernel"],
    }[writer]
    arrays = numbered(dict(zip(layers, ((3, 3, 2, 5), (5,), (5, 5), (5, 4)), strict=True)))
    path, like = tmp_path / f"in{WRITERS[writer].suffix}", tmp_path / "like.pth"
    WRITERS[writer].save(arrays, path)
    first, second = (torch.nn.Linear(5, size, bias=False) for size in (5, 4))
    model = torch.nn.ModuleDict({"stem": torch.nn.Conv2d(2, 5, 3), "a": first, "b": second})
    torch.save(model.state_dict(), like)
    result = ckptfix.match(path, tmp_path / "out.pth", like=like)
    made = {key: value.numpy() for key, value in torch.load(tmp_path / "out.pth").items()}
    turned = [arrays[layers[0]].transpose(3, 2, 0, 1), arrays[layers[1]], arrays[layers[2]].T, arrays[layers[3]].T]
    assert equal(made, dict(zip(("stem.weight", "stem.bias", "a.weight", "b.weight"), turned, strict=True)))
    assert any("table" in note for note in result.notes)
