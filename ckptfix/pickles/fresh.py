"""Calls that rebuild plain tensors, for a pickle that is written: most of a large pickle consists of them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import final

from ckptfix.pickles.graph import Call, Global, Node, PersId
from ckptfix.pickles.patch import int_opcode

TUPLES = (b")", b"\x85", b"\x86", b"\x87")
"""The opcodes that make tuples of zero, one, two and three items."""


@final
class NewTensorArguments:
    """Arguments of a call that rebuilds a plain tensor at the beginning of a storage, for a stream that is written.

    An object with very many tensors has one `NewTensorArguments` in place of some ten nodes per tensor. The nodes are
    created only for code that reads them.
    """

    __slots__ = ("hooks", "key", "kind", "location", "numel", "requires_grad", "shape", "stride")

    def __init__(
        self, kind: Global, key: str, location: str, numel: int, layout: tuple[tuple[int, ...], tuple[int, ...]],
        requires_grad: bool, hooks: Global,
    ) -> None:  # fmt: skip
        self.kind, self.key, self.location, self.numel = kind, key, location, numel
        self.shape, self.stride = layout
        self.requires_grad = requires_grad
        self.hooks = hooks

    def arguments(self, call: Call) -> tuple[Node, ...]:
        """Return the arguments as nodes."""
        persid = PersId(("storage", self.kind, self.key, self.location, self.numel), 0, -1)
        return persid, 0, self.shape, self.stride, self.requires_grad, Call(self.hooks, (), "REDUCE", 0)


def ints(node: tuple[int, ...]) -> bytes:
    """Return the opcodes that push a tuple of integers."""
    if len(node) > 3:
        return b"(%bt" % b"".join(map(int_opcode, node))
    return b"".join(map(int_opcode, node)) + TUPLES[len(node)]


def tail(
    heads: tuple[bytes, bytes, bytes], args: NewTensorArguments
) -> tuple[bytes, Callable[..., bytes], tuple[bytes, bytes, bytes, bytes]]:
    """Return the bytes before the storage key, a packer for the rest, and the fixed parts between its memo indices."""
    head, place, last = heads
    fixed = (
        b"%b%btr" % (place, int_opcode(args.numel)),
        b"QK\0%br" % ints(args.shape),
        b"%br" % ints(args.stride),
        b"%b%b)Rr" % (b"\x88" if args.requires_grad else b"\x89", last),
    )
    lengths = "".join(f"{len(part)}sI" for part in fixed)
    return head, struct.Struct(f"<I{lengths}2sI2sI").pack, fixed
