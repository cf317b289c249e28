"""Rules files: lines of names, and of what becomes of tensors, that can be run backwards.

::

    # Meta's LLaMA -> transformers
    tok_embeddings.weight               -> model.embed_tokens.weight
    layers.{n}.attention.wq.weight      -> model.layers.{n}.self_attn.q_proj.weight  | rope heads=32 to=half
    layers.{n}.feed_forward.{w1,w3}.{*} -> model.layers.{n}.mlp.gate_up_proj.{*}     | concat
    layers.{n}.experts.{e}.w2.weight    -> model.layers.{n}.mlp.experts.down_proj    | stack | transpose dims=1,2
    rope.freqs                          | drop

Left of the arrow is what the input calls its tensors, right of it what the output does. ``{q,k,v}`` stands for several
names, in this order; a number that only one side has, as ``{e}`` above, for as many as there are, from 0 on. Operations
(`operations`) follow, each behind a bar, and work in turn. A line without an operation is a `NameRule`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ckptfix.errors import CkptfixError, Refused, printable
from ckptfix.names.operations import Operation, parse
from ckptfix.names.rules import NameRule, is_rule, moved, placeholders

BAR, ARROW = "|", "->"
_LIST = re.compile(r"\{([^{},]*(?:,[^{},]*)+)\}")
MAX_PARTS = 1024
"""Names that one list stands for."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a line: a name, or several.

    Attributes:
        text: as it is written.
        names: the names of its list, in order; itself without one.
        running: the placeholder that the other side lacks; None without one.
        start: the number that it begins with.
    """

    text: str
    names: tuple[str, ...]
    running: str | None = None
    start: int = 0

    @property
    def axes(self) -> int:
        """In how many ways it stands for several names."""
        return (self.running is not None) + (len(self.names) > 1)


@dataclass(frozen=True, slots=True)
class TensorRule:
    """A line with operations.

    Attributes:
        new: None for what is left out.
        line: its number in the file, from 1 on.
    """

    old: Side
    new: Side | None
    operations: tuple[Operation, ...]
    line: int = 0

    @property
    def adds(self) -> bool:
        """Whether it gives a name more, and leaves the tensor to the other lines."""
        return self.operations[0].name == "tie"

    def __str__(self) -> str:
        arrow = [] if self.new is None else [ARROW, self.new.text]
        return " ".join([self.old.text, *arrow, *(f"{BAR} {one}" for one in self.operations)])


@dataclass(frozen=True, slots=True)
class Rules:
    """A rules file.

    Attributes:
        path: the file.
        names: old -> new, exact names and `NameRule`s, for lines without operations.
        lines: old -> the number of such a line; 0 where it is not known (JSON).
        tensors: the lines with operations.
    """

    path: str
    names: Mapping[str, str] = field(default_factory=dict)
    tensors: tuple[TensorRule, ...] = ()
    lines: Mapping[str, int] = field(default_factory=dict)

    def reversed(self) -> Rules:
        """The rules that undo these.

        Raises:
            CkptfixError: a line has no inverse; the message names it.
        """
        names: dict[str, str] = {}
        lines: dict[str, int] = {}
        for old, new in self.names.items():
            number = self.lines.get(old, 0)
            with _Line(self.path, number, f"{old} {ARROW} {new}"):
                after, before = _turned(new, old)
                NameRule(after, before)
                if names.setdefault(after, before) != before:
                    raise Refused(f"it cannot be reversed: {names[after]!r} becomes {new!r} too")
                lines[after] = number
        tensors = []
        for rule in self.tensors:
            with _Line(self.path, rule.line, str(rule)):
                tensors.append(_turned_rule(rule))
        return Rules(self.path, names, tuple(tensors), lines)


class _Line:
    """Errors of a line name it."""

    def __init__(self, path: str, line: int, text: str) -> None:
        self._path, self._where = path, f"line {line}" if line else printable(text)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Refused):
            raise CkptfixError(error.message, path=self._path, where=self._where, hint=error.hint) from None


def _turned(new: str, old: str) -> tuple[str, str]:
    """`new` as the left side of a rule and `old` as its right: numbers that were moved there are moved back here."""
    moves: dict[str, int] = {}
    for name, uses in placeholders(new).items():
        if len(uses) > 1:
            raise Refused(f"it cannot be reversed: {{{name}}} stands {len(uses)} times in {new!r}")
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


def read(text: str, path: str) -> Rules:
    """The rules that `text`, the content of the file `path`, states.

    Raises:
        CkptfixError: it is neither lines nor JSON, or a rule is malformed; the message names the line.
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
                    tensors.append(_tensor_rule(words, number))
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
    return Rules(path, names, tuple(tensors), lines)


