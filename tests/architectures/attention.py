"""The function that all attention here has, whatever its parameters are called."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, *, causal: bool = False) -> Tensor:
    """softmax(q k^T) v over `heads` parts of the last axis; all of [batch, length, width].

    Beside the keys stands one of zeros, with a value of zeros, as with nn.MultiheadAttention's add_zero_attn: a softmax
    without it does not change with the bias of the keys, and a key's bias in the wrong place would pass unseen.
    """
    batch, length, width = q.shape
    q, k, v = (x.view(batch, -1, heads, width // heads).transpose(1, 2) for x in (q, k, v))
    k, v = functional.pad(k, (0, 0, 0, 1)), functional.pad(v, (0, 0, 0, 1))
    scores = q @ k.transpose(2, 3) / math.sqrt(width // heads)
    if causal:
        scores = scores.masked_fill(later(length), -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)


def later(length: int) -> Tensor:
    """[length, length + 1], true where a key comes after the query; the last column is the key of zeros."""
    return functional.pad(torch.ones(length, length, dtype=torch.bool).triu(1), (0, 1))
