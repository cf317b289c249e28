"""``drop_unexpected``: a file that holds more than the model is made to fit it, and what is left out is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.errors import CkptfixError, NoMatch, Refused


def model() -> dict[str, torch.Tensor]:
    made = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Linear(4, 2))
    return dict(made.state_dict())


def wider(prefix: str = "", **more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**{f"{prefix}{name}": value for name, value in model().items()}, **more}


OVER = {"criterion.weight": torch.ones(2), "aux.head.weight": torch.ones(7, 3)}


@pytest.fixture
def like(tmp_path: Path) -> Path:
    torch.save(model(), tmp_path / "like.pth")
    return tmp_path / "like.pth"


def save(path: Path, state: dict[str, Any]) -> Path:
    if path.suffix == ".safetensors":
        torch.save(state, path.with_suffix(".pth"))
        ckptfix.convert(path.with_suffix(".pth"), path)
    else:
        torch.save(state, path)
    return path


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_doctor_proposes_it_and_both_commands_do_it(prefix: str, suffix: str, like: Path, tmp_path: Path) -> None:
    source = save(tmp_path / f"in{suffix}", wider(prefix, **OVER))
    found = ckptfix.doctor(source, like=like)
    assert found.fix is not None and "--drop-unexpected" in found.fix
    dest = tmp_path / f"fixed{suffix}"
    with pytest.raises(Refused) as caught:
        ckptfix.fix(source, dest, like=like)
    assert "criterion.weight" in caught.value.message and "--drop-unexpected" in str(caught.value.hint)
    assert not dest.exists()
    with pytest.raises(NoMatch, match=r"criterion\.weight"):
        ckptfix.match(source, dest, like)
    for done in (
        ckptfix.fix(source, dest, like=like, drop_unexpected=True),
        ckptfix.match(source, tmp_path / f"matched{suffix}", like, drop_unexpected=True),
    ):
        assert done.exit_code == 0 and not done.account.lost
        left = {row.where for row in done.findings if row.id == "left-behind"}
        assert {name.rpartition("/")[2] for name in left} == set(OVER)
        assert set(ckptfix.load_state_dict(done.dest)) == set(model())
        assert not ckptfix.doctor(done.dest, like=like).exit_code()


def test_a_training_checkpoint_keeps_its_optimizer(like: Path, tmp_path: Path) -> None:
    parameters = [torch.nn.Parameter(value) for name, value in model().items() if name.endswith(("weight", "bias"))]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    sum((value * value).sum() for value in parameters).backward()  # type: ignore[union-attr]
    optimizer.step()
    saved = {"state_dict": wider("model.", **OVER), "epoch": 3, "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "in.ckpt")
    done = ckptfix.fix(tmp_path / "in.ckpt", tmp_path / "out.ckpt", like=like, drop_unexpected=True)
    assert done.exit_code == 0
    loaded = torch.load(tmp_path / "out.ckpt", weights_only=True)
    assert list(loaded["state_dict"]) == list(model()) and loaded["epoch"] == 3
    assert len(loaded["optimizer"]["state"]) == len(parameters)


def test_with_operations_on_tensors(tmp_path: Path) -> None:
    """Query, key and value are joined, so that the rules do the dropping."""
    parts = {f"a.{name}.{leaf}": torch.randn(4, *more) for name in ("q", "k", "v") for leaf, more in
             (("weight", (4,)), ("bias", ()))}  # fmt: skip
    torch.save({**parts, "a.out.weight": torch.randn(4, 4), "loss.weight": torch.ones(3)}, tmp_path / "in.pth")
    torch.save({"a.qkv.weight": torch.randn(12, 4), "a.qkv.bias": torch.randn(12), "a.out.weight": torch.randn(4, 4)},
               tmp_path / "like.pth")  # fmt: skip
    done = ckptfix.match(tmp_path / "in.pth", tmp_path / "out.pth", tmp_path / "like.pth", drop_unexpected=True)
    assert done.exit_code == 0
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    assert set(found) == {"a.qkv.weight", "a.qkv.bias", "a.out.weight"}
    assert torch.equal(found["a.qkv.bias"], torch.cat([parts[f"a.{name}.bias"] for name in ("q", "k", "v")]))


def test_what_the_model_has_more_is_still_refused(like: Path, tmp_path: Path) -> None:
    lacking = wider() | OVER
    del lacking["2.weight"]
    torch.save(lacking, tmp_path / "in.pth")
    with pytest.raises(NoMatch):
        ckptfix.match(tmp_path / "in.pth", tmp_path / "out.pth", like, drop_unexpected=True)
    done = ckptfix.match(tmp_path / "in.pth", tmp_path / "out.pth", like, drop_unexpected=True, partial=True)
    assert done.exit_code == 1 and set(torch.load(done.dest, weights_only=True)) == set(lacking) - set(OVER)


def test_nothing_in_common_is_never_left_out_whole(like: Path, tmp_path: Path) -> None:
    torch.save({"x.weight": torch.ones(9, 9, 9)}, tmp_path / "in.pth")
    with pytest.raises(CkptfixError):
        ckptfix.match(tmp_path / "in.pth", tmp_path / "out.pth", like, drop_unexpected=True, partial=True)
    assert not (tmp_path / "out.pth").exists()


def test_a_second_key_of_a_tensor_goes_and_the_tensor_stays(tmp_path: Path) -> None:
    shared = torch.randn(5, 4)
    torch.save({"embed.weight": shared, "fc.weight": torch.randn(3, 4), "lm_head.weight": shared}, tmp_path / "in.pth")
    torch.save({"embed.weight": torch.randn(5, 4), "fc.weight": torch.randn(3, 4)}, tmp_path / "like.pth")
    done = ckptfix.match(tmp_path / "in.pth", tmp_path / "out.pth", tmp_path / "like.pth", drop_unexpected=True)
    found = torch.load(done.dest, weights_only=True)
    assert done.exit_code == 0 and set(found) == {"embed.weight", "fc.weight"}
    assert torch.equal(found["embed.weight"], shared)


def test_a_head_for_other_classes_is_left_out(tmp_path: Path) -> None:
    """The model has the key too, with another shape: what stays in the file would not load."""
    save(tmp_path / "in.pth", {**model(), "2.weight": torch.ones(7, 4), "2.bias": torch.ones(7)})
    like = save(tmp_path / "like.pth", model())
    done = ckptfix.match(
        tmp_path / "in.pth", tmp_path / "out.pth", like, partial=True, drop_unexpected=True
    )
    made = torch.load(tmp_path / "out.pth", weights_only=True)
    assert set(made) == set(model()) - {"2.weight", "2.bias"}
    assert "2 left out: 2.weight, 2.bias" in str(done)
    said = {row.where: row.message for row in done.findings if row.id == "left-behind"}
    assert said == dict.fromkeys(("2.weight", "2.bias"), "has another shape in the model")
