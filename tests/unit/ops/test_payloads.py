"""Keys that only a class understands: no verb edits them, so the object loads again wherever it loaded before."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix
from ckptfix.errors import Refused

NAMES = ("w", "b", "fc.v")


def state() -> dict[str, torch.Tensor]:
    return {name: torch.full((2, 3), 1.0 + at) for at, name in enumerate(NAMES)}


class Ordered(collections.OrderedDict):  # type: ignore[type-arg]
    """A subclass whose objects have items and attributes."""


class Plain(dict):  # type: ignore[type-arg]
    def __setitem__(self, key: str, value: Any) -> None:
        if key not in NAMES:
            raise KeyError(key)
        super().__setitem__(key, value)


class Filled:
    """No mapping, but filled like one."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in NAMES:
            raise KeyError(key)
        self.held[key] = value

    def __reduce__(self) -> tuple[Any, ...]:
        return Filled, (), None, None, iter(self.held.items())


class Strict:
    """An object that takes only the attributes that it knows."""

    def __setstate__(self, given: dict[str, Any]) -> None:
        self.__dict__.update({name: given[name] for name in NAMES})


class StrictMapping(collections.OrderedDict):  # type: ignore[type-arg]
    """Items and a state, which it takes whole."""

    def __setstate__(self, given: dict[str, Any]) -> None:
        self.__dict__.update({name: given[name] for name in NAMES})


class Slots:
    __slots__ = ("b", "fc", "w")
    b: torch.Tensor
    fc: torch.Tensor
    w: torch.Tensor


def ordered() -> Any:
    made = Ordered(state())
    made.__dict__.update(state())
    return made


def plain_with_attributes() -> Any:
    made = collections.OrderedDict[str, Any](epoch=1)
    made.__dict__.update(state())
    return made


def filled() -> Any:
    made = Filled()
    made.held = state()
    return made


def strict(cls: type) -> Any:
    made = cls()
    made.__dict__.update(state())
    return made


def slots() -> Any:
    made = Slots()
    made.w, made.b, made.fc = state().values()
    return made


OBJECTS: dict[str, Callable[[], Any]] = {
    "subclass of OrderedDict with attributes": ordered,
    "OrderedDict with attributes": plain_with_attributes,
    "subclass of dict": lambda: Plain(state()),
    "filled by setitem": filled,
    "setstate": lambda: strict(Strict),
    "mapping with setstate": lambda: strict(StrictMapping),
    "slots": slots,
}

PLACES: dict[str, Callable[[Any], Any]] = {
    "root": lambda made: made,
    "beside": lambda made: {"state_dict": state(), "x": made},
    "before": lambda made: {"x": made, "state_dict": state()},
    "named": lambda made: {"model": made, "ema": state()},
    "inside": lambda made: {"state_dict": state(), "x": {"y": [made]}},
}

LOOSE: dict[str, Any] = {"allow_unmatched": True}

VERBS: dict[str, Callable[..., Any]] = {
    "add-module": ckptfix.add_module,
    "strip-module": lambda source, dest, **at: ckptfix.strip_module(source, dest, prefix="fc", partial=True, **at),
    "unwrap": ckptfix.unwrap,
    "rename": lambda source, dest, **at: ckptfix.rename(source, dest, subs=[("[wv]$", "z")], **LOOSE, **at),
    "rename, a map": lambda source, dest, **at: ckptfix.rename(source, dest, mapping={"w": "z"}, **LOOSE, **at),
    "select --keep": lambda source, dest, **at: ckptfix.select(source, dest, keep=["fc.*"], **LOOSE, **at),
    "select --drop": lambda source, dest, **at: ckptfix.select(source, dest, drop=["w"], **LOOSE, **at),
    "slim": lambda source, dest: ckptfix.slim(source, dest, no_optimizer=True),
}


