"""The number that is missing among modules of a block is that of the one that nothing describes."""

from __future__ import annotations

import pytest

from ckptfix.align import numbered
from ckptfix.align.match import match
from ckptfix.names.slots import Slot

FULL = ["{}.norm1", "{}.norm2"]


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        (FULL, ["{}.zan", "{}.bn2"], ["zan", "bn2"]),
        (FULL, ["{}.bn2", "{}.zan"], ["zan", "bn2"]),
        (FULL, ["{}.bn0", "{}.zan"], ["bn0", "zan"]),
        (FULL, ["{}.bn_b", "{}.zan"], ["zan", "bn_b"]),
        (["{}.conv1", "{}.conv2", "{}.conv3"], ["{}.zan", "{}.cv1", "{}.cv3"], ["cv1", "zan", "cv3"]),
        (["{}.0", "{}.1"], ["{}.h2h", "{}.zan"], ["zan", "h2h"]),
        # bn1 may be the second after bn0.
        (FULL, ["{}.zan", "{}.bn1"], None),
        # Two that nothing describes.
        (FULL, ["{}.zan", "{}.kip"], None),
        (["{}.conv1", "{}.conv2", "{}.conv3"], ["{}.zan", "{}.kip", "{}.c3"], None),
        # Lists count their own modules, and may hold layers of all kinds.
        (FULL, ["{}.norms.1", "{}.zan"], None),
        (["{}.0", "{}.4"], ["{}.zan", "{}.shortcut.0"], None),
        (FULL, ["{}.layer.1.norm", "{}.zan"], None),
        # Neither side is in order.
        (["{}.kip", "{}.norm2"], ["{}.zan", "{}.bn2"], None),
    ],
)  # fmt: skip
def test_all_but_one(one: list[str], other: list[str], wanted: list[str] | None) -> None:
    found = dict(numbered.paired(one, other, (one, other), ((), ())))
    back = dict(numbered.paired(other, one, (other, one), ((), ())))
    assert back == {to: row for row, to in found.items()}
    assert found == ({row: other.index(f"{{}}.{name}") for row, name in enumerate(wanted)} if wanted else {})


@pytest.mark.parametrize(
    ("beside", "similar"),
    [(["{}.bn1"], []), (["{}.bn3"], []), (["{}.fim"], ["{}.fim"])],
    ids=["of another shape", "beyond", "nothing describes it"],
)
def test_numbers_that_count_modules_of_other_shapes_say_nothing(beside: list[str], similar: list[str]) -> None:
    texts = ["{}.bn2", "{}.zan"]
    assert numbered.paired(FULL, texts, (FULL, [*texts, *beside]), ((), ())) == [] or similar
    assert numbered.paired(FULL, texts, (FULL, [*texts, *beside]), ((), similar)) == []


@pytest.mark.parametrize("third", [False, True])
def test_a_bottleneck_whose_first_norm_has_no_number(third: bool) -> None:
    """With another norm of its own width, bn2 and the rest are the last two of three."""
    pairs = {"conv1": "zan", "bn1": "kip", "conv2": "fim", "bn2": "bn2"}
    shapes = {"conv1": (4, 4, 1, 1), "bn1": (4,), "conv2": (4, 4, 3, 3), "bn2": (4,)}
    if third:
        pairs |= {"bn3": "lor", "conv3": "tus"}
        shapes |= {"bn1": (8,), "bn3": (4,), "conv1": (8, 4, 1, 1), "conv2": (4, 8, 3, 3), "conv3": (4, 4, 1, 1)}
    sides = [[Slot(f"layers.{at}.{name}.weight", shapes[one], "float32") for at in range(2)
              for one, name in ((one, (one, pairs[one])[which]) for one in pairs)] for which in (0, 1)]  # fmt: skip
    found = match(*sides)
    wanted = {f"layers.{at}.{one}.weight": f"layers.{at}.{other}.weight" for at in range(2)
              for one, other in pairs.items()}  # fmt: skip
    assert all(wanted[row.source] == row.target for row in found.pairs if not row.instead)
    assert found.complete == (not third)
