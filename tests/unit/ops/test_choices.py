"""The state dicts that an error lists to choose among: each is accepted by the call that printed it, as printed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix import errors


class Slots:
    """An object whose state pickle takes from its slots."""

    __slots__ = ("b", "w")

    def __init__(self) -> None:
        self.w, self.b = torch.ones(400), torch.ones(400)


class State:
    """An object whose class alone knows what its state means."""

    def __getstate__(self) -> object:
        return {"w": torch.ones(400), "b": torch.ones(400)}, 3

    def __setstate__(self, state: object) -> None:
        pass


def net(size: int = 3) -> dict[str, Any]:
    return dict(nn.Linear(size, size).state_dict())


OBJECTS: dict[str, Callable[[], object]] = {
    "slots": lambda: {**net(), "object": Slots()},
    "slots beside a key": lambda: {"detector": net(), "object": Slots()},
    "a state": lambda: {"detector": net(), "object": State()},
    "slots and a larger dict": lambda: {"detector": net(), "object": Slots(), "zeta": {"a": torch.ones(900)}},
    "slots alone": lambda: {"object": Slots(), "history": [torch.ones(2000)]},
    "two of slots": lambda: {"one": Slots(), "two": Slots()},
    "modules": lambda: {"a": nn.Linear(3, 4), "b": nn.Linear(3, 4)},
    "a module and a state dict": lambda: {"a": nn.Linear(3, 4), "b": dict(nn.Linear(3, 4).state_dict())},
    "modules and state dicts": lambda: {"a": nn.Linear(3, 4), "b": net(), "c": net(), "d": nn.Linear(3, 3)},
    "a key with slashes at its ends": lambda: {"/a/": net(), "b": net()},
    "an empty key": lambda: {"": net(), "b": net()},
    "keys that cannot be typed": lambda: {"": net(), "/": net()},
    "a larger dict under an empty key": lambda: {"detector": net(), "": {"a": torch.ones(900)}},
    "two names of one address": lambda: {"a": {"b": net()}, "a/b": net()},
    "averages": lambda: {"ema": net(), "ema_model": net(), "": {"ema": net()}},
    "keys with spaces": lambda: {"the first": net(), "the 2nd": net()},
}

VERBS: dict[str, Callable[[Path, Path, Any], object]] = {
    "convert": lambda a, o, at: ckptfix.convert(a, o.with_suffix(".safetensors"), at=at, force=True),
    "extract": lambda a, o, at: ckptfix.extract(a, o, at=at, force=True),
    "extract --ema": lambda a, o, at: ckptfix.extract(a, o, at=at, ema=True, force=True),
    "load_state_dict": lambda a, o, at: ckptfix.load_state_dict(a, at=at),
    "load_into": lambda a, o, at: _load_into(a, at),
    "average": lambda a, o, at: ckptfix.average([a, a], o, at=at, force=True),
    "cast": lambda a, o, at: ckptfix.cast(a, o, to="bfloat16", at=at, force=True),
    "select": lambda a, o, at: ckptfix.select(a, o, keep=["*w*"], at=at, force=True),
    "match": lambda a, o, at: ckptfix.match(a, o, like=_like(a), at=at, partial=True, force=True),
    "diff": lambda a, o, at: ckptfix.diff(a, _like(a), at=at),
}


def _like(source: Path) -> Path:
    path = source.with_name("like.pth")
    if not path.exists():
        torch.save({"ours": net(), "moments": torch.ones(3)}, path)
    return path


def _load_into(source: Path, at: str | None) -> None:
    with contextlib.suppress(errors.LoadMismatch):  # a state dict was chosen, and is another model's
        ckptfix.load_into(nn.Linear(3, 3), source, at=at, strict=False)


def asked(verb: Callable[..., object], source: Path, out: Path) -> errors.Undecided | None:
    try:
        verb(source, out, None)
    except errors.Undecided as error:
        return error
    except errors.CkptfixError:  # it does not ask
        return None
    return None


def printed(error: errors.Undecided) -> Iterator[str]:
    """The addresses in the message, as a user reads them."""
    listed = re.search(r"(?:state dicts|equally well|weights)(?: are|:) ([^;]*)(?:;[^;]*)*$", error.message)
    if listed is not None:
        yield from ("" if part == "the top level ('')" else part for part in listed[1].split(", ") if part)


@pytest.mark.sampled(40)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("name", OBJECTS)
def test_each_choice_that_is_printed_is_accepted(tmp_path: Path, name: str, verb: str) -> None:
    source, out = tmp_path / "a.pth", tmp_path / "o.pth"
    torch.save(OBJECTS[name](), source)
    error = asked(VERBS[verb], source, out)
    if error is None:
        return
    assert list(printed(error)) == [str(at) for at in error.choices]
    if not error.choices:
        assert not error.choice and "--at" not in error.shell_hint
        return
    of_hint = error.choice["at"]
    VERBS[verb](source, out, of_hint)
    for at in error.choices:
        VERBS[verb](source, out, (str(at), of_hint[1]) if isinstance(of_hint, tuple) else str(at))


@pytest.mark.parametrize(("name", "verb", "choices"), [
    ("slots", "cast", ("",)),
    ("slots", "select", ("",)),
    ("slots", "match", ("",)),
    ("slots", "extract", ("", "object/()state/1")),
    ("slots", "convert", ("", "object/()state/1")),
    ("a module and a state dict", "convert", ("b",)),
    ("a module and a state dict", "extract", ("a", "b")),
    ("a key with slashes at its ends", "extract", ("b",)),
])  # fmt: skip
def test_what_a_verb_refuses_is_no_choice(tmp_path: Path, name: str, verb: str, choices: tuple[str, ...]) -> None:
    source = tmp_path / "a.pth"
    torch.save(OBJECTS[name](), source)
    error = asked(VERBS[verb], source, tmp_path / "o.pth")
    assert error is not None and error.choices == choices


def test_several_modules_are_a_choice_of_convert(tmp_path: Path) -> None:
    source = tmp_path / "a.pth"
    torch.save(OBJECTS["modules"](), source)
    with pytest.raises(errors.Undecided) as caught:
        ckptfix.convert(source, tmp_path / "o.safetensors")
    for at in caught.value.choices:
        ckptfix.convert(source, tmp_path / f"{at}.safetensors", at=at)
