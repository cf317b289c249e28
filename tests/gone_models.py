"""Models of many kinds for whole-module files; the source of this module is copied, imported and deleted by tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


def fill(model: nn.Module) -> nn.Module:
    """Numbers that distinguish every tensor from every other."""
    torch.manual_seed(3)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.copy_(torch.rand(tensor.shape) * 9 if tensor.is_floating_point() else torch.tensor(5))
    return model


class Tied(nn.Module):
    """A tied head, a module under two names, and a parameter of the root itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)
        self.embed = nn.Embedding(7, 4)
        self.block = nn.Linear(4, 4)
        self.again = self.block
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


class Buffers(nn.Module):
    """Persistent ones, others, and None in every holder."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(3, dtype=torch.float16))
        self.register_buffer("mask", torch.ones(2, 2).triu(), persistent=False)
        self.register_buffer("nothing", None)
        self.register_parameter("bias", None)
        self.norms = nn.ModuleList([nn.BatchNorm2d(2), nn.InstanceNorm1d(3), nn.GroupNorm(1, 2)])
        self.plain_norm = nn.BatchNorm1d(2, affine=False, track_running_stats=False)
        self.absent: nn.Module | None = None
        self.register_module("gone", None)


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by_name = nn.ModuleDict({"z": nn.Linear(2, 2), "a": nn.Conv1d(1, 2, 3)})
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))])
        self.named = nn.ParameterDict({"right": nn.Parameter(torch.ones(3)), "left": nn.Parameter(torch.ones(2))})
        self.chain = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 1)))


class Strided(nn.Module):
    """Views of one storage, a transposed weight, a channels-last one, bfloat16 and complex."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.arange(24.0)
        self.rows = nn.Parameter(whole[:12].view(3, 4))
        self.columns = nn.Parameter(whole.view(6, 4).t())
        self.picture = nn.Parameter(torch.rand(1, 2, 3, 4).to(memory_format=torch.channels_last))
        self.brain = nn.Parameter(torch.rand(3, dtype=torch.bfloat16))
        self.phase = nn.Parameter(torch.rand(2, dtype=torch.complex64))


class OwnState(nn.Module):
    """Leaves a cache out when it is pickled, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = [object()]
        self.fc = nn.Linear(2, 2)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["cache"]
        return state


class Secret(nn.Module):
    """Pickles only what it wants to."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def __reduce__(self) -> Any:
        return (Secret, (), {"kept": self.fc.weight.detach()})


class WithSecret(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.inner = Secret()


def rebuilt(attributes: dict[str, Any]) -> nn.Module:
    """Makes a parametrized module again: its class exists only at run time."""
    return nn.Linear(1, 1)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight / 2


def parametrized() -> nn.Module:
    """A class made at run time, which pickles its attributes in a way of its own, as torch's own refuses to."""
    model = nn.Linear(3, 4)
    parametrize.register_parametrization(model, "weight", Doubled())
    parametrize.register_parametrization(model, "bias", Doubled())
    type(model).__reduce_ex__ = lambda self, protocol: (rebuilt, (dict(self.__dict__),))  # type: ignore[method-assign]
    return nn.Sequential(model, nn.Linear(4, 2))


def old_norms() -> nn.Module:
    with_hooks = nn.Sequential(nn.Linear(3, 3), nn.Conv1d(3, 2, 1))
    nn.utils.weight_norm(with_hooks[0])
    nn.utils.spectral_norm(with_hooks[1])
    return with_hooks


MODELS: dict[str, Callable[[], Any]] = {
    "tied": Tied,
    "buffers": Buffers,
    "containers": Containers,
    "strided": Strided,
    "own getstate": OwnState,
    "parametrized": parametrized,
    "weight_norm and spectral_norm": old_norms,
    "lstm": lambda: nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2),
    "gru in a wrapper": lambda: nn.DataParallel(nn.Sequential(nn.GRU(2, 3), nn.DataParallel(Tied()))),
    "attention": lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=2, add_bias_kv=True),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, norm=nn.LayerNorm(8)),
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(Buffers()),
    "traced by fx": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
    "compiled": lambda: torch.compile(Tied()),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()),
}
