"""A transformer encoder, post-norm, with a pooler and a classifier. Tokens in, 5 classes out."""

from __future__ import annotations

from typing import Any

import torch
from architectures.attention import attend
from architectures.family import Family, Style, tokens
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 40
LENGTH = 12
KINDS = 2
WIDTH = 16
HEADS = 2
HIDDEN = 64
CLASSES = 5


def positions(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1])


class OldLayerNorm(nn.Module):
    """gamma and beta, as the first BERT for torch had it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))
        self.beta = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Any:
        return functional.layer_norm(x, self.gamma.shape, self.gamma, self.beta)


def norm(old: bool) -> nn.Module:
    return OldLayerNorm(WIDTH) if old else nn.LayerNorm(WIDTH)


class BertSelf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return attend(self.query(x), self.key(x), self.value(x), HEADS)


class BertOutput(nn.Module):
    """dense, and the norm after the sum with what went around."""

    def __init__(self, inside: int, old: bool) -> None:
        super().__init__()
        self.dense = nn.Linear(inside, WIDTH)
        self.LayerNorm = norm(old)

    def forward(self, x: Tensor, kept: Tensor) -> Any:
        return self.LayerNorm(self.dense(x) + kept)


class BertLayer(nn.Module):
    """attention.self, attention.output, intermediate, output."""

    def __init__(self, old: bool) -> None:
        super().__init__()
        self.attention = nn.Module()
        self.attention.add_module("self", BertSelf())
        self.attention.output = BertOutput(WIDTH, old)
        self.intermediate = nn.Module()
        self.intermediate.dense = nn.Linear(WIDTH, HIDDEN)
        self.output = BertOutput(HIDDEN, old)

    def forward(self, x: Tensor) -> Any:
        x = self.get_submodule("attention.output")(self.get_submodule("attention.self")(x), x)
        return self.output(functional.gelu(self.get_submodule("intermediate.dense")(x)), x)


class BertEmbeddings(nn.Module):
    """Three tables and a norm, and the positions as a buffer."""

    position_ids: Tensor

    def __init__(self, old: bool) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.position_embeddings = nn.Embedding(LENGTH, WIDTH)
        self.token_type_embeddings = nn.Embedding(KINDS, WIDTH)
        self.LayerNorm = norm(old)
        self.register_buffer("position_ids", torch.arange(LENGTH).expand(1, -1))

    def forward(self, ids: Tensor, kinds: Tensor) -> Any:
        places = self.position_embeddings(self.position_ids[:, : ids.shape[1]])
        return self.LayerNorm(self.word_embeddings(ids) + self.token_type_embeddings(kinds) + places)


class Bert(nn.Module):
    """bert.embeddings, bert.encoder.layer.N, bert.pooler.dense, classifier, as transformers has it."""

    def __init__(self, depth: int, old: bool) -> None:
        super().__init__()
        self.bert = nn.Module()
        self.bert.embeddings = BertEmbeddings(old)
        self.bert.encoder = nn.Module()
        self.bert.encoder.layer = nn.Sequential(*(BertLayer(old) for _ in range(depth)))
        self.bert.pooler = nn.Module()
        self.bert.pooler.dense = nn.Linear(WIDTH, WIDTH)
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, kinds: Tensor) -> Any:
        x = self.get_submodule("bert.encoder.layer")(self.get_submodule("bert.embeddings")(ids, kinds))
        return self.classifier(torch.tanh(self.get_submodule("bert.pooler.dense")(x[:, 0])))


class FairseqAttention(nn.Module):
    """k_proj, v_proj, q_proj, out_proj, in this order."""

    def __init__(self) -> None:
        super().__init__()
        self.k_proj = nn.Linear(WIDTH, WIDTH)
        self.v_proj = nn.Linear(WIDTH, WIDTH)
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.out_proj(attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), HEADS))


class FairseqLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = FairseqAttention()
        self.self_attn_layer_norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, WIDTH)
        self.final_layer_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Any:
        x = self.self_attn_layer_norm(x + self.self_attn(x))
        return self.final_layer_norm(x + self.fc2(functional.gelu(self.fc1(x))))


class FairseqEncoder(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.segment_embeddings = nn.Embedding(KINDS, WIDTH)
        self.embed_positions = nn.Embedding(LENGTH, WIDTH)
        self.layernorm_embedding = nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(*(FairseqLayer() for _ in range(depth)))

    def forward(self, ids: Tensor, kinds: Tensor) -> Any:
        places = self.embed_positions(positions(ids))
        x = self.layernorm_embedding(self.embed_tokens(ids) + self.segment_embeddings(kinds) + places)
        return self.layers(x)


class Fairseq(nn.Module):
    """encoder.sentence_encoder.layers.N.self_attn ..., classification_heads.NAME.dense and .out_proj."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.encoder = nn.Module()
        self.encoder.sentence_encoder = FairseqEncoder(depth)
        self.classification_heads = nn.Module()
        self.classification_heads.topics = nn.Module()
        self.classification_heads.topics.dense = nn.Linear(WIDTH, WIDTH)
        self.classification_heads.topics.out_proj = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, kinds: Tensor) -> Any:
        x = self.get_submodule("encoder.sentence_encoder")(ids, kinds)[:, 0]
        x = torch.tanh(self.get_submodule("classification_heads.topics.dense")(x))
        return self.get_submodule("classification_heads.topics.out_proj")(x)


