"""Hand-assembled hostile files: a result or a CkptfixError, quickly, in little memory, with nothing imported or run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import legacy, torch_zip
from property.hostile import WEIGHT_DATA, gadgets
from property.hostile_files import hostile_files

import ckptfix
from ckptfix import errors

SECONDS = 4.0
"""CPU time of one operation."""
MEMORY = 100 << 20
TESTS = Path(__file__).parents[1]

SAMPLES = list(gadgets())

TOGETHER = pytest.mark.xdist_group("hostile files")
"""The tests that look at `outcomes`, in one worker: it takes long to make."""


def run(folder: Path, samples: dict[str, bytes]) -> dict[str, dict[str, Any]]:
    """name -> what happened, with the row ``"control"``, in a process of its own."""
    for index, data in enumerate(samples.values()):
        (folder / str(index)).write_bytes(data)
    (folder / "names.json").write_text(json.dumps(list(samples)))
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    done = subprocess.run(
        [sys.executable, "-m", "property.run_hostile", str(folder)],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    rows = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0 and set(rows) == {*samples, "control"}, (list(rows)[-1:], done.stderr[-2000:])
    return rows


@pytest.fixture(scope="module")
def samples() -> dict[str, bytes]:
    assert len(hostile_files()) > 500
    return hostile_files()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, samples: dict[str, bytes]) -> dict[str, dict[str, Any]]:
    return run(tmp_path_factory.mktemp("hostile"), samples)


@pytest.mark.campaign
@TOGETHER
def test_the_hook_sees_an_import(outcomes: dict[str, dict[str, Any]]) -> None:
    control = outcomes["control"]
    assert any("pyclbr" in event for event in control["events"]) and not control["torch"]


@pytest.mark.campaign
@TOGETHER
def test_only_our_errors_come_out(outcomes: dict[str, dict[str, Any]]) -> None:
    failures = {name: row["failure"] for name, row in outcomes.items() if row.get("failure")}
    assert not failures, "\n".join(f"{name}: {text}" for name, text in failures.items())


@pytest.mark.campaign
@TOGETHER
def test_nothing_is_imported_called_or_opened(outcomes: dict[str, dict[str, Any]]) -> None:
    seen = {name: row["events"] for name, row in outcomes.items() if row["events"] and name != "control"}
    assert not seen


@pytest.mark.campaign
@TOGETHER
def test_time(outcomes: dict[str, dict[str, Any]]) -> None:
    slow = {name: row["seconds"] for name, row in outcomes.items() if row.get("seconds", 0) > SECONDS}
    assert not slow


@pytest.mark.campaign
@TOGETHER
def test_memory(outcomes: dict[str, dict[str, Any]]) -> None:
    names = list(outcomes)
    grown = {name: outcomes[name].get("grown", 0) for name in names}
    first = next((name for name in names if grown[name] > MEMORY), None)
    assert first is None, f"{first}: {grown[first]} bytes"


@pytest.mark.slow
@pytest.mark.parametrize("container", ["zip", "legacy"])
@pytest.mark.parametrize(("name", "function", "pickle"), SAMPLES, ids=[name for name, _, _ in SAMPLES])
def test_a_gadget_is_named_and_not_run(name: str, function: str, pickle: bytes, container: str, tmp_path: Path) -> None:
    """Stripped, moved and compared; the call stands in the output as it did, and inspect names its function."""
    path = tmp_path / "in"
    storage = ("0", 2, WEIGHT_DATA)
    path.write_bytes(torch_zip(pickle, [WEIGHT_DATA]) if container == "zip" else legacy(pickle, [storage]))
    inspection = ckptfix.inspect(path)
    assert dict(inspection.globals).get(function) is False and inspection.weights_only
    ckptfix.strip_module(path, tmp_path / "stripped")
    ckptfix.map_location(path, tmp_path / "moved", "cpu")
    assert [entry.key for entry in ckptfix.open_checkpoint(tmp_path / "stripped").entries] == ["w"]
    assert {entry.location for entry in ckptfix.open_checkpoint(tmp_path / "moved").entries} == {"cpu"}
    assert function in dict(ckptfix.inspect(tmp_path / "stripped").globals)
    assert [entry.key for entry in ckptfix.open_checkpoint(path).entries] == ["module.w"]


BREAKING = ("payload-then-broken", "frame-straddle", "ext1", "next-buffer", "unknown-opcode-ff", "setitem-on-tensor")


@pytest.mark.campaign
@TOGETHER
@pytest.mark.parametrize("name", BREAKING)
def test_what_no_unpickler_takes_is_refused(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    assert any("BadPickle" in message for message in outcomes[f"zip-{name}"]["messages"]), outcomes[f"zip-{name}"]


@pytest.mark.campaign
@TOGETHER
def test_an_edit_of_a_lying_zip_is_refused(samples: dict[str, bytes], tmp_path: Path) -> None:
    """Two readers would see two files: local name against directory name."""
    (tmp_path / "in").write_bytes(samples["archive-local-name-pickle"])
    with pytest.raises(errors.CkptfixError):
        ckptfix.strip_module(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()
