"""The report on a run folder: the state of each of its checkpoints, and the one to resume from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any, Literal

from ckptfix.dataclass import dataclass
from ckptfix.errors import printable
from ckptfix.findings.row import Finding
from ckptfix.words import size as sized
from ckptfix.words import some

RunState = Literal["whole", "usable", "weights", "broken", "unfinished"]
"""``"usable"``: resuming works, with a warning. ``"weights"``: there is a model, and no optimizer."""

NAMED = 3
"""Number of broken checkpoints that the first sentence names."""


@dataclass(frozen=True, slots=True)
class RunTrouble:
    """Something that is wrong with a checkpoint of a run.

    Attributes:
        finding: the finding.
        brief: the same in a few words that follow the name of the checkpoint: ``"lacks its optimizer"``.
    """

    finding: Finding
    brief: str


@dataclass(frozen=True, slots=True)
class PartState:
    """A part of a checkpoint of a run.

    Attributes:
        what: its name.
        files: its paths in the folder of the checkpoint; empty where the file of the checkpoint holds it.
        state: whether it is there.
    """

    what: str
    files: tuple[str, ...]
    state: Literal["whole", "damaged", "missing"]


@dataclass(frozen=True, slots=True)
class JudgedCheckpoint:
    """A checkpoint of a run, as doctor found it.

    Attributes:
        name: its name in the folder of the run.
        path: its path.
        step, epoch, loss: the progress of the training; None where nothing records it.
        size: bytes of its files.
        state: whether it can be resumed from.
        parts: what resuming needs.
        troubles: what is wrong with it, the most serious first.
    """

    name: str
    path: str
    step: int | None
    epoch: float | None
    loss: float | None
    size: int
    state: RunState
    parts: tuple[PartState, ...] = ()
    troubles: tuple[RunTrouble, ...] = field(default=(), repr=False)

    @property
    def brief(self) -> str:
        """The most serious trouble in a few words; empty for a whole checkpoint."""
        return self.troubles[0].brief if self.troubles else ""

    def as_dict(self) -> dict[str, Any]:
        """Return the checkpoint as a JSON object."""
        return {
            "name": self.name,
            "path": self.path,
            "step": self.step,
            "epoch": self.epoch,
            "loss": self.loss,
            "size": self.size,
            "state": self.state,
            "reason": self.brief or None,
            "parts": [{"what": row.what, "files": list(row.files), "state": row.state} for row in self.parts],
        }


@dataclass(frozen=True, slots=True)
class RunReport:
    """The state of a run.

    Attributes:
        layout: the name of the layout.
        library: the library that writes it.
        folder: the folder of the checkpoints.
        checkpoints: all of them, the oldest first.
        resume: the newest checkpoint that can be resumed from; None if no checkpoint can.
        how: how the library resumes from it; None without one.
        latest: path of the file that names the newest checkpoint -> its text.
    """

    layout: str
    library: str
    folder: str
    checkpoints: tuple[JudgedCheckpoint, ...]
    resume: JudgedCheckpoint | None
    how: str | None
    latest: tuple[tuple[str, str], ...] = ()

    @property
    def sentence(self) -> str:
        """The checkpoint to resume from, and what is wrong with others; the newest come first."""
        if self.resume is None:
            head = "no checkpoint can be resumed from"
        else:
            step, epoch = self.resume.step, self.resume.epoch
            at = f" (step {step:,})" if step is not None else f" (epoch {epoch:g})" if epoch is not None else ""
            partly = {"weights": ", which has only weights", "usable": f", which {self.resume.brief}"}
            head = f"resume from {self.resume.name}{at}{partly.get(self.resume.state, '')}"
        broken = [one for one in reversed(self.checkpoints) if one.state in ("broken", "unfinished")]
        said = [f"{one.name} {one.brief}" for one in broken[:NAMED]]
        said += [f"{len(broken) - NAMED:,} more cannot be resumed from"] if len(broken) > NAMED else []
        return printable("; ".join([head, *said]))

    def table(self) -> list[str]:
        """Return one line for each checkpoint, with step, epoch, loss, size and state, under a line of headers."""
        rows = [("checkpoint", "step", "epoch", "loss", "size", "state")]
        for one in self.checkpoints:
            step = "" if one.step is None else f"{one.step:,}"
            epoch, loss = ("" if value is None else f"{value:.4g}" for value in (one.epoch, one.loss))
            why = some([row.brief for row in one.troubles], 2)
            state = f"{one.state}: {why}" if why else one.state
            rows.append((printable(one.name), step, epoch, loss, sized(one.size), printable(state)))
        kept = [column for column in range(6) if column in (0, 5) or any(row[column] for row in rows[1:])]
        widths = {column: max(len(row[column]) for row in rows) for column in kept}
        return [_line(row, kept, widths) for row in rows]

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            "layout": self.layout,
            "library": self.library,
            "folder": self.folder,
            "resume": None if self.resume is None else self.resume.path,
            "step": None if self.resume is None else self.resume.step,
            "how": self.how,
            "latest": [{"path": path, "text": text} for path, text in self.latest],
            "checkpoints": [one.as_dict() for one in self.checkpoints],
        }


def _line(row: Sequence[str], kept: Sequence[int], widths: dict[int, int]) -> str:
    sides = {column: ">" if 0 < column < 5 else "<" for column in kept}
    return "  ".join(f"{row[column]:{sides[column]}{widths[column]}}" for column in kept).rstrip()
