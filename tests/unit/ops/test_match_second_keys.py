"""Second keys of the target are added, so that the output loads strictly; buffers that it lacks are named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptfix
from ckptfix.errors import Refused
from ckptfix.ops.match import By, find, write_rules


class Twice(torch.nn.Module):
    """A layer that is registered by itself and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Linear(4, 6)
        self.net = torch.nn.Sequential(self.conv, torch.nn.ReLU())
        self.head = torch.nn.Linear(6, 3)


def files(tmp_path: Path) -> tuple[Path, Path]:
    source, target = tmp_path / "in.pth", tmp_path / "target.pth"
    state = {"enc.weight": torch.randn(6, 4), "enc.bias": torch.randn(6)}
    ckptfix.save({**state, "out.weight": torch.randn(3, 6), "out.bias": torch.randn(3)}, source)
    torch.save(Twice().state_dict(), target)
    return source, target


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("by", ["structure", "position"])
def test_second_keys_are_added(tmp_path: Path, suffix: str, by: By) -> None:
    source, target = files(tmp_path)
    if suffix != ".pth":
        ckptfix.convert(source, tmp_path / "in.safetensors")
        source = tmp_path / "in.safetensors"
    done = ckptfix.match(source, tmp_path / f"out{suffix}", like=target, by=by)
    assert "2 second keys added: net.0.weight, net.0.bias" in done.lines[0]
    model = Twice()
    if suffix == ".pth":
        state = torch.load(done.dest, weights_only=True)
        model.load_state_dict(state)
        assert state["net.0.weight"].data_ptr() == state["conv.weight"].data_ptr()
    else:
        from safetensors.torch import load_model

        missing, unexpected = load_model(model, done.dest)
        assert not missing and not unexpected
    assert torch.equal(model.conv.weight, ckptfix.load_state_dict(source)["enc.weight"])


def test_the_rules_carry_them_and_run_backwards(tmp_path: Path) -> None:
    source, target = files(tmp_path)
    rules, out, again, back = (tmp_path / name for name in ("rules", "out.pth", "again.pth", "back.pth"))
    write_rules(find(source, target), rules)
    ckptfix.match(source, out, target)
    ckptfix.rename(source, again, rules=rules)
    ckptfix.rename(again, back, rules=rules, reverse=True)
    assert again.read_bytes() == out.read_bytes()
    assert back.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("drops", [False, True])
def test_buffers_that_the_target_lacks_are_named(tmp_path: Path, drops: bool) -> None:
    norm = torch.nn.BatchNorm1d(6).state_dict()
    source, target = tmp_path / "in.pth", tmp_path / "target.pth"
    torch.save({f"bn.{name}": value for name, value in norm.items()}, source)
    del norm["num_batches_tracked"]
    torch.save({f"norm.{name}": value for name, value in norm.items()}, target)
    done = ckptfix.match(source, tmp_path / "out.pth", target, drop_unexpected=drops)
    assert ("OUT keeps 1 buffer that TARGET lacks: norm.num_batches_tracked" in " ".join(done.lines)) is not drops
    assert ("norm.num_batches_tracked" in ckptfix.load_state_dict(done.dest)) is not drops


def test_an_edit_in_place_cannot_add_them(tmp_path: Path) -> None:
    source, target = files(tmp_path)
    before = source.read_bytes()
    with pytest.raises(Refused, match="in-place edit can only rename keys"):
        ckptfix.match(source, None, target, in_place=True)
    assert source.read_bytes() == before
