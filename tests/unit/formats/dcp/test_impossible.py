"""Tensors that a distributed checkpoint cannot hold, since nothing can."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import Tensor, assemble, state_dict_ops, torch_zip, written

import ckptfix
from ckptfix.errors import CkptfixError


@pytest.mark.parametrize(("tensor", "message"), [
    (Tensor("0", (0, 2**62, 2**62), 2, stride=(1, 1, 1)), "more elements than there can be"),
    (Tensor("0", (2**40, 2**40), 2, stride=(0, 0)), "more elements than there can be"),
    (Tensor("0", (2**35,), 2, stride=(0,)), "a view of 137,438,953,472 bytes, which repeats the 8 bytes"),
])  # fmt: skip
def test_tensors_that_nobody_can_hold_are_refused_at_once(tmp_path: Path, tensor: Tensor, message: str) -> None:
    ops = state_dict_ops({"x": tensor})
    source = written(tmp_path / "a.pth", torch_zip(assemble(("PROTO", 2), *ops, "STOP"), [bytes(8)]))
    with pytest.raises(CkptfixError, match=message):
        ckptfix.convert(source, tmp_path / "out", to="dcp")
    assert not (tmp_path / "out").exists()
