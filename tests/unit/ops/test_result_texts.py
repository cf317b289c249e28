"""What a result is as text: str() says what the command prints, repr() is one short line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html.parser import HTMLParser
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


@pytest.mark.slow
@pytest.mark.parametrize("verb", WRITES)
def test_a_verb_that_writes(verb: str, source: Path, tmp_path: Path) -> None:
    result = WRITES[verb](source, tmp_path / "out.pth")
    assert str(result) == printed(verb, source, tmp_path / "again.pth").rstrip("\n")
    assert len(repr(result)) < 400 and "\n" not in repr(result) and str(source) in repr(result)


def test_inspect(source: Path) -> None:
    found = ckptfix.inspect(source)
    assert str(found) == printed("inspect", source).rstrip("\n") and str(found).count("module.l") > 300
    assert repr(found) == f"<Inspection of {str(source)!r}: PyTorch zip, 300 tensors>"


def test_diff(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "b.pth"
    torch.save({"model": {f"module.l{index}.weight": torch.full((2,), 9.0) for index in range(10)}}, other)
    found = ckptfix.diff(source, other)
    assert str(found) == printed("diff", source, other).rstrip("\n") and "Only in A:" in str(found)
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


class Page(HTMLParser):
    """The tags and the text of HTML, every tag closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        assert not attrs
        if tag != "br":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


HOSTILE = "module.<script>alert('&amp;')</script>\x1b[31m\"x"


def results(folder: Path) -> Iterator[Any]:
    """A result of each kind, of a file with a hostile name in it."""
    one, other = folder / "<b>one.pth", folder / "other.pth"
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {HOSTILE: torch.ones(2), **model.state_dict(), "<i>": "<u>"}
    torch.save({"model": state, "opt": optimizer.state_dict()}, one)
    torch.save({"model": {HOSTILE: torch.zeros(2), "only<hr>": torch.ones(3)}}, other)
    yield ckptfix.inspect(one)
    yield ckptfix.doctor(one)
    yield ckptfix.diff(one, other)
    yield ckptfix.strip_module(one, folder / "out.pth", partial=True)
    yield ckptfix.load_into(model, one, at="model", strict=False)
    yield ckptfix.load_optimizer(optimizer, one, model=model)


def test_in_a_notebook_all_text_is_escaped(tmp_path: Path) -> None:
    tags = {"div", "p", "br", "table", "caption", "thead", "tbody", "tr", "th", "td"}
    seen = 0
    for result in results(tmp_path):
        text = result._repr_html_()
        page = Page(text)
        assert page.tags <= tags, type(result)
        assert "<script" not in text and "\x1b" not in text and "<b>" not in text
        seen += "<script>alert('&amp;')</script>\\x1b[31m\"x" in page.text
        assert "\n" not in repr(result) and len(repr(result)) < 400
    assert seen >= 4


def test_a_notebook_gets_the_first_rows(source: Path) -> None:
    text = ckptfix.inspect(source)._repr_html_()
    assert text.count("<tr>") == 201 and "... 100 more" in text
    assert "l0.weight" in text and "l299.weight" not in text


def test_slim_says_that_no_optimizer_was_recognised(tmp_path: Path, source: Path) -> None:
    """fastai keeps its optimizer as a list of states without groups."""
    torch.save({"model": {"w": torch.ones(2)}, "opt": {"hypers": [{"lr": 1}], "state": [{"avg": torch.ones(2)}]}},
               tmp_path / "fastai.pth")  # fmt: skip
    shown = printed("slim", "--no-optimizer", tmp_path / "fastai.pth", tmp_path / "out.pth")
    assert "no optimizer was found in it" in shown
    assert "no optimizer was found" not in printed("slim", tmp_path / "fastai.pth", tmp_path / "other.pth")


def test_slim_of_state_that_is_set_twice_has_a_way_out(tmp_path: Path) -> None:
    state = ["EMPTY_DICT", "MARK", *push("a"), *push(1), "SETITEMS", "BUILD"]
    thrice = [("GLOBAL", "lib", "Thing"), "EMPTY_TUPLE", "REDUCE", *state, *state, *state]
    weights = state_dict_ops({"w": Tensor("0", (2,), 100)})
    both = ["EMPTY_DICT", "MARK", *push("model"), *weights, *push("thing"), *thrice, "SETITEMS"]
    path = written(tmp_path / "a b.pth", torch_zip(assemble(("PROTO", 2), *both, "STOP"), [bytes(400)]))
    with pytest.raises(Unsupported, match="state is set twice") as caught:
        ckptfix.slim(path, tmp_path / "out.pth")
    assert caught.value.hint == f"run `ckptfix extract '{path}' OUT` to get its weights"
    assert caught.value.path == str(path)
    ckptfix.extract(path, tmp_path / "out.pth")
