"""The renaming between two sets of names that differ only by what wraps the model."""

from __future__ import annotations

import pytest

from ckptfix.names.bases import find

BARE = ["fc.weight", "fc.bias", "out.weight"]


def under(prefix: str, names: list[str] = BARE) -> list[str]:
    return [f"{prefix}.{name}" for name in names]


@pytest.mark.parametrize(
    ("source", "target", "rule"),
    [
        (BARE, BARE, "exact"),
        (under("module"), under("module"), "exact"),
        (under("module"), BARE, "wrapper module."),
        (BARE, under("module"), "wrapper module."),
        (under("module.module"), BARE, "wrapper module."),
        (under("module.module"), under("module"), "wrapper module."),
        (under("_orig_mod"), under("module"), "wrapper _orig_mod. and wrapper module."),
        (under("module._orig_mod"), under("_orig_mod.module"), "wrapper _orig_mod. and wrapper module."),
        (["fc._fsdp_wrapped_module.weight", "fc.bias", "out.weight"], BARE, "wrapper _fsdp_wrapped_module."),
        (["fc.module.weight", "fc.module.bias", "out.weight"], BARE, "wrapper module."),
        (under("model"), BARE, "base prefix model."),
        (BARE, under("model.model"), "base prefix model.model."),
        (under("anything"), BARE, "base prefix anything."),
        (under("net"), under("model"), "base prefix net. and base prefix model."),
        (under("module.net"), under("_orig_mod"), "wrapper _orig_mod. and wrapper module. and base prefix net."),
        (["n_averaged", *under("module")], ["n_averaged", *under("module")], "exact"),
    ],
)
def test_complete(source: list[str], target: list[str], rule: str) -> None:
    found = find(source, target)
    assert sorted(found.names.values()) == sorted(target)
    assert found.agreeing == len(target)
    assert sorted(found.rule.split(" and ")) == sorted(rule.split(" and "))


def test_a_component_is_no_substring() -> None:
    found = find(["submodule.weight"], ["sub.weight"])
    assert found.rule == "exact" and found.agreeing == 0


def test_the_best_of_the_tries_and_never_less_than_exact() -> None:
    headed = [*under("bert"), "cls.weight"]
    assert (find(headed, BARE).rule, find(headed, BARE).agreeing) == ("base prefix bert.", 3)
    assert (find(BARE, headed).rule, find(BARE, headed).agreeing) == ("base prefix bert.", 3)
    mixed = ["fc.weight", "fc.bias", "model.out.weight"]
    assert find(mixed, [*BARE, "x"]).agreeing == 3
    assert find(["fc.weight", "fc.bias", "model.x"], BARE).rule == "exact"


def test_two_names_never_become_one() -> None:
    found = find(["module.fc.weight", "_orig_mod.module.fc.weight"], ["fc.weight"])
    assert found.rule == "exact"


def test_what_the_target_lacks_is_wrapped_as_the_target_is() -> None:
    found = find([*BARE, "fc.weight_g"], under("module"))
    assert found.names["fc.weight_g"] == "module.fc.weight_g"


@pytest.mark.slow
def test_many_names() -> None:
    names = [f"layers.{index}.weight" for index in range(20_000)]
    found = find(under("a", names), under("b", [*names, "x"]))
    assert found.agreeing == 0
