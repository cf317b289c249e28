"""Names that are HTML, escape sequences of a terminal, or change how text runs."""

from __future__ import annotations

from builders import Tensor, assemble, state_dict_ops, torch_zip
from cli.conftest import floats

NAMES = [
    "</script><script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "<!--<script>", "a\u2028b\u2029c",
    "\x1b[31mred\x1b[0m",
    "\u202egnp.exe", "x" * 70_000, "javascript:alert(1)", "'\"&lt;", "\ud800", "a\nb\r\0c",
    "<svg/onload=alert(1)>", "{{7*7}}",
]  # fmt: skip


def checkpoint(**more: object) -> bytes:
    """A checkpoint whose tensors have these names, and whose other values are these."""
    items: dict[str, object] = {name: Tensor(str(index), (1,), 1) for index, name in enumerate(NAMES)}
    items |= {f"v{name[:50]}": name for name in NAMES}
    pickle = assemble(("PROTO", 4), *state_dict_ops({**items, **more}), "STOP")
    return torch_zip(pickle, [floats(float(index)) for index in range(len(NAMES))])


