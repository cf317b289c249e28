"""A module and its siblings: what is certain of one of them says where the others are."""

from __future__ import annotations

from ckptfix.align.match import match
from ckptfix.names.slots import Slot

WIDTH = 16


def slots(convolutions: dict[str, tuple[int, ...]], norms: list[str]) -> list[Slot]:
    """A convolution, then a norm, and so on."""
    found = []
    for (name, shape), norm in zip(convolutions.items(), norms, strict=True):
        found.append(Slot(f"{name}.weight", shape, "float32"))
        found += (Slot(f"{norm}.{leaf}", (WIDTH,), "float32") for leaf in ("weight", "bias"))
    return found


def test_a_norm_stays_beside_the_convolution_that_only_its_shape_tells() -> None:
    first, last = (WIDTH, 3, 3, 3), (WIDTH, WIDTH, 1, 1)
    source = slots({"features.init_block.conv": first, "conv1x1": last}, ["features.init_block.bn", "norm"])
    target = slots(
        {"embedder.convolution": first, "features.final_block.conv": last},
        ["embedder.normalization", "features.final_block.bn"],
    )
    for one, other in ((source, target), (target, source)):
        pairs = {pair.source: pair for pair in match(one, other).pairs}
        assert [pairs[slot.name].target for slot in one] == [slot.name for slot in other]
        assert not any(pair.instead for pair in pairs.values())
