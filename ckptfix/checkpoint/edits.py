"""What can be done to a checkpoint: every format carries these out, each in its own way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptfix.checkpoint.checkpoint import SiteKind
from ckptfix.checkpoint.tensors import TensorEntry


@dataclass(frozen=True, slots=True)
class Rename:
    """Change names at the site (`at`, `kind`): `names` maps old to new; others do not change."""

    at: str
    kind: SiteKind
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Drop:
    """Leave out the keys `names` of the mapping `at`."""

    at: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetLocation:
    """Change devices: `moves` maps a location to its new one, all at once; others do not change."""

    moves: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SetMetadata:
    """Set string pairs of the file's metadata; None removes one."""

    pairs: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Put:
    """Give names of the mapping `at` other tensors: of any dtype, any shape, and bytes from anywhere.

    `tensors` maps a name, as it is in the file, to a dense entry; its own `key` and `at` do not count. Its bytes are in
    the byte order of the checkpoint. Entries on one storage stay tied; every other tensor keeps its bytes and its ties.

    An entry that is the tensor of that name in another shape moves no bytes, and reaches every name that is the very
    same tensor object, or tied to it in the file's metadata.
    """

    at: str
    tensors: Mapping[str, TensorEntry]


Edit = Rename | Drop | Put | SetLocation | SetMetadata
