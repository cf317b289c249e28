"""Reading and writing of bytes.

`source` opens names, and `remote` is above it. This package registers `remote` for URLs; it is imported when the first
URL is used.
"""

from __future__ import annotations

from ckptfix.hooks import register

register({"io.remote": "ckptfix.io.remote.folders:open_file", "io.stores": "ckptfix.io.remote.folders"})
