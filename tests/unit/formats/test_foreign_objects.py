"""Objects whose classes only their libraries have: read like what they were, shown in one line."""

from __future__ import annotations

import argparse
import copy
import pickle
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix import ForeignObject


class Slotted:
    __slots__ = ("__dict__", "rate")

    def __init__(self) -> None:
        self.rate = 0.5
        self.steps = 3


Pair = namedtuple("Pair", "a b")


def loaded(path: Path, value: object) -> Any:
    torch.save({"args": value, "w": torch.ones(2)}, path)
    return ckptfix.load_checkpoint(path)["args"]


def test_attributes_are_what_the_state_holds(tmp_path: Path) -> None:
    args = loaded(tmp_path / "a.pth", argparse.Namespace(lr=0.1, layers=[1, 2], name="adam", state="on", module=None))
    assert isinstance(args, ForeignObject)
    assert args.lr == 0.1 and args.layers == [1, 2]
    assert (args.module, args.name) == ("argparse", "Namespace"), "its own attributes come first"
    assert vars(args) == {"lr": 0.1, "layers": [1, 2], "name": "adam", "state": "on", "module": None}
    assert getattr(args, "momentum", 0.9) == 0.9
    with pytest.raises(AttributeError, match=r"argparse\.Namespace has no 'momentum'; its state holds lr, layers"):
        _ = args.momentum
    assert {"lr", "layers", "module", "args"} <= set(dir(args))


def test_slots_count_too(tmp_path: Path) -> None:
    found = loaded(tmp_path / "a.pth", Slotted())
    assert (found.rate, found.steps) == (0.5, 3)
    assert vars(found) == {"steps": 3, "rate": 0.5}


def test_an_object_without_state_has_no_such_attributes(tmp_path: Path) -> None:
    found = loaded(tmp_path / "a.pth", Pair(1, 2))
    assert found.args == (1, 2) and vars(found) == {}
    with pytest.raises(AttributeError, match="nothing by name"):
        _ = found.a


def test_it_is_copied_and_pickled_as_it_is(tmp_path: Path) -> None:
    args = loaded(tmp_path / "a.pth", argparse.Namespace(lr=0.1))
    for twin in (copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert (twin.module, twin.name, twin.state, twin.lr) == ("argparse", "Namespace", {"lr": 0.1}, 0.1)


def test_its_text_is_one_short_line(tmp_path: Path) -> None:
    space = argparse.Namespace(lr=0.1, text="long " * 100, table=list(range(1000)), inner=argparse.Namespace(a=1))
    space.me = space
    args = loaded(tmp_path / "a.pth", space)
    assert repr(args).startswith("<argparse.Namespace(lr=0.1, text='long long")
    assert "table=<list>, inner=<argparse.Namespace>, me=<argparse.Namespace>" in repr(args)
    assert len(repr(args)) < 300 and "\n" not in repr(args)
    many = loaded(tmp_path / "b.pth", argparse.Namespace(**{f"k{index}": index for index in range(50)}))
    assert repr(many) == "<argparse.Namespace(k0=0, k1=1, k2=2, k3=3, k4=4, k5=5 and 44 more)>"
    assert repr(ForeignObject("a", "B\x1b[0m")) == r"<a.B\x1b[0m()>"
