"""GPT-2: a decoder with learned positions, norms with bias, and the embeddings as output weights.

nn.Linear everywhere, so that no style holds a tensor transposed.
"""

from __future__ import annotations

from typing import Any

import torch
from architectures.attention import attend, later
from architectures.family import Family, Style, tokens
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 40
LENGTH = 10
WIDTH = 16
HEADS = 2
HIDDEN = 40
"""Not 4 times the width: and not 3 times, which is what fused queries, keys and values have."""


def positions(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1])


class GptAttention(nn.Module):
    """bias (the causal mask, a buffer), c_attn, c_proj."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", ~later(LENGTH)[:, :-1].view(1, 1, LENGTH, LENGTH))
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.c_attn(x).chunk(3, -1)
        return self.c_proj(attend(q, k, v, HEADS, causal=True))


class GptBlock(nn.Module):
    """ln_1, attn, ln_2, mlp.c_fc, mlp.c_proj."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.attn = GptAttention()
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, HIDDEN), "c_proj": nn.Linear(HIDDEN, WIDTH)})

    def forward(self, x: Tensor) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](functional.gelu(self.mlp["c_fc"](self.ln_2(x))))


class Gpt2(nn.Module):
    """transformer.wte, transformer.wpe, transformer.h.N, transformer.ln_f, lm_head."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "h": nn.Sequential(*(GptBlock() for _ in range(depth))),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.get_parameter("transformer.wte.weight")

    def forward(self, ids: Tensor) -> Any:
        x = self.transformer["wte"](ids) + self.transformer["wpe"](positions(ids))
        return self.lm_head(self.transformer["ln_f"](self.transformer["h"](x)))


class Compiled(nn.Module):
    """What torch.compile makes of the names of another module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, ids: Tensor) -> Any:
        return self._orig_mod(ids)


class MegatronLayer(nn.Module):
    """input_layernorm, self_attention, post_attention_layernorm, mlp."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(WIDTH)
        self.self_attention = nn.ModuleDict(
            {"query_key_value": nn.Linear(WIDTH, 3 * WIDTH), "dense": nn.Linear(WIDTH, WIDTH)}
        )
        self.post_attention_layernorm = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict(
            {"dense_h_to_4h": nn.Linear(WIDTH, HIDDEN), "dense_4h_to_h": nn.Linear(HIDDEN, WIDTH)}
        )

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.self_attention["query_key_value"](self.input_layernorm(x)).chunk(3, -1)
        x = x + self.self_attention["dense"](attend(q, k, v, HEADS, causal=True))
        hidden = functional.gelu(self.mlp["dense_h_to_4h"](self.post_attention_layernorm(x)))
        return x + self.mlp["dense_4h_to_h"](hidden)


class Megatron(nn.Module):
    """language_model.embedding.word_embeddings ..., language_model.encoder.layers.N; no name for the output."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        model = nn.Module()
        model.embedding = nn.ModuleDict(
            {"word_embeddings": nn.Embedding(VOCABULARY, WIDTH), "position_embeddings": nn.Embedding(LENGTH, WIDTH)}
        )
        model.encoder = nn.Sequential()
        model.encoder.add_module("layers", nn.Sequential(*(MegatronLayer() for _ in range(depth))))
        model.encoder.add_module("final_layernorm", nn.LayerNorm(WIDTH))
        self.language_model = model

    def forward(self, ids: Tensor) -> Any:
        words = self.get_submodule("language_model.embedding.word_embeddings")
        x = words(ids) + self.get_submodule("language_model.embedding.position_embeddings")(positions(ids))
        x = self.get_submodule("language_model.encoder")(x)
        return functional.linear(x, self.get_parameter("language_model.embedding.word_embeddings.weight"))


class OptLayer(nn.Module):
    """self_attn with k_proj, v_proj, q_proj; its norm and the final one after what they come before."""

    def __init__(self) -> None:
        super().__init__()
        names = ("k_proj", "v_proj", "q_proj", "out_proj")
        self.self_attn = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})
        self.self_attn_layer_norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, WIDTH)
        self.final_layer_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = self.self_attn_layer_norm(x)
        q, k, v = (self.self_attn[f"{letter}_proj"](y) for letter in "qkv")
        x = x + self.self_attn["out_proj"](attend(q, k, v, HEADS, causal=True))
        return x + self.fc2(functional.gelu(self.fc1(self.final_layer_norm(x))))


class Opt(nn.Module):
    """model.decoder.embed_tokens, .embed_positions, .final_layer_norm before .layers.N; lm_head."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.decoder = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(VOCABULARY, WIDTH),
                "embed_positions": nn.Embedding(LENGTH, WIDTH),
                "final_layer_norm": nn.LayerNorm(WIDTH),
                "layers": nn.Sequential(*(OptLayer() for _ in range(depth))),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.get_parameter("model.decoder.embed_tokens.weight")

    def forward(self, ids: Tensor) -> Any:
        words, places, norm, layers = self.get_submodule("model.decoder").children()
        return self.lm_head(norm(layers(words(ids) + places(positions(ids)))))


class MinBlock(nn.Module):
    """ln1, ln2, attn.key, attn.query, attn.value, attn.proj, mlp.0, mlp.2."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(WIDTH)
        self.ln2 = nn.LayerNorm(WIDTH)
        self.attn = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("key", "query", "value", "proj")})
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Any:
        y = self.ln1(x)
        q, k, v = (self.attn[name](y) for name in ("query", "key", "value"))
        x = x + self.attn["proj"](attend(q, k, v, HEADS, causal=True))
        return x + self.mlp(self.ln2(x))


class MinGpt(nn.Module):
    """pos_emb (a bare parameter, so it comes first), tok_emb, blocks.N, ln_f, head."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(VOCABULARY, WIDTH)
        self.pos_emb = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(MinBlock() for _ in range(depth)))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tok_emb.weight

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.ln_f(self.blocks(self.tok_emb(ids) + self.pos_emb[: ids.shape[1]])))


def texts() -> tuple[Tensor, ...]:
    return (tokens(3, LENGTH, VOCABULARY),)


GPT = Family(
    "GPT-2, tied",
    (
        Style("GPT-2", Gpt2, layout="fused"),
        Style("nanoGPT, compiled", lambda depth: Compiled(Gpt2(depth)), layout="fused"),
        Style("Megatron", Megatron, layout="fused"),
        Style("OPT", Opt),
        Style("minGPT", MinGpt),
    ),
    texts,
    fused={3 * WIDTH: 3},
)
