"""A fresh pickle of protocol 2 from inert nodes, opcode for opcode as CPython's pickler writes it.

Strings and globals that are equal share a memo entry, as they do where one object stands in several
places; tuples, lists and calls share one when they are the same node.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from ckptfix.pickles import opcodes as op
from ckptfix.pickles.graph import Call, Dict, Global, Node, PersId
from ckptfix.pickles.patch import int_opcode, string_opcode

BATCH = 1000


def emit(root: Node) -> bytes:
    """The stream that builds `root`: plain values, and the nodes Global, Call (REDUCE), PersId and Dict.

    Raises:
        TypeError: a value that it does not know.
    """
    writer = _Writer()
    writer.save(root)
    return b"\x80\x02" + b"".join(writer.out) + b"."


class _Writer:
    def __init__(self) -> None:
        self.out: list[bytes] = []
        self.memo: dict[object, int] = {}
        self.kept: list[object] = []

    def put(self, key: object) -> None:
        index = len(self.memo)
        self.memo[key] = index
        small = index < 256
        self.out.append(bytes((op.BINPUT, index)) if small else bytes((op.LONG_BINPUT,)) + struct.pack("<L", index))

    def fetched(self, key: object) -> bool:
        index = self.memo.get(key)
        if index is None:
            return False
        small = index < 256
        self.out.append(bytes((op.BINGET, index)) if small else bytes((op.LONG_BINGET,)) + struct.pack("<L", index))
        return True

    def save(self, value: Node) -> None:
        out = self.out
        if value is None:
            out.append(b"N")
        elif value is True or value is False:
            out.append(b"\x88" if value else b"\x89")
        elif isinstance(value, int):
            out.append(int_opcode(value) if value >= 0 else _negative(value))
        elif isinstance(value, float):
            out.append(b"G" + struct.pack(">d", value))
        elif isinstance(value, str):
            if not self.fetched(("s", value)):
                out.append(string_opcode(value, 2))
                self.put(("s", value))
        elif type(value) is Global:
            if not self.fetched(("g", value.module, value.name)):
                out.append(f"c{value.module}\n{value.name}\n".encode())
                self.put(("g", value.module, value.name))
        elif type(value) is tuple:
            self.save_tuple(value)
        elif type(value) is PersId:
            self.save(value.pid)
            out.append(b"Q")
        elif type(value) is list or type(value) is Dict or type(value) is Call:
            if not self.fetched(id(value)):
                self.kept.append(value)
                self.save_object(value)
        else:
            raise TypeError(f"no opcode for {type(value).__name__}")

    def save_tuple(self, value: tuple[Node, ...]) -> None:
        if not value:
            self.out.append(b")")
            return
        if self.fetched(id(value)):
            return
        self.kept.append(value)
        if len(value) > 3:
            self.out.append(b"(")
        for item in value:
            self.save(item)
        self.out.append((b"\x85", b"\x86", b"\x87")[len(value) - 1] if len(value) <= 3 else b"t")
        self.put(id(value))

    def save_object(self, value: list[Node] | Dict | Call) -> None:
        if isinstance(value, list):
            self.out.append(b"]")
            self.put(id(value))
            self.batches([(item,) for item in value], b"a", b"e")
            return
        if isinstance(value, Dict):
            self.out.append(b"}")
            self.put(id(value))
            self.batches(value.items, b"s", b"u")
            return
        self.save(value.func)
        self.save(value.args)
        self.out.append(b"R")
        self.put(id(value))
        self.batches(value.items or (), b"s", b"u")
        if value.state is not None:
            self.save(value.state)
            self.out.append(b"b")

    def batches(self, rows: Sequence[Iterable[Node]], single: bytes, several: bytes) -> None:
        for start in range(0, len(rows), BATCH):
            batch = rows[start : start + BATCH]
            if len(batch) > 1:
                self.out.append(b"(")
            for row in batch:
                for item in row:
                    self.save(item)
            self.out.append(several if len(batch) > 1 else single)


def _negative(value: int) -> bytes:
    if value >= -(1 << 31):
        return bytes((op.BININT,)) + struct.pack("<l", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return bytes((op.LONG1, len(raw))) + raw
