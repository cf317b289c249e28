"""What a loader did: plain data, and the same in a few lines."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ckptfix.align.result import Skipped
from ckptfix.errors import printable
from ckptfix.names.groups import collapse, shown
from ckptfix.shown import html
from ckptfix.words import plural, some

MOST_LOOKS = 4000
"""Pairs of names that are compared to find the nearest ones: a comparison takes some 20 us."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A name that both sides have, and that could not be loaded.

    Attributes:
        name: in the model.
        source: in the file.
        expected, found: shapes in the model and in the file; None where shapes are not the matter.
        why: what is wrong, in words.
    """

    name: str
    source: str
    expected: tuple[int, ...] | None
    found: tuple[int, ...] | None
    why: str

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


@dataclass(frozen=True, slots=True, repr=False)
class LoadReport:
    """What `load_into` found and did.

    Attributes:
        path, format: of the file.
        at: address of the state dict that was taken; ``""`` is the top.
        rule: how names were matched: ``"exact"``, ``"wrapper module."``, ``"base prefix model."``, ``"position"``, ...
        done: whether the model was changed; False in the report of a `LoadMismatch`.
        assigned: tensors were handed over rather than copied.
        loaded: names of the model that the file has values for, in the model's order.
        missing: names of the model for which there is nothing.
        unexpected: names of the file for which the model has no place.
        mismatched: names on both sides that do not go together.
        skipped: names that one side lacks and a rule lets pass (``num_batches_tracked``), with the rule.
        renamed: name in the file -> name in the model, where they differ.
        tied: name of the model -> the name of the same parameter under which the file has it.
        casts: name of the model -> (dtype in the file, dtype in the model), where they differ.
        overflow: name of the model -> how many of its numbers left the range of its dtype in the cast, where any did.
        nearest: missing name -> the unexpected name that is most like it.
        model_names, file_names: how many names either side has.
    """

    path: str
    format: str
    at: str
    rule: str
    done: bool
    assigned: bool
    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[Mismatch, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    casts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    overflow: Mapping[str, int] = field(default_factory=dict)
    nearest: Mapping[str, str] = field(default_factory=dict)
    model_names: tuple[str, ...] = field(default=(), repr=False)
    file_names: tuple[str, ...] = field(default=(), repr=False)

    @property
    def complete(self) -> bool:
        """Nothing is missing, unexpected or mismatched."""
        return not (self.missing or self.unexpected or self.mismatched)

    @property
    def lines(self) -> tuple[str, ...]:
        """The report as text: one line if all went well, else one for each kind of trouble."""
        return tuple(map(printable, self._lines()))

    def _lines(self) -> Iterator[str]:
        total = len(self.model_names)
        place = f" ({self.at})" if self.at else ""
        head = f"{'loaded' if self.done else 'nothing was loaded;'} {len(self.loaded)} of {total} tensors"
        if not self.done:
            head += " fit"
        yield f"{head} from {self.path}{place}: {', '.join([_in_words(self.rule), *self._notes()])}"
        yield from self.trouble()
        if self.overflow:
            yield self.overflow_line()

    def overflow_line(self) -> str:
        """What left the range of the model's dtypes, by name."""
        rows = [f"{name} ({count:,} in {self.casts[name][1]})" if name in self.casts else f"{name} ({count:,})"
                for name, count in self.overflow.items()]  # fmt: skip
        count = sum(self.overflow.values())
        verb = "is" if count == 1 else "are"
        return f"{plural(count, 'element')} {verb} beyond the range of the model's dtype: {named(rows)}"

    def _notes(self) -> Iterator[str]:
        if self.assigned and self.done:
            yield "assigned"
        if self.casts:
            kinds = dict.fromkeys(self.casts.values())
            verb = "took the file's dtype for" if self.assigned else "cast"
            yield f"{verb} {len(self.casts)} ({', '.join(f'{old} -> {new}' for old, new in kinds)})"
        if self.tied:
            yield f"{len(self.tied)} tied to another name"
        rules: dict[str, int] = {}
        for skip in self.skipped:
            rules[skip.rule] = rules.get(skip.rule, 0) + 1
        yield from (f"{count} skipped as {rule}" for rule, count in rules.items())

    def trouble(self) -> Iterator[str]:
        """A line for each kind of trouble, names grouped."""
        if self.missing:
            yield f"missing {len(self.missing)}: {shown(collapse(self.missing, self.model_names))}"
        for name, near in list(self.nearest.items())[:3]:
            yield f"missing {name}: nearest in file is {near}"
        if self.unexpected:
            yield f"unexpected {len(self.unexpected)}: {shown(collapse(self.unexpected, self.file_names))}"
        if self.mismatched:
            more = f"; and {len(self.mismatched) - 5} more" if len(self.mismatched) > 5 else ""
            yield f"mismatched {len(self.mismatched)}: {'; '.join(map(str, self.mismatched[:5]))}{more}"

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def __repr__(self) -> str:
        count = f"{len(self.loaded)} of {len(self.model_names)} tensors"
        return f"<LoadReport of {self.path!r}: {count if self.done else 'nothing was loaded'}>"

    def _repr_html_(self) -> str:
        tables = (
            ("missing", ("name", "nearest in the file"), [(name, self.nearest.get(name)) for name in self.missing]),
            ("unexpected", ("name",), [(name,) for name in self.unexpected]),
            ("mismatched", ("name", "what"), [(row.name, row.why) for row in self.mismatched]),
        )
        return html(self.lines[:1], tables)

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON, without the names of either side that are in nothing else."""
        found = {**asdict(self), "complete": self.complete, "lines": list(self.lines)}
        found["counts"] = {"model": len(found.pop("model_names")), "file": len(found.pop("file_names"))}
        return found


def nearest_names(
    missing: Sequence[str], unexpected: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """missing name -> the unexpected one that most likely means it, for those that have one.

    Args:
        shapes: of the names of both sides.
    """
    by_leaf: dict[str, list[str]] = {}
    for name in unexpected:
        by_leaf.setdefault(_leaf(name), []).append(name)
    found: dict[str, str] = {}
    looks = MOST_LOOKS
    for name in missing:
        # Where the last component occurs nowhere, a misspelling may still be near.
        candidates = (by_leaf.get(_leaf(name)) or list(unexpected))[: max(looks, 0)]
        looks -= len(candidates)
        scored = [(shapes.get(other) == shapes.get(name), _alike(name, other), other) for other in candidates]
        same_shape, alike, other = max(scored, default=(False, 0.0, ""))
        if alike > 0.6 or (same_shape and _leaf(other) == _leaf(name)):
            found[name] = other
    return found


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _alike(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _in_words(rule: str) -> str:
    """How the names were matched: ``wrapper module.`` is a prefix that one side has."""
    if rule == "exact" or rule in ("position", "structure"):
        return "names match exactly" if rule == "exact" else f"matched by {rule}"
    return f"names match without {rule}"


def named(names: Iterable[str], most: int = 5) -> str:
    """Names in a line, at most so many of them."""
    return some(list(names), most)
