"""Statistics of two tensors' elements, against formulae written out plainly."""

from __future__ import annotations

import math
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptfix.elements import comparison as diff_elements
from ckptfix.elements.comparison import Comparison
from ckptfix.elements.pair_sums import PairSums, ValueDiff

OTHER = "big" if sys.byteorder == "little" else "little"
NATIVE = (sys.byteorder, sys.byteorder)


def compared(
    x: bytes, y: bytes, a: str, b: str | None = None, orders: tuple[str, str] = NATIVE, **tolerance: float
) -> ValueDiff:
    limits: Any = tolerance
    comparison = Comparison.of(a, b or a, orders, **limits)
    assert comparison is not None
    sums = PairSums()
    comparison.add(x, y, sums)
    return sums.result(len(x) // comparison.a.itemsize)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def floats(*values: float) -> bytes:
    return np.array(values, np.float64).tobytes()


FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz",
          "float8_e4m3fnuz", "float8_e8m0fnu")  # fmt: skip
INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool")


def pair_of(name: str, count: int = 1000) -> tuple[torch.Tensor, torch.Tensor]:
    """Finite random elements of a dtype, a third of them equal."""
    generator = torch.Generator().manual_seed(7)
    dtype = getattr(torch, name)
    if name == "bool":
        x, y = (torch.randint(0, 2, (count,), generator=generator).bool() for _ in range(2))
    elif name in INTEGERS:
        width = torch.iinfo(dtype).bits // 8
        x, y = (torch.randint(0, 256, (count * width,), generator=generator, dtype=torch.uint8) for _ in range(2))
        x, y = x.view(dtype), y.view(dtype)
    elif dtype.is_complex:
        x, y = (torch.randn(count, generator=generator, dtype=dtype) for _ in range(2))
    else:
        x, y = (torch.randn(count, generator=generator).abs().to(dtype) for _ in range(2))
    y = torch.where(torch.arange(count) % 3 == 0, x, y) if name not in RAW else y
    return x, y


RAW = (
    "float8_e5m2",
    "float8_e4m3fn",
    "float8_e5m2fnuz",
    "float8_e4m3fnuz",
    "float8_e8m0fnu",
    "uint16",
    "uint32",
    "uint64",
)


@pytest.mark.parametrize("name", FLOATS)
def test_floats_of_every_width_match_torch(name: str) -> None:
    x, y = pair_of(name)
    found = compared(raw(x), raw(y), name)
    a, b = x.double(), y.double()
    assert torch.isfinite(a).all()
    assert torch.isfinite(b).all()
    assert found.differing == int((a != b).sum()) > 0
    assert found.max_abs == (a - b).abs().max().item()
    assert found.mean_abs == pytest.approx((a - b).abs().mean().item(), rel=1e-12)
    assert found.rel_l2 == pytest.approx(((a - b).norm() / b.norm()).item(), rel=1e-12)
    assert found.cosine == pytest.approx((a @ b / (a.norm() * b.norm())).item(), rel=1e-12)
    assert (found.nan_a, found.nan_b, found.infinite, found.reason) == (0, 0, 0, None)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_exact(name: str) -> None:
    x, y = pair_of(name)
    found = compared(raw(x), raw(y), name)
    a, b = ([int(value) for value in tensor.tolist()] for tensor in (x, y))
    distance = [abs(p - q) for p, q in zip(a, b, strict=True)]
    assert found.differing == sum(map(bool, distance)) > 0
    assert found.max_abs == max(distance)
    assert isinstance(found.max_abs, int)
    assert found.mean_abs == sum(distance) / len(distance)
    assert found.rel_l2 == pytest.approx(math.sqrt(sum(d * d for d in distance) / sum(q * q for q in b)), rel=1e-12)
    dot = sum(p * q for p, q in zip(a, b, strict=True))
    norms = math.sqrt(sum(p * p for p in a)) * math.sqrt(sum(q * q for q in b))
    assert found.cosine == pytest.approx(dot / norms, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("int64", -(2**63), 2**63 - 1), ("uint64", 0, 2**64 - 1), ("int8", -128, 127), ("int32", -(2**31), 2**31 - 1)],
)
def test_the_ends_of_an_integer_range(name: str, low: int, high: int) -> None:
    x, y = np.array([low, high], name), np.array([high, low], name)
    found = compared(x.tobytes(), y.tobytes(), name)
    assert found.max_abs == high - low
    assert found.mean_abs == float(high - low)


