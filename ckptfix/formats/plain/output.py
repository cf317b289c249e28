"""Output of conversions to plain values: the current address, the changes, and the losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ckptfix.errors import Unsupported
from ckptfix.formats.loading.hidden_globals import dangerous_in
from ckptfix.formats.plain.keys import hashable, refuse_conflicts
from ckptfix.formats.plain.report import (
    DROPPED,
    Asked,
    ConversionReport,
    ConversionSettings,
    Dropped,
    Filling,
    LostValue,
    Made,
)
from ckptfix.formats.torch import versions, weights_only
from ckptfix.formats.torch.call_classes import class_name
from ckptfix.pickles import Call, Dict, Global, PersId, Set, Text
from ckptfix.pickles.graph import Node, label

MAX_LABELS, MAX_LABEL = 64, 80
"""The most labels, and characters of each, in an address: a hostile one is as deep and as long as the file."""

NODES = frozenset((bytes, bytearray, tuple, list, Dict, Set, PersId, Global, Call))
"""Types of nodes that are converted in steps; all others are leaves."""


class ConvertedObject:
    """The state of a conversion, and the operations of its rules; `report` lists the changes."""

    def __init__(self, settings: ConversionSettings) -> None:
        self.settings = settings
        self.report = ConversionReport()
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
        self.report.losses.append(LostValue(self.address(), what, why, asked))
        return DROPPED

    def drop_at(self, name: str | None, what: str, why: str, *, asked: bool = False) -> Literal[Dropped.DROPPED]:
        """Record the loss of a value under `name` in the current container."""
        self.labels.append(name)
        value = self.drop(what, why, asked=asked)
        self.labels.pop()
        return value

    def new_key(self) -> str:
        """Return a storage key that the file does not have."""
        while str(self.next_key) in self.settings.keys_in_use:
            self.next_key += 1
        self.next_key += 1
        return str(self.next_key - 1)

    def refused(self, value: object) -> Literal[Dropped.DROPPED] | None:
        """Drop bytes that hold a pickle which can run code; return None for other bytes."""
        name = dangerous_in(value)
        return self.drop("bytes", f"it holds a pickle that names {name}, which can run code") if name else None

    def raw(self, value: bytes) -> str | Call:
        """Return bytes in protocol 2's form; those of a Python 2 file as text if an encoding was given."""
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
        """Append the converted `parts`, with None for those that are left out, so that the others keep their index."""
        for index, part in enumerate(parts):
            value = DROPPED if self.passed_over(part, str(index)) else (yield str(index), part)
            into.append(None if value is DROPPED else value)

    def passed_over(self, value: Node, name: str) -> bool:
        """Drop a plain value if only nodes on the way to the weights are kept; return whether it was dropped."""
        if self.settings.kept is None or self.kept_depth or (type(value) in NODES and value != ()):
            return False
        self.drop_at(name, "a value", "it is outside the weights", asked=True)
        return True

    def fill(self, into: list[tuple[Node, Node]], rows: Sequence[tuple[Node, Node]]) -> Filling:
        """Put the converted (key, value) pairs into `into`, without pairs whose key or value is left out.

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
                    why = "it is a key of a dict, and has no plain form"
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
        """Return `call`, one of torch's own, in a form that the requested version knows.

        Raises:
            Unsupported: that version has no such form.
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
    """Return bytes in protocol 2's form, which has no opcode for them."""
    return Call(Global("_codecs", "encode", 0), (value.decode("latin-1"), "latin1"), "REDUCE", 0)


def described(node: Asked) -> str:
    """Name the kind of a node, or its class."""
    if type(node) is Call:
        name = class_name(node)
        return name or "an object of a computed class"
    if type(node) is Global:
        return weights_only.canonical(node)
    return _WORDS.get(type(node), type(node).__name__)


_WORDS = {Dict: "dict", Text: "str", PersId: "persistent id"}
