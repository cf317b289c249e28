"""A command under torchrun or srun: one command of several processes, with one result and one exit code.

A command that writes a folder shares its files out; rank 0 alone does any other. Rank 0 shows the result; of an error,
the rank that has it first. torch is imported only where several ranks write.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from ckptfix.cli.shared.console import Console
from ckptfix.cli.shared.exits import TROUBLE, Stopped, describe
from ckptfix.errors import CkptfixError
from ckptfix.extras import need_torch
from ckptfix.io.ranks import AGAIN, POLL, RankFailed, Team, Watching, joined

SWITCH = "CKPTFIX_RANKS"
"""Environment variable: ``slurm`` takes Slurm's ranks, ``on`` and ``off`` are about torchrun's."""

TIMEOUT = "CKPTFIX_RANKS_TIMEOUT"
"""Environment variable: seconds of silence after which a rank is taken for dead; 60 by default."""


ALONE = "ckptfix.alone"
"""Key of a context's meta: this process works for itself, whatever ranks its environment speaks of."""


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a job: this one, how many, and where they meet."""

    rank: int
    size: int
    host: str
    port: int


def world(environment: Mapping[str, str] | None = None) -> World | None:
    """The ranks that a launcher has started; None for a process alone.

    A program that runs under torchrun and calls ckptfix passes its variables on: such a process is alone.

    Raises:
        click.UsageError: ranks are asked for, and it cannot be said where they meet.
    """
    values = os.environ if environment is None else environment
    switch = values.get(SWITCH, "")
    if switch not in ("", "on", "off", "slurm"):
        raise click.UsageError(f"{SWITCH}={switch}: it is slurm, on or off.")
    if switch == "off":
        return None

    def number(name: str) -> int:
        text = values.get(name, "")
        return int(text) if text.isdecimal() else -1

    if switch == "slurm":
        rank, size = number("SLURM_PROCID"), number("SLURM_NTASKS")
        host = values.get("MASTER_ADDR") or values.get("SLURM_LAUNCH_NODE_IPADDR") or values.get("SLURMD_NODENAME", "")
        port = number("MASTER_PORT") if number("MASTER_PORT") > 0 else 20000 + number("SLURM_JOB_ID") % 20000
        if size > 1 and not host:
            raise click.UsageError(f"{SWITCH}=slurm: set MASTER_ADDR to the node of task 0.")
    else:
        rank, size = number("RANK"), number("WORLD_SIZE")
        host, port = values.get("MASTER_ADDR", ""), number("MASTER_PORT")
        if switch != "on" and (not host or port < 0 or _nested()):
            return None
        if size > 1 and (not host or port < 0):
            raise click.UsageError(f"{SWITCH}=on: MASTER_ADDR and MASTER_PORT say where ranks meet, and are not set.")
    return World(rank, size, host, port) if size > 1 and 0 <= rank < size else None


def _nested() -> bool:
    """Whether the process that started this one is a rank itself."""
    with contextlib.suppress(OSError):
        values = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        return any(value.startswith(b"RANK=") for value in values)
    return False


def among(ctx: click.Context, console: Console, one: bool, work: Callable[[], int]) -> int:
    """Do a command, with the other ranks where there are some; `one` says that it has one input."""
    here = None if ctx.meta.get(ALONE) else world()
    if here is None:
        return work()
    looks = "dest" not in ctx.params or any(ctx.params.get(name) for name in ("in_place", "dry_run", "check_only"))
    return with_ranks(console, here, looks or not one, work)


def with_ranks(console: Console, here: World, alone: bool, work: Callable[[], int]) -> int:
    """Do a command with the other ranks; the exit code is the same for all.

    Args:
        alone: it writes no folder of one input: rank 0 does it, and the others leave.
    """
    console.silent = here.rank > 0
    if alone:
        if here.rank:
            return 0
        console.note(f"{here.size} ranks: rank 0 does it alone")
        return work()
    team = _team(here)
    try:
        with joined(team):
            code = work()
        team.say(f"code/{here.rank}", str(code))
        if team.rank == 0 and team.said("begun") is None:
            console.note(f"{here.size} ranks: the output is one file, which rank 0 has written alone")
        return code
    except Watching:
        return int(team.wait("code/0"))
    except RankFailed as error:
        console.silent = error.said or not team.first("told")
        raise
    except BaseException as error:
        return _failed(console, team, error)
    finally:
        team.end()


def _failed(console: Console, team: Team, error: BaseException) -> int:
    """This rank has failed: all do, unless rank 0 did without it."""
    if team.rank and team.said("begun") is None and isinstance(error, Exception):
        # The output may be a file that rank 0 writes alone, and has written by now.
        while team.said("begun") is None:
            with contextlib.suppress(RankFailed):
                if (code := team.said("code/0")) is not None:
                    return int(code)
                team.check()
                team.listen(0)
                time.sleep(POLL)
                continue
            break
    if isinstance(error, Exception):
        known = describe(error)
        team.fail(str(known["message"]), said=True)
        team.say(f"code/{team.rank}", str(TROUBLE))
        console.silent = not team.first("told")
        if isinstance(error, CkptfixError) and team.rank:
            error.message = f"rank {team.rank} of {team.size}: {error.message}"
    else:
        team.fail("stopped", said=True)
        # A launcher stops the others when a rank is killed: then that is what has to be said, once.
        gone = team.gone or team.stop()
        if gone and isinstance(error, Stopped) and error.number != signal.SIGINT:
            console.silent = not team.first("told")
            console.note(team.lost(min(gone)).message, "damage")
            console.note(f"hint: {AGAIN}")
            console.silent = True
    raise error


def _team(here: World) -> Team:
    """The ranks, when all are here.

    Raises:
        CkptfixError: some do not come.
    """
    need_torch("writing with several ranks")
    from torch.distributed.rendezvous import rendezvous

    seconds = float(os.environ.get(TIMEOUT) or 60)
    hint = f"is this the command of one process in a job of several? {SWITCH}=off says so"
    url = f"env://?rank={here.rank}&world_size={here.size}"
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = here.host, str(here.port)
    try:
        meeting: Any = rendezvous(url, timeout=timedelta(seconds=seconds))
        store, _, _ = next(meeting)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        team = Team(store, here.rank, here.size, seconds, attempt)
    except (RuntimeError, OSError, ValueError) as error:
        message = f"rank {here.rank} of {here.size} cannot meet the others at {here.host}:{here.port}"
        raise CkptfixError(f"{message}: {str(error).splitlines()[0]}", hint=hint) from None
    try:
        team.say(f"here/{here.rank}")
        team.all_said("here")
    except RankFailed as error:
        team.end()
        raise CkptfixError(error.message, hint=hint) from None
    return team
