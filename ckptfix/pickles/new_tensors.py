"""Calls that rebuild plain tensors in an object that no stream holds: most of a large checkpoint consists of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import final

from ckptfix.pickles.graph import Call, Global, Node, PersId, Text, new_text


@final
class NewTensorArguments:
    """Arguments of a call that rebuilds a plain tensor, in an object that no stream holds.

    An object with very many tensors has one `NewTensorArguments` in place of some ten nodes per tensor. The nodes are
    created only for code that reads them.
    """

    __slots__ = ("hooks", "key", "location", "numel", "offset", "requires_grad", "shape", "stride", "type")

    def __init__(
        self, kind: Global, key: str, location: str, numel: int,
        layout: tuple[int, tuple[int, ...], tuple[int, ...]], requires_grad: bool, hooks: Global,
    ) -> None:  # fmt: skip
        self.type, self.key, self.location, self.numel = kind, key, location, numel
        self.offset, self.shape, self.stride = layout
        self.requires_grad = requires_grad
        self.hooks = hooks

    def arguments(self, call: Call) -> tuple[Node, ...]:
        """Return the arguments as nodes."""
        hooks = Call(self.hooks, (), "REDUCE", 0)
        return self.reference(), self.offset, self.shape, self.stride, self.requires_grad, hooks

    def reference(self) -> PersId:
        """Return a new reference to the storage."""
        pid = new_text("storage"), self.type, new_text(self.key), new_text(self.location), self.numel
        return PersId(pid, 0, -1)

    def plain(self, call: Call) -> NewTensorArguments:
        """Return the arguments of `call`, which are these."""
        return self


@final
class NewTensors:
    """The tensors that have `NewTensorArguments`, as columns like those of `Phrases`.

    Attributes:
        molds: all templates; `of` is the index of each tensor's template.
    """

    __slots__ = ("_calls", "_keys", "molds", "of")

    def __init__(self, tensors: Sequence[NewTensorArguments], calls: list[Call]) -> None:
        self._calls = calls
        self._keys = [made.key for made in tensors]
        self.molds: list[NewTensorArguments] = []
        self.of = array("I")
        known: dict[tuple[str, str, int], int] = {}
        for made in tensors:
            place = known.setdefault((made.type.name, made.location, made.numel), len(known))
            if place == len(self.molds):
                self.molds.append(made)
            self.of.append(place)

    def calls(self) -> list[Call]:
        """Return the calls of all tensors."""
        return self._calls

    def references(self) -> Iterator[PersId]:
        """Yield a new reference to the storage of each tensor."""
        for key, place in zip(self._keys, self.of, strict=True):
            mold = self.molds[place]
            yield PersId((new_text("storage"), mold.type, new_text(key), new_text(mold.location), mold.numel), 0, -1)

    def storages(self) -> list[str]:
        """Return the storage key of each tensor."""
        return self._keys

    def fetched(self) -> set[int]:
        """Return the ids of the strings that other opcodes push: none, without a stream."""
        return set()

    def locations(self) -> list[tuple[int, Text, int]]:
        """Return (0, location, number of tensors) for each template."""
        counts = [0] * len(self.molds)
        for place in self.of:
            counts[place] += 1
        return [(0, new_text(mold.location), count) for mold, count in zip(self.molds, counts, strict=True)]
