"""A command that some names of inputs end in odd ways; processes import it, and nothing more."""

from __future__ import annotations

import os
import signal
import time

import click


def odd(name: str) -> int:
    """Return 1 for ``one``, else 0; unless it fails, is killed, or takes its time."""
    if name == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "fault":
        raise KeyError(name)
    if name == "slow":
        time.sleep(0.3)
    return int(name == "one")


command = click.Command("odd", callback=odd)