def content(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what the objects of this module hold, by a path; plain dicts are state dicts, whose keys may change."""
    if type(value) in (dict, collections.OrderedDict, list):
        for at, inner in enumerate(value.values() if isinstance(value, dict) else value):
            if not isinstance(inner, torch.Tensor):
                yield from ((f"{at}.{path}", found) for path, found in content(inner))
    attributes = getattr(value, "__dict__", {})
    if isinstance(value, Slots):
        attributes = {name: getattr(value, name) for name in Slots.__slots__}
    if isinstance(value, Ordered | Plain | StrictMapping):
        attributes = {**attributes, **{f"[{key}]": inner for key, inner in value.items()}}
    if isinstance(value, Filled):
        attributes = value.held
    for key, inner in attributes.items():
        yield key, inner.tolist() if isinstance(inner, torch.Tensor) else inner


@pytest.mark.sampled(20, quick=5)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.parametrize("legacy", [False, True])
def test_no_verb_edits_what_only_a_class_understands(kind: str, place: str, legacy: bool, tmp_path: Path) -> None:
    source = tmp_path / "in.pth"
    torch.save(PLACES[place](OBJECTS[kind]()), source, _use_new_zipfile_serialization=not legacy)
    before = dict(content(torch.load(source, weights_only=False)))
    assert before
    ats = [row.at for row in ckptfix.open_checkpoint(source).state_dicts]
    edited = 0
    for name, verb in VERBS.items():
        for number, at in enumerate((None, *ats) if name != "slim" else (None,)):
            dest = tmp_path / f"{name}.{number}.pth"
            try:
                verb(source, dest, **({} if at is None else {"at": at or "/"}))
            except Refused:
                assert not dest.exists(), f"{name} {at}"
                continue
            after = dict(content(torch.load(dest, weights_only=False)))
            assert after == before, f"{name} {at}"
            edited += 1
    assert edited


@pytest.mark.parametrize("kind", ["subclass of dict", "filled by setitem", "subclass of OrderedDict with attributes"])
@pytest.mark.parametrize("at", [None, "/"])
def test_the_refusal_names_a_command_that_works(kind: str, at: str | None, tmp_path: Path) -> None:
    torch.save(OBJECTS[kind](), tmp_path / "in.pth")
    with pytest.raises(Refused, match="only the class of the object") as caught:
        ckptfix.add_module(tmp_path / "in.pth", tmp_path / "out.pth", at=at)
    assert caught.value.hint is not None and "--at /" in caught.value.hint
    ckptfix.extract(tmp_path / "in.pth", tmp_path / "out.pth", at="/")
    assert list(torch.load(tmp_path / "out.pth", weights_only=True)) == list(NAMES)


def test_a_model_is_not_missed_because_its_keys_are_not_edited(tmp_path: Path) -> None:
    """Without the refusal, the average beside the model would be the only state dict to edit."""
    torch.save({"model": Plain(state()), "ema": state()}, tmp_path / "in.pth")
    for verb in (ckptfix.add_module, VERBS["select --drop"], VERBS["rename"]):
        with pytest.raises(Refused, match="only the class of the object"):
            verb(tmp_path / "in.pth", tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


def test_a_prefix_that_is_not_stripped_is_named(tmp_path: Path) -> None:
    torch.save(Ordered({f"module.{name}": value for name, value in state().items()}), tmp_path / "in.pth")
    for verb in (ckptfix.strip_module, ckptfix.unwrap):
        with pytest.raises(Refused, match="only the class of the object"):
            verb(tmp_path / "in.pth", tmp_path / "out.pth")
    assert list(ckptfix.load_state_dict(tmp_path / "in.pth")) == list(NAMES)
    assert list(ckptfix.load_state_dict(tmp_path / "in.pth", strip=None)) == [f"module.{name}" for name in NAMES]


@pytest.mark.parametrize("known", [dict, collections.OrderedDict])
def test_known_classes_of_mappings_are_edited(known: type, tmp_path: Path) -> None:
    torch.save({"model": known(state()), "x": collections.defaultdict(list, state())}, tmp_path / "in.pth")
    ckptfix.add_module(tmp_path / "in.pth", tmp_path / "out.pth")
    found = torch.load(tmp_path / "out.pth", weights_only=False)
    assert list(found["model"]) == [f"module.{name}" for name in NAMES]
    assert list(found["x"]) == [f"module.{name}" for name in NAMES]


# ------------------------------------------------------------------- keys that are not text


def numbered() -> dict[Any, torch.Tensor]:
    keys: list[Any] = [1, "w", (2, "x"), "b", 1.5, None]
    return {key: torch.full((2, 2), float(at)) for at, key in enumerate(keys)}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_glob_takes_a_key_that_is_not_text_as_it_is_written(nested: bool, legacy: bool, tmp_path: Path) -> None:
    source = tmp_path / "in.pth"
    saved: Any = {"model": numbered(), "epoch": 3} if nested else numbered()
    torch.save(saved, source, _use_new_zipfile_serialization=not legacy)

    def left(**globs: Any) -> list[Any]:
        done = ckptfix.select(source, tmp_path / "out.pth", force=True, **globs)
        assert not done.account.lost and not [row for row in done.findings if row.id == "unused-rule"]
        found = torch.load(tmp_path / "out.pth", weights_only=False)
        found = found["model"] if nested else found
        assert len(found) == done.kept and len(found) + len(done.dropped) == len(numbered())
        return list(found)

    assert left(keep=["w"]) == ["w"]
    assert left(keep=["1"]) == [1]
    assert left(drop=["1"]) == ["w", (2, "x"), "b", 1.5, None]
    assert left(drop=["(2, x)", "None"]) == [1, "w", "b", 1.5]


@pytest.mark.parametrize("verb", ["add-module", "rename", "rename, a map"])
def test_renaming_names_the_keys_that_it_leaves(verb: str, tmp_path: Path) -> None:
    torch.save(numbered(), tmp_path / "in.pth")
    done = VERBS[verb](tmp_path / "in.pth", tmp_path / "out.pth")
    left = [row.message for row in done.findings if "not text" in row.message]
    assert len(left) == 1 and "1, (2, x), 1.5" in left[0]
    assert left[0] in str(done)
    assert [key for key in torch.load(tmp_path / "out.pth", weights_only=False) if not isinstance(key, str)] == [
        key for key in numbered() if not isinstance(key, str)
    ]
