"""``match --verify`` finds which parts of tensors are the same: gates, heads, transposes and fused rows."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import ckptfix
from ckptfix.errors import CkptfixError, NoMatch, Refused
from ckptfix.ops.match import find, models, write, write_rules
from ckptfix.ops.match.gradients import _balanced, _reordered, _shortest
from ckptfix.ops.match.rules_check import check_rules
from ckptfix.ops.writing import WriteOptions

I, D, HEADS = 6, 8, 4  # noqa: E741


class Gru(nn.Module):
    """torch's own layers."""

    inputs: ClassVar[int] = I
    bias: ClassVar[bool] = True
    layers: ClassVar[int] = 2

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(self.inputs, D, self.layers, batch_first=True, bias=self.bias)
        self.fc = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.fc(self.rnn(x)[0]))


class Square(Gru):
    inputs = D


class Unbiased(Gru):
    bias = False
    layers = 1


class Cell(nn.Module):
    """The same by hand, with gates in an order of its own; `parts` has them apart."""

    def __init__(self, inputs: int, bias: bool, order: str, parts: bool) -> None:
        super().__init__()
        self.order, self.parts = order, parts
        for name, size in (("x2h", inputs), ("h2h", D)):
            for gate in order if parts else [""]:
                self.add_module(name + gate, nn.Linear(size, D if parts else 3 * D, bias=bias))

    def made(self, name: str, x: Tensor) -> dict[str, Tensor]:
        whole = [getattr(self, name + gate)(x) for gate in (self.order if self.parts else [""])]
        return dict(zip(self.order, whole if self.parts else whole[0].chunk(3, -1), strict=True))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        ours, theirs = self.made("x2h", x), self.made("h2h", h)
        reset, update = (torch.sigmoid(ours[gate] + theirs[gate]) for gate in "rz")
        return (1 - update) * torch.tanh(ours["n"] + reset * theirs["n"]) + update * h


class Hand(nn.Module):
    kind: ClassVar[tuple[int, bool, str, bool]] = (I, True, "zrn", False)
    layers: ClassVar[int] = 2

    def __init__(self) -> None:
        super().__init__()
        inputs, bias, order, parts = self.kind
        self.cells = nn.ModuleList(Cell(size, bias, order, parts) for size in (inputs, D)[: self.layers])
        self.out = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            h, made = x.new_zeros(x.shape[0], D), []
            for step in range(x.shape[1]):
                h = cell(x[:, step], h)
                made.append(h)
            x = torch.stack(made, 1)
        return torch.as_tensor(self.out(x))


class Gates(Hand):
    kind = (I, True, "nzr", True)


class SquareHand(Hand):
    kind = (D, True, "rzn", False)


class SquareGates(Hand):
    kind = (D, True, "zrn", True)


class UnbiasedHand(Hand):
    kind = (I, False, "zrn", False)
    layers = 1


class UnbiasedGates(UnbiasedHand):
    kind = (I, False, "nrz", True)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.fc = nn.LSTM(I, D, batch_first=True, bias=False), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.fc(self.rnn(x)[0]))


class Joined(nn.Module):
    """An LSTM with one layer for each gate, which takes the hidden state and the input together."""

    def __init__(self) -> None:
        super().__init__()
        self.wf, self.wi, self.wc, self.wo = (nn.Linear(D + I, D, bias=False) for _ in range(4))
        self.fc = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], D)
        made = []
        for step in range(x.shape[1]):
            both = torch.cat([h, x[:, step]], -1)
            c = torch.sigmoid(self.wf(both)) * c + torch.sigmoid(self.wi(both)) * torch.tanh(self.wc(both))
            h = torch.sigmoid(self.wo(both)) * torch.tanh(c)
            made.append(h)
        return torch.as_tensor(self.fc(torch.stack(made, 1)))


def attention(rows: Sequence[Tensor]) -> Tensor:
    """Return causal attention of (query, key, value), each (batch, heads, length, size)."""
    query, key, value = rows
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    made = scaled_dot_product_attention(query, key, value, is_causal=True)
    return made.transpose(1, 2).flatten(2)


