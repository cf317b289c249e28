"""The opcodes of pickle protocols 0 to 5, and a walk over a stream that stops at each one.

Source: the table in CPython's Lib/pickletools.py, which documents every opcode and its argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

MARK, STOP, POP, POP_MARK, DUP = 0x28, 0x2E, 0x30, 0x31, 0x32
FLOAT, INT, BININT, BININT1, LONG, BININT2 = 0x46, 0x49, 0x4A, 0x4B, 0x4C, 0x4D
NONE, PERSID, BINPERSID, REDUCE, STRING, BINSTRING = 0x4E, 0x50, 0x51, 0x52, 0x53, 0x54
SHORT_BINSTRING, UNICODE, BINUNICODE, APPEND, BUILD, GLOBAL = 0x55, 0x56, 0x58, 0x61, 0x62, 0x63
DICT, EMPTY_DICT, APPENDS, GET, BINGET, INST, LONG_BINGET = 0x64, 0x7D, 0x65, 0x67, 0x68, 0x69, 0x6A
LIST, EMPTY_LIST, OBJ, PUT, BINPUT, LONG_BINPUT = 0x6C, 0x5D, 0x6F, 0x70, 0x71, 0x72
SETITEM, TUPLE, EMPTY_TUPLE, SETITEMS, BINFLOAT = 0x73, 0x74, 0x29, 0x75, 0x47
PROTO, NEWOBJ, EXT1, EXT2, EXT4 = 0x80, 0x81, 0x82, 0x83, 0x84
TUPLE1, TUPLE2, TUPLE3, NEWTRUE, NEWFALSE, LONG1, LONG4 = 0x85, 0x86, 0x87, 0x88, 0x89, 0x8A, 0x8B
BINBYTES, SHORT_BINBYTES = 0x42, 0x43
SHORT_BINUNICODE, BINUNICODE8, BINBYTES8, EMPTY_SET = 0x8C, 0x8D, 0x8E, 0x8F
ADDITEMS, FROZENSET, NEWOBJ_EX, STACK_GLOBAL, MEMOIZE, FRAME = 0x90, 0x91, 0x92, 0x93, 0x94, 0x95
BYTEARRAY8, NEXT_BUFFER, READONLY_BUFFER = 0x96, 0x97, 0x98

NAMES = {value: name for name, value in list(globals().items()) if name.isupper() and isinstance(value, int)}

CODES = frozenset(NAMES)
GETS = frozenset((GET, BINGET, LONG_BINGET))
PUTS = frozenset((PUT, BINPUT, LONG_BINPUT, MEMOIZE))

# Length in bytes of a fixed argument, and of the count before a counted one.
FIXED = {
    BININT: 4,
    BININT1: 1,
    BININT2: 2,
    BINFLOAT: 8,
    BINGET: 1,
    LONG_BINGET: 4,
    BINPUT: 1,
    LONG_BINPUT: 4,
    PROTO: 1,
    EXT1: 1,
    EXT2: 2,
    EXT4: 4,
    FRAME: 8,
}
COUNTED = {
    SHORT_BINSTRING: 1,
    SHORT_BINBYTES: 1,
    SHORT_BINUNICODE: 1,
    LONG1: 1,
    BINSTRING: 4,
    BINBYTES: 4,
    BINUNICODE: 4,
    LONG4: 4,
    BINUNICODE8: 8,
    BINBYTES8: 8,
    BYTEARRAY8: 8,
}
LINES = {
    FLOAT: 1,
    INT: 1,
    LONG: 1,
    PERSID: 1,
    STRING: 1,
    UNICODE: 1,
    GLOBAL: 2,
    GET: 1,
    INST: 2,
    PUT: 1,
}

# The opcodes that torch.load(weights_only=True) accepts (torch/_weights_only_unpickler.py, 2.13).
# fmt: off
WEIGHTS_ONLY = frozenset((
    APPEND, APPENDS, BINFLOAT, BINGET, BININT, BININT1, BININT2, BINPERSID, BINPUT, BINUNICODE, BUILD,
    EMPTY_DICT, EMPTY_LIST, EMPTY_SET, EMPTY_TUPLE, GLOBAL, LONG1, LONG_BINGET, LONG_BINPUT, MARK,
    NEWFALSE, NEWOBJ, NEWTRUE, NONE, PROTO, REDUCE, SETITEM, SETITEMS, SHORT_BINSTRING, STOP,
    TUPLE, TUPLE1, TUPLE2, TUPLE3,
))
# fmt: on


class Op(NamedTuple):
    """One opcode: `data[start:end]`, with its argument from `arg` on."""

    code: int
    start: int
    arg: int
    end: int


def walk(data: bytes, start: int, stop: int) -> Iterator[Op]:
    """Yield the opcodes of ``data[start:stop]``, which must hold whole ones.

    Raises:
        ValueError: an opcode is unknown, or runs past `stop`.
    """
    position = start
    while position < stop:
        code = data[position]
        arg = position + 1
        if code in FIXED:
            end = arg + FIXED[code]
        elif code in COUNTED:
            width = COUNTED[code]
            end = arg + width + int.from_bytes(data[arg : arg + width], "little")
        elif code in LINES:
            end = arg
            for _ in range(LINES[code]):
                end = data.index(b"\n", end, stop) + 1
        elif code in NAMES:
            end = arg
        else:
            raise ValueError(f"unknown opcode {code:#x} at {position}")
        if end > stop:
            raise ValueError(f"opcode {NAMES[code]} at {position} runs past {stop}")
        yield Op(code, position, arg, end)
        position = end


def pushed_int(opcode: bytes) -> int:
    """Return the number that BININT, BININT1, BININT2 or LONG1 pushes."""
    if opcode[0] == LONG1:
        return int.from_bytes(opcode[2:], "little", signed=True)
    return int.from_bytes(opcode[1:], "little", signed=opcode[0] == BININT)
