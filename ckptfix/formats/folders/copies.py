"""What every rank holds whole: whether the copies are the same, as far as their checksums show it."""

from __future__ import annotations

from collections.abc import Sequence

from ckptfix.checkpoint import TensorEntry
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.words import some


def alike(own: TensorEntry, other: TensorEntry) -> bool:
    """Whether two ranks have the same tensor. Files without checksums, and views of other storages, say nothing."""
    if (other.dtype, other.shape, other.kind) != (own.dtype, own.shape, own.kind):
        return False
    one, two = own.storage, other.storage
    if one is None or two is None or one.crc32 is None or two.crc32 is None:
        return True
    return one.nbytes != two.nbytes or one.crc32 == two.crc32 or own.offset != other.offset


def differing(names: Sequence[str], first: str = "the first one") -> list[Finding]:
    """The finding for what is not the same on all ranks, `names`, and taken from that one."""
    if not names:
        return []
    message = f"not the same on all ranks, and taken from {first}: {some(list(names))}"
    return [found("ranks-differ", message, where=names[0])]
