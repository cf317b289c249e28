"""``match --verify``: what two models compute proves a matching that names leave open, and refutes a wrong one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptfix
from ckptfix.errors import CkptfixError, NoMatch, Refused
from ckptfix.io.write_log import recorded
from ckptfix.ops.match import find, write_rules

D, WORDS = 8, 20


class Source(nn.Module):
    """Three square layers, whose names say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, D)
        self.xa, self.xb, self.xc = (nn.Linear(D, D) for _ in range(3))
        self.norm = nn.LayerNorm(D)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.xb(torch.relu(self.xa(self.norm(self.emb(ids))))))
        return torch.as_tensor(self.xc(hidden))


class Target(nn.Module):
    """The same, defined in another order."""

    act = staticmethod(torch.relu)

    def __init__(self) -> None:
        super().__init__()
        self.third, self.second, self.first = (nn.Linear(D, D) for _ in range(3))
        self.tok, self.ln = nn.Embedding(WORDS, D), nn.LayerNorm(D)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(self.act(self.first(self.ln(self.tok(ids))))))
        return torch.as_tensor(self.third(hidden))


class Other(Target):
    """The same layers, and another activation."""

    act = staticmethod(torch.sigmoid)



def wrapped() -> nn.Module:
    return nn.DataParallel(Source())


def compiled() -> object:
    return torch.compile(Source())


class Attention(nn.Module):
    """Query, key and value in one, so that they are split, and one of two experts, which the first column chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.one, self.two = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        return self.chosen(x, nn.functional.scaled_dot_product_attention(query[None], key[None], value[None])[0])

    def chosen(self, x: Tensor, made: Tensor) -> Tensor:
        return torch.as_tensor(self.one(made) if x[0, 0] > 0 else self.two(made))


class Split(Attention):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.query, self.key, self.value = (nn.Linear(D, D) for _ in range(3))
        self.left, self.right = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        made = nn.functional.scaled_dot_product_attention(self.query(x)[None], self.key(x)[None], self.value(x)[None])
        return torch.as_tensor(self.left(made[0]) if x[0, 0] > 0 else self.right(made[0]))


def twice() -> Tensor:
    return torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = ModuleType("their_models")
    for one in (wrapped, compiled, Source, Target, Other, Attention, Split, twice):
        setattr(made, one.__name__, one)
    monkeypatch.setitem(sys.modules, "their_models", made)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.save(Source().state_dict(), tmp_path / "in.pth")
    return tmp_path / "in.pth"


PROVED: dict[str, Any] = {"verify": True, "source_model": "their_models:Source", "allow_import": True}


def test_open_pairs_are_proved_by_the_order_of_use(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(NoMatch):
        ckptfix.match(saved, tmp_path / "o.pth", "their_models:Target", allow_import=True)
    done = ckptfix.match(saved, tmp_path / "o.pth", "their_models:Target", **PROVED)
    assert done.exit_code == 0 and any("verified on outputs" in note for note in done.notes)
    one, other = Source(), Target()
    one.load_state_dict(torch.load(saved, weights_only=True))
    other.load_state_dict(torch.load(done.dest, weights_only=True))
    assert torch.allclose(one(twice()), other(twice()), atol=1e-6)


@pytest.mark.sampled(quick=3)
@pytest.mark.parametrize("front", ["", "module.", "_orig_mod."])
@pytest.mark.parametrize("model", ["Source", "wrapped", "compiled"])
def test_wrappers_of_the_model_and_of_the_file_may_differ(tmp_path: Path, model: str, front: str) -> None:
    state = {front + name: tensor for name, tensor in Source().state_dict().items()}
    torch.save(state, tmp_path / "in.pth")
    options = {**PROVED, "source_model": f"their_models:{model}"}
    done = ckptfix.match(tmp_path / "in.pth", tmp_path / "o.pth", "their_models:Target", **options)
    assert any("verified on outputs" in note for note in done.notes)


def test_the_rules_say_that_they_are_verified(saved: Path, tmp_path: Path) -> None:
    found = find(saved, "their_models:Target", verify=True, source_model="their_models:Source", allow_import=True)
    write_rules(found, tmp_path / "x.rules")
    assert found.verified and "# verified on outputs" in (tmp_path / "x.rules").read_text().splitlines()
    ckptfix.rename(saved, tmp_path / "o.pth", rules=tmp_path / "x.rules")
    assert set(torch.load(tmp_path / "o.pth", weights_only=True)) == set(Target().state_dict())


def test_other_outputs_are_refused_and_the_first_layer_is_named(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(NoMatch, match="outputs") as caught:
        ckptfix.match(saved, tmp_path / "o.pth", "their_models:Other", **PROVED)
    assert caught.value.lines and not (tmp_path / "o.pth").exists()


@pytest.mark.parametrize("how", ["file", "factory", "mapping"])
def test_an_input_may_be_given(saved: Path, tmp_path: Path, how: str) -> None:
    given = "their_models:twice"
    if how != "factory":
        given = str(tmp_path / "given.pt")
        torch.save({"ids": twice()} if how == "mapping" else twice(), given)
    done = ckptfix.match(saved, tmp_path / "o.pth", "their_models:Target", inputs=given, **PROVED)
    assert any("[2, 3]" in note for note in done.notes)


def test_what_does_not_matter_for_the_input_stays_open(tmp_path: Path) -> None:
    """One of the two experts is never run: no output says where it belongs."""
    torch.save(Attention().state_dict(), tmp_path / "in.pth")
    torch.save(torch.linspace(0.1, 1.5, 5 * D).sin().reshape(5, D), tmp_path / "given.pt")
    found = find(
        tmp_path / "in.pth", "their_models:Split", allow_import=True, verify=True,
        source_model="their_models:Attention", inputs=tmp_path / "given.pt",
    )  # fmt: skip
    pairs = {pair.source: pair for pair in found.matching.pairs}
    assert found.verified and not pairs["qkv.weight"].instead and not pairs["one.weight"].instead
    assert pairs["two.weight"].instead and found.refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"allow_import": True}, "not named"),
        ({"source_model": "their_models:Source"}, "code"),
        ({"source_model": "their_models:Target", "allow_import": True}, "no such key"),
        ({"source_model": "their_models:twice", "allow_import": True}, "not a torch.nn.Module"),
        ({"source_model": "their_models:Nothing", "allow_import": True}, "cannot import"),
    ],
)
def test_what_cannot_be_verified_is_refused(saved: Path, tmp_path: Path, options: Any, words: str) -> None:
    with pytest.raises(CkptfixError, match=words):
        ckptfix.match(saved, tmp_path / "o.pth", "their_models:Target", verify=True, **options)
    assert not (tmp_path / "o.pth").exists()


def test_a_model_is_loaded_with_proof(saved: Path) -> None:
    one, other = Source(), Target()
    kept = {name: value.clone() for name, value in one.state_dict().items()}
    report = ckptfix.load_into(other, saved, match="structure", verify_against=one)
    assert report.done
    assert all(torch.equal(kept[name], value) for name, value in one.state_dict().items())
    one.load_state_dict(torch.load(saved, weights_only=True))
    assert torch.allclose(one(twice()), other(twice()), atol=1e-6)
    with pytest.raises(NoMatch):
        ckptfix.load_into(Other(), saved, match="structure", verify_against=one)
    with pytest.raises(Refused):
        ckptfix.load_into(Target(), saved, verify_against=one)


class Stubborn(Target):
    """Its train() returns nothing, as that of mmpretrain's models."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)


