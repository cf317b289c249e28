"""Every verb and every loader on files that no torch wrote: a result or one of our errors, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import cycle, islice
from pathlib import Path

import pytest
from builders import push, state_dict_ops, torch_zip
from conftest import LONG, ROOT, in_turn
from property import impossible
from property.hostile import WEIGHT, WEIGHT_DATA, one_pickle
from property.trials import Place, calls_of, changed, trial
from property.verbs import COMMANDS, LOADERS, Outcome, run_command, run_commands, run_loaders

ATTACKS = ROOT.parent / "shared" / "attacks"
ATTACK_FILES = sorted(ATTACKS.rglob("*.p*")) if ATTACKS.is_dir() else []

pytestmark = pytest.mark.usefixtures("nothing_is_run")


def failures(outcomes: Iterable[Outcome], name: str) -> list[str]:
    return [f"{name}: {outcome.name}: {outcome.failure}" for outcome in outcomes if outcome.failure]


def some(files: Iterable[tuple[str, bytes]], folder: Path, each: int) -> tuple[int, list[str]]:
    """Run each file through the next `each` commands and every second through the next loader: together all get all."""
    commands, loaders = cycle(COMMANDS), cycle(LOADERS)
    path = folder / "in.pth"
    count, found = 0, []
    for name, data in files:
        path.write_bytes(data)
        found += failures(run_commands(path, tuple(islice(commands, each))), name)
        found += failures(run_loaders(path, in_turn(tuple(islice(loaders, 1)), count, 2)), name)
        count += 1
    return count, found


def test_the_harness_sees_a_raw_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise KeyError("unforeseen")

    (tmp_path / "in.pth").write_bytes(next(impossible.storages())[1])
    monkeypatch.setattr("ckptfix.cli.to_cpu.command.callback", broken)
    (outcome,) = run_commands(tmp_path / "in.pth", ("to-cpu",))
    assert "KeyError" in outcome.failure


@pytest.mark.campaign
@pytest.mark.skipif(not ATTACK_FILES, reason="no ../shared/attacks here")
@pytest.mark.parametrize("path", ATTACK_FILES, ids=[path.name for path in ATTACK_FILES])
def test_hand_made_attacks(path: Path, tmp_path: Path) -> None:
    """Every verb and every loader in a long run; else a sixth of them, each file of six that are alike another."""
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    turn = ATTACK_FILES.index(path)
    commands, loaders = (in_turn(tuple(names), turn, 6) for names in (COMMANDS, LOADERS))
    assert not failures([*run_commands(copy, commands), *run_loaders(copy, loaders)], path.name)


@pytest.mark.campaign
@pytest.mark.parametrize("name", impossible.GOOD)
def test_impossible_arguments(name: str, tmp_path: Path) -> None:
    """A call with wrong arguments: each file gets some verbs in turn, all of them together get all."""
    files = in_turn([*impossible.impossible(name)], [*impossible.GOOD].index(name), 3)
    count, found = some(files, tmp_path, 2 if LONG else 1)
    assert count > 10
    assert not found, "\n".join(found[:5])


@pytest.mark.campaign
@pytest.mark.parametrize("files", [impossible.quantizers, impossible.storages, impossible.nested])
def test_impossible_tensors(files: object, tmp_path: Path) -> None:
    assert callable(files)
    each = 2 if files is impossible.quantizers else len(COMMANDS) if LONG else len(COMMANDS) // 4
    count, found = some(files(), tmp_path, each)
    assert count >= 3
    assert not found, "\n".join(found[:5])


@pytest.mark.parametrize("argument", [[("BININT1", 5)], ["EMPTY_DICT"], ["NONE"]])
def test_a_call_without_a_tuple_hides_nothing(argument: list[object], tmp_path: Path) -> None:
    """``OrderedDict`` called with an int, beside posix.system: doctor names it."""
    hidden = impossible.called("posix.system", push(("true",)))
    odd = impossible.called("collections.OrderedDict", argument)  # type: ignore[arg-type]
    ops = state_dict_ops({"module.w": WEIGHT, "x": odd, "y": hidden})
    path = tmp_path / "in.pth"
    path.write_bytes(torch_zip(one_pickle(*ops), [WEIGHT_DATA]))
    outcome = run_command(("doctor", os.fspath(path)))
    assert outcome.code == 1 and "os.system(" in outcome.stdout and not outcome.failure


SLICE = range(250)
"""Mutants of the normal tests; `property.campaign` tries a million."""


@pytest.mark.campaign
def test_a_slice_of_the_mutants(tmp_path: Path) -> None:
    """Each mutant by three commands or loaders, as the campaign does it."""
    found, place = [], Place(tmp_path)
    for number in SLICE:
        kind, path = place.put(number)
        for outcome in trial(path, calls_of(number, 3)):
            found += failures([outcome], f"mutant {number} of {kind}")
            found += [f"mutant {number}: {outcome.name}: {text}" for text in [changed(outcome, path)] if text]
    assert not found, "\n".join(found[:5])
