"""Tables about dtypes that lie beside the table of dtypes: each has a row for every dtype, or here is why not."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from ckptfix.checkpoint import dtypes
from ckptfix.elements import nonfinite
from ckptfix.formats.programs import exported
from ckptfix.formats.torch import versions
from ckptfix.ops.repair import fill

INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool")
QUANTIZED = ("qint8", "qint32", "quint8", "quint4x2", "quint2x4")
BITS = ("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2")
NO_NAN = dict.fromkeys((*INTEGERS, *QUANTIZED, *BITS), "its elements are numbers without a NaN, or bare bits")
PAIRS = {"float4_e2m1fn_x2": "OCP Microscaling Formats 1.0, 5.3.3: no NaN and no infinity"}

TABLES: dict[str, tuple[Collection[str], dict[str, str]]] = {
    "versions.DTYPES": (
        versions.DTYPES,
        dict.fromkeys((*BITS, "complex32"), "no release notes say from which version on its tensors load: today's"),
    ),
    "fill._NAN": (fill._NAN, NO_NAN | PAIRS),
    "nonfinite.PATTERNS": (
        nonfinite.PATTERNS,
        NO_NAN
        | PAIRS
        | dict.fromkeys(
            ("float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e8m0fnu"),
            "no infinity: its NaN are not the patterns from infinity's on",
        ),
    ),
    "exported.DTYPES": (
        exported.DTYPES.values(),
        dict.fromkeys((*QUANTIZED, *BITS, *PAIRS), "torch/_export/serde/schema.py: ScalarType has no number for it"),
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_dtype_has_a_row_or_a_reason(name: str) -> None:
    table, left_out = TABLES[name]
    known = {row.name for row in dtypes.TABLE}
    assert set(table) <= known
    missing = known - set(table) - set(left_out)
    assert not missing, f"{name} has no row for {missing}, and no reason is given here"
    assert not set(left_out) & set(table), "a reason for a row that is there"
    assert set(left_out) <= known


@pytest.mark.parametrize("name", fill._NAN)
def test_a_nan_has_as_many_bytes_as_its_numbers(name: str) -> None:
    row = dtypes.by_name(name)
    assert row.itemsize == len(fill._NAN[name]) * (2 if name.startswith("complex") else 1)


@pytest.mark.parametrize("name", nonfinite.PATTERNS)
def test_an_infinity_lies_below_its_nan(name: str) -> None:
    infinity, sign = nonfinite.PATTERNS[name]
    assert infinity < sign == 1 << 8 * dtypes.by_name(name).unit - 1
    assert infinity < int.from_bytes(fill._NAN[name], "little") < sign
