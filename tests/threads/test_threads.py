"""The first command that doctor prints for a pasted message, on files rebuilt from public threads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from threads.latest import LATEST
from threads.newer import NEWER
from threads.others import OTHERS
from threads.reports import REPORTS, Report, distributed, nf4, zeros
from threads.threads import HELD_OUT, THREADS, Thread, lora

import ckptfix
from ckptfix.errors import CkptfixError
from ckptfix.findings.message_names import listed
from ckptfix.ops.chain import function_of
from ckptfix.ops.doctor.report import Diagnosis

EVERY = (*REPORTS, *NEWER, *LATEST)


def diagnosed(thread: Thread, folder: Path) -> Diagnosis:
    state: dict[str, Any] = {name: torch.zeros(shape) for name, shape in thread.file.items()}
    path = folder / "model.pth"
    if thread.at:
        state = {thread.at: state, **dict.fromkeys(thread.beside, 1)}
    if thread.optimizer:
        model, optimizer = trained(thread.optimizer)
        state = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, path)
    return ckptfix.doctor(path, error=thread.message)


def trained(kind: str, frozen: int = 0, order: int = 1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer of the class `kind` after a step.

    Args:
        frozen: first parameters that the optimizer does not have.
        order: -1 for a model that defines its layers in reverse order.
    """
    model = torch.nn.Module()
    for name, sizes in (("first", (3, 4)), ("second", (4, 2)))[::order]:
        model.add_module(name, torch.nn.Linear(*sizes))
    own = list(model.parameters())[frozen:]
    options = {"lr": 0.1, "momentum": 0.9} if kind == "SGD" else {"lr": 0.1}
    optimizer = getattr(torch.optim, kind)(own, **options)
    for parameter in own:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def outcome(thread: Thread, done: Diagnosis) -> str:
    """Return ``solved`` if the printed commands give the keys and shapes of the model, else what was said."""
    cause = done.cause
    chain = done.chain
    if thread.outcome == "python" and not chain:
        return "python" if resumed(thread, str(done)) else "nothing"
    if not chain:
        return "nothing" if cause is None else f"said:{cause.id}"
    for line in chain:
        function_of(line.step.command)(line.source, line.dest, **line.step.keywords())
    last = chain[-1].dest
    made: Any = load_file(last) if last.endswith(".safetensors") else torch.load(last, weights_only=True)
    made = made.get(thread.at, made)
    shapes = {name: tuple(tensor.shape) for name, tensor in made.items()}
    return "solved" if shapes == dict(thread.want) else f"command: {sorted(shapes.items() ^ dict(thread.want).items())}"


def resumed(thread: Thread, said: str) -> bool:
    """Return whether the printed line of Python gives an optimizer of other parameters the state of the file."""
    line = re.search(r"in Python: (ckptfix\.load_optimizer\([^()]*\))", said)
    assert line is not None
    model, optimizer = trained(thread.optimizer, *((2, 1) if "group" in thread.message else (0, -1)))
    shapes = {parameter: parameter.shape for parameter in optimizer.state}
    optimizer.state.clear()
    eval(line[1], {"ckptfix": ckptfix, "model": model, "optimizer": optimizer})
    moments = {parameter: row.get("exp_avg", row.get("momentum_buffer")) for parameter, row in optimizer.state.items()}
    return {parameter: value.shape for parameter, value in moments.items()} == shapes


@pytest.mark.sampled(1_000)
@pytest.mark.parametrize("thread", (*THREADS, *HELD_OUT, *OTHERS), ids=lambda thread: thread.url)
def test_the_first_command_of_a_thread(thread: Thread, tmp_path: Path) -> None:
    assert listed(thread.message) is not None or thread.optimizer
    done = diagnosed(thread, tmp_path)
    said = str(done)
    assert outcome(thread, done) == thread.outcome
    components = {part for name in thread.file for part in name.split(".")}
    assert "module" in components or "`module.`" not in said


def test_most_threads_are_solved() -> None:
    for rows in (THREADS, HELD_OUT, OTHERS):
        counts = Counter(row.outcome in ("solved", "python") for row in rows)
        assert counts[True] >= 0.6 * len(rows)