def test_integers_that_a_float_can_not_tell_apart() -> None:
    x, y = np.array([2**60, 5]), np.array([2**60 + 1, 5])
    found = compared(x.tobytes(), y.tobytes(), "int64")
    assert (found.differing, found.max_abs, found.mean_abs) == (1, 1, 0.5)


@pytest.mark.parametrize("name", ["complex64", "complex128"])
def test_complex(name: str) -> None:
    x, y = pair_of(name)
    found = compared(raw(x), raw(y), name)
    a, b = x.to(torch.complex128), y.to(torch.complex128)
    assert found.differing == int((a != b).sum()) > 0
    assert found.max_abs == pytest.approx((a - b).abs().max().item(), rel=1e-14)
    assert found.mean_abs == pytest.approx((a - b).abs().mean().item(), rel=1e-12)
    assert found.rel_l2 == pytest.approx(((a - b).norm() / b.norm()).item(), rel=1e-12)
    p, q = torch.view_as_real(a).flatten(), torch.view_as_real(b).flatten()
    assert found.cosine == pytest.approx((p @ q / (p.norm() * q.norm())).item(), rel=1e-12)


@pytest.mark.parametrize(("name", "itemsize"), [("float4_e2m1fn_x2", 1), ("bits16", 2), ("complex32", 4), ("bits8", 1)])
def test_bits_are_counted_and_no_more(name: str, itemsize: int) -> None:
    x = bytes(range(8 * itemsize))
    y = bytearray(x)
    y[0] ^= 1
    y[3 * itemsize] ^= 0x80
    y[4 * itemsize - 1] ^= 0x40
    assert compared(x, bytes(y), name) == ValueDiff(8, 2)


@pytest.mark.parametrize("name", ["qint8", "quint8", "qint32"])
def test_quantized_integers_are_codes_without_a_distance(name: str) -> None:
    view = {"qint8": "i1", "quint8": "u1", "qint32": "i4"}[name]
    found = compared(np.array([1, 100], view).tobytes(), np.array([1, 90], view).tobytes(), name)
    assert (found.differing, found.max_abs) == (1, None)


@pytest.mark.parametrize("name", ["quint4x2", "quint2x4"])
def test_packed_integers_are_bits(name: str) -> None:
    assert compared(b"\x12\x34", b"\x12\x35", name) == ValueDiff(2, 1)


NAN, INF = math.nan, math.inf


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    x = floats(NAN, NAN, 1.0, INF, INF, -INF, 2.0, INF, NAN, 3.0, 5.0)
    y = floats(NAN, 1.0, NAN, INF, -INF, -INF, INF, 2.0, INF, 1.0, 5.0)
    found = compared(x, y, "float64")
    assert found.elements == 11
    assert (found.nan_a, found.nan_b, found.infinite) == (2, 1, 3)
    assert found.differing == 7
    assert (found.max_abs, found.mean_abs) == (2.0, 1.0)
    assert found.rel_l2 == pytest.approx(2 / math.sqrt(26))
    assert found.cosine == pytest.approx(28 / math.sqrt(34 * 26))


def test_equal_values_of_other_bits() -> None:
    other_nan = np.array([0x7FF8000000000001], np.uint64).tobytes()
    found = compared(floats(NAN, 0.0, INF), other_nan + floats(-0.0, INF), "float64")
    assert (found.differing, found.max_abs, found.rel_l2) == (0, 0.0, 0.0)


def test_complex_with_nan_and_infinite_parts() -> None:
    x = np.array([complex(NAN, 1), complex(INF, 1), complex(1, INF), complex(1, NAN), 1j])
    y = np.array([complex(2, NAN), complex(INF, 1), complex(1, -INF), complex(1, 1), 1j])
    found = compared(x.tobytes(), y.tobytes(), "complex128")
    assert (found.nan_a, found.nan_b, found.infinite, found.differing, found.max_abs) == (1, 0, 1, 2, 0.0)


