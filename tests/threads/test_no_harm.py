"""Two implementations of a model name it differently: no command gives a tensor the key of another one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch
from threads.threads import torch_message

import ckptfix
from ckptfix.ops.chain import function_of


def layers(old: str, new: str, pairs: Iterable[tuple[str, str]], **more: str) -> dict[str, str]:
    """Return the keys of two layers in one implementation, and those in the other."""
    rows = {f"{old}.{n}.{one}.{leaf}": f"{new}.{n}.{other}.{leaf}" for n in range(2) for one, other in pairs
            for leaf in ("weight", "bias")}  # fmt: skip
    return {**rows, **{key.replace("__", "."): value for key, value in more.items()}}


FAMILIES: Mapping[str, dict[str, str]] = {
    "whisper": layers("encoder.blocks", "model.encoder.layers", (
        ("attn.query", "self_attn.q_proj"), ("attn.value", "self_attn.v_proj"), ("attn.out", "self_attn.out_proj"),
        ("attn_ln", "self_attn_layer_norm"), ("mlp.0", "fc1"), ("mlp.2", "fc2"), ("mlp_ln", "final_layer_norm")),
        encoder__conv1__weight="model.encoder.conv1.weight", encoder__ln_post__weight="model.encoder.layer_norm.weight",
        decoder__token_embedding__weight="model.decoder.embed_tokens.weight"),
    "roberta": layers("decoder.sentence_encoder.layers", "roberta.encoder.layer", (
        ("self_attn.q_proj", "attention.self.query"), ("self_attn.k_proj", "attention.self.key"),
        ("self_attn.v_proj", "attention.self.value"), ("self_attn.out_proj", "attention.output.dense"),
        ("self_attn_layer_norm", "attention.output.LayerNorm"), ("fc1", "intermediate.dense"), ("fc2", "output.dense"),
        ("final_layer_norm", "output.LayerNorm"))),
    "vit": layers("blocks", "vit.encoder.layer", (
        ("norm1", "layernorm_before"), ("norm2", "layernorm_after"), ("attn.proj", "attention.output.dense"),
        ("mlp.fc1", "intermediate.dense"), ("mlp.fc2", "output.dense")), cls_token="vit.embeddings.cls_token",
        norm__weight="vit.layernorm.weight", head__weight="classifier.weight"),
    "llama": layers("layers", "model.layers", (
        *((f"attention.w{part}", f"self_attn.{part}_proj") for part in "qkvo"), ("attention_norm", "input_layernorm"),
        ("ffn_norm", "post_attention_layernorm"), ("feed_forward.w1", "mlp.gate_proj"),
        ("feed_forward.w2", "mlp.down_proj"), ("feed_forward.w3", "mlp.up_proj")), norm__weight="model.norm.weight",
        output__weight="lm_head.weight", tok_embeddings__weight="model.embed_tokens.weight"),
    "neox": layers("layers", "h", (
        ("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2"), ("attention.dense", "attn.c_proj"),
        ("mlp.dense_h_to_4h", "mlp.c_fc"), ("mlp.dense_4h_to_h", "mlp.c_proj"))),
    "letters": layers("module.enc", "encoder", (("conv_a", "conv1"), ("conv_b", "conv2"), ("conv_c", "conv3"))),
}  # fmt: skip


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("form", ["whole", "part", "missing"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_tensor_gets_the_key_of_another(tmp_path: Path, family: str, turned: bool, form: str) -> None:
    truth = {new: old for old, new in FAMILIES[family].items()} if turned else FAMILIES[family]
    olds, news = list(truth), list(truth.values())
    path = tmp_path / "model.pth"
    torch.save({old: torch.full((2, 2), float(index)) for index, old in enumerate(olds)}, path)
    few = 3 if form == "part" else None
    end = ", ...." if few else "."
    message = torch_message("Model", news[:few], [] if form == "missing" else olds[:few], end)
    chain = ckptfix.doctor(path, error=message).chain
    for line in chain:
        function_of(line.step.command)(line.source, line.dest, **line.step.keywords())
    made = torch.load(chain[-1].dest) if chain else {}
    for key, value in made.items():
        old = olds[int(value.flatten()[0])]
        assert key == truth[old] or key not in news, f"{old} was called {key}"
    assert not made or len({int(value.flatten()[0]) for value in made.values()}) == len(olds)
