"""New shapes in a torch pickle: other size and stride tuples in the rebuild call of a contiguous tensor.

A pickler writes a tuple once and fetches it from its memo wherever the same object stands again. Each use is edited
by itself: where the tuple that a memo entry holds changes, the other uses of the entry are written out as they were.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ckptfix.checkpoint import Reshape, contiguous_stride, is_contiguous
from ckptfix.errors import NoSuchTensor, Unsupported
from ckptfix.formats.torch.object import TorchObject
from ckptfix.formats.torch.tensors import BadTensor, sizes
from ckptfix.pickles import Call, Global, Patch, PersId
from ckptfix.pickles import opcodes as op
from ckptfix.pickles.patch import Item, int_opcode, items_pushed

_DENSE = {
    ("torch._utils", "_rebuild_tensor"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
}
"""Calls whose arguments begin with storage, offset, size and stride."""

_PARAMETERS = {("torch._utils", "_rebuild_parameter"), ("torch._utils", "_rebuild_parameter_with_state")}
_SUBCLASS = ("torch._tensor", "_rebuild_from_type_v2")

_PLAIN = frozenset((op.BININT, op.BININT1, op.BININT2, op.LONG1, op.LONG4, op.INT, op.LONG, op.MARK)) | {
    *(op.TUPLE, op.TUPLE1, op.TUPLE2, op.TUPLE3, op.EMPTY_TUPLE),
}
"""What a tuple of sizes is pushed with; such bytes can be written again elsewhere."""


@dataclass(frozen=True, slots=True)
class _Use:
    """A tuple in the arguments of a rebuild call, as bytes of the stream, and the bytes that push the new one."""

    item: Item
    new: bytes


def reshaped(found: TorchObject, edit: Reshape) -> list[Patch]:
    """The patches that carry out `edit`.

    Raises:
        NoSuchTensor: a name that the mapping does not have.
        Unsupported: a tensor that is not dense and contiguous, other elements, or one tensor with two shapes.
    """
    waiting = dict(edit.shapes)
    wanted: dict[int, tuple[int, ...]] = {}
    uses: list[_Use] = []
    for at, key, node in found.tensors:
        if at != edit.at or key not in waiting:
            continue
        shape = waiting.pop(key)
        where = f"{at}/{key}" if at else key
        call, args = _dense_call(node, where)
        if wanted.setdefault(id(call), shape) != shape:
            raise Unsupported("it has another name, and would have two shapes", where=where)
        old = _old_shape(args, where)
        if math.prod(shape) != math.prod(old):
            raise Unsupported(f"it cannot become {list(shape)}: it holds {list(old)}", where=where)
        if shape != old:
            uses += _uses(found.graph.data, call, args, shape, where)
    if waiting:
        raise NoSuchTensor("no such tensor", where=f"{edit.at}/{min(waiting)}" if edit.at else min(waiting))
    return _patches(found, {use.item.start: use for use in uses}) if uses else []


def _dense_call(node: Any, where: str) -> tuple[Call, tuple[Any, ...]]:
    """The call whose opcodes push the tensor, and the arguments that begin with its storage."""
    for _ in range(16):
        if type(node) is not Call or type(node.func) is not Global or type(node.args) is not tuple or not node.args:
            break
        name, args = (node.func.module, node.func.name), node.args
        if name == _SUBCLASS and len(args) > 2 and type(args[0]) is Global:
            name, args = (args[0].module, args[0].name), args[2] if type(args[2]) is tuple else ()
        if name in _DENSE and len(args) >= 4 and type(args[0]) is PersId:
            return node, args
        if name not in _PARAMETERS or not args:
            break
        node = args[0]
    raise Unsupported("only a dense tensor can have another shape", where=where)


def _old_shape(args: tuple[Any, ...], where: str) -> tuple[int, ...]:
    try:
        shape, stride = sizes(args[2]), sizes(args[3])
    except BadTensor as error:
        raise Unsupported(str(error), where=where) from None
    if len(shape) != len(stride) or not (0 in shape or is_contiguous(shape, stride)):
        raise Unsupported("a strided view has no other shape", where=where)
    return shape


def _uses(data: bytes, call: Call, args: tuple[Any, ...], shape: tuple[int, ...], where: str) -> list[_Use]:
    """The size and the stride in the arguments of `call`, with what is to push them."""
    persid = args[0]
    try:
        # From the storage on: offset, size and stride, then requires_grad, or the tuple of the arguments.
        first, *after = op.walk(data, persid.position, call.position)
        stop = next((opcode.start for opcode in after if _is_bool(data, opcode)), 0)
        stop = stop or [opcode.start for opcode in after if opcode.code not in op.PUTS][-1]
        _, size, stride = items_pushed(data, first.end, stop)
    except (ValueError, IndexError, Unsupported):
        raise Unsupported("its shape is not written beside its storage", where=where) from None
    return [_Use(size, _pushed(shape)), _Use(stride, _pushed(contiguous_stride(shape)))]


def _is_bool(data: bytes, opcode: op.Op) -> bool:
    if opcode.code == op.INT:  # how protocols before 2 push a bool
        return data[opcode.arg : opcode.end] in (b"00\n", b"01\n")
    return opcode.code in (op.NEWTRUE, op.NEWFALSE)


def _pushed(values: tuple[int, ...]) -> bytes:
    """The opcodes that push a tuple of sizes, without a PUT."""
    items = b"".join(map(int_opcode, values))
    short = (bytes((op.EMPTY_TUPLE,)), bytes((op.TUPLE1,)), bytes((op.TUPLE2,)), bytes((op.TUPLE3,)))
    if len(values) < len(short):
        return items + short[len(values)]
    return bytes((op.MARK,)) + items + bytes((op.TUPLE,))


def _patches(found: TorchObject, uses: dict[int, _Use]) -> list[Patch]:
    """Patches for `uses`, and for every other use of a memo entry whose tuple changes."""
    graph = found.graph
    data = graph.data
    patches = []
    stored: dict[int, bytes] = {}
    for use in uses.values():
        item = use.item
        last = next(op.walk(data, item.last, item.end))
        if data[item.start : last.end] == use.new:
            continue
        patches.append(Patch(item.start, last.end, use.new))
        if last.end < item.end:
            if last.code in op.GETS:
                raise Unsupported("a tuple fetched from the memo and stored again", offset=item.start)
            stored.update((put.start, data[item.start : last.end]) for put in op.walk(data, last.end, item.end))
    if not stored:
        return patches
    owner: dict[int, int] = {}
    for opcode in op.walk(data, graph.start, graph.end):
        if opcode.code in op.PUTS:
            owner[len(owner) if opcode.code == op.MEMOIZE else _index(data, opcode)] = opcode.start
        elif opcode.code in op.GETS and opcode.start not in uses:
            old = stored.get(owner.get(_index(data, opcode), -1))
            if old is not None:
                patches.append(Patch(opcode.start, opcode.end, _plain(old, opcode.start)))
    return patches


def _index(data: bytes, opcode: op.Op) -> int:
    argument = data[opcode.arg : opcode.end]
    return int(argument) if opcode.code in (op.GET, op.PUT) else int.from_bytes(argument, "little")


def _plain(pushing: bytes, offset: int) -> bytes:
    """`pushing`, once it is sure that it only pushes numbers and makes a tuple of them."""
    if any(opcode.code not in _PLAIN for opcode in op.walk(pushing, 0, len(pushing))):
        raise Unsupported("a shared shape that is more than numbers", offset=offset)
    return pushing
