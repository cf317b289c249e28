"""Rules files: lines that rename tensors, and may also change them. They can be applied in reverse.

::

    # Meta's LLaMA -> transformers
    tok_embeddings.weight               -> model.embed_tokens.weight
    layers.{n}.attention.wq.weight      -> model.layers.{n}.self_attn.q_proj.weight  | rope heads=32 to=half
    layers.{n}.feed_forward.{w1,w3}.{*} -> model.layers.{n}.mlp.gate_up_proj.{*}     | concat
    layers.{n}.experts.{e}.w2.weight    -> model.layers.{n}.mlp.experts.down_proj    | stack | transpose dims=1,2
    rope.freqs                          | drop

The left of the arrow is the key in the input, the right the key in the output. ``{q,k,v}`` stands for several keys, in
this order. A number that only one side has, such as ``{e}`` above, runs through all numbers present, from 0 on.
Operations (`operations`) follow, each after a bar, and are applied in turn. A line without one is a `NameRule`.
In the options, ``@heads`` is a size of the model; the code that reads the file supplies it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace

from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, Refused, printable
from ckptfix.names.operations import Operation, parse
from ckptfix.names.rules import NameRule, RuleTable, is_rule, moved, placeholders

BAR, ARROW = "|", "->"
_SIZE = re.compile(r"@([a-z][a-z_]*)")
Sizes = Mapping[str, int]
"""Sizes of a model by their names in a rules file."""
_LIST = re.compile(r"\{([^{},]*(?:,[^{},]*)+)\}")
MAX_PARTS = 1024
"""Names that one list may stand for."""


@dataclass(frozen=True, slots=True)
class RuleSide:
    """One side of a line, which stands for one name or several.

    Attributes:
        text: the side as written.
        names: the names of its list, in order; a single name if it has no list.
        running: the placeholder that the other side lacks; None if there is no such placeholder.
        start: the first number of `running`.
    """

    text: str
    names: tuple[str, ...]
    running: str | None = None
    start: int = 0

    @property
    def axes(self) -> int:
        """Number of ways in which it stands for several names: by a number, by a list."""
        return (self.running is not None) + (len(self.names) > 1)


@dataclass(frozen=True, slots=True)
class TensorRule:
    """A line with operations.

    Attributes:
        new: the right side; None if the tensor is left out.
        line: line number in the file, from 1 on.
    """

    old: RuleSide
    new: RuleSide | None
    operations: tuple[Operation, ...]
    line: int = 0

    @property
    def adds(self) -> bool:
        """True if it adds a name, and leaves the tensor to other lines."""
        return self.operations[0].name == "tie"

    def __str__(self) -> str:
        arrow = [] if self.new is None else [ARROW, self.new.text]
        return " ".join([self.old.text, *arrow, *(f"{BAR} {one}" for one in self.operations)])


@dataclass(frozen=True, slots=True)
class Rules:
    """The content of a rules file.

    Attributes:
        path: the file.
        names: old -> new, for lines without operations; exact names or the sides of a `NameRule`.
        lines: old -> line number of such a line; 0 if unknown (JSON).
        tensors: the lines with operations.
        table: they are a table for a family of models: no model has a key for each line, and lines that leave
            something out do so in both directions.
    """

    path: str
    names: Mapping[str, str] = field(default_factory=dict)
    tensors: tuple[TensorRule, ...] = ()
    lines: Mapping[str, int] = field(default_factory=dict)
    table: bool = False

    def reversed(self) -> Rules:
        """Return the rules that undo these.

        Raises:
            CkptfixError: a line has no inverse; the message names it.
        """
        names: dict[str, str] = {}
        lines: dict[str, int] = {}
        for old, new in self.names.items():
            number = self.lines.get(old, 0)
            with _Line(self.path, number, f"{old} {ARROW} {new}"):
                after, before = turned(new, old)
                NameRule(after, before)
                if names.setdefault(after, before) != before:
                    raise Refused(f"it cannot be reversed: {names[after]!r} becomes {new!r} too")
                lines[after] = number
        tensors = []
        for rule in self.tensors:
            with _Line(self.path, rule.line, str(rule)):
                tensors.append(rule if self.table and rule.new is None else _turned_rule(rule))
        return Rules(self.path, names, tuple(tensors), lines, self.table)

    def unmatched(self, keys: Iterable[str]) -> tuple[list[str], int]:
        """Return the keys that no line matches, and the number of lines that match no key and leave nothing out."""
        patterns = [NameRule(old, "") for old in self.names]
        patterns += [NameRule(name, "") for rule in self.tensors for name in rule.old.names]
        drops = {rule.old.text for rule in self.tensors if rule.new is None}
        table, used, left = RuleTable(patterns), set[str](), []
        for key in keys:
            fits = [rule.old for rule in table.about(key) if rule.values(key) is not None]
            used.update(fits)
            if not fits:
                left.append(key)
        return left, len({rule.old for rule in patterns} - used - drops)


class _Line:
    """A context in which errors get the path and the number of a line."""

    def __init__(self, path: str, line: int, text: str) -> None:
        self._path, self._where = path, f"line {line}" if line else printable(text)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Refused):
            raise CkptfixError(error.message, path=self._path, where=self._where, hint=error.hint) from None


def turned(new: str, old: str) -> tuple[str, str]:
    """Return `new` as the left side of a rule and `old` as its right, with number shifts reversed."""
    moves: dict[str, int] = {}
    for name, uses in placeholders(new).items():
        if len(uses) > 1:
            raise Refused(f"it cannot be reversed: {{{name}}} appears {len(uses)} times in {new!r}")
        moves[name] = -uses[0]
    return moved(new, moves), moved(old, moves)


def _turned_rule(rule: TensorRule) -> TensorRule:
    inverse = tuple(one.inverse() for one in reversed(rule.operations))
    assert rule.new is not None
    running = rule.new.running
    new, old = rule.new.text, rule.old.text
    shared = {name: uses for name, uses in placeholders(new).items() if name != running}
    moves = {name: -uses[0] for name, uses in shared.items() if uses[0]}
    new, old = moved(new, moves), moved(old, moves)
    if inverse[0].kind == "name":
        return TensorRule(side(new, old), side(old, new), inverse, rule.line)
    return made(new, old, inverse, rule.line)


def sizes_in(text: str) -> frozenset[str]:
    """Return the sizes of the model that the lines of a rules file need."""
    lines = (_before_comment(line.split()) for line in text.split("\n"))
    return frozenset(name for words in lines if BAR in words for word in words for name in _SIZE.findall(word))


class _AnySize(Mapping[str, int]):
    """A size of 1 for every name, to read lines whose sizes do not matter."""

    def __getitem__(self, name: str) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


ANY_SIZE: Sizes = _AnySize()


def read(text: str, path: str, sizes: Sizes = ANY_SIZE, *, table: bool = False) -> Rules:
    """Return the rules in `text`, the content of the file `path`.

    Args:
        sizes: the sizes of the model.
        table: as in `Rules`.

    Raises:
        CkptfixError: it is neither lines nor JSON, a rule is malformed, or needs a size that is not stated; the message
            names the line.
    """
    tensors: list[TensorRule] = []
    rows: list[tuple[str, str, int]] = []
    if text.lstrip().startswith("{") and _is_json(text):
        rows = [(old, new, 0) for old, new in _json_pairs(text, path)]
    else:
        for number, line in enumerate(text.split("\n"), 1):
            words = _before_comment(line.split())
            with _Line(path, number, line):
                if BAR in words:
                    tensors.append(_tensor_rule(_with_sizes(words, sizes), number))
                elif words:
                    rows.append((*_pair(words), number))
    names: dict[str, str] = {}
    lines: dict[str, int] = {}
    for old, new, number in rows:
        if is_rule(old) or is_rule(new):
            try:
                NameRule(old, new)
            except Refused as error:
                raise CkptfixError(error.message, path=path, where=f"{old} -> {new}") from None
        if names.setdefault(old, new) != new:
            raise CkptfixError(f"{old!r} would become both {names[old]!r} and {new!r}", path=path)
        lines.setdefault(old, number)
    return Rules(path, names, tuple(tensors), lines, table)


def _with_sizes(words: list[str], sizes: Sizes) -> list[str]:
    """Fill the sizes of the model in the options of a line's operations."""

    def one(match: re.Match[str]) -> str:
        try:
            return str(sizes[match[1]])
        except KeyError:
            option = HEADS.get(match[1])
            hint = f"state it with {option} N" if option else f'state "{match[1]}" in a config.json beside the file'
            message = f"@{match[1]} is not known: neither a config.json beside the file nor its arguments state it"
            raise Refused(message, hint=hint) from None

    bar = words.index(BAR)
    return [*words[:bar], *(_SIZE.sub(one, word) for word in words[bar:])]


