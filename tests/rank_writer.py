"""A writer of models cut into the files of ranks, which follows the rules of Megatron-LM and fairscale.

It cuts whole tensors, so that a test can compare what ckptfix joins with what there was. Nothing here uses ckptfix.

Rules and their sources (Megatron-LM d98e8a64dd, fairscale 146f1602, llama 689c7f2, llama3 a0940f9, fairseq 3d262bb2)::

    ColumnParallelLinear     chunk(weight, 0), chunk(bias, 0)     core/tensor_parallel/layers.py; fairscale layers.py
    RowParallelLinear        chunk(weight, 1), bias whole
    VocabParallelEmbedding   chunk(weight, 0)
    ParallelEmbedding        chunk(weight, 1)                     fairscale layers.py; llama/model.py (Llama 1 and 2)
    gated MLP                cat(chunk(gate, 0), chunk(up, 0))    core/transformer/mlp.py; saver_base.py
    GroupedMLP               weight1.view(experts, hidden, -1) chunked as a gated MLP along 2, weight2 along 1
    experts                  local number = number % (experts / EP)    core/transformer/moe/experts.py
    pipeline                 chunk v of stage p has n layers from (v * PP + p) * n on    loader_base.py
    last stage               a copy of the embeddings if they are tied    tools/checkpoint/saver_base.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

State = dict[str, torch.Tensor]
Cut = Callable[[torch.Tensor, int], list[torch.Tensor]]


def column(whole: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    return [part.clone() for part in whole.chunk(ranks, 0)]


def row(whole: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    return [part.clone() for part in whole.chunk(ranks, 1)]


def copied(whole: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    return [whole.clone() for _ in range(ranks)]


def stacked(count: int) -> Cut:
    def cut(whole: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        halves = [half.chunk(ranks, 0) for half in whole.chunk(count, 0)]
        return [torch.cat([half[rank] for half in halves]) for rank in range(ranks)]

    return cut


def sections(*sizes: int) -> Cut:
    """The cut of a matrix that stacks matrices of these sizes (core/ssm: in_proj_split_sections, partition_sizes)."""

    def cut(whole: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        each = [part.chunk(ranks, 0) for part in torch.split(whole, list(sizes), 0)]
        return [torch.cat([part[rank] for part in each]) for rank in range(ranks)]

    return cut


@dataclass
class Model:
    """A whole model: its tensors, each with its cut, and its arguments."""

    args: dict[str, Any]
    tensors: State = field(default_factory=dict)
    cuts: dict[str, Cut] = field(default_factory=dict)
    seed: int = 0

    def add(self, name: str, cut: Cut, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.seed += 1
        maker = torch.Generator().manual_seed(self.seed)
        self.tensors[name] = torch.randn(*shape, generator=maker).to(dtype)
        self.cuts[name] = cut


def llama(version: int, *, layers: int = 2, hidden: int = 16, ffn: int = 24, vocab: int = 40, kv: int = 8) -> Model:
    """Meta's names: Llama 2 cuts the token embeddings along 1, Llama 3 along 0."""
    args = {"dim": hidden, "n_layers": layers, "n_heads": 4, "n_kv_heads": 4, "vocab_size": vocab}
    model = Model(args)
    model.add("tok_embeddings.weight", row if version < 3 else column, vocab, hidden)
    for n in range(layers):
        at = f"layers.{n}."
        model.add(f"{at}attention.wq.weight", column, hidden, hidden)
        model.add(f"{at}attention.wk.weight", column, kv, hidden)
        model.add(f"{at}attention.wv.weight", column, kv, hidden)
        model.add(f"{at}attention.wo.weight", row, hidden, hidden)
        model.add(f"{at}feed_forward.w1.weight", column, ffn, hidden)
        model.add(f"{at}feed_forward.w2.weight", row, hidden, ffn)
        model.add(f"{at}feed_forward.w3.weight", column, ffn, hidden)
        model.add(f"{at}attention_norm.weight", copied, hidden)
        model.add(f"{at}ffn_norm.weight", copied, hidden)
    model.add("norm.weight", copied, hidden)
    model.add("output.weight", column, vocab, hidden)
    if version < 3:
        model.add("rope.freqs", copied, 2)
    return model


def write_meta(model: Model, folder: Path, ranks: int) -> None:
    folder.mkdir()
    parts = {name: model.cuts[name](whole, ranks) for name, whole in model.tensors.items()}
    for rank in range(ranks):
        torch.save({name: part[rank] for name, part in parts.items()}, folder / f"consolidated.{rank:02d}.pth")
    (folder / "params.json").write_text(json.dumps(model.args))