class DistilLayer(nn.Module):
    """attention.q_lin ..., sa_layer_norm, ffn.lin1, ffn.lin2, output_layer_norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Module()
        for name in ("q_lin", "k_lin", "v_lin", "out_lin"):
            self.attention.add_module(name, nn.Linear(WIDTH, WIDTH))
        self.sa_layer_norm = nn.LayerNorm(WIDTH)
        self.ffn = nn.Module()
        self.ffn.lin1 = nn.Linear(WIDTH, HIDDEN)
        self.ffn.lin2 = nn.Linear(HIDDEN, WIDTH)
        self.output_layer_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Any:
        q, k, v = (self.get_submodule(f"attention.{letter}_lin")(x) for letter in "qkv")
        x = self.sa_layer_norm(x + self.get_submodule("attention.out_lin")(attend(q, k, v, HEADS)))
        hidden = functional.gelu(self.get_submodule("ffn.lin1")(x))
        return self.output_layer_norm(x + self.get_submodule("ffn.lin2")(hidden))


class DistilEmbeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.position_embeddings = nn.Embedding(LENGTH, WIDTH)
        self.token_type_embeddings = nn.Embedding(KINDS, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, kinds: Tensor) -> Any:
        places = self.position_embeddings(positions(ids))
        return self.LayerNorm(self.word_embeddings(ids) + places + self.token_type_embeddings(kinds))


class DistilBert(nn.Module):
    """distilbert.transformer.layer.N.attention.q_lin ..., pre_classifier, classifier."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.distilbert = nn.Module()
        self.distilbert.embeddings = DistilEmbeddings()
        self.distilbert.transformer = nn.Module()
        self.distilbert.transformer.layer = nn.Sequential(*(DistilLayer() for _ in range(depth)))
        self.pre_classifier = nn.Linear(WIDTH, WIDTH)
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, kinds: Tensor) -> Any:
        x = self.get_submodule("distilbert.embeddings")(ids, kinds)
        x = self.get_submodule("distilbert.transformer.layer")(x)
        return self.classifier(torch.tanh(self.pre_classifier(x[:, 0])))


class HomeLayer(nn.Module):
    """ln1 and ln2 before what they follow; attn.q, .k, .v, .o and mlp.0, mlp.2."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(WIDTH)
        self.ln2 = nn.LayerNorm(WIDTH)
        self.attn = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in "qkvo"})
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Any:
        q, k, v = (self.attn[name](x) for name in "qkv")
        x = self.ln1(x + self.attn["o"](attend(q, k, v, HEADS)))
        return self.ln2(x + self.mlp(x))


class HomeGrown(nn.Module):
    """tok_emb, pos_emb, seg_emb, blocks.N, pool, head; the norms of the ends are defined at the end."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(VOCABULARY, WIDTH)
        self.pos_emb = nn.Embedding(LENGTH, WIDTH)
        self.seg_emb = nn.Embedding(KINDS, WIDTH)
        self.blocks = nn.Sequential(*(HomeLayer() for _ in range(depth)))
        self.emb_norm = nn.LayerNorm(WIDTH)
        self.pool = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, kinds: Tensor) -> Any:
        x = self.tok_emb(ids) + self.pos_emb(positions(ids)) + self.seg_emb(kinds)
        return self.head(torch.tanh(self.pool(self.blocks(self.emb_norm(x))[:, 0])))


def gelu(x: Tensor) -> Tensor:
    """functional.gelu, in a form that torch's fast path does not know: that path leaves out the key of zeros."""
    return functional.gelu(x)


class Torch(nn.Module):
    """nn.TransformerEncoder: queries, keys and values are one tensor."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.word_embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position_embedding = nn.Embedding(LENGTH, WIDTH)
        self.kind_embedding = nn.Embedding(KINDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, activation=gelu, batch_first=True)
        layer.self_attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_zero_attn=True)
        self.transformer = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, kinds: Tensor) -> Any:
        x = self.word_embedding(ids) + self.position_embedding(positions(ids)) + self.kind_embedding(kinds)
        return self.out(torch.tanh(self.pooler(self.transformer(self.norm(x))[:, 0])))


def texts() -> tuple[Tensor, ...]:
    return tokens(3, LENGTH, VOCABULARY), tokens(3, LENGTH, KINDS)


ENCODER = Family(
    "transformer encoder",
    (
        Style("BERT", lambda depth: Bert(depth, old=False)),
        Style("BERT, gamma and beta", lambda depth: Bert(depth, old=True)),
        Style("fairseq", Fairseq),
        Style("DistilBERT", DistilBert),
        Style("home-grown", HomeGrown),
        Style("torch", Torch, layout="fused"),
    ),
    texts,
    fused={3 * WIDTH: 3},
)
