"""Every load error of the catalogue: the broken file is built, doctor names the cause, its command is run as printed.

Where a loader here gives the message, it is shown to do so first, and to load the mended file afterwards.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from scenarios.broken_files import CASES, Case

from ckptfix.cli import COMMANDS, commands
from ckptfix.ops import error_texts


def run(line: str, code: int) -> str:
    """Run a printed command line as it stands; its output."""
    last = ""
    for part in line.split(" && "):
        words = shlex.split(part)
        assert words[0] == "ckptfix" and words[1] in COMMANDS, line
        done = CliRunner().invoke(commands, words[1:])
        assert done.exit_code == code, f"{part}\n{done.output}"
        last = done.output
    return last


def test_every_error_has_a_case() -> None:
    assert {case.row for case in CASES} == set(error_texts.ERRORS) == set(range(1, 62))
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_cause_is_named_and_the_command_mends_it(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = case.build(tmp_path)
    like = case.like(tmp_path) if case.like is not None else None
    if case.fails is not None:
        use, said = case.fails
        with pytest.raises(Exception, match=f"(?s){said}"):
            use(path)
        (tmp_path / "x.safetensors").unlink(missing_ok=True)
    arguments = ["doctor", path.name, "--json", "--error", case.message]
    if like is not None:
        arguments += ["--like", like.name]
    done = CliRunner().invoke(commands, arguments)
    assert done.exit_code == 1, done.output
    document = json.loads(done.stdout)
    assert case.row in document["error"]["rows"], document["error"]
    assert case.id in document["error"]["explained"], [row["id"] for row in document["findings"]]
    finding = next(row for row in document["findings"] if row["id"] == case.id)
    fix = finding["fix"]
    assert fix, finding
    if case.words:
        assert case.words in fix and not fix.startswith("ckptfix ")
        return
    before = set(tmp_path.iterdir())
    run(fix, case.code)
    made = [tmp_path / shlex.split(part)[3] for part in fix.split(" && ")]
    assert made[-1].exists() and set(tmp_path.iterdir()) - before
    assert case.loads is not None
    case.loads(made[-1])