def _args(layers: int, **more: object) -> dict[str, Any]:
    return {"num_layers": layers, "num_attention_heads": 4, "hidden_size": 16, "swiglu": False, **more}


def qwen(layers: int = 4) -> Model:
    """Megatron-LM's names: grouped queries with a bias, a gated MLP, an output layer of its own."""
    model = Model(_args(layers, swiglu=True, group_query_attention=True, num_query_groups=2, vocab_size=50,
                        untie_embeddings_and_output_weights=True, params_dtype=torch.bfloat16))  # fmt: skip
    model.add("embedding.word_embeddings.weight", column, 64, 16)
    for n in range(layers):
        at = f"decoder.layers.{n}."
        model.add(f"{at}self_attention.linear_qkv.layer_norm_weight", copied, 16)
        model.add(f"{at}self_attention.linear_qkv.weight", column, 32, 16)
        model.add(f"{at}self_attention.linear_qkv.bias", column, 32)
        model.add(f"{at}self_attention.linear_proj.weight", row, 16, 16)
        model.add(f"{at}mlp.linear_fc1.layer_norm_weight", copied, 16)
        model.add(f"{at}mlp.linear_fc1.weight", stacked(2), 48, 16)
        model.add(f"{at}mlp.linear_fc2.weight", row, 16, 24)
    model.add("decoder.final_layernorm.weight", copied, 16)
    model.add("output_layer.weight", column, 64, 16)
    return model


def mixtral(layers: int = 2, experts: int = 4, *, grouped: bool = False) -> Model:
    model = Model(_args(layers, swiglu=True, num_experts=experts, untie_embeddings_and_output_weights=True))
    model.add("embedding.word_embeddings.weight", column, 32, 16)
    for n in range(layers):
        at = f"decoder.layers.{n}."
        model.add(f"{at}self_attention.linear_qkv.weight", column, 48, 16)
        model.add(f"{at}self_attention.linear_proj.weight", row, 16, 16)
        model.add(f"{at}pre_mlp_layernorm.weight", copied, 16)
        model.add(f"{at}mlp.router.weight", copied, experts, 16, dtype=torch.float32)
        for m in range(experts):
            form = f"linear_fc{{}}.weight{m}" if grouped else f"local_experts.{m}.linear_fc{{}}.weight"
            one = f"{at}mlp.experts.{form}"
            model.add(one.format(1), stacked(2), 16, 16)
            model.add(one.format(2), row, 16, 8)
    model.add("decoder.final_layernorm.weight", copied, 16)
    model.add("output_layer.weight", column, 32, 16)
    return model


def gpt2(layers: int = 2) -> Model:
    """Tied embeddings, learned positions, norms and linear layers with a bias, no gate."""
    model = Model(_args(layers, untie_embeddings_and_output_weights=False, padded_vocab_size=32))
    model.add("embedding.word_embeddings.weight", column, 32, 16)
    model.add("embedding.position_embeddings.weight", copied, 8, 16)
    for n in range(layers):
        at = f"decoder.layers.{n}."
        for norm in ("input_layernorm", "pre_mlp_layernorm"):
            model.add(f"{at}{norm}.weight", copied, 16)
            model.add(f"{at}{norm}.bias", copied, 16)
        for name, cut, size, inner in (
            ("self_attention.linear_qkv", column, 48, 16), ("self_attention.linear_proj", row, 16, 16),
            ("mlp.linear_fc1", column, 64, 16), ("mlp.linear_fc2", row, 16, 64),
        ):  # fmt: skip
            model.add(f"{at}{name}.weight", cut, size, inner)
            model.add(f"{at}{name}.bias", cut if cut is column else copied, size)
    model.add("decoder.final_layernorm.weight", copied, 16)
    model.add("decoder.final_layernorm.bias", copied, 16)
    return model


def grouped_experts(rows: int, gates: int, experts: int) -> Cut:
    """The cut of weight1 of GroupedMLP: its memory is a matrix [rows, columns] for each expert."""

    def cut(whole: torch.Tensor, ranks: int) -> list[torch.Tensor]:
        halves = [half.chunk(ranks, 2) for half in whole.reshape(experts, rows, -1).chunk(gates, 2)]
        return [torch.cat([half[rank] for half in halves], 2).reshape(rows, -1) for rank in range(ranks)]

    return cut


