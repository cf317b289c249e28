"""Modules in doubt are told by other blocks that have the same names, and norms by the module that they share."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ckptfix.align.match import match
from ckptfix.align.siblings import RepeatedBlocks
from ckptfix.align.units import side
from ckptfix.names.slots import Slot

Shapes = Mapping[str, tuple[int, ...]]

NORM, SQUARE = (4,), (4, 4)


def slots(shapes: Shapes) -> list[Slot]:
    return [Slot(f"{name}.weight", shape, "float32") for name, shape in shapes.items()]


def open_pairs(pairs: Mapping[str, str], shapes: Shapes) -> set[str]:
    """Return the modules in doubt, after no certain pair was wrong."""
    theirs = {other: shapes[one] for one, other in pairs.items()}
    found = match(slots(shapes), slots({name: theirs[name] for name in sorted(theirs)}))
    sure = {pair.source: pair.target for pair in found.pairs if not pair.instead}
    assert all(pairs[one.removesuffix(".weight")] == other.removesuffix(".weight") for one, other in sure.items())
    return {f"{one}.weight" for one in pairs} - sure.keys()


def test_a_name_is_in_the_second_tower_what_it_is_in_the_first() -> None:
    """Only in the left tower do shapes tell the first layer from the last."""
    names = {"stem": "fc_in", "blocks.0.lin": "layers.0.linear", "blocks.0.ln": "layers.0.norm", "proj": "fc_out"}
    towers = {"left": "tower_a", "right": "tower_b"}
    pairs = {f"{one}.{ours}": f"{other}.{theirs}" for one, other in towers.items() for ours, theirs in names.items()}
    shapes = {name: NORM if name.endswith("ln") else SQUARE for name in pairs}
    shapes |= {"left.stem": (4, 3), "left.proj": (2, 4), "left.blocks.0.lin": (5, 5), "left.blocks.0.ln": (5,)}
    shapes |= {"right.blocks.0.lin": (6, 6), "right.blocks.0.ln": (6,)}
    assert not open_pairs(pairs, shapes)


def test_a_block_with_further_names_may_be_of_another_class() -> None:
    pairs = {"a.one": "x.b", "a.two": "x.c", "b.one": "y.c", "b.two": "y.b", "b.three": "y.d"}
    ours, theirs = (side(slots(dict.fromkeys(names, SQUARE))) for names in (pairs, pairs.values()))
    units = {unit.path: unit for one in (ours, theirs) for unit in one.units}
    known = {units[one]: units[pairs[one]] for one in ("a.one", "a.two")}
    found = RepeatedBlocks(known, (ours, theirs), {"a": "x", "b": "y"}.get)
    asked = [units["b.one"], units["b.two"]], [units["y.b"], units["y.c"]]
    assert found.decided(*asked, ("b", "y")) == {}
    assert found.decided(*asked, ("", "")) == {}


STEM = {"stem.0": "conv1", "stem.1": "bn1", "h.0.fc": "blocks.0.lin", "h.1.fc": "blocks.1.lin", "ln_f": "norm"}


@pytest.mark.parametrize("inputs", [3, 4])
def test_a_norm_in_a_module_with_a_convolution_is_told_without_an_order(inputs: int) -> None:
    shapes = {"stem.0": (4, inputs, 7, 7), "stem.1": NORM, "h.0.fc": SQUARE, "h.1.fc": SQUARE, "ln_f": NORM}
    assert not open_pairs({f"net.{one}": other for one, other in STEM.items()},
                          {f"net.{one}": shape for one, shape in shapes.items()})  # fmt: skip
