"""Names of the modules with a row for each token: embeddings, and the output layers that are often tied to them."""

from __future__ import annotations

EMBEDDINGS = (
    "embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "shared", "token_embedding", "embeddings",
    "tok_emb", "embedding",
)  # fmt: skip
"""Modules called so are embeddings of tokens."""

OF_TOKENS = ("lm_head", "output", "embed_out", "output_layer")
"""Output layers with these names compute the scores of tokens."""

OUTPUT_LAYERS = (*OF_TOKENS, "decoder", "head", "score_head")
"""Output layers; those with the other names may also compute the scores of classes."""


def is_output_layer(key: str) -> bool:
    """Return whether the tensor with this key is one of an output layer, by the name of its module."""
    return key.rpartition(".")[0].rpartition(".")[2] in OUTPUT_LAYERS
