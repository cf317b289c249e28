"""``--names``: a table by the keys, heads from where a model's files state them, and what is refused."""

from __future__ import annotations

import argparse
import gzip
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.conftest import Cli

import ckptfix

LLAMA = {
    "model.embed_tokens.weight": (5, 8),
    "model.layers.0.self_attn.q_proj.weight": (16, 8),
    "model.layers.0.self_attn.k_proj.weight": (8, 8),
    "model.layers.0.self_attn.v_proj.weight": (8, 8),
    "model.layers.0.self_attn.o_proj.weight": (8, 16),
    "model.layers.0.mlp.gate_proj.weight": (6, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 6),
    "model.layers.0.mlp.up_proj.weight": (6, 8),
    "model.layers.0.input_layernorm.weight": (8,),
    "model.layers.0.post_attention_layernorm.weight": (8,),
    "model.norm.weight": (8,),
    "lm_head.weight": (5, 8),
}
"""A layer of LLaMA with four heads of four rows, and two for keys and values."""

HEADS = ("--heads", "4", "--kv-heads", "2")


def made(**more: Any) -> dict[str, Any]:
    return {**{name: torch.randn(shape) for name, shape in LLAMA.items()}, **more}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = tmp_path / "in/llama.pth"
    path.parent.mkdir()
    torch.save(made(), path)
    return path


def halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of each head as transformers has them, of pairs side by side: `permute` of its conversion script."""
    return rows.view(heads, -1, 2, 8).transpose(1, 2).reshape(-1, 8)


def test_rows_are_where_the_other_library_has_them(cli: Cli, llama: Path, tmp_path: Path) -> None:
    """And diff says so, through the table, until one row differs."""
    out = tmp_path / "meta.pth"
    done = cli("rename", llama, out, "--names", "hf:meta", *HEADS)
    assert done.exit_code == 0 and "llama.rules" in done.output
    before, after = (torch.load(path, weights_only=True) for path in (llama, out))
    for old, new, heads in (("q_proj", "wq", 4), ("k_proj", "wk", 2)):
        turned = halves(after[f"layers.0.attention.{new}.weight"], heads)
        assert torch.equal(turned, before[f"model.layers.0.self_attn.{old}.weight"])
    assert cli("diff", llama, out, "--names", "hf:meta", *HEADS).exit_code == 0
    assert cli("diff", out, llama, "--names", "meta:hf", *HEADS).exit_code == 0
    after["layers.0.attention.wk.weight"][[0, 1]] = after["layers.0.attention.wk.weight"][[1, 0]]
    torch.save(after, out)
    apart = cli("diff", llama, out, "--names", "hf:meta", *HEADS, "--json")
    assert [row["name_b"] for row in json.loads(apart.stdout)["changed"]] == ["layers.0.attention.wk.weight"]


def config(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    (folder / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}')
    return state


def params(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    (folder / "params.json").write_text('{"dim": 8, "n_heads": 4, "n_kv_heads": 2}')
    return state


def megatron(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    args = argparse.Namespace(num_attention_heads=4, num_query_groups=2, group_query_attention=True)
    return {"args": args, "model": state}


def lightning(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    return {"hyper_parameters": {"n_head": 4, "n_query_groups": 2}, "state_dict": state}


def titan(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    return {"model": state, "model_args": {"dim": 8, "n_heads": 4, "n_kv_heads": 2}}


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("states", [megatron, lightning, titan])
@pytest.mark.parametrize("packed", ["gzip", "zip"])
def test_heads_in_a_packed_file(
    states: Callable[[Path, dict[str, Any]], dict[str, Any]], packed: str, llama: Path, tmp_path: Path
) -> None:
    """The output holds tensors alone, so that the arguments are those of the file that was unpacked."""
    torch.save(states(llama.parent, torch.load(llama, weights_only=True)), llama)
    source = llama.with_suffix(f".pth.{packed}")
    if packed == "gzip":
        source.write_bytes(gzip.compress(llama.read_bytes()))
    else:
        with zipfile.ZipFile(source, "w") as archive:
            archive.write(llama, "llama.pth")
    llama.unlink()
    out = tmp_path / "litgpt.safetensors"
    ckptfix.convert(source, out, names="litgpt")
    ckptfix.convert(source, tmp_path / "stated.safetensors", names="litgpt", heads=4, kv_heads=2)
    assert ckptfix.diff(out, tmp_path / "stated.safetensors").same
    assert sorted(path.name for path in llama.parent.iterdir()) == [source.name]


def test_a_packed_file_without_arguments_is_refused(cli: Cli, llama: Path, tmp_path: Path) -> None:
    source = llama.with_suffix(".pth.gz")
    source.write_bytes(gzip.compress(llama.read_bytes()))
    done = cli("convert", source, tmp_path / "out.safetensors", "--names", "litgpt")
    assert done.exit_code == 2 and "--heads N" in done.stderr and not (tmp_path / "out.safetensors").exists()


def test_heads_of_a_quantized_file(llama: Path, tmp_path: Path) -> None:
    """The weights are made plain first, and the arguments are those of the quantized file."""
    state = torch.load(llama, weights_only=True)
    codes = "model.layers.0.self_attn.q_proj.weight"
    state[codes] = state[codes].to(torch.float8_e4m3fn)
    state[f"{codes}_scale_inv"] = torch.full((1, 1), 2.0)
    torch.save(megatron(llama.parent, state), llama)
    plain, out = tmp_path / "plain.safetensors", tmp_path / "out.safetensors"
    ckptfix.convert(llama, out, names="meta", dequantize=True)
    ckptfix.convert(llama, plain, dequantize=True)
    assert ckptfix.diff(plain, out, names="hf:meta", heads=4, kv_heads=2).same


def test_heads_of_a_torch_dist_folder(cli: Cli, llama: Path, tmp_path: Path) -> None:
    """Megatron states them in common.pt, and a tensor of the folder holds all layers."""
    stacked, folder = tmp_path / "stacked.pth", tmp_path / "iter_0000001"
    ckptfix.rename(llama, stacked, names="hf:megatron-dist", heads=4, kv_heads=2)
    ckptfix.convert(stacked, folder, to="dcp")
    assert cli("convert", folder, tmp_path / "no.safetensors", "--names", "hf").exit_code == 2
    torch.save({"iteration": 1, **megatron(folder, {})}, folder / "common.pt")
    done = cli("convert", folder, tmp_path / "hf.safetensors", "--names", "hf")
    assert done.exit_code == 0
    assert ckptfix.diff(llama, tmp_path / "hf.safetensors").same


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("states", [config, params, megatron, lightning, titan])
def test_heads_are_found(states: Callable[[Path, dict[str, Any]], dict[str, Any]], llama: Path, tmp_path: Path) -> None:
    torch.save(states(llama.parent, torch.load(llama, weights_only=True)), llama)
    ckptfix.rename(llama, tmp_path / "found.pth", names="hf:litgpt")
    ckptfix.rename(llama, tmp_path / "stated.pth", names="hf:litgpt", heads=4, kv_heads=2)
    assert ckptfix.diff(tmp_path / "found.pth", tmp_path / "stated.pth").same
    ckptfix.convert(llama, tmp_path / "tune.safetensors", names="torchtune")
    assert ckptfix.diff(llama, tmp_path / "tune.safetensors", names="hf:torchtune").only_a == ()


def test_two_tables_in_a_row(llama: Path, tmp_path: Path) -> None:
    heads: dict[str, Any] = {"heads": 4, "kv_heads": 2}
    first, last, direct = (tmp_path / f"{name}.pth" for name in ("meta", "tune", "direct"))
    ckptfix.rename(llama, first, names="hf:meta", **heads)
    done = ckptfix.rename(first, last, names="meta:torchtune", **heads)
    assert ("layers.0.ffn_norm.weight", "layers.0.mlp_norm.scale") in [(row.old, row.new) for row in done.changes]
    ckptfix.rename(llama, direct, names="hf:torchtune", **heads)
    assert ckptfix.diff(last, direct).same and ckptfix.diff(first, last, names="meta:torchtune", **heads).same
    ckptfix.convert(first, tmp_path / "x.safetensors", names="meta:torchtune", dtype="bf16", **heads)
    assert {row.what for change in ckptfix.diff(last, tmp_path / "x.safetensors").changed for row in
            change.differences} == {"dtype"}  # fmt: skip


@pytest.mark.parametrize(
    ("extra", "names", "heads", "phrase"),
    [
        ({}, "hf:meta", (), "--heads N"),
        ({}, "hf:meta", ("--heads", "4"), "heads would have different sizes"),
        ({}, "hf:meta", ("--heads", "4", "--kv-heads", "3"), "do not divide"),
        ({"model.layers.0.mlp.extra.weight": torch.zeros(2)}, "hf:meta", HEADS, "model.layers.0.mlp.extra.weight"),
        ({}, "meta:hf", HEADS, "its keys are those of hf already"),
        ({}, "megatron:meta", HEADS, "'model.embed_tokens.weight'"),
        ({}, "hf:nothing", HEADS, "nothing"),
        ({}, "hf:openai", HEADS, "'model.embed_tokens.weight'"),
        ({}, "hf:hf", HEADS, "are the same"),
        ({}, "no/hf:meta", HEADS, "no table called 'no'"),
    ],
)
def test_what_does_not_fit_is_refused(
    cli: Cli, llama: Path, tmp_path: Path, extra: dict[str, Any], names: str, heads: tuple[str, ...], phrase: str
) -> None:
    torch.save(made(**extra), llama)
    done = cli("rename", llama, tmp_path / "out.pth", "--names", names, *heads)
    assert done.exit_code == 2 and phrase in done.stderr
    assert not (tmp_path / "out.pth").exists()


def test_a_family_of_another_type_is_refused(cli: Cli, llama: Path, tmp_path: Path) -> None:
    """Gemma has the keys of LLaMA, and other norms."""
    (llama.parent / "config.json").write_text('{"model_type": "gemma", "num_attention_heads": 4}')
    done = cli("convert", llama, tmp_path / "out.pth", "--names", "meta", *HEADS)
    assert done.exit_code == 2 and "'gemma'" in done.stderr


def test_a_prefix_is_named(cli: Cli, llama: Path, tmp_path: Path) -> None:
    torch.save({f"module.{name}": value for name, value in made().items()}, llama)
    done = cli("rename", llama, tmp_path / "out.pth", "--names", "hf:meta", *HEADS)
    assert done.exit_code == 2 and "--prefix module" in done.stderr
    done = cli("convert", llama, tmp_path / "out.pth", "--names", "meta", "--strip-prefix", "module", *HEADS)
    assert done.exit_code == 0
    torch.save({name.removeprefix("model."): value for name, value in made().items() if name[0] == "m"}, llama)
    done = cli("rename", llama, tmp_path / "out2.pth", "--names", "hf:meta", *HEADS)
    assert done.exit_code == 2 and "add-module` with --prefix model" in done.stderr


def test_a_table_of_ones_own(cli: Cli, llama: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.rules"
    line = "model.layers.{n}.self_attn.{q_proj,k_proj,v_proj}.weight -> {n}.qkv | concat heads=@heads kv=@kv"
    own.write_text(f"# names: hf:mine\n{line}\nmodel.{{*}} -> m.{{*}}\nlm_head.weight -> head\n")
    out, back = tmp_path / "mine.pth", tmp_path / "back.pth"
    assert cli("rename", llama, out, "--map", own, "--names", "hf:mine", *HEADS).exit_code == 0
    assert cli("rename", out, back, "--map", own, "--names", "mine:hf", *HEADS).exit_code == 0
    assert cli("diff", llama, out, "--rules", own, "--names", "hf:mine", *HEADS).exit_code == 0
    assert cli("diff", llama, out, "--rules", own, *HEADS).exit_code == 0
    assert cli("diff", llama, back).exit_code == 0
    assert "0.qkv" in torch.load(out, weights_only=True)
    own.write_text(f"{own.read_text()}# names: hf:other\na -> b\n")
    done = cli("rename", llama, tmp_path / "x.pth", "--map", own, *HEADS)
    assert done.exit_code == 2 and "hf:mine, hf:other" in done.stderr


def test_doctor_names_the_table_of_a_message(cli: Cli, llama: Path, tmp_path: Path) -> None:
    """The heads are not known, and the model is not there."""
    meta = tmp_path / "meta.pth"
    cli("rename", llama, meta, "--names", "hf:meta", *HEADS)
    sides = ("Missing", LLAMA), ("Unexpected", torch.load(meta, weights_only=True))
    lines = [f"\t{side} key(s) in state_dict: {', '.join(map(json.dumps, names))}. " for side, names in sides]
    done = cli("doctor", meta, "--error", "Error(s) in loading state_dict for LlamaForCausalLM:\n" + "\n".join(lines))
    assert "--names meta:hf --heads N" in done.stdout


def test_doctor_proposes_the_table(cli: Cli, llama: Path, tmp_path: Path) -> None:
    meta = tmp_path / "in/meta.pth"
    cli("rename", llama, meta, "--names", "hf:meta", *HEADS)
    config(llama.parent, {})
    done = cli("doctor", meta, "--like", llama)
    assert "--names meta:hf" in done.stdout
    assert cli("fix", meta, tmp_path / "fixed.pth", "--like", llama).exit_code == 0
    assert cli("diff", tmp_path / "fixed.pth", llama).exit_code == 0


EXPERTS = {
    **{key: shape for key, shape in LLAMA.items() if ".mlp." not in key},
    "model.layers.0.block_sparse_moe.gate.weight": (2, 8),
    **{f"model.layers.0.block_sparse_moe.experts.{expert}.{name}.weight": shape for expert in range(2)
       for name, shape in (("w1", (6, 8)), ("w2", (8, 6)), ("w3", (6, 8)))},
}  # fmt: skip
"""A layer of Mixtral with two experts, as its files have them."""


@pytest.mark.slow
@pytest.mark.parametrize("names", ["hf:transformers5", "transformers5:hf"])
def test_doctor_shows_the_table_that_makes_the_missing_keys(cli: Cli, tmp_path: Path, names: str) -> None:
    """transformers 5 holds all experts in one tensor. The message alone shows it, and the command does what it says."""
    files = {one: tmp_path / f"{one}.pth" for one in names.split(":")}
    torch.save({name: torch.randn(shape) for name, shape in EXPERTS.items()}, files["hf"])
    ckptfix.rename(files["hf"], files["transformers5"], names="hf:transformers5")
    have, want = (torch.load(file, weights_only=True) for file in files.values())
    sides = ("Missing", want.keys() - have.keys()), ("Unexpected", have.keys() - want.keys())
    text = "Error(s) in loading state_dict for MixtralForCausalLM:\n" + "".join(
        f"\t{side} key(s) in state_dict: {', '.join(map(json.dumps, sorted(keys)))}. \n" for side, keys in sides
    )
    source = next(iter(files.values()))
    report = ckptfix.doctor(source, error=text)
    (finding,) = [row for row in report.findings if row.id == "library-names"]
    assert names in str(finding.fix)
    made = tmp_path / "made.pth"
    done = cli("doctor", source, "--error", text)
    assert f"--names {names}" in done.stdout
    ckptfix.rename(source, made, names=names)
    assert ckptfix.diff(made, files[names.split(":")[1]]).same
    odd = text.replace("model.layers.0.self_attn", "model.layers.0.other")
    odd = odd.replace("Missing key(s) in state_dict: ", 'Missing key(s) in state_dict: "model.other.weight", ')
    assert "--names" not in cli("doctor", source, "--error", odd).stdout
