"""Training progress that a trainer saved: epoch, step, learning rate, the best score."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ckptfix.errors import CkptfixError
from ckptfix.io.source import open_source
from ckptfix.names import kinds
from ckptfix.urls import as_path

_LR = re.compile(r"(?:.*/)?param_groups/\d+/lr")

_STATE = "trainer_state.json"
"""File in which transformers' Trainer keeps it, beside the model."""

MOST_STATE = 1 << 26
"""Greatest size of such a file that is read, in bytes; it has a row for each step that was logged."""

MOST = 12


def training_of(values: Iterable[tuple[str, object]]) -> dict[str, object]:
    """Map addresses to the numbers and texts that record training progress.

    ``lr`` has the learning rate of each parameter group.

    Args:
        values: (address, value) of everything in a checkpoint except tensors.
    """
    found: dict[str, object] = {}
    rates: dict[object, None] = {}
    for address, value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            continue
        if _LR.fullmatch(address):
            rates.setdefault(value)
            continue
        above, _, key = address.rpartition("/")
        if "/" in above or kinds.of_key(above) not in (None, "training state"):
            continue
        if _is_state(key, value) and len(found) < MOST:
            found[address] = value
    if rates:
        found["lr"] = list(rates)[:MOST]
    return found


def _is_state(key: str, value: float | str) -> bool:
    if isinstance(value, str):
        return key == "arch" and len(value) <= 60
    return kinds.is_progress(key)


class Progress(NamedTuple):
    """The progress of a training when it saved; None where the checkpoint does not record it.

    Attributes:
        step: number of updates.
        epoch: may have a fraction.
        loss: the last loss that was logged.
    """

    step: int | None = None
    epoch: float | None = None
    loss: float | None = None


_STEPS = ("global_step", "global_steps", "iteration", "iter", "step", "steps")
_EPOCHS = ("epoch", "epochs", "current_epoch")
_LOSSES = ("loss", "train_loss", "val_loss", "best_loss", "best_val_loss")
"""The last component of addresses, the most telling first."""


def progress_of(training: Mapping[str, object]) -> Progress:
    """Return step, epoch and loss from numbers by address, or from the state of transformers' Trainer."""
    last: dict[str, object] = {}
    for address, value in training.items():
        last.setdefault(address.rpartition("/")[2], value)
    steps = (_number(last.get(key)) for key in _STEPS)
    step = next((int(value) for value in steps if value is not None and value % 1 == 0), None)
    epoch = next((value for key in _EPOCHS if (value := _number(last.get(key))) is not None), None)
    history = training.get("log_history")
    logged = [row.get("loss") for row in history if isinstance(row, dict)] if isinstance(history, list) else []
    losses = (_number(value) for value in (*reversed(logged), *(last.get(key) for key in _LOSSES)))
    return Progress(step, epoch, next((value for value in losses if value is not None), None))


def _number(value: object) -> float | None:
    """Return a number that a counter or a loss may have; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) < 1e18 else None


def json_object(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if it cannot be read, is too large, or is not an object."""
    try:
        with open_source(path) as source:
            if source.size > MOST_STATE:
                return None
            state = json.loads(source.read(0, source.size))
    except (CkptfixError, OSError, ValueError, RecursionError):
        return None
    return state if isinstance(state, dict) else None


def state_beside(folder: str) -> dict[str, Any]:
    """Return all that transformers' Trainer saved about its progress in `folder`; empty where it saved nothing."""
    return json_object(as_path(folder, _STATE)) or {}


def beside(folder: str) -> dict[str, object]:
    """Return the progress that transformers' Trainer saved in `folder`; empty if the file is missing or unreadable."""
    state = state_beside(folder)
    kept = ((name, state.get(name)) for name in ("epoch", "global_step", "best_metric"))
    return {name: value for name, value in kept if type(value) in (int, float)}


def shown(training: Mapping[str, object]) -> str:
    """Format the progress in one line: ``epoch 560, iter 225,680, lr 0.0001``."""
    return ", ".join(f"{name} {_text(value)}" for name, value in training.items())


def _text(value: object) -> str:
    if isinstance(value, list):
        return " and ".join(map(_text, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if isinstance(value, float) else str(value)
