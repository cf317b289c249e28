"""Convolutional nets with weight_norm and with spectral_norm, as hooks and as parametrizations."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from architectures.family import Family, Style, noise
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

WIDTH = 8
Norming = Callable[[nn.Module], Any]


def old_weight_norm(layer: nn.Module) -> Any:
    """weight_g and weight_v."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return weight_norm(layer)


class Numbered(nn.Module):
    """main.0, main.2 ..., and a bias of its own for the output."""

    def __init__(self, depth: int, norming: Norming) -> None:
        super().__init__()
        layers: list[nn.Module] = [norming(nn.Conv1d(3, WIDTH, 3, padding=1)), nn.LeakyReLU()]
        for _ in range(depth):
            layers += [norming(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)), nn.LeakyReLU()]
        self.main = nn.Sequential(*layers, norming(nn.Conv1d(WIDTH, 1, 3, padding=1)))

    def forward(self, x: Tensor) -> Any:
        return self.main(x)


class Named(nn.Module):
    """conv_post first, then conv_pre and convs.N."""

    def __init__(self, depth: int, norming: Norming) -> None:
        super().__init__()
        self.conv_post = norming(nn.Conv1d(WIDTH, 1, 3, padding=1))
        self.conv_pre = norming(nn.Conv1d(3, WIDTH, 3, padding=1))
        self.convs = nn.ModuleList(norming(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)) for _ in range(depth))

    def forward(self, x: Tensor) -> Any:
        x = functional.leaky_relu(self.conv_pre(x))
        for layer in self.convs:
            x = functional.leaky_relu(layer(x))
        return self.conv_post(x)


def styles(old: Norming, new: Norming) -> tuple[Style, ...]:
    return (
        Style("numbered, hooks", lambda depth: Numbered(depth, old)),
        Style("numbered, parametrized", lambda depth: Numbered(depth, new)),
        Style("named, hooks", lambda depth: Named(depth, old)),
        Style("named, parametrized", lambda depth: Named(depth, new)),
    )


def signal() -> tuple[Tensor, ...]:
    return (noise(2, 3, 20),)


WEIGHT_NORM = Family(
    "weight_norm", styles(old_weight_norm, parametrizations.weight_norm), signal, depth=3, shallower=False
)
SPECTRAL_NORM = Family(
    "spectral_norm", styles(spectral_norm, parametrizations.spectral_norm), signal, depth=3, shallower=False
)
