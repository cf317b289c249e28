"""Findings of one cause are one line of the report."""

from __future__ import annotations

import math
from argparse import Namespace
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath

import pytest
import torch

import ckptfix
from ckptfix.findings.remedies import chain
from ckptfix.findings.row import Finding
from ckptfix.findings.steps import step
from ckptfix.findings.table import Remedy, found, remedy_of
from ckptfix.ops.doctor.groups import FindingGroup, grouped, placed


@pytest.fixture
def several(tmp_path: Path) -> Path:
    foreign = {"args": Namespace(), "path": PurePosixPath("x"), "a": Decimal(1), "b": Fraction(1, 2), "c": Counter()}
    torch.save({"model": {"module.a.weight": torch.ones(2)}, "ema": {"module.a.weight": torch.zeros(2)}, **foreign},
               tmp_path / "several.pth")  # fmt: skip
    return tmp_path / "several.pth"


def test_foreign_classes_are_one_line_and_each_is_listed_in_full(several: Path) -> None:
    done = ckptfix.doctor(several)
    pure = f"{PurePosixPath.__module__}.PurePosixPath"  # Python 3.13 pickles it as one of pathlib._local
    names = ["argparse.Namespace", pure, "decimal.Decimal", "fractions.Fraction"]
    assert sum(finding.id == "foreign-global" for finding in done.findings) == 4
    lines = [line.text for line in done.lines()]
    assert lines[0].endswith(f"weights_only=True does not allow ({', '.join(names)}) [foreign-global]")
    assert sum("[foreign-global]" in line for line in lines) == 1
    assert not any("0x" in line for line in lines)
    assert lines[-1].endswith("-v lists 5 more findings, and where each is.")
    short = done.lines(2)[0].text
    assert f"argparse.Namespace, {pure} and 2 more" in short
    full = [line.text for line in done.lines(verbose=True)]
    assert sum(line.startswith("error: foreign-global: ") and " @ 0x" in line for line in full) == 4
    assert sum(line.startswith("note: needs-torch: ") for line in full) == 1
    assert "-v" not in full[-1]


def test_what_is_true_of_a_format_is_listed_on_request_alone(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.ones(2)}, tmp_path / "a.pth")
    done = ckptfix.doctor(tmp_path / "a.pth")
    assert [finding.id for finding in done.findings] == ["needs-torch"]
    assert [line.text for line in done.lines()] == [done.sentence]
    assert done.lines(verbose=True)[-1].text.startswith("note: needs-torch: it needs torch 1.6 or later")


def test_nothing_is_said_twice(several: Path) -> None:
    lines = [line.text for line in ckptfix.doctor(several).lines() if line.text]
    assert len(lines) == len(set(lines))
    ids = [line.rpartition(" [")[2] for line in lines if line.endswith("]")]
    assert len(ids) == len(set(ids)) >= 3


def test_one_cause_in_two_places() -> None:
    rows = [found("wrapped-names", "2 keys begin with module.", where=where) for where in ("model", "ema", "best")]
    assert FindingGroup(tuple(rows)).text() == "model: 2 keys begin with module.; also at ema, best"
    assert FindingGroup(tuple(rows)).text(1) == "model: 2 keys begin with module.; also at ema and 1 more"
    same = (found("nan-values", "a", where="x"), found("nan-values", "b", where="x"))
    assert FindingGroup(same).text() == "x: a (and 1 more)"


def test_a_place_is_said_unless_it_is_the_pickle_or_in_the_message() -> None:
    assert placed(Finding("a", "error", "archive/data.pkl", "broken", 3)) == "broken"
    assert placed(Finding("a", "error", "data/3", "data/3 is cut")) == "data/3 is cut"
    assert placed(Finding("a", "error", "data/3", "cut")) == "data/3: cut"


def test_a_severity_and_its_advice_stay_with_their_findings() -> None:
    rows = [found("nan-values", "x", severity="error"), found("nan-values", "y"), found("nan-values", "z")]
    groups = grouped(rows, [Remedy(advice="do this"), Remedy(), Remedy(advice="do that")])
    assert [(len(group.findings), group.severity, group.advice) for group in groups] == [
        (1, "error", "do this"), (2, "warning", "do that"),
    ]  # fmt: skip


def test_a_conversion_of_a_format_that_is_only_read_is_left_to_the_edits(tmp_path: Path) -> None:
    path = str(tmp_path / "plain.pkl")
    rows = [(row, remedy_of(row, path)) for row in (found("plain-pickle", fix=step("convert", to="zip")),)]
    assert [line.step.command for line in chain(path, rows)] == ["convert"]
    finding, tags = found("wrapped-names", fix=step("strip-module")), found("device-tags")
    rows += [(row, remedy_of(row, path)) for row in (finding, tags)]
    assert [line.step.command for line in chain(path, rows)] == ["strip-module", "to-cpu"]


def test_the_fix_of_each_finding_is_one_that_works(tmp_path: Path) -> None:
    import pickle

    path = tmp_path / "plain.pkl"
    path.write_bytes(pickle.dumps({"module.a.weight": torch.ones(2)}))
    done = ckptfix.doctor(path)
    row = next(row for finding, row in zip(done.findings, done.remedies, strict=True) if finding.id == "wrapped-names")
    assert [line[1] for line in row.commands] == ["strip-module"]
    assert [line[1] for line in done.fixes] == ["strip-module"]


def test_ties_of_equal_keys_are_named_by_their_addresses(tmp_path: Path) -> None:
    weight = torch.ones(3)
    torch.save({"model": {"a.weight": weight}, "best": {"a.weight": weight}}, tmp_path / "a.pth")
    tied = next(row for row in ckptfix.doctor(tmp_path / "a.pth").findings if row.id == "tied-tensors")
    assert "best/a.weight = model/a.weight" in tied.message


def test_an_optimizer_is_no_larger_than_its_storages(tmp_path: Path) -> None:
    flat = torch.zeros(1000)
    state = {index: {"exp_avg": flat[index * 10 : index * 10 + 10]} for index in range(100)}
    torch.save({"state": state, "param_groups": [{"lr": 0.1, "params": list(range(100))}]}, tmp_path / "o.pth")
    row = next(row for row in ckptfix.doctor(tmp_path / "o.pth").findings if row.id == "optimizer-state")
    assert row.message.startswith("an optimizer's state takes up 4,000 of its ")


def test_advice_of_what_is_not_the_cause_stands_below_it(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.tensor([math.nan]), "p": PurePosixPath("x")}, tmp_path / "a.pth")
    lines = ckptfix.doctor(tmp_path / "a.pth").lines()
    texts = [line.text for line in lines]
    at = next(index for index, text in enumerate(texts) if text.endswith("[nan-values]"))
    assert at and texts[0].endswith("[foreign-global]")
    assert texts[at + 1].startswith("  Try: use an earlier checkpoint")
    assert [line.label for line in lines if line.text.startswith("warning: ")] == [len("warning")]


def test_findings_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    """Whatever the order is in which this run of Python keeps strings in a set."""
    state = {}
    for name in "hgfedcba":
        base = torch.zeros(30)
        state[name] = {"x.weight": base[:20], "y.weight": base[10:]}
    torch.save(state, tmp_path / "in.pth")
    found = [row.where for row in ckptfix.doctor(tmp_path / "in.pth").findings if row.id == "shared-memory"]
    assert found == [f"{name}/y.weight" for name in "hgfedcba"]
