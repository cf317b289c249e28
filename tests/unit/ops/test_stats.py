"""Statistics of tensors: against torch in float64, on every dtype, and where float64 itself is at its limits."""

from __future__ import annotations

import csv
import io
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import Tensor, assemble, state_dict_ops, torch_zip, written

import ckptfix
from ckptfix.elements.arrays import Encoding
from ckptfix.elements.moments import ElementMoments
from ckptfix.errors import NoSuchTensor


def moments(values: np.ndarray, count: int = 1 << 16) -> ElementMoments:
    """The moments of an array, from blocks of `count` elements."""
    made = ElementMoments()
    with np.errstate(all="ignore"):
        for block in Encoding.of(values.dtype.name, sys.byteorder).blocks(values.tobytes(), count):
            made.add(block)
    return made


@pytest.mark.parametrize("mean", [0.0, 0.3, 1.0, 3.0, 1e4, -1e6])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int32])
def test_the_spread_keeps_its_digits_wherever_the_mean_is(mean: float, dtype: Any) -> None:
    """The squares are summed around zero or around the mean, whichever loses no digits."""
    scale = 1000 if dtype is np.int32 else 1
    values = ((np.random.default_rng(0).standard_normal(50_000) + mean) * scale).astype(dtype)
    found = moments(values, 7000)
    wide = values.astype(np.longdouble)
    assert found.deviation == pytest.approx(float(wide.std(ddof=1)), rel=1e-11)
    assert found.mean == pytest.approx(float(wide.mean()), rel=1e-12, abs=1e-15 * scale)
    assert found.zeros == np.count_nonzero(values == 0)


def test_zeros_are_counted_at_the_edge_of_the_range() -> None:
    for values in ([0.0, 1.0, 2.0], [-0.0, -1.0], [0.0, math.nan], [-0.0, math.inf, 0.0], [1.0, 2.0], [-1.0, math.nan]):
        array = np.array(values, np.float32)
        assert moments(array).zeros == np.count_nonzero(array == 0)


FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
          "float8_e5m2fnuz", "float8_e8m0fnu")  # fmt: skip
OTHERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "bool")


def samples() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {name: (torch.randn(70_000).abs() + 0.1).to(getattr(torch, name)) for name in FLOATS}
    found |= {name: torch.randint(0, 100, (333,)).to(getattr(torch, name)) for name in OTHERS}
    found["int64 large"] = torch.tensor([2**62 + 1, -(2**62) - 3])
    found["scalar"] = torch.tensor(2.5)
    found["offset"] = torch.randn(100_000, dtype=torch.float64) + 1e8
    found["column"] = torch.randn(50, 40)[:, 3]
    for name in ("float32", "bfloat16", "float16", "float64"):
        odd = torch.randn(40_000).to(getattr(torch, name))
        odd[5], odd[6], odd[39_999], odd[:3] = math.nan, math.inf, -math.inf, 0
        found[f"odd {name}"] = odd
    return found


@pytest.mark.parametrize("legacy", [False, True])
def test_as_torch_computes_it(tmp_path: Path, legacy: bool) -> None:
    whole = samples()
    torch.save(whole, tmp_path / "in.pth", _use_new_zipfile_serialization=not legacy)
    rows = {row.name: row.as_dict() for row in ckptfix.stats(tmp_path / "in.pth").rows}
    assert list(rows) == list(whole)
    for name, tensor in whole.items():
        row, wide = rows[name], tensor.to(torch.float64)
        finite = wide[torch.isfinite(wide)]
        assert row["nan"] == int(wide.isnan().sum()) and row["infinite"] == int(wide.isinf().sum()), name
        assert row["zeros"] == int((wide == 0).sum()) and row["elements"] == tensor.numel()
        assert (float(row["min"]), float(row["max"])) == (finite.min().item(), finite.max().item()), name
        for what, value in (("mean", finite.mean()), ("norm", finite.norm())):
            assert row[what] == pytest.approx(value.item(), rel=1e-12, abs=1e-12 * finite.abs().max().item()), name
        expected = finite.std().item() if finite.numel() > 1 else None
        assert row["std"] == (None if expected is None else pytest.approx(expected, rel=1e-9)), name
    assert rows["int64 large"]["max"] == 2**62 + 1


def test_complex_numbers(tmp_path: Path) -> None:
    values = torch.randn(5000, dtype=torch.complex64) + (2 - 3j)
    values[7:9] = torch.tensor([complex(math.nan, 1), complex(0, math.inf)])
    torch.save({"c": values}, tmp_path / "in.pth")
    (row,) = (row.as_dict() for row in ckptfix.stats(tmp_path / "in.pth").rows)
    finite = values[torch.isfinite(values)].to(torch.complex128)
    assert (row["nan"], row["infinite"], row["min"]) == (1, 1, None)
    assert complex(row["mean"], row["mean_imag"]) == pytest.approx(finite.mean().item())
    assert row["std"] == pytest.approx(finite.std().item()) and row["norm"] == pytest.approx(finite.norm().item())