@pytest.mark.sampled(1_000)
@pytest.mark.parametrize("report", EVERY, ids=lambda report: report.url)
def test_the_first_answer_to_a_report(report: Report, tmp_path: Path) -> None:
    path = report.build(tmp_path)
    done = ckptfix.doctor(path, error=report.message)
    chain = done.chain
    if report.outcome == "solved":
        for line in chain:
            function_of(line.step.command)(line.source, line.dest, **line.step.keywords())
        assert shapes_of(chain[-1].dest) == dict(report.want or {})
    elif report.outcome == "merged":
        found = re.search(r"ckptfix merge (.*) -o (\S+);", str(done))
        assert found is not None and not chain
        ckptfix.merge(found[1].split(), found[2])
        assert shapes_of(found[2]) == dict(report.want or {})
    elif report.outcome == "python":
        assert "ckptfix.load_optimizer(optimizer, " in str(done) and not chain
    else:
        said = "nothing" if done.cause is None else f"said:{done.cause.id}"
        assert report.outcome == said
        assert not done.message or not done.message.solved
        assert not chain or not report.beyond  # a command would be taken for the cure


@pytest.mark.parametrize(("saved", "asked", "words"), [("model", "layer.weight", "deeper, in its dict 'model'"),
                                                       ("", "net.layer.weight", "without the level 'net'")])
def test_a_level_of_a_distributed_checkpoint(tmp_path: Path, saved: str, asked: str, words: str) -> None:
    state = zeros({"layer.weight": (4, 4)})
    path = distributed(**{saved: state} if saved else state)(tmp_path)
    done = ckptfix.doctor(path, error=f"RuntimeError: Missing key in checkpoint state_dict: {asked}.")
    assert words in done.sentence and done.advice is not None and "state_dict}" in done.advice and not done.chain


def test_codes_and_a_model_of_plain_weights(tmp_path: Path) -> None:
    want = {"model.layers.0.mlp.down_proj.weight": (32, 64), "model.norm.weight": (32,)}
    torch.save(zeros(want), tmp_path / "want.pt")
    (line,) = ckptfix.doctor(nf4(tmp_path), like=tmp_path / "want.pt").chain
    function_of(line.step.command)(line.source, line.dest, **line.step.keywords())
    assert shapes_of(line.dest) == want


def test_an_adapter_and_a_model_whose_rows_have_another_order(tmp_path: Path) -> None:
    """The model has the weights of its base too, which no adapter has."""
    have = lora("base_model.model.model.")
    torch.save(zeros(have), tmp_path / "adapter.pt")
    want = {name.replace("self_attn", "attn").replace("lora_A", "lora_a").replace("lora_B", "lora_b").removeprefix(
            "base_model.model.model."): shape for name, shape in have.items()}  # fmt: skip
    base = {f"layers.{n}.attn.{part}_proj.weight": (8, 8) for n in range(2) for part in "qv"}
    torch.save(zeros({**want, **base}), tmp_path / "want.pt")
    advice = ckptfix.doctor(tmp_path / "adapter.pt", like=tmp_path / "want.pt").advice or ""
    assert "--heads N --partial" in advice
    ckptfix.match(tmp_path / "adapter.pt", tmp_path / "out.pt", like=tmp_path / "want.pt", heads=4, partial=True)
    assert shapes_of(str(tmp_path / "out.pt")) == want


def shapes_of(path: str) -> dict[str, tuple[int, ...]]:
    made = ckptfix.load_state_dict(path, strip=None)
    return {name: tuple(value.shape) for name, value in made.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("rows", [REPORTS, NEWER, LATEST], ids=["reports", "newer", "latest"])
def test_most_reports_are_solved(rows: Sequence[Report]) -> None:
    """At least six of ten threads that a file can cure are solved by the first answer, and no other has a command."""
    counts = Counter(row.outcome in ("solved", "python", "merged") for row in rows if not row.beyond)
    assert counts[True] >= 0.6 * counts.total()
    assert all(row.outcome.startswith("said:") for row in rows if row.beyond)


@pytest.mark.parametrize("report", EVERY, ids=lambda report: report.url)
@pytest.mark.campaign
def test_fix_does_what_follows_from_the_message(report: Report, tmp_path: Path) -> None:
    refuse_or_solve(report, tmp_path)


@pytest.mark.parametrize("report", [NEWER[2], NEWER[11], NEWER[20], REPORTS[3]], ids=lambda report: report.url)
def test_fix_with_a_message(report: Report, tmp_path: Path) -> None:
    refuse_or_solve(report, tmp_path)


def refuse_or_solve(report: Report, folder: Path) -> None:
    """Check that ``fix`` with the message makes the model's file, or writes nothing."""
    path = report.build(folder)
    before = sorted(folder.rglob("*"))
    try:
        made = ckptfix.fix(path, error=report.message)
    except CkptfixError as error:
        assert report.outcome != "solved" and sorted(folder.rglob("*")) == before and error.message
    else:
        assert made.steps and (report.outcome != "solved" or shapes_of(str(made.dest)) == dict(report.want or {}))
