"""Vision transformers, with and without a bias of queries, keys and values. 3x16x16 images, 10 classes."""

from __future__ import annotations

from typing import Any

import torch
from architectures.attention import attend
from architectures.family import Family, Style, noise
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 16
HEADS = 2
HIDDEN = 40
PATCH = 4
PATCHES = 16
CLASSES = 10


def patches() -> nn.Conv2d:
    return nn.Conv2d(3, WIDTH, PATCH, PATCH)


def sequence(x: Tensor, first: Tensor, places: Tensor) -> Tensor:
    """Patches [batch, width, rows, columns] in a row, `first` before them, `places` added."""
    x = x.flatten(2).transpose(1, 2)
    return torch.cat([first.expand(len(x), -1, -1), x], 1) + places


def token() -> nn.Parameter:
    return nn.Parameter(torch.zeros(1, 1, WIDTH))


def places() -> nn.Parameter:
    return nn.Parameter(torch.zeros(1, PATCHES + 1, WIDTH))


class TimmAttention(nn.Module):
    """qkv and proj."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.proj(attend(q, k, v, HEADS))


class TimmBlock(nn.Module):
    """norm1, attn, norm2, mlp.fc1, mlp.fc2."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attn = TimmAttention(bias)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(WIDTH, HIDDEN), "fc2": nn.Linear(HIDDEN, WIDTH)})

    def forward(self, x: Tensor) -> Any:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp["fc2"](functional.gelu(self.mlp["fc1"](self.norm2(x))))


class Timm(nn.Module):
    """cls_token, pos_embed, patch_embed.proj, blocks.N, norm, head."""

    def __init__(self, depth: int, bias: bool = True) -> None:
        super().__init__()
        self.cls_token = token()
        self.pos_embed = places()
        self.patch_embed = nn.ModuleDict({"proj": patches()})
        self.blocks = nn.Sequential(*(TimmBlock(bias) for _ in range(depth)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        x = sequence(self.patch_embed["proj"](x), self.cls_token, self.pos_embed)
        return self.head(self.norm(self.blocks(x))[:, 0])


class TorchvisionBlock(nn.Module):
    """ln_1, self_attention.in_proj_weight, ln_2, mlp.0, mlp.3."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(WIDTH)
        self.self_attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_zero_attn=True)
        self.ln_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Dropout(), nn.Linear(HIDDEN, WIDTH), nn.Dropout()
        )

    def forward(self, x: Tensor) -> Any:
        y = self.ln_1(x)
        # Where it gives no weights, torch takes a path that leaves out the key of zeros.
        x = x + self.self_attention(y, y, y, need_weights=True)[0]
        return x + self.mlp(self.ln_2(x))


class TorchvisionEncoder(nn.Module):
    """pos_embedding, layers.encoder_layer_N, ln."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.pos_embedding = places()
        self.layers = nn.Sequential()
        for layer in range(depth):
            self.layers.add_module(f"encoder_layer_{layer}", TorchvisionBlock())
        self.ln = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, first: Tensor) -> Any:
        return self.ln(self.layers(sequence(x, first, self.pos_embedding)))


class Torchvision(nn.Module):
    """class_token, conv_proj, encoder, heads.head."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.class_token = token()
        self.conv_proj = patches()
        self.encoder = TorchvisionEncoder(depth)
        self.heads = nn.ModuleDict({"head": nn.Linear(WIDTH, CLASSES)})

    def forward(self, x: Tensor) -> Any:
        return self.heads["head"](self.encoder(self.conv_proj(x), self.class_token)[:, 0])


class OpenMMLabBlock(nn.Module):
    """ln1, attn.qkv, attn.proj, ln2, ffn.layers.0.0, ffn.layers.1."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(WIDTH)
        self.attn = TimmAttention(bias=True)
        self.ln2 = nn.LayerNorm(WIDTH)
        first = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Dropout())
        self.ffn = nn.ModuleDict({"layers": nn.Sequential(first, nn.Linear(HIDDEN, WIDTH), nn.Dropout())})

    def forward(self, x: Tensor) -> Any:
        x = x + self.attn(self.ln1(x))
        return x + self.ffn["layers"](self.ln2(x))


class OpenMMLabBackbone(nn.Module):
    """cls_token, pos_embed, patch_embed.projection, layers.N, and the last norm as ln1."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.cls_token = token()
        self.pos_embed = places()
        self.patch_embed = nn.ModuleDict({"projection": patches()})
        self.layers = nn.Sequential(*(OpenMMLabBlock() for _ in range(depth)))
        self.ln1 = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.ln1(self.layers(sequence(self.patch_embed["projection"](x), self.cls_token, self.pos_embed)))


class OpenMMLab(nn.Module):
    """backbone, head.layers.head."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.backbone = OpenMMLabBackbone(depth)
        self.head = nn.Sequential()
        self.head.add_module("layers", nn.Sequential())
        self.head[0].add_module("head", nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.backbone(x)[:, 0])


class TransformersAttention(nn.Module):
    """attention.query, attention.key, attention.value, output.dense."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("query", "key", "value")})
        self.output = nn.ModuleDict({"dense": nn.Linear(WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Any:
        q, k, v = (self.attention[name](x) for name in ("query", "key", "value"))
        return self.output["dense"](attend(q, k, v, HEADS))


class TransformersEmbeddings(nn.Module):
    """cls_token, position_embeddings, patch_embeddings.projection."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = token()
        self.position_embeddings = places()
        self.patch_embeddings = nn.ModuleDict({"projection": patches()})

    def forward(self, x: Tensor) -> Any:
        return sequence(self.patch_embeddings["projection"](x), self.cls_token, self.position_embeddings)


