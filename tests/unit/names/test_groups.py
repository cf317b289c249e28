"""Names in groups: ranges of layers, whole modules, and single names."""

from __future__ import annotations

import pytest

from ckptfix.names.groups import collapse, shown


def texts(names: list[str], among: list[str] | None = None) -> list[str]:
    return [str(group) for group in collapse(names, among or [])]


LAYERS = [f"layers.{i}.{part}.{leaf}" for i in range(12) for part in ("attn", "mlp") for leaf in ("weight", "bias")]


@pytest.mark.parametrize(
    ("names", "among", "expected"),
    [
        ([], [], []),
        (["a.weight"], [], ["a.weight"]),
        (["a.weight", "a.bias"], [], ["a.* (2)"]),
        (["a.weight", "a.bias"], ["a.weight", "a.bias", "a.scale"], ["a.weight", "a.bias"]),
        (["a.weight"], ["a.weight", "b.weight"], ["a.weight"]),
        ([name for name in LAYERS if "attn" in name], LAYERS, ["layers.0-11.attn.* (24)"]),
        ([name for name in LAYERS if "attn.w" in name], LAYERS, ["layers.0-11.attn.weight (12)"]),
        (LAYERS, LAYERS, ["layers.0-11.* (48)"]),
        (["l.0.w", "l.2.w", "l.3.w", "l.4.w"], [], ["l.0,2-4.w (4)"]),
        (["l.0.w", "l.1.w", "l.1.b"], ["l.0.w", "l.0.b", "l.1.w", "l.1.b"], ["l.0.w", "l.1.* (2)"]),
        (["e.0.l.0.w", "e.0.l.1.w", "e.1.l.0.w", "e.1.l.1.w"], [], ["e.0-1.* (4)"]),
        (["e.0.l.0.w", "e.0.l.1.w", "e.1.l.0.w", "e.1.l.1.w"], ["e.0.x", "e.1.x"], ["e.0-1.l.0-1.w (4)"]),
        (["a", "a.b", "a.c"], [], ["a", "a.b", "a.c"]),
        (["0.w", "01.w", "1.w"], [], ["0-1,01.w (3)"]),
        ([".", "..", "", "a."], [], [".", "..", "", "a."]),
        (["w.x", "w.x"], [], ["w.x"]),
    ],
)
def test_groups(names: list[str], among: list[str], expected: list[str]) -> None:
    assert sorted(texts(names, among)) == sorted(expected)


def test_every_name_is_counted_once() -> None:
    names = [name for index, name in enumerate(LAYERS) if index % 3]
    assert sum(group.names for group in collapse(names, LAYERS)) == len(names)


def test_the_order_is_that_of_the_names() -> None:
    assert texts(["z.w", "a.w", "m.w"]) == ["z.w", "a.w", "m.w"]


def test_a_name_of_very_many_components() -> None:
    deep = ".".join("a" * 100_000)
    assert texts([deep]) == [deep]
    assert texts([deep, "a.b"], ["a.c"]) == ["a." + deep[2:], "a.b"]


def test_only_so_many_are_shown() -> None:
    assert shown(collapse(["a.w", "b.w", "c.w"]), most=2) == "a.w, b.w and 1 more"
