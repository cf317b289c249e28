"""``repair --fill`` makes up what lost tensors need, and no more than a damaged file could have held."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from builders import Tensor, assemble, legacy, safetensors, state_dict_ops, torch_zip

import ckptfix
from ckptfix.errors import Refused

WHOLE = Tensor("0", (2,), 2)
DATA = struct.pack("<2f", 1, 2)


def damaged(path: Path, **tensors: Tensor) -> Path:
    """A file with one whole storage; the others are not in it."""
    ops = state_dict_ops({"whole": WHOLE, **tensors})
    path.write_bytes(torch_zip(assemble(("PROTO", 2), *ops, "STOP"), [DATA]))
    return path


def test_a_storage_that_promises_gigabytes_gets_what_its_tensors_need(tmp_path: Path) -> None:
    lost = Tensor("7", (3, 4), 2**31)
    later = Tensor("7", (2,), 2**31, offset=20)
    source = damaged(tmp_path / "in.pth", lost=lost, later=later)
    result = ckptfix.repair(source, tmp_path / "out.pth", fill="zeros")
    assert (tmp_path / "out.pth").stat().st_size < 5000
    loaded = torch.load(tmp_path / "out.pth", weights_only=True)
    assert loaded["lost"].shape == (3, 4) and not loaded["lost"].any() and loaded["whole"].tolist() == [1, 2]
    assert loaded["later"].untyped_storage().data_ptr() == loaded["lost"].untyped_storage().data_ptr()
    assert loaded["later"].storage_offset() == 20 and loaded["lost"].untyped_storage().nbytes() == 22 * 4
    assert {loss.name for loss in result.losses} == {"lost", "later"} and result.exit_code == 3


def test_a_shape_far_beyond_the_file_is_refused(tmp_path: Path) -> None:
    """The rule: 64 MiB and a hundred times the file."""
    source = damaged(tmp_path / "in.pth", lost=Tensor("7", (2**31,), 2**31))
    with pytest.raises(Refused, match="generates at most") as caught:
        ckptfix.repair(source, tmp_path / "out.pth", fill="zeros")
    assert caught.value.where == "lost" and caught.value.path == str(source)
    assert not (tmp_path / "out.pth").exists()


def test_a_shape_far_beyond_a_safetensors_file_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "in.safetensors"
    source.write_bytes(safetensors([("lost", "F32", (2**31,), DATA), ("whole", "F32", (2,), DATA)]))
    with pytest.raises(Refused, match="generates at most") as caught:
        ckptfix.repair(source, tmp_path / "out.safetensors", fill="zeros")
    assert caught.value.where == "lost" and not (tmp_path / "out.safetensors").exists()
    assert ckptfix.repair(source, tmp_path / "out.safetensors").kept == ("whole",)


def test_what_a_file_can_have_lost_is_filled_whole(tmp_path: Path) -> None:
    source = damaged(tmp_path / "in.pth", lost=Tensor("7", (1000, 1000), 1_000_000))
    ckptfix.repair(source, tmp_path / "out.pth", fill="nan")
    assert torch.load(tmp_path / "out.pth", weights_only=True)["lost"].isnan().all()


def test_a_legacy_file(tmp_path: Path) -> None:
    tensors = {
        "whole": Tensor("0", (2,), 2, legacy=True), "lost": Tensor("7", (3,), 2**33, legacy=True)
    }  # fmt: skip
    pickle = assemble(("PROTO", 2), *state_dict_ops(tensors), "STOP")
    source = tmp_path / "in.pth"
    source.write_bytes(legacy(pickle, [("0", 2, DATA), ("7", 2**33, b"")]))
    ckptfix.repair(source, tmp_path / "out.pth", fill="zeros")
    assert torch.load(tmp_path / "out.pth", weights_only=True)["lost"].tolist() == [0, 0, 0]


MARKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda value: value,
    "neg": torch._neg_view,
    "conj": torch.conj,
    "conj neg": lambda value: torch._neg_view(value.conj()),
}


@pytest.mark.parametrize(("lost", "donor"), list(product(MARKS, repeat=2)))
def test_values_come_from_another_file_whatever_the_bytes_are(lost: str, donor: str, tmp_path: Path) -> None:
    """A conjugated or negated tensor gets the bytes that stand for the other one's values."""
    value = torch.randn(3, 4, dtype=torch.complex64)
    torch.save({"x": torch.ones(2), "w": MARKS[lost](torch.zeros_like(value))}, tmp_path / "whole.pth")
    torch.save({"x": torch.ones(2), "w": MARKS[donor](value)}, tmp_path / "donor.pth")
    with zipfile.ZipFile(tmp_path / "whole.pth") as whole, zipfile.ZipFile(tmp_path / "in.pth", "w") as cut:
        for info in whole.infolist():
            if not info.filename.endswith("/data/1"):
                cut.writestr(info.filename, whole.read(info))
    ckptfix.repair(tmp_path / "in.pth", tmp_path / "out.pth", fill_from=tmp_path / "donor.pth")
    made = torch.load(tmp_path / "out.pth", weights_only=True)["w"]
    assert torch.equal(made.resolve_conj().resolve_neg(), MARKS[donor](value).resolve_conj().resolve_neg())
    assert (made.is_conj(), made.is_neg()) == ("conj" in lost, "neg" in lost)
