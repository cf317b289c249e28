"""The keys that a message of load_state_dict lists, and the prefix that accounts for their difference.

::

    Missing key(s) in state_dict: "0.weight", "0.bias". Unexpected key(s) in state_dict: "model.0.weight", ...   torch
    _IncompatibleKeys(missing_keys=['0.weight'], unexpected_keys=['model.0.weight'])               strict=False
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ckptfix.findings.steps import Step

MOST_TEXT = 4 << 20
"""Characters of a pasted message that are searched for keys."""

_HEADS = re.compile(r"(missing|unexpected)(?: key\(s\)[^:\"'\n]{0,80}:|_keys=\[)", re.IGNORECASE)
_NAME = re.compile(r"[\s,]*(?:\"([^\"\n]*)\"|'([^'\n]*)')")


@dataclass(frozen=True, slots=True)
class Listed:
    """The keys that a message lists: those that only the model has (`missing`), and those that only the file has."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix that accounts for all differences.

    Attributes:
        name: path components that the keys begin with.
        in_file: the file's keys have the prefix; otherwise the model's do.
    """

    name: str
    in_file: bool

    @property
    def meaning(self) -> str:
        """The difference in words."""
        if self.in_file:
            return f"the keys in the file have the prefix `{self.name}.`, and the model's keys do not"
        return f"the model's keys have the prefix `{self.name}.`, and the keys in the file do not"

    @property
    def step(self) -> Step:
        """The command that fixes the difference."""
        return Step("strip-module" if self.in_file else "add-module", (("prefix", self.name),))


def listed(text: str) -> Listed | None:
    """Return the keys that `text` lists as missing and as unexpected; None if it lists no keys."""
    text = text[:MOST_TEXT]
    found: dict[str, list[str]] = {"missing": [], "unexpected": []}
    for head in _HEADS.finditer(text):
        found[head[1].lower()] += _names(text, head.end())
    if not any(found.values()):
        return None
    return Listed(tuple(dict.fromkeys(found["missing"])), tuple(dict.fromkeys(found["unexpected"])))


def _names(text: str, start: int) -> Iterator[str]:
    while (name := _NAME.match(text, start)) is not None:
        yield name[1] if name[1] is not None else name[2]
        start = name.end()


def prefix(names: Listed | None) -> Prefix | None:
    """Return the prefix that turns every missing key into an unexpected one, or the reverse; None if no prefix does."""
    if names is None or not names.missing or not names.unexpected:
        return None
    for less, more, in_file in ((names.missing, names.unexpected, True), (names.unexpected, names.missing, False)):
        there = set(more)
        # A model whose file lacks BatchNorm's counters creates them, and does not list them as missing.
        less = tuple(name for name in less if not name.endswith("num_batches_tracked")) or less
        fronts = (name.removesuffix(f".{less[0]}") for name in more if name.endswith(f".{less[0]}"))
        front = next((front for front in fronts if front and all(f"{front}.{name}" in there for name in less)), None)
        if front is not None:
            return Prefix(front, in_file)
    return None