def test_nothing_finite_has_no_statistics() -> None:
    found = compared(floats(NAN), floats(1.0), "float64")
    assert found == ValueDiff(1, 1, nan_a=1)


def test_zero_norms_have_no_ratio() -> None:
    found = compared(floats(1.0, 0.0), floats(0.0, 0.0), "float64")
    assert (found.max_abs, found.rel_l2, found.cosine) == (1.0, None, None)


def test_beyond_the_range_of_float64() -> None:
    found = compared(floats(1e308, 1.0), floats(-1e308, 1.0), "float64")
    assert (found.differing, found.max_abs, found.rel_l2, found.cosine) == (1, None, None, None)
    found = compared(floats(1e200, 1.0), floats(-1e200, 1.0), "float64")
    assert (found.max_abs, found.mean_abs, found.rel_l2) == (2e200, 1e200, None)
    tiny = compared(floats(1e-200), floats(2e-200), "float64")
    assert (tiny.max_abs, tiny.rel_l2) == (1e-200, None)


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "float16", "int64", "int16", "complex64", "uint8"])
def test_byte_order(name: str) -> None:
    x, y = pair_of(name, 64)
    size = x.element_size() // (2 if x.is_complex() else 1)
    swapped = np.frombuffer(raw(y), f"u{size}").byteswap().tobytes()
    plain = compared(raw(x), raw(y), name)
    assert compared(raw(x), swapped, name, orders=(sys.byteorder, OTHER)) == plain
    both = np.frombuffer(raw(x), f"u{size}").byteswap().tobytes()
    assert compared(both, swapped, name, orders=(OTHER, OTHER)) == plain


def test_bits_of_another_byte_order() -> None:
    assert compared(b"\1\2\3\4", b"\2\1\3\4", "bits16", orders=(sys.byteorder, OTHER)) == ValueDiff(2, 1)


@pytest.mark.parametrize(
    ("a", "b"),
    [("float32", "bfloat16"), ("float64", "float32"), ("float32", "int32"), ("float16", "bool"), ("uint64", "int64")],
)
def test_two_dtypes_are_compared_as_float64(a: str, b: str) -> None:
    values = [0, 1, 3, 200]
    x = torch.tensor(values).to(getattr(torch, a))
    y = torch.tensor(values).to(getattr(torch, b))
    y.view(torch.uint8)[0] = 1
    found = compared(raw(x), raw(y), a, b)
    distance = (x.double() - y.double()).abs()
    assert found.differing == int((distance != 0).sum()) > 0
    assert found.max_abs == distance.max().item()


def test_dtypes_that_say_nothing_of_each_other() -> None:
    assert Comparison.of("float32", "quint8", NATIVE) is None
    assert Comparison.of("bits8", "uint8", NATIVE) is None
    assert Comparison.of("float32", "no_such", NATIVE) is None


def test_mixed_integers_stay_exact() -> None:
    found = compared(np.array([-1, 7], "i8").tobytes(), np.array([255, 7], "u1").tobytes(), "int64", "uint8")
    assert (found.max_abs, type(found.max_abs)) == (256, int)


def any_float(width: int) -> st.SearchStrategy[float]:
    return st.floats(width=width, allow_nan=True, allow_infinity=True)  # type: ignore[arg-type]


