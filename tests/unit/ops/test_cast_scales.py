"""cast --scale: fp8 codes and scales, with the numbers, names and settings of transformers and compressed-tensors."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any, Literal

import pytest
import safetensors.torch
import torch
from quantized_files import FP8

import ckptfix
from ckptfix.errors import CkptfixError, KeyConflict, Refused, WouldLoseData
from ckptfix.ops.cast.scales import why_not_linear

State = dict[str, torch.Tensor]
How = Literal["block", "row", "tensor"]
HOWS: tuple[How, ...] = ("block", "row", "tensor")


def expected(weight: torch.Tensor, how: How) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale as transformers' Fp8Quantize, and compressed-tensors' calculate_qparams and quantize."""
    if how == "block":
        rows, columns = weight.shape
        padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
        padded[:rows, :columns] = weight.float()
        tiles = padded.reshape(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
        most = tiles.abs().amax(dim=(1, 3))
        factor = torch.where(most > 0, 448.0 / torch.where(most > 0, most, torch.ones_like(most)), 1.0)
        codes = (tiles * factor[:, None, :, None]).clamp(-448, 448).to(FP8).reshape(padded.shape)
        return codes[:rows, :columns].contiguous(), 1.0 / factor
    most = weight.abs().amax(1, keepdim=True) if how == "row" else weight.abs().amax().reshape(1)
    scale = most / (torch.tensor(896.0).to(weight.dtype) / 2)
    scale = torch.where(scale == 0, torch.tensor(torch.finfo(weight.dtype).eps, dtype=weight.dtype), scale)
    return (weight / scale).clamp(-448, 448).to(FP8), scale


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert torch.equal(found.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))


def model(kind: torch.dtype = torch.bfloat16) -> State:
    torch.manual_seed(0)
    state = {
        "model.embed_tokens.weight": torch.randn(16, 200),
        "model.layers.0.self_attn.q_proj.weight": torch.randn(300, 200),
        "model.layers.0.self_attn.q_proj.bias": torch.randn(300),
        "model.layers.0.mlp.gate.weight": torch.randn(4, 200),
        "model.layers.0.mlp.gate_proj.weight": torch.randn(128, 256) * 1e-3,
        "model.norm.weight": torch.ones(200),
        "lm_head.weight": torch.randn(16, 200),
    }
    state["model.layers.0.mlp.gate_proj.weight"][:128, 128:] = 0
    state["model.layers.0.self_attn.q_proj.weight"][7] = 0
    return {name: tensor.to(kind) for name, tensor in state.items()}


LINEAR = ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.self_attn.q_proj.weight"]


