"""What a conversion to plain values is given, and what it reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

from ckptfix.formats.torch.rewrite import NewStorage
from ckptfix.formats.torch.versions import Version
from ckptfix.pickles.graph import Node


class Dropped(Enum):
    """What stands for a value that is left out."""

    DROPPED = "dropped"


DROPPED: Final = Dropped.DROPPED

Made: TypeAlias = "Node | Dropped"
"""What a node becomes."""

Asked: TypeAlias = "Node | list[tuple[Node, Node]]"
"""What is converted: a node, or the items of a call."""

Steps: TypeAlias = Generator[tuple[str | None, Asked], Made, Made]
"""Makes one value: yields (label, node) of what is in it, and is sent the converted value or `DROPPED`."""

Filling: TypeAlias = Generator[tuple[str | None, Asked], Made, None]
"""Steps that put what they make into a container."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A value that is left out: its address, what it was, why, and whether that was asked for."""

    where: str
    what: str
    why: str
    asked: bool = False


@dataclass(slots=True)
class Report:
    """What a conversion did.

    Attributes:
        changes: (top-level address, what it was, what it became) -> how often.
        losses: what was left out.
        storages: the bytes of new tensors by storage key.
    """

    changes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    losses: list[Loss] = field(default_factory=list)
    storages: dict[str, NewStorage] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    """How to convert.

    Attributes:
        legacy: the output is a legacy file.
        big: tensor data is big-endian.
        encoding: codec of a Python 2 file's byte strings; None for UTF-8, and Latin-1 in keys that are not.
        python2: the stream has no bytes but the str of Python 2.
        keys_in_use: storage keys of the file.
        kept: ``id`` of the nodes on the way to `whole`; what is beside them is dropped. None keeps all.
        whole: ``id`` of nodes that are kept with all that is below them.
        target: the torch version that is to read the output; None for today's.
    """

    legacy: bool = False
    big: bool = False
    encoding: str | None = None
    python2: bool = False
    keys_in_use: Collection[str] = ()
    kept: frozenset[int] | None = None
    whole: frozenset[int] = frozenset()
    target: Version | None = None
