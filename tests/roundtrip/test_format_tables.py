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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


SEPARABLE: dict[str, tuple[str, str, str, str, str]] = {
    "hdf5": ("m.s.", ".", "depthwise_kernel", "pointwise_kernel", "bias"),
    "keras": ("layers.separable_conv2d_1.", ".", "vars.0", "vars.1", "vars.2"),
    "tensorflow": ("m/s/", "/", "depthwise_weights", "pointwise_weights", "biases"),
}
"""Format -> the name of a layer, the dot, and the ends of its variables."""


@pytest.mark.slow
@pytest.mark.parametrize("writer", SEPARABLE)
def test_separable_convolutions(writer: str, tmp_path: Path) -> None:
    front, dot, deep, point, bias = SEPARABLE[writer]
    arrays, made = as_torch(writer, {
        front + deep: (3, 5, 4, 1), front + point: (1, 1, 4, 6), front + bias: (6,)
    }, tmp_path)  # fmt: skip
    assert equal(made, {
        f"{front}weight": arrays[front + deep].transpose(2, 3, 0, 1),
        f"{front}pointwise{dot}weight": arrays[front + point].transpose(3, 2, 0, 1),
        f"{front}bias": arrays[front + bias],
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


def heads_last(value: Array) -> Array:
    """The weight of torch for a kernel (inputs, heads, size of a head)."""
    return value.reshape(value.shape[0], -1).T


def heads_first(value: Array) -> Array:
    """The weight of torch for a kernel (heads, size of a head, outputs)."""
    return value.reshape(-1, value.shape[-1]).T


ATTENTION: dict[str, tuple[str, str, str, str]] = {
    "flax": ("params.MultiHeadDotProductAttention_0.", "", ".kernel", "out"),
    "hdf5": ("m.attention.", "", ".kernel", "attention_output"),
    "keras": ("layers.multi_head_attention.", "_dense", ".vars.0", "output_dense"),
    "tensorflow": ("m/attention/", "", "/kernel", "attention_output"),
}
"""Format -> how its files call the kernels: before and after `query`, the end, and the one after the values."""


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("writer", ATTENTION)
def test_attention_with_a_dimension_for_the_heads(writer: str, tmp_path: Path) -> None:
    front, after, end, out = ATTENTION[writer]
    ends = (end, end.replace("kernel", "bias").replace(".0", ".1"))
    names = [f"{front}{name}{after}" for name in ("query", "key", "value")]
    arrays, made = as_torch(writer, {
        **{f"{name}{ends[0]}": (6, 2, 4) for name in names}, **{f"{name}{ends[1]}": (2, 4) for name in names},
        f"{front}{out}{ends[0]}": (2, 4, 6), f"{front}{out}{ends[1]}": (6,),
    }, tmp_path)  # fmt: skip
    dot, front = ("/" if writer == "tensorflow" else "."), front.removeprefix("params.")
    wanted = {
        **{f"{name}{ends[0]}": heads_last(arrays[f"{name}{ends[0]}"]) for name in names},
        **{f"{name}{ends[1]}": arrays[f"{name}{ends[1]}"].reshape(-1) for name in names},
    }
    plain = {
        key.removeprefix("params.").replace(ends[0], f"{dot}weight").replace(ends[1], f"{dot}bias"): value
        for key, value in wanted.items()
    }
    last = ATTENTION[writer][0] + out
    plain[f"{front}{out}{dot}weight"] = heads_first(arrays[f"{last}{ends[0]}"])
    plain[f"{front}{out}{dot}bias"] = arrays[f"{last}{ends[1]}"]
    assert equal(made, plain)


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["hdf5", "keras", "tensorflow"])
def test_gates_of_a_gru(writer: str, tmp_path: Path) -> None:
    keys = {
        "hdf5": [f"m.gru_cell.{name}" for name in ("kernel", "recurrent_kernel", "bias")],
        "keras": [f"layers.gru.cell.vars.{part}" for part in range(3)],
        "tensorflow": [f"m/gru_cell/{name}" for name in ("kernel", "recurrent_kernel", "bias")],
    }[writer]
    arrays, made = as_torch(writer, dict(zip(keys, ((5, 12), (4, 12), (2, 12)), strict=True)), tmp_path)
    order = [*range(4, 8), *range(4), *range(8, 12)]
    kernel, recurrent, bias = (arrays[key][..., order] for key in keys)
    front = {"hdf5": "m.", "keras": "layers.gru.", "tensorflow": "m/"}[writer]
    wanted = {"weight_ih_l0": kernel.T, "weight_hh_l0": recurrent.T, "bias_ih_l0": bias[0], "bias_hh_l0": bias[1]}
    assert equal(made, {front + name: value for name, value in wanted.items()})


DEPTHWISE = "does not say whether it is a depthwise"
MISREAD: dict[str, tuple[str, Shapes, str]] = {
    "attention under another name": ("flax", {"params.a.query.kernel": (4, 2, 2), "params.a.out.kernel": (2, 2, 4)},
                                     "dimension for the heads"),
    "its bias": ("hdf5", {"a.dense.kernel": (4, 2, 2), "a.dense.bias": (2, 2)}, "dimension for the heads"),
    "ConvTranspose": ("flax", {"params.ConvTranspose_0.kernel": (3, 3, 2, 4)}, "mirrored"),
    "GRU of Flax": ("flax", {"params.cell.hz.kernel": (4, 4)}, "GRU"),
    "GRU before reset_after": ("hdf5", {"m.gru_cell.bias": (12,), "m.gru_cell.kernel": (5, 12)}, "reset_after=False"),
    "depthwise": ("hdf5", {"a.own.kernel": (3, 3, 4, 1), "a.own.bias": (4,)}, DEPTHWISE),
    "depthwise, multiplied": ("hdf5", {"a.own.kernel": (3, 3, 4, 2), "a.own.bias": (8,)}, DEPTHWISE),
    "depthwise without a bias": ("tensorflow", {"a/own/_kernel": (3, 3, 4, 1)}, DEPTHWISE),
    **{
        f"{layer} with {have} variables": (
            "keras", {f"layers.{layer}.vars.{part}": (4,) for part in range(have)}, f"has {have} of"
        )
        for layer, have in (("batch_normalization", 3), ("batch_normalization_1", 2), ("layer_normalization", 1),
                            ("group_normalization", 1))
    },
    "heads before the inputs": (
        "keras", {"layers.a.query_dense.vars.0": (2, 6, 4), "layers.a.output_dense.vars.0": (2, 4, 6)}, "not .inputs"
    ),
    "a bias of other heads": ("hdf5", {"a.key.kernel": (2, 6, 4), "a.key.bias": (2, 4)}, "not .inputs"),
}  # fmt: skip
"""What a line of the table would take for another layer: format, arrays, a word of the message."""


@pytest.mark.slow
@pytest.mark.sampled(8, test_all=10_000)
@pytest.mark.parametrize("what", MISREAD)
@pytest.mark.parametrize("verb", ["convert", "match"])
def test_what_the_table_would_misread_is_refused(what: str, verb: str, tmp_path: Path) -> None:
    writer, shapes, word = MISREAD[what]
    if writer == "hdf5":
        pytest.importorskip("h5py")
    path = tmp_path / f"in{WRITERS[writer].suffix}"
    WRITERS[writer].save(numbered(shapes), path)
    save_file({"fc.weight": np.ones((4, 4), "f4")}, tmp_path / "like.safetensors")
    with pytest.raises(errors.Refused, match=word) as caught:
        if verb == "convert":
            ckptfix.convert(path, tmp_path / "out.safetensors", names="torch")
        else:
            ckptfix.match(path, tmp_path / "out.safetensors", like=tmp_path / "like.safetensors")
    assert caught.value.where in shapes and not (tmp_path / "out.safetensors").exists()


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize(
    ("writer", "keys"),
    [("keras", ("layers.dense.vars.0", "layers.dense.vars.1")), ("hdf5", ("d.kernel", "d.bias")),
     ("flax", ("params.d.kernel", "params.d.bias")), ("tensorflow", ("n/d/kernel", "n/d/bias"))],
)  # fmt: skip
def test_codes_of_a_quantized_layer_are_refused(writer: str, keys: tuple[str, str], tmp_path: Path) -> None:
    """Keras numbers the scale of codes like a bias."""
    if writer in ("hdf5", "keras"):
        pytest.importorskip("h5py")
    path = tmp_path / f"in{WRITERS[writer].suffix}"
    WRITERS[writer].save({keys[0]: np.ones((3, 4), "i1"), keys[1]: np.ones(4, "f4")}, path)
    with pytest.raises(errors.Refused, match="int8") as caught:
        ckptfix.convert(path, tmp_path / "out.safetensors", names="torch")
    assert caught.value.where == keys[0]


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "bias"), [((3, 3, 4, 1), (1,)), ((3, 3, 1, 1), None), ((3, 3, 4, 2), (4,)),
                                              ((3, 3, 4, 2), None)])  # fmt: skip
