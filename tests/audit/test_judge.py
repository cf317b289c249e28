"""The judge itself can fail: it sees a file with one tensor dropped, changed or added."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from audit.judge import COMMANDS as JUDGED
from audit.judge import Command, Outcome, judge
from audit.truth import Truth, Unreadable, of_object, tensors
from file_commands import NOT_AUDITED
from safetensors.torch import save_file
from torch import nn

from ckptfix.command_table import COMMANDS


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Reduced:
    """State that is a tuple, as ShardedTensor's."""

    def __init__(self, *held: Any) -> None:
        self.held = held

    def __getstate__(self) -> Any:
        return self.held

    def __setstate__(self, state: Any) -> None:
        self.held = state


class Marked(torch.Tensor):
    pass


def ramp(count: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + count, dtype=torch.float32)


def make() -> dict[str, Any]:
    """Tensors in every place that one may stand in."""
    weight = ramp(6).reshape(2, 3)
    attributed = ramp(2, 80)
    attributed.mark = ramp(2, 90)  # type: ignore[attr-defined]
    return {
        "weight": weight,
        "tied": weight,
        "row": weight[1],
        "list": [ramp(2, 10), (ramp(2, 20), {"deep": ramp(2, 30)})],
        "set": {ramp(2, 35)},
        "object": SimpleNamespace(inner=ramp(2, 40)),
        "slots": Slotted(ramp(2, 50)),
        "tuple state": Reduced(ramp(2, 60), [ramp(2, 70)]),
        "attribute": attributed,
        "subclass": ramp(2, 100).as_subclass(Marked),
        "parameter": nn.Parameter(ramp(2, 110)),
        "module": nn.Linear(2, 2),
        "quantized": torch.quantize_per_tensor(ramp(2, 120), 0.5, 3, torch.quint8),
        "channels": torch.quantize_per_channel(
            ramp(4).reshape(2, 2), torch.tensor([0.5, 0.25]), torch.tensor([1, 2]), 0, torch.qint8
        ),
        "sparse": torch.sparse_coo_tensor(torch.tensor([[0, 2]]), ramp(2, 130), (4,)),
        "rows": torch.eye(3).to_sparse_csr(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "half": ramp(3, 140).to(torch.bfloat16),
        "conj": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "_metadata": OrderedDict(),
    }


def saved(value: Any, folder: Path, **how: Any) -> Truth:
    path = folder / "it.pt"
    torch.save(value, path, **how)
    return tensors(path, trusted=True)


def test_every_place_is_searched(tmp_path: Path) -> None:
    found = saved(make(), tmp_path)
    held = {address.partition("/")[0].partition(":")[0] for address, _ in found.found}
    assert held == set(make()) - {"_metadata"}
    assert [address for address, leaf in found.found if leaf.digest == dict(found.found)["weight"].digest] == [
        "weight",
        "tied",
    ]
    starts = {ramp(2, start) for start in (10, 20, 30, 35, 40, 50, 60, 70, 80, 90, 100, 110)}
    assert all(of_object([value]).leaves <= found.leaves for value in starts)


def test_containers_hold_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    value = make()
    zipped, legacy = (
        saved(value, tmp_path, _use_new_zipfile_serialization=new) for new in (True, False)
    )
    assert zipped.leaves == legacy.leaves and zipped.storages == legacy.storages


def drop(value: dict[str, Any]) -> None:
    del value["tied"]


def duplicate(value: dict[str, Any]) -> None:
    value["again"] = value["half"]


def flip(value: dict[str, Any]) -> None:
    value["half"].view(torch.int16)[1] ^= 1


def reshape(value: dict[str, Any]) -> None:
    value["weight"] = value["weight"].reshape(3, 2)


def recast(value: dict[str, Any]) -> None:
    value["half"] = value["half"].view(torch.int16)


def rescale(value: dict[str, Any]) -> None:
    value["quantized"] = torch.quantize_per_tensor(ramp(2, 120), 0.25, 3, torch.quint8)


def move(value: dict[str, Any]) -> None:
    value["sparse"] = torch.sparse_coo_tensor(torch.tensor([[0, 3]]), ramp(2, 130), (4,))


def empty(value: dict[str, Any]) -> None:
    value["empty"] = torch.empty(3, 0)


def deep(value: dict[str, Any]) -> None:
    value["tuple state"].held[1][0].add_(1)


def on_a_tensor(value: dict[str, Any]) -> None:
    value["attribute"].mark[0] = -1


@pytest.mark.slow
@pytest.mark.parametrize("change", [drop, duplicate, flip, reshape, recast, rescale, move, empty, deep, on_a_tensor])
def test_one_change_is_seen(change: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    torch.manual_seed(0)
    value = make()
    before = saved(value, tmp_path)
    assert before.leaves == saved(value, tmp_path).leaves
    change(value)
    assert before.leaves != saved(value, tmp_path).leaves


def test_ties_are_counted(tmp_path: Path) -> None:
    weight = ramp(4)
    tied = saved({"a": weight, "b": weight, "part": weight[:2]}, tmp_path)
    apart = saved({"a": weight, "b": weight.clone(), "part": weight[:2].clone()}, tmp_path)
    assert tied.leaves == apart.leaves
    assert (tied.storages, tied.distinct, apart.storages, apart.distinct) == (1, 2, 3, 3)


def test_safetensors_and_its_ties(tmp_path: Path) -> None:
    save_file({"a": ramp(2), "b": ramp(3)}, tmp_path / "x.safetensors", metadata={"c": "a", "note": "text"})
    found = tensors(tmp_path / "x.safetensors", trusted=True)
    assert found.leaves == of_object([ramp(2), ramp(3), ramp(2)]).leaves


def test_a_broken_file_is_no_empty_one(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(make(), buffer)
    (tmp_path / "cut").write_bytes(buffer.getvalue()[:-200])
    with pytest.raises(Unreadable):
        tensors(tmp_path / "cut", trusted=True)


def verdict(change: Callable[[dict[str, Any]], None], said: dict[str, Any], code: int, **command: Any) -> list[str]:
    torch.manual_seed(0)
    value = make()
    other = copy.copy(value)
    before = of_object(value)
    change(other)
    return list(judge(Command(("verb",), **command), before, of_object(other), Outcome(code, said, "")))


def lose(value: dict[str, Any]) -> None:
    del value["list"]


def test_the_verdicts() -> None:
    three = ["list/0", "list/1/0", "list/1/1/deep"]
    findings = [{"severity": "warning", "where": name} for name in three]
    assert len(verdict(lose, {}, 0)) == 3 == len(verdict(lose, {}, 3)) == len(verdict(lose, {}, 0, part=True))
    assert not verdict(lose, {"findings": findings}, 3)
    assert len(verdict(lose, {"findings": findings}, 0)) == 3
    assert len(verdict(lose, {"findings": findings[:2]}, 3)) == 1
    assert not verdict(lose, {"left_behind": ["list"]}, 0, part=True)
    assert len(verdict(lose, {"left_behind": ["list"]}, 0)) == 3
    assert len(verdict(lose, {"left_behind": ["lis"]}, 0, part=True)) == 3
    assert not verdict(lose, {"losses": [{"name": "list"}]}, 3)
    assert not verdict(drop, {}, 0, part=True)  # the other name of a tensor that is there
    assert len(verdict(drop, {}, 0)) == 1
    assert len(verdict(duplicate, {}, 0)) == 1
    assert len(verdict(flip, {}, 0)) == 2
    assert len(verdict(drop, {"at": "", "left_behind": ["tied"]}, 0, part=True)) == 0


def test_every_command_that_writes_is_judged_or_says_why() -> None:
    writers = {name for name, row in COMMANDS.items() if row.writes}
    judged = {command.line[0] for command in JUDGED}
    assert judged | set(NOT_AUDITED) == writers and not judged & set(NOT_AUDITED)
