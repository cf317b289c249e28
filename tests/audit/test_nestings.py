"""The weight audit over random nestings.

What torch finds before it finds after every writing command, or it is named.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from audit.judge import BY_AT, COMMANDS, Command, breaches
from audit.truth import Unreadable, tensors
from conftest import LONG
from hypothesis import Phase, given, reject, settings
from property.nestings import Attributes, Both, Config, Listed, Mapped, Nested, Pair, Rebuilt, Slots, Stateful, nestings

import ckptfix
from ckptfix import errors

pytestmark = pytest.mark.campaign

SANITIZE = tuple(command for command in COMMANDS if command.line[0] == "sanitize")
OTHERS = tuple(command for command in COMMANDS if command.line[0] != "sanitize")

PHASES = tuple(Phase) if LONG else (Phase.explicit, Phase.reuse, Phase.generate)
"""Each example is some thirty commands: making a failing one smaller takes minutes."""


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


@contextmanager
def saved(case: Nested) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder, "in.pt")
        zipped = case.container == "zip"
        torch.save(case.obj, path, pickle_protocol=case.protocol, _use_new_zipfile_serialization=zipped)
        yield path


def addresses(path: Path) -> list[str]:
    try:
        return [state.at for state in ckptfix.open_checkpoint(path).state_dicts]
    except errors.CkptfixError:
        return []


def keeps_the_law(case: Nested, commands: tuple[Command, ...], by_at: tuple[Command, ...] = ()) -> None:
    with saved(case) as path:
        before: Any = cache(lambda: tensors(path, trusted=True))
        try:
            before()
        except Unreadable:  # some that torch saves it does not read, as float8 with requires_grad
            reject()
        folder = path.parent / "folder"
        folder.mkdir()
        jobs = [(command, "") for command in commands]
        jobs += [(command, at) for at in (addresses(path)[:3] if by_at else ()) for command in by_at]
        found = [
            f"{command} {last}: {breach}"
            for command, last in jobs
            for breach in breaches(command, path, folder, before, last)
        ]
        assert not found, "\n".join(found)


@given(nestings())
@settings(max_examples=500 if LONG else 15, phases=PHASES)
def test_no_command_loses_a_weight(case: Nested) -> None:
    keeps_the_law(case, OTHERS, BY_AT)


@given(nestings(simple=True))
@settings(max_examples=500 if LONG else 15, phases=PHASES)
def test_sanitize_loses_no_weight(case: Nested) -> None:
    keeps_the_law(case, SANITIZE)


@given(nestings())
@settings(max_examples=500 if LONG else 15, phases=PHASES)
def test_sanitize_loses_no_weight_of_an_object_with_a_state_of_its_own(case: Nested) -> None:
    keeps_the_law(case, SANITIZE)


HOLDERS: tuple[Callable[[Any], Any], ...] = (
    lambda held: [held, 1], lambda held: (held, 1), lambda held: {"a": held}, lambda held: {0: held},
    lambda held: Namespace(held=held, lr=0.5), lambda held: Config(held=held), lambda held: Attributes(held=held),
    lambda held: Slots(held, 1), lambda held: Listed([held, 1]), lambda held: Mapped(x=held),
    lambda held: Both(held, 1, 2), lambda held: Both(1, 2, held), lambda held: Stateful((held, 1)),
    lambda held: Stateful([held, 1]), lambda held: Stateful(held), lambda held: Rebuilt(held, 1),
    lambda held: Pair(held, 1), lambda held: deque([held, 1]),
)  # fmt: skip
"""Every kind of object of `nestings` around what it is given."""


def test_what_is_left_out_as_asked_is_named_in_any_object() -> None:
    commands = tuple(command for command in OTHERS if command.part)
    tensor = torch.arange(2.0)
    optimizer = {"state": {0: {"exp_avg": tensor + 1}}, "param_groups": [{"lr": 0.5, "params": [0]}]}
    for number, hold in enumerate(HOLDERS):
        held = hold({"optimizer": optimizer, "sd": {"fc.weight": tensor + 2}, "mark": tensor + 3})
        obj = {"model": {"fc.weight": tensor}, "extra": held, "optimizer": Namespace(held=hold(held))}
        keeps_the_law(Nested(obj, ("zip", "legacy")[number % 2], (2, 4)[number // 2 % 2]), commands)
