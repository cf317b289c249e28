"""Embeddings and output layers, told by their names."""

from __future__ import annotations

import pytest

from ckptfix.names.vocabulary import is_output_layer
from ckptfix.ops.cast.scales import why_not_linear

OUTPUTS = ["lm_head.weight", "output.weight", "model.embed_out.weight", "output_layer.weight", "head.bias"]
OTHERS = ["encoder.layer.0.attention.output.dense.weight", "layers.0.heads.weight", "output_norm.weight", "output"]


@pytest.mark.parametrize("key", OUTPUTS)
def test_output_layers(key: str) -> None:
    assert is_output_layer(key) and why_not_linear(key)


@pytest.mark.parametrize("key", OTHERS)
def test_other_modules(key: str) -> None:
    assert not is_output_layer(key)
