"""Equal outputs prove only what the outputs depend on."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptfix
from ckptfix.errors import NoMatch
from ckptfix.ops.match import find

D = 6


class Heads(nn.Module):
    """Two heads of equal shapes, and a tensor beside their outputs."""

    names = "box", "shift"
    more = True

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(D, D + 1)
        for name in self.names:
            setattr(self, name, nn.Linear(D + 1, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.tanh(self.trunk(x))
        first, second = (getattr(self, name)(hidden) for name in self.names)
        return (first, second, hidden) if self.more else (first, second)


class OtherHeads(Heads):
    names = "delta", "rect"
    more = False


class Attention(nn.Module):
    """Queries, keys and values of one row, fused in a layer of this order."""

    order = "kqv"

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(D, 3 * D, bias=False)
        self.last = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        parts = dict(zip(self.order, self.mixed(x).chunk(3, -1), strict=True))
        made = nn.functional.scaled_dot_product_attention(parts["q"], parts["k"], parts["v"])
        return torch.as_tensor(self.last(made))


class SplitAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wa, self.wb, self.wc = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.end = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        made = nn.functional.scaled_dot_product_attention(self.wb(x), self.wc(x), self.wa(x))
        return torch.as_tensor(self.end(made))


class Scaled(nn.Module):
    """Constants that no random weights replace."""

    names = "a_shift", "b_shift"

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(D, D)
        for name in sorted(self.names):
            self.register_buffer(name, torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (getattr(self, name) for name in self.names)
        return torch.as_tensor(torch.tanh(self.fc(x - first)) + second)


class OtherScaled(Scaled):
    names = "y_mean", "x_mean"


class Towers(nn.Module):
    """Two towers, which get the same input if there is one."""

    names = "left", "right"

    def __init__(self) -> None:
        super().__init__()
        for name in sorted(self.names):
            setattr(self, name, nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 2)))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        first, second = (getattr(self, name) for name in self.names)
        return torch.as_tensor(first(x) * second(x if y is None else y))


class OtherTowers(Towers):
    names = "two", "one"


class SetsItself(nn.Module):
    """A layer that takes its values from its first input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(D, D)
        self.log, self.loc = nn.Parameter(torch.zeros(D)), nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        made = self.fc(x)
        self.loc.data.copy_(made.mean(0))
        return torch.as_tensor((made - self.loc) * self.log.exp())


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.gate = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(0 * (self.fc(x) + self.gate(x)))


class Keyed(Heads):
    """Outputs by name."""

    keys = "mean", "var"

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.trunk(x))
        return {key: getattr(self, name)(hidden) for key, name in zip(self.keys, self.names, strict=True)}


class OtherKeyed(Keyed):
    """The same, whose outputs are in another order."""

    names = "delta", "rect"
    keys = "var", "mean"


