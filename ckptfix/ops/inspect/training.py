"""Training progress that a trainer saved: epoch, step, learning rate, the best score."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

from ckptfix.errors import CkptfixError
from ckptfix.io.source import open_source
from ckptfix.names import kinds
from ckptfix.urls import as_path

_LR = re.compile(r"(?:.*/)?param_groups/\d+/lr")

_STATE = "trainer_state.json"
"""File in which transformers' Trainer keeps it, beside the model."""

MOST_STATE = 1 << 24
"""Greatest size of such a file that is read, in bytes."""

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


def beside(folder: str) -> dict[str, object]:
    """Return the progress that transformers' Trainer saved in `folder`; empty if the file is missing or unreadable."""
    path = as_path(folder, _STATE)
    try:
        with open_source(path) as source:
            if source.size > MOST_STATE:
                return {}
            state = json.loads(source.read(0, source.size))
    except (CkptfixError, OSError, ValueError, RecursionError):
        return {}
    if not isinstance(state, dict):
        return {}
    kept = ((name, state.get(name)) for name in ("epoch", "global_step", "best_metric"))
    return {name: value for name, value in kept if type(value) in (int, float)}


def shown(training: Mapping[str, object]) -> str:
    """Format the progress in one line: ``epoch 560, iter 225,680, lr 0.0001``."""
    return ", ".join(f"{name} {_text(value)}" for name, value in training.items())


def _text(value: object) -> str:
    if isinstance(value, list):
        return " and ".join(map(_text, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}" if isinstance(value, float) else str(value)
