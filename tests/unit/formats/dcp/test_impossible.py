"""Tensors that a distributed checkpoint cannot hold, since nothing can."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import Tensor, assemble, state_dict_ops, torch_zip, written

import ckptfix
from ckptfix.errors import CkptfixError


@pytest.mark.parametrize(("tensor", "message"), [
    (Tensor("0", (0, 2**62, 2**62), 2, stride=(1, 1, 1)), "too many elements"),
    (Tensor("0", (2**40, 2**40), 2, stride=(0, 0)), "too many elements"),
    (Tensor("0", (2**35,), 2, stride=(0,)), "a view of 137,438,953,472 bytes that repeats the 8 bytes"),
])  # fmt: skip
def test_tensors_that_nobody_can_hold_are_refused_at_once(tmp_path: Path, tensor: Tensor, message: str) -> None:
    ops = state_dict_ops({"x": tensor})
    source = written(tmp_path / "a.pth", torch_zip(assemble(("PROTO", 2), *ops, "STOP"), [bytes(8)]))
    with pytest.raises(CkptfixError, match=message):
        ckptfix.convert(source, tmp_path / "out", to="dcp")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("least", "refused"), [(4000, True), (4001, False)])
def test_a_view_that_repeats_its_storage_a_thousand_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int, refused: bool
) -> None:
    monkeypatch.setattr("ckptfix.formats.dcp.write.REPEATED", least)
    ops = state_dict_ops({"x": Tensor("0", (1000,), 1, stride=(0,))})
    source = written(tmp_path / "a.pth", torch_zip(assemble(("PROTO", 2), *ops, "STOP"), [bytes(4)]))
    if refused:
        with pytest.raises(CkptfixError, match="that repeats the 4 bytes"):
            ckptfix.convert(source, tmp_path / "out", to="dcp")
    else:
        assert ckptfix.convert(source, tmp_path / "out", to="dcp").written
