"""A command that some names of inputs end in odd ways; processes import it, and nothing more."""

from __future__ import annotations

import os
import signal
import time
from unittest import mock

from ckptfix.cli.shared import one_job
from ckptfix.runner.jobs import Job, Outcome


def odd(name: str) -> int:
    """Return 1 for ``one``, else 0; unless it fails, is killed, or takes its time."""
    if name == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "fault":
        raise KeyError(name)
    if name == "slow":
        time.sleep(0.3)
    return int(name == "one")


def perform(job: Job, step: one_job.Step | None = None) -> Outcome:
    """Do a job of this command, whatever the name of its command is."""
    with mock.patch.object(one_job, "callback_of", lambda name: odd):
        return one_job.perform(job, step)
