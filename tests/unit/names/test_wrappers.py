"""Rules of names."""

from __future__ import annotations

import re

import pytest

from ckptfix.names import wrappers


@pytest.mark.parametrize(
    ("name", "stripped"),
    [
        ("module.fc.weight", "fc.weight"),
        ("submodule.fc.weight", "submodule.fc.weight"),
        ("encoder.module.weight", "encoder.module.weight"),
        ("module", "module"),
        ("modules.weight", "modules.weight"),
        ("module.module.weight", "module.weight"),
        ("module.", ""),
    ],
)
def test_a_prefix_is_whole_components_at_the_front(name: str, stripped: str) -> None:
    assert wrappers.strip(name, "module") == stripped


def test_a_prefix_may_have_several_components() -> None:
    assert wrappers.strip("net.module.fc", "net.module") == "fc"
    assert not wrappers.has_prefix("net.module", "net.module")


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("module._orig_mod.fc.weight", "fc.weight"),
        ("_orig_mod.module.fc.weight", "fc.weight"),
        ("model._orig_mod.layer.weight", "model.layer.weight"),
        ("layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.fc.bias", "layers.0.fc.bias"),
        ("_forward_module.module.module.a", "a"),
        ("_module.fc.weight", "fc.weight"),
        ("_encoder._module.weight", "_encoder._module.weight"),
        ("encoder.module.weight", "encoder.module.weight"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("_orig_mod", "_orig_mod"),
    ],
)
def test_unwrapped(name: str, bare: str) -> None:
    assert wrappers.unwrapped(name) == bare


def test_wrappers_in() -> None:
    found = wrappers.wrappers_in(["module.a._orig_mod.b", "module.c", "d.module.e", "module"])
    assert found == {"module": (2, "module.a._orig_mod.b"), "_orig_mod": (1, "module.a._orig_mod.b")}


def test_companions_are_set_aside() -> None:
    assert wrappers.split_prefix(["n_averaged", "module.a", "b"], "module") == (["module.a"], ["b"])


def test_module_paths_follow_the_rule() -> None:
    assert wrappers.module_path(lambda name: wrappers.strip(name, "module"), "module") == ""
    assert wrappers.module_path(lambda name: wrappers.strip(name, "module"), "module.fc") == "fc"
    assert wrappers.module_path(lambda name: wrappers.strip(name, "module"), "") == ""
    assert wrappers.module_path(lambda name: wrappers.add(name, "module"), "") == "module"
    assert wrappers.module_path(lambda name: wrappers.add(name, "module"), "fc") == "module.fc"
    assert wrappers.module_path(lambda name: re.sub(r"^bn(\d)\.", r"norm\1.", name), "bn1") == "norm1"


def test_renamed_modules() -> None:
    names = {"features.0.weight": "conv.weight", "features.0.bias": "conv.bias", "x.a.w": "y.a.w"}
    found = wrappers.renamed_modules(names)
    assert found == {"features.0": "conv", "x.a": "y.a", "x": "y"}
    assert wrappers.renamed_modules({"a.w": "b.w", "a.v": "c.v"}) == {}


def test_every_wrapper_row_says_where_it_comes_from() -> None:
    assert all(row.made_by and row.source for row in wrappers.WRAPPERS)
    assert len({row.component for row in wrappers.WRAPPERS}) == len(wrappers.WRAPPERS)
