"""Other dtypes: every bit is torch's, what is tied stays tied, and what leaves the range is counted."""

from __future__ import annotations

import math
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from builders import Tensor, assemble, state_dict_ops, torch_zip, written

import ckptfix
from ckptfix.checkpoint import dtypes
from ckptfix.elements import arrays
from ckptfix.elements.arrays import Encoding
from ckptfix.errors import Refused, WouldLoseData
from ckptfix.ops.cast import cast_bytes

NARROW = tuple(name for name in arrays.TARGETS if dtypes.by_name(name).itemsize <= 2)
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "bool")


def bits(name: str) -> np.ndarray[Any, Any]:
    """Bit patterns of a dtype: all of the narrow ones; of others random ones, and the halves and neighbours of all
    numbers of the narrow ones."""
    random = np.random.default_rng(0)
    width = dtypes.by_name(name).itemsize
    if width <= 2:
        return np.arange(2 if name == "bool" else 256**width, dtype=f"u{width}")
    raw = random.integers(0, 256, (100_000, width), dtype=np.uint8).view(f"u{width}").ravel()
    if name not in ("float32", "float64"):
        return raw
    found = [raw.view(name)]
    for narrow in NARROW:
        kind = dtypes.numpy_dtype(narrow)
        assert kind is not None
        with np.errstate(all="ignore"):
            every = np.arange(256**kind.itemsize, dtype=f"u{kind.itemsize}").view(kind).astype(np.float64)
            every = np.unique(every[np.isfinite(every)])
            exact = np.concatenate([every, (every[1:] + every[:-1]) / 2]).astype(name)
            found += [exact, np.nextafter(exact, np.inf, dtype=name), np.nextafter(exact, -np.inf, dtype=name)]
    return np.concatenate([*found, np.array([-0.0, np.inf, -np.inf, np.nan], name)]).view(f"u{width}")


