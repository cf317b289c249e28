"""``match`` where one library has in one piece what another has in parts: weights converted must give equal outputs.

    python tests/real/operations.py [--only TEXT]

transformers, timm, torchvision, open_clip, litgpt and whisper are looked for, and what is not installed is left out;
nanoGPT and Meta's LLaMA, which are files and no libraries, are written down here as small modules. Every pair goes both
ways, and the round trip has to give the bytes that there were.

Prints a row for each ordered pair. Exit status: 0 no answer is wrong, 1 one is.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

import ckptfix
from ckptfix.errors import CkptfixError

WORDS, WIDTH, HEADS, KV, LAYERS, HIDDEN, EXPERTS = 96, 48, 4, 2, 3, 80, 4
IDS = torch.arange(9).reshape(1, 9) * 7 % 90 + 1
IMAGE = torch.linspace(-2, 2, 3 * 64 * 64).reshape(1, 3, 64, 64).sin()
SAME = 1e-3
"""Outputs of equal models in float32 differ by less, as part of the largest one."""


class NanoBlock(nn.Module):
    """A block of nanoGPT, whose projections are `Linear` under the names of GPT-2's."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(WIDTH, 3 * WIDTH), "c_proj": nn.Linear(WIDTH, WIDTH)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.attn["c_attn"](self.ln_1(x)).split(WIDTH, 2)
        ]
        attended = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.attn["c_proj"](attended.transpose(1, 2).flatten(2))
        hidden = functional.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        return x + torch.as_tensor(self.mlp["c_proj"](hidden))