def saved(state: State, path: Path) -> Path:
    safetensors.torch.save_file(state, path, {"format": "pt"})
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of shards with a config.json."""
    whole = saved(model(), tmp_path / "whole.safetensors")
    ckptfix.convert(whole, tmp_path / "in", to="hf", shard_size=100_000)
    (tmp_path / "in" / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "bfloat16"}))
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    return tmp_path / "in"


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("how", HOWS)
def test_numbers_and_names(tmp_path: Path, how: How, kind: torch.dtype) -> None:
    state = model(kind)
    source, dest = saved(state, tmp_path / "in.safetensors"), tmp_path / "out.safetensors"
    done = ckptfix.cast(source, dest, "fp8", scale=how)
    suffix = "_scale_inv" if how == "block" else "_scale"
    assert sorted(done.cast) == LINEAR and done.scales == {name: name + suffix for name in done.cast}
    assert all("reader" in why or "only" in why for why in done.kept.values())
    found = safetensors.torch.load_file(dest)
    assert set(found) == {*state, *done.scales.values()}
    for name, tensor in state.items():
        if name not in LINEAR:
            same(found[name], tensor)
            continue
        codes, scale = expected(tensor, how)
        same(found[name + suffix], scale)
        same(found[name], codes)
    plain = tmp_path / "plain.safetensors"
    ckptfix.convert(dest, plain, dequantize=True)
    for row in ckptfix.diff(source, plain).changed:
        assert row.name_a in LINEAR and row.values is not None
        assert row.values.rel_l2 is not None and row.values.rel_l2 < 0.04
    assert set(safetensors.torch.load_file(plain)) == set(state)


@pytest.mark.parametrize("how", HOWS)
def test_a_folder_gets_the_settings(tmp_path: Path, folder: Path, how: How) -> None:
    done = ckptfix.cast(folder, tmp_path / "out", "float8_e4m3fn", scale=how)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    made = config.pop("quantization_config")
    assert config == {"model_type": "llama", "torch_dtype": "bfloat16"} and made == done.quantization_config
    assert (tmp_path / "out" / "tokenizer.json").exists() and not any("config.json" in line for line in done.lines)
    skipped = {"lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"}
    if how == "block":
        assert (made["quant_method"], made["weight_block_size"]) == ("fp8", [128, 128])
        assert set(made["modules_to_not_convert"]) == set(made["ignored_layers"]) == skipped
    else:
        assert (made["quant_method"], made["format"]) == ("compressed-tensors", "float-quantized")
        strategy = made["config_groups"]["group_0"]["weights"]["strategy"]
        assert strategy == {"row": "channel", "tensor": "tensor"}[how] and set(made["ignore"]) == skipped
    assert ckptfix.inspect(tmp_path / "out").plain_parameters == sum(tensor.numel() for tensor in model().values())
    weights = ckptfix.load_state_dict(tmp_path / "out")
    ckptfix.convert(tmp_path / "out", tmp_path / "plain.safetensors", dequantize=True)
    found = safetensors.torch.load_file(tmp_path / "plain.safetensors")
    assert {name: tensor.dtype for name, tensor in found.items()} == dict.fromkeys(model(), torch.bfloat16)
    name = LINEAR[0]
    if how != "block":
        same(found[name], weights[name].bfloat16() * weights[f"{name}_scale"])


def test_a_folder_of_one_file_becomes_a_folder(tmp_path: Path) -> None:
    """As transformers writes small models: model.safetensors and config.json."""
    source, dest = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    saved(model(), source / "model.safetensors")
    for name, text in (("config.json", '{"model_type": "llama"}'), ("tokenizer.json", "{}"), ("optimizer.pt", "")):
        (source / name).write_text(text)
    done = ckptfix.cast(source, dest, "fp8", scale="block")
    assert sorted(path.name for path in dest.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    config = json.loads((dest / "config.json").read_text())
    assert config == {"model_type": "llama", "quantization_config": done.quantization_config}
    ckptfix.convert(dest, tmp_path / "plain", to="hf", dequantize=True)
    assert json.loads((tmp_path / "plain" / "config.json").read_text()) == {"model_type": "llama"}
    assert (tmp_path / "plain" / "tokenizer.json").exists()
    ckptfix.cast(source, tmp_path / "one.safetensors", "fp8", scale="block")
    ckptfix.cast(source, tmp_path / "plain-cast", "fp16")
    assert (tmp_path / "one.safetensors").is_file() and (tmp_path / "plain-cast" / "model.safetensors").is_file()


def test_a_file_is_told_the_settings(tmp_path: Path) -> None:
    source = saved(model(), tmp_path / "in.safetensors")
    done = ckptfix.cast(source, tmp_path / "out.safetensors", "e4m3", scale="block")
    (line,) = (line for line in done.lines if "config.json" in line)
    assert json.loads("{" + line.partition(" needs ")[2] + "}") == {"quantization_config": done.quantization_config}


def test_only_and_keep(tmp_path: Path) -> None:
    source, dest = saved(model(), tmp_path / "in.safetensors"), tmp_path / "out.safetensors"
    done = ckptfix.cast(source, dest, "e4m3", scale="row", only=["lm_head.weight"], force=True)
    assert list(done.cast) == ["lm_head.weight"]
    done = ckptfix.cast(source, dest, "e4m3", scale="row", keep=["*.q_proj.*"], force=True)
    assert list(done.cast) == LINEAR[:1]
    dry = ckptfix.cast(source, tmp_path / "none.safetensors", "e4m3", scale="row", dry_run=True)
    assert sorted(dry.cast) == LINEAR and not (tmp_path / "none.safetensors").exists()


def test_tied_matrices_stay_tied_or_stay_as_they_are(tmp_path: Path) -> None:
    weight = torch.randn(8, 8)
    torch.save({"a.weight": weight, "b.weight": weight, "wte.weight": (kept := torch.randn(8, 8)), "c.weight": kept},
               tmp_path / "in.pth")  # fmt: skip
    ckptfix.convert(tmp_path / "in.pth", tmp_path / "in.safetensors")
    done = ckptfix.cast(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "e4m3", scale="row")
    assert set(done.cast) == {"a.weight", "b.weight"} and "wte.weight" in done.kept["c.weight"]
    found = ckptfix.load_state_dict(tmp_path / "out.safetensors")
    assert found["a.weight"].data_ptr() == found["b.weight"].data_ptr()
    assert found["a.weight_scale"].data_ptr() == found["b.weight_scale"].data_ptr()
    same(found["c.weight"], kept)


def bad(name: str, tensor: torch.Tensor) -> State:
    return {**model(), name: tensor}


NAN, INF = torch.full((8, 8), torch.nan), torch.full((8, 8), torch.inf, dtype=torch.float16)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("state", "options", "kind", "where"), [
    (bad("x.weight", NAN), {}, WouldLoseData, "x.weight"),
    (bad("x.weight", INF), {}, WouldLoseData, "x.weight"),
    (model(), {"to": "bf16"}, Refused, None),
    (model(), {"to": "e5m2"}, Refused, None),
    (model(), {"only": ["model.norm.weight"]}, Refused, "model.norm.weight"),
    (bad("x.weight", torch.ones(2, 2, 2)), {"only": ["x.weight"]}, Refused, "x.weight"),
    (bad("x.weight", torch.ones(2, 2, dtype=torch.float64)), {"only": ["x.weight"]}, Refused, "x.weight"),
    (bad("x.weight", torch.ones(2, 2, dtype=torch.int64)), {"only": ["x.weight"]}, Refused, "x.weight"),
    ({"x.weight": torch.ones(8, 8).to(FP8), "x.weight_scale": torch.ones(8, 1), "x.weight_scale_inv": torch.ones(1)},
     {}, Refused, "x.weight"),
])  # fmt: skip
def test_what_cannot_be_quantized(
    tmp_path: Path, state: State, options: dict[str, Any], kind: type[CkptfixError], where: str | None, how: How
) -> None:
    source, dest = saved(state, tmp_path / "in.safetensors"), tmp_path / "out.safetensors"
    with pytest.raises(kind) as error:
        ckptfix.cast(source, dest, **{"to": "e4m3", "scale": how, **options})
    assert error.value.where == where and not dest.exists()


def test_a_key_that_is_taken(tmp_path: Path) -> None:
    source = saved({"l.weight": torch.ones(4, 4), "l.weight_scale": torch.ones(4, 1)}, tmp_path / "in.safetensors")
    with pytest.raises(KeyConflict):
        ckptfix.cast(source, tmp_path / "out.safetensors", "e4m3", scale="row")


@pytest.mark.parametrize("how", HOWS)
def test_an_object_keeps_all_but_its_weights(tmp_path: Path, how: How) -> None:
    state = model()
    linear = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(linear.parameters())
    linear(torch.ones(4)).sum().backward()
    optimizer.step()
    whole = OrderedDict(state)
    whole._metadata = OrderedDict({"": {"version": 1}, "model.norm": {"version": 2}})  # type: ignore[attr-defined]
    ema = {name: tensor * 0.5 for name, tensor in state.items()}
    torch.save({"model": whole, "ema": ema, "optimizer": optimizer.state_dict(), "epoch": 3}, tmp_path / "in.pth")
    done = ckptfix.cast(tmp_path / "in.pth", tmp_path / "out.pth", "e4m3", scale=how)
    suffix = "_scale_inv" if how == "block" else "_scale"
    assert done.scales == {f"{at}/{name}": name + suffix for at in ("model", "ema") for name in LINEAR}
    assert (done.exit_code, done.account.lost, done.account.left) == (0, (), ())
    found = torch.load(tmp_path / "out.pth")
    assert found["epoch"] == 3 and found["model"]._metadata == whole._metadata  # type: ignore[attr-defined]
    moments = optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(found["optimizer"]["state"][0]["exp_avg"], moments)
    for at, old in (("model", state), ("ema", ema)):
        order = [one for name in old for one in ([name, name + suffix] if name in LINEAR else [name])]
        assert list(found[at]) == order
        for name, tensor in old.items():
            codes, scale = expected(tensor, how) if name in LINEAR else (tensor, None)
            same(found[at][name], codes)
            if scale is not None:
                same(found[at][name + suffix], scale)
    ckptfix.convert(tmp_path / "out.pth", tmp_path / "plain.pth", dequantize=True)
    assert list(torch.load(tmp_path / "plain.pth")["model"]) == list(state)


def test_every_format_gets_the_same_tensors(tmp_path: Path, folder: Path) -> None:
    ckptfix.cast(folder, tmp_path / "out", "e4m3", scale="block")
    wanted = ckptfix.load_state_dict(tmp_path / "out")
    for to in ("zip", "dcp", "safetensors"):
        source, dest = tmp_path / f"in.{to}", tmp_path / f"out.{to}"
        ckptfix.convert(folder, source, to=to)
        done = ckptfix.cast(source, dest, "e4m3", scale="block")
        found = ckptfix.load_state_dict(dest)
        assert set(found) == set(wanted) and done.format == to
        for name, tensor in wanted.items():
            same(found[name], tensor)
        assert any("config.json needs" in line for line in done.lines)


@pytest.mark.parametrize(("to", "kind", "said"), [("legacy", CkptfixError, "legacy"), ("bin", Refused, "new tensors")])
def test_formats_that_cannot_hold_scales(tmp_path: Path, to: str, kind: type[CkptfixError], said: str) -> None:
    source, dest = tmp_path / "in", tmp_path / "out"
    if to == "bin":
        source.mkdir()
        names = {f"{name}.weight": f"pytorch_model-0000{number}-of-00002.bin" for name, number in (("a", 1), ("b", 2))}
        for name, file in names.items():
            torch.save({name: torch.ones(4, 4)}, source / file)
        (source / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    else:
        torch.save({"a.weight": torch.ones(4, 4)}, source, _use_new_zipfile_serialization=False)
    with pytest.raises(kind, match=said) as error:
        ckptfix.cast(source, dest, "e4m3", scale="row")
    assert error.value.hint and not dest.exists()


def test_empty_and_tiny_matrices(tmp_path: Path) -> None:
    state = {"a.weight": torch.zeros(0, 8), "b.weight": torch.zeros(8, 0), "c.weight": torch.full((2, 2), 1e-44),
             "d.weight": torch.zeros(3, 3), "e.weight": torch.full((1, 1), 3e38)}  # fmt: skip
    source = saved(state, tmp_path / "in.safetensors")
    for how in HOWS:
        ckptfix.cast(source, tmp_path / "out.safetensors", "e4m3", scale=how, force=True)
        found = safetensors.torch.load_file(tmp_path / "out.safetensors")
        assert all(found[name].shape == tensor.shape for name, tensor in state.items())
        assert all(tensor.isfinite().all() for name, tensor in found.items() if "scale" in name)
        assert not found["d.weight"].float().any() and found["e.weight"].float().item() == 448


def test_names_of_linear_layers() -> None:
    for key in ("model.layers.0.mlp.gate_proj.weight", "h.0.attn.c_attn.weight", "weight"):
        assert why_not_linear(key) is None
    for key in ("wte.weight", "bert.embeddings.word_embeddings.weight", "lm_head.weight", "mlp.gate.weight", "a.bias"):
        assert why_not_linear(key)
