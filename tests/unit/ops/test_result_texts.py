"""What a result is as text: str() says what the command prints, repr() is one short line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import Tensor, assemble, push, state_dict_ops, torch_zip, written
from click.testing import CliRunner

import ckptfix
from ckptfix.cli import commands
from ckptfix.errors import Unsupported

WRITES: dict[str, Callable[[Path, Path], Any]] = {
    "strip-module": ckptfix.strip_module,
    "unwrap": ckptfix.unwrap,
    "to-cpu": ckptfix.to_cpu,
    "sanitize": ckptfix.sanitize,
    "slim": ckptfix.slim,
    "repair": ckptfix.repair,
    "convert": ckptfix.convert,
    "extract": ckptfix.extract,
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    state = {f"module.l{index}.weight": torch.full((2,), float(index)) for index in range(300)}
    torch.save({"model": state, "epoch": 3}, tmp_path / "a.pth")
    return tmp_path / "a.pth"


def printed(*arguments: object) -> str:
    done = CliRunner().invoke(commands, [str(argument) for argument in arguments])
    return done.stdout


@pytest.mark.parametrize("verb", WRITES)
def test_a_verb_that_writes(verb: str, source: Path, tmp_path: Path) -> None:
    result = WRITES[verb](source, tmp_path / "out.pth")
    assert str(result) == printed(verb, source, tmp_path / "again.pth").rstrip("\n")
    assert len(repr(result)) < 400 and "\n" not in repr(result) and str(source) in repr(result)


def test_inspect(source: Path) -> None:
    found = ckptfix.inspect(source)
    lines = str(found).splitlines()
    shown = printed("inspect", source).splitlines()
    assert lines[: lines.index("")] == shown[: shown.index("")]
    assert lines[-1].split() == shown[-1].split() and len(lines) == len(shown) - 2, "but for the two lines of its head"
    assert repr(found) == f"<Inspection of {str(source)!r}: PyTorch zip, 300 tensors>"


def test_diff(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "b.pth"
    torch.save({"model": {f"module.l{index}.weight": torch.full((2,), 9.0) for index in range(10)}}, other)
    found = ckptfix.diff(source, other)
    assert str(found).splitlines()[0] == printed("diff", source, other).splitlines()[0]
    assert str(found).count("only in A: ") == 290 and str(found).splitlines()[-1].startswith("differs: ")
    assert repr(found) == f"<DiffResult of {str(source)!r} and {str(other)!r}: different>"
    assert repr(ckptfix.diff(source, source)).endswith(": the same>")


def test_doctor(source: Path) -> None:
    found = ckptfix.doctor(source)
    assert found.sentence in str(found)
    assert str(found) == printed("doctor", source).rstrip("\n")
    assert found.findings and found.fixes
    for finding in found.findings:
        assert finding.message in "\n".join(line.text for line in found.lines(verbose=True))
    assert "\n" not in repr(found) and len(repr(found)) < 200


def test_slim_says_that_no_optimizer_was_recognised(tmp_path: Path, source: Path) -> None:
    """fastai keeps its optimizer as a list of states without groups."""
    torch.save({"model": {"w": torch.ones(2)}, "opt": {"hypers": [{"lr": 1}], "state": [{"avg": torch.ones(2)}]}},
               tmp_path / "fastai.pth")  # fmt: skip
    shown = printed("slim", "--no-optimizer", tmp_path / "fastai.pth", tmp_path / "out.pth")
    assert "no optimizer was recognised in it" in shown
    assert "no optimizer was recognised" not in printed("slim", tmp_path / "fastai.pth", tmp_path / "other.pth")


def test_slim_of_state_that_is_set_twice_has_a_way_out(tmp_path: Path) -> None:
    state = ["EMPTY_DICT", "MARK", *push("a"), *push(1), "SETITEMS", "BUILD"]
    thrice = [("GLOBAL", "lib", "Thing"), "EMPTY_TUPLE", "REDUCE", *state, *state, *state]
    weights = state_dict_ops({"w": Tensor("0", (2,), 100)})
    both = ["EMPTY_DICT", "MARK", *push("model"), *weights, *push("thing"), *thrice, "SETITEMS"]
    path = written(tmp_path / "a b.pth", torch_zip(assemble(("PROTO", 2), *both, "STOP"), [bytes(400)]))
    with pytest.raises(Unsupported, match="state that is set twice") as caught:
        ckptfix.slim(path, tmp_path / "out.pth")
    assert caught.value.hint == f"`ckptfix extract '{path}' OUT` takes the weights out of it"
    assert caught.value.path == str(path)
    ckptfix.extract(path, tmp_path / "out.pth")
