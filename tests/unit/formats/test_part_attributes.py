"""Tensors that others are made of, and what these carry as attributes: all of it is listed, kept or named."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nestings import Held, Sub, covered, found_in, key_of, referenced

import ckptfix
from ckptfix.formats import open_checkpoint

FROM_TYPE: Any = torch._tensor._rebuild_from_type_v2
WRAPPER: Any = torch._utils._rebuild_wrapper_subclass
EMPTY = (Sub, torch.float32, (3,), (1,), 0, torch.strided, torch.device("cpu"), False)
VALUES = (1.0, 2.0, 3.0)


def marked() -> torch.Tensor:
    """A tensor with a tensor of its own as an attribute."""
    made = torch.tensor(VALUES)
    made.mark = -made  # type: ignore[attr-defined]
    return made


FORMS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "wrapper": lambda: (FROM_TYPE, (WRAPPER, Sub, EMPTY, {"inner": marked()})),
    "in a list": lambda: (FROM_TYPE, (WRAPPER, Sub, EMPTY, {"shards": [marked()]})),
    "other function": lambda: (FROM_TYPE, (Held, Sub, (marked(),), {})),
    "sparse": lambda: (
        torch._utils._rebuild_sparse_tensor,
        (torch.sparse_coo, (torch.tensor([[0, 2, 3]]), marked(), torch.Size([4]), True)),
    ),
    "nested": lambda: (
        torch._utils._rebuild_nested_tensor,
        (marked(), torch.tensor([[3]]), torch.tensor([[1]]), torch.tensor([0])),
    ),
    "device": lambda: (
        torch._utils._rebuild_device_tensor_from_cpu_tensor,
        (marked(), torch.float32, "cpu", False),
    ),
}


def saved(path: Path, reduced: tuple[Any, ...]) -> Path:
    """Beside an object of a library that is gone, so that sanitize has something to do."""
    gone = Held(lambda cls: (Held, ()), [])
    torch.save({"model": {"fc.weight": torch.ones(2)}, "gone": gone, "own": Held(lambda cls: reduced, [])}, path)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_attributes_of_parts_are_listed_and_kept_or_named(form: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "in.pt", FORMS[form]())
    checkpoint = open_checkpoint(path)
    assert covered(checkpoint.entries) == referenced(checkpoint)
    listed = {entry.name for entry in checkpoint.entries if entry.name.endswith("mark")}
    assert len(listed) == 1

    plain = tmp_path / "plain.pt"
    done = ckptfix.sanitize(path, plain)
    kept = {entry.name for entry in open_checkpoint(plain).entries if entry.name.endswith("mark")}
    assert kept or listed & {loss.where for loss in done.dropped}

    weights = ckptfix.extract(path, tmp_path / "out.safetensors", at="model")
    assert "own" in {row.where for row in weights.findings if row.id == "left-behind"}


def nested(part: Any) -> Held:
    """A tensor whose parts are all the same one."""
    return Held(lambda cls: (torch._utils._rebuild_nested_tensor, (part,) * 4), [])


def test_parts_that_are_made_of_the_same_parts_are_looked_at_once(tmp_path: Path) -> None:
    """Four times the same part, of four times the same part: each level would take four times as long."""
    own: Any = marked()
    for _ in range(15):
        own = nested(own)
    checkpoint = open_checkpoint(saved(tmp_path / "in.pt", (torch._utils._rebuild_nested_tensor, (own,) * 4)))
    assert len([entry for entry in checkpoint.entries if entry.name.endswith("mark")]) == 1


@pytest.mark.parametrize(
    ("function", "first"),
    [
        (torch._utils._rebuild_parameter_with_state, (torch.tensor([5.0]), True, OrderedDict())),
        (FROM_TYPE, (torch._utils._rebuild_parameter, torch.nn.Parameter, (torch.tensor([5.0]), True, OrderedDict()))),
    ],
)
def test_an_attribute_that_slots_have_too_is_kept_by_sanitize(function: Any, first: Any, tmp_path: Path) -> None:
    """Torch would set both under one name, and the second alone would be left."""
    twice = {"part": torch.tensor([4.0])}, {"part": torch.tensor([3.0])}
    path, plain = saved(tmp_path / "in.pt", (function, (*first, twice))), tmp_path / "plain.pt"
    done = ckptfix.sanitize(path, plain)
    kept = {key_of(tensor) for tensor in found_in(torch.load(plain, weights_only=True))}
    assert {key_of(torch.tensor([value])) for value in (3.0, 4.0, 5.0)} <= kept
    assert done.exit_code == 0
