"""Adapters are recognized by their keys, and merged as float64 says, in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import adapters
import pytest
import torch
from adapters import ALPHA, LAYOUTS, PATHS, PEFT, RANK, Made, Tensors, base, factors, merged, peft, write
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckptfix
from ckptfix.errors import NoSuchTensor, Refused, WouldOverwrite


def same(one: Tensors, two: Tensors) -> None:
    assert one.keys() == two.keys()
    for name in two:
        assert torch.equal(one[name], two[name]), name


@pytest.fixture
def small(tmp_path: Path) -> Path:
    save_file(base(), tmp_path / "base.safetensors", {"format": "pt", "room": "b"})
    return tmp_path / "base.safetensors"


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_recognized_and_merged(small: Path, tmp_path: Path, name: str) -> None:
    made = LAYOUTS[name](base())
    path = write(made, tmp_path / "adapter")
    given: dict[str, Any] = {"alpha": ALPHA} if made.alpha else {}
    found = ckptfix.lora_info(path, **given).as_dict()
    assert found["layout"] == name.partition(",")[0]
    assert found["ranks"] == [{"rank": RANK, "modules": 3}]
    assert found["layers"] == 2
    assert {row["target"] for row in found["targets"]} >= {"q_proj"} or name == "kohya"
    out = tmp_path / "out.safetensors"
    result = ckptfix.lora_merge(small, [path], out, **given)
    truth = merged(base())
    if name == "diffusers-old":
        found_state = load_file(out)
        assert all(torch.allclose(found_state[key], truth[key], rtol=1e-6, atol=1e-6) for key in truth)
    else:
        same(load_file(out), truth)
    assert len(result.merged) == 3
    with safe_open(out, "pt") as reader:
        assert reader.metadata()["room"] == "b"
        (row,) = json.loads(reader.metadata()["ckptfix.lora"])
    assert row["scale"] == 1.0 and row["adapter"] == result.adapters[0]["digest"]
    with pytest.raises(Refused, match="merged into it already"):
        ckptfix.lora_merge(out, [path], tmp_path / "again.safetensors", **given)
    assert not (tmp_path / "again.safetensors").exists()
    ckptfix.lora_merge(out, [path], tmp_path / "again.safetensors", force=True, **given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_sums_are_rounded_once(tmp_path: Path, dtype: torch.dtype, suffix: str) -> None:
    state = base(dtype)
    source, out = tmp_path / f"base{suffix}", tmp_path / f"out{suffix}"
    truth = merged(state) if dtype != torch.float64 else {
        **state, **{f"{path}.weight": state[f"{path}.weight"] + 2 * (up.double() @ down.double())
                    for path, (down, up) in factors(state).items()}
    }  # fmt: skip
    if suffix == ".pth":
        torch.save(state, source)
    else:
        save_file(state, source)
    done = ckptfix.lora_merge(source, [write(peft(state), tmp_path / "adapter")], out)
    found = torch.load(out) if suffix == ".pth" else load_file(out)
    if dtype == torch.float64:
        assert all(torch.allclose(found[name], truth[name], rtol=0, atol=1e-14) for name in truth)
    else:
        same(found, truth)
    assert done.recorded == (suffix != ".pth")
    assert ("no place for a record" in str(done)) == (suffix == ".pth")


def test_strength_dtype_and_several(small: Path, tmp_path: Path) -> None:
    one = write(peft(base()), tmp_path / "one")
    other = write(LAYOUTS["kohya"](base()), tmp_path / "two")
    out = tmp_path / "out.safetensors"
    ckptfix.lora_merge(small, [one, other], out, scale=[0.25, 0.5], dtype="bf16")
    truth = merged(base(), 0.75 * ALPHA / RANK)
    assert {value.dtype for value in load_file(out).values()} == {torch.bfloat16}
    same(load_file(out), {name: value.bfloat16() for name, value in truth.items()})
    with pytest.raises(Refused, match="3 scales for 1 adapter"):
        ckptfix.lora_merge(small, [one], tmp_path / "x.safetensors", scale=[1.0, 2.0, 3.0])


def test_only_some_modules(small: Path, tmp_path: Path) -> None:
    path = write(peft(base()), tmp_path / "adapter")
    done = ckptfix.lora_merge(small, [path], tmp_path / "out.safetensors", only=["*q_proj"])
    assert sorted(done.merged) == sorted(f"{path}.weight" for path in PATHS[:2])
    assert done.left == (f"base_model.model.{PATHS[2]}",)


def test_a_folder_takes_its_configuration_along(tmp_path: Path) -> None:
    home = tmp_path / "model"
    home.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (home / name).write_text("{}")
    save_file(base(), home / "model.safetensors", {"format": "pt"})
    write(peft(base()), tmp_path / "adapter")
    ckptfix.lora_merge(home, [tmp_path / "adapter"], tmp_path / "out")
    names = {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    same(load_file(tmp_path / "out/model.safetensors"), merged(base()))
    ckptfix.convert(home, tmp_path / "shards", to="hf", shard_size=300)
    ckptfix.lora_merge(tmp_path / "shards", [tmp_path / "adapter"], tmp_path / "merged")
    shards = sorted((tmp_path / "merged").glob("*.safetensors"))
    assert len(shards) > 1 and (tmp_path / "merged/tokenizer.json").exists()
    same({name: value for path in shards for name, value in load_file(path).items()}, merged(base()))


def test_base_and_adapter_in_one_file(tmp_path: Path) -> None:
    state = base()
    whole: Tensors = {}
    for name, value in state.items():
        module = name.removesuffix(".weight")
        inner = f"base_model.model.{module}.base_layer.weight" if module in PATHS else f"base_model.model.{name}"
        whole[inner] = value
    whole |= peft(state, ".default").tensors
    whole["base_model.model.model.norm.modules_to_save.default.weight"] = torch.full((6,), 2.0)
    whole["base_model.model.model.norm.original_module.weight"] = whole.pop("base_model.model.model.norm.weight")
    torch.save(whole, tmp_path / "both.bin")
    with pytest.raises(Refused, match="alpha of 3 modules is unknown"):
        ckptfix.lora_merge(tmp_path / "both.bin", [], tmp_path / "out.bin")
    ckptfix.lora_merge(tmp_path / "both.bin", [], tmp_path / "out.bin", alpha=ALPHA)
    same(torch.load(tmp_path / "out.bin"), {**merged(state), "model.norm.weight": torch.full((6,), 2.0)})


def test_whole_tensors_replace_and_are_added(small: Path, tmp_path: Path) -> None:
    made = peft(base())
    made.tensors["base_model.model.model.norm.weight"] = torch.full((6,), 3.0)
    made.tensors["base_model.model.score.weight"] = torch.ones(2, 6)
    done = ckptfix.lora_merge(small, [write(made, tmp_path / "adapter")], tmp_path / "out.safetensors")
    truth = {**merged(base()), "model.norm.weight": torch.full((6,), 3.0), "score.weight": torch.ones(2, 6)}
    same(load_file(tmp_path / "out.safetensors"), truth)
    assert sorted(done.replaced) == ["model.norm.weight", "score.weight"]
    torch.save(base(), tmp_path / "base.pth")
    ckptfix.lora_merge(tmp_path / "base.pth", [tmp_path / "adapter"], tmp_path / "out.pth")
    same(torch.load(tmp_path / "out.pth"), truth)


def test_a_fused_base(tmp_path: Path) -> None:
    """Queries and values of an adapter in the rows of a fused weight; the rows of the keys stay."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8 + 4 + 4, 6, generator=generator)
    save_file({"layers.0.attn.qkv_proj.weight": weight}, tmp_path / "base.safetensors")
    ups = {"q_proj": torch.randn(8, 2, generator=generator), "v_proj": torch.randn(4, 2, generator=generator)}
    down = torch.randn(2, 6, generator=generator)
    tensors: dict[str, torch.Tensor] = {}
    for name, up in ups.items():
        tensors |= {f"layers.0.attn.{name}.lora_A.weight": down.clone(), f"layers.0.attn.{name}.lora_B.weight": up}
    path = write(Made(tensors, {**PEFT, "r": 2, "lora_alpha": 2}), tmp_path / "adapter")
    ckptfix.lora_merge(tmp_path / "base.safetensors", [path], tmp_path / "out.safetensors")
    whole = weight.double()
    whole[:8] += ups["q_proj"].double() @ down.double()
    whole[12:] += ups["v_proj"].double() @ down.double()
    same(load_file(tmp_path / "out.safetensors"), {"layers.0.attn.qkv_proj.weight": whole.float()})


