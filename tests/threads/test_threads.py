"""The first command that doctor prints for a pasted message, on files rebuilt from public threads."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from threads.threads import HELD_OUT, THREADS, Thread

import ckptfix
from ckptfix.findings.message_names import listed
from ckptfix.ops.chain import function_of
from ckptfix.ops.doctor.report import Diagnosis


def diagnosed(thread: Thread, folder: Path) -> Diagnosis:
    state = {name: torch.zeros(shape) for name, shape in thread.file.items()}
    path = folder / "model.pth"
    torch.save({thread.at: state} if thread.at else state, path)
    return ckptfix.doctor(path, error=thread.message)


def outcome(thread: Thread, done: Diagnosis) -> str:
    """Return ``solved`` if the printed commands give the keys and shapes of the model, else what was said."""
    cause = done.cause
    chain = done.chain
    if not chain:
        return "nothing" if cause is None else f"said:{cause.id}"
    for line in chain:
        function_of(line.step.command)(line.source, line.dest, **line.step.keywords())
    made = torch.load(chain[-1].dest, weights_only=True)
    made = made[thread.at] if thread.at else made
    shapes = {name: tuple(tensor.shape) for name, tensor in made.items()}
    return "solved" if shapes == dict(thread.want) else f"command: {sorted(shapes.items() ^ dict(thread.want).items())}"


@pytest.mark.parametrize("thread", (*THREADS, *HELD_OUT), ids=lambda thread: thread.url)
def test_the_first_command_of_a_thread(thread: Thread, tmp_path: Path) -> None:
    assert listed(thread.message) is not None
    done = diagnosed(thread, tmp_path)
    said = str(done)
    assert outcome(thread, done) == thread.outcome
    components = {part for name in thread.file for part in name.split(".")}
    assert "module" in components or "`module.`" not in said


def test_most_threads_are_solved() -> None:
    for rows in (THREADS, HELD_OUT):
        counts = Counter(row.outcome == "solved" for row in rows)
        assert counts[True] >= 0.6 * len(rows)
