"""A chain of commands from the remedies of several findings: each command reads the output of the one before it.

Two commands that read the same file leave two half-fixed files. A chain puts the commands into the order in which they
work together: first those that make a file readable, then the ones that extract its weights, then keys, then devices,
then the format. The names of the files in between record the steps: ``train.plain.pth``, ``train.plain.stripped.pth``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckptfix.findings.row import Finding
from ckptfix.findings.table import OWN_SUFFIXES, Remedy, operand, proposed

Words = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verb:
    """A command in a chain.

    Attributes:
        word: the word that it adds to the name of its output.
        spares: commands that have nothing left to do after it.
        flattens: the output is the state dict itself, so that addresses of the input no longer apply.
    """

    word: str
    spares: frozenset[str] = frozenset()
    flattens: bool = False


VERBS: dict[str, Verb] = {
    "repair": Verb("repaired"),
    "extract": Verb("weights", frozenset({"sanitize", "slim"}), flattens=True),
    "sanitize": Verb("plain"),
    "slim": Verb("slim"),
    "unwrap": Verb("unwrapped", frozenset({"strip-module"})),
    "strip-module": Verb("stripped"),
    "add-module": Verb("wrapped"),
    "rename": Verb("renamed"),
    "match": Verb("matched"),
    "to-cpu": Verb("cpu"),
    "convert": Verb("converted", flattens=True),
}
"""The commands, in the order of a chain."""

_PLACE = {name: place for place, name in enumerate(VERBS)}

Step = tuple[str, str, Words]
"""A command, the word in the name of its output, and its options."""


def chain(path: str, remedies: Sequence[tuple[Finding, Remedy]]) -> tuple[Words, ...]:
    """Return the commands that fix all of `remedies`, in the order in which to run them.

    Args:
        path: the file, which the first command reads.
    """
    converted = any(finding.id in _CONVERTED_FIRST or _converts_first(remedy) for finding, remedy in remedies)
    steps = list(_ordered(_merged(remedies), converted))
    if not steps:
        return next((remedy.commands for _, remedy in remedies if remedy.commands), ())
    made: list[Words] = []
    source, flat = path, False
    for verb, word, options in steps:
        dest = proposed(source, word)
        made.append(("ckptfix", verb, operand(source), operand(dest), *(_without_at(options) if flat else options)))
        flat = flat or (VERBS[verb].flattens and (verb == "extract" or dest.endswith(".safetensors")))
        source = dest
    return tuple(made)


def _merged(remedies: Iterable[tuple[Finding, Remedy]]) -> dict[str, list[Step]]:
    """Return each command once, with the options of all remedies that use it.

    Of several conversions or choices of weights, the first is kept.
    """
    steps: dict[str, list[Step]] = {}
    for _, remedy in remedies:
        known = False
        for index, line in enumerate(remedy.commands):
            verb = line[1]
            if verb not in VERBS or len(line) < 4 or (known and verb == "convert"):
                continue
            step = (verb, _word(line), line[4:])
            kept = steps.get(verb)
            if kept is None or (verb == "convert" and index):
                steps.setdefault(verb, []).append(step)
            elif verb not in ("extract", "convert", "rename", "match") and step not in kept:
                kept[:] = [(verb, step[1], _joined(kept[0][2], line[4:]))]
            known = known or (verb == "convert" and kept is not None and not index)
    return steps


_CONVERTED_FIRST = frozenset(("wrong-suffix", "plain-pickle", "torch-tar"))
"""Findings of files that other commands refuse: the suffix is wrong, or the format is read-only."""


EDIT = frozenset(VERBS) - {"repair", "extract", "sanitize", "convert"}
"""Commands that write the format that they read, and therefore refuse a read-only format."""


def with_conversion(remedy: Remedy, path: str, *, folder: bool) -> Remedy:
    """Return `remedy` for a file in a read-only format: a conversion comes before the commands that edit.

    Args:
        folder: the format is a folder, from which a conversion keeps only the state dict.
    """
    if not any(line[1] in EDIT for line in remedy.commands) or remedy.commands[0][1] == "convert":
        return remedy
    middle = proposed(path, "zip")
    made: list[Words] = [("ckptfix", "convert", operand(path), operand(middle), "--to", "zip")]
    for line in remedy.commands:
        source = operand(middle) if line[2] == operand(path) else line[2]
        word = VERBS[line[1]].word
        dest = operand(proposed(middle, word)) if line[3] == operand(proposed(path, word)) else line[3]
        made.append((*line[:2], source, dest, *(_without_at(line[4:]) if folder else line[4:])))
    return Remedy(tuple(made))


def _converts_first(remedy: Remedy) -> bool:
    verbs = [line[1] for line in remedy.commands]
    return verbs[:1] == ["convert"] and not EDIT.isdisjoint(verbs)


def _ordered(steps: dict[str, list[Step]], first: bool) -> Iterator[Step]:
    """Yield the steps in their order; with `first`, a conversion comes before the other commands."""
    if first and "extract" in steps:
        steps.pop("convert", None)
    place = {**_PLACE, "convert": _PLACE["repair"] + 0.5} if first else _PLACE
    spared = {name for verb in steps for name in VERBS[verb].spares}
    converted = steps.get("convert", ())
    if converted and "extract" not in steps and converted[0][1] in OWN_SUFFIXES:  # no object is left to sanitize
        spared |= {"sanitize"}
    for verb in sorted(steps, key=place.__getitem__):
        if verb not in spared:
            yield from steps[verb]


def _word(line: Words) -> str:
    """Return the word in the output's name: ``safetensors`` or ``zip`` for a conversion, else the command's own."""
    if line[1] != "convert":
        return VERBS[line[1]].word
    if "--to" in line:
        return line[line.index("--to") + 1]
    return "safetensors"


def _joined(options: Words, more: Words) -> Words:
    """Return the options of both lines without repetition; an option that takes a value keeps it."""
    groups = dict.fromkeys((*_groups(options), *_groups(more)))
    return tuple(word for group in groups for word in group)


def _groups(options: Words) -> Iterator[Words]:
    start = 0
    for place in range(1, len(options) + 1):
        if place == len(options) or options[place].startswith("--"):
            yield options[start:place]
            start = place


def _without_at(options: Words) -> Words:
    return tuple(word for group in _groups(options) if group and group[0] != "--at" for word in group)
