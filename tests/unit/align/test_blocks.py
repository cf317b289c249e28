"""Blocks that shapes show to be the same tell the parts of equal shapes in them: layouts of real networks, in small."""

from __future__ import annotations

from ckptfix.align.match import match
from ckptfix.names.slots import Slot

Rows = list[tuple[str, str, tuple[int, ...]]]
"""Names of one side, of the other, and the shape of each tensor, in the order of the first side."""


def answered(rows: Rows, order: list[int] | None = None, more: tuple[str, ...] = ()) -> bool:
    """Whether all is matched, both ways, after no wrong pair was claimed.

    Args:
        order: of the rows on the other side.
        more: buffers that the first side alone has.
    """
    one = [Slot(f"{name}.weight", shape, "float32") for name, _, shape in rows]
    one += [Slot(name, (49,), "int64") for name in more]
    other = [Slot(f"{rows[at][1]}.weight", rows[at][2], "float32") for at in order or range(len(rows))]
    truth = {f"{name}.weight": f"{new}.weight" for name, new, _ in rows}
    back = {new: name for name, new in truth.items()}
    ends = []
    for ours, theirs, known in ((one, other, truth), (other, one, back)):
        found = match(ours, theirs)
        assert all(known[pair.source] == pair.target for pair in found.pairs if not pair.instead)
        ends.append(found.complete)
    assert ends[0] == ends[1]
    return ends[0]


def test_norms_of_blocks_that_count_their_parts_against_those_that_name_them() -> None:
    """MobileNet of timm and pytorchcv: where a stage keeps its width, sizes leave two ways to split the norms."""
    rows: Rows = []
    for at in range(3):
        ours, theirs = f"blocks.4.{at}", f"features.stage5.unit{at + 1}"
        wide = (32 if at == 0 else 16,)
        rows += [
            (f"{ours}.conv_dw", f"{theirs}.dw_conv.conv", (*wide, 1, 3, 3)),
            (f"{ours}.bn1", f"{theirs}.dw_conv.bn", wide),
            (f"{ours}.conv_pw", f"{theirs}.pw_conv.conv", (16, *wide, 1, 1)),
            (f"{ours}.bn2", f"{theirs}.pw_conv.bn", (16,)),
        ]
    assert answered(rows[:8])


def test_buffers_that_may_be_lacking_are_no_part_of_a_block() -> None:
    """Swin of torchvision and timm: with its two indices a stage has as many as the other's with the downsampling."""
    rows: Rows = [("features.2.reduction", "layers.1.downsample.reduction", (8, 16)),
                  ("features.2.norm", "layers.1.downsample.norm", (16,))]  # fmt: skip
    for stage, width in ((1, 4), (3, 8), (5, 16)):
        for at in range(2):
            ours, theirs = f"features.{stage}.{at}", f"layers.{stage // 2}.blocks.{at}"
            rows += [(f"{ours}.{part}", f"{theirs}.{part}", (width,)) for part in ("norm1", "norm2")]
            rows += [(f"{ours}.attn.{part}", f"{theirs}.attn.{part}", (size * width, width))
                     for part, size in (("qkv", 3), ("proj", 1))]  # fmt: skip
    indices = tuple(f"features.{stage}.{at}.attn.relative_position_index" for stage in (1, 3, 5) for at in range(2))
    rows.sort()
    assert answered(rows, more=indices)


def test_lists_count_from_elsewhere_where_convolutions_of_their_places_are_the_same() -> None:
    """SKNet of pytorchcv and timm: ``branch2`` and ``branch3`` beside ``paths.0`` and ``paths.1``."""
    rows: Rows = []
    for at in range(3):
        ours, theirs = f"stage1.unit{at + 1}.body", f"layer1.{at}"
        rows += [(f"{ours}.conv1.conv", f"{theirs}.conv1.conv", (8, 16, 1, 1)),
                 (f"{ours}.conv1.bn", f"{theirs}.conv1.bn", (8,))]  # fmt: skip
        for number in (0, 1):
            lists = f"{ours}.conv2.branches.branch{number + 2}", f"{theirs}.conv2.paths.{number}"
            rows += [(f"{lists[0]}.conv", f"{lists[1]}.conv", (8, 2, 3, 3)), (f"{lists[0]}.bn", f"{lists[1]}.bn", (8,))]
    assert answered(rows)
    # Without them, bn0 and bn1 may be any two of three.
    assert not answered([row for row in rows if row[0].endswith("bn")])


def test_the_shortcut_is_told_by_the_name_of_what_it_goes_past() -> None:
    """RegNet of torchvision, whose blocks have ``proj`` beside ``f``, and of timm, which defines the shortcut last."""
    rows: Rows = []
    for stage, (before, width) in enumerate(((4, 8), (8, 12)), 1):
        ours, theirs = f"trunk.block{stage}.block{stage}-0", f"s{stage}.b1"
        rows += [
            (f"{ours}.proj.0", f"{theirs}.downsample.conv", (width, before, 1, 1)),
            (f"{ours}.f.a.0", f"{theirs}.conv1.conv", (width, before, 1, 1)),
            (f"{ours}.f.b.0", f"{theirs}.conv2.conv", (width, 4, 3, 3)),
        ]
    assert answered(rows, [1, 2, 0, 4, 5, 3])
    assert not answered([(name.replace(".f.", "."), new, shape) for name, new, shape in rows], [1, 2, 0, 4, 5, 3])
