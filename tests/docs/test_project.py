"""What the project says of itself in several places is the same."""

from __future__ import annotations

import re
import tomllib

import pytest
from docs.pages import ROOT

import ckptfix
from ckptfix.docs import page

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_stands_in_one_place() -> None:
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    assert "version" not in PYPROJECT["project"]
    place = ROOT / PYPROJECT["tool"]["hatch"]["version"]["path"]
    assert f'VERSION = "{ckptfix.__version__}"' in place.read_text(encoding="utf-8")
    assert f"## {ckptfix.__version__} " in page("changelog")


def test_the_pythons_of_the_classifiers_are_tested() -> None:
    said = re.findall(r":: (3\.\d+)$", "\n".join(PYPROJECT["project"]["classifiers"]), re.MULTILINE)
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    matrix = re.search(r"python: \[(.*)\]", workflow)
    assert matrix and re.findall(r"[\d.]+", matrix[1]) == said
    assert PYPROJECT["project"]["requires-python"] == f">={said[0]}"
    assert "run: .ci/run" in workflow


@pytest.mark.xdist_group("one worker")
def test_tests_of_a_group_run_in_one_worker(request: pytest.FixtureRequest) -> None:
    """The name says it where workers are used. pytest 9.2 has another name in mind than the one that is set."""
    if request.config.getoption("loadgroup", False):
        assert request.node.nodeid.endswith("@one worker")