def as_torch(raw: bytes, name: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(getattr(torch, name))


@pytest.mark.parametrize("target", arrays.TARGETS)
@pytest.mark.parametrize("source", [*arrays.TARGETS, *INTEGERS])
def test_every_bit_is_that_of_torch(source: str, target: str) -> None:
    raw = bits(source).tobytes()
    expected = as_torch(raw, source).to(getattr(torch, target))
    made, tally = cast_bytes(raw, Encoding.of(source, sys.byteorder), Encoding.of(target, sys.byteorder))
    found = as_torch(made, target)
    wide, ours = expected.to(torch.float64), found.to(torch.float64)
    assert torch.equal(wide.isnan(), ours.isnan())
    same = found.view(torch.uint8).reshape(len(found), -1) == expected.view(torch.uint8).reshape(len(found), -1)
    assert bool((same.all(1) | wide.isnan()).all())
    before = as_torch(raw, source).to(torch.float64)
    assert tally.overflow == int((before.isfinite() & ~wide.isfinite()).sum())
    assert tally.underflow == int(((before != 0) & (wide == 0)).sum())
    if target == "float8_e4m3fn":
        assert tally.saturated == int((before.float().abs() > 464).sum())


@pytest.mark.parametrize("target", [name for name in arrays.TARGETS if name != "float64"])
def test_a_sum_is_rounded_once(target: str) -> None:
    """Against the nearest number of the dtype by distance, which no rounding on the way can spoil."""
    kind = dtypes.numpy_dtype(target)
    assert kind is not None
    values = bits("float64").view(np.float64)[:60_000]
    values = np.concatenate([values, np.random.default_rng(1).standard_normal(20_000)])
    with np.errstate(all="ignore"):
        made = arrays.once(values, target)
        if target == "float32" or kind.itemsize == 2:
            back = made.astype(np.float64)
        else:
            back = made.view(kind).astype(np.float64)
        inside = np.isfinite(values) & np.isfinite(back) & (np.abs(values) < 440)
        if target == "float8_e8m0fnu":
            inside &= values > 2.0**-100
        plain = values.astype(np.float32).astype(kind).astype(np.float64) if kind.itemsize < 4 else back
        assert bool((np.abs(values - back)[inside] <= np.abs(values - plain)[inside]).all())
    # Just above a half: what goes through float32 first comes down to the half, and then to the even number below.
    half = 1 + 2.0**-8 + 2.0**-40
    assert float(arrays.once(np.array([half]), "bfloat16").astype(np.float64)[0]) == 1 + 2.0**-7


def training() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    state = model.state_dict()
    state["tied"] = state["0.weight"]
    state["view"] = state["0.weight"][1:, ::2]
    state["big"] = torch.randn(700_000)
    return {"model": state, "optimizer": optimizer.state_dict(), "epoch": 3}


@pytest.mark.parametrize("legacy", [False, True])
def test_a_training_checkpoint(tmp_path: Path, legacy: bool) -> None:
    whole = training()
    torch.save(whole, tmp_path / "in.pth", _use_new_zipfile_serialization=not legacy)
    done = ckptfix.cast(tmp_path / "in.pth", tmp_path / "out.pth", "bf16")
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    stays = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    for name, tensor in whole["model"].items():
        expected = tensor if name in stays else tensor.bfloat16()
        assert found["model"][name].dtype is expected.dtype and torch.equal(found["model"][name], expected), name
    assert found["model"]["tied"].data_ptr() == found["model"]["0.weight"].data_ptr()
    view = found["model"]["view"]
    assert view.stride() == whole["model"]["view"].stride()
    assert view.untyped_storage().data_ptr() == found["model"]["tied"].untyped_storage().data_ptr()
    for number, row in whole["optimizer"]["state"].items():
        assert all(torch.equal(row[key], found["optimizer"]["state"][number][key]) for key in row)
    assert found["epoch"] == 3 and set(done.kept) == {f"model/{name}" for name in stays if "num" not in name}
    assert not done.account.lost and done.exit_code == 0 and len(done.cast) == 7


@pytest.mark.parametrize("to", ["safetensors", "hf", "dcp"])
def test_other_formats_and_folders(tmp_path: Path, to: str) -> None:
    torch.manual_seed(0)
    shared = torch.randn(40, 30)
    whole = {"a.w": shared, "b.w": shared, "c.w": torch.randn(30_000), "c.i": torch.arange(5)}
    torch.save(whole, tmp_path / "whole.pth")
    source = tmp_path / ("in.safetensors" if to == "safetensors" else "in")
    size = 100_000 if to == "hf" else None
    ckptfix.convert(tmp_path / "whole.pth", source, to=to, shard_size=size)  # type: ignore[arg-type]
    dest = source.with_name("out" + source.suffix)
    done = ckptfix.cast(source, dest, "float16", keep=["x*"], allow_unmatched=True)
    found = ckptfix.load_state_dict(dest)
    for name, tensor in whole.items():
        expected = tensor if name == "c.i" else tensor.half()
        assert found[name].dtype is expected.dtype and torch.equal(found[name], expected), name
    assert [row.where for row in done.findings if row.id == "unused-rule"] == ["x*"]
    assert not ckptfix.doctor(dest).exit_code(fail_on="warning")
    nbytes = sum(file.stat().st_size for file in ([dest] if dest.is_file() else dest.iterdir()))
    before = sum(file.stat().st_size for file in ([source] if source.is_file() else source.iterdir()))
    assert nbytes < 0.7 * before, "the old bytes are still there"
    if to == "safetensors":
        assert found["a.w"].data_ptr() == found["b.w"].data_ptr()
        assert set(safetensors.torch.load_file(dest)) == {"a.w", "c.w", "c.i"}


def test_a_distributed_checkpoint_is_read_by_torch(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    whole = {"model": {"w": torch.randn(300, 20), "v": torch.randn(7)}, "epoch": 3}
    torch.save(whole, tmp_path / "in.pth")
    ckptfix.convert(tmp_path / "in.pth", tmp_path / "in", to="dcp")
    ckptfix.cast(tmp_path / "in", tmp_path / "out", "bfloat16", keep=["v"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(tmp_path / "out", tmp_path / "back.pth")
    found = torch.load(tmp_path / "back.pth", weights_only=True)
    assert torch.equal(found["model"]["w"], whole["model"]["w"].bfloat16()) and found["epoch"] == 3  # type: ignore[index]
    assert torch.equal(found["model"]["v"], whole["model"]["v"])  # type: ignore[index]


def test_only_what_is_named(tmp_path: Path) -> None:
    whole = {"a": torch.ones(2), "n": torch.arange(3), "x.running_mean": torch.ones(2), "b": torch.ones(3)}
    torch.save(whole, tmp_path / "in.pth")
    ckptfix.cast(tmp_path / "in.pth", tmp_path / "out.pth", "float16", only=["n", "*.running_mean", "b"], keep=["b"])
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "a": torch.float32, "n": torch.float16, "x.running_mean": torch.float16, "b": torch.float32,
    }  # fmt: skip


def test_a_tie_of_which_one_name_stays(tmp_path: Path) -> None:
    shared = torch.ones(2)
    torch.save({"a": shared, "b": shared, "c": torch.ones(1)}, tmp_path / "in.pth")
    done = ckptfix.cast(tmp_path / "in.pth", tmp_path / "out.pth", "float16", keep=["b"])
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    assert found["a"].dtype is torch.float32 and found["a"].data_ptr() == found["b"].data_ptr()
    assert "shares its bytes" in done.kept["a"] and found["c"].dtype is torch.float16


def test_big_endian_numbers(tmp_path: Path) -> None:
    import struct

    values = [1.0, -2.5, 3e38, 1e-45]
    pickle = assemble(("PROTO", 2), *state_dict_ops({"w": Tensor("0", (4,), 4)}), "STOP")
    raw = struct.pack(">4f", *values)
    path = written(tmp_path / "big.pth", torch_zip(pickle, [raw], byteorder="big"))
    for to in ("bfloat16", "float64", "float8_e5m2"):
        ckptfix.cast(path, tmp_path / "out.pth", to, force=True)
        found = ckptfix.load_state_dict(tmp_path / "out.pth")["w"]
        expected = torch.tensor(values).to(getattr(torch, to))
        assert torch.equal(found.to(torch.float64), expected.to(torch.float64)), to


def test_what_leaves_the_range_is_counted_or_an_error(tmp_path: Path) -> None:
    whole = {"a": torch.tensor([1.0, 1e5, -math.inf, 1e-9, math.nan]), "b": torch.ones(3)}
    torch.save(whole, tmp_path / "in.pth")
    done = ckptfix.cast(tmp_path / "in.pth", tmp_path / "out.pth", "float16")
    assert done.exit_code == 0 and [row.where for row in done.findings if row.id == "out-of-range"] == ["a"]
    assert (done.rounded["a"].overflow, done.rounded["a"].underflow, len(done.rounded)) == (1, 1, 1)
    done = ckptfix.cast(tmp_path / "in.pth", tmp_path / "fp8.pth", "e4m3")
    assert (done.rounded["a"].overflow, done.rounded["a"].saturated) == (0, 2)
    assert torch.load(tmp_path / "fp8.pth")["a"].float()[:3].tolist() == [1, 448, -448]
    with pytest.raises(WouldLoseData, match="out of the range"):
        ckptfix.cast(tmp_path / "in.pth", tmp_path / "strict.pth", "float16", on_overflow="error")
    assert not (tmp_path / "strict.pth").exists() and len(list(tmp_path.iterdir())) == 3


def test_nothing_to_do_no_dtype_and_a_dry_run(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "in.pth")
    done = ckptfix.cast(tmp_path / "in.pth", tmp_path / "out.pth", "float32")
    assert "identical copy" in done.lines[0]
    assert (tmp_path / "out.pth").read_bytes() == (tmp_path / "in.pth").read_bytes()
    for wrong in ("int8", "complex64", "nonsense"):
        with pytest.raises(Refused, match="cannot cast"):
            ckptfix.cast(tmp_path / "in.pth", tmp_path / "no.pth", wrong)
    done = ckptfix.cast(tmp_path / "in.pth", tmp_path / "no.pth", "float16", dry_run=True)
    assert not (tmp_path / "no.pth").exists() and done.cast == {"a": "float32"}


def test_mappings_in_mappings_and_at_several_addresses(tmp_path: Path) -> None:
    inner = {"w": torch.ones(2), "b": torch.zeros(3)}
    whole: dict[str, Any] = {"one": inner, "again": inner, "outer": {"in/ner": {"x": torch.ones(1)}}}
    torch.save(whole, tmp_path / "in.pth")
    ckptfix.cast(tmp_path / "in.pth", tmp_path / "out.pth", to="bfloat16")
    out = torch.load(tmp_path / "out.pth")
    assert out["one"] is out["again"]
    found = [*out["one"].values(), out["outer"]["in/ner"]["x"]]
    wanted = [*inner.values(), whole["outer"]["in/ner"]["x"]]
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype is torch.bfloat16
        assert torch.equal(one.float(), other)
