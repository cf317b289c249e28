"""Comparison of the copies that each rank holds of the same tensors, as far as their checksums allow."""

from __future__ import annotations

from collections.abc import Sequence

from ckptfix.checkpoint import TensorEntry
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.words import some


def alike(own: TensorEntry, other: TensorEntry) -> bool:
    """Return whether two ranks have the same tensor; True where checksums are missing or cover other views."""
    if (other.dtype, other.shape, other.kind) != (own.dtype, own.shape, own.kind):
        return False
    one, two = own.storage, other.storage
    if one is None or two is None or one.crc32 is None or two.crc32 is None:
        return True
    return one.nbytes != two.nbytes or one.crc32 == two.crc32 or own.offset != other.offset


def differing(names: Sequence[str], first: str = "the first rank") -> list[Finding]:
    """Return the finding for `names`, whose values differ between ranks; the output has the values of `first`."""
    if not names:
        return []
    message = f"differs between ranks, so the values of {first} were used: {some(list(names))}"
    return [found("ranks-differ", message, where=names[0])]
