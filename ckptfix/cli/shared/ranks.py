"""A command under torchrun or srun: several processes run one command, with one result and one exit code.

If a command writes a folder, the ranks share its files; otherwise rank 0 works alone. Rank 0 shows the result; an error
is shown by the first rank that has it. torch is imported only if several ranks write.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import click

from ckptfix import platform
from ckptfix.cli.shared.console import Console
from ckptfix.cli.shared.exits import TROUBLE, describe
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError
from ckptfix.extras import need_torch
from ckptfix.io.folders import remove_abandoned
from ckptfix.io.ranks import AGAIN, POLL, RankFailed, Team, Watching, joined
from ckptfix.platform import Stopped

SWITCH = "CKPTFIX_RANKS"
"""Environment variable: ``slurm`` uses Slurm's ranks; ``on`` and ``off`` control torchrun's."""

TIMEOUT = "CKPTFIX_RANKS_TIMEOUT"
"""Environment variable: seconds of silence after which a rank counts as dead; 60 by default."""

_NOT_A_RANK = f"if one process of a larger job runs this command, set {SWITCH}=off"


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a job: the rank of this process, their number, and the address where they meet."""

    rank: int
    size: int
    host: str
    port: int


def world(environment: Mapping[str, str] | None = None) -> World | None:
    """Return the ranks that a launcher started; None for a single process.

    A program that runs under torchrun and calls ckptfix passes on its variables; such a process counts as single.

    Raises:
        click.UsageError: ranks are asked for, but their meeting address is unknown.
    """
    values = os.environ if environment is None else environment
    switch = values.get(SWITCH, "")
    if switch not in ("", "on", "off", "slurm"):
        raise click.UsageError(f"{SWITCH}={switch}: use slurm, on or off.")
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
            raise click.UsageError(f"{SWITCH}=on: set MASTER_ADDR and MASTER_PORT, the address where ranks meet.")
    return World(rank, size, host, port) if size > 1 and 0 <= rank < size else None


def _nested() -> bool:
    """Return whether the process that started this one is a rank itself."""
    with contextlib.suppress(OSError):
        return any(value.startswith(b"RANK=") for value in platform.environment_of_parent())
    return False


def among(ctx: click.Context, console: Console, one: bool, work: Callable[[], int]) -> int:
    """Run a command, together with the other ranks if there are any; `one` means that it has one input."""
    here = world()
    if here is None:
        return work()
    looks = "dest" not in ctx.params or any(ctx.params.get(name) for name in ("in_place", "dry_run", "check_only"))
    return with_ranks(console, here, looks or not one, work)


def with_ranks(console: Console, here: World, alone: bool, work: Callable[[], int]) -> int:
    """Run a command together with the other ranks; the exit code is the same for all.

    Args:
        alone: the command does not write a folder from one input: rank 0 runs it, and the others leave.
    """
    console.silent = here.rank > 0
    if alone:
        if here.rank:
            return 0
        console.note(f"{here.size} ranks: rank 0 works alone")
        return work()
    team = _meet(here)
    try:
        _wait_for_all(team)
        with joined(team):
            code = work()
        team.say(f"code/{here.rank}", str(code))
        if team.rank == 0 and team.said("begun") is None:
            console.note(f"{here.size} ranks: rank 0 wrote the output alone, as it is one file")
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
    """Handle the failure of this rank: all ranks fail, unless rank 0 finished without it."""
    if team.rank and team.said("begun") is None and isinstance(error, Exception):
        # The output may be one file, which rank 0 writes alone and has finished by now.
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
        # A launcher stops the other ranks when one is killed: report that, once.
        gone = team.gone or team.stop()
        remove_abandoned(team)
        if gone and isinstance(error, Stopped) and error.number != signal.SIGINT:
            console.silent = not team.first("told")
            console.note(team.lost(min(gone)).message, "damage")
            console.note(f"hint: {AGAIN}")
            console.silent = True
    raise error


def _meet(here: World) -> Team:
    """Return the team of ranks.

    Raises:
        CkptfixError: the address where the ranks meet cannot be reached.
    """
    need_torch("writing with several ranks")
    from torch.distributed.rendezvous import rendezvous

    seconds = float(os.environ.get(TIMEOUT) or 60)
    url = f"env://?rank={here.rank}&world_size={here.size}"
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = here.host, str(here.port)
    try:
        meeting: Any = rendezvous(url, timeout=timedelta(seconds=seconds))
        store, _, _ = next(meeting)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return Team(store, here.rank, here.size, seconds, attempt)
    except (RuntimeError, OSError, ValueError) as error:
        message = f"rank {here.rank} of {here.size} cannot meet the others at {here.host}:{here.port}"
        raise CkptfixError(f"{message}: {str(error).splitlines()[0]}", hint=_NOT_A_RANK) from None


def _wait_for_all(team: Team) -> None:
    """Wait until all ranks have arrived.

    Raises:
        CkptfixError: some ranks do not arrive.
    """
    try:
        team.say(f"here/{team.rank}")
        team.all_said("here")
    except RankFailed as error:
        raise CkptfixError(error.message, hint=_NOT_A_RANK) from None
