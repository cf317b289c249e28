"""Conversion of a checkpoint's object to plain values, which ``torch.load(weights_only=True)`` accepts.

A single walk over the inert graph uses a stack of generators. Each generator makes one container and requests its
content. A node that appears in several places is converted once, so ties and references are kept. Nothing is imported
or called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckptfix.errors import Unsupported
from ckptfix.formats.numpy_pickles import SCALAR_TYPES, BadValue
from ckptfix.formats.plain import objects
from ckptfix.formats.plain.keys import hashable
from ckptfix.formats.plain.output import ConvertedObject, described, encoded
from ckptfix.formats.plain.report import DROPPED, Asked, Made, Steps
from ckptfix.formats.torch import calls, versions, weights_only
from ckptfix.pickles import Call, Dict, Global, PersId, Set, Text
from ckptfix.pickles.graph import Node, pairs

MAX_INT_BITS = 8 * 255 - 1
"""LONG1 has a one-byte length; weights_only=True knows no other opcode for large ints."""


class Converter(ConvertedObject):
    """Converter for the nodes of one graph; `report` lists the changes."""

    def run(self, root: Node) -> Made:
        """Convert `root`, and return its new value or `DROPPED`."""
        stack: list[tuple[Asked, Steps, str | None, bool]] = []
        current: tuple[str | None, Asked] = (None, root)
        while True:
            name, node = current
            value, steps = self.begin(node, name)
            if steps is not None:
                whole = id(node) in self.settings.whole
                self.kept_depth += whole
                stack.append((node, steps, name, whole))
                self.labels.append(name)
                self.in_progress.add(id(node))
                value = None
            while stack:
                node, steps, _, whole = stack[-1]
                try:
                    current = steps.send(value)
                    break
                except StopIteration as stop:
                    value = stop.value
                except BadValue as error:
                    value = self.drop(described(node), str(error))
                stack.pop()
                self.labels.pop()
                self.kept_depth -= whole
                self.in_progress.discard(id(node))
                if id(node) not in self.done or value is DROPPED:
                    self.done[id(node)] = value
                    self.keep_alive.append(node)
            else:
                return value

    def begin(self, node: Asked, name: str | None) -> tuple[Made, Steps | None]:
        """Return the value of a leaf, or of a node that was met before; otherwise the steps that make it."""
        if isinstance(node, str):
            return (self.text(node) if self.recode and type(node) is Text else node), None
        if node is None or isinstance(node, (bool, float)):
            return node, None
        if isinstance(node, int):
            return (node if node.bit_length() <= MAX_INT_BITS else self.huge(node)), None
        if isinstance(node, tuple) and not node:
            return node, None
        if id(node) in self.done:
            value = self.done[id(node)]
            if value is DROPPED:
                self.drop_at(name, described(node), "it was left out before")
            return value, None
        if id(node) in self.in_progress:
            return self.drop_at(name, described(node), "it refers back to its own container"), None
        if self.is_left_out(node):
            # The node is not recorded as dropped: the weights may hold the same object.
            return self.drop_at(name, described(node), "it is outside the weights", asked=True), None
        if type(node) is Call and not self.rebuilds and _is_settled(node):
            return node, None
        return None, _STEPS[type(node)](self, node)

    def is_left_out(self, node: Asked) -> bool:
        """Return whether only some nodes are kept and `node` is outside them."""
        settings = self.settings
        return settings.kept is not None and not self.kept_depth and id(node) not in settings.kept

    def huge(self, value: int) -> str:
        self.changed("int of more than 255 bytes", "str")
        return hex(value)

    def text(self, node: Text) -> str:
        """Return a string of a Python 2 file: as it was decoded, or in the requested encoding."""
        encoding = self.settings.encoding
        if encoding is None or node.isascii():
            return str(node)
        try:
            return node.encode("utf-8").decode(encoding)
        except UnicodeError:
            return str(node)

    def bytes_(self, node: bytes) -> Steps:
        return self.refused(node) or self.raw(node)
        yield

    def bytearray_(self, node: bytearray) -> Steps:
        if (dropped := self.refused(node)) is not None:
            return dropped
        return Call(Global("__builtin__", "bytearray", 0), (encoded(bytes(node)),), "REDUCE", 0)
        yield

    def tuple_(self, node: tuple[Node, ...]) -> Steps:
        made: list[Node] = []
        yield from self.listed(made, node)
        same = all(new is old for new, old in zip(made, node, strict=True))
        return node if same else tuple(made)

    def list_(self, node: list[Node]) -> Steps:
        made: list[Node] = []
        self.done[id(node)] = made
        self.keep_alive.append(node)
        yield from self.listed(made, node)
        return made

    def dict_(self, node: Dict) -> Steps:
        made = Dict()
        self.done[id(node)] = made
        self.keep_alive.append(node)
        yield from self.fill(made.items, pairs(node) or [])
        return made

    def set_(self, node: Set) -> Steps:
        made: list[Node] = []
        for index, part in enumerate(node.elements):
            value = yield str(index), part
            if value is not DROPPED and hashable(value):
                made.append(value)
            elif value is not DROPPED:
                self.drop(described(part), "it is in a set, and has no plain form")
        if node.kind == "frozenset":
            self.changed("frozenset", "set")
        return Call(Global("__builtin__", "set", 0), (made,), "REDUCE", 0)

    def persid(self, node: PersId) -> Steps:
        pid = node.pid
        if type(pid) is not tuple or len(pid) < 5 or pid[0] != "storage":
            return self.drop("a persistent id", "it does not refer to a storage")
        if not self.rebuilds:
            return node
        fields = yield None, pid
        if not isinstance(fields, tuple):
            return DROPPED
        if self.settings.target is not None:
            try:
                fields = versions.older_storage(fields, self.settings.target)
            except Unsupported as error:
                raise self.placed(error) from None
        if self.settings.legacy and len(fields) == 5:
            fields = (*fields, None)
        return PersId(fields, node.position, -1)

    def global_(self, node: Global) -> Steps:
        full = weights_only.canonical(node)
        if weights_only.accepted(full):
            return node
        if node.module == "numpy" and node.name in SCALAR_TYPES:
            self.changed(full, "str")
            return node.name
        if full == "builtins.Ellipsis":
            self.changed(full, "str")
            return "..."
        return self.drop(full, "it is a function or a class")
        yield

    def call(self, node: Call) -> Steps:
        made = yield from objects.converted(self, node)
        return made


def _is_settled(node: Call) -> bool:
    """Return whether a call is a tensor in its usual form, which cannot contain anything foreign."""
    func, args = node.func, node.args
    row = calls.of(func)
    if row is None or type(args) is not tuple:
        return False
    if node.state is not None or node.items or node.elements:
        return False
    if row is calls.PARAMETER and len(args) == 3 and type(args[0]) is Call:
        return _no_hooks(args[2]) and type(args[1]) is bool and _is_settled(args[0])
    if row is not calls.TENSOR_V2 or len(args) != 6 or type(args[0]) is not PersId:
        return False
    pid = args[0].pid
    return (
        type(pid) is tuple
        and len(pid) >= 5
        and type(pid[1]) is Global
        and weights_only.accepted(weights_only.canonical(pid[1]))
        and all(type(part) in (Text, int, Global) for part in pid[:5])
        and all(type(part) is tuple and all(type(size) is int for size in part) for part in args[2:4])
        and _no_hooks(args[5])
    )


def _no_hooks(node: Node) -> bool:
    return (
        type(node) is Call
        and not node.items
        and node.state is None
        and node.args == ()
        and node.is_call_of("collections", "OrderedDict")
    )


_STEPS: Mapping[type, Callable[..., Steps]] = {
    bytes: Converter.bytes_,
    bytearray: Converter.bytearray_,
    tuple: Converter.tuple_,
    list: Converter.list_,
    Dict: Converter.dict_,
    Set: Converter.set_,
    PersId: Converter.persid,
    Global: Converter.global_,
    Call: Converter.call,
}
