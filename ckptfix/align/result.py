"""Which name goes with which, and why."""

from __future__ import annotations

from dataclasses import dataclass

from ckptfix.names.rules import NameRule


@dataclass(frozen=True, slots=True)
class Pair:
    """`source` is paired with `target`.

    Attributes:
        confidence: 0 to 1; 1 where names are equal, or only one tensor could be meant.
        why: what it rests on, in a few words.
        instead: targets that would do as well; empty unless the pair is ambiguous.
        reshape: shape that the tensor must be given; None if it fits as it is.
        operation: what makes the target of the source, as a rules file says it; empty where it is the same tensor.
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
    """A name without counterpart that a rule lets pass, such as ``num_batches_tracked``; or one that is `tied`."""

    name: str
    rule: str
    tied: bool = False


@dataclass(frozen=True, slots=True)
class Matching:
    """Which source tensor is paired with which target.

    Attributes:
        by: ``"position"`` or ``"structure"``.
        pairs: in the order of the source.
        rules: renames that give exactly these pairs, in few lines.
        left, missing: names of the source without a target, and names of the target without a source.
        skipped_source, skipped_target: those that a family's rule allows to be absent.
        notes: what else the user should know, a sentence each.
    """

    by: str
    pairs: tuple[Pair, ...]
    rules: tuple[NameRule, ...]
    left: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    skipped_source: tuple[Skipped, ...] = ()
    skipped_target: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> dict[str, str]:
        """source -> target, for every pair of the same tensor."""
        return {pair.source: pair.target for pair in self.pairs if not pair.operation}

    @property
    def ambiguous(self) -> tuple[Pair, ...]:
        return tuple(pair for pair in self.pairs if pair.instead)

    @property
    def complete(self) -> bool:
        """Every name of both sides is paired or skipped by rule, and nothing is ambiguous."""
        return not (self.left or self.missing or self.ambiguous)
