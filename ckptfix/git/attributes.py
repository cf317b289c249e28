"""Our lines in a user's attributes file: they are between two marks, and nothing else changes."""

from __future__ import annotations

import re
from collections.abc import Iterator

PATTERNS = (
    "*.pth", "*.pt", "*.ckpt", "*.safetensors", "*.pth.tar", "pytorch_model*.bin", "adapter_model.bin",
)  # fmt: skip
"""Patterns for checkpoints. Plain ``*.bin`` is missing, because many other kinds of files have that suffix."""

DRIVER = "ckptfix"

_BEGIN = b"# >>> ckptfix: `ckptfix git disable` removes these lines >>>"
_UNENDED = b" (behind a line without an end)"
_END = b"# <<< ckptfix <<<\n"
_MARKS = [re.escape(mark) for mark in (_BEGIN, _UNENDED, _END[:-1])]
_BLOCK = re.compile(rb"%b(%b)?\r?\n.*?%b\r?\n?" % tuple(_MARKS), re.S)


def lines() -> list[str]:
    """Return the lines that assign the driver to checkpoints."""
    return [f"{pattern} diff={DRIVER}" for pattern in PATTERNS]


def enabled(content: bytes) -> bool:
    """Return whether a file has our lines."""
    return _BLOCK.search(content) is not None


def with_block(content: bytes) -> bytes:
    """Return `content` with our lines at its end, where they take precedence; unchanged if they already do."""
    ours = "".join(f"{line}\n" for line in lines()).encode()
    found = _BLOCK.search(content)
    if found is not None and found[0].endswith(ours + _END) and not any(overridden(content[found.end() :])):
        return content
    before = without_block(content)
    unended = bool(before) and not before.endswith(b"\n")
    head = b"\n" + _BEGIN + _UNENDED if unended else _BEGIN
    return before + head + b"\n" + ours + _END


def without_block(content: bytes) -> bytes:
    """Undo `with_block`: return `content` without our lines."""
    found = _BLOCK.search(content)
    if found is None:
        return content
    before = content[: found.start()]
    after = content[found.end() :]
    if found[1] and not after:
        before = before.removesuffix(b"\n")
    return without_block(before + after)


def overridden(content: bytes) -> Iterator[str]:
    """Yield the user's lines that assign a different driver to our patterns, and that our lines override."""
    for line in without_block(content).decode("utf-8", "replace").splitlines():
        words = line.split()
        if words and words[0] in PATTERNS and any(re.fullmatch(r"-?diff(=.*)?", word) for word in words[1:]):
            yield from [line.strip()] if f"diff={DRIVER}" not in words else []