def test_an_adapter_of_a_fused_module_on_a_base_with_parts(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = {name: torch.randn(rows, 6, generator=generator) for name, rows in (("q", 8), ("k", 4), ("v", 4))}
    save_file({f"a.0.{name}_proj.weight": value for name, value in parts.items()}, tmp_path / "base.safetensors")
    up, down = torch.randn(16, 2, generator=generator), torch.randn(2, 6, generator=generator)
    made = Made({"a.0.qkv_proj.lora_A.weight": down, "a.0.qkv_proj.lora_B.weight": up},
                {**PEFT, "r": 2, "lora_alpha": 2})  # fmt: skip
    ckptfix.lora_merge(tmp_path / "base.safetensors", [write(made, tmp_path / "x")], tmp_path / "out.safetensors")
    delta = torch.split(up.double() @ down.double(), [8, 4, 4])
    truth = {f"a.0.{name}_proj.weight": (value.double() + one).float()
             for (name, value), one in zip(parts.items(), delta, strict=True)}  # fmt: skip
    same(load_file(tmp_path / "out.safetensors"), truth)


def test_stable_diffusion_has_two_sets_of_names(tmp_path: Path) -> None:
    keys = {
        "down_blocks_1_attentions_0_proj_in": "input_blocks.4.1.proj_in",
        "mid_block_resnets_1_conv1": "middle_block.2.in_layers.2",
        "up_blocks_0_upsamplers_0_conv": "output_blocks.2.1.conv",
        "down_blocks_0_downsamplers_0_conv": "input_blocks.3.0.op",
    }
    state = {f"model.diffusion_model.{name}.weight": torch.ones(4, 4, 3, 3) for name in keys.values()}
    save_file(state, tmp_path / "base.safetensors")
    tensors: Tensors = {}
    for number, name in enumerate(keys, 1):
        tensors[f"lora_unet_{name}.lora_down.weight"] = torch.full((1, 4, 3, 3), float(number))
        tensors[f"lora_unet_{name}.lora_up.weight"] = torch.ones(4, 1, 1, 1)
    path = write(Made(tensors), tmp_path / "x")
    ckptfix.lora_merge(tmp_path / "base.safetensors", [path], tmp_path / "o.safetensors")
    found = load_file(tmp_path / "o.safetensors")
    for number, name in enumerate(keys.values(), 1):
        assert found[f"model.diffusion_model.{name}.weight"].max().item() == 1 + number


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another width": ({"widths": True}, "its update is 6 x 11, and the base has the shape"),
    "other names": ({"rename": True}, "the base has no tensor for"),
    "half of a pair": ({"half": True}, "up of .* are missing|missing"),
    "no configuration": ({"config": None}, "alpha of 3 modules is unknown"),
    "another rank in the configuration": ({"config": {**PEFT, "r": 5}}, "states the rank 5"),
    "PiSSA": ({"config": {**PEFT, "init_lora_weights": "pissa_niter_4"}}, "changed the base"),
    "OFT": ({"oft": True}, "OFT"),
    "another rank in one of a pair": ({"rank": True}, "do not fit together"),
    "no elements": ({"empty": True}, "no elements"),
    "LoRA of parameters": ({"config": {**PEFT, "target_parameters": ["experts.up"]}}, "has target_parameters, which"),
    "an alpha that is no number": ({"config": {**PEFT, "lora_alpha": "6"}}, "is unknown"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_merged_is_refused(small: Path, tmp_path: Path, name: str) -> None:
    how, words = WRONG[name]
    made = peft(base())
    tensors = dict(made.tensors)
    if "widths" in how:
        tensors = {key: torch.cat([value, value[:, :1]], 1) if "lora_A" in key else value
                   for key, value in tensors.items()}  # fmt: skip
    if "rename" in how:
        tensors = {key.replace("q_proj", "Wq"): value for key, value in tensors.items()}
    if "half" in how:
        del tensors[next(key for key in tensors if "lora_B" in key)]
    if "rank" in how:
        tensors = {key: value[:2] if "lora_A" in key else value for key, value in tensors.items()}
    if "empty" in how:
        tensors = {key: value[:0] if "lora_A" in key else value for key, value in tensors.items()}
    if "oft" in how:
        tensors[f"base_model.model.{PATHS[0]}.oft_r"] = torch.ones(2)
    config = None if "rank" in how or "empty" in how else made.config
    path = write(Made(tensors, how.get("config", config)), tmp_path / "adapter")
    given: dict[str, Any] = {"alpha": 1.0} if "rank" in how or "empty" in how else {}
    with pytest.raises(Refused, match=words):
        ckptfix.lora_merge(small, [path], tmp_path / "out.safetensors", **given)
    assert not (tmp_path / "out.safetensors").exists()


def test_an_output_that_exists_and_a_file_without_an_adapter(small: Path, tmp_path: Path) -> None:
    path = write(peft(base()), tmp_path / "adapter")
    with pytest.raises(WouldOverwrite):
        ckptfix.lora_merge(small, [path], path)
    with pytest.raises(Refused, match="holds no adapter"):
        ckptfix.lora_merge(small, [small], tmp_path / "out.safetensors")
    with pytest.raises(NoSuchTensor):
        ckptfix.lora_info(path, adapter="other")


def test_a_quantized_base(tmp_path: Path) -> None:
    state = base()
    key = f"{PATHS[0]}.weight"
    codes = {**state, key: state[key].to(torch.float8_e4m3fn), f"{key}_scale_inv": torch.full((1, 1), 0.5)}
    save_file(codes, tmp_path / "base.safetensors")
    path = write(peft(state), tmp_path / "adapter")
    with pytest.raises(Refused, match="fp8") as raised:
        ckptfix.lora_merge(tmp_path / "base.safetensors", [path], tmp_path / "out.safetensors")
    assert "--dequantize" in str(raised.value.hint)
    ckptfix.lora_merge(tmp_path / "base.safetensors", [path], tmp_path / "out.safetensors", dequantize=True,
                       dtype="float32")  # fmt: skip
    plain = {**state, key: codes[key].float() * 0.5}
    same(load_file(tmp_path / "out.safetensors"), merged(plain))


def nf4(shape: tuple[int, int]) -> tuple[Tensors, torch.Tensor]:
    codes, table = torch.arange(shape[0] * shape[1]) % 16, torch.linspace(-1, 1, 16)
    absmax = torch.arange(1.0, codes.numel() // 64 + 1)
    facts = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
    state = {"": (codes[::2] * 16 + codes[1::2]).to(torch.uint8).unsqueeze(1), ".absmax": absmax, ".quant_map": table,
             ".quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(facts).encode()], dtype=torch.uint8)}
    return state, (table[codes] * absmax.repeat_interleave(64)).to(torch.bfloat16).reshape(shape)


def int8(shape: tuple[int, int]) -> tuple[Tensors, torch.Tensor]:
    codes, scale = (torch.arange(shape[0] * shape[1]) % 200 - 100).to(torch.int8).reshape(shape), torch.ones(shape[0])
    return {"": codes, "_scale": scale.unsqueeze(1)}, codes.float()


def gptq(shape: tuple[int, int]) -> tuple[Tensors, torch.Tensor]:
    rows, columns = shape
    words = torch.full((columns // 8, rows), 0x11111111 * 5, dtype=torch.int32)
    zeros = torch.full((1, rows // 8), 0x11111111 * 3, dtype=torch.int32)
    state = {".qweight": words, ".qzeros": zeros, ".scales": torch.ones(1, rows),
             ".g_idx": torch.zeros(columns, dtype=torch.int32)}  # fmt: skip
    return state, torch.full(shape, 1.0)


@pytest.mark.parametrize(("quantized", "scheme"), [
    (nf4, "bitsandbytes"), (int8, "int8 with weight_scale"), (gptq, "GPTQ"),
])
def test_the_base_of_qlora(tmp_path: Path, quantized: Any, scheme: str) -> None:
    state, plain = quantized((32, 64))
    key = f"{PATHS[0]}.weight"
    home = tmp_path / "base"
    home.mkdir()
    start = PATHS[0] if quantized is gptq else key
    save_file({**{f"{start}{end}": value for end, value in state.items()}, "model.norm.weight": torch.ones(6)},
              home / "model.safetensors", {"format": "pt"})  # fmt: skip
    settings = {"quant_method": quantized.__name__, "bits": 4, "group_size": -1}
    (home / "config.json").write_text(json.dumps({"quantization_config": settings}))
    made = torch.Generator().manual_seed(1)
    down, up = torch.randn(2, 64, generator=made), torch.randn(32, 2, generator=made)
    start = f"base_model.model.{PATHS[0]}"
    parts = {f"{start}.lora_A.weight": down, f"{start}.lora_B.weight": up}
    adapter = Made(parts, {**PEFT, "r": 2, "lora_alpha": 2})
    write(adapter, tmp_path / "adapter")
    with pytest.raises(Refused, match=scheme) as raised:
        ckptfix.lora_merge(home, [tmp_path / "adapter"], tmp_path / "out")
    assert "--dequantize" in str(raised.value.hint) and not (tmp_path / "out").exists()
    done = ckptfix.lora_merge(home, [tmp_path / "adapter"], tmp_path / "out", dequantize=True)
    kind = getattr(torch, done.merged[key])
    truth = (plain.double() + up.double() @ down.double()).float().to(kind)
    same(load_file(tmp_path / "out/model.safetensors"), {"model.norm.weight": torch.ones(6), key: truth})
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


def test_an_output_layer_that_is_no_longer_the_embedding(tmp_path: Path) -> None:
    home = tmp_path / "model"
    home.mkdir()
    (home / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    save_file(base(), home / "model.safetensors")
    made = peft(base())
    made.tensors["base_model.model.lm_head.weight"] = torch.ones(2, 6)
    write(made, tmp_path / "adapter")
    ckptfix.lora_merge(home, [tmp_path / "adapter"], tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"tie_word_embeddings": False}


def of_gpt2(folder: Path) -> tuple[Tensors, Tensors, Path]:
    """A base of transformers.Conv1D with a square weight, the merged weights, and an adapter as PEFT saves it."""
    torch.manual_seed(0)
    layers = {"transformer.h.0.attn.c_attn": 12, "transformer.h.0.attn.c_proj": 4}
    weights = {f"{name}.weight": torch.randn(4, width) for name, width in layers.items()}
    ends: Tensors = {}
    wanted: Tensors = {}
    for name, width in layers.items():
        down, up = torch.randn(2, 4), torch.randn(width, 2)
        ends |= {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
        wanted[f"{name}.weight"] = weights[f"{name}.weight"] + 3 * (up @ down).T
    save_file(weights, folder / "base.safetensors")
    home = folder / "adapter"
    home.mkdir()
    save_file(ends, home / "adapter_model.safetensors")
    config = {"r": 2, "lora_alpha": 6, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "task_type": "X"}
    (home / "adapter_config.json").write_text(json.dumps(config))
    return weights, wanted, home


@pytest.mark.parametrize("stated", [True, False, None])
@pytest.mark.parametrize("alone", [True, False])
def test_square_weights_of_conv1d(stated: bool | None, alone: bool, tmp_path: Path) -> None:
    """PEFT sets fan_in_fan_out by the class of each layer, so the base decides."""
    weights, wanted, home = of_gpt2(tmp_path)
    config = json.loads((home / "adapter_config.json").read_text())
    config["fan_in_fan_out"] = stated
    (home / "adapter_config.json").write_text(json.dumps(config))
    if alone:
        ends = load_file(home / "adapter_model.safetensors")
        save_file({key: row for key, row in ends.items() if "c_proj" in key}, home / "adapter_model.safetensors")
        wanted["transformer.h.0.attn.c_attn.weight"] = weights["transformer.h.0.attn.c_attn.weight"]
    ckptfix.lora_merge(tmp_path / "base.safetensors", [home], tmp_path / "out.safetensors")
    made = load_file(tmp_path / "out.safetensors")
    assert all(torch.allclose(made[key], row, atol=1e-5) for key, row in wanted.items())


def test_a_resized_adapter_keeps_its_settings(tmp_path: Path) -> None:
    _, wanted, home = of_gpt2(tmp_path)
    ckptfix.lora_resize(home, tmp_path / "new", rank=4)
    config = json.loads((tmp_path / "new/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["fan_in_fan_out"], config["task_type"]) == (4, 12, True, "X")
    ckptfix.lora_merge(tmp_path / "base.safetensors", [tmp_path / "new"], tmp_path / "out.safetensors")
    made = load_file(tmp_path / "out.safetensors")
    assert all(torch.allclose(made[key], row, atol=1e-4) for key, row in wanted.items())


def test_an_adapter_extracted_of_conv1d_has_the_shapes_of_peft(tmp_path: Path) -> None:
    _, wanted, home = of_gpt2(tmp_path)
    save_file(wanted, tmp_path / "tuned.safetensors")
    ckptfix.lora_extract(tmp_path / "base.safetensors", tmp_path / "tuned.safetensors", tmp_path / "new", rank=2)
    made, real = (load_file(one / "adapter_model.safetensors") for one in (tmp_path / "new", home))
    assert {key: row.shape for key, row in made.items()} == {key: row.shape for key, row in real.items()}
    assert json.loads((tmp_path / "new/adapter_config.json").read_text())["fan_in_fan_out"] is True
    ckptfix.lora_merge(tmp_path / "base.safetensors", [tmp_path / "new"], tmp_path / "out.safetensors")
    same = load_file(tmp_path / "out.safetensors")
    assert all(torch.allclose(same[key], row, atol=1e-4) for key, row in wanted.items())


EMBEDDING = "base_model.model.model.embed_tokens"
ON_EMBEDDING: dict[str, Tensors] = {
    "replaced": {f"{EMBEDDING}.weight": torch.full((6, 4), 7.0)},
    "updated": {f"{EMBEDDING}.lora_embedding_A": torch.ones(2, 6), f"{EMBEDDING}.lora_embedding_B": torch.ones(4, 2)},
}
"""Adapters that change an embedding, beside one of a layer."""


@pytest.mark.parametrize("kind", ON_EMBEDDING)
@pytest.mark.parametrize("stored", ["one key", "both keys"])
@pytest.mark.parametrize("tying", [False, True])
def test_an_adapter_of_a_tied_embedding_leaves_the_output_layer(
    kind: str, stored: str, tying: bool, tmp_path: Path
) -> None:
    """In the model that PEFT trains, only the embedding is changed; ensure_weight_tying says otherwise."""
    home, adapter = tmp_path / "model", tmp_path / "adapter"
    home.mkdir()
    adapter.mkdir()
    (home / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    table = torch.arange(24.0).reshape(6, 4)
    weights = {"model.embed_tokens.weight": table, "model.fc.weight": torch.zeros(4, 4)}
    if stored == "both keys":
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    torch.save(weights, home / "pytorch_model.bin")
    ends = {"lora_A.weight": torch.ones(2, 4), "lora_B.weight": torch.ones(4, 2)}
    layer = {f"base_model.model.model.fc.{end}": value for end, value in ends.items()}
    save_file(layer | ON_EMBEDDING[kind], adapter / "adapter_model.safetensors")
    config = {"r": 2, "lora_alpha": 2, "ensure_weight_tying": tying}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    ckptfix.lora_merge(home, [adapter], tmp_path / "out")
    made = torch.load(tmp_path / "out/pytorch_model.bin")
    wanted = torch.full((6, 4), 7.0) if kind == "replaced" else table + 2
    assert torch.equal(made["model.embed_tokens.weight"], wanted)
    if not tying:
        assert torch.equal(made["lm_head.weight"], table)
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"tie_word_embeddings": tying}


@pytest.mark.parametrize("to", ["peft", "kohya", "diffusers", "comfy"])
@pytest.mark.parametrize("name", ["peft", "kohya", "mlx"])
def test_a_converted_adapter_makes_the_same_model(small: Path, tmp_path: Path, name: str, to: Any) -> None:
    source = write(LAYOUTS[name](base()), tmp_path / "adapter")
    out = tmp_path / ("new" if to == "peft" else "new.safetensors")
    prefix = {"kohya": "lora_te", "comfy": "diffusion_model", "diffusers": "transformer"}.get(to)
    done = ckptfix.lora_convert(source, out, to=to, like=small, prefix=prefix)
    assert (done.to, len(done.modules)) == (to, 3)
    assert ckptfix.lora_info(out).as_dict()["layout"] == to
    ckptfix.lora_merge(small, [out], tmp_path / "merged.safetensors")
    same(load_file(tmp_path / "merged.safetensors"), merged(base()))


def test_dots_that_are_ambiguous_need_the_base(tmp_path: Path) -> None:
    tensors = {"lora_te_my_block_0_to_x.lora_down.weight": torch.ones(1, 4),
               "lora_te_my_block_0_to_x.lora_up.weight": torch.ones(4, 1)}  # fmt: skip
    source = write(Made(tensors), tmp_path / "adapter")
    with pytest.raises(Refused, match="ambiguous"):
        ckptfix.lora_convert(source, tmp_path / "new", to="peft")
    save_file({"my_block.0.to_x.weight": torch.ones(4, 4)}, tmp_path / "base.safetensors")
    done = ckptfix.lora_convert(source, tmp_path / "new", to="peft", like=tmp_path / "base.safetensors")
    assert done.modules == {"lora_te_my_block_0_to_x": "my_block.0.to_x"}


def test_metadata_of_training_is_kept(tmp_path: Path) -> None:
    source = write(LAYOUTS["kohya"](base()), tmp_path / "adapter")
    ckptfix.lora_convert(source, tmp_path / "new.safetensors", to="kohya")
    with safe_open(tmp_path / "new.safetensors", "pt") as reader:
        assert reader.metadata()["ss_sd_model_name"] == "a"


def test_an_adapter_is_extracted_and_resized(small: Path, tmp_path: Path) -> None:
    tuned = {**merged(base()), "model.norm.weight": torch.full((6,), 2.0)}
    save_file(tuned, tmp_path / "tuned.safetensors")
    done = ckptfix.lora_extract(small, tmp_path / "tuned.safetensors", tmp_path / "new", rank=RANK)
    assert done.whole == pytest.approx(1) and done.left == ("model.norm.weight",)
    ckptfix.lora_merge(small, [tmp_path / "new"], tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert all(torch.allclose(found[f"{path}.weight"], tuned[f"{path}.weight"], atol=1e-5) for path in PATHS)
    small_one = ckptfix.lora_resize(tmp_path / "new", tmp_path / "less", rank=1)
    values = [torch.linalg.svdvals(up.double() @ down.double()) ** 2 for down, up in factors(base()).values()]
    best = sum(one[0] for one in values) / sum(one.sum() for one in values)
    assert small_one.whole == pytest.approx(best.item(), abs=1e-5)
    assert ckptfix.lora_info(tmp_path / "less").as_dict()["ranks"] == [{"rank": 1, "modules": 3}]
    with pytest.raises(Refused, match="no weight differs"):
        ckptfix.lora_extract(small, small, tmp_path / "none", rank=1)


def test_the_start_of_a_search_for_a_subspace_is_good_enough() -> None:
    import numpy

    from ckptfix.ops.lora import factors as module

    matrix = numpy.random.default_rng(3).standard_normal((900, 800))
    found = module.factors(matrix, 2)
    values = numpy.linalg.svd(matrix, compute_uv=False) ** 2
    assert found.energy == pytest.approx(values[:2].sum() / values.sum(), rel=0.01)
    error = numpy.linalg.norm(matrix - found.up @ found.down) ** 2 / values.sum()
    assert 1 - error == pytest.approx(found.energy, abs=1e-9)


def test_as_peft_merges(small: Path, tmp_path: Path) -> None:
    """Against merge_and_unload itself, where PEFT is installed."""
    pytest.importorskip("peft", reason="PEFT is not installed")
    import peft as library

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.conv = torch.nn.Linear(6, 8), torch.nn.Conv2d(3, 4, 3)
            self.emb = torch.nn.Embedding(9, 5)

    net = Net()
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    config = library.LoraConfig(r=2, target_modules=["fc", "conv", "emb"], init_lora_weights=False)
    model = library.get_peft_model(net, config)
    model.save_pretrained(tmp_path / "peft")
    ckptfix.lora_merge(tmp_path / "net.safetensors", [tmp_path / "peft"], tmp_path / "mine.safetensors")
    theirs = model.merge_and_unload().state_dict()
    for name, value in load_file(tmp_path / "mine.safetensors").items():
        assert torch.allclose(value, theirs[name], rtol=1e-6, atol=4e-6), name


def test_writers_agree_with_themselves() -> None:
    """The layouts hold the same numbers, so that a test of all of them is one of each."""
    assert len({len(LAYOUTS[name](base()).tensors) for name in LAYOUTS if name not in ("kohya", "comfy")}) == 1
    assert adapters.merged(base(), 0)[f"{PATHS[0]}.weight"].equal(base()[f"{PATHS[0]}.weight"])


def test_adapters_that_differ_are_named(tmp_path: Path) -> None:
    one = write(peft(base()), tmp_path / "one")
    same_ranks = Made(peft(base()).tensors, {**PEFT, "lora_alpha": 1})
    other = write(same_ranks, tmp_path / "two")
    done = ckptfix.average([one, other], tmp_path / "mean.safetensors")
    assert [row.id for row in done.findings] == ["adapters-differ"] and "lora merge" in str(done)
    rows = {key: torch.cat([value, value], 0 if "lora_A" in key else 1) for key, value in same_ranks.tensors.items()}
    more = write(Made(rows, {**PEFT, "r": 2 * RANK}), tmp_path / "three")
    with pytest.raises(Refused, match="different shape") as raised:
        ckptfix.average([one, more], tmp_path / "none.safetensors")
    assert "lora resize" in str(raised.value.hint)
    apart = {key.replace("model.layers", "model.decoder"): value for key, value in rows.items()}
    four = write(Made(apart, {**PEFT, "r": 2 * RANK}), tmp_path / "four")
    merged = ckptfix.merge([one, four], tmp_path / "m.safetensors")
    assert "adapters-differ" in {row.id for row in merged.findings}


def test_inspect_and_doctor_say_it_in_a_line(tmp_path: Path) -> None:
    source = write(LAYOUTS["kohya"](base()), tmp_path / "adapter").rename(tmp_path / "style.safetensors")
    described = ckptfix.inspect(source).adapter
    assert described is not None and described.startswith("kohya LoRA, rank 3, alpha 6, 3 modules")
    assert any(row.id == "adapter" and described in row.message for row in ckptfix.doctor(source).findings)
    path = write(Made(peft(base()).tensors, {**PEFT, "r": 9}), tmp_path / "peft")
    found = {row.id: row.message for row in ckptfix.doctor(path).findings}
    assert "rank 3" in found["peft-adapter"] and "states the rank 9" in found["adapter-names"]
    save_file(base(), tmp_path / "base.safetensors")
    assert ckptfix.inspect(tmp_path / "base.safetensors").adapter is None


def test_an_adapter_is_loaded_into_a_model_that_has_one(tmp_path: Path) -> None:
    """The model of PEFT has the name of the adapter in its keys, and the base's own keys."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = torch.nn.Linear(4, 3)
            self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(4, 2, bias=False)})
            self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(2, 3, bias=False)})

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.original_module = torch.nn.Linear(3, 2)
            self.modules_to_save = torch.nn.ModuleDict({"default": torch.nn.Linear(3, 2)})

    inner = torch.nn.ModuleDict({"fc": Layer(), "head": Head(), "norm": torch.nn.LayerNorm(3)})
    model = torch.nn.ModuleDict({"base_model": torch.nn.ModuleDict({"model": inner})})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    start = "base_model.model."
    tensors = {f"{start}fc.lora_A.weight": torch.ones(2, 4), f"{start}fc.lora_B.weight": torch.ones(3, 2),
               f"{start}head.weight": torch.ones(2, 3), f"{start}head.bias": torch.ones(2)}  # fmt: skip
    path = write(Made(tensors), tmp_path / "adapter")
    report = ckptfix.load_into(model, path)
    assert len(report.loaded) == 4 and not report.missing
    after = model.state_dict()
    assert {name for name in after if not torch.equal(after[name], before[name])} == set(report.loaded)
    assert torch.equal(after[f"{start}head.modules_to_save.default.bias"], torch.ones(2))
    del tensors[f"{start}fc.lora_B.weight"]
    save_file({**tensors, f"{start}fc.lora_A.weight": torch.ones(5, 4)}, path)
    with pytest.raises(ckptfix.LoadMismatch) as raised:
        ckptfix.load_into(model, path)
    refused: Any = raised.value.report
    assert refused is not None and refused.missing == (f"{start}fc.lora_B.default.weight",)
    assert [row.name for row in refused.mismatched] == [f"{start}fc.lora_A.default.weight"]