@pytest.mark.parametrize("dtype", ["f4", "f8", "i8", "u1", "c8"])
def test_rows_that_are_computed_together_are_those_of_each_block(dtype: str) -> None:
    count = 1 << 14
    values = np.random.default_rng(0).standard_normal(3 * count + 17) * 50
    values[5] = values[count + 9] = 0
    for size, add, odd in ((1, 0, 0), (1, 1e6, 0), (1e300, 0, 0), (1e-300, 0, 0), (0, 0, 0), (1, 0, math.nan)):
        with np.errstate(all="ignore"):
            block = (values * size + add).astype(dtype)
            if odd and block.dtype.kind in "fc":
                block[7] = odd
            made = ElementMoments.each(block.copy(), count)
            expected = [ElementMoments() for _ in range(4)]
            for number, one in enumerate(expected):
                one.add(block[number * count :][:count])
        assert list(map(repr, made)) == list(map(repr, expected))


@pytest.mark.parametrize("size", [1e308, 1e200, 1e-200, 5e-324])
def test_numbers_at_the_ends_of_float64(size: float) -> None:
    values = np.array([size, size / 2, -size, 0.0, size])
    made = moments(values)
    unit = values / size
    assert made.average is not None
    assert made.average[0] == pytest.approx(float(unit.mean() * size), rel=1e-12)
    assert made.norm == pytest.approx(math.hypot(*unit) * size if size < 1e300 else math.hypot(*(unit / 4)) * size * 4)
    assert made.deviation == pytest.approx(float(unit.std(ddof=1)) * size, rel=1e-9)


def test_blocks_of_any_scale_are_joined() -> None:
    parts = [np.array([1e200, 2e200]), np.array([1.0, 2.0]), np.array([math.nan]), np.array([3e200])]
    made = ElementMoments()
    for part in parts:
        made.join(moments(part))
    unit = np.array([1, 2, 1e-200, 2e-200, 3])
    assert made.average is not None and made.average[0] == pytest.approx(unit.mean() * 1e200)
    assert made.deviation == pytest.approx(unit.std(ddof=1) * 1e200)
    assert (made.finite, made.nan, made.elements) == (5, 1, 6)


def test_the_same_whatever_the_blocks() -> None:
    values = (np.random.default_rng(0).standard_normal(10_000) + 1000).astype(np.float32)
    whole, small = moments(values), moments(values, 7)
    assert small.deviation == pytest.approx(whole.deviation, rel=1e-12) and small.norm == pytest.approx(whole.norm)


def test_big_endian(tmp_path: Path) -> None:
    import struct

    pickle = assemble(("PROTO", 2), *state_dict_ops({"w": Tensor("0", (3,), 3)}), "STOP")
    path = written(tmp_path / "big.pth", torch_zip(pickle, [struct.pack(">3f", 1, 2, 6)], byteorder="big"))
    (row,) = (row.as_dict() for row in ckptfix.stats(path).rows)
    assert (row["min"], row["max"], row["mean"]) == (1, 6, 3)


def test_groups_and_ties(tmp_path: Path) -> None:
    shared = torch.ones(4)
    whole = {"net.0.w": shared, "net.0.v": shared, "net.1.w": torch.zeros(2), "head.w": torch.full((2,), 3.0)}
    torch.save({"model": whole, "other": {"x.y.z": torch.ones(1)}}, tmp_path / "in.pth")
    done = ckptfix.stats(tmp_path / "in.pth", at="model", by_layer=True)
    groups = {row.name: row.as_dict() for row in done.groups}
    assert {name: (row["tensors"], row["elements"], row["norm"]) for name, row in groups.items()} == {
        "model/net.0": (2, 4, 2.0), "model/net.1": (1, 2, 0.0), "model/head": (1, 2, pytest.approx(math.sqrt(18))),
    }  # fmt: skip
    assert done.total.as_dict()["elements"] == 8
    names = [row.name for row in ckptfix.stats(tmp_path / "in.pth", depth=1).groups]
    assert names == ["model/net", "model/head", "other/x"]


def test_a_filter(tmp_path: Path) -> None:
    torch.save({"a.w": torch.ones(1), "b.w": torch.ones(1)}, tmp_path / "in.pth")
    done = ckptfix.stats(tmp_path / "in.pth", filter=["a.*", "c.*"], allow_unmatched=True)
    assert [row.name for row in done.rows] == ["a.w"] and [row.where for row in done.findings] == ["c.*"]
    with pytest.raises(NoSuchTensor):
        ckptfix.stats(tmp_path / "in.pth", filter=["x"])


def test_what_has_no_numbers_is_listed(tmp_path: Path) -> None:
    whole: dict[str, Any] = {
        "q": torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8),
        "s": torch.eye(2).to_sparse(),
        "e": torch.zeros(0),
        "m": torch.ones(2, device="meta"),
    }
    torch.save(whole, tmp_path / "in.pth")
    rows = {row.name: row.as_dict() for row in ckptfix.stats(tmp_path / "in.pth").rows}
    assert rows["q"]["reason"] == "a quantized tensor" and rows["s"]["reason"] == "a sparse tensor"
    assert rows["m"]["reason"] and rows["e"]["elements"] == 0 and rows["e"]["min"] is None


def test_comma_separated_values_have_all_digits(tmp_path: Path) -> None:
    from ckptfix.cli.values.stats import written as as_csv

    torch.save({"a, b": torch.tensor([0.1, 0.2], dtype=torch.float64)}, tmp_path / "in.pth")
    done = ckptfix.stats(tmp_path / "in.pth")
    (row,) = csv.DictReader(io.StringIO("\n".join(as_csv(done.rows))))
    assert (row["name"], row["shape"], float(row["min"]), float(row["max"])) == ("a, b", "2", 0.1, 0.2)
    assert "a, b" in str(done) and "a, b" in done._repr_html_() and "1 tensor" in repr(done)
