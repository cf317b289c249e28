"""Rules that rename many keys at once, in a form that people can read and edit.

``features.{n}.conv.weight -> backbone.{n}.0.weight`` is a rule. A placeholder in braces stands for a part of a key, and
is put where the new key has it.

======================  ======================================================
``{n}`` (any letter)    an integer
``{n+1}``, ``{n-2}``    on the right: that integer, shifted
``{*}``                 any text of one or more components; often the rest
                        of the key, at the end of both sides
======================  ======================================================

All other text stands for itself, and a rule must match the whole key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field

from ckptfix.dataclass import dataclass
from ckptfix.errors import Refused
from ckptfix.names.regexes import Regex

_PLACEHOLDER = re.compile(r"\{(?:(\*)|([a-z])([+-]\d{1,9})?)\}")
REST = "{*}"


def is_rule(text: str) -> bool:
    """Return whether `text` has a placeholder, so that it stands for more than one name."""
    return _PLACEHOLDER.search(text) is not None


@dataclass(frozen=True, slots=True)
class NameRule:
    """One rule: `old` and `new` as a person writes them.

    Raises:
        Refused: a placeholder is only on the right, or on the left twice or with a shift.
    """

    old: str
    new: str
    _text: str | None = field(init=False, repr=False, compare=False)
    _regex: Regex | None = field(init=False, repr=False, compare=False)
    _parts: tuple[tuple[str, str, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known: set[str] = set()
        pattern = []
        end = 0
        for match in _PLACEHOLDER.finditer(self.old):
            name = match[1] or match[2]
            if name in known or match[3]:
                raise Refused(f"on the left, each placeholder must appear once, unshifted, as {{n}}: {self.old!r}")
            known.add(name)
            pattern += [re.escape(self.old[end : match.start()]), _group(name)]
            end = match.end()
        pattern.append(re.escape(self.old[end:]))
        parts: list[tuple[str, str, int]] = []
        end = 0
        for match in _PLACEHOLDER.finditer(self.new):
            name = match[1] or match[2]
            if name not in known:
                raise Refused(f"{match[0]} of {self.new!r} is not in {self.old!r}")
            parts.append((self.new[end : match.start()], "rest" if name == "*" else name, int(match[3] or 0)))
            end = match.end()
        parts.append((self.new[end:], "", 0))
        literal = known <= {"*"} and REST not in self.old.removesuffix(REST)
        object.__setattr__(self, "_text", None if literal else rf"(?s)\A{''.join(pattern)}")
        object.__setattr__(self, "_regex", None)
        object.__setattr__(self, "_parts", tuple(parts))

    @property
    def _pattern(self) -> Regex | None:
        # Compiled on first use: of the rules of all tables, a key needs few.
        if self._regex is None and self._text is not None:
            object.__setattr__(self, "_regex", Regex(self._text))
        return self._regex

    def apply(self, name: str) -> str | None:
        """Return the new name that the rule gives to `name`; None if it does not apply."""
        pattern = self._pattern
        if pattern is None:
            return self._apply_literal(name)
        match = pattern.fullmatch(name)
        if match is None:
            return None
        made = []
        for text, group, move in self._parts:
            made.append(text)
            if not group:
                continue
            value = match[group]
            if move:
                if int(value) + move < 0:
                    return None
                value = str(int(value) + move)
            made.append(value)
        return "".join(made)

    def values(self, name: str) -> dict[str, str] | None:
        """Return the values of the placeholders of `old` in `name`; None if the rule does not apply."""
        pattern = self._pattern
        if pattern is not None:
            return pattern.fullmatch(name)
        front = self.old.removesuffix(REST)
        if front == self.old:
            return {} if name == front else None
        return {"rest": name[len(front) :]} if len(name) > len(front) and name.startswith(front) else None

    def _apply_literal(self, name: str) -> str | None:
        """Do the work of `apply` for a rule without numbers. It is kept fast, as there may be one such rule per key."""
        front = self.old.removesuffix(REST)
        if front == self.old:
            return self.new if name == front else None
        if len(name) == len(front) or not name.startswith(front):
            return None
        return "".join(text + (name[len(front) :] if group else "") for text, group, _ in self._parts)

    def __str__(self) -> str:
        return f"{self.old} -> {self.new}"


def _group(name: str) -> str:
    return "(?P<rest>.+)" if name == "*" else rf"(?P<{name}>\d{{1,18}})"


def placeholders(text: str) -> dict[str, list[int]]:
    """Return the placeholders of `text` (``*`` for ``{*}``), with the shift of each occurrence."""
    found: dict[str, list[int]] = {}
    for match in _PLACEHOLDER.finditer(text):
        found.setdefault(match[1] or match[2], []).append(int(match[3] or 0))
    return found


def moved(text: str, moves: Mapping[str, int]) -> str:
    """Return `text` with the given shifts added to the placeholders named in `moves`."""

    def one(match: re.Match[str]) -> str:
        if match[1]:
            return match[0]
        move = int(match[3] or 0) + moves.get(match[2], 0)
        return f"{{{match[2]}{move:+d}}}" if move else f"{{{match[2]}}}"

    return _PLACEHOLDER.sub(one, text)


def filled(text: str, values: Mapping[str, str]) -> str | None:
    """Return `text` with its placeholders filled in; None if a number would be negative."""
    negative = False

    def one(match: re.Match[str]) -> str:
        nonlocal negative
        value, move = values["rest" if match[1] else match[2]], int(match[3] or 0)
        negative |= bool(move) and int(value) + move < 0
        return str(int(value) + move) if move else value

    made = _PLACEHOLDER.sub(one, text)
    return None if negative else made


def renamed(names: Iterable[str], rules: Iterable[NameRule]) -> dict[str, str]:
    """Return old -> new for the names to which a rule applies; the first rule that does wins."""
    table = RuleTable(tuple(rules))
    found: dict[str, str] = {}
    for name in names:
        for rule in table.about(name):
            new = rule.apply(name)
            if new is not None:
                found[name] = new
                break
    return found


@dataclass(slots=True, eq=False)
class _Node:
    """The rules that begin with some components.

    Attributes:
        literal: next component as plain text -> the rules that continue with it.
        open: next component with a placeholder -> that component as a rule, and the rules that continue with it.
        whole, rest: indices of the rules that end here, and of those that leave the rest open.
    """

    literal: dict[str, _Node] = field(default_factory=dict)
    open: dict[str, tuple[NameRule, _Node]] = field(default_factory=dict)
    whole: list[int] = field(default_factory=list)
    rest: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Place:
    """Rules that may still apply to a name after some of its components.

    Attributes:
        nodes: the rules that may go on.
        open: indices of the rules that left the rest open before.
        rules: the rules that may apply to a name that ends here, in order.
        following: next component -> the place after it, as far as it was asked for.
    """

    nodes: tuple[_Node, ...]
    open: tuple[int, ...]
    rules: tuple[NameRule, ...]
    following: dict[str, _Place] = field(default_factory=dict)


KEPT = 1 << 14
"""Components in all places of a table whose following place is kept. Names of one model have few different ones."""


class RuleTable:
    """A tree of rules by components, which avoids trying every rule on every name."""

    def __init__(self, rules: Sequence[NameRule]) -> None:
        self._rules = rules
        root = _Node()
        for index, rule in enumerate(rules):
            node = root
            for component in rule.old.split("."):
                if REST in component:
                    node.rest.append(index)
                    break
                if is_rule(component):
                    node = node.open.setdefault(component, (NameRule(component, ""), _Node()))[1]
                else:
                    node = node.literal.setdefault(component, _Node())
            else:
                node.whole.append(index)
        self._places: dict[tuple[tuple[int, ...], tuple[int, ...]], _Place] = {}
        self._kept = 0
        self._start = self._place((root,), ())

    def about(self, name: str) -> Sequence[NameRule]:
        """Return the rules that may apply to `name`, in order."""
        place = self._start
        for component in name.split("."):
            if not place.nodes:
                break
            place = place.following.get(component) or self._after(place, component)
        return place.rules

    def _after(self, place: _Place, component: str) -> _Place:
        following: list[_Node] = []
        open_ = [*place.open]
        for node in place.nodes:
            open_ += node.rest
            if component in node.literal:
                following.append(node.literal[component])
            following += [below for one, below in node.open.values() if one.apply(component) is not None]
        found = self._place(tuple(following), tuple(open_))
        if self._kept < KEPT:
            self._kept += 1
            place.following[component] = found
        return found

    def _place(self, nodes: tuple[_Node, ...], open_: tuple[int, ...]) -> _Place:
        """Return the place of these rules: one for all components that lead to them."""
        key = tuple(map(id, nodes)), open_
        if key in self._places:
            return self._places[key]
        indices = sorted([*open_, *(index for node in nodes for index in node.whole)])
        found = _Place(nodes, open_, tuple(self._rules[index] for index in indices))
        if self._kept < KEPT:
            self._places[key] = found
        return found
