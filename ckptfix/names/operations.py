"""The operations that a line of a rules file performs on tensors besides renaming them: one table, with inverses.

An operation is a word with options, ``split dim=1 sizes=4,1,1``. Options are integers, lists of integers, or sizes in
letters that are filled in from the tensor's shape (``from=o,i,1,1 to=o,i``). No option has a default that a shape could
silently contradict: sizes are stated wherever a reader of the line could not know them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Literal

from ckptfix.dataclass import dataclass
from ckptfix.errors import Refused

Term = tuple[int, tuple[str, ...]]
"""A size as a product: a number, and letters that stand for sizes of the tensor."""

Value = int | str | tuple[int, ...] | tuple[Term, ...]

Kind = Literal["each", "join", "part", "name"]
"""The inputs and outputs of an operation: each tensor by itself; many to one; one to many; names only."""

_PRODUCT = re.compile(r"(?:\d{1,18}|[a-z])(?:\*(?:\d{1,18}|[a-z]))*")
_NUMBER = re.compile(r"-?\d{1,18}")

HALF, INTERLEAVED = "half", "interleaved"
FIRST, LAST = "first", "last"
_WORDS = {"rope": (HALF, INTERLEAVED), "outputs": (FIRST, LAST)}
"""Operation -> the two values of its option ``to=``; each undoes the other."""


@dataclass(frozen=True, slots=True)
class OperationSpec:
    """One operation of the table.

    Attributes:
        options: name -> type of its value: ``int``, ``count`` (a positive number), ``ints``, ``sizes`` or ``word``.
        needs: options that are required.
        text: description for `ckptfix help`.
    """

    kind: Kind
    text: str
    options: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()


_PARTS = {"dim": "int", "sizes": "ints", "heads": "count", "kv": "count", "parts": "count"}
_GROUPS = {**_PARTS, "groups": "count"}
_SHAPES = {"from": "sizes", "to": "sizes", "of": "ints"}
_ROPE = {"dim": "int", "heads": "count", "to": "word", "of": "ints"}
_OUTPUTS = {"to": "word", "of": "ints"}
_ORDER = {"dim": "int", "to": "ints", "of": "ints"}
_ROWS = {"dim": "int", "from": "count", "to": "count", "fill": "int", "of": "ints"}

TABLE: dict[str, OperationSpec] = {
    "split": OperationSpec("part", "cuts one tensor into several", _PARTS),
    "concat": OperationSpec("join", "joins several tensors, one after another", _PARTS),
    "unstack": OperationSpec("part", "makes a tensor for each index of a dimension", {"dim": "int"}),
    "stack": OperationSpec("join", "joins tensors of one shape along a new dimension", {"dim": "int"}),
    "deinterleave": OperationSpec("part", "splits, if groups hold rows of all parts", _GROUPS),
    "interleave": OperationSpec("join", "joins, if groups hold rows of all parts", _GROUPS),
    "mask": OperationSpec("join", "multiplies a tensor with its mask of 0 and 1"),
    "transpose": OperationSpec("each", "swaps two dimensions", {"dims": "ints", "of": "ints"}),
    "permute": OperationSpec("each", "reorders the dimensions", {"dims": "ints", "of": "ints"}, ("dims",)),
    "reshape": OperationSpec("each", "gives the same elements a different shape", _SHAPES, ("from", "to")),
    "rope": OperationSpec("each", "puts rotary pairs of each head side by side, or in halves", _ROPE, ("heads", "to")),
    "rows": OperationSpec("each", "cuts to N rows, or pads to N with zeros", _ROWS, ("to",)),
    "outputs": OperationSpec("each", "puts the outputs of a kernel first, or last", _OUTPUTS, ("to",)),
    "flatten": OperationSpec("each", "merges dimensions into one", {"first": "int", "last": "int", "of": "ints"}),
    "order": OperationSpec("each", "puts equal parts in another order", _ORDER, ("to",)),
    "add": OperationSpec("each", "adds N to each number", {"n": "int", "of": "ints"}, ("n",)),
    "drop": OperationSpec("name", "leaves the tensor out"),
    "tie": OperationSpec("name", "adds a second key for the same tensor"),
    "untie": OperationSpec("name", "leaves out a second key of the same tensor"),
    "refuse": OperationSpec("name", "stops with the text after it: no operation converts the tensor"),
}
"""Operations by name."""

COMPUTE = frozenset(["mask", "add"])
"""Operations that make other numbers; all others put the same numbers in other places."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation with its options, as a line states it."""

    name: str
    options: Mapping[str, Value] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        return TABLE[self.name].kind

    def number(self, option: str, default: int | None = None) -> int | None:
        """Return the number that `option` holds."""
        value = self.options.get(option, default)
        assert value is None or isinstance(value, int)
        return value

    def numbers(self, option: str) -> tuple[int, ...] | None:
        """Return the list of numbers that `option` holds."""
        value = self.options.get(option)
        return None if value is None else tuple(one for one in _several(value) if isinstance(one, int))

    def terms(self, option: str) -> tuple[Term, ...]:
        """Return the sizes in letters that `option` holds."""
        return tuple(one for one in _several(self.options[option]) if isinstance(one, tuple))

    def concerns(self, part: int) -> bool:
        """Return whether it applies to the part with this number."""
        own = self.numbers("of")
        return own is None or part in own

    def inverse(self) -> Operation:
        """Return the operation that undoes this one.

        Raises:
            Refused: it cannot be undone, or the options do not say how.
        """
        options = dict(self.options)
        if self.name in _TURNED:
            return Operation(_TURNED[self.name], options)
        if self.name == "permute":
            dims = self.numbers("dims") or ()
            return Operation("permute", {**options, "dims": tuple(dims.index(place) for place in range(len(dims)))})
        if self.name == "reshape":
            return Operation("reshape", {**options, "from": options["to"], "to": options["from"]})
        if self.name in _WORDS:
            one, other = _WORDS[self.name]
            return Operation(self.name, {**options, "to": one if options["to"] == other else other})
        if self.name == "order":
            parts = self.numbers("to") or ()
            return Operation("order", {**options, "to": tuple(parts.index(place) for place in range(len(parts)))})
        if self.name == "flatten":
            raise Refused("`flatten` cannot be reversed: the shape before it is not known", hint="use reshape")
        if self.name == "add":
            return Operation("add", {**options, "n": -(self.number("n") or 0)})
        if self.name == "rows":
            return self._rows_back()
        if self.name == "transpose":
            return self
        raise Refused(f"`{self.name}` cannot be reversed: the file no longer has the tensor")

    def _rows_back(self) -> Operation:
        before, after = self.number("from"), self.number("to")
        if before is None:
            raise Refused("`rows` cannot be reversed without the original number of rows", hint="state from=")
        if after is not None and after < before:
            raise Refused(f"`rows` cannot be reversed: rows {after} to {before - 1} were cut off")
        return Operation("rows", {**self.options, "from": self.options["to"], "to": before, "fill": 0})

    @property
    def reason(self) -> str:
        """The text of `refuse`."""
        return str(self.options["why"])

    def __str__(self) -> str:
        if self.name == "refuse":
            return f"refuse {self.reason}"
        return " ".join([self.name, *(f"{key}={_text(value)}" for key, value in self.options.items())])


