"""Shapes and strides: numbers that a tensor can have, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from ckptfix.formats.torch.tensors import BadTensor, sizes


@pytest.mark.parametrize("good", [(), (0,), (3, (1 << 63) - 1), [2, 2]])
def test_sizes_of_a_tensor(good: Any) -> None:
    assert sizes(good) == tuple(good)


@pytest.mark.parametrize("bad", [(-1,), (1.5,), (True,), (1 << 63,), ("2",), (None,), 3, "33", None])
def test_what_is_no_size(bad: Any) -> None:
    with pytest.raises(BadTensor, match="not a tuple of sizes"):
        sizes(bad)
