"""params.json of Meta's models: as far as a configuration of transformers and the shapes of the tensors state it.

Source: llama3 a0940f9 llama/model.py (ModelArgs, FeedForward), llama-models a9c89c4 models/llama3/args.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from ckptfix.formats.parallel.cuts import Shape

_LAYER = re.compile(r"layers\.(\d+)\..+", re.ASCII)
NEEDED = ("n_heads", "norm_eps")
"""The parameters that a model cannot do without, and that no shape shows."""

_SAME = {
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "head_dim": "head_dim",
}


def shown(shapes: Mapping[str, Shape], config: Mapping[str, object]) -> dict[str, object]:
    """Return the parameters of a whole model.

    Args:
        config: of transformers; it is not used if its sizes are those of another model.
    """
    made: dict[str, object] = {}
    norm, words = shapes.get("norm.weight", ()), shapes.get("tok_embeddings.weight", ())
    if len(norm) == 1:
        made["dim"] = norm[0]
    layers = [int(found[1]) for name in shapes if (found := _LAYER.fullmatch(name)) is not None]
    if layers:
        made["n_layers"] = max(layers) + 1
    if len(words) == 2:
        made["vocab_size"] = words[0]
    if len(norm) == 1:
        made |= _feed_forward(norm[0], shapes.get("layers.0.feed_forward.w1.weight", ()))
    if config.get("hidden_size") != made.get("dim") or config.get("num_hidden_layers") != made.get("n_layers"):
        return made
    for name, other in _SAME.items():
        value = config.get(other)
        if type(value) in (int, float):
            made[name] = value
    dim, heads = made.get("dim"), made.get("n_heads")
    if type(dim) is int and type(heads) is int and heads and made.get("head_dim") == dim // heads:
        del made["head_dim"]
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("rope_type") == "llama3":
        made["use_scaled_rope"] = True
    return made


def _feed_forward(dim: int, shape: Shape) -> dict[str, object]:
    """Return the parameters from which Meta's FeedForward computes the rows of its first matrix."""
    if len(shape) != 2 or not shape[0] or not dim:
        return {}
    rows, usual = shape[0], int(2 * 4 * dim / 3)
    multiple = math.gcd(rows, 4096)
    for given in ({"multiple_of": multiple}, {"multiple_of": multiple, "ffn_dim_multiplier": rows / max(usual, 1)}):
        inner = int(given.get("ffn_dim_multiplier", 1) * usual)
        if multiple * -(-inner // multiple) == rows:
            return dict(given)
    return {}