_TURNED = {
    "split": "concat",
    "concat": "split",
    "stack": "unstack",
    "unstack": "stack",
    "interleave": "deinterleave",
    "deinterleave": "interleave",
    "tie": "untie",
    "untie": "tie",
}


def parse(words: Sequence[str]) -> Operation:
    """Return the operation that `words` state: a name, then ``option=value`` words.

    Raises:
        Refused: there is no operation of that name, or it does not have such an option.
    """
    name = words[0] if words else ""
    row = TABLE.get(name)
    if row is None:
        raise Refused(f"there is no operation called {name!r}", hint=f"use one of {', '.join(TABLE)}")
    if name == "refuse":
        return _refusal(words[1:])
    options: dict[str, Value] = {}
    for word in words[1:]:
        key, equals, text = word.partition("=")
        if key not in row.options or not equals:
            known = ", ".join(f"{option}=" for option in row.options) or "none"
            raise Refused(f"`{name}` has no option {word!r}", hint=f"its options are {known}")
        if key in options:
            raise Refused(f"{key}= appears twice in `{name}`")
        options[key] = _value(name, key, text, row.options[key])
    missing = [option for option in row.needs if option not in options]
    if missing:
        raise Refused(f"`{name}` needs {' and '.join(f'{option}=' for option in missing)}")
    made = Operation(name, options)
    _refuse_senseless(made)
    return made


