"""Proof of a matching: both models, with the same random weights, must give the same outputs.

The model of IN gets random weights. These are saved, matched and written exactly as IN itself would be, and loaded into
the model of TARGET. If the outputs for one input are equal, the matching is right for any weights, so the values in IN
do not matter. Where several matchings are possible, the ones tried are the first proposals, those with the numbers of
heads that the models name, and those of `gradients`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptfix.align.fused import Heads
from ckptfix.align.result import Matching
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, NoMatch, Refused
from ckptfix.names.slots import Slot
from ckptfix.ops.match.fused import Operations
from ckptfix.ops.match.gradients import proposals
from ckptfix.ops.match.proof import PROVED, Proof
from ckptfix.ops.match.running import (
    SEED,
    Arguments,
    Models,
    compared,
    compared_names,
    difference,
    draw,
    exits_refused,
    guessed,
    head_counts,
    held_as,
    outputs,
    plain_attention,
    steady_outputs,
    tensors_in,
    uncompiled,
)

if TYPE_CHECKING:
    import torch

SAME = 1e-6
"""Relative difference of outputs in float64 up to which they are equal. Other values of eps make less; one exchanged
tensor of random weights makes much more."""

Convert = Callable[[str, Matching, Operations], "Mapping[str, torch.Tensor]"]
"""Return the weights of a file under the names of the target, as the matching writes them."""


@dataclass(slots=True)
class Verdict:
    """A matching, and the difference of the outputs that it gives.

    Attributes:
        difference: the greatest difference, relative to the greatest output; None if they cannot be compared.
        why: the reason for which they cannot be compared.
        among: the outputs of the source that were compared, by name.
        unproved: a sentence on what equal outputs do not prove; empty if they prove all.
        matching, operations: the matching that gives equal outputs.
    """

    matching: Matching
    operations: Operations
    difference: float | None = None
    why: str = ""
    among: tuple[str, ...] = ()
    unproved: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def equal(self) -> bool:
        return self.difference is not None and self.difference <= SAME

    @property
    def sentences(self) -> tuple[str, ...]:
        """All that there is to say of equal outputs, a sentence each."""
        return (*self.notes, self.unproved) if self.unproved else self.notes


def prove(
    both: Models,
    matching: Matching,
    operations: Operations,
    slots: Sequence[Slot],
    convert: Convert,
    again: Callable[[Heads], tuple[Matching, Operations]] | None = None,
) -> Verdict:
    """Return the first of the possible matchings that gives equal outputs, or the verdict on the first proposals.

    Args:
        slots: of the source.
        again: matches both sides with the numbers of heads.

    Raises:
        Refused: the model of IN lacks a key of IN, or has another shape there; or it cannot run.
    """
    with _prepared(both, slots) as trial:
        first: Verdict | None = None
        proved: Verdict | None = None
        notes: tuple[str, ...] = ()
        filled = partial(convert, trial.file)
        try:
            with closing(_candidates(trial, matching, operations, slots, filled, again)) as candidates:
                for label, candidate, steps in candidates:
                    done = trial.verdict(Verdict(candidate, steps), partial(filled, candidate, steps), label)
                    first = first or done
                    if done.equal:
                        proved = done
                        break
        except Refused as error:
            notes = (f"no other matching is proposed: {error.message}",)
        assert first is not None
        if proved is not None:
            proof = trial.proof(proved)
            if proof is None:
                proved.matching, proved.operations = matching, operations
            else:
                settled = proof.settled(proved.matching, proved.operations, matching)
                proved.matching, proved.operations = settled
                proved.unproved = proof.unproved([slot.name for slot in slots])
            return proved
        if first.difference is not None:
            made = filled(first.matching, operations)
            first.notes = (*_first_apart(both, trial.arguments, first.matching, made), *notes)
        return first


def compare(both: Models, slots: Sequence[Slot], convert: Callable[[str], Mapping[str, Any]]) -> Verdict:
    """Return the verdict on one way to convert the weights of the source.

    Args:
        slots: of the source.
        convert: returns the weights of a file under the names of the target.

    Raises:
        Refused: as `prove`.
    """
    with _prepared(both, slots) as trial:
        done = Verdict(Matching("rules", (), ()), Operations())
        trial.verdict(done, partial(convert, trial.file), "the rules")
        proof = trial.proof(done) if done.equal else None
        done.unproved = proof.unproved([slot.name for slot in slots]) if proof else ""
        return done


@dataclass(frozen=True, slots=True)
class _Trial:
    """Both models with random weights, and what the source makes of the input.

    Attributes:
        file: the weights of the source.
        arguments: positional and named arguments of both models.
        wanted: outputs of the source.
    """

    both: Models
    file: str
    arguments: Arguments
    wanted: Mapping[str, Any]

    def verdict(self, done: Verdict, convert: Callable[[], Mapping[str, Any]], label: str) -> Verdict:
        """Compare the outputs that converted weights give, and note the result in `done`."""
        import torch

        try:
            draw(self.both.target, SEED + 1)  # what no pair fills must not be equal by accident
            self.both.target.load_state_dict(convert(), strict=False)
            made = steady_outputs(self.both.target, self.arguments, "the model of --like")
            done.difference, done.why = compared(self.wanted, made)
            done.among = tuple(compared_names([*self.wanted], [*made])[0])
        except (CkptfixError, RuntimeError) as error:
            done.why = str(error).splitlines()[0]
        if done.equal:
            given = (*self.arguments[0], *self.arguments[1].values())
            shown = ", ".join(str(list(one.shape)) for one in given if isinstance(one, torch.Tensor))
            done.notes = (f"{PROVED}: they differ by {done.difference:.1g} for an input of {shown} ({label})",)
        return done

    def proof(self, done: Verdict) -> Proof | None:
        """Return what equal outputs prove.

        Returns:
            None if they depend on no weights; the verdict is then that they cannot be compared.
        """
        proof = Proof(self.both, self.arguments, done.among)
        if proof.reached:
            return proof
        done.difference, done.notes = None, ()
        done.why = "that of the model of --source depends on none of its weights, as far as gradients show"
        return None


@contextmanager
def _prepared(both: Models, slots: Sequence[Slot]) -> Iterator[_Trial]:
    """Set random weights in both models, run the source, and yield what a trial needs."""
    import torch

    with (
        exits_refused(), redirect_stdout(sys.stderr), plain_attention(), uncompiled(), torch.no_grad(),
        tempfile.TemporaryDirectory() as folder,
    ):  # fmt: skip
        both.source = held_as(both.source, [slot.name for slot in slots])
        draw(both.source, SEED)
        state = both.source.state_dict()
        for slot in slots:
            if slot.name not in state or tuple(state[slot.name].shape) != slot.shape:
                hint = "--source is the model that IN was saved from"
                raise Refused("the model of --source has no such key of this shape", where=slot.name, hint=hint)
        file = str(Path(folder, "source.pth"))
        torch.save({slot.name: state[slot.name] for slot in slots}, file)
        arguments = both.given or guessed(both)
        yield _Trial(both, file, arguments, steady_outputs(both.source, arguments, "the model of --source"))


def _candidates(
    trial: _Trial,
    matching: Matching,
    operations: Operations,
    slots: Sequence[Slot],
    filled: Callable[[Matching, Operations], Mapping[str, Any]],
    again: Callable[[Heads], tuple[Matching, Operations]] | None,
) -> Generator[tuple[str, Matching, Operations]]:
    """Yield the possible matchings."""
    yield "the first proposals", matching, operations
    if again is not None and any("--heads N" in question for question in operations.questions):
        for query, kv in head_counts(trial.both):
            shown = f"--heads {query}" + (f" --kv-heads {kv}" if kv != query else "")
            yield shown, *again(Heads(query, None if kv == query else kv))
    for made in proposals(trial.both, trial.arguments, matching, operations, slots, filled):
        yield "by equal gradients", *made


def _first_apart(
    both: Models,
    arguments: Arguments,
    matching: Matching,
    filled: Mapping[str, Any],
) -> Iterator[str]:
    """Yield a sentence on the first module, in order of the run, whose output differs from its counterpart's."""
    both.target.load_state_dict(filled, strict=False)
    to = {pair.source.rpartition(".")[0]: pair.target.rpartition(".")[0] for pair in matching.pairs}
    seen: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    hooks = []
    for model, kept, names in ((both.source, seen[0], to), (both.target, seen[1], set(to.values()))):
        for name, module in model.named_modules():
            if name and name in names:
                hooks.append(module.register_forward_hook(_keeper(kept, name)))
    try:
        outputs(both.source, arguments, "the model of --source")
        outputs(both.target, arguments, "the model of --like")
    finally:
        for hook in hooks:
            hook.remove()
    for name, one in seen[0].items():
        other = seen[1].get(to[name])
        if other is not None and one.shape == other.shape and difference(one, other) > SAME:
            yield f"the first layers that differ are {name} of IN and {to[name]} of TARGET"
            return


def _keeper(kept: dict[str, Any], name: str) -> Callable[[Any, Any, Any], None]:
    def keep(module: object, given: object, made: object) -> None:
        found = tensors_in(made)
        if found:
            kept.setdefault(name, next(iter(found.values())).detach().clone())

    return keep


def unproved(done: Verdict, hint: str) -> NoMatch:
    """Return the error for pairs that equal outputs leave open."""
    return NoMatch(f"the outputs are equal, but prove not all pairs: {done.unproved}", hint=hint)


def refusal(done: Verdict) -> NoMatch:
    """Return the error for outputs that differ, or that cannot be compared."""
    if done.difference is None:
        return NoMatch(f"the outputs cannot be compared: {done.why}", lines=done.notes)
    message = f"the outputs of the two models differ by {done.difference:.1g} of the greatest one"
    hint = "equal keys and other settings (eps, activations) may be the reason; without --verify only names decide"
    return NoMatch(message, lines=done.notes, hint=hint)
