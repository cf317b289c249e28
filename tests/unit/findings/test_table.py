"""The table of findings: every id that is reported has a row, every row can be produced, every command exists."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from doctor_samples import SAMPLES
from scenarios.broken_files import CASES

from ckptfix.command_table import COMMANDS
from ckptfix.findings.load_errors import LoadError
from ckptfix.findings.row import Finding
from ckptfix.findings.runs import RUNS
from ckptfix.findings.steps import WHERE, step
from ckptfix.findings.table import ENTRIES, OWN_SUFFIXES, found, proposed, remedy
from ckptfix.findings.verbs import VERBS
from ckptfix.formats import FORMATS
from ckptfix.names.wrappers import WRAPPERS, Wrapper
from ckptfix.ops.doctor import messages

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "ckptfix"
MAKERS = {"found", "_note"}


def emitted() -> Iterator[tuple[str, str]]:
    """(id, place) of every literal id that a call in the package makes a finding of."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not any(f"{name}(" in text for name in (*MAKERS, "note")):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            wreck = name == "note" and ast.unparse(node.func) in ("wreck.note", "self.wreck.note")
            first = node.args[0]
            if (name in MAKERS or wreck) and isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value, f"{path.relative_to(PACKAGE)}:{node.lineno}"


def test_suffixes_are_those_of_the_formats() -> None:
    """The table is below the formats, and cannot ask them."""
    files = [row for row in FORMATS.values() if not row.folder and row.own_suffix and "objects" not in row.states]
    assert {row.name: row.own_suffix for row in files} == OWN_SUFFIXES


@pytest.mark.slow
def test_every_id_that_is_reported_has_a_row() -> None:
    found_ids = dict(emitted())
    assert len(found_ids) > 80
    assert not {id: place for id, place in found_ids.items() if id not in ENTRIES}


def test_every_row_is_complete_and_unique() -> None:
    for id, entry in ENTRIES.items():
        assert id == entry.id and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", id)
        assert entry.story.endswith((".", "?")) and entry.title[-1] != "."
        assert set(entry.errors) <= set(LoadError)
    assert not any("safe" in re.findall(r"[a-z]+", entry.title) for entry in ENTRIES.values())


def test_every_load_error_is_explained_by_a_row() -> None:
    assert {row for entry in ENTRIES.values() for row in entry.errors} == set(LoadError)


BY_COMMANDS = {entry.id for entry in VERBS}
"""Findings of commands that write."""

ELSEWHERE = {
    "edited-in-place": "files after an edit: tests/unit/ops/test_in_place.py",
    "unsupported": "an archive version above 10: tests/unit/test_zip.py",
    **dict.fromkeys(
        ("dcp-saved-at", "dcp-leftover", "dcp-unused", "dcp-overlap", "steps-differ"),
        "folders that several ranks saved: tests/unit/formats/dcp/test_judge.py",
    ),
    **dict.fromkeys(("cut-unknown", "stacked-layers"), "files of ranks: tests/unit/formats/test_parallel.py"),
    **dict.fromkeys((entry.id for entry in RUNS), "run folders: tests/unit/ops/test_doctor_runs.py"),
    **dict.fromkeys(
        ("library-names", "vocabulary-rows", "model-side", "quantized-keys", "adapter-only", "other-file"),
        "files with a pasted message: tests/threads and tests/unit/ops/test_compare.py",
    ),
}


def test_every_row_can_be_produced() -> None:
    produced = {case.id for case in CASES} | {sample.id for sample in SAMPLES}
    assert not set(ENTRIES) - produced - BY_COMMANDS - set(ELSEWHERE)


@pytest.mark.slow
def test_a_row_of_a_command_is_reported_by_one() -> None:
    """Their own tests show them; here no row stands for what nothing reports."""
    assert not BY_COMMANDS - {id for id, _ in emitted()}


def commands_in(text: str) -> list[list[str]]:
    return [shlex.split(part) for part in text.split(" && ") if part.startswith("ckptfix ")]


def test_every_command_that_is_printed_exists(tmp_path: Path) -> None:
    shown = 0
    for entry in ENTRIES.values():
        fix = remedy(Finding(entry.id, "error", "a/b", "x"), str(tmp_path / "it's a model.pth"), like="keys.json")
        for words in commands_in(fix or ""):
            assert words[1] in COMMANDS, entry.id
            assert words[2] == str(tmp_path / "it's a model.pth") or "&&" in (fix or "")
            shown += 1
    literals = re.findall(r'[sS]tep\("([a-z-]+)"', "".join(p.read_text() for p in PACKAGE.rglob("*.py")))
    assert len(literals) > 20 and all(name in COMMANDS for name in literals)
    assert shown > 20


@pytest.mark.parametrize(
    ("name", "word", "expected"),
    [
        ("a.pth", "cpu", "a.cpu.pth"),
        ("a.pth.tar", "stripped", "a.stripped.pth.tar"),
        ("a.pth", "safetensors", "a.safetensors"),
        ("a.safetensors", "safetensors", "a.converted.safetensors"),
        ("a.safetensors", "zip", "a.zip.pth"),
        ("folder", "repaired", "folder.repaired"),
    ],
)
def test_outputs_have_names_of_their_own(name: str, word: str, expected: str, tmp_path: Path) -> None:
    assert proposed(str(tmp_path / name), word) == str(tmp_path / expected)
    (tmp_path / expected).touch()
    assert proposed(str(tmp_path / name), word) != str(tmp_path / expected)


def test_a_name_that_looks_like_an_option_is_quoted() -> None:
    fix = remedy(found("device-tags"), "-rf x.pth")
    assert fix is not None
    assert shlex.split(fix) == ["ckptfix", "to-cpu", "./-rf x.pth", "./-rf x.cpu.pth"]


def test_a_place_with_braces_is_no_template() -> None:
    finding = found("training-checkpoint", where="a{b}", fix=step("extract", at=WHERE))
    assert remedy(finding, "m.pth") == "ckptfix extract m.pth m.weights.pth --at 'a{b}'"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_pasted_message_is_known(case: object) -> None:
    assert getattr(case, "row", None) in messages.rows(getattr(case, "message", ""))


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper.component)
def test_every_wrapper_is_known_by_its_keys(wrapper: Wrapper) -> None:
    kinds = {LoadError.COMPILED, LoadError.WRAPPED, LoadError.PREFIX}
    for quote in "\"'":
        text = f"Unexpected key(s) in state_dict: {quote}{wrapper.component}.weight{quote}."
        assert kinds.intersection(messages.rows(text)[:1]), text
    assert not kinds.intersection(messages.rows(f"a_{wrapper.component}_b"))


@pytest.mark.slow
def test_patterns_are_quick_on_long_text() -> None:
    assert messages.rows("module." * 100_000 + "size mismatch for fc.weight")[:1]
    assert messages.rows("nothing of the kind") == ()


def test_findings_are_made_by_their_table_alone() -> None:
    """Severity and title stand in one place: nothing outside findings/ calls `Finding`."""
    callers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "Finding(" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and "Finding" in (getattr(node.func, "id", ""), getattr(node.func, "attr", ""))
    }
    assert callers == {"findings/table.py"}
