"""Every load error of the catalogue: the broken file is built, doctor names the cause, its command is run as printed.

Where a loader here gives the message, it is shown to do so first, and to load the fixed file afterwards.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from scenarios.broken_files import CASES, Case

from ckptfix.cli import commands
from ckptfix.command_table import COMMANDS
from ckptfix.findings.load_errors import LoadError

pytestmark = pytest.mark.slow


def run(words: list[str], code: int) -> None:
    """Run a command as doctor has it."""
    assert words[0] == "ckptfix" and words[1] in COMMANDS, words
    done = CliRunner().invoke(commands, words[1:])
    assert done.exit_code == code, f"{words}\n{done.output}"


def test_every_error_has_a_case() -> None:
    assert {case.row for case in CASES} == set(LoadError) == set(range(1, 70))
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.sampled(1_000)
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
    document = json.loads(done.stdout)
    assert done.exit_code == any(row["severity"] == "error" for row in document["findings"]), done.output
    assert LoadError(case.row).id in document["load_error"]["names"], document["load_error"]
    assert case.id in document["load_error"]["explained"], [row["id"] for row in document["findings"]]
    finding = next(row for row in document["findings"] if row["id"] == case.id)
    if case.words:
        assert case.words in finding["advice"] and finding["fix"] is None
        return
    assert finding["fix"] == finding["fixes"][0] and finding["advice"] is None
    before = set(tmp_path.iterdir())
    for words in finding["fixes"]:
        run(words, case.code)
    made = [tmp_path / words[4 if words[1] == "lora" else 3] for words in finding["fixes"]]
    assert made[-1].exists() and set(tmp_path.iterdir()) - before
    assert case.loads is not None
    case.loads(made[-1])
