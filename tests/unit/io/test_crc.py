"""One CRC-32, whoever sums it."""

from __future__ import annotations

import random
import subprocess
import sys
import zlib

from ckptfix.io.crc import checksum


def test_it_is_the_crc32_of_zip_archives() -> None:
    assert checksum(b"123456789") == 0xCBF43926  # the check value of CRC-32/ISO-HDLC
    some = random.Random(0)
    for size in (0, 1, 7, 64, 65, 4095, 5121, 1 << 20):
        data = some.randbytes(size)
        cut = size // 3
        assert checksum(data) == checksum(data[cut:], checksum(data[:cut])) == zlib.crc32(data)
        assert checksum(memoryview(data)) == checksum(bytearray(data)) == zlib.crc32(data)


def test_without_the_extra_zlib_sums() -> None:
    code = "import sys; sys.modules['isal'] = None; from ckptfix.io.crc import checksum; print(checksum.__module__)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "zlib"
