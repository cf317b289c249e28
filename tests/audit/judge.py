"""The judge of the weight audit of one command: what a file held, what its output holds, and what the command said.

Each tensor of the input is in the output unchanged; or left out by request or by the verb's definition, and listed
(exit 0); or lost, and then named, and the exit code is 3. `judge` gives a sentence for every breach, and none for a
command that kept it.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from audit.truth import Truth, Unreadable, tensors
from click.testing import CliRunner
from file_commands import IN, WEIGHTS, WEIGHTS_AT, WEIGHTS_LIKE, Use, forms

from ckptfix.cli import commands

__all__ = ["BY_AT", "COMMANDS", "TO_TRUTH", "Command", "Outcome", "breaches", "carry_out", "judge"]


SHOWN = 4
"""Breaches of one command that are reported."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command line without its files.

    Attributes:
        line: the verb, and its options behind its files.
        part: the verb takes a part of the file, by its definition or by request; the rest is to be listed.
        arrays: numpy arrays may become tensors.
        ties: what a torch file keeps of ties: ``"storages"``, or ``"places"`` where a storage may be cut in parts.
        codes: exit codes that it may end with, beside 2 (refused, and nothing is written).
    """

    line: tuple[str, ...]
    part: bool = False
    arrays: bool = False
    ties: str = ""
    codes: frozenset[int] = frozenset({0, 3})

    def __str__(self) -> str:
        return " ".join(self.line)


def _commands(use: Use) -> tuple[Command, ...]:
    return tuple(
        Command((form.words[0], *form.words[3:]), form.part, form.arrays, form.ties) for form in forms(use).values()
    )


COMMANDS = _commands(WEIGHTS)
"""Every writing verb. ``{in}`` stands for the file itself."""

BY_AT = _commands(WEIGHTS_AT)
"""The same with the address of every state dict."""

(TO_TRUTH,) = _commands(WEIGHTS_LIKE)
"""The same with a file of the keys that the model should have."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command did."""

    code: int
    said: dict[str, Any]
    crash: str


def carry_out(line: Sequence[str], source: Path, dest: Path) -> Outcome:
    """Run it in this process; what it printed as JSON."""
    options = [word.replace(IN, str(source)) for word in line[1:]]
    result = CliRunner().invoke(commands, [line[0], "--json", str(source), str(dest), *options])
    crash = ""
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        crash = f"{type(result.exception).__name__}: {result.exception}"
    try:
        said: dict[str, Any] = json.loads(result.stdout) if result.stdout.strip() else {}
    except ValueError:
        said, crash = {}, crash or f"no JSON: {result.stdout[:200]!r}"
    message = str(said.get("error", {}).get("message", ""))
    if "a bug in ckptfix" in message or "Traceback" in result.stderr:
        crash = crash or message or result.stderr[-300:]
    return Outcome(result.exit_code, said, crash)


def breaches(command: Command, source: Path, folder: Path, before: Callable[[], Truth], last: str = "") -> list[str]:
    """Carry `command` out on `source` in the empty `folder`, and judge it.

    Args:
        before: the tensors of `source`; asked for only if something was written that is not a copy of it.
        last: what ends the command line: an address, or a file.
    """
    dest = folder / "out"
    done = carry_out([last if word in ("{at}", "{truth}") else word for word in command.line], source, dest)
    left = sorted(path.name for path in folder.iterdir())
    try:
        found = list(_breaches(command, done, source, dest, left, before))
    finally:
        if dest.is_dir():
            shutil.rmtree(dest)
        dest.unlink(missing_ok=True)
    return found if len(found) <= SHOWN else [*found[:SHOWN], f"and {len(found) - SHOWN} more"]


def _breaches(
    command: Command, done: Outcome, source: Path, dest: Path, left: list[str], before: Callable[[], Truth]
) -> Iterator[str]:
    if done.crash:
        yield f"crashed: {done.crash}"
        return
    if done.code == 2:
        if left:
            yield f"refused, and left {left}"
        return
    if done.code not in command.codes:
        yield f"exit code {done.code}"
    if left != [dest.name]:
        yield f"exit code {done.code}, and the folder holds {left}"
        return
    if source.is_file() and dest.read_bytes() == source.read_bytes():
        return  # whatever it holds, a copy holds too
    try:
        truth = before()
    except Unreadable as error:
        yield f"made an output of what torch cannot read: {error}"
        return
    try:
        after = tensors(dest, trusted=True)
    except Unreadable as error:
        yield f"torch cannot read the output: {error}"
        return
    if is_program(source):
        # What is read of a program is its state dict; lists in its modules name the same tensors again.
        command = replace(command, part=True, ties="")
    if any(str(line).startswith("input: a whole module") for line in done.said.get("summary", ())):
        # An edit of a module is one of its state dict; the rest is to be listed, in the account too.
        command = replace(command, part=True, ties="")
        behind = {row["where"] for row in done.said["findings"] if row["id"] == "left-behind"}
        if behind - {*done.said["account"]["left_behind"], *done.said.get("left_behind", ())}:
            yield f"not in the account: {', '.join(sorted(behind))}"
    yield from judge(command, truth, after, done)


