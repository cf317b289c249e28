"""Averages beside the weights, in the spellings of several trainers, and what `extract` makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix import errors
from ckptfix.names import averaged_keys

PLAIN = ("backbone.conv1.weight", "backbone.bn1.running_mean", "head.fc_cls.bias")
SPELLED: Mapping[str, dict[str, str]] = {
    "mmcv": {f"ema_{name.replace('.', '_')}": name for name in PLAIN},
    "around": {f"ema.{name}": name for name in PLAIN},
    "module": {name.replace("head.", "head_ema."): name for name in PLAIN if "head" in name},
    "inside": {f"model.ema.{name}": f"model.{name}" for name in PLAIN},
    "leaf": {f"{name}_ema": name for name in PLAIN},
    "latent": {f"model_ema.{name.replace('.', '')}": f"model.{name}" for name in PLAIN},
}


@pytest.mark.parametrize("kind", SPELLED)
def test_the_spellings(kind: str) -> None:
    pairs = SPELLED[kind]
    names = [*dict.fromkeys((*pairs, *pairs.values())), "other.weight"]
    made = averaged_keys.find(names)
    assert made is not None and dict(made.pairs) == pairs
    # One that averages no weight makes it something else.
    lonely = next(iter(pairs)).replace("weight", "wait").replace("bias", "biased")
    assert averaged_keys.find([*names, lonely]) is None


@pytest.mark.parametrize("names", [(), ("schema.weight", "weight"), ("vq.ema_cluster", "vq.embed"),
                                   ("a.ema_weight", "a.weight"), ("ema.decay",)])  # fmt: skip
def test_other_keys(names: tuple[str, ...]) -> None:
    assert averaged_keys.find(names) is None


@pytest.mark.parametrize("kind", SPELLED)
def test_extract_writes_the_averages(kind: str, tmp_path: Path) -> None:
    pairs = SPELLED[kind]
    state = {new: torch.full((2,), 1.0) for new in pairs.values()} | {old: torch.full((2,), 2.0) for old in pairs}
    state |= {"other.weight": torch.full((2,), 3.0)}
    if kind == "latent":
        state |= {"model_ema.decay": torch.tensor(0.9), "model_ema.num_updates": torch.tensor(1)}
    torch.save({"state_dict": state}, tmp_path / "in.pth")
    ckptfix.extract(tmp_path / "in.pth", tmp_path / "out.pth", ema=True)
    made = torch.load(tmp_path / "out.pth", weights_only=True)
    # mmcv exchanges the two sets before it saves.
    assert {name: value[0].item() for name, value in made.items()} == {
        **dict.fromkeys(pairs.values(), 1.0 if kind == "mmcv" else 2.0), "other.weight": 3.0}  # fmt: skip
    done = ckptfix.doctor(tmp_path / "in.pth")
    assert "averaged-keys" in {row.id for row in done.findings} and not done.exit_code()


def test_an_average_of_another_shape_is_refused(tmp_path: Path) -> None:
    torch.save({"ema.w.a": torch.ones(2), "w.a": torch.ones(3)}, tmp_path / "in.pth")
    with pytest.raises(errors.Refused, match="different shape"):
        ckptfix.extract(tmp_path / "in.pth", tmp_path / "out.pth", ema=True)


@pytest.mark.parametrize("to", ["zip", "legacy"])
def test_a_dict_of_state_dicts(tmp_path: Path, to: Any) -> None:
    state = {"proj_model.w": torch.ones(2), "proj_model.b.c": torch.zeros(1), "layers.1.k": torch.ones(3),
             "unet.w": torch.ones(1)}  # fmt: skip
    torch.save(state, tmp_path / "in.pth")
    done = ckptfix.extract(tmp_path / "in.pth", tmp_path / "out.pth", nest=["proj=proj_model", "layers"], to=to)
    assert done.tensors == 3 and done.left == ("unet.w",) and not done.exit_code
    made = torch.load(tmp_path / "out.pth", weights_only=True)
    assert {name: list(part) for name, part in made.items()} == {"proj": ["w", "b.c"], "layers": ["1.k"]}
    assert torch.equal(made["layers"]["1.k"], state["layers.1.k"])


@pytest.mark.parametrize("nest", [["a=layers", "a=unet"], ["a.b=layers"], ["layers", "x=layers.1"], ["lyers"]])
def test_dicts_that_cannot_be_made(tmp_path: Path, nest: list[str]) -> None:
    torch.save({"layers.1.k": torch.ones(3), "unet.w": torch.ones(1)}, tmp_path / "in.pth")
    with pytest.raises(errors.CkptfixError):
        ckptfix.extract(tmp_path / "in.pth", tmp_path / "out.pth", nest=nest)
    with pytest.raises(errors.Refused, match="dicts in a dict"):
        ckptfix.extract(tmp_path / "in.pth", tmp_path / "out.safetensors", nest=["unet"])
    assert [path.name for path in tmp_path.iterdir()] == ["in.pth"]
