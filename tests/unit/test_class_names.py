"""One name for one thing: a class that other rooms use shares its name with no other class of the package."""

from __future__ import annotations

from collections import Counter

import pytest
from class_names import classes, origin, shared

pytestmark = pytest.mark.xdist_group("layers")  # where the trees of the package are


def test_a_class_that_other_rooms_use_has_a_name_of_its_own() -> None:
    bearers = Counter(name for _, name in classes())
    twice = sorted(f"{one.module}.{one.name}" for one in shared() if bearers[one.name] > 1)
    assert not twice


def test_what_is_imported_is_found_where_it_is_defined() -> None:
    entry = origin("ckptfix.checkpoint", "TensorEntry")
    assert entry is not None and entry.module == "ckptfix.checkpoint.tensors"
    assert entry in shared() and entry.summary.startswith("A tensor")
    assert origin("ckptfix.checkpoint", "NoSuchName") is None
