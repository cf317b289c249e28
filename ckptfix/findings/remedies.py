"""A chain of commands from the remedies of several findings: each command reads the output of the one before it.

Two commands that read the same file leave two half-fixed files. A chain puts the commands into the order in which they
work together: first those that make a file readable, then the ones that extract its weights, then keys, then devices,
then the format. The names of the files in between record the steps: ``train.plain.pth``, ``train.plain.stripped.pth``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ckptfix.command_table import STEPS, Chained
from ckptfix.findings.row import Finding
from ckptfix.findings.steps import Invocation, Step
from ckptfix.findings.table import OWN_SUFFIXES, Remedy, proposed


def chain(
    path: str, remedies: Sequence[tuple[Finding, Remedy]], kept: str | None = None
) -> tuple[Invocation, ...]:
    """Return the commands that fix all of `remedies`, in the order in which to run them.

    Args:
        path: the file, which the first command reads.
        kept: as in `proposed`.
    """
    converted = any(finding.id in _CONVERTED_FIRST for finding, remedy in remedies)
    steps = list(_ordered(_merged(remedies), converted))
    if not steps:
        return next((remedy.invocations for _, remedy in remedies if remedy.invocations), ())
    made: list[Invocation] = []
    source, flat = path, False
    for one in steps:
        dest = one.dest or proposed(source, _word(one), kept=kept if source == path else None)
        made.append(Invocation(one.without("at") if flat else one, source, dest))
        flat = flat or (_chained(one).flattens and (one.command == "extract" or dest.endswith(".safetensors")))
        source = dest
    return tuple(made)


def _merged(remedies: Iterable[tuple[Finding, Remedy]]) -> dict[str, list[Step]]:
    """Return each command once, with the options of all remedies that use it.

    Of several conversions or choices of weights, the first is kept.
    """
    steps: dict[str, list[Step]] = {}
    for _, remedy in remedies:
        known = False
        for index, line in enumerate(remedy.invocations):
            one, verb = line.step, line.step.command
            if STEPS[verb].chained is None or not line.dest or (known and verb == "convert"):
                continue
            kept = steps.get(verb)
            if kept is None or (verb == "convert" and index and one not in kept):
                steps.setdefault(verb, []).append(one)
            elif verb not in ("extract", "convert", "rename", "match", "lora convert") and one not in kept:
                options = tuple(dict.fromkeys((*kept[0].options, *one.options)))
                kept[:] = [replace(kept[0], options=options)]
            known = known or (verb == "convert" and kept is not None and not index)
    return steps


_CONVERTED_FIRST = frozenset(("wrong-suffix", "plain-pickle", "torch-tar"))
"""Findings whose conversion other commands make too: the suffix is wrong, or the format is read-only."""


def _chained(step: Step) -> Chained:
    """Return the place of a command in a chain, which it must have."""
    chained = STEPS[step.command].chained
    assert chained is not None
    return chained


_AFTER_REPAIR = 15.0
"""The place of a conversion that comes before the other commands: repair alone reads what is broken."""


def _ordered(steps: dict[str, list[Step]], first: bool) -> Iterator[Step]:
    """Yield the steps in their order.

    Args:
        first: a conversion is only for the format; what other commands write has the right one.
    """
    if first and any(verb not in ("convert", "repair") for verb in steps):
        steps.pop("convert", None)
    place = {verb: float(_chained(kept[0]).place) for verb, kept in steps.items()}
    if first and "convert" in steps:
        place["convert"] = _AFTER_REPAIR
    spared = {name for kept in steps.values() for name in _chained(kept[0]).spares}
    converted = steps.get("convert", ())
    if converted and "extract" not in steps and _word(converted[0]) in OWN_SUFFIXES:  # no object is left to sanitize
        spared |= {"sanitize"}
    for verb in sorted(steps, key=place.__getitem__):
        if verb not in spared:
            yield from steps[verb]


def _word(step: Step) -> str:
    """Return the word in the output's name: ``safetensors`` or ``zip`` for a conversion, else the command's own."""
    return replace(step, word="").output_word
