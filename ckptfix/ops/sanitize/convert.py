"""The object of a checkpoint made of plain values only: what ``torch.load(weights_only=True)`` takes.

One walk over the inert graph by a stack of generators, each of which makes one container and asks for what is in it.
A node that stands in several places is converted once, so ties and references are kept. Nothing is imported or called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckptfix.errors import Unsupported
from ckptfix.formats.torch import weights_only as trusted
from ckptfix.formats.torch.call_classes import class_name
from ckptfix.ops.sanitize import objects as objects
from ckptfix.ops.sanitize import versions as versions
from ckptfix.ops.sanitize.keys import hashable, refuse_conflicts
from ckptfix.ops.sanitize.numpy import SCALAR_TYPES, BadValue
from ckptfix.ops.sanitize.report import DROPPED, Loss, Report, Settings, Steps
from ckptfix.pickles import Call, Dict, Global, PersId, Set, Text
from ckptfix.pickles.graph import label, pairs

MAX_INT_BITS = 8 * 255 - 1
"""LONG1 counts its bytes in one; weights_only=True knows no other opcode for large ints."""

MAX_LABELS, MAX_LABEL = 64, 80
"""How much of an address is shown: a hostile one is as deep and as long as the file."""

class Converter:
    """Converts the nodes of one graph; `report` says what became what."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.report = Report()
        self.done: dict[int, Any] = {}
        self.in_progress: set[int] = set()
        self.keep_alive: list[Any] = []
        self.labels: list[str | None] = []
        self.next_key = 0
        self.kept_depth = 0
        self.recode = settings.python2
        self.rebuilds = settings.python2 or settings.target is not None

    def run(self, root: Any) -> Any:
        """What `root` becomes, or `DROPPED`."""
        stack: list[tuple[Any, Steps, str | None, bool]] = []
        current: tuple[str | None, Any] = (None, root)
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
                    value = self.drop(_described(node), str(error))
                stack.pop()
                self.labels.pop()
                self.kept_depth -= whole
                self.in_progress.discard(id(node))
                if id(node) not in self.done or value is DROPPED:
                    self.done[id(node)] = value
                    self.keep_alive.append(node)
            else:
                return value

    def begin(self, node: Any, name: str | None) -> tuple[Any, Steps | None]:
        """The value of a leaf, or of a node that was met before; else the steps that make it."""
        kind = type(node)
        if kind is Text:
            return (self.text(node) if self.recode else node), None
        if node is None or kind is bool or kind is float or kind is str:
            return node, None
        if kind is int:
            return (node if node.bit_length() <= MAX_INT_BITS else self.huge(node)), None
        if kind is tuple and not node:
            return node, None
        if id(node) in self.done:
            value = self.done[id(node)]
            if value is DROPPED:
                self.drop_at(name, _described(node), "as before")
            return value, None
        if id(node) in self.in_progress:
            return self.drop_at(name, _described(node), "refers back to what holds it"), None
        if kind is Call and not self.rebuilds and _is_settled(node):
            return node, None
        made = self.left_out(node, name) or _STEPS[kind](self, node)
        return None, made

    def left_out(self, node: Any, name: str | None) -> Steps | None:
        """Steps that make nothing, where only some nodes are kept and `node` is none of them."""
        settings = self.settings
        if settings.kept is None or self.kept_depth or id(node) in settings.kept:
            return None
        return self.nothing(node)

    def nothing(self, node: Any) -> Steps:
        return self.drop(_described(node), "is outside the weights", asked=True)
        yield

    def address(self) -> str:
        named = [str(part)[:MAX_LABEL] for part in self.labels[: MAX_LABELS * 4] if part is not None]
        return "/".join(named[:MAX_LABELS]) + ("/..." if len(named) > MAX_LABELS else "")

    def changed(self, what: str, became: str) -> None:
        top = next((part for part in self.labels[:8] if part is not None), "")
        self.report.changes[top[:MAX_LABEL], what[:MAX_LABEL], became] += 1

    def drop(self, what: str, why: str, *, asked: bool = False) -> Any:
        self.report.losses.append(Loss(self.address(), what, why, asked))
        return DROPPED

    def drop_at(self, name: str | None, what: str, why: str, *, asked: bool = False) -> Any:
        """`drop` of something that is under `name` in what is being made."""
        self.labels.append(name)
        value = self.drop(what, why, asked=asked)
        self.labels.pop()
        return value

    def new_key(self) -> str:
        """A storage key that the file does not have."""
        while str(self.next_key) in self.settings.keys_in_use:
            self.next_key += 1
        self.next_key += 1
        return str(self.next_key - 1)

    def huge(self, value: int) -> str:
        self.changed("int of more than 255 bytes", "str")
        return hex(value)

    def text(self, node: Text) -> str:
        """A string of a Python 2 file: as it was decoded, or by the encoding that was asked for."""
        encoding = self.settings.encoding
        if encoding is None or node.isascii():
            return str(node)
        try:
            return node.encode("utf-8").decode(encoding)
        except UnicodeError:
            return str(node)

    def bytes_(self, node: bytes) -> Steps:
        return self.raw(node)
        yield

    def raw(self, value: bytes) -> Any:
        """Bytes, as protocol 2 writes them; a Python 2 file's as text where an encoding was given."""
        if self.settings.python2 and self.settings.encoding is not None:
            try:
                text = value.decode(self.settings.encoding)
            except UnicodeError:
                pass
            else:
                self.changed("Python 2 string", "str")
                return text
        return encoded(value)

    def bytearray_(self, node: bytearray) -> Steps:
        return Call(Global("__builtin__", "bytearray", 0), (encoded(bytes(node)),), "REDUCE", 0)
        yield

    def tuple_(self, node: tuple[Any, ...]) -> Steps:
        made: list[Any] = []
        yield from self.listed(made, node)
        same = all(new is old for new, old in zip(made, node, strict=True))
        return node if same else tuple(made)

    def list_(self, node: list[Any]) -> Steps:
        made: list[Any] = []
        self.done[id(node)] = made
        self.keep_alive.append(node)
        yield from self.listed(made, node)
        return made

    def listed(self, into: list[Any], parts: Sequence[Any]) -> Steps:
        """Append the converted `parts`; None where one is left out, so that the others keep their places."""
        for index, part in enumerate(parts):
            value = DROPPED if self.passed_over(part, str(index)) else (yield str(index), part)
            into.append(None if value is DROPPED else value)

    def passed_over(self, value: Any, name: str) -> bool:
        """Whether a plain value is dropped, as it is where only what leads to the weights is kept."""
        if self.settings.kept is None or self.kept_depth or (type(value) in _STEPS and value != ()):
            return False
        self.drop_at(name, "a value", "is outside the weights", asked=True)
        return True

    def dict_(self, node: Dict) -> Steps:
        made = Dict()
        self.done[id(node)] = made
        self.keep_alive.append(node)
        yield from self.fill(made.items, pairs(node) or [])
        return made

    def fill(self, into: list[tuple[Any, Any]], rows: list[tuple[Any, Any]]) -> Steps:
        """Put the converted (key, value) pairs into `into`; a pair whose key or value is left out is not there.

        Raises:
            KeyConflict: two keys became one.
        """
        odd = False
        for key, value in rows:
            new = key
            if type(key) is not Text or self.recode:
                if type(key) is bytes and self.settings.python2:
                    new = key.decode(self.settings.encoding or "latin-1", "replace")
                    self.changed("Python 2 key", "str")
                elif type(key) is Set:
                    new = yield None, tuple(key.elements)
                    self.changed("frozenset in a key", "tuple")
                else:
                    new = yield None, key
                odd = odd or new is not key
                if new is DROPPED or not hashable(new):
                    if new is not DROPPED:
                        why = "is a key of a mapping, and no plain value stands for it"
                        self.drop_at(label(key), _described(key), why)
                    continue
            if self.passed_over(value, label(key)):
                continue
            made = yield label(key), value
            if made is not DROPPED:
                into.append((new, made))
        if odd:
            refuse_conflicts(into, self.address())

    def set_(self, node: Set) -> Steps:
        made = []
        for index, part in enumerate(node.elements):
            value = yield str(index), part
            if value is not DROPPED and hashable(value):
                made.append(value)
            elif value is not DROPPED:
                self.drop(_described(part), "is in a set, and no plain value stands for it")
        if node.kind == "frozenset":
            self.changed("frozenset", "set")
        return Call(Global("__builtin__", "set", 0), (made,), "REDUCE", 0)

    def persid(self, node: PersId) -> Steps:
        pid = node.pid
        if type(pid) is not tuple or len(pid) < 5 or pid[0] != "storage":
            return self.drop("a persistent id", "refers to no storage")
        if not self.rebuilds:
            return node
        fields = yield None, pid
        if self.settings.target is not None:
            try:
                fields = versions.older_storage(fields, self.settings.target)
            except Unsupported as error:
                raise self.placed(error) from None
        if self.settings.legacy and len(fields) == 5:
            fields = (*fields, None)
        return PersId(fields, node.position, -1)

    def older(self, call: Call) -> Any:
        """`call` of torch's own as the version that was asked for knows it.

        Raises:
            Unsupported: that version has nothing like it.
        """
        target = self.settings.target
        if target is None:
            return call
        try:
            made, losses = versions.older(call, target)
        except Unsupported as error:
            raise self.placed(error) from None
        if made is not call:
            self.changed(getattr(call.func, "name", ""), getattr(made.func, "name", ""))
        for name, why in losses:
            self.drop_at(name, "an attribute of a tensor", why)
        return made

    def placed(self, error: Unsupported) -> Unsupported:
        error.where = self.address()
        return error

    def global_(self, node: Global) -> Steps:
        full = trusted.canonical(node)
        if trusted.accepted(full):
            return node
        if node.module == "numpy" and node.name in SCALAR_TYPES:
            self.changed(full, "str")
            return node.name
        if full == "builtins.Ellipsis":
            self.changed(full, "str")
            return "..."
        return self.drop(full, "is a function or a class")
        yield

    def call(self, node: Call) -> Steps:
        made = yield from objects.converted(self, node)
        return made


