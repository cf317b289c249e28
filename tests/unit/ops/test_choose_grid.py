"""Which mapping is the model: a grid of checkpoints whose model is known because it was put there, by every verb.

Each checkpoint is a layout (the model at the top level, under a key, two models, a DCP folder), a wrapper, and one
thing that trainers keep beside a model. What a verb writes or returns has to be the model and all of it; the other has
to be as it was.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch_versions import ALONE

import ckptfix
from ckptfix import errors
from ckptfix.names import kinds

WRAPPERS: dict[str, Callable[[str], str]] = {
    "plain": lambda name: name,
    "DDP": lambda name: f"module.{name}",
    "FSDP": lambda name: f"_fsdp_wrapped_module.{name.replace('.', '._fsdp_wrapped_module.', 1)}",
    "compile": lambda name: f"_orig_mod.{name}",
    "compile of DDP": lambda name: f"_orig_mod.module.{name}",
}
LAYOUTS = ("root", "named", "unnamed", "deep", "below state", "two models", "folder")
OUTSIDE = ("state_dict", "detector", "state/model")
"""Addresses of a model that has nothing else in its mapping."""


class Net(nn.Module):
    """A model with a norm, whose buffer without dimensions is wrapped as all else is."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.body(x))
        return made


def trained(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    return model, optimizer


once_trained = cache(trained)
"""For those who change nothing of it."""


def beside(what: str, seed: int) -> dict[str, Any]:
    """What a trainer keeps beside the model, under its key."""
    model, optimizer = once_trained(seed)
    state, names = optimizer.state_dict(), [name for name, _ in model.named_parameters()]
    moments = [(names[index], slot, value) for index, row in state["state"].items() for slot, value in row.items()]
    flat = {f"state.{name}.{slot}": value for name, slot, value in moments}
    flat |= {f"param_groups.{name}.lr": 0.001 for name in names}
    table: dict[str, dict[str, Any]] = {
        "nothing": {},
        "normalizer": {"normalizer": {"mean": torch.ones(3), "std": torch.ones(3) * seed}},
        "statistics": {"stats": {"loss": torch.tensor(1.0), "hist": torch.arange(5.0)}},
        "unknown": {"zeta": {"a": torch.ones(2), "b": torch.ones(2)}},
        "ema": {"ema": {name: value * 0.5 for name, value in model.state_dict().items()}},
        "optimizer": {"optimizer": state},
        "optimizer, flat": {"optimizer": flat},
        "optimizer, Megatron": {f"optimizer.state.{slot}.{name}": value for name, slot, value in moments},
        "train_state": {"train_state": {"step": torch.tensor(10), "losses": torch.arange(4.0)}},
        "dataloader": {"dataloader": {"seen": torch.arange(500.0)}},
        "scheduler": {"lr_scheduler": {"last_epoch": 3, "_step_count": 4, "rates": torch.arange(400.0)}},
        "rng": {"rng_state": {"cpu": torch.get_rng_state()}},
        "replay": {"replay_buffer": {"observations": torch.zeros(50, 7), "actions": torch.zeros(50)}},
        "epoch": {"epoch": 3, "best_loss": torch.tensor(0.25)},
        "cfg": {"cfg": {"lr": 0.1, "name": "run"}},
    }
    return table[what]


WHATS = (
    *("nothing", "normalizer", "statistics", "unknown", "ema", "optimizer", "optimizer, flat", "optimizer, Megatron"),
    *("train_state", "dataloader", "scheduler", "rng", "replay", "epoch", "cfg"),
)


@dataclass(frozen=True)
class Made:
    """A checkpoint, and the truth about it."""

    layout: str
    wrapper: str
    what: str
    folder: Path
    seed: int = 1

    @cached_property
    def model(self) -> dict[str, torch.Tensor]:
        return dict(once_trained(self.seed)[0].state_dict())

    @cached_property
    def wrapped(self) -> dict[str, torch.Tensor]:
        return {WRAPPERS[self.wrapper](name): value for name, value in self.model.items()}

    @cached_property
    def beside(self) -> dict[str, Any]:
        return beside(self.what, self.seed)

    @property
    def at(self) -> str:
        ats = {"named": "state_dict", "unnamed": "detector", "deep": "ckpt/inner", "below state": "state/model"}
        return ats.get(self.layout, "")

    @cached_property
    def object(self) -> dict[str, Any]:
        if self.layout == "two models":
            other = {name: value * 2 for name, value in self.wrapped.items()}
            return {"generator": self.wrapped, "discriminator": other, **self.beside}
        if self.layout == "below state":
            return {"state": {"model": self.wrapped, **self.beside}}
        if self.layout == "deep":
            return {"ckpt": {"inner": {**self.wrapped, **self.beside}}}
        return {self.at: self.wrapped, **self.beside} if self.at else {**self.wrapped, **self.beside}

    @cached_property
    def path(self) -> Path:
        self.folder.mkdir(exist_ok=True)
        path = self.folder / ("step" if self.layout == "folder" else "source.pth")
        if self.layout == "folder":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.save(self.object, checkpoint_id=path, **ALONE)  # type: ignore[attr-defined]
        else:
            torch.save(self.object, path)
        return path

    @property
    def loose(self) -> dict[str, torch.Tensor]:
        """Tensors of a trainer that stand among the model's names and that nothing tells from them."""
        inside = self.at in ("", "ckpt/inner")
        return {"best_loss": self.beside["best_loss"]} if inside and self.what == "epoch" else {}

    @cached_property
    def _read(self) -> dict[Path, Any]:
        return {}

    def inside(self, path: Path) -> Any:
        """The object that a verb wrote, which is read once."""
        if path not in self._read:
            file = path
            if path.is_dir():
                ckptfix.convert(path, file := path.with_suffix(".plain"), to="zip", force=True)
            self._read[path] = torch.load(file, weights_only=True)
        return self._read[path]

    def mapping(self, path: Path) -> dict[str, Any]:
        found = self.inside(path)
        for key in self.at.split("/") if self.at else ():
            found = found[key]
        assert isinstance(found, dict)
        return found


def same(a: Any, b: Any) -> bool:
    """Whether two objects are equal, tensors by dtype and value."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def left(made: Made, path: Path, prefix: str = "") -> bool:
    """Whether what stands beside the model is as it was; names in a flattened optimizer have got `prefix`, as its."""
    before, after = made.inside(made.path), made.inside(path)
    for key in {"deep": ("ckpt", "inner"), "below state": ("state",)}.get(made.layout, ()):
        before, after = before[key], after[key]
    rows = {key: before[key] for key in made.beside if key != "best_loss"}
    if made.what.startswith("optimizer, "):
        rows = with_prefix(rows, prefix, "|".join(map(re.escape, made.model)))
    return all(same(value, after[key]) for key, value in rows.items())


def with_prefix(rows: dict[str, Any], prefix: str, names: str) -> dict[str, Any]:
    """The mapping, and those in it, with `prefix` before the names of parameters in its keys."""
    made = {key: with_prefix(own, prefix, names) if isinstance(own, dict) else own for key, own in rows.items()}
    return {re.sub(rf"\b({names})\b", rf"{prefix}\1", key): own for key, own in made.items()}


GRID = list(itertools.product(LAYOUTS, WRAPPERS, WHATS))
SLICE = GRID[::19]
"""Two or more cases of each row of the tables."""


def cases(*but: str) -> pytest.MarkDecorator:
    """The grid without some of its layouts."""
    return pytest.mark.parametrize(("layout", "wrapper", "what"), [
        pytest.param(*row, marks=() if row in SLICE else pytest.mark.campaign, id=", ".join(row))
        for row in GRID
        if row[0] not in but
    ])  # fmt: skip


@cases()
def test_every_verb_takes_the_model(tmp_path: Path, layout: str, wrapper: str, what: str) -> None:
    made = Made(layout, wrapper, what, tmp_path / "a")
    if layout == "two models":
        _asked_for(made, tmp_path)
        return
    wanted = {**made.wrapped, **made.loose}
    plain = {**made.model, **made.loose}
    out = tmp_path / "out.safetensors"
    converted = ckptfix.convert(made.path, out)
    assert converted.at == made.at
    assert same(load_file(out), wanted)
    extracted = ckptfix.extract(made.path, tmp_path / "out.pth")
    assert same(dict(torch.load(tmp_path / "out.pth")), wanted)
    if made.layout in ("root", "folder", "named", "unnamed"):
        gone = [name for name in made.beside if name not in wanted]
        assert set(gone) <= set(converted.left) & set(extracted.left)
    assert same(dict(ckptfix.load_state_dict(made.path, strip=None)), wanted)
    assert same(dict(ckptfix.load_state_dict(made.path)), plain)
    fresh = trained(7)[0]
    ckptfix.load_into(fresh, made.path, strict=not made.loose)
    assert same(fresh.state_dict(), made.model)
    if what in ("optimizer", "optimizer, flat"):
        model, optimizer = trained(9)
        ckptfix.load_optimizer(optimizer, made.path, model=model)
        assert same(optimizer.state_dict()["state"], once_trained(made.seed)[1].state_dict()["state"])
    assert ckptfix.inspect(made.path).parameters == sum(value.numel() for value in wanted.values())


@pytest.mark.sampled(18)
@cases("two models")
def test_edits_change_the_model_and_nothing_else(tmp_path: Path, layout: str, wrapper: str, what: str) -> None:
    made = Made(layout, wrapper, what, tmp_path / "a")
    out = tmp_path / "unwrapped"
    ckptfix.unwrap(made.path, out)
    assert made.model.keys() <= made.mapping(out).keys() and left(made, out)
    assert not any("module" in name for name in made.mapping(out))
    if wrapper in ("plain", "DDP"):
        out = tmp_path / "stripped"
        ckptfix.strip_module(made.path, out)
        assert made.model.keys() <= made.mapping(out).keys() and left(made, out)
    found = {row.id for row in ckptfix.doctor(made.path).findings}
    assert ("wrapped-names" in found) == (wrapper != "plain")
    assert not found & {"partial-prefix", "doubtful-model"}
    if what != "unknown":
        out = tmp_path / "added"
        ckptfix.add_module(made.path, out)
        names = {f"module.{name}" for name in made.wrapped}
        if what == "ema":
            assert names <= made.mapping(out).keys()
        else:
            assert {name for name in made.mapping(out) if name.startswith("module.")} == names | (
                set() if wrapper != "DDP" else names
            )
            assert left(made, out, "module." if wrapper == "plain" else "")
        out = tmp_path / "cast"
        ckptfix.cast(made.path, out, to="bfloat16")
        cast = made.mapping(out)
        assert all(
            cast[name].dtype == (torch.bfloat16 if name.endswith(("weight", "bias")) else value.dtype)
            for name, value in made.wrapped.items()
        )
        assert what == "ema" or left(made, out)
    other = Made(layout, wrapper, what, tmp_path / "b", seed=2)
    out = tmp_path / "mean"
    ckptfix.average([made.path, other.path], out)
    mean = made.mapping(out)
    for name, value in made.wrapped.items():
        if value.is_floating_point():
            assert torch.allclose(mean[name], (value + other.wrapped[name]) / 2)
    assert left(other, out)
    out = tmp_path / "slim"
    slimmed = ckptfix.slim(made.path, out, no_optimizer=True)
    assert bool(slimmed.dropped) == what.startswith("optimizer")
    assert same({name: made.mapping(out)[name] for name in made.wrapped}, made.wrapped)
    assert {name for name in made.beside if name in made.mapping(out)} == (
        set() if what.startswith("optimizer") or made.at in OUTSIDE else set(made.beside)
    )


def _asked_for(made: Made, folder: Path) -> None:
    """Two models of equal rank: no verb that takes one state dict chooses."""
    ats = ("generator", "discriminator")
    for verb in (
        lambda: ckptfix.convert(made.path, folder / "o.safetensors"),
        lambda: ckptfix.extract(made.path, folder / "o.pth"),
        lambda: ckptfix.load_state_dict(made.path),
        lambda: ckptfix.average([made.path, made.path], folder / "o.pth"),
    ):
        with pytest.raises(errors.Undecided) as caught:
            verb()
        assert caught.value.choices == ats
        assert not list(folder.glob("o.*"))
    assert same(dict(ckptfix.load_state_dict(made.path, at="generator", strip=None)), made.wrapped)


LARGER: dict[str, dict[str, Any]] = {
    "a dict without a known name": {"zeta": {"a": torch.ones(400), "b": torch.ones(400)}},
    "a list": {"history": [torch.ones(300), torch.ones(300)]},
    "statistics": {"stats": {"mean": torch.ones(900), "std": torch.ones(900)}},
}


@pytest.mark.sampled(quick=2)
@pytest.mark.parametrize("name", LARGER)
@pytest.mark.parametrize("at", ["", "detector"])
def test_more_bytes_than_were_chosen_by_names_are_a_doubt(tmp_path: Path, name: str, at: str) -> None:
    model = trained(1)[0].state_dict()
    source = tmp_path / "a.pth"
    torch.save({at: model, **LARGER[name]} if at else {**model, **LARGER[name]}, source)
    verbs: list[Callable[[str | None], object]] = [
        lambda at: ckptfix.convert(source, tmp_path / "o.safetensors", at=at, force=True),
        lambda at: ckptfix.extract(source, tmp_path / "o.pth", at=at, force=True),
        lambda at: ckptfix.load_state_dict(source, at=at),
        lambda at: ckptfix.average([source, source], tmp_path / "o.pth", at=at, force=True),
    ]
    for verb in verbs:
        with pytest.raises(errors.Undecided) as caught:
            verb(None)
        assert caught.value.choices[0] == at
        assert not list(tmp_path.glob("o.*"))
        assert f"--at {at or '/'}" in caught.value.shell_hint
        verb(at)
        for made in tmp_path.glob("o.*"):
            made.unlink()
    for row in (ckptfix.inspect(source), ckptfix.doctor(source)):
        assert "doubtful-model" in {finding.id for finding in row.findings}
    assert ckptfix.stats(source, at=at).findings == ()
    assert ckptfix.diff(source, source).same and ckptfix.diff(source, source, at=(at, at)).notes == ()
    fresh = trained(5)[0]
    assert ckptfix.load_into(fresh, source).at == at
    assert same(fresh.state_dict(), dict(model))


@pytest.mark.parametrize("key", ["state_dict", "model", "net"])
def test_a_known_key_is_no_doubt(tmp_path: Path, key: str) -> None:
    model = trained(1)[0].state_dict()
    torch.save({key: model, **LARGER["a list"]}, tmp_path / "a.pth")
    assert same(dict(ckptfix.load_state_dict(tmp_path / "a.pth")), dict(model))


@pytest.mark.parametrize("copy", ["teacher", "best", "master"])
def test_copies_are_no_doubt(tmp_path: Path, copy: str) -> None:
    model = dict(trained(1)[0].state_dict())
    twice = {f"{copy}{number}": [value.double() for value in model.values()] for number in range(2)}
    torch.save({"detector": model, **twice}, tmp_path / "a.pth")
    assert same(dict(ckptfix.load_state_dict(tmp_path / "a.pth")), model)


@pytest.mark.parametrize("key", ["rng", "random", "of_its_own"])
def test_states_of_random_generators_are_no_doubt(tmp_path: Path, key: str) -> None:
    model = {name: value for name, value in trained(1)[0].state_dict().items() if name.startswith("head")}
    torch.save({"detector": model, key: [torch.get_rng_state()]}, tmp_path / "a.pth")
    assert same(dict(ckptfix.load_state_dict(tmp_path / "a.pth")), model)


def test_stable_baselines_s_policy_is_the_model(tmp_path: Path) -> None:
    policy = {f"actor.{name}": value for name, value in trained(1)[0].state_dict().items()}
    torch.save({"pytorch_variables.pth": {"log_ent_coef": torch.ones(1)}, "policy.pth": policy}, tmp_path / "a.pth")
    assert ckptfix.convert(tmp_path / "a.pth", tmp_path / "o.safetensors").at == "policy.pth"


NAMES: dict[tuple[str, ...], kinds.Kind | None] = {
    ("state", "param_groups"): "optimizer",
    ("state.fc.weight.exp_avg", "state.fc.weight.step", "param_groups.fc.weight.lr"): "optimizer",
    ("state.fc.weight.of_its_own", "param_groups.fc.weight.lr"): "optimizer",
    ("optimizer.state.exp_avg.fc.weight", "optimizer.state.fp32_param.fc.weight"): "optimizer",
    ("state.weight", "state.bias"): None,
    ("optimizer.weight", "optimizer.bias"): None,
    ("mean", "std"): "statistics",
    ("weight", "bias"): None,
    ("n_averaged", "module.weight"): "average",
    ("last_epoch", "base_lrs", "rates"): "scheduler",
    ("fc.action", "action", "reward", "done"): None,
}


@pytest.mark.parametrize("names", NAMES)
def test_names_say_what_a_mapping_is(names: tuple[str, ...]) -> None:
    assert kinds.of_names(names) == NAMES[names]


@pytest.mark.parametrize("name", ["fc.weight", "state.fc.weight", "model.optimizer_head.weight", "optimizer.a.weight"])
def test_a_model_s_names_stay_beside_an_optimizer_s(name: str) -> None:
    moments = {f"state.{name}.exp_avg", f"state.{name}.step", f"param_groups.{name}.lr"}
    assert kinds.optimizer_names([name, *moments]) == moments
