"""load_into: models whose modules load in a way of their own, by hooks, methods, or threads at once."""

from __future__ import annotations

import threading
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import _mesh, tensor
from torch import nn
from torch.nn.utils import parametrizations

import ckptfix
from ckptfix.errors import DamagedFile, LoadMismatch


def saved(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


def damaged(path: Path, record: str) -> Path:
    """`path` with one byte of a record changed."""
    with zipfile.ZipFile(path) as archive:
        data = next(archive.read(name) for name in archive.namelist() if name.endswith(f"/data/{record}"))
    content = path.read_bytes()
    at = content.index(data)
    path.write_bytes(content[:at] + bytes([content[at] ^ 0x40]) + content[at + 1 :])
    return path


def values(model: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def layers(last: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, last))


@pytest.mark.filterwarnings("ignore:FSDP is switching", "ignore:When using ``NO_SHARD``", "ignore:.*FSDP.*deprecated")
@pytest.mark.parametrize("broken", ["", "shape", "data", "copy"])
def test_parameters_in_one_flat_tensor_stay_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """FSDP's hooks before and after a load give the modules their parameters for its time."""
    _mesh()
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(layers(), device_id=torch.device("cpu"))
    trained = layers(5 if broken == "shape" else 4)
    path = saved(tmp_path / "a.pth", trained.state_dict())
    before = list(model.parameters())
    if broken:
        if broken == "data":
            damaged(path, "3")
        if broken == "copy":
            monkeypatch.setattr("ckptfix.loaders.tensors.TensorMaker.once", lambda *_: 1 / 0)
        with pytest.raises(LoadMismatch if broken != "data" else DamagedFile):
            ckptfix.load_into(model, path)
    else:
        assert ckptfix.load_into(model, path).complete
    after = list(model.parameters())
    assert len(after) == len(before) == 1 and after[0] is before[0]
    if not broken:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(tensor(2, 2)).sum().backward()
        assert all(parameter.grad is not None for parameter in optimizer.param_groups[0]["params"])
        assert torch.equal(model(tensor(2, 2)), trained(tensor(2, 2)))


def test_hooks_of_a_refused_load_leave_the_module_alone(tmp_path: Path) -> None:
    """A setter of nn.LSTM keeps a list of its weights."""
    model: Any = nn.LSTM(2, 3)
    before = list(model._flat_weights)
    model.register_load_state_dict_post_hook(lambda module, keys: setattr(module, "seen", True))
    model.register_load_state_dict_pre_hook(lambda module, *_: module.__dict__.setdefault("begun", True))
    state = {**nn.LSTM(2, 3).state_dict(), "more": tensor(1)}
    with pytest.raises(LoadMismatch, match="unexpected 1: more"):
        ckptfix.load_into(model, saved(tmp_path / "a.pth", state), assign=True)
    assert all(map(lambda one, other: one is other, model._flat_weights, before))
    assert not hasattr(model, "seen") and not hasattr(model, "begun")


def test_warnings_stay_as_they_are_when_several_threads_load(tmp_path: Path) -> None:
    def make() -> Any:
        return nn.Sequential(*(parametrizations.weight_norm(nn.Linear(3, 3)) for _ in range(5)))

    path = saved(tmp_path / "a.pth", make().state_dict())
    inside = threading.Barrier(2)

    def slow(*_: Any) -> None:
        inside.wait(10)

    def load() -> None:
        model = make()
        model[0].register_load_state_dict_pre_hook(slow)
        ckptfix.load_into(model, path)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        others = [threading.Thread(target=load) for _ in range(2)]
        for other in others:
            other.start()
        for other in others:
            other.join()
        assert list(warnings.filters) == before
    assert not [row for row in caught if "meta" in str(row.message)]


class Unchecked(nn.Module):
    """Loads by a method of its own, in which every key is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = layers()

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        new = {name.replace("other.", "fc."): value for name, value in state_dict.items()}
        return super().load_state_dict(new, *args, **kwargs)


def renaming() -> Any:
    def rename(state: Any, prefix: str, *_: Any) -> None:
        if f"{prefix}w" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}w")

    model: Any = layers()
    model[1]._register_load_state_dict_pre_hook(rename)
    return model


def filling() -> Any:
    """A model with a buffer that its hook makes only when it loads."""

    def fill(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        if f"{prefix}more" in state:
            module.register_buffer("more", torch.empty(5))

    model: Any = layers()
    model[1].register_load_state_dict_pre_hook(fill)
    return model


@pytest.mark.parametrize(
    ("make", "old", "new"),
    [(renaming, "1.weight", "1.w"), (filling, "", "1.more"), (Unchecked, "fc.1.weight", "other.1.weight")],
)
@pytest.mark.parametrize("assign", [False, True])
def test_damage_that_only_a_hook_meets_is_found_before(
    tmp_path: Path, make: Callable[[], nn.Module], old: str, new: str, assign: bool
) -> None:
    state = make().state_dict()
    state[new] = state.pop(old) if old else tensor(5)
    path = saved(tmp_path / "a.pth", state)
    strict = make is not Unchecked
    ckptfix.load_into(make(), path, assign=assign, strict=strict)
    model = make()
    before = values(model)
    with pytest.raises(DamagedFile) as caught:
        ckptfix.load_into(model, damaged(path, str(len(state) - 1)), assign=assign, strict=strict)
    assert caught.value.where == new and "received" not in str(caught.value)
    assert same(before, values(model))
