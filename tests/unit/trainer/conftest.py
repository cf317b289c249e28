"""Training in the tests: on one thread, and quietly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ckptfix.trainer import Training, TrainingJob, run


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """The models are too small to share out: on a busy machine their threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def quiet(line: str) -> None:
    pass


def trained(**job: Any) -> Training:
    return run(TrainingJob(**{"log": quiet, **job}))
