"""The rules files of the documentation, on small models of each architecture: equal outputs, and back bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import clip, transformer, vit
from architectures.attention import attend
from architectures.judge import outputs
from torch import Tensor, nn

import ckptfix
from ckptfix.docs import page
from ckptfix.names.operations import TABLE, Operation


def rules(title: str) -> str:
    """The rules file of the page that stands under a title."""
    found = re.search(rf"^## {re.escape(title)}\n.*?^```rules\n(.*?)^```", page("rules"), re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


WIDTH, HEADS, KV, LENGTH = 16, 4, 2, 6


class Rotary(nn.Module):
    """An attention whose queries and keys are turned: pairs side by side, as Meta has them, or in two halves."""

    def __init__(self, names: str, halves: bool) -> None:
        super().__init__()
        self.halves = halves
        sizes = (WIDTH, WIDTH * KV // HEADS, WIDTH * KV // HEADS, WIDTH)
        self.names = names.split()
        for name, size in zip(self.names, sizes, strict=True):
            self.add_module(name, nn.Linear(WIDTH, size, bias=False))

    def turned(self, x: Tensor, heads: int) -> Tensor:
        rows = x.view(*x.shape[:2], heads, -1)
        width = rows.shape[-1]
        angles = torch.arange(x.shape[1])[:, None, None] / 10 ** (torch.arange(0, width, 2) / width)
        one, other = rows.chunk(2, -1) if self.halves else (rows[..., ::2], rows[..., 1::2])
        made = one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()
        return (torch.cat(made, -1) if self.halves else torch.stack(made, -1)).reshape(x.shape)

    def forward(self, x: Tensor) -> Any:
        q, k, v, o = (self.get_submodule(name) for name in self.names)
        turned, keys = self.turned(q(x), HEADS), self.turned(k(x), KV)
        wide = [one.view(*x.shape[:2], KV, -1).repeat_interleave(HEADS // KV, 2).flatten(2) for one in (keys, v(x))]
        return o(attend(turned, wide[0], wide[1], HEADS))


def llama(meta: bool) -> nn.Module:
    """One layer of LLaMA without its other half, under either names."""
    model = nn.Module()
    names = "wq wk wv wo" if meta else "q_proj k_proj v_proj o_proj"
    layer = nn.Module()
    layer.add_module("attention" if meta else "self_attn", Rotary(names, not meta))
    layers = nn.ModuleList([layer])
    if meta:
        model.layers = layers
    else:
        model.model = nn.Module()
        model.model.layers = layers
    model.forward = lambda x: layer.get_submodule("attention" if meta else "self_attn")(x)
    return model


class Conv1D(nn.Module):
    """A linear layer that holds its weight transposed, as transformers has GPT-2."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inside, outside))
        self.bias = nn.Parameter(torch.randn(outside))

    def forward(self, x: Tensor) -> Any:
        return x @ self.weight + self.bias


def gpt2(linear: Callable[[int, int], nn.Module]) -> nn.Module:
    """A block of GPT-2."""
    block = nn.Module()
    block.attn = nn.ModuleDict({"c_attn": linear(WIDTH, 3 * WIDTH), "c_proj": linear(WIDTH, WIDTH)})
    block.mlp = nn.ModuleDict({"c_fc": linear(WIDTH, 4 * WIDTH), "c_proj": linear(4 * WIDTH, WIDTH)})
    model = nn.Module()
    model.transformer = nn.ModuleDict({"h": nn.ModuleList([block])})

    def forward(x: Tensor) -> Any:
        q, k, v = block.get_submodule("attn.c_attn")(x).chunk(3, -1)
        x = block.get_submodule("attn.c_proj")(attend(q, k, v, HEADS, causal=True))
        return block.get_submodule("mlp.c_proj")(torch.relu(block.get_submodule("mlp.c_fc")(x)))

    model.forward = forward
    return model


def sequences() -> tuple[Tensor, ...]:
    return (torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3)),)


EMBEDDINGS = """
bert.embeddings.word_embeddings.weight -> word_embedding.weight
bert.embeddings.position_embeddings.weight -> position_embedding.weight
bert.embeddings.token_type_embeddings.weight -> kind_embedding.weight
bert.embeddings.LayerNorm.{*} -> norm.{*}
bert.pooler.dense.{*} -> pooler.{*}
classifier.{*} -> out.{*}
"""


