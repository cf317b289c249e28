"""The rules files of the documentation on models of real libraries, where these are installed: equal outputs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.docs import page

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}

SINCE_5 = (
    ("encoder.layer.{n}.attention.attention.{query,key,value}", "layers.{n}.attention.{q_proj,k_proj,v_proj}"),
    ("encoder.layer.{n}.attention.output.dense", "layers.{n}.attention.o_proj"),
    ("encoder.layer.{n}.intermediate.dense", "layers.{n}.mlp.fc1"),
    ("encoder.layer.{n}.output.dense", "layers.{n}.mlp.fc2"),
    ("vit.encoder.layer.", "vit.layers."),
)
"""What transformers 5 calls the modules of a ViT in memory; its files have the names that the page has."""


def library(name: str) -> Any:
    try:
        return pytest.importorskip(name)
    except RuntimeError as error:  # built for another torch
        pytest.skip(str(error))


def vit() -> Any:
    found = library("transformers")
    config = found.ViTConfig(**SIZES, image_size=32, patch_size=8, num_labels=7, layer_norm_eps=1e-6)
    return found.ViTForImageClassification(config)


def timm() -> Any:
    kind = library("timm").models.vision_transformer.VisionTransformer
    return kind(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=7)


def torchvision() -> Any:
    return library("torchvision").models.VisionTransformer(32, 8, 2, 4, 32, 128, num_classes=7)


@pytest.mark.parametrize("source", [timm, torchvision])
def test_a_vit_becomes_that_of_transformers(tmp_path: Path, source: Callable[[], Any]) -> None:
    one, other = source().eval(), vit().eval()
    torch.manual_seed(0)
    for parameter in one.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    title = f"ViT of {source.__name__} to transformers"
    found = re.search(rf"^## {title}\n.*?^```rules\n(.*?)^```", page("rules"), re.MULTILINE | re.DOTALL)
    assert found is not None
    text = found[1]
    if any(name.startswith("vit.layers.") for name in other.state_dict()):
        for old, new in SINCE_5:
            text = text.replace(old, new)
    (tmp_path / "rules.txt").write_text(text)
    torch.save(one.state_dict(), tmp_path / "one.pth")
    ckptfix.rename(tmp_path / "one.pth", tmp_path / "other.pth", rules=tmp_path / "rules.txt")
    other.load_state_dict(torch.load(tmp_path / "other.pth", weights_only=True))
    image = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(one(image), other(image).logits, atol=1e-5)
    ckptfix.rename(tmp_path / "other.pth", tmp_path / "back.pth", rules=tmp_path / "rules.txt", reverse=True)
    back = torch.load(tmp_path / "back.pth", weights_only=True)
    assert all(torch.equal(back[name], value) for name, value in one.state_dict().items())
