"""The walk over the object: addresses, state dicts, values, and what must not unfold."""

from __future__ import annotations

import pickle
import time
from typing import Any

import builders
import pytest

from ckptfix.formats.torch_object import plain, walk
from ckptfix.pickles import parse


def values(data: bytes) -> dict[str, Any]:
    return dict(walk(parse(data)).plain_values())


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_values_have_addresses(protocol: int) -> None:
    value = {"epoch": 3, "lr": [0.1, 0.2], "args": {"name": "x", "raw": b"\xff\0"}, "none": None, "empty": {}, 5: True}
    found = values(pickle.dumps(value, protocol))
    assert found["epoch"] == 3
    assert found["lr"] == [0.1, 0.2]
    assert found["args/name"] == "x"
    assert found["args/raw"] == b"\xff\0"
    assert found["5"] is True
    assert set(found) == {"epoch", "lr", "args/name", "args/raw", "none", "empty", "5"}


def test_long_sequences_are_given_whole() -> None:
    history = list(range(1000))
    assert values(pickle.dumps({"history": history}, 2))["history"] == history


def test_a_shared_tuple_is_a_value_at_each_place() -> None:
    betas = (0.9, 0.999)
    found = values(pickle.dumps([{"betas": betas}, {"betas": betas}], 2))
    assert found == {"0/betas": betas, "1/betas": betas}


def test_a_foreign_object_is_told_and_its_state_is_walked() -> None:
    found = values(b"\x80\x02cgone\nArgs\n)\x81}X\x02\0\0\0lrG?\xb9\x99\x99\x99\x99\x99\x9asb.")
    assert found == {"": "<gone.Args()>", "lr": 0.1}


def test_cycles_end() -> None:
    value: dict[str, Any] = {"a": 1}
    value["self"] = value
    found = values(pickle.dumps(value, 2))
    assert found["a"] == 1
    assert "same object" in found["self"]


def test_laughs_are_not_unfolded() -> None:
    """Each list holds the one before twice: 2**60 leaves, 60 objects."""
    ops: list[Any] = [("GLOBAL", "gone", "Call"), "EMPTY_LIST", ("BINPUT", 0)]
    for index in range(1, 60):
        ops += ["EMPTY_LIST", ("BINPUT", index), "MARK", ("BINGET", index - 1), ("BINGET", index - 1), "APPENDS"]
    start = time.process_time()
    found = values(builders.assemble(("PROTO", 2), *ops, "TUPLE1", "REDUCE", "STOP"))
    assert len(str(found)) < 100_000
    assert time.process_time() - start < 1


def test_huge_integers_become_hexadecimal() -> None:
    value = 1 << 20_000
    assert plain(value) == hex(value)
    assert values(pickle.dumps({"n": value}, 2))["n"] == hex(value)