def is_program(path: Path) -> bool:
    """Return whether this is TorchScript or an exported program."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.rpartition("/")[2] in ("constants.pkl", "archive_format") for name in archive.namelist())


def judge(command: Command, before: Truth, after: Truth, done: Outcome) -> Iterator[str]:
    """Every breach between two readings of torch."""
    missing = (before.apart if command.part else before.leaves) - after.leaves
    lost, listed = names(done.said)
    at = str(done.said.get("at") or "") if command.part else ""
    for leaf, count in sorted(missing.items()):
        addresses = before.addresses(leaf)
        asked = sum(command.part and named(address, listed, "") for address in addresses)
        told = sum(any(named(one, lost, at) for one in before.listed_as(address, addresses)) for address in addresses)
        if asked >= count:
            continue
        if not told and not asked:
            yield f"lost without a word (exit {done.code}): {count} x {leaf}, of {', '.join(addresses[:4])}"
        elif told + asked < count:
            yield f"lost {count} x {leaf}, only {told + asked} named, of {', '.join(addresses[:4])}"
        elif done.code != 3:
            yield f"lost and named, and the exit code is {done.code}: {leaf}, of {', '.join(addresses[:4])}"
    taken = [(name, leaf) for name, leaf in before.under(at) if command.part and "at" in done.said]
    here = after.leaves
    for address, leaf in taken:
        direct = "/" not in address.removeprefix(f"{at}/" if at else "")
        # --ema gives a plain model's state dict: the counter of the average is left behind by its definition.
        if direct and not here[leaf] and not named(address, {*lost, *(listed if "--ema" in str(command) else ())}, at):
            yield f"not taken of the state dict at {at!r}: {address}"
    extra = after.leaves - before.leaves
    if extra.total() and not (command.arrays and extra.total() <= before.arrays):
        shown = ", ".join(f"{leaf} at {', '.join(after.addresses(leaf)[:2])}" for leaf in sorted(extra)[:3])
        yield f"{extra.total()} tensors that the input has not: {shown}"
    held = dict(after.found)
    if not missing and not extra and not command.part:
        if before.ordered and after.ordered:
            moved = [was[0] for was, now in zip(before.found, after.found, strict=True) if was[1] != now[1]]
        elif command.line[0] != "match":
            moved = [address for address, leaf in before.found if held.get(address, leaf) != leaf]
        else:
            moved = []
        if moved:
            yield f"{len(moved)} tensors have changed places: {', '.join(moved[:4])}"
    for address, leaf in taken:
        key = address.removeprefix(f"{at}/" if at else "")
        if held.get(key, leaf) != leaf:
            yield f"another tensor goes by its name: {address}"
    if command.ties and not missing and done.said.get("output_format") != "safetensors":
        was, became = (
            (before.storages, after.storages) if command.ties == "storages" else (before.distinct, after.distinct)
        )
        if was != became:
            yield f"{was} {command.ties} became {became}"


def names(said: dict[str, Any]) -> tuple[set[str], set[str]]:
    """(what the result names as lost or noticed, what it lists as left out by request or definition)."""
    listed = {str(name) for name in said.get("left_behind", ())}
    lost: set[str] = set()
    for row in said.get("dropped", ()):
        (listed if row["asked"] else lost).add(str(row["at"]))
    lost |= {str(name) for name in said.get("lost", ())} | {str(row["name"]) for row in said.get("losses", ())}
    for row in said.get("findings", ()):
        (listed if row["severity"] == "info" else lost).add(str(row["where"]))
    return lost - {""}, listed - {""}


def named(address: str, told: set[str], at: str) -> bool:
    """Whether one of the names is the address, holds it, or is its key in the mapping at `at`."""
    for name in told:
        for full in (name, f"{at}/{name}") if at else (name,):
            for form in (_parts, _plain, _with_slots):
                first = form(full)
                if first and form(address)[: len(first)] == first:
                    return True
    return False


def _parts(address: str) -> list[str]:
    return (address.rpartition(":")[0] if address.endswith(PARTS) else address).split("/")


def _plain(address: str) -> list[str]:
    """The same without what an object was called with and its state, which have no name that both sides would give."""
    return [part for part in _parts(address) if part not in ("()", "state", "()state")]


def _with_slots(address: str) -> list[str]:
    """The same, of an object whose state is a pair: its attributes, and what is in its slots."""
    parts = _parts(address)
    rows = zip(["", *parts], parts, strict=False)
    return [part for before, part in rows if part != "()state" and (before != "()state" or part not in ("0", "1"))]


PARTS = (":indices", ":values", ":scales", ":zero_points", ":crow", ":col", ":ccol", ":row", ":0", ":1")
"""What `truth` adds to the address of a tensor for its dense parts."""
