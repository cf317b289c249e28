"""The edits to a checkpoint; every format carries them out in its own way."""

from __future__ import annotations

from collections.abc import Mapping

from ckptfix.checkpoint.checkpoint import SiteKind
from ckptfix.checkpoint.tensors import TensorEntry
from ckptfix.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Rename:
    """Change names at the site (`at`, `kind`): `names` maps old to new names; all others are unchanged."""

    at: str
    kind: SiteKind
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Drop:
    """Leave out the keys `names` of the state dict `at`."""

    at: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetLocation:
    """Change devices: `moves` maps locations to new ones, all at once; all others are unchanged."""

    moves: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SetMetadata:
    """Set string pairs of the file's metadata; None removes one."""

    pairs: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Put:
    """Replace the tensors of some keys of the state dict `at`: with any dtype, any shape, and bytes from any place.

    `tensors` maps a key, as it is in the file, to a dense entry, whose own `key` and `at` are ignored. Its bytes have
    the byte order of the checkpoint. Entries on one storage stay tied; every other tensor keeps its bytes and its ties.

    An entry that is the same tensor in a different shape moves no bytes. It applies to every key of the same tensor
    object, and to every key tied to it in the file's metadata.
    """

    at: str
    tensors: Mapping[str, TensorEntry]


Edit = Rename | Drop | Put | SetLocation | SetMetadata
