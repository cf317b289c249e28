from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest
from builders import safetensors, written

from ckptfix.checkpoint import TensorEntry
from ckptfix.elements.arrays import BLOCK
from ckptfix.elements.histogram import BINS, Bins
from ckptfix.formats import open_checkpoint
from ckptfix.ops.histogram import Distribution, distributions

RANDOM = numpy.random.default_rng(0)

CODES = {
    "float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def of(tmp_path: Path, a: Any, b: Any = None) -> Distribution:
    """The distribution of arrays, from files."""
    entries: list[TensorEntry | None] = []
    for name, array in (("a", a), ("b", b)):
        if array is None:
            entries.append(None)
            continue
        content = safetensors([("w", CODES[array.dtype.name], list(array.shape), array.tobytes())])
        entries.append(open_checkpoint(written(tmp_path / f"{name}.safetensors", content)).entries[0])
    (found,) = distributions([(entries[0], entries[1])], ("little", "little"))
    return found


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_the_bins_are_those_of_numpy(tmp_path: Path, name: str) -> None:
    array = RANDOM.standard_normal(BLOCK + 77).astype(getattr(ml_dtypes, name, name))
    found = of(tmp_path, array).a
    assert found is not None
    assert found.bins is not None
    wide = array.astype(numpy.float64)
    assert (found.bins.low, found.bins.high) == (wide.min(), wide.max())
    expected, edges = numpy.histogram(wide, BINS)
    # An element on an edge may be in either bin, as it is rounded.
    near = sum(int(numpy.isclose(wide, edge, rtol=1e-12, atol=1e-15).sum()) for edge in edges)
    assert sum(found.bins.counts) == array.size
    assert abs(numpy.array(found.bins.counts) - expected).sum() <= 2 * near


def test_both_sides_have_the_same_bins_and_equal_elements_are_not_in_the_difference(tmp_path: Path) -> None:
    a = RANDOM.standard_normal(1000).astype(numpy.float32)
    b = a.copy()
    b[:10] += 5
    found = of(tmp_path, a, b)
    assert found.a is not None
    assert found.b is not None
    assert found.difference is not None
    assert found.a.bins is not None
    assert found.b.bins is not None
    assert found.difference.bins is not None
    assert (found.a.bins.low, found.a.bins.high) == (found.b.bins.low, found.b.bins.high) == (a.min(), b.max())
    assert sum(found.difference.bins.counts) == 10
    assert found.difference.moments.zeros == 990


def test_nan_and_infinities_are_counted_and_in_no_bin(tmp_path: Path) -> None:
    found = of(tmp_path, numpy.array([1, 2, numpy.nan, numpy.inf, -numpy.inf], numpy.float32)).a
    assert found is not None
    assert found.bins is not None
    assert (found.moments.nan, found.moments.infinite, sum(found.bins.counts)) == (1, 2, 2)
    nothing = of(tmp_path, numpy.array([numpy.nan], numpy.float32)).a
    assert nothing is not None
    assert nothing.bins is None


def test_a_few_whole_numbers_have_a_bin_each(tmp_path: Path) -> None:
    for array, counts in (
        (numpy.array([True, False, True]), [1, 2]),
        (numpy.array([-1, 3, 3], numpy.int64), [1, 0, 0, 0, 2]),
    ):
        found = of(tmp_path, array).a
        assert found is not None
        assert found.bins is not None
        assert found.bins.counts == counts


@pytest.mark.parametrize(
    "values", [[0.0, 5e-324], [-1.7e308, 1.7e308], [1.0, 1.0], [2**63 - 1, -(2**63)], [0.0, 2.0**-1022]]
)
def test_ranges_at_the_ends_of_float64(tmp_path: Path, values: list[float]) -> None:
    array = numpy.array(values, numpy.int64 if isinstance(values[0], int) else numpy.float64)
    found = of(tmp_path, array, array[::-1].copy())
    assert found.a is not None
    assert found.b is not None
    assert found.a.bins is not None
    assert found.b.bins is not None
    assert sum(found.a.bins.counts) == sum(found.b.bins.counts) == 2


def test_sides_of_other_shapes_have_no_difference(tmp_path: Path) -> None:
    found = of(tmp_path, numpy.ones(2, numpy.float32), numpy.ones(3, numpy.float32))
    assert found.difference is None
    assert found.a is not None
    assert found.b is not None


def test_complex_numbers_by_their_absolute_values_and_quantized_ones_not_at_all() -> None:
    fixtures = Path(__file__).parents[3] / "fixtures"
    checkpoint = open_checkpoint(fixtures / "zip-dtypes.pth")
    entries = {entry.dtype: entry for entry in checkpoint.entries}
    order = (checkpoint.byteorder, checkpoint.byteorder)
    (found,) = distributions([(entries["complex64"], entries["complex64"])], order)
    assert found.absolute
    assert found.a is not None
    assert found.a.moments.low is not None
    assert found.a.moments.low >= 0
    quantized = open_checkpoint(fixtures / "zip-quantized.pth").entries[0]
    assert distributions([(quantized, None)], order)[0].reason is not None


def test_the_other_byte_order(tmp_path: Path) -> None:
    array = numpy.array([1, 2, 3], ">f4")
    content = safetensors([("w", "F32", [3], array.tobytes())])
    entry = open_checkpoint(written(tmp_path / "big.safetensors", content)).entries[0]
    (found,) = distributions([(entry, None)], ("big", "big"))
    assert found.a is not None
    assert (found.a.moments.low, found.a.moments.high) == (1, 3)


def test_a_range_beyond_float64_is_cut_into_equal_parts() -> None:
    block = numpy.array([-1.7e308, -0.9e308, -0.8e308, -0.1e308, 0.1e308, 0.8e308, 0.9e308, 1.7e308])
    found = Bins(-1.7e308, 1.7e308, [0] * 4).places(block)
    assert found.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
