"""Several state dicts as one: every tensor once, ties as they were, and no name twice."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import safetensors.torch
import torch

import ckptfix
from ckptfix.errors import KeyConflict, Refused, WouldOverwrite


@pytest.mark.parametrize("name", ["out.pth", "out.safetensors", "legacy.pth", "shards"])
def test_every_tensor_of_each(tmp_path: Path, name: str) -> None:
    shared = torch.randn(3)
    one = {"enc.a": shared, "enc.b": shared, "enc.i": torch.arange(4)}
    two = {"dec.w": torch.randn(2, 3).bfloat16(), "dec.n": torch.tensor(5)}
    torch.save({"state_dict": one, "epoch": 3}, tmp_path / "one.pth")
    safetensors.torch.save_file(two, tmp_path / "two.safetensors")
    to = {"legacy.pth": "legacy", "shards": "hf"}.get(name)
    done = ckptfix.merge([tmp_path / "one.pth", tmp_path / "two.safetensors"], tmp_path / name, to=to)  # type: ignore[arg-type]
    found = ckptfix.load_state_dict(tmp_path / name)
    assert set(found) == {*one, *two}
    assert all(torch.equal(found[key], value) for key, value in {**one, **two}.items())
    if name.endswith("pth"):
        assert found["enc.a"].data_ptr() == found["enc.b"].data_ptr()
    assert done.left == ("epoch",) and not done.account.lost
    assert [count for _, count in done.inputs] == [3, 2]


def test_big_endian_and_little_endian(tmp_path: Path) -> None:
    from builders import Tensor, assemble, state_dict_ops, torch_zip, written

    pickle = assemble(("PROTO", 2), *state_dict_ops({"big": Tensor("0", (3,), 3)}), "STOP")
    big = written(tmp_path / "big.pth", torch_zip(pickle, [struct.pack(">3f", 1, 2, 3)], byteorder="big"))
    torch.save({"little": torch.arange(3.0)}, tmp_path / "little.pth")
    for name in ("out.safetensors", "out.pth"):
        ckptfix.merge([big, tmp_path / "little.pth"], tmp_path / name)
        found = ckptfix.load_state_dict(tmp_path / name)
        assert {key: value.tolist() for key, value in found.items()} == {"big": [1, 2, 3], "little": [0, 1, 2]}


def test_names_in_two_of_them_are_all_said(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1), "b": torch.ones(1), "c": torch.ones(1)}, tmp_path / "one.pth")
    torch.save({"b": torch.ones(1), "c": torch.ones(2), "d": torch.ones(1)}, tmp_path / "two.pth")
    with pytest.raises(KeyConflict, match="2 keys in two inputs: b, c") as caught:
        ckptfix.merge([tmp_path / "one.pth", tmp_path / "two.pth"], tmp_path / "out.pth")
    assert [name for name, _ in caught.value.pairs] == ["b", "c"]
    assert not (tmp_path / "out.pth").exists()


def test_one_input_and_an_output_that_is_an_input(tmp_path: Path) -> None:
    for name in ("one", "two"):
        torch.save({name: torch.ones(1)}, tmp_path / f"{name}.pth")
    with pytest.raises(Refused, match="at least two inputs"):
        ckptfix.merge([tmp_path / "one.pth"], tmp_path / "out.pth")
    with pytest.raises(WouldOverwrite):
        ckptfix.merge([tmp_path / "one.pth", tmp_path / "two.pth"], tmp_path / "two.pth", force=True)
