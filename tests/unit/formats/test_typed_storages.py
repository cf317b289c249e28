"""A storage that is named twice: under one dtype it is shared; under two, torch.load and we would differ."""

from __future__ import annotations

import itertools
import struct
from pathlib import Path

import pytest
import torch
from builders import Op, Tensor, assemble, push, replace, state_dict_ops, torch_zip, written

import ckptfix
from ckptfix.errors import CkptfixError

NUMBERS = struct.pack("<2f", 1, 2)
FLOATS = Tensor("0", (2,), 2)
HALVES = replace(FLOATS, storage_class="HalfStorage", numel=4)
BYTES = replace(FLOATS, storage_class="ByteStorage", numel=8)
INTS = replace(FLOATS, storage_class="IntStorage")


def untyped(dtype: str, count: int) -> list[Op]:
    """A tensor on the UntypedStorage of the same bytes."""
    storage: list[Op] = ["MARK", *push("storage"), ("GLOBAL", "torch.storage", "UntypedStorage"), *push("0"),
                         *push("cpu"), *push(8), "TUPLE", "BINPERSID"]  # fmt: skip
    hooks: list[Op] = [("GLOBAL", "collections", "OrderedDict"), "EMPTY_TUPLE", "REDUCE"]
    return [("GLOBAL", "torch._utils", "_rebuild_tensor_v3"), "MARK", *storage, *push(0), *push((count,)), *push((1,)),
            *push(False), *hooks, ("GLOBAL", "torch", dtype), "TUPLE", "REDUCE"]  # fmt: skip


def saved(path: Path, *tensors: Tensor | list[Op]) -> Path:
    ops = state_dict_ops(dict(zip("abc", tensors, strict=False)))
    return written(path, torch_zip(assemble(("PROTO", 2), *ops, "STOP"), [NUMBERS]))


def equal(path: Path, other: Path | None = None) -> bool:
    """Whether we load what torch loads, dtypes included."""
    ours, theirs = ckptfix.load_state_dict(path), torch.load(other or path, weights_only=True)
    return ours.keys() == theirs.keys() and all(
        one.dtype == theirs[name].dtype and torch.equal(one.view(torch.uint8), theirs[name].view(torch.uint8))
        for name, one in ours.items()
    )


@pytest.mark.parametrize(("one", "other"), [*itertools.permutations([FLOATS, HALVES, BYTES, INTS], 2)])
def test_two_dtypes_are_an_error_of_both(one: Tensor, other: Tensor, tmp_path: Path) -> None:
    path = saved(tmp_path / "in.pth", one, other)
    loaded = torch.load(path, weights_only=True)
    assert loaded["a"].dtype == loaded["b"].dtype, "torch gives the first dtype to both"
    bad = [row for row in ckptfix.doctor(path).findings if row.id == "bad-tensor"]
    assert [row.where for row in bad] == ["a", "b"] and ckptfix.doctor(path).exit_code() == 1
    with pytest.raises(CkptfixError, match="declared as"):
        ckptfix.load_state_dict(path)
    for to in ("safetensors", "legacy", "hf"):
        with pytest.raises(CkptfixError, match="declared as"):
            ckptfix.convert(path, tmp_path / f"out-{to}", to=to)
    with pytest.raises(CkptfixError, match="declared as"):
        ckptfix.extract(path, tmp_path / "out.pth")
    with pytest.raises(CkptfixError, match="declared as"):
        ckptfix.repair(path, tmp_path / "out.pth")


def test_what_is_beside_it_is_kept(tmp_path: Path) -> None:
    ops = state_dict_ops({"a": FLOATS, "b": HALVES, "good": replace(FLOATS, key="1")})
    path = written(tmp_path / "in.pth", torch_zip(assemble(("PROTO", 2), *ops, "STOP"), [NUMBERS, NUMBERS]))
    result = ckptfix.repair(path, tmp_path / "out.pth")
    assert result.kept == ("good",) and [loss.name for loss in result.losses] == ["a", "b"]
    assert torch.load(tmp_path / "out.pth", weights_only=True).keys() == {"good"}


def test_torch_writes_none(tmp_path: Path) -> None:
    floats = torch.ones(2)
    with pytest.raises(RuntimeError, match="view the same data as different types"):
        torch.save({"a": floats, "b": floats.view(torch.float16)}, tmp_path / "in.pth")


BASE = torch.arange(8, dtype=torch.uint8)
VIEWS = [torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32]


@pytest.mark.parametrize(("one", "other"), [*itertools.permutations(VIEWS, 2)])
def test_views_that_torch_writes_keep_their_own_dtypes(one: torch.dtype, other: torch.dtype, tmp_path: Path) -> None:
    """A ByteStorage beside an UntypedStorage of one key, or two dtypes on an UntypedStorage."""
    path = tmp_path / "in.pth"
    torch.save({"a": BASE.view(one), "b": BASE.view(other)}, path)
    assert equal(path)
    assert not [row for row in ckptfix.doctor(path).findings if row.severity == "error"]
    for verb in (ckptfix.extract, ckptfix.repair, ckptfix.sanitize, ckptfix.add_module):
        out = tmp_path / "out.pth"
        result = verb(path, out, force=True)
        assert result.exit_code == 0 and (verb is ckptfix.add_module or equal(out, path))
    ckptfix.convert(path, tmp_path / "out.safetensors")
    assert equal(tmp_path / "out.safetensors", path)


@pytest.mark.parametrize("order", [*itertools.permutations([("float32", 2), ("float16", 4), ("uint8", 8)])])
def test_typed_dtypes_on_an_untyped_storage_keep_theirs(order: list[tuple[str, int]], tmp_path: Path) -> None:
    """torch reads such a file right; what is written anew must not name the storage by classes of each."""
    path = saved(tmp_path / "in.pth", *(untyped(*one) for one in order))
    assert equal(path)
    for verb in (ckptfix.extract, ckptfix.repair, ckptfix.sanitize):
        verb(path, tmp_path / "out.pth", force=True)
        assert equal(tmp_path / "out.pth", path)


def test_many_tensors_on_one_storage_are_shared(tmp_path: Path) -> None:
    whole = torch.arange(100.0)
    torch.save({str(number): whole[number:] for number in range(50)}, tmp_path / "in.pth")
    assert equal(tmp_path / "in.pth")


def test_the_meta_device_is_not_compared(tmp_path: Path) -> None:
    meta = torch.empty(4, device="meta")
    torch.save({"a": meta, "b": meta.view(torch.int32), "c": torch.ones(1)}, tmp_path / "in.pth")
    assert "bad-tensor" not in {row.id for row in ckptfix.doctor(tmp_path / "in.pth").findings}
