"""CLIP: a text and an image encoder of equal width, so that every layer of one fits the other."""

from __future__ import annotations

from typing import Any

import torch
from architectures.attention import attend
from architectures.family import Family, Style, noise, tokens
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 40
LENGTH = 8
WIDTH = 16
HEADS = 2
HIDDEN = 40
SHARED = 12
PATCH = 4
PATCHES = 16


def patches() -> nn.Conv2d:
    return nn.Conv2d(3, WIDTH, PATCH, PATCH, bias=False)


def in_a_row(x: Tensor, first: Tensor) -> Tensor:
    """Patches [batch, width, rows, columns] as [batch, 1 + patches, width], `first` before them."""
    x = x.flatten(2).transpose(1, 2)
    return torch.cat([first.expand(len(x), 1, -1), x], 1)


class OpenAiBlock(nn.Module):
    """attn.in_proj_weight, ln_1, mlp.c_fc, mlp.c_proj, ln_2, in this order."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_zero_attn=True)
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential()
        self.mlp.add_module("c_fc", nn.Linear(WIDTH, HIDDEN))
        self.mlp.add_module("gelu", nn.GELU())
        self.mlp.add_module("c_proj", nn.Linear(HIDDEN, WIDTH))
        self.ln_2 = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=True)[0]
        return x + self.mlp(self.ln_2(x))


def resblocks(depth: int) -> nn.Sequential:
    found = nn.Sequential()
    found.add_module("resblocks", nn.Sequential(*(OpenAiBlock() for _ in range(depth))))
    return found


class OpenAiVisual(nn.Module):
    """class_embedding, positional_embedding, proj, conv1, ln_pre, transformer.resblocks.N, ln_post."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.zeros(WIDTH))
        self.positional_embedding = nn.Parameter(torch.zeros(PATCHES + 1, WIDTH))
        self.proj = nn.Parameter(torch.zeros(WIDTH, SHARED))
        self.conv1 = patches()
        self.ln_pre = nn.LayerNorm(WIDTH)
        self.transformer = resblocks(depth)
        self.ln_post = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Any:
        x = in_a_row(self.conv1(x), self.class_embedding) + self.positional_embedding
        return self.ln_post(self.transformer(self.ln_pre(x))[:, 0]) @ self.proj


class OpenAi(nn.Module):
    """The text encoder's names at the top, the image encoder's under visual."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.positional_embedding = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.text_projection = nn.Parameter(torch.zeros(WIDTH, SHARED))
        self.logit_scale = nn.Parameter(torch.zeros(()))
        self.visual = OpenAiVisual(depth)
        self.transformer = resblocks(depth)
        self.token_embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.ln_final = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, pixels: Tensor) -> Any:
        x = self.transformer(self.token_embedding(ids) + self.positional_embedding)
        text = self.ln_final(x)[:, -1] @ self.text_projection
        return text * self.logit_scale.exp(), self.visual(pixels)


class OpenClipText(nn.Module):
    """The text encoder as a module of its own."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.positional_embedding = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.text_projection = nn.Parameter(torch.zeros(WIDTH, SHARED))
        self.token_embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = resblocks(depth)
        self.ln_final = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Any:
        x = self.transformer(self.token_embedding(ids) + self.positional_embedding)
        return self.ln_final(x)[:, -1] @ self.text_projection


