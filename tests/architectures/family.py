"""What an architecture in several naming styles is: modules that compute the same, and name nothing the same.

No table says which key is which key. Values do: see `judge`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import permutations
from typing import Literal
from zlib import crc32

import torch
from torch import Tensor, nn

from ckptfix.names.slots import Slot

CONSTANTS = ("inv_freq", "masked_bias", "position_ids", "num_batches_tracked")
"""Last parts of the names of buffers that are computed or counted, never learned; masks are bool, and go by that."""


@dataclass(frozen=True, slots=True)
class Style:
    """One way to name an architecture.

    Attributes:
        name: library or habit that it follows.
        build: makes the module; the number is the family's depth.
        layout: how its tensors are cut; styles of different layouts hold the same numbers in other shapes.
    """

    name: str
    build: Callable[[int], nn.Module]
    layout: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture.

    Attributes:
        styles: of equal function, given equal weights.
        inputs: arguments of forward, the same at every call.
        depth: blocks (of the last stage, where there are stages).
        shallower: whether one block less leaves the other names as they are.
        symmetric: pairs of words: keys that differ in them alone play the same part, and may be swapped.
        fused: rows of a fused tensor -> how many equal parts are stacked in it.
    """

    name: str
    styles: tuple[Style, ...]
    inputs: Callable[[], tuple[Tensor, ...]]
    depth: int = 2
    shallower: bool = True
    symmetric: tuple[tuple[str, str], ...] = ()
    fused: Mapping[int, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Pair:
    """Weights of `source_style` are wanted in a module of `target_style`."""

    family: Family
    source_style: Style
    target_style: Style

    @property
    def name(self) -> str:
        return f"{self.family.name}: {self.source_style.name} -> {self.target_style.name}"

    @property
    def expect(self) -> Literal["match", "refused"]:
        """Tensors that are cut otherwise have no counterpart, and a matching of all keys would be wrong."""
        return "match" if self.source_style.layout == self.target_style.layout else "refused"

    def source(self) -> nn.Module:
        return self.source_style.build(self.family.depth)

    def target(self) -> nn.Module:
        return self.target_style.build(self.family.depth)

    def inputs(self) -> tuple[Tensor, ...]:
        return self.family.inputs()


def pairs(family: Family) -> list[Pair]:
    """Every ordered pair of different styles."""
    return [Pair(family, one, other) for one, other in permutations(family.styles, 2)]


def learned(name: str, tensor: Tensor) -> bool:
    """Whether a key of a state dict holds something that training made."""
    return tensor.is_floating_point() and name.rpartition(".")[2] not in CONSTANTS


def drawn(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random values that any tensor of `shape` can have: vectors positive, as variances must be.

    A matrix has the values of its transposed one, so that models which multiply from the other side compute the same.
    """
    if len(shape) == 2 and shape[0] > shape[1]:
        return drawn((shape[1], shape[0]), generator).T
    if len(shape) < 2:
        return 0.5 + torch.rand(shape, generator=generator)
    return torch.randn(shape, generator=generator) / math.sqrt(math.prod(shape[1:]))


def randomise(model: nn.Module, seed: int) -> nn.Module:
    """`model` itself, in eval mode, with other values in every learned tensor, norms and running statistics too."""
    generator = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if learned(name, tensor) and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                tensor.copy_(drawn(tuple(tensor.shape), generator))
    return model.eval()


def seed_of(*values: object) -> int:
    """The same number for the same values, in every run."""
    return crc32(repr(values).encode())


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed_of(shape, seed)))


def tokens(batch: int, length: int, vocabulary: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed_of(batch, length, vocabulary))
    return torch.randint(vocabulary, (batch, length), generator=generator)


def slots(state: Mapping[str, Tensor]) -> list[Slot]:
    """What `match` is given, in the order of the state dict."""
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    found = []
    for name, tensor in state.items():
        shape = tuple(tensor.shape)
        owner = first.setdefault((tensor.data_ptr(), shape), name)
        found.append(Slot(name, shape, str(tensor.dtype).removeprefix("torch."), None if owner == name else owner))
    return found
