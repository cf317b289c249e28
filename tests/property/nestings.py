"""Random training checkpoints: tensors of every kind in objects of every shape, as torch.save takes them.

The classes stand for users' classes: no file that holds one needs it to be read by ckptfix.
"""

from __future__ import annotations

import enum
import pathlib
from argparse import Namespace
from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from kinds import DTYPES
from strategies import NAMES, PLAIN, tensors
from torch import nn

__all__ = ["Nested", "nestings"]


class Colour(enum.Enum):
    RED = 1
    GREEN = "g"


@dataclass
class Config:
    path: Any = field(default_factory=lambda: pathlib.PurePosixPath("/data/run"))
    colour: Any = Colour.RED
    held: Any = None
    more: dict[str, Any] = field(default_factory=dict)


Pair = namedtuple("Pair", ["first", "second"])


class Attributes:
    """State that is a dict."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


class Slots:
    """State that is the pair (None, slots)."""

    __slots__ = ("first", "second")

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


class Both(Slots):
    """State that is the pair (attributes, slots)."""

    def __init__(self, first: Any, second: Any, third: Any) -> None:
        super().__init__(first, second)
        self.third = third


class Stateful:
    """State that is whatever it holds: a tuple, a list, a tensor."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __getstate__(self) -> Any:
        return self.state

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Rebuilt:
    """Made again by a call with arguments."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return Rebuilt, self.arguments


class Listed(list[Any]):
    """A list with a class of its own."""


class Mapped(dict[str, Any]):
    """A dict with a class of its own."""


class Marked(torch.Tensor):
    """A tensor with a class of its own."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 2)
        self.tied = self.head
        self.register_buffer("steps", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.inner(x))


@st.composite
def odd_tensors(draw: st.DrawFn) -> torch.Tensor:
    """Quantized, sparse, of a class of its own, with attributes."""
    seed = draw(st.integers(0, 99))
    dense = torch.arange(seed, seed + 6, dtype=torch.float32).reshape(2, 3)
    match draw(st.sampled_from(["quantized", "sparse", "rows", "marked", "attributes", "parameter", "conj"])):
        case "quantized":
            return torch.quantize_per_tensor(dense, 0.5, 3, torch.quint8)
        case "sparse":
            return dense.to_sparse()
        case "rows":
            return dense.to_sparse_csr()
        case "marked":
            return dense.as_subclass(Marked)
        case "attributes":
            dense.mark = torch.full((2,), float(seed))  # type: ignore[attr-defined]
            return dense
        case "parameter":
            parameter = nn.Parameter(dense)
            parameter.decay = draw(st.booleans())  # type: ignore[attr-defined]
            return parameter
        case _:
            return (dense + 1j).conj()


@st.composite
def states(draw: st.DrawFn, leaf: st.SearchStrategy[Any]) -> Any:
    """A state dict with ties, overlapping views and perhaps ``_metadata``."""
    prefix = draw(st.sampled_from(["", "module.", "_orig_mod."]))
    names = draw(st.lists(NAMES, min_size=1, max_size=5, unique=True))
    items: dict[str, Any] = {}
    known: list[torch.Tensor] = []
    for name in names:
        how = draw(st.integers(0, 5)) if known else 5
        if how == 0:
            value = draw(st.sampled_from(known))
        elif how == 1:
            value = draw(st.sampled_from(known)).detach()
            value = value[1:] if value.ndim and value.shape[0] > 1 and value.layout is torch.strided else value
        else:
            value = draw(leaf)
        known.append(value)
        items[prefix + name] = value
    if draw(st.booleans()):
        return items
    ordered: Any = OrderedDict(items)
    ordered._metadata = OrderedDict((name.rpartition(".")[0], {"version": 1}) for name in items)
    return ordered


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    return optimizer


@st.composite
def models(draw: st.DrawFn) -> Any:
    """What a model gives: its state, an average beside it, an optimizer, or the module itself."""
    torch.manual_seed(draw(st.integers(0, 99)))
    model = Model()
    match draw(st.sampled_from(["state", "averaged", "optimizer", "module", "wrapped", "hyper"])):
        case "state":
            return model.state_dict()
        case "averaged":
            averaged: Any = torch.optim.swa_utils.AveragedModel(model)
            averaged.update_parameters(model)
            return {"model": model.state_dict(), "ema": averaged.state_dict()}
        case "optimizer":
            return {"optimizer": trained(model).state_dict(), "state_dict": model.state_dict()}
        case "module":
            return model
        case "wrapped":
            return nn.DataParallel(model)
        case _:
            return {"hyper_parameters": {"net": model, "loss": nn.CrossEntropyLoss(torch.ones(2))}}


def wrapped(inner: st.SearchStrategy[Any], simple: bool) -> st.SearchStrategy[Any]:
    """One more level around what `inner` gives; with `simple`, only what has a plain form of old."""
    several = st.lists(inner, min_size=1, max_size=3)
    forms = [
        several,
        several.map(tuple),
        st.dictionaries(st.sampled_from(["a", "b", "c/d", "e.f"]), inner, min_size=1, max_size=3),
        st.dictionaries(st.integers(0, 3), inner, min_size=1, max_size=2),
        inner.map(lambda held: Namespace(held=held, lr=0.5)),
        st.builds(Config, held=inner, colour=st.sampled_from(Colour)),
        inner.map(lambda held: Attributes(held=held)),
        st.builds(Slots, inner, PLAIN),
        several.map(Listed),
        st.dictionaries(st.sampled_from("xyz"), inner, min_size=1).map(Mapped),
    ]
    if not simple:
        forms += [
            st.builds(Both, inner, PLAIN, inner),
            several.map(tuple).map(Stateful),
            several.map(Stateful),
            inner.map(Stateful),
            st.builds(Rebuilt, inner, PLAIN),
            st.builds(Pair, inner, inner),
            several.map(deque),
        ]
    return st.one_of(forms)


@dataclass(frozen=True)
class Nested:
    """A checkpoint, and how it is to be saved."""

    obj: Any
    container: str
    protocol: int


@st.composite
def nestings(draw: st.DrawFn, *, simple: bool = False) -> Nested:
    """A checkpoint of nested objects; with `simple`, of those that every version of sanitize has known."""
    container = draw(st.sampled_from(["zip", "legacy"]))
    dtypes = DTYPES if container == "zip" else DTYPES[:12]
    leaf = st.one_of(tensors(dtypes), tensors(dtypes), odd_tensors())
    inner = st.recursive(
        st.one_of(leaf, states(leaf), models(), PLAIN, st.just(np.arange(3.0))),
        lambda deeper: wrapped(deeper, simple),
        max_leaves=4,
    )
    obj: dict[str, Any] = {draw(st.sampled_from(["model", "state_dict"])): draw(states(leaf))}
    obj |= draw(st.dictionaries(st.sampled_from(["ema", "optimizer", "epoch", "args", "extra"]), inner, max_size=3))
    return Nested(obj, container, draw(st.sampled_from([2, 2, 3, 4, 5])))
