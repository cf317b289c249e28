"""Models of other libraries by name, and what they are run on; for `libraries`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

REGNETS = {
    "x_002": ([24, 56, 152, 368], [1, 1, 4, 7], 8),
    "y_002": ([24, 56, 152, 368], [1, 1, 4, 7], 8),
    "x_004": ([32, 64, 160, 384], [1, 2, 7, 12], 16),
    "y_004": ([48, 104, 208, 440], [1, 3, 6, 6], 8),
    "x_006": ([48, 96, 240, 528], [1, 3, 5, 7], 24),
    "y_006": ([48, 112, 256, 608], [1, 3, 7, 4], 16),
}
DEPTHS = {"resnet18": [2, 2, 2, 2], "resnet26": [2, 2, 2, 2], "resnet34": [3, 4, 6, 3], "resnet50": [3, 4, 6, 3],
          "resnet101": [3, 4, 23, 3]}  # fmt: skip
BASIC = ("resnet18", "resnet34")

TOKENS = ("bert", "roberta", "camembert", "llama", "llama, grouped", "gpt-neox", "falcon")
"""Names of models that read numbers of tokens."""


class Only(nn.Module):
    """A model of which one of its outputs is asked, called as its library wants it."""

    def __init__(self, model: nn.Module, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.__dict__.update(inner=model, call=call)
        for name, module in model.named_children():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Any:
        return self.__dict__["call"](self.__dict__["inner"], x)


def logits(model: nn.Module) -> nn.Module:
    return Only(model, lambda inner, x: inner(x).logits)


def transformers_model(name: str) -> nn.Module:
    library = import_module("transformers")
    labels = {"num_labels": 1000}
    if name.startswith("regnet"):
        sizes, depths, width = REGNETS[name[6:]]
        config = library.RegNetConfig(
            embedding_size=32, hidden_sizes=sizes, depths=depths, groups_width=width, layer_type=name[6], **labels
        )
        return logits(library.RegNetForImageClassification(config))
    if name in DEPTHS:
        depths, kind = DEPTHS[name], "basic" if name in BASIC else "bottleneck"
        grown = [64, 128, 256, 512] if kind == "basic" else [256, 512, 1024, 2048]
        config = library.ResNetConfig(depths=depths, hidden_sizes=grown, layer_type=kind, **labels)
        return logits(library.ResNetForImageClassification(config))
    if name.startswith("poolformer"):
        return logits(library.PoolFormerForImageClassification(library.PoolFormerConfig(**labels)))
    if name.startswith("convnext"):
        config = library.ConvNextConfig(depths=[2, 2, 6, 2], hidden_sizes=[48, 96, 192, 384], **labels)
        return logits(library.ConvNextForImageClassification(config))
    config = library.MobileNetV1Config(tf_padding=False, layer_norm_eps=1e-5, hidden_act="relu", num_labels=1000)
    return logits(library.MobileNetV1ForImageClassification(config))


def blocks(library: str, depth: int) -> nn.Module:
    """Transformer blocks of width 16, the norms first."""
    if library == "pytorch":
        layer = nn.TransformerEncoderLayer(16, 2, 64, norm_first=True, activation="gelu", batch_first=True)
        return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
    if library == "open_clip":
        made: nn.Module = import_module("open_clip.transformer").Transformer(16, depth, 2, 4.0)
        return made
    if library == "timm.Block":
        block = import_module("timm.models.vision_transformer").Block
        return nn.Sequential(*(block(16, 2, 4.0, qkv_bias=True) for _ in range(depth)))
    block = import_module("torchvision.models.vision_transformer").EncoderBlock
    return nn.Sequential(*(block(2, 16, 64, 0.0, 0.0) for _ in range(depth)))


SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "vocab_size": 99}  # fmt: skip
WIDTHS = {"hidden_width": 16, "intermediate_width": 32, "n_hidden_layers": 2, "n_pieces": 99}


def texts(name: str) -> nn.Module:
    """A small model of transformers that reads tokens, without a head."""
    library = import_module("transformers")
    sizes: dict[str, Any] = dict(SIZES)
    kind = {"llama": "Llama", "llama, grouped": "Llama", "bert": "Bert", "roberta": "Roberta", "camembert": "Camembert",
            "gpt-neox": "GPTNeoX", "falcon": "Falcon"}[name]  # fmt: skip
    if kind == "Llama":
        sizes["num_key_value_heads"] = 2 if "grouped" in name else 4
    if kind == "GPTNeoX":
        sizes["rotary_pct"] = 1.0
    if kind == "Falcon":
        sizes |= {"bias": False, "multi_query": True, "parallel_attn": True}
    plain = {"add_pooling_layer": False} if "ert" in name else {}
    model = getattr(library, f"{kind}Model")(getattr(library, f"{kind}Config")(**sizes), **plain)
    return Only(model, lambda inner, x: inner(x).last_hidden_state)


def curated(name: str) -> nn.Module:
    """The same of curated-transformers."""
    library = import_module("curated_transformers.models")
    mask = import_module("curated_transformers.layers.attention").AttentionMask
    sizes: dict[str, Any] = {**WIDTHS, "dtype": torch.float32}
    if "ert" in name:
        kind = {"bert": "BERT", "roberta": "RoBERTa", "camembert": "RoBERTa"}[name]
        sizes |= {"n_attention_heads": 4, "embedding_width": 16}
        sizes |= {"n_positions": 512, "n_types": 2, "layer_norm_eps": 1e-12} if kind == "RoBERTa" else {}
        model = getattr(library, f"{kind}Encoder")(getattr(library, f"{kind}Config")(**sizes))
    else:
        kind = {"gpt-neox": "GPTNeoX", "falcon": "Falcon"}.get(name, "Llama")
        if kind == "GPTNeoX":
            sizes |= {"n_attention_heads": 4, "rotary_embedding_fraction": 1.0}
        else:
            few = 2 if "grouped" in name else 1 if kind == "Falcon" else 4
            sizes |= {"n_query_heads": 4, "n_key_value_heads": few, "rotary_embedding_fraction": 1.0}
        if kind == "Falcon":
            del sizes["intermediate_width"]
        elif kind == "Llama":
            silu = import_module("curated_transformers.layers.activations").Activation.SiLU
            sizes |= {"activation": silu, "rms_norm_eps": 1e-6}
        model = getattr(library, f"{kind}Decoder")(getattr(library, f"{kind}Config")(**sizes))

    def call(inner: nn.Module, x: Tensor) -> Any:
        return inner(x, mask(torch.ones_like(x, dtype=torch.bool))).all_outputs[-1]

    return Only(model, call)


def monai(name: str) -> nn.Module:
    nets = import_module("monai.networks.nets")
    if name.startswith("densenet"):
        made: nn.Module = getattr(nets, f"DenseNet{name[8:]}")(2, 3, 1000)
    else:
        made = nets.EfficientNetBN(name, pretrained=False, spatial_dims=2, num_classes=1000)
    return made


def build(library: str, name: str) -> nn.Module:
    if name.isdecimal():
        return blocks(library, int(name))
    if name in TOKENS:
        return texts(name) if library == "transformers" else curated(name)
    if library == "transformers":
        return transformers_model(name)
    makers: dict[str, Callable[..., nn.Module]] = {
        "timm": lambda: import_module("timm").create_model(name, pretrained=False),
        "torchvision": lambda: import_module("torchvision").models.get_model(name, weights=None),
        "pytorchcv": lambda: import_module("pytorchcv.model_provider").get_model(name, pretrained=False),
        "pretrainedmodels": lambda: getattr(import_module("pretrainedmodels"), name)(pretrained=None),
        "efficientnet_pytorch": lambda: import_module("efficientnet_pytorch").EfficientNet.from_name(name),
        "resnest": lambda: getattr(import_module("resnest.torch"), name)(pretrained=False),
        "monai": lambda: monai(name),
    }
    return makers[library]()


def inputs(name: str, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    if name in TOKENS:
        return torch.randint(2, 90, (2, 7), generator=generator)
    return torch.randn((2, 5, 16) if name.isdecimal() else (1, 3, size, size), generator=generator)
