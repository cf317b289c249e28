"""Every command that doctor prints runs as printed, and the finding is gone after it: on real files and fixtures."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from real.files import FIXTURES, SHARED, name_of, real_files

from ckptfix.cli import commands

pytestmark = pytest.mark.campaign

KNOWN: tuple[tuple[str, str, str], ...] = ()
"""(pattern of files, pattern of finding ids, fault): expected failures; one that passes is to be taken out."""


def checkpoints() -> list[Path]:
    return [*sorted(path for path in FIXTURES.iterdir() if path.suffix in (".pth", ".safetensors")), *real_files()]


def known(path: Path, finding: str) -> str:
    rows = (why for files, ids, why in KNOWN if re.fullmatch(files, name_of(path)) and re.fullmatch(ids, finding))
    return next(rows, "")


def copied(path: Path, folder: Path) -> Path:
    """The file in a folder of its own; with what lies beside it, where it is only a part."""
    if path.suffix == ".distcp":
        shutil.copytree(path.parent, folder / path.parent.name, copy_function=shutil.copyfile)
        return folder / path.parent.name / path.name
    return Path(shutil.copyfile(path, folder / path.name))


def run(*words: object) -> tuple[int, dict[str, Any], str]:
    result = CliRunner().invoke(commands, [str(word) for word in words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    try:
        return result.exit_code, json.loads(result.stdout), result.stderr
    except ValueError:
        return result.exit_code, {}, result.stderr


def found_in(path: Path) -> dict[str, Any]:
    return run("doctor", "--json", path)[1]


def ids(document: dict[str, Any], *severities: str) -> set[str]:
    return {row["id"] for row in document["findings"] if row["severity"] in severities}


def outcome(lines: list[list[str]]) -> tuple[Path | None, str]:
    """Run command lines; (what the last one wrote, what is wrong)."""
    for words in lines:
        code, _, said = run(*words[1:])
        if code not in (0, 3):
            return None, f"`{shlex.join(words)}` exits with {code}: {said.strip()}"
        if not Path(words[3]).exists():
            return None, f"`{shlex.join(words)}` made no {words[3]}"
    return Path(lines[-1][3]), ""


def faults(path: Path, folder: Path) -> list[tuple[str, str]]:
    """(id of the finding, what is wrong with the command that doctor gives for it, or with those for all)."""
    found = []
    copy = copied(path, folder)
    document = found_in(copy)
    chain = document["fixes"]
    assert all(words[0] == "ckptfix" for words in chain)
    in_one = document["fix"]
    assert in_one == (chain[0] if chain else None) if len(chain) < 2 else in_one[:2] == ["ckptfix", "fix"]
    for row in document["findings"]:
        # The commands of notes are printed where the user asks about them.
        if row["severity"] == "info" or not row["fixes"] or len(row["fixes"][0]) < 4:
            continue
        made, wrong = outcome(row["fixes"])
        if made is not None:
            again = row["id"] in {other["id"] for other in found_in(made)["findings"]}
            wrong = f"`{row['fixes']}`: doctor finds {row['id']} again" if again else ""
            for words in row["fixes"]:
                Path(words[3]).unlink()
        if wrong:
            found.append((row["id"], wrong))
    for lines in (chain, [in_one]) if len(chain) > 1 else (chain,):
        if not lines or len(lines[0]) < 4:
            continue
        made, wrong = outcome(lines)
        if made is not None:
            left = ids(found_in(made), "error") | (
                ids(found_in(made), "warning") & {row["id"] for row in document["findings"] if row["fixes"]}
            )
            wrong = f"`{lines}`: doctor finds {sorted(left)} after it" if left else ""
        if wrong:
            found.append(("chain", wrong))
    return found


def folders() -> list[Path]:
    """Every folder with a file in it that might be a checkpoint."""
    return sorted({path.parent for path in real_files() if path.is_relative_to(SHARED / "frameworks")})


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.parametrize("path", checkpoints(), ids=name_of)
def test_the_commands_run_as_printed(path: Path, tmp_path: Path) -> None:
    found = [f"{finding}: {what}" for finding, what in faults(path, tmp_path) if not known(path, finding)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", folders(), ids=name_of)
def test_the_commands_for_a_folder_run_as_printed(path: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(path, tmp_path / path.name, copy_function=shutil.copyfile))
    document = found_in(own)
    if not document:  # an object for each of them
        pytest.skip("a folder of several checkpoints, each of which doctor judges by itself")
    chain = document["fixes"]
    if not chain or len(chain[0]) < 4:
        assert document["advice"] or not ids(document, "error"), document["summary"]
        return
    made, wrong = outcome(chain)
    assert made is not None, wrong
    assert not ids(found_in(made), "error")


def attacks() -> list[Path]:
    return sorted(path for path in (SHARED / "attacks").rglob("*") if path.is_file())


def refused(path: Path) -> list[str]:
    """Run the command that doctor prints, and its steps; return what is wrong: exit 2, or no output."""
    document = found_in(path)
    chain = document.get("fixes", [])
    wrong = []
    for lines in (chain, [document["fix"]]) if len(chain) > 1 else (chain,):
        if lines and len(lines[0]) >= 4:
            wrong.append(outcome(lines)[1])
    return [what for what in wrong if what]


@pytest.mark.parametrize("path", attacks(), ids=name_of)
def test_no_command_is_printed_that_refuses_a_hostile_file(path: Path, tmp_path: Path) -> None:
    assert not refused(copied(path, tmp_path))


def known_faults() -> list[Any]:
    return [
        pytest.param(path, row, marks=pytest.mark.xfail(strict=True, reason=row[2]), id=f"{name_of(path)}: {row[1]}")
        for path in checkpoints()
        for row in KNOWN
        if re.fullmatch(row[0], name_of(path))
    ]


@pytest.mark.parametrize(("path", "row"), known_faults())
def test_known_faults(path: Path, row: tuple[str, str, str], tmp_path: Path) -> None:
    assert not [what for finding, what in faults(path, tmp_path) if re.fullmatch(row[1], finding)]