class Fixed(Target):
    """It can be neither moved nor cast."""

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("cannot copy out of meta tensor")


class Backless(Target):
    """It has no gradients."""

    class Back(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Tensor) -> Tensor:
            return torch.relu(hidden)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise ValueError("no way back")

    act = staticmethod(Back.apply)


def lazy() -> nn.Module:
    """Import a module whose class holds a tensor, as ultralytics does."""
    name = "imported_later"
    if name not in sys.modules:
        made: Any = ModuleType(name)
        made.anchors = torch.zeros(1)
        sys.modules[name] = made
    model = Target()
    model.register_buffer("anchors", sys.modules[name].anchors, persistent=False)
    return model


@pytest.mark.parametrize("maker", [Stubborn, lazy])
def test_models_of_all_kinds_are_verified(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, maker: Any
) -> None:
    monkeypatch.delitem(sys.modules, "imported_later", raising=False)
    monkeypatch.setattr("their_models.Target", maker)
    done = ckptfix.match(saved, tmp_path / "out.pth", "their_models:Target", **PROVED)
    assert done.exit_code == 0 and "verified on outputs" in done.notes[0]


@pytest.mark.parametrize(
    ("maker", "why"),
    [(Fixed, "the target to verify cannot be copied to the CPU in float64"), (Backless, "has no gradients")],
)
def test_what_a_model_cannot_do_is_said(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, maker: Any, why: str
) -> None:
    monkeypatch.setattr("their_models.Target", maker)
    with pytest.raises(CkptfixError) as raised:
        ckptfix.match(saved, tmp_path / "out.pth", "their_models:Target", **PROVED)
    assert why in f"{raised.value} {getattr(raised.value, 'lines', ())}" and not (tmp_path / "out.pth").exists()


def test_an_error_names_no_temporary_file(saved: Path, tmp_path: Path) -> None:
    with recorded() as lines, pytest.raises(NoMatch):
        ckptfix.match(saved, tmp_path / "out.pth", "their_models:Other", **PROVED)
    assert not lines
