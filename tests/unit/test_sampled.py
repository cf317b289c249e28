"""What ``sampled(N)`` draws has every value of every parameter."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import _drawn

KINDS = [object() for _ in range(5)]
ROWS = [("a", 1), ("b", 1), ("c", 2)]


def cases() -> list[Any]:
    """Return cases as pytest makes them, which numbers the values of all parameters by the case."""
    found = []
    for number, (kind, (name, size), flag) in enumerate(product(KINDS, ROWS, (False, True))):
        params = {"kind": kind, "name": name, "size": size, "flag": flag}
        spec = SimpleNamespace(params=params, indices=dict.fromkeys(params, number))
        found.append(SimpleNamespace(name=f"test_x[{number}]", callspec=spec))
    # By their identity, as the cases of pytest.
    return [type("Case", (), vars(one))() for one in found]


@pytest.mark.parametrize("count", [6, 10, 29])
def test_it_has_every_value(count: int) -> None:
    every = cases()
    drawn: Any = _drawn(every, count, 3)
    assert len(drawn) == len({*drawn}) == count
    for name in ("kind", "name", "size", "flag"):
        values = {case.callspec.params[name] for case in every}
        assert {case.callspec.params[name] for case in drawn} == values, name


def test_few_have_few() -> None:
    assert len(_drawn(cases(), 2, 1)) == 2
    assert len(_drawn(cases(), 100, 100)) == 30
