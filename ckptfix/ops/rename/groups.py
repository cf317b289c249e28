"""Assignment of the keys of a state dict to the lines of a rules file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field

from ckptfix.dataclass import dataclass
from ckptfix.errors import Refused
from ckptfix.names.rulefile import Rules, RuleSide, TensorRule, several
from ckptfix.names.rules import NameRule, RuleTable, filled, is_rule

Slot = tuple[int, int]
"""Position of a tensor on one side of a line: its running number, counted from 0, and its index in the list."""


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors that go through the operations of a line together.

    Attributes:
        values: the values of the placeholders that both sides have.
        names: the keys, by their slots, sorted.
    """

    rule: TensorRule
    values: Mapping[str, str]
    names: Mapping[Slot, str]

    def old(self) -> tuple[str, ...]:
        """Return its keys, in order."""
        return tuple(self.names.values())

    def new(self, slot: Slot) -> str:
        """Return the name of the tensor that it makes for a slot.

        Raises:
            Refused: a number would be negative.
        """
        side = self.rule.new
        assert side is not None
        number, part = slot
        values = dict(self.values)
        if side.running is not None:
            values[side.running] = str(number + side.start)
        name = filled(side.names[part], values)
        if name is None:
            raise Refused(f"a number of {side.text!r} would be negative for {self.old()[0]}")
        return name


@dataclass(slots=True)
class Grouped:
    """The keys of a state dict by the lines that match them.

    Attributes:
        names: old -> new for keys whose tensor does not change.
        groups: first key -> the group that it begins.
        members: key -> the group that it belongs to.
        added: key -> further names of it.
        used: lines that match a key: the text of a name rule, or the number of a line.
    """

    names: dict[str, str] = field(default_factory=dict)
    groups: dict[str, TensorGroup] = field(default_factory=dict)
    members: dict[str, TensorGroup] = field(default_factory=dict)
    added: dict[str, list[TensorGroup]] = field(default_factory=dict)
    used: set[str | int] = field(default_factory=set)


def grouped(keys: Sequence[str], rules: Rules, current: Mapping[str, str]) -> Grouped:
    """Group the keys by lines: an exact name precedes all patterns, and otherwise the first matching line wins.

    Args:
        current: key -> the name that the lines see.

    Raises:
        Refused: a line has some of its tensors and lacks others; the error names the line.
    """
    table = _Lines(rules)
    made = Grouped()
    found: dict[tuple[int, tuple[tuple[str, str], ...]], dict[Slot, str]] = {}
    for key in keys:
        for line in table.about(current[key]):
            if isinstance(line, NameRule):
                new = line.apply(current[key])
                if new is None:
                    continue
                made.names[key] = new
                made.used.add(line.old)
                break
            rule, part, values = line
            made.used.add(rule.line)
            if rule.operations[0].name == "refuse":
                hint = "leave the layer out, or convert without the table and change the tensor in torch"
                raise Refused(rule.operations[0].reason, where=key, hint=hint)
            if rule.adds:
                made.added.setdefault(key, []).append(TensorGroup(rule, values, {(0, 0): key}))
                continue
            running = rule.old.running
            number = 0 if running is None else int(values[running]) - rule.old.start
            shared = tuple(sorted((name, value) for name, value in values.items() if name != running))
            slots = found.setdefault((rule.line, shared), {})
            if (number, part) in slots:
                both = f"{slots[number, part]} and {key}"
                raise _refused(rules, rule, f"{both} match the same part of the line")
            slots[number, part] = key
            break
    order = {key: index for index, key in enumerate(keys)}
    by_line = {rule.line: rule for rule in rules.tensors}
    for (number, shared), slots in found.items():
        group = TensorGroup(by_line[number], dict(shared), dict(sorted(slots.items())))
        _refuse_gaps(rules, group)
        made.groups[min(slots.values(), key=order.__getitem__)] = group
        made.members |= dict.fromkeys(slots.values(), group)
    return made


def _refuse_gaps(rules: Rules, group: TensorGroup) -> None:
    side = group.rule.old
    numbers = sorted({number for number, _ in group.names})
    missing = [
        _name(side, group.values, (number, part))
        for number in range(numbers[-1] + 1)
        for part in range(len(side.names))
        if (number, part) not in group.names
    ]
    if numbers[0] < 0:
        missing = [f"{{{side.running}}} begins with {side.start}"]
    if missing:
        raise _refused(rules, group.rule, f"it has {several(group.old())}, but not {several(missing)}")


def _name(side: RuleSide, values: Mapping[str, str], slot: Slot) -> str:
    number, part = slot
    own = {} if side.running is None else {side.running: str(number + side.start)}
    return filled(side.names[part], {**values, **own}) or side.names[part]


def _refused(rules: Rules, rule: TensorRule, message: str) -> Refused:
    return Refused(f"{message}: {rule}", path=rules.path, where=f"line {rule.line}")


class _Lines:
    """The lines that may match a name, in order."""

    def __init__(self, rules: Rules) -> None:
        rows: list[tuple[bool, int, NameRule, tuple[TensorRule, int] | None]] = []
        for old, new in rules.names.items():
            rows.append((is_rule(old), rules.lines.get(old, 0), NameRule(old, new), None))
        for rule in rules.tensors:
            for part, pattern in enumerate(rule.old.names):
                rows.append((is_rule(pattern), rule.line, NameRule(pattern, ""), (rule, part)))
        # A line that adds a second name does not use up the tensor, so it comes before the line that does.
        rows.sort(key=lambda row: (not (row[3] is not None and row[3][0].adds), row[0], row[1]))
        self._rows = rows
        self._table = RuleTable([row[2] for row in rows])
        self._kinds = {id(row[2]): row[3] for row in rows}

    def about(self, name: str) -> Iterator[NameRule | tuple[TensorRule, int, dict[str, str]]]:
        for pattern in self._table.about(name):
            kind = self._kinds[id(pattern)]
            if kind is None:
                yield pattern
                continue
            values = pattern.values(name)
            if values is not None:
                yield (*kind, values)