_HINT = "give a JSON object, or a line `old new` for each name"


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
        raise Refused("a bar without an operation behind it")
    operations = tuple(map(parse, steps))
    if any(one.kind == "name" for one in operations):
        if len(operations) > 1:
            raise Refused(f"`{next(one.name for one in operations if one.kind == 'name')}` stands alone in a line")
        if operations[0].name == "drop":
            if len(names) != 1:
                raise Refused("expected `name | drop`")
            return TensorRule(side(names[0], names[0]), None, operations, number)
    old, new = _pair(names)
    if operations[0].kind == "name":
        first, second = side(old, new), side(new, old)
        if first.axes or second.axes:
            raise Refused(f"`{operations[0].name}` is of one name on both sides")
        return TensorRule(first, second, operations, number)
    return made(old, new, operations, number)


def made(old: str, new: str, operations: tuple[Operation, ...], number: int) -> TensorRule:
    """The rule of a line.

    Raises:
        Refused: the operations do not make as many tensors of as many as the sides name.
    """
    rule = TensorRule(side(old, new), side(new, old), operations, number)
    _refuse_counts(rule)
    return rule


def _refuse_counts(rule: TensorRule) -> None:
    assert rule.new is not None
    for one, kind, verbs in (
        (rule.old, "join", "concat, stack or interleave"),
        (rule.new, "part", "split, unstack or deinterleave"),
    ):
        steps = sum(operation.kind == kind for operation in rule.operations)
        if steps < one.axes:
            raise Refused(f"{one.text!r} is several tensors, and nothing {_WORD[kind]}: {verbs}")
        if steps > one.axes:
            name = next(operation.name for operation in rule.operations if operation.kind == kind)
            hint = "name the parts, as {q,k,v}, or number them, as {e}"
            raise Refused(f"`{name}` {_WORD[kind]} tensors, and {one.text!r} is one", hint=hint)


_WORD = {"join": "joins", "part": "makes"}


def side(text: str, other: str) -> Side:
    """One side of a line, whose other side is `other`.

    Raises:
        Refused: two lists, or two numbers that the other side lacks, or a number that stands twice.
    """
    lists = _LIST.findall(text)
    if len(lists) > 1:
        raise Refused(f"a name holds one list: {text!r}")
    names: tuple[str, ...] = (text,)
    if lists:
        found = _LIST.search(text)
        assert found is not None
        names = tuple(text[: found.start()] + part + text[found.end() :] for part in lists[0].split(","))
        if len(set(names)) < len(names):
            raise Refused(f"a list names each part once: {text!r}")
        if len(names) > MAX_PARTS:
            raise Refused(f"a list of {len(names)} names; at most {MAX_PARTS}")
    own, others = placeholders(text), placeholders(other)
    alone = [name for name in own if name not in others]
    if "rest" in alone:
        raise Refused(f"{{*}} stands on both sides: {text!r}")
    if len(alone) > 1:
        raise Refused(f"{{{alone[0]}}} and {{{alone[1]}}} of {text!r} are not in {other!r}")
    if not alone:
        return Side(text, names)
    uses = own[alone[0]]
    if len(uses) > 1:
        raise Refused(f"{{{alone[0]}}} stands {len(uses)} times in {text!r}")
    plain = tuple(moved(name, {alone[0]: -uses[0]}) for name in names)
    return replace(Side(text, plain), running=alone[0], start=uses[0])


def _is_json(text: str) -> bool:
    """Whether what begins with a brace is meant as JSON: a line may begin with a list."""
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
    except ValueError as error:  # a number of too many digits
        raise CkptfixError(f"not JSON that holds names: {error}", path=path, hint=_HINT) from None
    except RecursionError:
        raise CkptfixError("not JSON that holds names: nested too deeply", path=path, hint=_HINT) from None
    for old, new in pairs:
        if not isinstance(new, str):
            message = f"the new name of {printable(repr(old))} is not a string"
            raise CkptfixError(message, path=path, hint=_HINT)
        yield old, new


def _before_comment(words: list[str]) -> list[str]:
    """The words before one that begins with ``#``: a name may hold the sign, but not begin with it."""
    for index, word in enumerate(words):
        if word.startswith("#"):
            return words[:index]
    return words


def several(names: Iterable[str]) -> str:
    """Names in a message."""
    rows = list(names)
    return ", ".join(rows[:4]) + (f" and {len(rows) - 4} more" if len(rows) > 4 else "")
