"""What can be done to a checkpoint: every format carries these out, each in its own way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptfix.checkpoint.checkpoint import SiteKind


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
class Reshape:
    """Give tensors of the mapping `at` other shapes with equally many elements; the bytes do not change.

    `shapes` maps a name, as it is in the file, to its new shape. A name that is the very same tensor object, or tied
    to it in the file's metadata, changes with it.
    """

    at: str
    shapes: Mapping[str, tuple[int, ...]]


Edit = Rename | Drop | SetLocation | SetMetadata | Reshape