def legacy_grouped(layers: int = 2, experts: int = 4, *, gates: int = 2) -> Model:
    """Experts of GroupedMLP (megatron/core/transformer/moe/experts.py, core 0.16.1): all of a layer in two tensors."""
    model = Model(_args(layers, swiglu=gates == 2, num_experts=experts, untie_embeddings_and_output_weights=True))
    model.add("embedding.word_embeddings.weight", column, 32, 16)
    for n in range(layers):
        at = f"decoder.layers.{n}.mlp."
        model.add(f"{at}router.weight", copied, experts, 16)
        model.add(f"{at}experts.weight1", grouped_experts(16, gates, experts), 16, experts * gates * 8)
        model.add(f"{at}experts.weight2", stacked(experts), experts * 8, 16)
    model.add("output_layer.weight", column, 32, 16)
    return model


def legacy_gpt(version: float, layers: int = 2) -> Model:
    """The names before Megatron's core, with queries, keys and values as of a checkpoint version."""
    model = Model(_args(layers))
    at = "language_model.embedding."
    model.add(f"{at}word_embeddings.weight", column, 32, 16)
    model.add(f"{at}position_embeddings.weight", copied, 8, 16)
    for n in range(layers):
        at = f"language_model.encoder.layers.{n}."
        model.add(f"{at}input_layernorm.weight", copied, 16)
        cut = column if version >= 1 else stacked(3)
        model.add(f"{at}self_attention.query_key_value.weight", cut, 48, 16)
        model.add(f"{at}self_attention.query_key_value.bias", cut, 48)
        model.add(f"{at}self_attention.dense.weight", row, 16, 16)
        model.add(f"{at}mlp.dense_h_to_4h.weight", column, 64, 16)
        model.add(f"{at}mlp.dense_4h_to_h.weight", row, 16, 64)
    model.add("language_model.encoder.final_layernorm.weight", copied, 16)
    return model


def mixers(kind: str, layers: int = 2, *, state: int = 8, heads: int = 4, copies: int = 3) -> Model:
    """Linear attention (core/ssm): ``mamba``, ``gdn``, ``gdn2`` or ``gdp``, whose in_proj stacks several matrices."""
    inner = 2 * heads
    model = Model(_args(layers, gdp_num_householder=copies))
    tied = {
        "mamba": ((inner, inner, state, state, heads), (inner, state, state), heads),
        "gdn": ((state, state, inner, inner, heads, heads), (state, state, inner), heads),
        "gdn2": ((state, state, inner, inner, state, state, inner), (state, state, inner), state),
        "gdp": ((inner,) * (copies + 1) + (state,) * (copies + 1) + (heads,) * (copies + 1),
                (inner,) * copies + (state,) * (copies + 1), heads),
    }  # fmt: skip
    project, conv, steps = tied[kind]
    model.add("embedding.word_embeddings.weight", column, 32, 16)
    for n in range(layers):
        at = f"decoder.layers.{n}." + ("self_attention." if kind.startswith("gdn") else "mixer.")
        model.add(f"{at}dt_bias", column, steps)
        model.add(f"{at}A_log", column, heads)
        model.add(f"{at}in_proj.layer_norm_weight", copied, 16)
        model.add(f"{at}in_proj.weight", sections(*project), sum(project), 16)
        model.add(f"{at}conv1d.weight", sections(*conv), sum(conv), 1, 4)
        if kind == "mamba":
            model.add(f"{at}D", column, heads)
        else:
            model.add(f"{at}conv1d.bias", sections(*conv), sum(conv))
        if kind.startswith("gdn"):
            model.add(f"{at}out_norm.weight", copied, 2)
        else:
            model.add(f"{at}norm.weight", column, inner)
        model.add(f"{at}out_proj.weight", row, 16, inner)
    model.add("output_layer.weight", column, 32, 16)
    return model


def latents(*, fused: bool, cut: bool, layers: int = 2) -> Model:
    """Multi-latent attention (core/transformer/multi_latent_attention.py) with an indexer (DSAIndexer).

    The down projections are cut if they are a ColumnParallelLinear, and each rank has a TELinear.
    """
    model = Model(_args(layers, q_lora_rank=8, kv_lora_rank=12, qk_pos_emb_head_dim=4))
    model.add("embedding.word_embeddings.weight", column, 32, 16)
    for n in range(layers):
        at = f"decoder.layers.{n}.self_attention."
        if fused:
            model.add(f"{at}linear_qkv_down_proj.weight", sections(8, 16) if cut else copied, 24, 16)
        else:
            model.add(f"{at}linear_q_down_proj.weight", column if cut else copied, 8, 16)
            model.add(f"{at}linear_kv_down_proj.weight", column if cut else copied, 16, 16)
        model.add(f"{at}linear_q_up_proj.layer_norm_weight", copied, 8)
        model.add(f"{at}linear_q_up_proj.weight", column, 32, 8)
        model.add(f"{at}linear_kv_up_proj.weight", column, 40, 12)
        model.add(f"{at}core_attention.indexer.linear_wq_b.weight", copied, 16, 8)
        model.add(f"{at}core_attention.indexer.k_norm.weight", copied, 8)
        model.add(f"{at}linear_proj.weight", row, 16, 16)
    model.add("output_layer.weight", column, 32, 16)
    return model


