"""LLaMA: a decoder with gated layers, norms without bias, and an output of its own.

Queries and keys are not rotated, so that no style holds their rows in another order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from architectures.attention import attend
from architectures.family import Family, Style
from architectures.gpt import HEADS, HIDDEN, VOCABULARY, WIDTH, texts
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a LLaMA; `keys` is the width of keys and of values, less than `width` where several heads share them."""

    vocabulary: int = VOCABULARY
    width: int = WIDTH
    heads: int = HEADS
    keys: int = WIDTH
    hidden: int = HIDDEN


SIZES = Sizes()
SHARING = Sizes(keys=WIDTH // HEADS)


class RmsNorm(nn.Module):
    """A norm with one vector, whatever its name."""

    def __init__(self, width: int = WIDTH, name: str = "weight") -> None:
        super().__init__()
        self.name = name
        self.register_parameter(name, nn.Parameter(torch.ones(width)))

    def forward(self, x: Tensor) -> Any:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.get_parameter(self.name)


def linear(inside: int, outside: int) -> nn.Linear:
    return nn.Linear(inside, outside, bias=False)


def wide(x: Tensor, width: int) -> Tensor:
    """Heads of keys or values, repeated until there are as many as of queries."""
    return x.repeat(1, 1, width // x.shape[-1])


class GatedLayer(nn.Module):
    """A layer of LLaMA, whose submodules a style defines in its order and names in NAMES.

    NAMES are for query, key, value, output, gate, up, down, the norm of attention and the gated part's norm.
    """

    NAMES: tuple[str, ...]

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads

    def forward(self, x: Tensor) -> Any:
        q, k, v, o, gate, up, down, first, second = map(self.get_submodule, self.NAMES)
        y, width = first(x), x.shape[-1]
        x = x + o(attend(q(y), wide(k(y), width), wide(v(y), width), self.heads, causal=True))
        y = second(x)
        return x + down(functional.silu(gate(y)) * up(y))


class Rotary(nn.Module):
    """Frequencies as a buffer, as files of the first LLaMA have it."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width // sizes.heads
        self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(0, width, 2) / width))


class TransformersLayer(GatedLayer):
    """self_attn, mlp with gate_proj, up_proj, down_proj, and the norms at the end."""

    NAMES = (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
    )  # fmt: skip

    def __init__(self, sizes: Sizes, rotary: bool) -> None:
        super().__init__(sizes)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": linear(sizes.width, sizes.width),
                "k_proj": linear(sizes.width, sizes.keys),
                "v_proj": linear(sizes.width, sizes.keys),
                "o_proj": linear(sizes.width, sizes.width),
            }
        )
        if rotary:
            self.self_attn["rotary_emb"] = Rotary(sizes)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": linear(sizes.width, sizes.hidden),
                "up_proj": linear(sizes.width, sizes.hidden),
                "down_proj": linear(sizes.hidden, sizes.width),
            }
        )
        self.input_layernorm = RmsNorm(sizes.width)
        self.post_attention_layernorm = RmsNorm(sizes.width)


class Transformers(nn.Module):
    """model.embed_tokens, model.layers.N, model.norm, lm_head."""

    def __init__(self, depth: int, sizes: Sizes = SIZES, rotary: bool = False) -> None:
        super().__init__()
        self.model = nn.Sequential()
        self.model.add_module("embed_tokens", nn.Embedding(sizes.vocabulary, sizes.width))
        self.model.add_module("layers", nn.Sequential(*(TransformersLayer(sizes, rotary) for _ in range(depth))))
        self.model.add_module("norm", RmsNorm(sizes.width))
        self.lm_head = linear(sizes.width, sizes.vocabulary)

    def forward(self, ids: Tensor) -> Any:
        return self.lm_head(self.model(ids))


class MetaLayer(GatedLayer):
    """attention.wq ...; feed_forward.w1 is the gate, w2 goes down, w3 goes up."""

    NAMES = (
        "attention.wq", "attention.wk", "attention.wv", "attention.wo",
        "feed_forward.w1", "feed_forward.w3", "feed_forward.w2", "attention_norm", "ffn_norm",
    )  # fmt: skip

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.attention = nn.ModuleDict(
            {
                "wq": linear(sizes.width, sizes.width),
                "wk": linear(sizes.width, sizes.keys),
                "wv": linear(sizes.width, sizes.keys),
                "wo": linear(sizes.width, sizes.width),
            }
        )
        self.feed_forward = nn.ModuleDict(
            {
                "w1": linear(sizes.width, sizes.hidden),
                "w2": linear(sizes.hidden, sizes.width),
                "w3": linear(sizes.width, sizes.hidden),
            }
        )
        self.attention_norm = RmsNorm(sizes.width)
        self.ffn_norm = RmsNorm(sizes.width)


class Meta(nn.Module):
    """tok_embeddings, layers.N, norm, output."""

    def __init__(self, depth: int, sizes: Sizes = SIZES) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.Sequential(*(MetaLayer(sizes) for _ in range(depth)))
        self.norm = RmsNorm(sizes.width)
        self.output = linear(sizes.width, sizes.vocabulary)

    def forward(self, ids: Tensor) -> Any:
        return self.output(self.norm(self.layers(self.tok_embeddings(ids))))


class TorchtuneLayer(GatedLayer):
    """sa_norm.scale and mlp_norm.scale; mlp.w1, w2, w3 as Meta has them."""

    NAMES = (
        "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.output_proj",
        "mlp.w1", "mlp.w3", "mlp.w2", "sa_norm", "mlp_norm",
    )  # fmt: skip

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.attn = nn.ModuleDict(
            {
                "q_proj": linear(sizes.width, sizes.width),
                "k_proj": linear(sizes.width, sizes.keys),
                "v_proj": linear(sizes.width, sizes.keys),
                "output_proj": linear(sizes.width, sizes.width),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "w1": linear(sizes.width, sizes.hidden),
                "w2": linear(sizes.hidden, sizes.width),
                "w3": linear(sizes.width, sizes.hidden),
            }
        )
        self.sa_norm = RmsNorm(sizes.width, "scale")
        self.mlp_norm = RmsNorm(sizes.width, "scale")


class Torchtune(nn.Module):
    """tok_embeddings, layers.N, norm.scale, output."""

    def __init__(self, depth: int, sizes: Sizes = SIZES) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.Sequential(*(TorchtuneLayer(sizes) for _ in range(depth)))
        self.norm = RmsNorm(sizes.width, "scale")
        self.output = linear(sizes.width, sizes.vocabulary)

    def forward(self, ids: Tensor) -> Any:
        return self.output(self.norm(self.layers(self.tok_embeddings(ids))))


class LitBlock(nn.Module):
    """norm_1, attn.attn (queries, keys and values in one), attn.proj, norm_2, mlp.fc_1, mlp.fc_2, mlp.proj."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = RmsNorm()
        self.attn = nn.ModuleDict({"attn": linear(WIDTH, 3 * WIDTH), "proj": linear(WIDTH, WIDTH)})
        self.norm_2 = RmsNorm()
        self.mlp = nn.ModuleDict(
            {"fc_1": linear(WIDTH, HIDDEN), "fc_2": linear(WIDTH, HIDDEN), "proj": linear(HIDDEN, WIDTH)}
        )

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.attn["attn"](self.norm_1(x)).chunk(3, -1)
        x = x + self.attn["proj"](attend(q, k, v, HEADS, causal=True))
        y = self.norm_2(x)
        return x + self.mlp["proj"](functional.silu(self.mlp["fc_1"](y)) * self.mlp["fc_2"](y))


class LitGpt(nn.Module):
    """lm_head first, then transformer.wte, transformer.h.N, transformer.ln_f."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.lm_head = linear(WIDTH, VOCABULARY)
        self.transformer = nn.Sequential()
        self.transformer.add_module("wte", nn.Embedding(VOCABULARY, WIDTH))
        self.transformer.add_module("h", nn.Sequential(*(LitBlock() for _ in range(depth))))
        self.transformer.add_module("ln_f", RmsNorm())

    def forward(self, ids: Tensor) -> Any:
        return self.lm_head(self.transformer(ids))


LLAMA = Family(
    "LLaMA",
    (
        Style("transformers", Transformers),
        Style("transformers, first", lambda depth: Transformers(depth, rotary=True)),
        Style("Meta", Meta),
        Style("torchtune", Torchtune),
        Style("LitGPT", LitGpt, layout="fused"),
    ),
    texts,
    fused={3 * WIDTH: 3},
)

GROUPED = Family(
    "LLaMA, grouped keys",
    (
        Style("transformers", lambda depth: Transformers(depth, SHARING)),
        Style("Meta", lambda depth: Meta(depth, SHARING)),
        Style("torchtune", lambda depth: Torchtune(depth, SHARING)),
    ),
    texts,
)
