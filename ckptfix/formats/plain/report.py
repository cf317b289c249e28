"""Settings and report of a conversion to plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator
from dataclasses import field
from enum import Enum
from typing import Final, TypeAlias

from ckptfix.dataclass import dataclass
from ckptfix.formats.torch.rewrite import NewStorage
from ckptfix.formats.torch.versions import Version
from ckptfix.pickles.graph import Node


class Dropped(Enum):
    """Marker for a value that is left out."""

    DROPPED = "dropped"


DROPPED: Final = Dropped.DROPPED

Made: TypeAlias = "Node | Dropped"
"""The result of a conversion of a node."""

Asked: TypeAlias = "Node | list[tuple[Node, Node]]"
"""A request to convert a node, or the items of a call."""

Steps: TypeAlias = Generator[tuple[str | None, Asked], Made, Made]
"""Steps that make one value: they yield (label, node) of its content, and are sent the new value or `DROPPED`."""

Filling: TypeAlias = Generator[tuple[str | None, Asked], Made, None]
"""Steps that put their results into a container."""


@dataclass(frozen=True, slots=True)
class LostValue:
    """A value that is left out: its address, its kind, the reason, and whether that was requested."""

    where: str
    what: str
    why: str
    asked: bool = False


@dataclass(slots=True)
class ConversionReport:
    """The report of a conversion.

    Attributes:
        changes: (top-level address, old kind, new kind) -> how often.
        losses: values that were left out.
        storages: bytes of new tensors by storage key.
    """

    changes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    losses: list[LostValue] = field(default_factory=list)
    storages: dict[str, NewStorage] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConversionSettings:
    """Settings of a conversion.

    Attributes:
        legacy: the output is a legacy file.
        big: tensor data is big-endian.
        encoding: codec of a Python 2 file's byte strings; None for UTF-8, and Latin-1 for keys that are not UTF-8.
        python2: the bytes in the stream are strings of Python 2.
        keys_in_use: storage keys of the file.
        kept: ``id`` of the nodes on the way to `whole`; everything beside them is dropped. None keeps everything.
        whole: ``id`` of nodes that are kept with everything below them.
        target: the torch version that must read the output; None for the current one.
    """

    legacy: bool = False
    big: bool = False
    encoding: str | None = None
    python2: bool = False
    keys_in_use: Collection[str] = ()
    kept: frozenset[int] | None = None
    whole: frozenset[int] = frozenset()
    target: Version | None = None
