"""CRC-32, which torch's zip files state for every record, computed by the fastest installed library.

``isal`` (``pip install 'ckptfix[fast]'``) uses the processor's carry-less multiplication, and is three to seven times
as fast as zlib. It speeds up jobs that checksums dominate: a conversion to zip, or a load that verifies.
"""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32 as checksum
except ImportError:
    from zlib import crc32 as checksum

__all__ = ["checksum"]
