"""`ckptfix.dataclass` makes the classes that the standard library makes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import field
from typing import Any, ClassVar

import pytest

from ckptfix import dataclass as ours

Decorator = Callable[..., Any]


def made_by(dataclass: Decorator) -> dict[str, Any]:
    """Classes that use what ours use, made by a decorator."""

    @dataclass(frozen=True, slots=True)
    class Row:
        """A row."""

        name: str
        shape: tuple[int, ...] = ()
        found: list[str] = field(default_factory=list, compare=False)
        hidden: int = field(default=3, repr=False)
        kind: ClassVar[str] = "row"

        def size(self) -> int:
            return len(self.shape)

    @dataclass(slots=True)
    class Counter:
        """A counter."""

        start: int
        total: int = field(init=False)
        seen: dict[str, int] = field(init=False, default_factory=dict)
        fixed: int = field(init=False, default=7)

        def __post_init__(self) -> None:
            self.total = self.start

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Settings:
        """Settings."""

        force: bool = False
        level: int

    @dataclass(frozen=True)
    class Base:
        """A base."""

        one: int

    @dataclass(frozen=True)
    class Derived(Base):
        """A class on another."""

        two: int = 2

        def __repr__(self) -> str:
            return "as it says"

    @dataclass(eq=False)
    class Place:
        """A place; two are never equal."""

        at: str = ""

    @dataclass
    class Empty:
        """Nothing."""

    @dataclass(frozen=True, slots=True)
    class Hashed:
        """A class with a hash of its own."""

        one: float

        def __hash__(self) -> int:
            return 5

    return {made.__name__: made for made in (Row, Counter, Settings, Base, Derived, Place, Empty, Hashed)}


OURS, THEIRS = made_by(ours.dataclass), made_by(dataclasses.dataclass)
globals().update({f"Our{name}": made for name, made in OURS.items()})  # pickles name a class by its module
for name, made in OURS.items():
    made.__qualname__ = f"Our{name}"

VALUES: dict[str, list[dict[str, Any]]] = {
    "Row": [{"name": "a"}, {"name": "a", "found": ["x"]}, {"name": "b", "shape": (2,)}, {"name": "a", "hidden": 4}],
    "Counter": [{"start": 1}, {"start": 2}],
    "Settings": [{"level": 1}, {"level": 1, "force": True}],
    "Base": [{"one": 1}, {"one": float("nan")}],
    "Derived": [{"one": 1}, {"one": 1, "two": 3}],
    "Place": [{}, {"at": "x"}],
    "Empty": [{}],
    "Hashed": [{"one": 1.0}, {"one": float("nan")}],
}


def facts(made: Any, values: list[dict[str, Any]]) -> dict[str, Any]:
    """What is seen of a class and of its instances, without the name that the class has here."""
    fields = dataclasses.fields(made)
    all_of = [made(**row) for row in values for _ in range(2)]
    return {
        "signature": str(inspect.signature(made)),
        "doc": made.__doc__,
        "fields": [(row.name, row.type, row.init, row.repr, row.compare, row.kw_only) for row in fields],
        "match": made.__match_args__,
        "slots": getattr(made, "__slots__", None),
        "hashable": made.__hash__ is not None,
        "repr": [repr(one).replace("Our", "").rpartition("<locals>.")[2] for one in all_of],
        "equal": [[a == b for b in all_of] for a in all_of],
        "hashes": [[hash(a) == hash(b) for b in all_of] for a in all_of] if made.__hash__ else None,
        "dict": [dataclasses.asdict(one) for one in all_of],
        "other": [one == 1 or one == object() for one in all_of],
    }


@pytest.mark.parametrize("name", VALUES)
def test_a_class_is_as_the_standard_library_makes_it(name: str) -> None:
    assert repr(facts(OURS[name], VALUES[name])) == repr(facts(THEIRS[name], VALUES[name]))


@pytest.mark.parametrize("name", VALUES)
def test_copies_and_pickles_are_equal(name: str) -> None:
    for row in VALUES[name]:
        one = OURS[name](**row)
        for again in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one)), dataclasses.replace(one)):
            assert type(again) is type(one)
            assert repr(again) == repr(one)


@pytest.mark.parametrize("name", [name for name in VALUES if THEIRS[name].__dataclass_params__.frozen])
def test_a_field_of_a_frozen_class_cannot_be_changed(name: str) -> None:
    one = OURS[name](**VALUES[name][0])
    first = dataclasses.fields(one)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError, match=first):
        setattr(one, first, 1)
    with pytest.raises(dataclasses.FrozenInstanceError, match=first):
        delattr(one, first)


@pytest.mark.parametrize(("name", "row"), [("Row", {}), ("Row", {"name": 1, "more": 2}), ("Settings", {"force": True})])
def test_wrong_arguments_are_refused_alike(name: str, row: dict[str, Any]) -> None:
    said = []
    for made in (OURS[name], THEIRS[name]):
        with pytest.raises(TypeError) as error:
            made(**row)
        said.append(str(error.value).rpartition("__init__")[2])
    assert said[0] == said[1]
