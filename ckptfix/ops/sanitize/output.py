"""What conversions to plain values write to: where they are in the object, what was changed, and what is left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ckptfix.errors import Unsupported
from ckptfix.formats.torch import versions, weights_only
from ckptfix.formats.torch.call_classes import class_name
from ckptfix.ops.hazards import in_text
from ckptfix.ops.sanitize.keys import hashable, refuse_conflicts
from ckptfix.ops.sanitize.report import DROPPED, Asked, Dropped, Filling, Loss, Made, Report, Settings
from ckptfix.pickles import Call, Dict, Global, PersId, Set, Text
from ckptfix.pickles.graph import Node, label

MAX_LABELS, MAX_LABEL = 64, 80
"""How much of an address is shown: a hostile one is as deep and as long as the file."""

NODES = frozenset((bytes, bytearray, tuple, list, Dict, Set, PersId, Global, Call))
"""Kinds of nodes that are converted in steps; every other one is a leaf."""


class Output:
    """The state of a conversion, and what its rules may do to it; `report` says what became what."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.report = Report()
        self.done: dict[int, Made] = {}
        self.in_progress: set[int] = set()
        self.keep_alive: list[Asked] = []
        self.labels: list[str | None] = []
        self.next_key = 0
        self.kept_depth = 0
        self.recode = settings.python2
        self.rebuilds = settings.python2 or settings.target is not None

    def address(self) -> str:
        named = [str(part)[:MAX_LABEL] for part in self.labels[: MAX_LABELS * 4] if part is not None]
        return "/".join(named[:MAX_LABELS]) + ("/..." if len(named) > MAX_LABELS else "")

    def changed(self, what: str, became: str) -> None:
        top = next((part for part in self.labels[:8] if part is not None), "")
        self.report.changes[top[:MAX_LABEL], what[:MAX_LABEL], became] += 1

    def drop(self, what: str, why: str, *, asked: bool = False) -> Literal[Dropped.DROPPED]:
        self.report.losses.append(Loss(self.address(), what, why, asked))
        return DROPPED

    def drop_at(self, name: str | None, what: str, why: str, *, asked: bool = False) -> Literal[Dropped.DROPPED]:
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

    def refused(self, value: object) -> Literal[Dropped.DROPPED] | None:
        """`drop` of bytes that hold a pickle which can run code; None for any others."""
        name = in_text(value)
        return self.drop("bytes", f"holds a pickle that names {name}, which can run code") if name else None

    def raw(self, value: bytes) -> str | Call:
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

    def listed(self, into: list[Node], parts: Sequence[Node]) -> Filling:
        """Append the converted `parts`; None where one is left out, so that the others keep their places."""
        for index, part in enumerate(parts):
            value = DROPPED if self.passed_over(part, str(index)) else (yield str(index), part)
            into.append(None if value is DROPPED else value)

    def passed_over(self, value: Node, name: str) -> bool:
        """Whether a plain value is dropped, as it is where only what leads to the weights is kept."""
        if self.settings.kept is None or self.kept_depth or (type(value) in NODES and value != ()):
            return False
        self.drop_at(name, "a value", "is outside the weights", asked=True)
        return True

    def fill(self, into: list[tuple[Node, Node]], rows: Sequence[tuple[Node, Node]]) -> Filling:
        """Put the converted (key, value) pairs into `into`; a pair whose key or value is left out is not there.

        Raises:
            KeyConflict: two keys became one.
        """
        odd = False
        for key, value in rows:
            new: Made = key
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
                if new is not DROPPED and not hashable(new):
                    why = "is a key of a mapping, and no plain value stands for it"
                    new = self.drop_at(label(key), described(key), why)
            if new is DROPPED:
                continue
            if self.passed_over(value, label(key)):
                continue
            made = yield label(key), value
            if made is not DROPPED:
                into.append((new, made))
        if odd:
            refuse_conflicts(into, self.address())

    def older(self, call: Call) -> Call:
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


def encoded(value: bytes) -> Call:
    """Bytes as protocol 2 writes them, which has no opcode for them."""
    return Call(Global("_codecs", "encode", 0), (value.decode("latin-1"), "latin1"), "REDUCE", 0)


def described(node: Asked) -> str:
    """What a node is, in a word or a class's name."""
    if type(node) is Call:
        name = class_name(node)
        return name or "an object of a computed class"
    if type(node) is Global:
        return weights_only.canonical(node)
    return _WORDS.get(type(node), type(node).__name__)


_WORDS = {Dict: "dict", Text: "str", PersId: "persistent id"}
