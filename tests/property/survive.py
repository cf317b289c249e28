"""What every file must get from every operation: a result or one of our errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import ckptfix
from ckptfix.errors import CkptfixError
from ckptfix.formats import detect

TENSOR_BYTES = 1 << 20
"""Only tensors up to this size are read: a hostile shape must not make a test slow."""


def look(path: Path) -> None:
    """List everything."""
    checkpoint = ckptfix.open_checkpoint(path)
    for entry in checkpoint.entries:
        _ = entry.name, entry.nbytes, entry.location, entry.is_contiguous
    for _ in checkpoint.values():
        pass


def judge(path: Path) -> None:
    for finding in detect(path).check(str(path)):
        assert finding.id and finding.message and str(finding)


def strip(path: Path) -> None:
    ckptfix.strip_module(path, path.with_name("out"), partial=True, dry_run=True)


def move(path: Path) -> None:
    ckptfix.map_location(path, path.with_name("out"), "cpu", dry_run=True)


def convert(path: Path) -> None:
    for target in ("zip", "legacy", "safetensors"):
        try:
            ckptfix.convert(path, path.with_name("out"), to=target, drop_unsupported=True, dry_run=True)
        except CkptfixError:
            continue


def compare(path: Path) -> None:
    ckptfix.diff(path, path, keys_only=True)


def describe(path: Path) -> None:
    ckptfix.inspect(path).as_dict()


LISTING = (look, strip, move)
EVERYTHING = (look, judge, describe, strip, move, convert, compare)


def survives(path: Path, data: bytes, operations: Iterable[Callable[[Path], None]] = LISTING) -> list[str]:
    """Run `operations` on a file with the content `data`; the messages of our errors. Any other error comes out."""
    path.write_bytes(data)
    messages = []
    for operation in operations:
        try:
            operation(path)
        except CkptfixError as error:
            messages.append(f"{operation.__name__}: {type(error).__name__}: {error}")
    return messages
