"""Storages that a pickle promises otherwise than they are, throws away, or has in place of a tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from builders import Tensor, assemble, push, state_dict_ops, tensor_ops, torch_zip

import ckptfix
from ckptfix.errors import DamagedFile
from ckptfix.formats.torch.common import Storages
from ckptfix.formats.torch.tensors import BadTensor, tensor_entry

STORED = {"a": Tensor("0", (2,), 2), "b": Tensor("1", (2,), 2), "c": Tensor("2", (2,), 2)}


def test_a_legacy_file_holds_no_storage_of_another_size_than_is_promised(tmp_path: Path) -> None:
    """By the size that is promised a reader finds the next storage: all behind it would be lost."""
    path, out = tmp_path / "in.pth", tmp_path / "out.pth"
    pickle = assemble(("PROTO", 2), *state_dict_ops(STORED), "STOP")
    path.write_bytes(torch_zip(pickle, [bytes(8), bytes(16), bytes(8)]))
    with pytest.raises(DamagedFile, match="storage 1, which has 16 bytes instead of 8") as refused:
        ckptfix.sanitize(path, out, torch="1.5")
    assert "ckptfix repair" in str(refused.value.hint) and not out.exists()


@pytest.mark.parametrize("torch_version", [None, "1.5"])
def test_what_a_pickle_throws_away_is_not_lost(tmp_path: Path, torch_version: str | None) -> None:
    path, out = tmp_path / "in.pth", tmp_path / "out.pth"
    thrown = tensor_ops(Tensor("1", (2,), 2))
    odd = state_dict_ops({"a": STORED["a"], "odd": push(b"x")})
    path.write_bytes(torch_zip(assemble(("PROTO", 2), *thrown, "POP", *odd, "STOP"), [bytes(8), bytes(8)]))
    done = ckptfix.sanitize(path, out, torch=torch_version)
    assert done.exit_code == 0 and not any("bug in ckptfix" in str(finding) for finding in done.findings)
    assert ckptfix.repair(out, None, check_only=True).kept == ("a",)


@pytest.mark.parametrize("value", [[], {}, None, "text", ()])
def test_what_stands_in_place_of_a_tensor_is_not_taken_for_a_call(value: object) -> None:
    """As in the file of a rank, where the files of the others have a tensor."""
    with pytest.raises(BadTensor, match="not a tensor"):
        tensor_entry(value, "key", "", Storages(lambda key: (None, -1, None)))  # type: ignore[arg-type]


def test_repair_names_a_tensor_whose_call_describes_none(tmp_path: Path) -> None:
    """Every loader fails on it: repair leaves it out, and doctor then finds nothing to repair."""
    path, out = tmp_path / "in.pth", tmp_path / "out.pth"
    beyond = {"good": STORED["a"], "beyond": Tensor("1", (9,), 2)}
    path.write_bytes(torch_zip(assemble(("PROTO", 2), *state_dict_ops(beyond), "STOP"), [bytes(8), bytes(8)]))
    assert "bad-tensor" in {finding.id for finding in ckptfix.doctor(path).findings}
    done = ckptfix.repair(path, out)
    assert done.exit_code == 3 and done.kept == ("good",) and [loss.name for loss in done.losses] == ["beyond"]
    assert "needs 36 bytes of storage 1, which has 8" in done.losses[0].reason
    assert {finding.severity for finding in ckptfix.doctor(out).findings} <= {"info"}
    assert list(torch.load(out, weights_only=True)) == ["good"]