@dataclass(frozen=True)
class Pair:
    """Two implementations, and the inputs of both; `more` are lines beside those of the page."""

    title: str
    one: Callable[[], nn.Module]
    other: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    more: str = ""


PAIRS = (
    Pair("Meta's LLaMA to transformers", lambda: llama(True), lambda: llama(False), sequences),
    Pair("GPT-2 of transformers to nanoGPT", lambda: gpt2(Conv1D), lambda: gpt2(nn.Linear), sequences),
    Pair("ViT of timm to transformers", lambda: vit.Timm(2), lambda: vit.Transformers(2), vit.image),
    Pair("ViT of torchvision to transformers", lambda: vit.Torchvision(2), lambda: vit.Transformers(2), vit.image),
    Pair(
        "BERT of transformers to nn.TransformerEncoder",
        lambda: transformer.Bert(2, False),
        lambda: transformer.Torch(2),
        transformer.texts,
        EMBEDDINGS + "bert.embeddings.position_ids | drop",
    ),
    Pair("CLIP of OpenAI to transformers", lambda: clip.OpenAi(2), lambda: clip.Transformers(2), clip.CLIP.inputs),
)


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.title)
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_the_rules_of_the_page_give_equal_outputs(tmp_path: Path, pair: Pair, suffix: str) -> None:
    torch.manual_seed(1)
    one, other = pair.one(), pair.other()
    state = {name: value.clone() for name, value in one.state_dict().items()}
    for value in state.values():
        if value.is_floating_point():
            value.normal_(std=0.3)
    one.load_state_dict(state)
    text = rules(pair.title).replace("heads=32", f"heads={HEADS}").replace("heads=8", f"heads={KV}")
    (tmp_path / "r.txt").write_text(text + pair.more)
    torch.save(state, tmp_path / "one.pth")
    source = tmp_path / f"one.{suffix}"
    if suffix == "safetensors":
        ckptfix.convert(tmp_path / "one.pth", source)
    ckptfix.rename(source, tmp_path / f"other.{suffix}", rules=tmp_path / "r.txt")
    ckptfix.load_into(other, tmp_path / f"other.{suffix}")
    found, expected = outputs(other, pair.inputs()), outputs(one, pair.inputs())
    assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4)
    (tmp_path / "r.txt").write_text((text + pair.more).replace("bert.embeddings.position_ids | drop", ""))
    ckptfix.rename(tmp_path / f"other.{suffix}", tmp_path / f"back.{suffix}", rules=tmp_path / "r.txt", reverse=True)
    back = ckptfix.load_state_dict(tmp_path / f"back.{suffix}")
    assert back.keys() == {name for name in state if not name.endswith("position_ids")}
    assert all(torch.equal(back[name], state[name]) for name in back)


def test_the_experts_of_the_page(tmp_path: Path) -> None:
    state = {}
    for layer in range(2):
        base = f"model.layers.{layer}.block_sparse_moe"
        state[f"{base}.gate.weight"] = torch.randn(3, WIDTH)
        for expert in range(3):
            for name, shape in (("w1", (8, WIDTH)), ("w2", (WIDTH, 8)), ("w3", (8, WIDTH))):
                state[f"{base}.experts.{expert}.{name}.weight"] = torch.randn(shape)
    torch.save(state, tmp_path / "in.pth")
    (tmp_path / "r.txt").write_text(rules("Mixtral's experts as one tensor"))
    ckptfix.rename(tmp_path / "in.pth", tmp_path / "out.pth", rules=tmp_path / "r.txt")
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    fused = found["model.layers.1.mlp.experts.gate_up_proj"]
    base = "model.layers.1.block_sparse_moe.experts"
    assert fused.shape == (3, 16, WIDTH)
    assert torch.equal(fused[2], torch.cat([state[f"{base}.2.w1.weight"], state[f"{base}.2.w3.weight"]]))
    ckptfix.rename(tmp_path / "out.pth", tmp_path / "back.pth", rules=tmp_path / "r.txt", reverse=True)
    back = torch.load(tmp_path / "back.pth", weights_only=True)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_the_page_names_every_operation_with_its_inverse() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", page("rules"), re.MULTILINE))
    assert rows == {name: row.text for name, row in TABLE.items()}
    backwards = dict(re.findall(r"^\| `(\w+)` \|[^|]+\| `(\w+)`", page("rules"), re.MULTILINE))
    for name in ("split", "concat", "stack", "unstack", "interleave", "deinterleave", "tie", "untie", "transpose"):
        assert Operation(name).inverse().name == backwards[name]
