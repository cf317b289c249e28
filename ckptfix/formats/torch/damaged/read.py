"""The object of a damaged torch file, and of a legacy file also the storages before its first fault."""

from __future__ import annotations

from collections.abc import Iterator

from ckptfix.checkpoint import dtypes
from ckptfix.dataclass import dataclass
from ckptfix.formats.torch import legacy_layout
from ckptfix.formats.torch.common import fields
from ckptfix.formats.torch.object import TorchObject, walk
from ckptfix.formats.torch.tensors import BadTensor
from ckptfix.io.source import Source


def storage_sizes(found: TorchObject) -> dict[str, int]:
    """Map storage keys to the bytes that references to them promise; a key with two sizes is left out."""
    sizes: dict[str, int] = {}
    odd: set[str] = set()
    for persid in found.graph.references():
        try:
            key, kind, _, count = fields(persid)
        except BadTensor:
            continue
        nbytes = count * dtypes.by_name(kind).itemsize
        if sizes.setdefault(key, nbytes) != nbytes:
            odd.add(key)
    return {key: nbytes for key, nbytes in sizes.items() if key not in odd}


@dataclass(frozen=True, slots=True)
class LegacyRemains:
    """The pickles of a legacy file that may be cut short.

    Attributes:
        keys: of its storages, in order; empty if their list is lost.
        listed: the list of the keys is there.
        end: the offset after the last pickle, where the storages begin.
    """

    found: TorchObject
    keys: tuple[str, ...]
    listed: bool
    end: int

    def storages(self, reader: Source) -> Iterator[tuple[str, int, int, int]]:
        """Yield (key, offset, number of elements, bytes of one) of each storage; see `legacy_layout.storage_counts`."""
        return legacy_layout.storage_counts(reader, self.found.graph, list(self.keys), self.end)


def read_legacy(reader: Source, start: int = 0) -> LegacyRemains | None:
    """Read the pickles of a legacy file, which begin at `start`; None if its object is cut short.

    Raises:
        TruncatedPickle, BadPickle: its object is damaged; without it, the bytes that follow have no meaning.
    """
    graphs = legacy_layout.read_pickles(reader, start=start, partial=True)
    if len(graphs) < 4:
        return None
    keys = graphs[4].root if len(graphs) > 4 else None
    names = tuple(str(key) for key in keys) if type(keys) is list else ()
    return LegacyRemains(walk(graphs[3]), names, len(graphs) > 4, graphs[-1].end)
