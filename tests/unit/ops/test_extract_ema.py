"""Training checkpoints: --at picks one state dict or module, --ema the averaged weights, and nothing is guessed."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ckptfix
from ckptfix import errors
from ckptfix.names.kinds import AVERAGES as KEYS


def net(value: float) -> nn.Module:
    """Two layers and a norm, every parameter the same number."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def extracted(folder: Path, checkpoint: Any, **how: Any) -> OrderedDict[str, Tensor]:
    torch.save(checkpoint, folder / "in.pth")
    result = ckptfix.extract(folder / "in.pth", folder / "out.pth", force=True, **how)
    assert result.written
    found: OrderedDict[str, Tensor] = torch.load(folder / "out.pth", weights_only=True)
    return found


def assert_is(found: OrderedDict[str, Tensor], model: nn.Module) -> None:
    wanted = model.state_dict()
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert dict(found._metadata) == dict(wanted._metadata)  # type: ignore[attr-defined]


def swa(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(model)


@pytest.mark.slow
@pytest.mark.parametrize("key", list(KEYS))
def test_averaged_state_dicts_under_every_known_key(tmp_path: Path, key: str) -> None:
    checkpoint = {"model": net(1).state_dict(), key: net(2).state_dict(), "epoch": 3}
    assert_is(extracted(tmp_path, checkpoint, ema=True), net(2))
    assert_is(extracted(tmp_path, checkpoint), net(1))


def test_a_whole_averaged_module(tmp_path: Path) -> None:
    checkpoint = {"epoch": 1, "model": net(1), "ema": net(2), "updates": 7, "optimizer": None}
    assert_is(extracted(tmp_path, checkpoint, ema=True), net(2))
    assert_is(extracted(tmp_path, checkpoint, at="model"), net(1))
    assert_is(extracted(tmp_path, checkpoint, at="ema/_modules/2"), net(2)[2])  # type: ignore[index]


@pytest.mark.parametrize("whole", [False, True])
def test_an_averaged_model_loses_its_wrapper_and_its_counter(tmp_path: Path, whole: bool) -> None:
    averaged = swa(net(2)) if whole else swa(net(2)).state_dict()
    assert_is(extracted(tmp_path, {"net": net(1).state_dict(), "swa": averaged}, ema=True), net(2))
    assert_is(extracted(tmp_path, averaged, ema=True), net(2))


def test_ema_pytorch_keeps_both_models_in_one(tmp_path: Path) -> None:
    both = OrderedDict(initted=torch.tensor(True), step=torch.tensor(4))
    both.update((f"online_model.{name}", tensor) for name, tensor in net(1).state_dict().items())
    both.update((f"ema_model.{name}", tensor) for name, tensor in net(2).state_dict().items())
    found = extracted(tmp_path, {"model": net(1).state_dict(), "ema": both}, ema=True)
    assert list(found) == list(net(2).state_dict()) and found["2.bias"].item() == 2


def test_mmengine_swaps_the_two(tmp_path: Path) -> None:
    others = OrderedDict(steps=torch.tensor(9))
    others.update((f"module.{name}", tensor) for name, tensor in net(1).state_dict().items())
    checkpoint = {"meta": {}, "state_dict": net(2).state_dict(), "ema_state_dict": others}
    assert_is(extracted(tmp_path, checkpoint, ema=True), net(2))


def latent(*, clash: bool = False) -> OrderedDict[str, Tensor]:
    state = OrderedDict((f"model.{name}", tensor) for name, tensor in net(1).state_dict().items())
    state["first_stage.weight"] = torch.full((2,), 7.0)
    if clash:
        state["model.0w.eight"] = torch.zeros(1)
    state["model_ema.decay"], state["model_ema.num_updates"] = torch.tensor(0.9), torch.tensor(5)
    state.update((f"model_ema.{name.replace('.', '')}", tensor) for name, tensor in net(2).named_parameters())
    return state


def test_averages_under_names_without_dots(tmp_path: Path) -> None:
    found = extracted(tmp_path, {"state_dict": latent(), "global_step": 1}, ema=True)
    parameters = {f"model.{name}": tensor for name, tensor in net(2).named_parameters()}
    assert all(torch.equal(found[name], tensor) for name, tensor in parameters.items())
    assert found["first_stage.weight"].tolist() == [7, 7]
    assert not [name for name in found if name.startswith("model_ema.")]
    assert set(found) == {f"model.{name}" for name in net(1).state_dict()} | {"first_stage.weight"}


def test_a_name_without_dots_that_two_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.Refused, match=r"0weight is the average of model\.0\.weight or model\.0w\.eight"):
        extracted(tmp_path, {"state_dict": latent(clash=True)}, ema=True)


def shadow(count: int | None = None) -> dict[str, Any]:
    averages = [tensor.detach() for tensor in net(2).parameters()]
    return {"decay": 0.9, "num_updates": 4, "shadow_params": averages[:count]}


def test_a_list_of_averages_gets_the_names_of_the_model_beside_it(tmp_path: Path) -> None:
    found = extracted(tmp_path, {"model": net(1).state_dict(), "ema": shadow()}, ema=True)
    assert_is(found, net(2))


def test_a_list_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.Refused, match="do not match the 6 parameters"):
        extracted(tmp_path, {"model": net(1).state_dict(), "ema": shadow(-1)}, ema=True)
    with pytest.raises(errors.Refused, match="2 models could provide them"):
        extracted(tmp_path, {"g": net(1).state_dict(), "d": net(1).state_dict(), "ema": shadow()}, ema=True)


def test_several_are_refused_and_named(tmp_path: Path) -> None:
    checkpoint = {"model": net(1).state_dict(), "model_ema": net(2).state_dict(), "shadow": net(3).state_dict()}
    with pytest.raises(errors.Refused, match="2 sets of averaged weights: model_ema, shadow") as caught:
        extracted(tmp_path, checkpoint, ema=True)
    assert caught.value.hint == "choose one with ema=True, at='model_ema'"
    assert caught.value.shell_hint == "choose one with --ema --at model_ema"
    assert_is(extracted(tmp_path, checkpoint, ema=True, at="shadow"), net(3))
    with pytest.raises(errors.Refused, match="2 state dicts: generator, critic") as caught:
        extracted(tmp_path, {"generator": net(1).state_dict(), "critic": net(2)})
    assert caught.value.hint == "choose one with at='generator'"


def test_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.Refused, match="no averaged weights"):
        extracted(tmp_path, {"model": net(1).state_dict()}, ema=True)
    with pytest.raises(errors.Refused, match="no state dict and no module"):
        extracted(tmp_path, {"epoch": 1})
    with pytest.raises(errors.NoSuchTensor, match="nowhere"):
        extracted(tmp_path, {"model": net(1).state_dict()}, at="nowhere")


def test_what_is_left_is_named(tmp_path: Path) -> None:
    model = net(1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    state = model.state_dict()
    state["0._extra_state"] = "kept by the layer"
    torch.save({"net": {"state": state, "other": 1}, "optim": optimizer.state_dict(), "epoch": 2}, tmp_path / "in.pth")
    result = ckptfix.extract(tmp_path / "in.pth", tmp_path / "out.pth")
    assert result.at == "net/state" and set(result.left) == {"net/other", "net/state/0._extra_state", "optim", "epoch"}
    assert result.exit_code == 3 and [row.where for row in result.findings if row.id == "not-taken"] == [
        "net/state/0._extra_state"
    ]
    assert result.as_dict()["left_behind"] == list(result.left)
