"""A folder in a store, written by several ranks: no file has its name before all are uploaded, and the index is last.

Each rank removes its own uploads when the work fails. The others remove the uploads of a rank that was killed: every
rank reports which uploads it begins, and which object is about to get its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Protocol

from ckptfix.checkpoint import OutputFile, Plan
from ckptfix.checkpoint.file_version import FileStat
from ckptfix.errors import CkptfixError
from ckptfix.io import background_checks
from ckptfix.io.durable import Undisturbed
from ckptfix.io.ranks import Team
from ckptfix.io.ranks.shares import digest, shares
from ckptfix.io.read import Progress
from ckptfix.io.remote.clients import writable
from ckptfix.io.remote.store import Trace
from ckptfix.io.sources import Sources

CLOCKS = timedelta(minutes=5)
"""The largest difference between the clock of a store and the local clock."""


class Write(Protocol):
    """A function that writes the files of a plan; `steps` are as in `Steps`."""

    def __call__(
        self, plan: Plan, sources: Sources, overwrite: bool, progress: Progress | None, steps: Steps, /
    ) -> bool: ...


class Steps:
    """Callbacks that are called while the files of a plan are written to a store; here they do nothing."""

    def began(self, trace: Trace) -> None:
        """Note that an upload has begun, or is about to get its name; the trace lets another process remove it."""

    def up(self) -> None:
        """Note that all bytes are uploaded, and no file has its name. An error raised here undoes everything."""

    def named(self) -> None:
        """Note that the files have their names. An error raised here undoes everything."""


class _Ranks(Steps):
    def __init__(self, team: Team, word: str) -> None:
        self._team, self._word = team, word
        self._count = 0

    def began(self, trace: Trace) -> None:
        self._team.say(f"{self._word}/began/{self._team.rank}/{self._count}", json.dumps(trace))
        self._count += 1

    def up(self) -> None:
        team = self._team
        team.say(f"{self._word}/up/{team.rank}")
        team.all_said(f"{self._word}/up")
        for rank in range(1, team.size) if team.rank == 0 else ():
            team.wait(f"{self._word}/named/{rank}", rank)

    def named(self) -> None:
        self._team.say(f"{self._word}/named/{self._team.rank}")
        self._team.wait(f"{self._word}/named/0")


def write_with(
    team: Team,
    plan: Plan,
    dest: str,
    overwrite: bool,
    inputs: Mapping[str, FileStat],
    progress: Progress | None,
    write: Write,
) -> None:
    """Write this rank's share of a folder, together with the other ranks."""
    word = team.folder()
    steps = _Ranks(team, word)
    quiet = Undisturbed()
    parts: list[Plan] = []

    try:
        team.agree(f"{word}/plan", digest(plan, dest, inputs))
        parts = shares(plan, team.size)
        parts[0] = replace(parts[0], files=(*parts[0].files, plan.files[-1]))
        share = parts[team.rank]
        if share.files:
            write(share, Sources(share, inputs), overwrite, team.checked(progress), steps)
        else:
            background_checks.run(share.checks)
            steps.up()
            steps.named()
    except BaseException as raised:
        with quiet:
            error = team.give_up(raised)
            if team.cleans() and parts:
                for rank in team.gone:
                    take_away(team, word, rank, parts[rank].files)
        raise error from error.__cause__


def _traces(team: Team, word: str, rank: int, files: Iterable[OutputFile]) -> Iterable[Trace]:
    """Yield the traces that a rank has reported, and those that the bucket lists where it reported no upload id.

    If the store of the ranks is gone, the bucket is asked about all `files`.
    """
    urls: dict[str, bool] = {}
    try:
        for number in count():
            text = team.said(f"{word}/began/{rank}/{number}")
            if text is None:
                break
            trace: Trace = json.loads(text)
            urls[str(trace["url"])] = trace["upload"] is None and trace["tag"] is None
            yield trace
    except CkptfixError:
        raise
    except Exception:
        urls = {file.path: True for file in files}
    since = datetime.fromtimestamp(team.began, UTC) - CLOCKS
    for url, unknown in urls.items():
        if unknown:
            with suppress(CkptfixError):
                yield from writable(url).begun(url, since)


def take_away(team: Team, word: str, rank: int, files: Iterable[OutputFile] = ()) -> None:
    """Remove the uploads and objects of a rank that is gone."""
    for trace in _traces(team, word, rank, files):
        with suppress(CkptfixError):
            writable(str(trace["url"])).take_away(trace)