HEADS = {"heads": "--heads", "kv": "--kv-heads"}
"""The sizes that options state: heads of queries, and of keys and values."""

_HINT = "write a JSON object, or a line `old new` for each name"


def _pair(words: list[str]) -> tuple[str, str]:
    if len(words) == 3 and words[1] == ARROW:
        del words[1]
    if len(words) != 2:
        raise Refused(f"expected `old new`, found {len(words)} words", hint=_HINT)
    return words[0], words[1]


def _tensor_rule(words: list[str], number: int) -> TensorRule:
    bar = words.index(BAR)
    names, rest = words[:bar], words[bar + 1 :]
    steps: list[list[str]] = [[]]
    for word in rest:
        if word == BAR:
            steps.append([])
        else:
            steps[-1].append(word)
    if any(not step for step in steps):
        raise Refused("a bar has no operation after it")
    operations = tuple(map(parse, steps))
    if any(one.kind == "name" for one in operations):
        if len(operations) > 1:
            raise Refused(f"`{next(one.name for one in operations if one.kind == 'name')}` must be the only operation")
        if operations[0].name in ("drop", "refuse"):
            if len(names) != 1:
                raise Refused(f"expected `name | {operations[0].name}`")
            return TensorRule(side(names[0], names[0]), None, operations, number)
    old, new = _pair(names)
    if operations[0].kind == "name":
        first, second = side(old, new), side(new, old)
        if first.axes or second.axes:
            raise Refused(f"`{operations[0].name}` needs a single name on each side")
        return TensorRule(first, second, operations, number)
    return made(old, new, operations, number)