def test_plain_and_transposed_convolutions_are_not_refused(
    kernel: tuple[int, ...], bias: tuple[int, ...] | None, tmp_path: Path
) -> None:
    shapes = {"a.own.kernel": kernel} | ({} if bias is None else {"a.own.bias": bias})
    arrays, made = as_torch("hdf5", shapes, tmp_path)
    assert np.array_equal(made["a.own.weight"], arrays["a.own.kernel"].transpose(3, 2, 0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("multiplier", [1, 2])
def test_a_depthwise_kernel_has_the_shape_of_torch(multiplier: int, tmp_path: Path) -> None:
    arrays, made = as_torch("hdf5", {"w.depthwise_kernel": (3, 5, 4, multiplier)}, tmp_path)
    kernel = arrays["w.depthwise_kernel"]
    wanted = [kernel[:, :, channel, part] for channel in range(4) for part in range(multiplier)]
    assert np.array_equal(made["w.weight"], np.stack(wanted)[:, None])


def test_layers_are_not_turned_back(tmp_path: Path) -> None:
    save_file({"a.weight": np.ones((2, 3), "f4")}, tmp_path / "in.safetensors")
    with pytest.raises(errors.Refused, match="no table leads from torch to flax"):
        ckptfix.rename(tmp_path / "in.safetensors", tmp_path / "out.safetensors", names="torch:flax")


@pytest.mark.sampled(quick=1)
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


@pytest.mark.slow
def test_match_turns_a_gru(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    keys = ("a.gru_cell.kernel", "a.gru_cell.recurrent_kernel", "a.gru_cell.bias", "b.fc.kernel")
    arrays = numbered(dict(zip(keys, ((4, 12), (4, 12), (2, 12), (4, 4)), strict=True)))
    WRITERS["hdf5"].save(arrays, tmp_path / "in.h5")
    fc = torch.nn.Linear(4, 4, bias=False)
    model = torch.nn.ModuleDict({"rnn": torch.nn.GRU(4, 4), "head": fc})
    torch.save(model.state_dict(), tmp_path / "like.pth")
    ckptfix.match(tmp_path / "in.h5", tmp_path / "out.pth", like=tmp_path / "like.pth")
    made = {key: value.numpy() for key, value in torch.load(tmp_path / "out.pth").items()}
    order = [*range(4, 8), *range(4), *range(8, 12)]
    kernel, recurrent, bias = (arrays[key][..., order] for key in keys[:3])
    assert equal(made, {
        "rnn.weight_ih_l0": kernel.T, "rnn.weight_hh_l0": recurrent.T, "rnn.bias_ih_l0": bias[0],
        "rnn.bias_hh_l0": bias[1], "head.weight": arrays[keys[3]].T,
    })  # fmt: skip


def test_match_turns_what_has_a_line_and_names_what_has_none(tmp_path: Path) -> None:
    """A layer that the table does not know must not leave the square kernels of the others unturned."""
    arrays = numbered({"params.fc.kernel": (4, 4), "params.fc.bias": (4,), "params.own.table": (7, 3)})
    WRITERS["flax"].save(arrays, tmp_path / "in.msgpack")
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(4, 4), "own": torch.nn.Embedding(7, 3)})
    torch.save(model.state_dict(), tmp_path / "like.pth")
    result = ckptfix.match(tmp_path / "in.msgpack", tmp_path / "out.pth", like=tmp_path / "like.pth")
    made = {key: value.numpy() for key, value in torch.load(tmp_path / "out.pth").items()}
    assert np.array_equal(made["head.weight"], arrays["params.fc.kernel"].T)
    assert np.array_equal(made["own.weight"], arrays["params.own.table"])
    assert any("no line for params.own.table" in note for note in result.notes)


@pytest.mark.slow
def test_match_of_an_lstm_without_its_second_bias_names_it(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    shapes = {"a.lstm_cell.kernel": (5, 12), "a.lstm_cell.recurrent_kernel": (3, 12), "a.lstm_cell.bias": (12,)}
    WRITERS["hdf5"].save(numbered(shapes), tmp_path / "in.h5")
    torch.save(torch.nn.ModuleDict({"rnn": torch.nn.LSTM(5, 3)}).state_dict(), tmp_path / "like.pth")
    with pytest.raises(errors.NoMatch) as caught:
        ckptfix.match(tmp_path / "in.h5", tmp_path / "out.pth", like=tmp_path / "like.pth")
    assert any("no rnn.bias_hh_l0" in line and "two" in line for line in caught.value.lines)
    assert caught.value.path == str(tmp_path / "in.h5")