class OpenClip(nn.Module):
    """logit_scale, visual, text."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.zeros(()))
        self.visual = OpenAiVisual(depth)
        self.text = OpenClipText(depth)

    def forward(self, ids: Tensor, pixels: Tensor) -> Any:
        return self.text(ids) * self.logit_scale.exp(), self.visual(pixels)


class TransformersLayer(nn.Module):
    """self_attn with k_proj, v_proj, q_proj, out_proj; layer_norm1, mlp.fc1, mlp.fc2, layer_norm2."""

    def __init__(self) -> None:
        super().__init__()
        names = ("k_proj", "v_proj", "q_proj", "out_proj")
        self.self_attn = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})
        self.layer_norm1 = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(WIDTH, HIDDEN), "fc2": nn.Linear(HIDDEN, WIDTH)})
        self.layer_norm2 = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = self.layer_norm1(x)
        q, k, v = (self.self_attn[f"{letter}_proj"](y) for letter in "qkv")
        x = x + self.self_attn["out_proj"](attend(q, k, v, HEADS))
        return x + self.mlp["fc2"](functional.gelu(self.mlp["fc1"](self.layer_norm2(x))))


def encoder(depth: int) -> nn.Sequential:
    found = nn.Sequential()
    found.add_module("layers", nn.Sequential(*(TransformersLayer() for _ in range(depth))))
    return found


class TransformersVision(nn.Module):
    """class_embedding, patch_embedding, position_embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.zeros(WIDTH))
        self.patch_embedding = patches()
        self.position_embedding = nn.Embedding(PATCHES + 1, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return in_a_row(self.patch_embedding(x), self.class_embedding) + self.position_embedding.weight


class Transformers(nn.Module):
    """logit_scale, text_model, vision_model (with its pre_layrnorm), visual_projection, text_projection."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.zeros(()))
        names = {"token_embedding": VOCABULARY, "position_embedding": LENGTH}
        self.text_model = nn.ModuleDict(
            {
                "embeddings": nn.ModuleDict({name: nn.Embedding(size, WIDTH) for name, size in names.items()}),
                "encoder": encoder(depth),
                "final_layer_norm": nn.LayerNorm(WIDTH),
            }
        )
        self.vision_model = nn.Sequential()
        self.vision_model.add_module("embeddings", TransformersVision())
        self.vision_model.add_module("pre_layrnorm", nn.LayerNorm(WIDTH))
        self.vision_model.add_module("encoder", encoder(depth))
        self.vision_model.add_module("post_layernorm", nn.LayerNorm(WIDTH))
        self.visual_projection = nn.Linear(WIDTH, SHARED, bias=False)
        self.text_projection = nn.Linear(WIDTH, SHARED, bias=False)

    def forward(self, ids: Tensor, pixels: Tensor) -> Any:
        words, places = self.get_submodule("text_model.embeddings").children()
        x = self.text_model["encoder"](words(ids) + places(torch.arange(LENGTH)))
        text = self.text_projection(self.text_model["final_layer_norm"](x)[:, -1])
        return text * self.logit_scale.exp(), self.visual_projection(self.vision_model(pixels)[:, 0])


class Tower(nn.Module):
    """Half of a home-grown model: blocks.N.attn.q, .k, .v, .o, .ln1, .ln2, .mlp, then norm and proj."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(TowerBlock() for _ in range(depth)))
        self.norm = nn.LayerNorm(WIDTH)
        self.proj = nn.Linear(WIDTH, SHARED, bias=False)

    def forward(self, x: Tensor, place: int) -> Any:
        return self.proj(self.norm(self.blocks(x)[:, place]))


class TowerBlock(nn.Module):
    """ln1, attn, ln2, mlp.0, mlp.2."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(WIDTH)
        self.attn = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "qkvo"})
        self.ln2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Any:
        y = self.ln1(x)
        q, k, v = (self.attn[letter](y) for letter in "qkv")
        x = x + self.attn["o"](attend(q, k, v, HEADS))
        return x + self.mlp(self.ln2(x))


class HomeGrown(nn.Module):
    """image_encoder before text_encoder, and temperature."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.zeros(()))
        self.image_encoder = Tower(depth)
        self.image_encoder.cls = nn.Parameter(torch.zeros(WIDTH))
        self.image_encoder.patch = patches()
        self.image_encoder.pos = nn.Embedding(PATCHES + 1, WIDTH)
        self.image_encoder.norm_in = nn.LayerNorm(WIDTH)
        self.text_encoder = Tower(depth)
        self.text_encoder.tok = nn.Embedding(VOCABULARY, WIDTH)
        self.text_encoder.pos = nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids: Tensor, pixels: Tensor) -> Any:
        row = in_a_row(self.get_submodule("image_encoder.patch")(pixels), self.get_parameter("image_encoder.cls"))
        image = self.get_submodule("image_encoder.norm_in")(row + self.get_parameter("image_encoder.pos.weight"))
        words = self.get_submodule("text_encoder.tok")(ids) + self.get_parameter("text_encoder.pos.weight")
        return self.text_encoder(words, -1) * self.temperature.exp(), self.image_encoder(image, 0)


CLIP = Family(
    "CLIP",
    (
        Style("OpenAI", OpenAi, layout="fused"),
        Style("OpenCLIP", OpenClip, layout="fused"),
        Style("transformers", Transformers),
        Style("home-grown", HomeGrown),
    ),
    lambda: (tokens(2, LENGTH, VOCABULARY), noise(2, 3, 16, 16)),
    fused={3 * WIDTH: 3},
)
