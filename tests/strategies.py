"""Generated checkpoints: small objects of the kinds that users save."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from kinds import DTYPES
from torch import nn

__all__ = ["Saved", "checkpoints", "state_dicts", "tensors"]

PARTS = st.sampled_from(["fc", "0", "module", "submodule", "weight", "_orig_mod", "x_module", "é", "Module", "a b"])
NAMES = st.lists(PARTS, min_size=1, max_size=4).map(".".join)
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def tensors(draw: st.DrawFn, dtypes: tuple[str, ...] = DTYPES) -> torch.Tensor:
    """A dense tensor: any dtype and shape, contiguous or a view."""
    dtype: torch.dtype = getattr(torch, draw(st.sampled_from(dtypes)))
    shape = draw(SHAPES)
    count = 1
    for size in shape:
        count *= size
    seed = draw(st.integers(0, 2**16))
    bits = torch.randint(0, 256, (count * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    raw = bits.to(torch.uint8)
    value = (raw > 127) if dtype is torch.bool else raw.view(dtype)
    value = value.reshape(shape)
    match draw(st.sampled_from(["as it is", "transposed", "rows", "stepped", "expanded", "grad", "parameter"])):
        case "transposed" if value.ndim >= 2:
            value = value.transpose(0, 1)
        case "rows" if value.ndim and value.shape[0] > 1:
            value = value[1:]
        case "stepped" if value.ndim and value.shape[-1] > 1:
            value = value[..., ::2]
        case "expanded" if value.ndim:
            value = value[:1].expand(3, *value.shape[1:]) if value.shape[0] else value
        # Of other dtypes torch itself does not load a tensor that requires a gradient and is no parameter.
        case "grad" if dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
            value = value.requires_grad_()
        case "parameter" if dtype.is_floating_point:
            value = nn.Parameter(value)
    return value


@st.composite
def state_dicts(draw: st.DrawFn, dtypes: tuple[str, ...] = DTYPES) -> Any:
    """A dict or OrderedDict of tensors, some of them tied, perhaps with ``_metadata``."""
    names = draw(st.lists(NAMES, min_size=1, max_size=6, unique=True))
    items: dict[str, torch.Tensor] = {}
    for name in names:
        known = list(items.values())
        tie = known and draw(st.integers(0, 3)) == 0
        items[name] = draw(st.sampled_from(known)) if tie else draw(tensors(dtypes))
    if draw(st.booleans()):
        return items
    ordered: Any = OrderedDict(items)
    if draw(st.booleans()):
        modules = ["", *dict.fromkeys(name.rpartition(".")[0] for name in names)]
        ordered._metadata = OrderedDict((module, {"version": index}) for index, module in enumerate(modules))
    return ordered


@dataclass(frozen=True)
class Saved:
    """A checkpoint, and how it is to be saved."""

    obj: Any
    container: str
    protocol: int


@st.composite
def checkpoints(draw: st.DrawFn, dtypes: tuple[str, ...] = DTYPES) -> Saved:
    """A bare state dict, or one nested beside plain values, for either container and any protocol."""
    container = draw(st.sampled_from(["zip", "legacy"]))
    state = draw(state_dicts(dtypes if container == "zip" else DTYPES[:12]))
    if draw(st.booleans()):
        state = {
            "epoch": draw(PLAIN),
            draw(st.sampled_from(["state_dict", "model", "net"])): state,
            "args": draw(st.dictionaries(st.text(max_size=5), PLAIN, max_size=3)),
        }
    return Saved(state, container, draw(st.integers(2, 5)))