@given(st.lists(st.tuples(any_float(32), any_float(32)), min_size=1, max_size=60))
def test_random_floats_match_the_formulae(pairs: list[tuple[float, float]]) -> None:
    x, y = ([pair[side] for pair in pairs] for side in (0, 1))
    found = compared(np.array(x, np.float32).tobytes(), np.array(y, np.float32).tobytes(), "float32")
    finite = [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    assert found.nan_a == sum(math.isnan(a) and not math.isnan(b) for a, b in pairs)
    assert found.nan_b == sum(math.isnan(b) and not math.isnan(a) for a, b in pairs)
    assert found.infinite == sum(
        a != b and (math.isinf(a) or math.isinf(b)) and not math.isnan(a) and not math.isnan(b) for a, b in pairs
    )
    assert found.differing == sum(a != b and not (math.isnan(a) and math.isnan(b)) for a, b in pairs)
    if not finite:
        assert found.max_abs is None
        return
    assert found.max_abs == max(abs(a - b) for a, b in finite)
    assert found.mean_abs == pytest.approx(math.fsum(abs(a - b) for a, b in finite) / len(finite), rel=1e-12)
    reference = math.sqrt(math.fsum(b * b for _, b in finite))
    if reference:
        ratio = math.sqrt(math.fsum((a - b) ** 2 for a, b in finite)) / reference
        assert found.rel_l2 == pytest.approx(ratio, rel=1e-9)
        length = math.sqrt(math.fsum(a * a for a, _ in finite))
        if length:
            cosine = math.fsum(a * b for a, b in finite) / length / reference
            assert found.cosine == pytest.approx(cosine, rel=1e-9, abs=1e-9)


@given(
    st.lists(st.tuples(any_float(64), any_float(64)), min_size=1, max_size=30),
    st.floats(0, 2),
    st.floats(0, 10),
)
def test_tolerance_is_that_of_numpy(pairs: list[tuple[float, float]], rtol: float, atol: float) -> None:
    x, y = (np.array([pair[side] for pair in pairs]) for side in (0, 1))
    found = compared(x.tobytes(), y.tobytes(), "float64", rtol=rtol, atol=atol)
    with np.errstate(all="ignore"):
        close = np.isclose(x, y, rtol=rtol, atol=atol, equal_nan=True)
    assert found.differing == int((~close).sum())


@given(st.lists(st.tuples(any_float(16), any_float(16)), min_size=1, max_size=64), st.data())
def test_parts_add_up_to_the_whole(pairs: list[tuple[float, float]], data: Any) -> None:
    cut = data.draw(st.integers(0, len(pairs)))
    comparison = Comparison.of("float16", "float16", NATIVE)
    assert comparison is not None
    x, y = (np.array([pair[side] for pair in pairs], np.float16) for side in (0, 1))
    parts = [PairSums(), PairSums()]
    comparison.add(x[:cut].tobytes(), y[:cut].tobytes(), parts[0])
    comparison.add(x[cut:].tobytes(), y[cut:].tobytes(), parts[1])
    whole = compared(x.tobytes(), y.tobytes(), "float16")
    joined = parts[0].added(parts[1]).result(len(pairs))
    assert (joined.differing, joined.max_abs, joined.nan_a, joined.nan_b, joined.infinite) == (
        (whole.differing, whole.max_abs, whole.nan_a, whole.nan_b, whole.infinite)
    )
    for name in ("mean_abs", "rel_l2", "cosine"):
        of_parts, of_whole = getattr(joined, name), getattr(whole, name)
        assert of_parts == of_whole or of_parts == pytest.approx(of_whole, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64", "bool", "complex64"])
def test_equal_elements_count_towards_norms_alone(name: str) -> None:
    x, _ = pair_of(name)
    comparison = Comparison.of(name, name, NATIVE)
    assert comparison is not None
    computed, shortcut = PairSums(), PairSums()
    comparison.add(raw(x), raw(x), computed)
    comparison.add_equal(raw(x), shortcut)
    assert shortcut.finite == computed.finite == len(x)
    assert (shortcut.aa, shortcut.bb, shortcut.ab) == (computed.aa, computed.bb, computed.ab)
    assert shortcut.differing == 0


def test_equal_elements_that_are_not_finite() -> None:
    comparison = Comparison.of("float64", "float64", NATIVE)
    assert comparison is not None
    sums = PairSums()
    comparison.add_equal(floats(NAN, 3.0, INF, 4.0), sums)
    assert (sums.finite, sums.aa, sums.ab) == (2, 25.0, 25.0)


@pytest.mark.parametrize("name", ["float64", "int64", "float8_e5m2"])
def test_blocks_cover_every_element(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_elements, "SMALL_BLOCK", 16)
    monkeypatch.setattr(diff_elements, "DOT", 5)
    kind = ml_dtypes.float8_e5m2 if name == "float8_e5m2" else name
    x, y = np.ones(50).astype(kind), np.zeros(50).astype(kind)
    found = compared(x.tobytes(), y.tobytes(), name)
    assert (found.differing, found.mean_abs) == (50, 1.0)