class TransformersLayer(nn.Module):
    """attention, intermediate.dense, output.dense, and both norms at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = TransformersAttention()
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(WIDTH, HIDDEN)})
        self.output = nn.ModuleDict({"dense": nn.Linear(HIDDEN, WIDTH)})
        self.layernorm_before = nn.LayerNorm(WIDTH)
        self.layernorm_after = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(self.layernorm_before(x))
        hidden = functional.gelu(self.intermediate["dense"](self.layernorm_after(x)))
        return x + self.output["dense"](hidden)


class DinoLayer(nn.Module):
    """norm1, attention.attention.query, norm2, mlp.fc1, mlp.fc2, as transformers has DINOv2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = TransformersAttention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(WIDTH, HIDDEN), "fc2": nn.Linear(HIDDEN, WIDTH)})

    def forward(self, x: Tensor) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp["fc2"](functional.gelu(self.mlp["fc1"](self.norm2(x))))


class Transformers(nn.Module):
    """vit.embeddings, vit.encoder.layer.N, vit.layernorm, classifier; or with another layer and base name."""

    def __init__(self, depth: int, base: str = "vit", layer: type[nn.Module] = TransformersLayer) -> None:
        super().__init__()
        self.base = base
        encoder = nn.Sequential()
        encoder.add_module("layer", nn.Sequential(*(layer() for _ in range(depth))))
        model = nn.Sequential()
        model.add_module("embeddings", TransformersEmbeddings())
        model.add_module("encoder", encoder)
        model.add_module("layernorm", nn.LayerNorm(WIDTH))
        self.add_module(base, model)
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.classifier(self.get_submodule(self.base)(x)[:, 0])


class SeparateBlock(nn.Module):
    """attn.w_v, w_k, w_q and w_o, all alike in shape, in this order; the norms are named by what they come before."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("w_v", "w_k", "w_q", "w_o")})
        self.attn_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))
        self.mlp_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = self.attn_norm(x)
        q, k, v = (self.attn[f"w_{letter}"](y) for letter in "qkv")
        x = x + self.attn["w_o"](attend(q, k, v, HEADS))
        return x + self.mlp(self.mlp_norm(x))


class HomeGrown(nn.Module):
    """cls, pos, stem, layers.N, final_norm, fc."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem = patches()
        self.pos = places()
        self.cls = token()
        self.layers = nn.Sequential(*(SeparateBlock() for _ in range(depth)))
        self.final_norm = nn.LayerNorm(WIDTH)
        self.fc = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.final_norm(self.layers(sequence(self.stem(x), self.cls, self.pos)))[:, 0])


class LucidAttention(nn.Module):
    """norm, to_qkv without bias, to_out.0."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.to_out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout())

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.to_qkv(self.norm(x)).chunk(3, -1)
        return self.to_out(attend(q, k, v, HEADS))


class LucidFeedForward(nn.Module):
    """net.0 (the norm), net.1, net.4."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Dropout(), nn.Linear(HIDDEN, WIDTH)
        )

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


class Lucid(nn.Module):
    """pos_embedding, cls_token, to_patch_embedding.0, transformer.norm before its layers.N.0 and .1, mlp_head."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.pos_embedding = places()
        self.cls_token = token()
        self.to_patch_embedding = nn.Sequential(patches())
        layers = nn.ModuleList(nn.ModuleList([LucidAttention(), LucidFeedForward()]) for _ in range(depth))
        self.transformer = nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "layers": layers})
        self.mlp_head = nn.Linear(WIDTH, CLASSES)
        self.depth = depth

    def forward(self, x: Tensor) -> Any:
        x = sequence(self.to_patch_embedding(x), self.cls_token, self.pos_embedding)
        for layer in range(self.depth):
            x = x + self.get_submodule(f"transformer.layers.{layer}.0")(x)
            x = x + self.get_submodule(f"transformer.layers.{layer}.1")(x)
        return self.mlp_head(self.transformer["norm"](x)[:, 0])


class Numbered(nn.Module):
    """Two lists side by side: attns.N and mlps.N, each with its norm outside, in norms.2N and norms.2N+1."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.class_embed = token()
        self.position = places()
        self.patchify = patches()
        self.attns = nn.ModuleList(TimmAttention(bias=False) for _ in range(depth))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(depth)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2 * depth))
        self.last_norm = nn.LayerNorm(WIDTH)
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        x = sequence(self.patchify(x), self.class_embed, self.position)
        for layer, (attention, mlp) in enumerate(zip(self.attns, self.mlps, strict=True)):
            x = x + attention(self.norms[2 * layer](x))
            x = x + mlp(self.norms[2 * layer + 1](x))
        return self.classifier(self.last_norm(x)[:, 0])


def image() -> tuple[Tensor, ...]:
    return (noise(2, 3, 16, 16),)


VIT = Family(
    "ViT",
    (
        Style("timm", Timm, layout="fused"),
        Style("torchvision", Torchvision, layout="fused"),
        Style("OpenMMLab", OpenMMLab, layout="fused"),
        Style("transformers", Transformers),
        Style("transformers, DINOv2", lambda depth: Transformers(depth, "dinov2", DinoLayer)),
        Style("home-grown", HomeGrown),
    ),
    image,
    fused={3 * WIDTH: 3},
)

VIT_WITHOUT_BIAS = Family(
    "ViT, qkv without bias",
    (
        Style("timm", lambda depth: Timm(depth, bias=False)),
        Style("lucidrains", Lucid),
        Style("two lists", Numbered),
    ),
    image,
)
