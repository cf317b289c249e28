"""Opcodes of calls that rebuild plain tensors, packed in one piece: most of a large pickle consists of them."""

from __future__ import annotations

import struct
from collections.abc import Callable

from ckptfix.pickles.new_tensors import NewTensorArguments
from ckptfix.pickles.patch import int_opcode

TUPLES = (b")", b"\x85", b"\x86", b"\x87")
"""The opcodes that make tuples of zero, one, two and three items."""


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
        b"Q%b%br" % (int_opcode(args.offset), ints(args.shape)),
        b"%br" % ints(args.stride),
        b"%b%b)Rr" % (b"\x88" if args.requires_grad else b"\x89", last),
    )
    lengths = "".join(f"{len(part)}sI" for part in fixed)
    return head, struct.Struct(f"<I{lengths}2sI2sI").pack, fixed