class Nano(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, WIDTH),
                "wpe": nn.Embedding(32, WIDTH),
                "h": nn.ModuleList([NanoBlock() for _ in range(LAYERS)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.transformer["wte"](ids) + self.transformer["wpe"](torch.arange(ids.shape[1]))
        for block in cast(nn.ModuleList, self.transformer["h"]):
            x = block(x)
        return torch.as_tensor(self.lm_head(self.transformer["ln_f"](x)))


class FeedForward(nn.Module):
    """Meta's, which is an expert of Mistral's too."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.w2(functional.silu(self.w1(x)) * self.w3(x)))


class Experts(nn.Module):
    """Two of the experts for each token, weighed by a softmax over the two: Mixtral's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(FeedForward() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.topk(self.gate(x), 2)
        weights = torch.zeros(*x.shape[:-1], EXPERTS).scatter(-1, chosen.indices, chosen.values.softmax(-1))
        return torch.stack([expert(x) for expert in self.experts], -1).mul(weights.unsqueeze(-2)).sum(-1)


class MetaBlock(nn.Module):
    """A block of Meta's LLaMA, which turns neighbours of a head."""

    def __init__(self, experts: bool) -> None:
        super().__init__()
        narrow = WIDTH * KV // HEADS
        sizes = {"wq": (WIDTH, WIDTH), "wk": (WIDTH, narrow), "wv": (WIDTH, narrow), "wo": (WIDTH, WIDTH)}
        self.attention = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.feed_forward = Experts() if experts else FeedForward()
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(WIDTH, eps=1e-5) for _ in range(2))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        query, key, value = (
            self.attention[name](normed).unflatten(-1, (count, -1))
            for name, count in (("wq", HEADS), ("wk", KV), ("wv", KV))
        )
        query, key = (
            torch.view_as_real(torch.view_as_complex(part.unflatten(-1, (-1, 2))) * turns[None, :, None]).flatten(3)
            for part in (query, key)
        )
        key, value = (part.repeat_interleave(HEADS // KV, 2) for part in (key, value))
        heads = [part.transpose(1, 2) for part in (query, key, value)]
        attended = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.attention["wo"](attended.transpose(1, 2).flatten(2))
        return x + torch.as_tensor(self.feed_forward(self.ffn_norm(x)))


class Meta(nn.Module):
    def __init__(self, *, experts: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([MetaBlock(experts) for _ in range(LAYERS)])
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        size = WIDTH // HEADS
        angles = torch.outer(torch.arange(ids.shape[1]).float(), 10000 ** -(torch.arange(0, size, 2) / size))
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x, torch.polar(torch.ones_like(angles), angles))
        return torch.as_tensor(self.output(self.norm(x)))


class Encoder(nn.Module):
    """The layers of BERT as torch's own module."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(WORDS, WIDTH, padding_idx=0), nn.Embedding(512, WIDTH)
        self.token_type, self.norm = nn.Embedding(2, WIDTH), nn.LayerNorm(WIDTH, eps=1e-12)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, HIDDEN, 0.0, "gelu", layer_norm_eps=1e-12, batch_first=True
        )
        self.transformer = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.word(ids) + self.position(torch.arange(ids.shape[1])) + self.token_type(torch.zeros_like(ids))
        return torch.as_tensor(self.transformer(self.norm(x)))


@dataclass(frozen=True)
class Model:
    """One side of a pair.

    Attributes:
        build: makes it.
        run: gives its outputs.
        needs: libraries that it is of.
    """

    name: str
    build: Callable[[], Any]
    run: Callable[[Any], Tensor]
    needs: tuple[str, ...] = ()


def _logits(model: Any) -> Tensor:
    return torch.as_tensor(model(IDS).logits)


def _hf(name: str, config: str, **options: Any) -> Callable[[], Any]:
    def build() -> Any:
        library = import_module("transformers")
        return getattr(library, name)(getattr(library, config)(**options))

    return build


_DECODER = {
    "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "vocab_size": WORDS, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

_VIT = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": HIDDEN,
    "image_size": 64, "patch_size": 16, "num_labels": 7, "layer_norm_eps": 1e-6,
}  # fmt: skip


def _timm_vit() -> Any:
    return import_module("timm.models.vision_transformer").VisionTransformer(
        img_size=64, patch_size=16, embed_dim=WIDTH, depth=LAYERS, num_heads=HEADS, mlp_ratio=HIDDEN / WIDTH,
        num_classes=7,
    )  # fmt: skip


def _vision_vit() -> Any:
    return import_module("torchvision.models").VisionTransformer(64, 16, LAYERS, HEADS, WIDTH, HIDDEN, num_classes=7)


def _timm_convnext() -> Any:
    return import_module("timm.models.convnext").ConvNeXt(depths=(1, 1, 2, 1), dims=(16, 32, 48, 64), num_classes=7)


def _timm_swin() -> Any:
    return import_module("timm.models.swin_transformer").SwinTransformer(
        img_size=64, embed_dim=24, depths=(2, 2), num_heads=(2, 4), window_size=4, num_classes=7
    )


def _vision_swin() -> Any:
    return import_module("torchvision.models.swin_transformer").SwinTransformer(
        [4, 4], 24, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.0, num_classes=7
    )


def _open_clip() -> Any:
    library = import_module("open_clip.model")
    vision = library.CLIPVisionCfg(layers=2, width=64, head_width=16, patch_size=16, image_size=64)
    return library.CLIP(40, vision, library.CLIPTextCfg(16, WORDS, width=WIDTH, heads=HEADS, layers=2))


def _clip_config() -> dict[str, Any]:
    text = {
        "hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
        "vocab_size": WORDS, "max_position_embeddings": 16, "eos_token_id": 95, "hidden_act": "gelu",
    }  # fmt: skip
    vision = {
        "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "image_size": 64, "patch_size": 16, "hidden_act": "gelu",
    }  # fmt: skip
    return {"text_config": text, "vision_config": vision, "projection_dim": 40}


_TOKENS = torch.cat([torch.arange(1, 16), torch.tensor([95])])[None]


def _clip_outputs(image: str, text: str) -> Callable[[Any], Tensor]:
    def run(model: Any) -> Tensor:
        made = [getattr(model, image)(IMAGE), getattr(model, text)(_TOKENS)]
        return torch.cat([getattr(one, "pooler_output", one) for one in made], 1)

    return run


_SPEECH = torch.linspace(-2, 2, 80 * 100).reshape(1, 80, 100).sin()


def _whisper() -> Any:
    library = import_module("whisper.model")
    return library.Whisper(library.ModelDimensions(80, 50, WIDTH, HEADS, 2, WORDS, 16, WIDTH, HEADS, 2))


_WHISPER = {
    "vocab_size": WORDS, "num_mel_bins": 80, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 4 * WIDTH,
    "decoder_ffn_dim": 4 * WIDTH, "max_source_positions": 50, "max_target_positions": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "begin_suppress_tokens": None,
}  # fmt: skip


def _litgpt(kind: str = "LLaMAMLP", **options: Any) -> Any:
    config = import_module("litgpt.config").Config(
        block_size=32, n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, vocab_size=WORDS, padded_vocab_size=WORDS,
        n_query_groups=KV, rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm",
        mlp_class_name=kind, intermediate_size=HIDDEN, norm_eps=1e-5, **options,
    )  # fmt: skip
    return import_module("litgpt.model").GPT(config)


def _two(label: str, timm: str, vision: str) -> tuple[Model, ...]:
    """A network that timm and torchvision both have."""
    return (
        Model(
            f"{label}, timm",
            lambda: import_module("timm").create_model(timm, num_classes=7),
            _pixels,
            ("timm",),
        ),
        Model(
            f"{label}, torchvision",
            lambda: getattr(import_module("torchvision.models"), vision)(num_classes=7),
            _pixels,
            ("torchvision",),
        ),
    )


def _plain(model: Any) -> Tensor:
    return torch.as_tensor(model(IDS))


def _pixels(model: Any) -> Tensor:
    found = model(IMAGE)
    return torch.as_tensor(getattr(found, "logits", found))


GROUPS: tuple[tuple[Model, ...], ...] = (
    (
        Model("ViT, transformers", _hf("ViTForImageClassification", "ViTConfig", **_VIT), _pixels, ("transformers",)),
        Model("ViT, timm", _timm_vit, _pixels, ("timm",)),
        Model("ViT, torchvision", _vision_vit, _pixels, ("torchvision",)),
    ),
    (
        Model(
            "GPT-2, transformers",
            _hf("GPT2LMHeadModel", "GPT2Config", n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, vocab_size=WORDS,
                n_positions=32),
            _logits,
            ("transformers",),
        ),
        Model("GPT-2, nanoGPT", Nano, _plain),
    ),
    (
        Model("LLaMA, transformers", _hf("LlamaForCausalLM", "LlamaConfig", **_DECODER), _logits, ("transformers",)),
        Model("LLaMA, Meta", Meta, _plain),
    ),
    (
        Model("LLaMA, transformers", _hf("LlamaForCausalLM", "LlamaConfig", **_DECODER), _logits, ("transformers",)),
        Model("Phi-3, transformers", _hf("Phi3ForCausalLM", "Phi3Config", **_DECODER), _logits, ("transformers",)),
    ),
    (
        Model(
            "BERT, transformers",
            lambda: import_module("transformers").BertModel(
                import_module("transformers").BertConfig(
                    hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=HIDDEN,
                    vocab_size=WORDS,
                ),
                add_pooling_layer=False,
            ),
            lambda model: torch.as_tensor(model(IDS).last_hidden_state),
            ("transformers",),
        ),
        Model("BERT, nn.TransformerEncoder", Encoder, _plain),
    ),
    (
        Model(
            "CLIP, transformers",
            lambda: _hf("CLIPModel", "CLIPConfig", **_clip_config())(),
            _clip_outputs("get_image_features", "get_text_features"),
            ("transformers",),
        ),
        Model("CLIP, open_clip", _open_clip, _clip_outputs("encode_image", "encode_text"), ("open_clip",)),
    ),
    (
        Model(
            "ConvNeXt, transformers",
            _hf("ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[16, 32, 48, 64],
                depths=[1, 1, 2, 1], num_labels=7),
            _pixels,
            ("transformers",),
        ),
        Model("ConvNeXt, timm", _timm_convnext, _pixels, ("timm",)),
    ),
    (
        Model(
            "Swin, transformers",
            _hf("SwinForImageClassification", "SwinConfig", image_size=64, embed_dim=24, depths=[2, 2],
                num_heads=[2, 4], window_size=4, num_labels=7),
            _pixels,
            ("transformers",),
        ),
        Model("Swin, timm", _timm_swin, _pixels, ("timm",)),
        Model("Swin, torchvision", _vision_swin, _pixels, ("torchvision",)),
    ),
    (
        Model(
            "Whisper, transformers",
            _hf("WhisperForConditionalGeneration", "WhisperConfig", **_WHISPER),
            lambda model: torch.as_tensor(model(input_features=_SPEECH, decoder_input_ids=IDS).logits),
            ("transformers",),
        ),
        Model("Whisper, OpenAI", _whisper, lambda model: torch.as_tensor(model(_SPEECH, IDS)), ("whisper",)),
    ),
    (
        Model("LLaMA, transformers", _hf("LlamaForCausalLM", "LlamaConfig", **_DECODER), _logits, ("transformers",)),
        Model("LLaMA, LitGPT", _litgpt, _plain, ("litgpt",)),
    ),
    (
        Model(
            "Mixtral, transformers",
            _hf("MixtralForCausalLM", "MixtralConfig", num_local_experts=EXPERTS, rope_theta=10000.0, **_DECODER),
            _logits,
            ("transformers",),
        ),
        Model("Mixtral, Mistral", lambda: Meta(experts=True), _plain),
        Model(
            "Mixtral, LitGPT",
            lambda: _litgpt("LLaMAMoE", n_expert=EXPERTS, n_expert_per_token=2, moe_intermediate_size=HIDDEN),
            _plain,
            ("litgpt",),
        ),
    ),
    _two("EfficientNet-B0", "efficientnet_b0", "efficientnet_b0"),
    _two("MobileNetV2", "mobilenetv2_100", "mobilenet_v2"),
    _two("MNASNet", "mnasnet_100", "mnasnet1_0"),
)  # fmt: skip


def verdict(one: Model, other: Model, folder: Path) -> str:
    """``right``, ``wrong`` or ``refused``, and why."""
    torch.manual_seed(0)
    source, target = one.build().eval(), other.build().eval()
    for parameter in source.parameters():
        nn.init.normal_(parameter, std=0.05)
    names = [folder / name for name in ("source.pth", "target.pth", "made.pth", "back.pth")]
    torch.save(source.state_dict(), names[0])
    torch.save(target.state_dict(), names[1])
    asks = any(name in one.name + other.name for name in ("Meta", "Mistral"))
    heads, kv_heads = (HEADS, KV) if asks else (None, None)
    keeps = "nanoGPT" in one.name + other.name  # GPTBigCode has the same names, and other rows
    try:
        ckptfix.match(names[0], names[2], names[1], force=True, heads=heads, kv_heads=kv_heads, accept_ambiguous=keeps)
    except CkptfixError as error:
        return f"refused: {error.message}"
    target.load_state_dict(torch.load(names[2]), strict=False)
    with torch.no_grad():
        wanted, found = one.run(source), other.run(target)
    far = float((wanted - found).abs().max() / wanted.abs().max())
    if far > SAME:
        return f"wrong: outputs differ by {far:.2g} of the largest"
    try:
        ckptfix.match(names[2], names[3], names[0], force=True, heads=heads, kv_heads=kv_heads, accept_ambiguous=keeps)
    except CkptfixError as error:
        return f"right; back: refused: {error.message}"
    back = torch.load(names[3])
    kept = [name for name, value in source.state_dict().items() if name in back and torch.equal(back[name], value)]
    there = [name for name in source.state_dict() if name in back]
    return "right, and back again" if kept == there else "wrong: another tensor came back"


def pairs() -> Iterator[tuple[Model, Model]]:
    """Every ordered pair whose libraries are there."""
    for group in GROUPS:
        here = [model for model in group if all(find_spec(name) for name in model.needs)]
        yield from ((one, other) for one in here for other in here if one is not other)


def main() -> int:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", default="", help="pairs whose names hold this text")
    only = parser.parse_args().only
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for one, other in pairs():
            if only in one.name + other.name:
                said = verdict(one, other, Path(folder))
                wrong += said.startswith("wrong")
                print(f"{one.name} -> {other.name}: {said}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