def encoded(value: bytes) -> Call:
    """Bytes as protocol 2 writes them, which has no opcode for them."""
    return Call(Global("_codecs", "encode", 0), (value.decode("latin-1"), "latin1"), "REDUCE", 0)


def _is_settled(node: Call) -> bool:
    """Whether a call is a tensor in its everyday form, in which nothing can be foreign."""
    func, args = node.func, node.args
    if type(func) is not Global or func.module != "torch._utils" or type(args) is not tuple:
        return False
    if node.state is not None or node.items or node.elements:
        return False
    if func.name == "_rebuild_parameter" and len(args) == 3 and type(args[0]) is Call:
        return _no_hooks(args[2]) and type(args[1]) is bool and _is_settled(args[0])
    if func.name != "_rebuild_tensor_v2" or len(args) != 6 or type(args[0]) is not PersId:
        return False
    pid = args[0].pid
    return (
        type(pid) is tuple
        and len(pid) >= 5
        and type(pid[1]) is Global
        and trusted.accepted(trusted.canonical(pid[1]))
        and all(type(part) in (Text, int, Global) for part in pid[:5])
        and all(type(part) is tuple and all(type(size) is int for size in part) for part in args[2:4])
        and _no_hooks(args[5])
    )


def _no_hooks(node: Any) -> bool:
    return (
        type(node) is Call
        and not node.items
        and node.state is None
        and node.args == ()
        and node.is_call_of("collections", "OrderedDict")
    )


def _described(node: Any) -> str:
    """What a node is, in a word or a class's name."""
    if type(node) is Call:
        name = class_name(node)
        return name or "an object of a computed class"
    if type(node) is Global:
        return trusted.canonical(node)
    return _WORDS.get(type(node), type(node).__name__)


_WORDS = {Dict: "dict", Text: "str", PersId: "persistent id"}

_STEPS: Mapping[type, Any] = {
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
