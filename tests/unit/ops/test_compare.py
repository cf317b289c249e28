"""A pasted message against the file: what doctor prints, and what it must not claim."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import ckptfix
from ckptfix.errors import Refused
from ckptfix.names import library_names
from ckptfix.ops.doctor import solve

Shapes = Mapping[str, tuple[int, ...]]


def saved(folder: Path, shapes: Shapes, name: str = "model.pth") -> Path:
    torch.save({key: torch.zeros(shape) for key, shape in shapes.items()}, folder / name)
    return folder / name


def mismatch(name: str, saved: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    return (
        f"size mismatch for {name}: copying a param with shape torch.Size({list(saved)}) from checkpoint, the shape in "
        f"current model is torch.Size({list(wanted)})."
    )


def test_a_missing_head_is_never_made_of_another_tensor() -> None:
    have = ["norm.weight", "layers.0.q.weight", "layers.0.q.bias"]
    assert not solve.solve(have, ["lm_head.weight"], [], complete=False).made
    # A bias does not become that of another module while its weight stays.
    names = solve.solve(["0.conv.weight", "0.conv.bias"], ["0.bn.bias"], ["0.conv.bias"], complete=True)
    assert not names.made


def test_keys_on_which_both_sides_agree_stay(tmp_path: Path) -> None:
    have = ["head.fc.weight", "trunk.head.weight"]
    result = solve.solve(have, ["trunk.top.weight"], ["trunk.head.weight"], complete=True)
    assert result.names["head.fc.weight"] == "head.fc.weight"


def test_many_keys_are_solved_by_kinds_and_verified_on_all() -> None:
    have = [f"module.layers.{n}.{m}.attn.weight" for n in range(40) for m in range(40)]
    missing = [name.removeprefix("module.").replace("attn", "attention") for name in have]
    result = solve.solve(have, missing, have, complete=True)
    assert len(result.made) == len(missing) and list(result.names.values()) == missing


@pytest.mark.parametrize("change", library_names.CHANGES, ids=lambda change: change.id)
def test_changes_of_libraries_have_a_source_and_go_both_ways(change: library_names.LibraryChange) -> None:
    assert change.source and change.since
    samples = {
        "vlm": "language_model.model.layers.0.q.weight", "qwen-vl": "visual.blocks.0.qkv.weight",
        "clip-text": "te.text_model.embeddings.token_embedding.weight", "mask2former": "sem_seg_head.adapter_1.weight",
        "peft-adapter-name": "base_model.model.q.lora_A.weight", "diffusers-attention": "mid.attentions.0.query.weight",
        "weight-norm": "conv.weight_g", "layer-norm": "bert.LayerNorm.gamma",
        "meta-llama": "layers.0.attention.wq.weight", "torchtune": "model.layers.0.self_attn.q_proj.weight",
        "vit": "vit.encoder.layer.0.attention.attention.query.weight",
        "dinov2": "dinov2.encoder.layer.0.attention.attention.query.weight",
        "openmmlab-swin": "b.layers.0.blocks.1.attn.qkv.weight",
        "torchtune-adapter": "base_model.model.model.layers.0.self_attn.o_proj.lora_B.weight",
    }  # fmt: skip
    old = samples[change.id]
    new = library_names.substituted(old, change.forward)
    assert new != old and library_names.substituted(new, change.back) == old
    assert library_names.change_of([(old, new)]) == library_names.change_of([(new, old)]) == change


def test_experts_are_stacked_as_transformers_5_has_them(tmp_path: Path) -> None:
    parts = {"gate_proj": (6, 8), "up_proj": (6, 8), "down_proj": (8, 6)}
    path = saved(tmp_path, {f"model.layers.0.mlp.experts.{n}.{part}.weight": shape
                            for n in range(3) for part, shape in parts.items()})  # fmt: skip
    done = ckptfix.doctor(path, error='Missing key(s) in state_dict: "model.layers.0.mlp.experts.gate_up_proj", '
                                      '"model.layers.0.mlp.experts.down_proj"')  # fmt: skip
    (line,) = done.chain
    ckptfix.rename(path, tmp_path / "out.pth", **line.step.keywords())
    shapes = {key: tuple(value.shape) for key, value in torch.load(tmp_path / "out.pth").items()}
    assert shapes == {"model.layers.0.mlp.experts.gate_up_proj": (3, 12, 8),
                      "model.layers.0.mlp.experts.down_proj": (3, 8, 6)}  # fmt: skip


def test_query_key_and_value_are_joined(tmp_path: Path) -> None:
    path = saved(tmp_path, {f"blocks.{n}.attn.{part}.weight": (4, 4) for n in range(2) for part in
                            ("q_proj", "k_proj", "v_proj")})  # fmt: skip
    unexpected = ", ".join(f'"blocks.{n}.attn.{part}_proj.weight"' for n in range(2) for part in "qkv")
    missing = '"blocks.0.attn.qkv.weight", "blocks.1.attn.qkv.weight"'
    message = f"Missing key(s) in state_dict: {missing}. Unexpected key(s) in state_dict: {unexpected}."
    (line,) = ckptfix.doctor(path, error=message).chain
    rule = "blocks.{n}.attn.{q_proj,k_proj,v_proj}.weight -> blocks.{n}.attn.qkv.weight | concat"
    assert line.step.get("lines") == (rule,)


def test_a_tied_head_is_added_unless_the_config_says_otherwise(tmp_path: Path) -> None:
    path = saved(tmp_path, {"model.embed_tokens.weight": (32, 8), "model.norm.weight": (8,)})
    message = 'Missing key(s) in state_dict: "lm_head.weight".'
    (line,) = ckptfix.doctor(path, error=message).chain
    assert line.step.get("lines") == ("model.embed_tokens.weight -> lm_head.weight | tie",)
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    done = ckptfix.doctor(path, error=message)
    assert not done.chain and done.cause is not None and done.cause.id == "missing-keys"


def test_the_vocabulary_with_the_evidence_beside_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path, {"model.embed_tokens.weight": (64, 8), "lm_head.weight": (64, 8)})
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 64}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 49}}, "added_tokens": []}))
    done = ckptfix.doctor(path, error=mismatch("model.embed_tokens.weight", (64, 8), (50, 8)))
    assert done.cause is not None and done.cause.id == "vocabulary-rows"
    assert "config.json says 64" in done.sentence and "50 tokens" in done.sentence and "classes" not in str(done)
    (line,) = done.chain
    rows = [f"{name} -> {name} | rows from=64 to=50" for name in ("model.embed_tokens.weight", "lm_head.weight")]
    assert line.step.get("lines") == tuple(rows)  # only a line of the message was pasted
    whole = f"RuntimeError: Error(s) in loading state_dict for M:\n{mismatch('lm_head.weight', (64, 8), (50, 8))}"
    (line,) = ckptfix.doctor(path, error=whole).chain
    assert line.step.get("lines") == tuple(rows[1:])


@pytest.mark.parametrize(("saved_rows", "wanted", "padded"), [
    (304, 300, True), (320, 300, True), (512, 300, True), (336, 320, False), (328, 300, False), (301, 300, False),
])  # fmt: skip
def test_rows_of_padding_are_those_up_to_a_multiple(saved_rows: int, wanted: int, padded: bool, tmp_path: Path) -> None:
    """CodeLlama has 16 tokens more than Llama 2, whose 32,000 rows need no padding."""
    path = saved(tmp_path, {"tok_embeddings.weight": (saved_rows, 8)})
    done = ckptfix.doctor(path, error=mismatch("tok_embeddings.weight", (saved_rows, 8), (wanted, 8)))
    assert ("padded to a round number" in done.sentence) == padded
    assert (f"resized for {saved_rows - wanted} new tokens" in done.sentence) == (not padded)


def test_shapes_of_zero_are_values_that_no_rank_gathered(tmp_path: Path) -> None:
    front = "base_model.model.model.layers.0.q_proj"
    torch.save({f"{front}.lora_{one}.weight": torch.zeros(0) for one in "AB"}, tmp_path / "adapter_model.bin")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 16, "lora_alpha": 16, "target_modules": ["q_proj"]}))
    done = ckptfix.doctor(tmp_path, error=mismatch(f"{front}.lora_B.default.weight", (0,), (8, 16)))
    assert done.cause is not None and done.cause.id == "zero-size" and "configuration" not in done.sentence
    assert "adapter-names" not in {row.id for row in done.findings}


def test_a_head_of_other_classes_is_said_to_be_one(tmp_path: Path) -> None:
    path = saved(tmp_path, {"features.weight": (4, 3), "fc.weight": (1000, 4), "fc.bias": (1000,)})
    message = "\n".join([mismatch("fc.weight", (1000, 4), (10, 4)), mismatch("fc.bias", (1000,), (10,))])
    done = ckptfix.doctor(path, error=message)
    assert done.cause is not None and done.cause.id == "shape-mismatch" and "1,000 classes" in done.sentence


def test_a_linear_layer_for_a_convolution_is_reshaped(tmp_path: Path) -> None:
    path = saved(tmp_path, {"mid.attn_1.q.weight": (4, 8), "mid.attn_1.k.weight": (4, 8)})
    message = "\n".join(mismatch(f"mid.attn_1.{part}.weight", (4, 8), (4, 8, 1, 1)) for part in "qk")
    (line,) = ckptfix.doctor(path, error=message).chain
    ckptfix.rename(path, tmp_path / "out.pth", **line.step.keywords())
    assert {value.shape for value in torch.load(tmp_path / "out.pth").values()} == {(4, 8, 1, 1)}


@pytest.mark.parametrize("wanted", [(0,), (0, 8)])
def test_a_partitioned_model_is_not_the_file(tmp_path: Path, wanted: tuple[int, ...]) -> None:
    path = saved(tmp_path, {"model.norm.weight": (8,), "model.embed_tokens.weight": (32, 8)})
    done = ckptfix.doctor(path, error=mismatch("model.embed_tokens.weight", (32, 8), wanted))
    assert done.cause is not None and done.cause.id == "model-side" and not done.fixes and done.exit_code() == 0


def test_a_message_about_a_different_file(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a.weight": (2, 2)})
    for message in ('Unexpected key(s) in state_dict: "other.net.weight".', mismatch("a.weight", (3, 3), (4, 4))):
        done = ckptfix.doctor(path, error=message)
        assert done.cause is not None and done.cause.id == "other-file" and not done.fixes


def test_module_is_blamed_only_where_the_file_has_it(tmp_path: Path) -> None:
    path = saved(tmp_path, {"module.net.weight": (2, 2), "module.head.weight": (2, 2)})
    agreed = 'Missing key(s) in state_dict: "module.neck.weight". Unexpected key(s): "module.head.weight".'
    done = ckptfix.doctor(path, error=agreed)
    assert not any(line.step.command == "strip-module" for line in done.chain)
    stripped = ckptfix.doctor(path, error='Unexpected key(s) in state_dict: "module.net.weight", "module.head.weight".')
    assert [line.step.command for line in stripped.chain] == ["strip-module"]


def test_the_message_is_used_for_a_folder(tmp_path: Path) -> None:
    saved(tmp_path, {"encoder.a.weight": (2, 2), "encoder.b.weight": (2, 2)}, "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    message = (
        'Missing key(s) in state_dict: "a.weight", "b.weight". Unexpected key(s) in state_dict: "encoder.a.weight", '
        '"encoder.b.weight".'
    )
    done = ckptfix.doctor(tmp_path, error=message)
    assert done.cause is not None and done.cause.id == "names-prefixed"
    assert [line.step.get("prefix") for line in done.chain] == ["encoder"]


def test_lines_of_rules_without_a_file(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a.weight": (4, 2), "b.weight": (4, 2)})
    ckptfix.rename(path, tmp_path / "out.pth", lines=["a.weight -> a.weight | rows to=3", "b.{*} | drop"])
    assert {key: tuple(value.shape) for key, value in torch.load(tmp_path / "out.pth").items()} == {"a.weight": (3, 2)}
    with pytest.raises(Refused):
        ckptfix.rename(path, tmp_path / "x.pth", lines=["a b"], mapping={"a": "b"})


def test_a_pruned_file_is_folded_for_the_message_and_for_the_model(tmp_path: Path) -> None:
    path = saved(tmp_path, {"fc.weight_orig": (4, 4), "fc.weight_mask": (4, 4), "fc.bias": (4,)})
    rule = ("fc.{weight_orig,weight_mask} -> fc.weight | mask",)
    message = ('Missing key(s) in state_dict: "fc.weight". Unexpected key(s) in state_dict: "fc.weight_orig", '
               '"fc.weight_mask".')  # fmt: skip
    (line,) = ckptfix.doctor(path, error=message).chain
    assert line.step.get("lines") == rule
    torch.save({"fc.weight": torch.zeros(4, 4), "fc.bias": torch.zeros(4)}, tmp_path / "like.pth")
    (line,) = ckptfix.doctor(path, like=tmp_path / "like.pth").chain
    assert line.step.get("lines") == rule


LLAMA = {"layers.0.attention.wq.weight": (8, 8), "layers.0.attention.wk.weight": (8, 8), "norm.weight": (8,)}
HF = {"model.layers.0.self_attn.q_proj.weight": (8, 8), "model.layers.0.self_attn.k_proj.weight": (8, 8),
      "model.norm.weight": (8,)}  # fmt: skip


@pytest.mark.parametrize("turned", [False, True])
def test_rotary_rows_follow_the_names_or_no_command_is_given(tmp_path: Path, turned: bool) -> None:
    file, model = (HF, LLAMA) if turned else (LLAMA, HF)
    path = saved(tmp_path, file)
    quoted = [", ".join(f'"{name}"' for name in names) for names in (model, file)]
    message = f"Missing key(s) in state_dict: {quoted[0]}. Unexpected key(s) in state_dict: {quoted[1]}."
    done = ckptfix.doctor(path, error=message)
    assert not done.chain and done.cause is not None and done.cause.id == "library-names" and "--heads" in str(done)
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 2}))
    (line,) = ckptfix.doctor(path, error=message).chain
    layout = "interleaved" if turned else "half"
    rules = line.step.get("lines")
    assert isinstance(rules, tuple) and len(rules) == 2
    assert all(str(rule).endswith(f"| rope heads=2 to={layout}") for rule in rules)


def test_a_guess_that_contradicts_other_keys_is_no_command(tmp_path: Path) -> None:
    path = saved(tmp_path, {f"block.{part}.weight": (4, 4) for part in ("fc_a", "fc_b", "fc_c")})
    message = ('Missing key(s) in state_dict: "block.lin_x.weight", "block.lin_y.weight", "block.lin_z.weight". '
               'Unexpected key(s) in state_dict: "block.fc_a.weight", "block.fc_b.weight", "block.fc_c.weight".')
    done = ckptfix.doctor(path, error=message)
    assert not done.chain and done.cause is not None and done.cause.id == "missing-keys"


def test_a_digit_behind_a_reference_is_no_part_of_it(tmp_path: Path) -> None:
    path = saved(tmp_path, {"dec.embedding.weight": (4, 4), "dec.norm.weight": (4,)})
    message = ('Missing key(s) in state_dict: "dec.embedding.0.weight". Unexpected key(s) in state_dict: '
               '"dec.embedding.weight".')
    (line,) = ckptfix.doctor(path, error=message).chain
    ckptfix.rename(path, tmp_path / "out.pth", **line.step.keywords())
    assert set(torch.load(tmp_path / "out.pth")) == {"dec.embedding.0.weight", "dec.norm.weight"}


def test_the_alpha_of_a_lora_is_not_left_out(tmp_path: Path) -> None:
    front = "lora_unet_blocks_0_attn_q"
    path = saved(tmp_path, {f"{front}.lora_down.weight": (4, 16), f"{front}.lora_up.weight": (16, 4),
                            f"{front}.alpha": ()})  # fmt: skip
    model = {"blocks.0.attn.q.lora_A.weight": torch.zeros(4, 16), "blocks.0.attn.q.lora_B.weight": torch.zeros(16, 4)}
    torch.save(model, tmp_path / "like.pth")
    done = ckptfix.doctor(path, like=tmp_path / "like.pth")
    assert not done.chain and "alpha" in str(done)


def test_shards_under_names_that_the_index_lacks_are_merged(tmp_path: Path) -> None:
    for name in "ab":
        torch.save({f"{name}.weight": torch.zeros(2)}, tmp_path / f"part_{name}.pt")
    rows = {"a.weight": "model-00001-of-00002.safetensors", "b.weight": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": rows}))
    assert "ckptfix merge" in str(ckptfix.doctor(tmp_path))
    torch.save({"c.weight": torch.zeros(2)}, tmp_path / "part_b.pt")
    assert "ckptfix merge" not in str(ckptfix.doctor(tmp_path))


def test_rows_of_a_vocabulary_against_the_model_and_the_config(tmp_path: Path) -> None:
    shapes = {"model.embed_tokens.weight": (64, 8), "lm_head.weight": (64, 8), "model.norm.weight": (8,)}
    path = saved(tmp_path, shapes)
    like = {name: torch.zeros(50 if len(shape) > 1 else 8, *shape[1:]) for name, shape in shapes.items()}
    torch.save(like, tmp_path / "like.pth")
    (line,) = ckptfix.doctor(path, like=tmp_path / "like.pth").chain
    ckptfix.rename(path, tmp_path / "out.pth", **line.step.keywords())
    assert {name: value.shape for name, value in torch.load(tmp_path / "out.pth").items()} == {
        name: value.shape for name, value in like.items()
    }
    assert "vocabulary-rows" not in {row.id for row in ckptfix.doctor(path).findings}
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50}))
    (found,) = [row for row in ckptfix.doctor(path).findings if row.id == "vocabulary-rows"]
    assert found.severity == "warning" and '"vocab_size": 64' in (found.fix or "")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 64}))
    assert "vocabulary-rows" not in {row.id for row in ckptfix.doctor(path).findings}


def test_a_layer_for_classes_is_no_vocabulary(tmp_path: Path) -> None:
    path = saved(tmp_path, {"output.weight": (1000, 8), "conv.weight": (8, 8)})
    torch.save({"output.weight": torch.zeros(20, 8), "conv.weight": torch.zeros(8, 8)}, tmp_path / "like.pth")
    done = ckptfix.doctor(path, like=tmp_path / "like.pth")
    assert not done.chain and done.cause is not None and done.cause.id == "shape-mismatch"


def test_scales_are_not_left_out_while_their_codes_stay(tmp_path: Path) -> None:
    state = {"l.weight": torch.ones(16, 32).to(torch.float8_e4m3fn), "l.weight_scale": torch.ones(16, 1)}
    torch.save(state, tmp_path / "fp8.pth")
    torch.save({"l.weight": torch.zeros(16, 32)}, tmp_path / "like.pth")
    (line,) = ckptfix.doctor(tmp_path / "fp8.pth", like=tmp_path / "like.pth").chain
    assert line.step.command == "convert" and line.step.get("dequantize")
    with pytest.raises(Refused, match="other weights"):
        ckptfix.match(tmp_path / "fp8.pth", tmp_path / "out.pth", like=tmp_path / "like.pth", drop_unexpected=True)