def llava(layers: int = 2) -> Model:
    """A vision tower of another width, without a gate, before a language model with one (core/models/multimodal)."""
    model = Model({**qwen(layers).args})
    for name, shape in (("class_token", (1, 1, 8)), ("conv1.weight", (8, 3, 2, 2)), ("ln_pre.weight", (8,)),
                        ("position_embeddings.weight", (5, 8)), ("merger.linear_fc1.weight", (8, 32))):  # fmt: skip
        model.add(f"vision_model.{name}", copied, *shape)
    model.add("vision_model.embedder.weight", column, 8, 12)
    for n in range(layers):
        at = f"vision_model.decoder.layers.{n}."
        model.add(f"{at}self_attention.linear_qkv.weight", column, 24, 8)
        model.add(f"{at}self_attention.linear_proj.weight", row, 8, 8)
        model.add(f"{at}mlp.linear_fc1.weight", column, 32, 8)
        model.add(f"{at}mlp.linear_fc2.weight", row, 8, 32)
    model.add("vision_projection.encoder.linear_fc1.weight", column, 32, 8)
    model.add("vision_projection.encoder.linear_fc2.weight", row, 16, 32)
    own = qwen(layers)
    for name, whole in own.tensors.items():
        model.tensors[f"language_model.{name}"] = whole
        model.cuts[f"language_model.{name}"] = own.cuts[name]
    return model


@dataclass(frozen=True)
class Sizes:
    tp: int = 1
    pp: int = 1
    vp: int = 1
    ep: int = 1


