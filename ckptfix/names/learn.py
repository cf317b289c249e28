"""Learning a few rules that explain many renamings.

Renamings such as ``layer1.0.conv1.weight -> stages.0.blocks.0.conv.0.weight`` give the rule
``layer{n}.{m}.conv{k}.{*} -> stages.{n-1}.blocks.{m}.conv.{k-1}.{*}``. Names that no rule covers are listed one by one.
So the rules reproduce exactly these renamings when applied to the names that they were learned from.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field
from itertools import combinations

from ckptfix.dataclass import dataclass
from ckptfix.names.rules import REST, NameRule, is_rule, renamed

LETTERS = "nmkijpqrstuvw"
_NUMBER = re.compile(r"(?<!\d)(0|[1-9]\d{0,8})(?!\d)")
_LETTER = re.compile(r"\{([a-z])(?:[+-]\d{1,9})?\}")

Numbers = tuple[int, ...]
Pieces = tuple[str, ...]
Row = tuple[Numbers, Numbers]


class _Names:
    """The renamings to learn and the names that must not change, as a tree of the components of all names.

    Attributes:
        wanted: old -> new; other names of the tree do not change.
    """

    def __init__(self, wanted: Mapping[str, str], names: Iterable[str]) -> None:
        self.wanted = wanted
        self._root = _Node()
        for name in names:
            node = self._root
            for component in name.split("."):
                node = node.below.setdefault(component, _Node())
            node.name = name

    def agrees(self, rule: NameRule) -> bool:
        """Return whether `rule`, which ends in ``{*}``, is right for every name that it applies to."""
        nodes = [self._root]
        for component in rule.old.removesuffix(REST).split(".")[:-1]:
            if is_rule(component):
                one = NameRule(component, "")
                nodes = [node for parent in nodes for text, node in parent.below.items() if one.apply(text) is not None]
            else:
                nodes = [parent.below[component] for parent in nodes if component in parent.below]
        while nodes:
            node = nodes.pop()
            nodes += node.below.values()
            if node.name is not None:
                new = rule.apply(node.name)
                if new is not None and new != self.wanted.get(node.name, node.name):
                    return False
        return True


@dataclass(slots=True, eq=False)
class _Node:
    """The names that begin with some components: the components that follow, and the name that ends here."""

    below: dict[str, _Node] = field(default_factory=dict)
    name: str | None = None


def learn(wanted: Mapping[str, str], names: Sequence[str], loose: Collection[str] = ()) -> tuple[NameRule, ...]:
    """Return rules with which `ckptfix.names.rules.renamed` turns `names` into exactly `wanted`.

    Args:
        wanted: old -> new.
        names: all names that the rules will be applied to; those not in `wanted` do not change.
        loose: names among them that may be renamed along with their module, because nothing looks for them.
    """
    if all(old == new for old, new in wanted.items()):
        return ()
    bound = [name for name in names if name in wanted or name not in loose]
    known = _Names(wanted, bound)
    rules = _merged(_of_keys({old: new for old, new in wanted.items() if not is_rule(old) and not is_rule(new)}), known)
    rules = [rule for rule in rules if rule.old != rule.new]
    rules.sort(key=_generality)
    wrong = _exceptions(rules, known, bound)
    return (*wrong, *rules)


def _generality(rule: NameRule) -> tuple[bool, int, int]:
    """Return a sort key that puts more specific rules first."""
    return rule.old.endswith(REST), rule.old.count("{"), -len(rule.old)


def _exceptions(rules: Sequence[NameRule], known: _Names, names: Iterable[str]) -> list[NameRule]:
    names = list(names)
    made = renamed(names, rules)
    wrong = [name for name in names if made.get(name, name) != known.wanted.get(name, name)]
    return [
        NameRule(name, known.wanted.get(name, name))
        for name in wrong
        if not is_rule(name) and not is_rule(known.wanted.get(name, name))
    ]


def _of_keys(wanted: Mapping[str, str]) -> list[NameRule]:
    """Return one or more rules for each group of names that differ only in numbers on both sides."""
    groups: dict[tuple[Pieces, Pieces], list[Row]] = {}
    for old, new in wanted.items():
        (before, numbers), (after, others) = _parted(old), _parted(new)
        groups.setdefault((before, after), []).append((numbers, others))
    found: list[NameRule] = []
    for (before, after), rows in groups.items():
        found += _of_group(before, after, rows)
    return found


def _parted(name: str) -> tuple[Pieces, Numbers]:
    """Return the text before, between and after the numbers, and these."""
    found = _NUMBER.split(name)
    return tuple(found[::2]), tuple(map(int, found[1::2]))


def _of_group(old: Pieces, new: Pieces, rows: Sequence[Row]) -> list[NameRule]:
    """Return the fewest rules, over all choices of numbers to spell out."""
    count = len(rows[0][0])
    best: list[NameRule] | None = None
    varying = [index for index in range(count) if len({row[0][index] for row in rows}) > 1]
    for size in range(len(varying) + 1 if len(varying) <= 4 else 1):
        for literal in combinations(varying, size):
            parts: dict[Numbers, list[Row]] = {}
            for row in rows:
                parts.setdefault(tuple(row[0][index] for index in literal), []).append(row)
            if best is not None and len(parts) >= len(best):
                continue
            rules = [_explained(old, new, part) for part in parts.values()]
            if None not in rules:
                best = [rule for rule in rules if rule is not None]
        if best is not None:
            return best
    return [rule for row in rows if (rule := _explained(old, new, [row])) is not None]


def _explained(old: Pieces, new: Pieces, rows: Sequence[Row]) -> NameRule | None:
    """Return one rule for all `rows`, or None. Numbers of the new name must be fixed, or shifted from an old one."""
    old_columns = list(zip(*(row[0] for row in rows), strict=True))
    new_columns = list(zip(*(row[1] for row in rows), strict=True))
    varying = [index for index, column in enumerate(old_columns) if len(set(column)) > 1]
    letters = dict(zip(varying, LETTERS, strict=False))
    parts = []
    for place, column in enumerate(new_columns):
        if len(set(column)) == 1:
            parts.append(str(column[0]))
            continue
        ways = []
        for index, letter in letters.items():
            moves = {after - before for before, after in zip(old_columns[index], column, strict=True)}
            if len(moves) == 1:
                move = moves.pop()
                ways.append((abs(move), abs(index - place), f"{{{letter}{move:+d}}}" if move else f"{{{letter}}}"))
        if not ways:
            return None
        parts.append(min(ways)[2])
    fixed = [f"{{{letters[at]}}}" if at in letters else str(column[0]) for at, column in enumerate(old_columns)]
    return NameRule(_filled(old, fixed), _filled(new, parts))


def _filled(pieces: Pieces, parts: Sequence[str]) -> str:
    return "".join(piece + part for piece, part in zip(pieces, [*parts, ""], strict=True))


def _merged(rules: list[NameRule], known: _Names) -> list[NameRule]:
    """Merge rules that differ only in the last components of names, if these are the same in old and new."""
    current = {(rule.old, rule.new): rule for rule in rules}
    refused: set[tuple[str, str]] = set()
    while True:
        wider: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for old, new in current:
            parent = _parent(old, new)
            if parent is not None and parent not in refused:
                wider.setdefault(parent, []).append((old, new))
        changed = False
        for parent, below in wider.items():
            rule = NameRule(*parent)
            if known.agrees(rule):
                changed = True
                for pair in below:
                    del current[pair]
                current[parent] = rule
            else:
                refused.add(parent)
        if not changed:
            return list(current.values())


def _parent(old: str, new: str) -> tuple[str, str] | None:
    """Return both names without a common last component; None if the rest of the new one would lack a number."""
    fronts = []
    lasts = []
    for text in (old, new):
        front, dot, last = text.removesuffix("." + REST).rpartition(".") if text != REST else ("", "", "")
        if text == REST:
            return None
        fronts.append(f"{front}.{REST}" if dot else REST)
        lasts.append(last)
    if lasts[0] != lasts[1] or not _letters(fronts[1]) <= _letters(fronts[0]):
        return None
    return fronts[0], fronts[1]


def _letters(text: str) -> set[str]:
    """Return the letters of the number placeholders in one side of a rule."""
    return set(_LETTER.findall(text))
