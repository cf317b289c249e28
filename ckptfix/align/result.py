"""Result of a matching: the pairs of names, and the reasons."""

from __future__ import annotations

from ckptfix.dataclass import dataclass
from ckptfix.names.rules import NameRule


@dataclass(frozen=True, slots=True)
class MatchedPair:
    """A pair of `source` and `target`.

    Attributes:
        confidence: 0 to 1; 1 if the names are equal, or only one tensor is possible.
        why: the reason, in a few words.
        instead: targets that would do as well; empty unless the pair is ambiguous.
        reshape: shape that the tensor must get; None if it fits unchanged.
        operation: operation that makes the target from the source, as in a rules file; empty for an unchanged tensor.
    """

    source: str
    target: str
    confidence: float = 1.0
    why: str = ""
    instead: tuple[str, ...] = ()
    reshape: tuple[int, ...] | None = None
    operation: str = ""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A name without a counterpart that a rule allows to be absent (``num_batches_tracked``), or a `tied` name."""

    name: str
    rule: str
    tied: bool = False


@dataclass(frozen=True, slots=True)
class Matching:
    """The pairs of source and target tensors.

    Attributes:
        by: ``"position"`` or ``"structure"``.
        pairs: in the order of the source.
        rules: renames that give exactly these pairs, in few lines.
        left, missing: names of the source without a target, and names of the target without a source.
        skipped_source, skipped_target: names that a family's rule allows to be absent.
        unfit: those of `left` that the target has too, with another shape: loading them fails.
        dropped: paths of blocks of the source that the user leaves out; their names are in no other list.
        notes: further remarks for the user, one sentence each.
    """

    by: str
    pairs: tuple[MatchedPair, ...]
    rules: tuple[NameRule, ...]
    left: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    skipped_source: tuple[Skipped, ...] = ()
    skipped_target: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()

    @property
    def names(self) -> dict[str, str]:
        """source -> target, for every pair whose tensor is unchanged."""
        return {pair.source: pair.target for pair in self.pairs if not pair.operation}

    @property
    def ambiguous(self) -> tuple[MatchedPair, ...]:
        return tuple(pair for pair in self.pairs if pair.instead)

    @property
    def complete(self) -> bool:
        """True if every name of both sides is paired or skipped by a rule, and no pair is ambiguous."""
        return not (self.left or self.missing or self.ambiguous)
