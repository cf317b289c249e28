"""Report of what a loader did: plain data, and the same as a few lines of text."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, field
from typing import Any

from ckptfix.align.result import Skipped
from ckptfix.dataclass import dataclass
from ckptfix.errors import printable
from ckptfix.names.groups import collapse, shown
from ckptfix.shown import html
from ckptfix.words import plural, some

MOST_LOOKS = 4000
"""Pairs of keys that are compared to find the nearest ones; one comparison takes about 20 us."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A key that both sides have, but whose tensor could not be loaded.

    Attributes:
        name: key in the model.
        source: key in the file.
        expected, found: shapes in the model and in the file; None if the shapes are not the reason.
        why: the reason, in words.
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
    """Report of what `load_into` found and did.

    Attributes:
        path, format: of the file.
        at: address of the state dict that was used; ``""`` is the top level.
        rule: how keys were matched: ``"exact"``, ``"wrapper module."``, ``"base prefix model."``, ``"position"``, ...
        done: whether the model was changed; False in the report of a `LoadMismatch`.
        assigned: whether the model got the file's tensors themselves rather than copies.
        loaded: keys of the model that the file has values for, in the model's order.
        missing: keys of the model that the file has no value for.
        unexpected: keys of the file that the model does not have.
        mismatched: keys that both sides have, but whose tensors do not fit.
        skipped: keys that one side lacks and a rule allows to be absent (``num_batches_tracked``), with the rule.
        renamed: key in the file -> key in the model, where they differ.
        tied: key of the model -> key of the same parameter under which it was loaded.
        casts: key of the model -> (dtype in the file, dtype in the model), where they differ.
        overflow: key of the model -> number of elements that the cast took out of its dtype's range, if there were any.
        nearest: missing key -> the unexpected key most similar to it.
        model_names, file_names: all keys of the model and of the file.
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
        """True if nothing is missing, unexpected or mismatched."""
        return not (self.missing or self.unexpected or self.mismatched)

    @property
    def lines(self) -> tuple[str, ...]:
        """The report as text: one line if all went well, else one more for each kind of trouble."""
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
        """Return the line that lists the keys whose values are out of range for the model's dtype."""
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
            yield f"{len(self.tied)} tied to another key"
        rules: dict[str, int] = {}
        for skip in self.skipped:
            rules[skip.rule] = rules.get(skip.rule, 0) + 1
        yield from (f"{count} skipped as {rule}" for rule, count in rules.items())

    def trouble(self) -> Iterator[str]:
        """Yield a line for each kind of trouble, with the keys grouped."""
        if self.missing:
            yield f"missing {len(self.missing)}: {shown(collapse(self.missing, self.model_names))}"
        for name, near in list(self.nearest.items())[:3]:
            yield f"missing {name}: nearest in the file is {near}"
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
        """Return the report for JSON, with the counts of keys in place of `model_names` and `file_names`."""
        found = {**asdict(self), "complete": self.complete, "lines": list(self.lines)}
        found["counts"] = {"model": len(found.pop("model_names")), "file": len(found.pop("file_names"))}
        return found


def nearest_names(
    missing: Sequence[str], unexpected: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Return missing key -> the unexpected key that it most likely corresponds to, where one is similar enough.

    Args:
        shapes: shapes of the keys of both sides.
    """
    by_leaf: dict[str, list[str]] = {}
    for name in unexpected:
        by_leaf.setdefault(_leaf(name), []).append(name)
    found: dict[str, str] = {}
    looks = MOST_LOOKS
    for name in missing:
        # If the last component occurs nowhere in the file, a misspelled key may still be similar.
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
    """Return how the keys were matched, as text; ``wrapper module.`` is a prefix that one side has."""
    if rule == "exact" or rule in ("position", "structure"):
        return "keys match exactly" if rule == "exact" else f"matched by {rule}"
    return f"keys match without {rule}"


def named(names: Iterable[str], most: int = 5) -> str:
    """Join names into one line that shows at most `most` of them."""
    return some(list(names), most)
