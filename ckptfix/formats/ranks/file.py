"""One rank's file as it was read: its tensors by address, and the parts of sharded tensors in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from ckptfix.checkpoint import Checkpoint, FileVersion, TensorEntry
from ckptfix.checkpoint.address import join
from ckptfix.dataclass import dataclass
from ckptfix.errors import about
from ckptfix.formats.ranks.shards import RankTensor, held
from ckptfix.formats.ranks.wrapped import wrapped
from ckptfix.formats.torch.common import PickledObject, pickled_object
from ckptfix.formats.torch.tensors import tensor_entry
from ckptfix.pickles.graph import Node


@dataclass(frozen=True, slots=True)
class RankFile:
    """A rank's file as it was read.

    Attributes:
        nodes: address of a tensor -> the address of its dict, its key, its node.
    """

    path: str
    mark: FileVersion
    checkpoint: Checkpoint
    nodes: Mapping[str, tuple[str, str, Node]]
    _held: dict[str, RankTensor | None] = field(default_factory=dict)

    @property
    def parts(self) -> PickledObject:
        return pickled_object(self.checkpoint)

    def entry(self, address: str) -> TensorEntry:
        """Return the tensor at an address. Raises BadTensor."""
        at, key, node = self.nodes[address]
        return tensor_entry(node, key, at, self.parts.storages)

    def held(self, address: str) -> RankTensor | None:
        """Return the file's description of the sharded tensor at an address; None for a whole tensor.

        Raises the same errors as `shards.held`.
        """
        if address not in self._held:
            node = self.nodes[address][2]
            with about(self.path):
                known = bool(wrapped(node)[0])
                self._held[address] = held(node, self.entry(address), self.parts.storages) if known else None
        return self._held[address]


def open_file(checkpoint: Checkpoint, mark: FileVersion) -> RankFile:
    tensors = pickled_object(checkpoint).found.tensors
    return RankFile(checkpoint.path, mark, checkpoint, {join(at, key): (at, key, node) for at, key, node in tensors})
