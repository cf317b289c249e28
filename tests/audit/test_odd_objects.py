"""Objects that random nestings do not reach, one builder each, under the same audit; and the refusals they need."""

from __future__ import annotations

import collections
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from audit.judge import BY_AT, COMMANDS, breaches
from audit.truth import tensors
from torch import nn

import ckptfix
from ckptfix import errors

ODD: dict[str, Callable[[], Any]] = {}


def odd(build: Callable[[], Any]) -> Callable[[], Any]:
    ODD[build.__name__] = build
    return build


def some(*shape: int, first: int = 1) -> torch.Tensor:
    """A tensor whose values nothing else in its object has, if `first` is its own."""
    return torch.arange(first, first + int(np.prod(shape)), dtype=torch.float32).reshape(shape)


def state(first: int = 1) -> dict[str, Any]:
    return {"module.a.weight": some(3, 4, first=first), "module.a.bias": some(3, first=first + 20)}


class Holder(nn.Module):
    """Tensors wherever a module may have them, in its state dict or not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.tied = self.linear
        self.register_buffer("kept", some(3, first=60))
        self.register_buffer("passing", some(3, first=50), persistent=False)
        self.plain = some(4, first=70)
        self.listed = nn.ParameterList([nn.Parameter(some(2, first=80)), nn.Parameter(some(2, first=82))])
        self.inside = {"tensor": some(2, first=99)}


@odd
def a_module() -> Any:
    return Holder()


@odd
def a_module_beside_others() -> Any:
    return {"net": Holder(), "epoch": 3}


@odd
def views_that_overlap() -> Any:
    base = some(4, 4)
    return {
        "a": base.as_strided((3, 3), (4, 1), 1), "b": base.as_strided((3, 3), (1, 1), 0), "c": base[::2, ::2],
        "d": base.expand(4, 4), "e": some(1, first=90).expand(5), "f": base.as_strided((), (), 5), "g": base[0:0],
        "h": some(100, first=200)[90:], "i": some(10, 10, first=400)[:, 3],
    }  # fmt: skip


@odd
def interleaved_columns() -> Any:
    flat = some(64)
    return {"sd": {"a.w": flat[0:60:3], "b.w": flat[1:60:3], "c.w": flat[2:60:3], "d.w": flat[10:20]}}


@odd
def conjugate_and_negative_views() -> Any:
    number = torch.complex(some(3), some(3, first=9))
    negative = torch._neg_view(some(3, first=20))
    return {"a.w": number.conj(), "b.w": torch.complex(some(3, first=30), some(3)).conj().imag, "c.w": negative}


@odd
def quantized_views() -> Any:
    whole = torch.quantize_per_tensor(some(4, 4), 0.5, 3, torch.qint8)
    scales, points = torch.tensor([0.5, 0.25]), torch.tensor([1.0, 2.0])
    return {
        "a.w": whole, "b.w": whole[1:], "c.w": whole.t(),
        "d.w": torch.quantize_per_channel(some(2, 3), scales, points, 0, torch.quint8),
    }  # fmt: skip


@odd
def sparse_with_its_values_apart() -> Any:
    indices = torch.tensor([[0, 0, 1], [1, 1, 0]])
    sparse = torch.sparse_coo_tensor(indices, some(3), (3, 3), check_invariants=False)
    empty = torch.sparse_coo_tensor(size=(3, 3))  # type: ignore[call-arg]
    return {"model": {"a.w": sparse, "b.w": empty}, "ema": {"values": sparse._values()}}


@odd
def nested() -> Any:
    return {"model": {"a.w": torch.nested.nested_tensor([some(2, 3), some(3, 2, first=30)]), "b.w": some(2, first=40)}}


@odd
def keys_of_all_kinds() -> Any:
    keys: list[Any] = [(1, 2), None, 1, 1.5, b"b", "True", True, "", ".", "a/b", "module..x", "n\nl", "é\u4e2d"]
    return {"sd": state(), "other": {key: some(2, first=2 * at + 100) for at, key in enumerate(keys)}}


@odd
def keys_that_look_alike() -> Any:
    return {
        "sd": {1: some(2), "1": some(2, first=5), "module.a": some(3, first=9), b"module.a": some(3, first=12)},
        "deep": {"a/b": some(2, first=50), "a": {"b": some(2, first=60)}},
    }


@odd
def containers() -> Any:
    return {
        "sd": state(),
        "queue": collections.deque([some(2, first=100)], maxlen=3),
        "factory": collections.defaultdict(functools.partial(torch.mul, some(2, first=110)), {"a": some(2, first=112)}),
        "chain": collections.ChainMap({"a": some(2, first=120)}),
        "space": SimpleNamespace(a=some(2, first=130)),
        "array": np.array([some(2, first=140), {"a": some(2, first=142)}, None], dtype=object),
        "set": frozenset([some(2, first=150)]),
    }


@odd
def an_attribute_of_a_tensor_of_several_names() -> Any:
    one = some(2, 3, first=700)
    one.mark = some(2, first=720)  # type: ignore[attr-defined]
    return {"model": {"a.w": one, "b.w": one}, "space": SimpleNamespace(c=one)}


@odd
def averages_in_a_list() -> Any:
    shadow = [value + 500 for value in state().values()]
    return {"state_dict": state(), "ema": {"shadow_params": shadow, "decay": 0.9}}


def saved(name: str, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(ODD[name](), path)
    return path


NO_PARAMETER = "plain"
"""The attribute of a module that no state dict has: extract does not take it, and lists it."""

AMBIGUOUS = {"keys_that_look_alike", "averages_in_a_list"}
"""Of those the judge, which goes by addresses, cannot say which tensor was taken."""


@pytest.mark.sampled(1_000)
@pytest.mark.slow
@pytest.mark.parametrize("name", ODD)
def test_no_command_loses_a_weight_of_an_odd_object(name: str, tmp_path: Path) -> None:
    path = saved(name, tmp_path / "in.pt")
    folder = tmp_path / "folder"
    folder.mkdir()
    truth = tensors(path, trusted=True)
    jobs = [(command, "") for command in COMMANDS]
    if name not in AMBIGUOUS:
        ats = [row.at for row in ckptfix.open_checkpoint(path).state_dicts][:2]
        jobs += [(command, at) for at in ats for command in BY_AT]
    else:
        jobs = [(command, at) for command, at in jobs if not command.part]
    found = [
        f"{command} {at}: {breach}"
        for command, at in jobs
        for breach in breaches(command, path, folder, lambda: truth, at)
        if not (breach.startswith("not taken") and breach.endswith(NO_PARAMETER))
    ]
    assert not found, "\n".join(found)


def test_a_nested_tensor_is_not_written_to_a_legacy_file(tmp_path: Path) -> None:
    """Torch reads the sizes of its parts while their bytes are not there yet."""
    path = saved("nested", tmp_path / "in.pt")
    for write in (
        lambda: ckptfix.convert(path, tmp_path / "out.pt", to="legacy"),
        lambda: ckptfix.extract(path, tmp_path / "out.pt", to="legacy", at="model"),
    ):
        with pytest.raises(errors.WouldLoseData, match="nested tensor"):
            write()
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("to", ["zip", "legacy", "safetensors"])
def test_a_tensor_gets_no_name_that_it_does_not_have(to: Any, tmp_path: Path) -> None:
    """1 beside '1', and bytes, have no text of their own: '1#2' and '<Call>' name nothing."""
    path = saved("keys_that_look_alike", tmp_path / "in.pt")
    with pytest.raises(errors.KeyConflict, match="1, <Call>"):
        ckptfix.extract(path, tmp_path / "out", to=to, at="sd")
    if to == "safetensors":
        with pytest.raises(errors.KeyConflict, match="1, <Call>"):
            ckptfix.convert(path, tmp_path / "out", to=to, at="sd")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "at"), [("a_module", ""), ("a_module_beside_others", "net/")])
def test_every_tensor_beside_the_state_dict_of_a_module_is_listed(name: str, at: str, tmp_path: Path) -> None:
    path = saved(name, tmp_path / "in.pt")
    result = ckptfix.extract(path, tmp_path / "out.pt", at=at.rstrip("/") or None)
    listed = {row.where for row in result.findings if row.id == "left-behind"}
    assert {f"{at}plain", f"{at}inside/tensor", f"{at}_buffers/passing"} <= listed
    assert result.exit_code == 0


def test_parameters_that_a_list_of_averages_replaces_are_listed(tmp_path: Path) -> None:
    path = saved("averages_in_a_list", tmp_path / "in.pt")
    result = ckptfix.extract(path, tmp_path / "out.pt", ema=True)
    listed = {row.where for row in result.findings if row.id == "left-behind"}
    assert {f"state_dict/{name}" for name in state()} <= listed
    assert result.exit_code == 0
