"""The comparison of two sets of tensors by digest: which ones moved, changed, were added, or are missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from ckptfix.dataclass import dataclass
from ckptfix.ops.digest.tensors import Digest


@dataclass(frozen=True, slots=True)
class RenamedTensor:
    """A tensor of the original, and its name in the copy."""

    old: str
    new: str


@dataclass(frozen=True, slots=True)
class DigestCheck:
    """The comparison of a copy with its original.

    Attributes:
        against: the original, or a manifest of it.
        same: number of tensors of the original that the copy has under the same name.
        moved: tensors of the original that the copy has under a different name.
        missing: names in the original whose tensors the copy lacks.
        changed: names in both, with different tensors.
        added: names in the copy whose tensors the original lacks.
        left_out: address of a state dict of the original that the copy lacks completely -> number of its tensors.
        no_data: names on either side whose values are in no file: they are not verified.
    """

    against: str
    same: int = 0
    moved: tuple[RenamedTensor, ...] = ()
    missing: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    no_data: tuple[str, ...] = ()

    @property
    def verified(self) -> bool:
        """True if nothing is missing, changed or added, and all tensors have values."""
        return not (self.missing or self.changed or self.added or self.no_data)

    @property
    def rows(self) -> tuple[tuple[tuple[str, ...], str], ...]:
        """The names that are not verified, and the reason."""
        return (self.changed, "changed"), (self.missing, "missing"), (self.added, "added"), (self.no_data, "no data")

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison for JSON."""
        return {
            "against": self.against,
            "verified": self.verified,
            "same": self.same,
            "moved": [{"old": row.old, "new": row.new} for row in self.moved],
            "missing": list(self.missing),
            "changed": list(self.changed),
            "added": list(self.added),
            "left_out": dict(self.left_out),
            "no_data": list(self.no_data),
        }


def compare(copy: Sequence[Digest], original: Sequence[Digest], against: str) -> DigestCheck:
    """Compare `copy` with `original`.

    Equal names are compared first, and the rest is paired by digest. A remaining tensor may have its bytes on the other
    side only under names that are already paired. Such a tensor was tied, or is tied now: it counts as moved.
    """
    have = {row.name: row for row in copy}
    want = {row.name: row for row in original}
    same = {name for name, row in want.items() if name in have and have[name].digest == row.digest}
    free: defaultdict[str, list[str]] = defaultdict(list)
    anywhere: dict[str, str] = {}
    for name, row in have.items():
        anywhere.setdefault(row.digest, name)
        if name not in same:
            free[row.digest].append(name)
    moved: list[RenamedTensor] = []
    taken: set[str] = set()
    lost: list[str] = []
    for name, row in want.items():
        if name in same:
            continue
        names = free[row.digest]
        if names:
            moved.append(RenamedTensor(name, names.pop(0)))
            taken.add(moved[-1].new)
        elif row.digest in anywhere:
            moved.append(RenamedTensor(name, anywhere[row.digest]))
        else:
            lost.append(name)
    origin: dict[str, str] = {}
    for name, row in want.items():
        origin.setdefault(row.digest, name)
    new: list[str] = []
    gone = set(lost)
    for name, row in have.items():
        if name in same or name in taken:
            continue
        if row.digest in origin and name not in gone:
            moved.append(RenamedTensor(origin[row.digest], name))
        else:
            new.append(name)
    changed = [name for name in lost if name in have and name in new]
    rest = set(changed)
    missing, left_out = _left_out([name for name in lost if name not in rest], want, lost)
    return DigestCheck(
        against,
        len(same),
        tuple(moved),
        tuple(missing),
        tuple(changed),
        tuple(name for name in new if name not in rest),
        left_out,
    )


def _left_out(
    missing: Sequence[str], want: Mapping[str, Digest], lost: Sequence[str]
) -> tuple[list[str], dict[str, int]]:
    """Split the missing names: those of state dicts that are partly there, and a count for each that is not there."""
    gone = set(lost)
    there = {row.at.partition("/")[0] for name, row in want.items() if name not in gone}
    rest: list[str] = []
    whole: dict[str, int] = {}
    for name in missing:
        top = want[name].at.partition("/")[0]
        if not there or top in there or not top:
            rest.append(name)
        else:
            whole[top] = whole.get(top, 0) + 1
    return rest, whole