class ByRow(nn.Module):
    """Two blocks of attention. In this one, rows of key, query and value follow one another."""

    fused: ClassVar[int] = 3 * D
    groups: ClassVar[int] = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = HEADS, self.groups
        self.first = nn.Linear(D, D)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(D), "all": nn.Linear(D, self.fused), "proj": nn.Linear(D, D)})
            for _ in range(2)
        )

    def cut(self, rows: Tensor) -> Sequence[Tensor]:
        key, query, value = rows.view(*rows.shape[:-1], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return query, key, value

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            x = x + block["proj"](attention(self.cut(block["all"](block["norm"](x)))))
        return x


class ByHead(ByRow):
    def cut(self, rows: Tensor) -> Sequence[Tensor]:
        return [*rows.view(*rows.shape[:-1], HEADS, 3, -1).permute(3, 0, 2, 1, 4)]


class ByGroup(ByRow):
    """Two heads share a key and a value, which follow them."""

    fused = 2 * D
    groups = 2

    def cut(self, rows: Tensor) -> Sequence[Tensor]:
        every = rows.view(*rows.shape[:-1], 2, 4, -1)
        return [every[..., part, :].flatten(2, -2).transpose(1, 2) for part in (slice(2), slice(2, 3), slice(3, 4))]


class OneKey(ByRow):
    """All heads share one key and one value."""

    fused = D + 2 * D // HEADS
    groups = 1

    def cut(self, rows: Tensor) -> Sequence[Tensor]:
        every = rows.view(*rows.shape[:-1], HEADS + 2, -1).transpose(1, 2)
        return every[:, :HEADS], every[:, HEADS : HEADS + 1], every[:, HEADS + 1 :]


class Apart(nn.Module):
    """The same with layers of their own for query, key and value, or for those of each head."""

    sizes: ClassVar[tuple[int, int]] = (D, D)
    heads: ClassVar[int] = 1

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(D, D)
        self.layers = nn.ModuleList()
        for _ in range(2):
            heads = nn.ModuleList(
                nn.ModuleDict({word: nn.Linear(D, self.sizes[word != "a"]) for word in "abc"})
                for _ in range(self.heads)
            )
            self.layers.append(nn.ModuleDict({"heads": heads, "ln": nn.LayerNorm(D), "out": nn.Linear(D, D)}))

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict) and isinstance(layer["heads"], nn.ModuleList)
            rows = []
            for word in "acb":
                every = [head[word](layer["ln"](x)) for head in layer["heads"]]  # type: ignore[index]
                rows.append(torch.cat(every, -1).view(*x.shape[:-1], -1, D // HEADS).transpose(1, 2))
            x = x + layer["out"](attention(rows))
        return x


class HeadModules(Apart):
    sizes = (D // HEADS, D // HEADS)
    heads = HEADS


class ApartGroups(Apart):
    sizes = (D, D // 2)


class ApartOneKey(Apart):
    sizes = (D, D // HEADS)


class OtherScale(ByHead):
    """The same tensors, and another computation."""

    def cut(self, rows: Tensor) -> Sequence[Tensor]:
        query, key, value = super().cut(rows)
        return query, key.flip(-1), value * 2


class Graph(nn.Module):
    """Layers that features are multiplied with from the right, or `Linear` ones."""

    sizes: ClassVar[tuple[int, ...]] = (5, D, D, 3)
    linear: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        for number, (ours, theirs) in enumerate(pairwise(self.sizes)):
            layer = nn.Module()
            if self.linear:
                layer.lin = nn.Linear(ours, theirs, bias=False)
            else:
                layer.weight = nn.Parameter(torch.randn(ours, theirs))
            layer.bias = nn.Parameter(torch.randn(theirs))
            self.add_module(f"{'conv' if self.linear else 'gc'}{number}", layer)

    def forward(self, x: Tensor) -> Tensor:
        links = torch.eye(len(x), dtype=x.dtype) + torch.eye(len(x), dtype=x.dtype).roll(1, 0)
        for layer in self.children():
            x = torch.tanh(links @ (layer.lin(x) if self.linear else x @ layer.weight) + layer.bias)  # type: ignore[operator]
        return x


class LinearGraph(Graph):
    linear = True


class SquareGraph(Graph):
    sizes = (D, D, D)


class SquareLinearGraph(LinearGraph):
    sizes = (D, D, D)


class Convolutions(nn.Module):
    """Convolutions and norms of one shape, whose names say nothing, and a head that is 1 x 1."""

    order: ClassVar[str] = "pqrs"

    def __init__(self) -> None:
        super().__init__()
        for name in self.order:
            self.add_module(name, nn.Sequential(nn.Conv1d(D, D, 3, padding=1), nn.BatchNorm1d(D)))
        self.last = nn.Conv1d(D, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for name in sorted(self.order):
            x = torch.relu(getattr(self, name)(x))
        return torch.as_tensor(self.last(x).mean(-1))


class MixedConvolutions(Convolutions):
    order = "jcaz"

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(D, 4)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        for name in sorted(self.order):
            x = torch.relu(getattr(self, name)(x))
        return torch.as_tensor(self.last(x.mean(-1)))


PAIRS: list[tuple[type[nn.Module], type[nn.Module], tuple[int, ...]]] = [
    (Gru, Hand, (4, 5, I)),
    (Gru, Gates, (4, 5, I)),
    (Gates, Hand, (4, 5, I)),
    (Square, SquareHand, (4, 5, D)),
    (Square, SquareGates, (4, 5, D)),
    (Unbiased, UnbiasedHand, (4, 5, I)),
    (UnbiasedHand, UnbiasedGates, (4, 5, I)),
    (Lstm, Joined, (4, 5, I)),
    (ByRow, ByHead, (2, 5, D)),
    (ByRow, Apart, (2, 5, D)),
    (ByHead, HeadModules, (2, 5, D)),
    (Apart, HeadModules, (2, 5, D)),
    (OneKey, ApartOneKey, (2, 5, D)),
    (ByGroup, ApartGroups, (2, 5, D)),
    (Graph, LinearGraph, (6, 5)),
    (SquareGraph, SquareLinearGraph, (6, D)),
    (Convolutions, MixedConvolutions, (2, D, 9)),
]
BOTH_WAYS = [way for ours, theirs, shape in PAIRS for way in ((ours, theirs, shape), (theirs, ours, shape))]


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = ModuleType("their_parts")
    kinds: list[type[nn.Module]] = [OtherScale, *(one for ours, theirs, _ in PAIRS for one in (ours, theirs))]
    for one in kinds:
        setattr(made, one.__name__, one)
    monkeypatch.setitem(sys.modules, "their_parts", made)


def saved(model: type[nn.Module], shape: tuple[int, ...], folder: Path) -> dict[str, Any]:
    """Write a file of a model and an input, and return the options to verify it."""
    torch.manual_seed(0)
    torch.save(model().double().state_dict(), folder / "in.pth")
    torch.save(torch.randn(shape, dtype=torch.float64), folder / "given.pt")
    return {
        "verify": True, "source_model": f"their_parts:{model.__name__}", "inputs": folder / "given.pt",
        "allow_import": True,
    }  # fmt: skip


def outputs(model: type[nn.Module], state: Path, given: Path) -> Tensor:
    made = model().double().eval()
    made.load_state_dict(torch.load(state, weights_only=True))
    with torch.no_grad():
        return torch.as_tensor(made(torch.load(given, weights_only=True)))


@pytest.mark.sampled(10, quick=4)
@pytest.mark.parametrize(("ours", "theirs", "shape"), BOTH_WAYS)
def test_parts_are_found_and_proved(
    ours: type[nn.Module], theirs: type[nn.Module], shape: tuple[int, ...], tmp_path: Path
) -> None:
    options = saved(ours, shape, tmp_path)
    like = f"their_parts:{theirs.__name__}"
    found = find(tmp_path / "in.pth", like, **options)
    assert not found.refusals and found.verified
    write(found, tmp_path / "out.pth", WriteOptions())
    given = tmp_path / "given.pt"
    assert torch.allclose(outputs(ours, tmp_path / "in.pth", given), outputs(theirs, tmp_path / "out.pth", given))
    write_rules(found, tmp_path / "x.rules")
    ckptfix.rename(tmp_path / "in.pth", tmp_path / "again.pth", rules=tmp_path / "x.rules", allow_unmatched=True)
    assert ckptfix.diff(tmp_path / "out.pth", tmp_path / "again.pth").same
    ckptfix.rename(tmp_path / "out.pth", tmp_path / "back.pth", rules=tmp_path / "x.rules", reverse=True,
                   allow_unmatched=True)  # fmt: skip
    assert ckptfix.diff(tmp_path / "in.pth", tmp_path / "back.pth").same
    both = models(options["source_model"], like, options["inputs"], True)
    done = check_rules(tmp_path / "in.pth", like, tmp_path / "x.rules", models=both, allow_import=True)
    assert done.verified and done.reverses and done.exit_code == 0


@pytest.mark.parametrize("ours", [ByRow, HeadModules])
def test_what_no_order_makes_equal_is_refused(ours: type[nn.Module], tmp_path: Path) -> None:
    options = saved(ours, (2, 5, D), tmp_path)
    found = find(tmp_path / "in.pth", "their_parts:OtherScale", **options)
    assert not found.verified and "outputs" in found.refusals[0].message
    with pytest.raises(NoMatch):
        ckptfix.match(tmp_path / "in.pth", tmp_path / "out.pth", "their_parts:OtherScale", **options)
    assert not (tmp_path / "out.pth").exists()


def test_parts_that_an_input_does_not_show_follow_those_beside_them(tmp_path: Path) -> None:
    """A single step from a state of zeros does not depend on the weights for the state."""
    options = saved(Gru, (4, 1, I), tmp_path)
    ckptfix.match(tmp_path / "in.pth", tmp_path / "out.pth", "their_parts:Gates", **options)
    torch.save(torch.randn(4, 5, I, dtype=torch.float64), tmp_path / "long.pt")
    one, other = outputs(Gru, tmp_path / "in.pth", tmp_path / "long.pt"), tmp_path / "out.pth"
    assert torch.allclose(one, outputs(Gates, other, tmp_path / "long.pt"))


def test_what_an_input_does_not_show_has_no_counterpart(tmp_path: Path) -> None:
    """Without biases, nothing in the layers for the state has an effect in a single step."""
    options = saved(Unbiased, (4, 1, I), tmp_path)
    found = find(tmp_path / "in.pth", "their_parts:UnbiasedGates", **options)
    assert found.verified and found.refusals and found.matching.left == ("rnn.weight_hh_l0",)
    assert len(found.matching.missing) == 3 and all("h2h" in name for name in found.matching.missing)


def test_a_model_is_loaded_by_parts_that_are_proved(tmp_path: Path) -> None:
    saved(Unbiased, (4, 5, I), tmp_path)
    model = UnbiasedHand().double()
    with pytest.raises(CkptfixError):
        ckptfix.load_into(model, tmp_path / "in.pth", match="structure")
    ckptfix.load_into(model, tmp_path / "in.pth", match="structure", verify_against=Unbiased())
    given = torch.load(tmp_path / "given.pt", weights_only=True)
    assert torch.allclose(model(given), outputs(Unbiased, tmp_path / "in.pth", tmp_path / "given.pt"))


def test_the_order_of_rows_is_not_guessed_when_a_model_is_loaded(tmp_path: Path) -> None:
    torch.save({"layers.0.attention.wqkv.weight": torch.ones(3 * D, D)}, tmp_path / "in.pth")
    attn = nn.ModuleDict({"qkv": nn.Linear(D, 3 * D, bias=False)})
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"attention": attn})])})
    with pytest.raises(Refused, match="different orders") as caught:
        ckptfix.load_into(model, tmp_path / "in.pth", match="structure")
    assert caught.value.hint is not None and "verify_against" in caught.value.hint


