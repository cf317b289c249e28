"""Steps: commands of ckptfix with their options, as data. Text and words are made of them where they are shown.

A row of the table of findings, and whoever reports a finding, states what helps as steps::

    step("strip-module")
    step("extract", at=WHERE)
    step("convert", to="legacy") + step("convert", to="zip")

The options are the keywords of the command's function in Python, so that `fix` calls it with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, TypeAlias

from ckptfix.command_table import STEPS
from ckptfix.commands import word as shell_word
from ckptfix.dataclass import dataclass


class Field(Enum):
    """A value that is known only when there is a finding, with its placeholder."""

    WHERE = "PATH"
    LIKE = "TARGET"


WHERE = Field.WHERE
"""The place of the finding."""

LIKE = Field.LIKE
"""The model that the file was compared with."""

SPELLED = {"pairs": "--set"}
"""Keyword -> its option, where the two differ by more than a plural."""

Value: TypeAlias = str | bool | tuple[str, ...] | tuple[tuple[str, str], ...] | Field
"""The value of an option: True for a flag; several texts, or pairs (old, new), for one that is given once for each."""


@dataclass(frozen=True, slots=True)
class Step:
    """A command with its options.

    Attributes:
        command: its name.
        options: the keywords of its function in Python with their values, in the order of the command line.
        word: the word in the name of its output, where it is not the usual one.
        source: the file that it reads, where it is not the file of the finding.
        dest: the name of its output, where it is fixed, such as ``"OUT"``.
    """

    command: str
    options: tuple[tuple[str, Value], ...] = ()
    word: str = ""
    source: str = ""
    dest: str = ""

    @property
    def output_word(self) -> str:
        """The word in the name of its output: that of the command, or the format of a conversion."""
        if self.word or self.command != "convert":
            return self.word or STEPS[self.command].output_word
        return str(self.get("to") or "safetensors")

    def get(self, name: str) -> Value | None:
        """Return the value of an option; None if it is not given."""
        return next((value for option, value in self.options if option == name), None)

    def having(self, **options: Value) -> Step:
        """Return the same step with more options."""
        return replace(self, options=(*self.options, *options.items()))

    def without(self, name: str) -> Step:
        """Return the same step without an option."""
        return replace(self, options=tuple(option for option in self.options if option[0] != name))

    def filled(self, values: Mapping[Field, str]) -> Step:
        """Return the same step with the values of its fields."""
        known = ((name, values[value] if isinstance(value, Field) else value) for name, value in self.options)
        return replace(self, options=tuple(known))

    def keywords(self) -> dict[str, Any]:
        """Return the keywords for the command's function."""
        made: dict[str, Any] = dict(self.options)
        pairs = made.get("pairs")
        return {**made, "pairs": dict(pairs)} if isinstance(pairs, tuple) else made

    def words(self) -> Iterator[str]:
        """Yield the options as words of a command line."""
        for name, value in self.options:
            option = SPELLED.get(name, f"--{name.replace('_', '-')}")
            if value is True:
                yield option
            elif isinstance(value, tuple):
                for one in value:
                    yield from (option.removesuffix("s"), one if isinstance(one, str) else "=".join(one))
            else:
                yield from (option, value.value if isinstance(value, Field) else str(value))


Steps: TypeAlias = tuple[Step, ...]

Fix: TypeAlias = str | Steps
"""A remedy: steps, or an instruction in words."""


def step(command: str, **options: Value) -> Steps:
    """Return one step; ``+`` puts several one after the other, each on the output of the one before it."""
    return (Step(command, tuple(options.items())),)


@dataclass(frozen=True, slots=True)
class Invocation:
    """A step with the names of its files.

    Attributes:
        source: the file that it reads.
        dest: the name of its output; empty if it writes none.
    """

    step: Step
    source: str
    dest: str = ""

    def argv(self) -> tuple[str, ...]:
        """Return the command line as words."""
        option = STEPS[self.step.command].output_option if self.dest else ""
        names = [operand(name) for name in (self.source, self.dest) if name]
        if option:
            names.insert(-1, option)
        return ("ckptfix", *self.step.command.split(), *names, *self.step.words())


def shell_line(words: Sequence[str]) -> str:
    """Return `words` quoted for a shell."""
    return " ".join(map(shell_word, words))


def operand(path: str) -> str:
    """Return `path` for a command line, so that one that begins with a dash is not mistaken for an option."""
    return f"./{path}" if path.startswith("-") else path