class Cosine(Towers):
    """Two towers, whose outputs have no gradient as long as they are equal."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        first, second = (getattr(self, name) for name in self.names)
        return nn.functional.cosine_similarity(first(x), second(x if y is None else y))


class OtherCosine(Cosine):
    names = "two", "one"


class Step(nn.Module):
    """Gates of one step from a state of zeros, in an order of its own; the layer of the state is elsewhere."""

    gates = "ifgo"

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Sequential(nn.Linear(D, 4 * D), nn.LayerNorm(4 * D))
        self.h = nn.Sequential(nn.Linear(D, 4 * D, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        made = self.x(x) + self.h(torch.zeros_like(x))
        part = dict(zip(self.gates, made.chunk(4, -1), strict=True))
        state = part["f"].sigmoid() * 0.5 + part["i"].sigmoid() * part["g"].tanh()
        return torch.as_tensor(part["o"].sigmoid() * state.tanh())


class OtherStep(Step):
    gates = "foig"


class Members(nn.Module):
    """Numbered members that do the same, with layers whose names say nothing."""

    names = "zan", "kip"

    def __init__(self) -> None:
        super().__init__()
        parts = [nn.ModuleDict({name: nn.Linear(D, D) for name in sorted(self.names)}) for _ in range(2)]
        self.models = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.names
        inner = [(one.get_submodule(first), one.get_submodule(second)) for one in self.models]
        return torch.stack([end(torch.relu(start(x))) for start, end in inner]).mean(0)


class OtherMembers(Members):
    names = "bol", "tus"


class Keeps(nn.Module):
    """Keeps its last activations, in a buffer that no output depends on."""

    names = "first", "second"
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in sorted(self.names):
            setattr(self, name, nn.Linear(D, D))
        self.register_buffer("last", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (getattr(self, name) for name in self.names)
        made = torch.relu(first(x))
        self.last.copy_(made.detach().mean(0))
        return torch.as_tensor(second(made))


class OtherKeeps(Keeps):
    names = "mev", "lor"


class Normed(nn.Module):
    """Weights that the hook of an old weight_norm computes, which copy.deepcopy refuses."""

    names = "fc1", "fc2"

    def __init__(self) -> None:
        super().__init__()
        for name in sorted(self.names):
            setattr(self, name, nn.utils.weight_norm(nn.Linear(D, D)))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (getattr(self, name) for name in self.names)
        return torch.as_tensor(second(torch.relu(first(x))))


class OtherNormed(Normed):
    names = "zan", "kip"


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = ModuleType("their_proofs")
    for one in (Heads, OtherHeads, Attention, SplitAttention, Scaled, OtherScaled, Towers, OtherTowers, SetsItself,
                Constant, Normed, OtherNormed, Keyed, OtherKeyed, Cosine, OtherCosine, Step, OtherStep,
                Members, OtherMembers, Keeps, OtherKeeps):  # fmt: skip
        setattr(made, one.__name__, one)
    monkeypatch.setitem(sys.modules, "their_proofs", made)


def verified(ours: type[nn.Module], theirs: type[nn.Module], folder: Path, *given: Tensor) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.save(ours().state_dict(), folder / "in.pth")
    options = {"verify": True, "source_model": f"their_proofs:{ours.__name__}", "allow_import": True}
    if given:
        torch.save(given, folder / "given.pt")
        options["inputs"] = folder / "given.pt"
    return options


@pytest.mark.parametrize(
    ("ours", "theirs", "given", "words"),
    [
        (Heads, OtherHeads, [], "do not depend on all of shift.weight"),
        (OtherHeads, Heads, [], "do not depend on all of rect.weight"),
        (Attention, SplitAttention, [torch.ones(2, 1, D)], "do not depend on all of mixed.weight"),
        (Towers, OtherTowers, [], "does the same with left.0.weight and right.0.weight"),
        (Cosine, OtherCosine, [], "does the same with left.0.weight and right.0.weight"),
        (Step, OtherStep, [], "do not depend on all of h.0.weight"),
        (SetsItself, SetsItself, [], "changes its weights when it runs"),
        (Constant, Constant, [], "depends on none of its weights"),
    ],
    ids=["one more output", "one less", "one token", "one input", "cosine", "one step", "sets itself",
         "constant"],
)  # fmt: skip
def test_what_outputs_do_not_show_is_not_proved(
    ours: type[nn.Module], theirs: type[nn.Module], given: list[Tensor], words: str, tmp_path: Path
) -> None:
    options = verified(ours, theirs, tmp_path, *given)
    with pytest.raises(NoMatch) as error:
        ckptfix.match(tmp_path / "in.pth", tmp_path / "out.pth", f"their_proofs:{theirs.__name__}", **options)
    assert words in str(error.value)
    assert not (tmp_path / "out.pth").exists()


def test_constant_buffers_are_not_proved(tmp_path: Path) -> None:
    found = find(tmp_path / "in.pth", "their_proofs:OtherScaled", **verified(Scaled, OtherScaled, tmp_path))
    assert found.refusals and {pair.source for pair in found.matching.ambiguous} == {"a_shift", "b_shift"}


@pytest.mark.parametrize(
    ("ours", "theirs", "given"),
    [
        (Attention, SplitAttention, [torch.randn(2, 5, D, generator=torch.Generator().manual_seed(1))]),
        (Towers, OtherTowers, list(torch.randn(2, 3, D, generator=torch.Generator().manual_seed(1)))),
        (Normed, OtherNormed, []),
        (Keyed, OtherKeyed, []),
        (Members, OtherMembers, []),
        (Keeps, OtherKeeps, []),
    ],
    ids=["tokens", "two inputs", "weight_norm", "keys", "members", "a buffer"],
)
@pytest.mark.parametrize("back", [False, True])
def test_an_input_that_shows_all_proves_all(
    ours: type[nn.Module], theirs: type[nn.Module], given: list[Tensor], back: bool, tmp_path: Path
) -> None:
    if back:
        ours, theirs = theirs, ours
    options = verified(ours, theirs, tmp_path, *given)
    ckptfix.match(tmp_path / "in.pth", tmp_path / "out.pth", f"their_proofs:{theirs.__name__}", **options)
    one, other = ours(), theirs()
    one.load_state_dict(torch.load(tmp_path / "in.pth", weights_only=True))
    other.load_state_dict(torch.load(tmp_path / "out.pth", weights_only=True))
    inputs = given or [torch.randn(3, D)]
    made, like = one(*inputs), other(*inputs)
    rows = [(made[key], like[key]) for key in made] if isinstance(made, dict) else [(made, like)]
    assert all(torch.allclose(*row, atol=1e-6) for row in rows)