def made(old: str, new: str, operations: tuple[Operation, ...], number: int) -> TensorRule:
    """Return the rule of a line.

    Raises:
        Refused: the operations take or make a different number of tensors than the sides name.
    """
    rule = TensorRule(side(old, new), side(new, old), operations, number)
    _refuse_counts(rule)
    return rule


def _refuse_counts(rule: TensorRule) -> None:
    assert rule.new is not None
    kinds = Counter[str](operation.kind for operation in rule.operations)
    between = min(kinds["join"] - rule.old.axes, kinds["part"] - rule.new.axes) if _nests(rule) else 0
    for one, kind, verbs in (
        (rule.old, "join", "concat, stack or interleave"),
        (rule.new, "part", "split, unstack or deinterleave"),
    ):
        steps = kinds[kind] - max(between, 0)
        if steps < one.axes:
            raise Refused(f"{one.text!r} stands for several tensors, but nothing {_WORD[kind]} them: {verbs}")
        if steps > one.axes:
            name = next(operation.name for operation in rule.operations if operation.kind == kind)
            hint = "name the parts as in {q,k,v}, or number them as in {e}"
            raise Refused(f"`{name}` {_WORD[kind]} several tensors, but {one.text!r} stands for one", hint=hint)


def _nests(rule: TensorRule) -> bool:
    """Return whether each operation that joins has several tensors: a line may split one, and join the parts again."""
    several = rule.old.axes
    for operation in rule.operations:
        several += {"part": 1, "join": -1}.get(operation.kind, 0)
        if several < 0:
            return False
    return True


_WORD = {"join": "joins", "part": "makes"}


def side(text: str, other: str) -> RuleSide:
    """Return one side of a line whose other side is `other`.

    Raises:
        Refused: it has two lists, two numbers that the other side lacks, or such a number twice.
    """
    lists = _LIST.findall(text)
    if len(lists) > 1:
        raise Refused(f"a name can contain only one list: {text!r}")
    names: tuple[str, ...] = (text,)
    if lists:
        found = _LIST.search(text)
        assert found is not None
        names = tuple(text[: found.start()] + part + text[found.end() :] for part in lists[0].split(","))
        if len(set(names)) < len(names):
            raise Refused(f"a list must name each part once: {text!r}")
        if len(names) > MAX_PARTS:
            raise Refused(f"the list has {len(names)} names; at most {MAX_PARTS} are allowed")
    own, others = placeholders(text), placeholders(other)
    alone = [name for name in own if name not in others]
    if "*" in alone:
        raise Refused(f"{{*}} must be on both sides, not only in {text!r}")
    if len(alone) > 1:
        raise Refused(f"{{{alone[0]}}} and {{{alone[1]}}} of {text!r} are not in {other!r}")
    if not alone:
        return RuleSide(text, names)
    uses = own[alone[0]]
    if len(uses) > 1:
        raise Refused(f"{{{alone[0]}}} appears {len(uses)} times in {text!r}")
    plain = tuple(moved(name, {alone[0]: -uses[0]}) for name in names)
    return replace(RuleSide(text, plain), running=alone[0], start=uses[0])


def _is_json(text: str) -> bool:
    """Return whether text that begins with a brace is meant as JSON, since a line may begin with a list."""
    first = text.lstrip().split("\n", 1)[0].split()
    return BAR not in first and ARROW not in first


def _json_pairs(text: str, path: str) -> Iterator[tuple[str, str]]:
    def pairs_of(pairs: list[tuple[str, object]]) -> list[tuple[str, object]]:
        return pairs

    pairs: list[tuple[str, object]]
    try:
        pairs = json.loads(text, object_pairs_hook=pairs_of)
    except json.JSONDecodeError as error:
        raise CkptfixError(f"not JSON: {error.msg}", path=path, where=f"line {error.lineno}", hint=_HINT) from None
    except ValueError as error:  # a number with too many digits
        raise CkptfixError(f"not a JSON object of names: {error}", path=path, hint=_HINT) from None
    except RecursionError:
        raise CkptfixError("not a JSON object of names: nested too deeply", path=path, hint=_HINT) from None
    for old, new in pairs:
        if not isinstance(new, str):
            message = f"the new name of {printable(repr(old))} is not a string"
            raise CkptfixError(message, path=path, hint=_HINT)
        yield old, new


def _before_comment(words: list[str]) -> list[str]:
    """Return the words before one that begins with ``#``. A name may contain the sign, but not begin with it."""
    for index, word in enumerate(words):
        if word.startswith("#"):
            return words[:index]
    return words


def several(names: Iterable[str]) -> str:
    """Join names for a message, and show the first four."""
    rows = list(names)
    return ", ".join(rows[:4]) + (f" and {len(rows) - 4} more" if len(rows) > 4 else "")