@pytest.mark.parametrize(("ours", "theirs"), [(Gru, Gates), (ByRow, HeadModules), (SquareGraph, SquareLinearGraph)])
def test_a_refusal_names_the_option(ours: type[nn.Module], theirs: type[nn.Module], tmp_path: Path) -> None:
    saved(ours, (1,), tmp_path)
    with pytest.raises(CkptfixError) as caught:
        ckptfix.match(tmp_path / "in.pth", tmp_path / "o.pth", f"their_parts:{theirs.__name__}", allow_import=True)
    assert caught.value.hint is not None and "--verify" in caught.value.hint


def test_buffers_follow_their_modules(tmp_path: Path) -> None:
    options = saved(Convolutions, (2, D, 9), tmp_path)
    found = find(tmp_path / "in.pth", "their_parts:MixedConvolutions", **options)
    to = {pair.source: pair.target for pair in found.matching.pairs}
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert [to[f"{ours}.1.{name}"] for ours in "pqrs"] == [f"{theirs}.1.{name}" for theirs in "acjz"]


def test_the_bias_of_keys_goes_where_their_weights_go(tmp_path: Path) -> None:
    """Its gradient is zero, because attention does not depend on it."""
    options = saved(ByRow, (2, 5, D), tmp_path)
    found = find(tmp_path / "in.pth", "their_parts:ByHead", **options)
    steps = {pair.source.rpartition(".")[2]: pair.operation for pair in found.matching.pairs if ".all." in pair.source}
    assert steps["weight"] == steps["bias"] == "order to=1,0,2 | split parts=3 | interleave groups=4 parts=3"


def test_the_shortest_order_is_stated() -> None:
    assert _shortest([4, 5, 6, 7, 0, 1, 2, 3]) == [1, 0] and _shortest([0, 1, 2]) == [0]
    assert _shortest([1, 2, 0]) == [1, 2, 0]
    by_head = _reordered([0, 2, 4, 1, 3, 5], {})
    assert [*map(str, by_head)] == ["deinterleave groups=3 parts=2", "concat parts=2"]
    assert [*map(str, _reordered([3, 0, 1, 2], {"dim": 1}))] == ["order dim=1 to=3,0,1,2"]


def test_the_coarsest_cut_comes_first() -> None:
    def cuts(*sides: dict[tuple[int, ...], int]) -> list[Any]:
        return [*_balanced([Counter(side) for side in sides], {size for side in sides for one in side for size in one})]

    assert cuts({(8, 24): 1, (8, 8): 1}, {(8, 8): 4})[0] == {(8, 24): ((8,), (8, 8, 8))}
    assert not cuts({(8, 24): 1}, {(7, 8): 3})