def write_megatron(
    model: Model,
    root: Path,
    sizes: Sizes,
    *,
    iteration: int = 500,
    version: float = 3.0,
    nested: bool = False,
    change: Callable[[tuple[int, int, int], dict[str, Any]], object] = lambda place, saved: None,
) -> Path:
    """Write the files of all ranks, and return the folder of the iteration; `change` may edit what a rank saves."""
    args = {
        **model.args,
        "tensor_model_parallel_size": sizes.tp,
        "pipeline_model_parallel_size": sizes.pp,
        "virtual_pipeline_model_parallel_size": sizes.vp if sizes.vp > 1 else None,
        "expert_model_parallel_size": sizes.ep,
    }
    folder = root / f"iter_{iteration:07d}"
    parts = {name: model.cuts[name](whole, sizes.tp) for name, whole in model.tensors.items()}
    for tensor in range(sizes.tp):
        for stage in range(sizes.pp):
            for group in range(sizes.ep):
                name = f"mp_rank_{tensor:02d}" + (f"_{stage:03d}" if sizes.pp > 1 else "")
                place = folder / (name + (f"_{group:03d}" if sizes.ep > 1 else ""))
                place.mkdir(parents=True)
                own = argparse.Namespace(**args, rank=tensor)
                saved: dict[str, Any] = {"args": own, "checkpoint_version": version, "iteration": iteration}
                for chunk in range(sizes.vp):
                    state = _chunk(model, {k: v[tensor] for k, v in parts.items()}, sizes, stage, chunk, group)
                    saved["model" if sizes.vp == 1 else f"model{chunk}"] = _nested(state) if nested else state
                saved["optimizer"] = {"state": {0: {"exp_avg": torch.zeros(4)}}, "param_groups": []}
                saved["rng_state"] = [{"seed": 1}]
                change((tensor, stage, group), saved)
                torch.save(saved, place / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


def _chunk(model: Model, own: State, sizes: Sizes, stage: int, chunk: int, group: int) -> State:
    """Return the state dict of a chunk of the layers on a rank, with the numbers that the rank gives them."""
    layers = model.args["num_layers"] // (sizes.pp * sizes.vp)
    first = (chunk * sizes.pp + stage) * layers
    is_first, is_last = (stage, chunk) == (0, 0), (stage, chunk) == (sizes.pp - 1, sizes.vp - 1)
    experts = model.args.get("num_experts", 0) // sizes.ep
    state: State = {}
    for name, tensor in own.items():
        if ".layers." in name:
            before, rest = name.split(".layers.")
            number, inside = rest.split(".", 1)
            if first <= int(number) < first + layers:
                renamed = _expert(f"{before}.layers.{int(number) - first}.{inside}", experts, group)
                if renamed is not None:
                    state[renamed] = tensor
        elif is_first if "embedding" in name else is_last:
            state[name] = tensor
    words = next(name for name in own if name.endswith("word_embeddings.weight"))
    if is_last and not is_first and "output_layer.weight" not in own:
        old = words.startswith("language_model")
        state["word_embeddings_for_head.weight" if old else "output_layer.weight"] = own[words].clone()
    return state


def _expert(name: str, experts: int, group: int) -> str | None:
    """Return the name of a tensor on a rank; None for an expert of another group."""
    if ".experts." not in name:
        return name
    before, rest = name.split(".experts.")
    if rest.startswith("local_experts."):
        _, number, inside = rest.split(".", 2)
        form = f"{before}.experts.local_experts.{{}}.{inside}"
    else:
        number = rest.rsplit("weight", 1)[1]
        form = f"{before}.experts.{rest.removesuffix(number)}{{}}"
    return form.format(int(number) % experts) if int(number) // experts == group else None


def _nested(state: State) -> dict[str, Any]:
    """Return the state dict as models before Megatron's core save it (state_dict_for_save_checkpoint)."""
    made: dict[str, Any] = {}
    for name, tensor in state.items():
        if name.startswith("language_model.embedding."):
            _, _, module, rest = name.split(".", 3)
            made.setdefault("language_model", {}).setdefault("embedding", {}).setdefault(module, {})[rest] = tensor
        elif name.startswith("language_model."):
            _, key, rest = name.split(".", 2)
            made.setdefault("language_model", {}).setdefault(key, {})[rest] = tensor
        else:
            key, rest = name.split(".", 1)
            made.setdefault(key, {})[rest] = tensor
    return made


def write_fairseq(folder: Path, ranks: int) -> State:
    """Write model parts of a small language model, and return the whole one."""
    model = Model({})
    model.add("decoder.embed_tokens.weight", column, 24, 8)
    for name in ("q_proj", "k_proj", "v_proj"):
        model.add(f"decoder.layers.0.self_attn.{name}.weight", column, 8, 8)
        model.add(f"decoder.layers.0.self_attn.{name}.bias", column, 8)
    model.add("decoder.layers.0.self_attn.out_proj.weight", row, 8, 8)
    model.add("decoder.layers.0.self_attn.out_proj.bias", copied, 8)
    model.add("decoder.layers.0.self_attn_layer_norm.weight", copied, 8)
    model.add("decoder.layers.0.fc1.weight", column, 16, 8)
    model.add("decoder.layers.0.fc2.weight", row, 8, 16)
    folder.mkdir()
    parts = {name: model.cuts[name](whole, ranks) for name, whole in model.tensors.items()}
    for rank in range(ranks):
        own: Mapping[str, torch.Tensor] = {name: part[rank] for name, part in parts.items()}
        saved = {"cfg": {"model": 1}, "model": own, "last_optimizer_state": {"state": {}}}
        torch.save(saved, folder / f"checkpoint_last-model_part-{rank}.pt")
    return model.tensors


def write_nemo(model: Model, folder: Path, sizes: Sizes, *, config: str = "") -> State:
    """Write the members of a .nemo archive of a model that is cut, and return its tensors with NeMo's names."""
    write_megatron(model, folder.parent / f"{folder.name}-megatron", sizes)
    for path in sorted((folder.parent / f"{folder.name}-megatron").rglob("*.pt")):
        numbers = path.parent.name.removeprefix("mp_rank_").split("_")
        place = folder / (f"tp_rank_{numbers[0]}_pp_rank_{numbers[1]}" if sizes.pp > 1 else path.parent.name)
        place.mkdir(parents=True)
        state = torch.load(path, weights_only=False)["model"]
        torch.save({f"model.{name}": tensor for name, tensor in state.items()}, place / "model_weights.ckpt")
    stated = {"tensor_model_parallel_size": sizes.tp, "pipeline_model_parallel_size": sizes.pp, "mcore_gpt": "true"}
    stated |= {"num_layers": model.args["num_layers"], "hidden_size": 16, "activation": "fast-swiglu"}
    lines = [f"{name}: {value}" for name, value in stated.items()]
    (folder / "model_config.yaml").write_text("\n".join([*lines, "optim:", "  lr: 0.1", config, ""]))
    return {f"model.{name}": tensor for name, tensor in model.tensors.items()}
