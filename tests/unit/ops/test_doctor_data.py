"""The one pass over all bytes: what it says of a tensor does not depend on how its reading is shared out."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from ranges import small_blocks

from ckptfix.checkpoint import ByteRange, Data, Derived
from ckptfix.elements.arrays import Encoding
from ckptfix.elements.nonfinite import PATTERNS, NonFinite, all_finite
from ckptfix.io import threads
from ckptfix.ops.doctor.data import CheckedRange, scan


@pytest.mark.parametrize("size", [64, 4096, threads.TASK])
def test_parts_of_a_tensor_are_judged_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(threads, "TASK", size)
    small_blocks(monkeypatch, 16)
    values = np.ones(1000, np.float32)
    values[[0, 17, 999]] = np.nan
    values[500] = -np.inf
    raw = values.tobytes()
    path = tmp_path / "data"
    path.write_bytes(raw + bytes(5000) + raw)
    pieces = [
        CheckedRange("right", ByteRange(str(path), 0, 4000), zlib.crc32(raw), "float32"),
        CheckedRange("zeros", ByteRange(str(path), 4000, 5000), zlib.crc32(bytes(5000))),
        CheckedRange("wrong", ByteRange(str(path), 9000, 4000), 1, "float32"),
        CheckedRange("made", made(raw), zlib.crc32(raw), "float32"),
        CheckedRange("beyond", ByteRange(str(path), 9000, 4001), 1, "float32"),
    ]
    found = [(finding.id, finding.where, finding.message) for finding in scan(pieces)]
    crc = f"{zlib.crc32(raw):08x}"
    assert found[:2] == [
        ("bad-crc", "wrong", f"the bytes do not match their CRC-32 ({crc} here, 00000001 stated)"),
        ("damaged", "beyond", "1 bytes are expected, but only 0 are left"),
    ]
    names = "right (3), wrong (3), made (3)"
    assert found[2][2] == f"9 NaN values of float32 in 3 tensors: {names}"
    assert found[3][2] == "3 infinite values of float32 in 3 tensors: right (1), wrong (1), made (1)"
    assert len(found) == 4


def made(raw: bytes) -> Data:
    """Bytes in chunks that no element ends with."""
    return Derived(len(raw), lambda: (raw[at : at + 7] for at in range(0, len(raw), 7)))


@pytest.mark.parametrize("dtype", PATTERNS)
def test_a_few_numbers_are_judged_alike_without_numpy(dtype: str) -> None:
    """Bits at and around infinity, of both signs, alone and behind a finite number."""
    infinity, sign = PATTERNS[dtype]
    encoding = Encoding.of(dtype, sys.byteorder)
    size = encoding.dtype.unit
    for bits in (0, 1, infinity - 1, infinity, infinity + 1, sign - 1):
        for one in (bits, bits | sign):
            for before in (b"", (infinity - 1 | sign).to_bytes(size, sys.byteorder)):
                chunk = before + one.to_bytes(size, sys.byteorder)
                counted = NonFinite()
                counted.add_bits(chunk, encoding)
                assert all_finite(chunk, encoding) == (counted == NonFinite()) == (bits < infinity)


def test_another_byte_order_is_left_to_numpy() -> None:
    other = "big" if sys.byteorder == "little" else "little"
    assert not all_finite(bytes(8), Encoding.of("float32", other))