def _refusal(words: Sequence[str]) -> Operation:
    if not words:
        raise Refused("`refuse` needs a text that says why")
    return Operation("refuse", {"why": " ".join(words)})


def _refuse_senseless(made: Operation) -> None:
    given = made.options.keys()
    if len(given & {"sizes", "heads", "parts"}) > 1 or ("kv" in given and "heads" not in given):
        raise Refused(f"`{made.name}` takes sizes=, or parts=, or heads= with kv=")
    if made.name in ("interleave", "deinterleave") and not given & {"groups", "heads"}:
        raise Refused(f"`{made.name}` needs groups=, or heads= and kv=")
    if "groups" in given and "heads" in given:
        raise Refused(f"`{made.name}` takes groups=, or heads= and kv=, not both")
    dims = made.numbers("dims")
    if made.name == "transpose" and dims is not None and (len(dims) != 2 or dims[0] == dims[1]):
        raise Refused("`transpose` swaps two dimensions, such as dims=0,1")
    if made.name == "permute" and sorted(dims or ()) != list(range(len(dims or ()))):
        raise Refused("`permute` names each dimension once, such as dims=0,2,3,1")
    parts = made.numbers("to") if made.name == "order" else None
    if parts is not None and sorted(parts) != list(range(len(parts))):
        raise Refused("`order` names each part once, such as to=1,0,2")
    if made.options.get("to") not in _WORDS.get(made.name, (made.options.get("to"),)):
        raise Refused(f"`{made.name}` needs {' or '.join(f'to={word}' for word in _WORDS[made.name])}")
    if made.name == "rows" and made.options.get("fill", 0) != 0:
        raise Refused("`rows` pads with zeros: fill=0")
    if made.name == "reshape":
        letters = {side: {one for _, names in made.terms(side) for one in names} for side in ("from", "to")}
        if letters["from"] != letters["to"]:
            odd = ", ".join(sorted(letters["from"] ^ letters["to"]))
            raise Refused(f"`reshape` has {odd} on one side only", hint="write for example from=o,i,1,1 to=o,i")


def _value(name: str, key: str, text: str, kind: str) -> Value:
    if kind == "word":
        return text
    parts = text.split(",")
    if kind == "sizes":
        if text and not all(_PRODUCT.fullmatch(part) for part in parts):
            raise Refused(f"{key}={text} of `{name}` is not a list of sizes", hint="write from=o,i,1,1 or from=32*d,c")
        return tuple(_term(part) for part in parts) if text else ()
    if not all(_NUMBER.fullmatch(part) for part in parts) or (kind != "ints" and len(parts) > 1):
        raise Refused(f"{key}={text} of `{name}` is not a {'list of numbers' if kind == 'ints' else 'number'}")
    numbers = tuple(map(int, parts))
    if kind == "count" and numbers[0] < 1:
        raise Refused(f"{key}={text} of `{name}` must be positive")
    return numbers if kind == "ints" else numbers[0]


def _term(text: str) -> Term:
    number, letters = 1, []
    for factor in text.split("*"):
        if factor.isdigit():
            number *= int(factor)
        else:
            letters.append(factor)
    return number, tuple(letters)


def _several(value: Value) -> tuple[int, ...] | tuple[Term, ...]:
    assert isinstance(value, tuple)
    return value


def _text(value: Value) -> str:
    if isinstance(value, tuple):
        return ",".join(one if isinstance(one, str) else _factors(one) for one in map(_plain, value))
    return str(value)


def _plain(one: int | Term) -> str | Term:
    return str(one) if isinstance(one, int) else one


def _factors(term: Term) -> str:
    number, letters = term
    return "*".join([*([] if number == 1 and letters else [str(number)]), *letters])
