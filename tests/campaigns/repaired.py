"""What repair writes, looked at by doctor: it has no damage, is repaired no further, and keeps what can be kept.

Wrecks are mutants of good files and cuts of them. Of each that repair writes: doctor finds nothing that repair would
fix; a second repair keeps every tensor and loses none, and a third writes the same bytes as the second. Of the cuts of
one file, a longer one keeps at least what a shorter one keeps.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from campaigns.frame import report
from property.mutants import mutant, seeds

import ckptfix
from ckptfix.errors import CkptfixError

CUTS = 12
"""Of each file, beside its mutants."""


@dataclass
class Count:
    """How the wrecks ended, and what was wrong."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def cut(number: int) -> Iterator[tuple[str, bytes]]:
    """A file at several lengths, from short to long."""
    dice = random.Random(number)
    rows = seeds()
    name, data = rows[number % len(rows)]
    lengths = sorted(dice.sample(range(len(data)), min(CUTS - 1, len(data) - 1)))
    yield from ((f"{name} cut to {length}", data[:length]) for length in (*lengths, len(data)))


def repaired(folder: Path, what: str, data: bytes, count: Count) -> set[str]:
    """Repair one wreck and judge the output; the names that were kept."""
    path, out, again, third = (folder / name for name in ("in.pth", "out.pth", "again.pth", "third.pth"))
    path.write_bytes(data)
    for old in (out, again, third):
        old.unlink(missing_ok=True)
    try:
        first = ckptfix.repair(path, out)
    except CkptfixError:
        count.ends["refused"] += 1
        return set()
    count.ends[f"exit {first.exit_code}"] += 1
    diagnosis = ckptfix.doctor(out)
    # A finding is damage where the command that doctor proposes for it is another repair.
    damage = [finding for finding in diagnosis.findings if finding.fix and finding.fix.startswith("ckptfix repair")]
    if damage:
        count.wrong.append(f"{what}: doctor finds damage in what was repaired: {damage[0]}")
    try:
        second = ckptfix.repair(out, again)
        ckptfix.repair(again, third)
    except CkptfixError as error:
        count.wrong.append(f"{what}: what was repaired is refused: {error}")
        return set(first.kept)
    gone = tuple(f"{loss.name}/" for loss in first.losses)
    # What hung on a lost tensor and on another one too has that one's name now.
    named = {name for name in first.kept if not name.startswith(gone)}
    if second.exit_code or len(second.kept) != len(first.kept) or not named <= set(second.kept):
        count.wrong.append(f"{what}: a second repair keeps {len(second.kept)} of {len(first.kept)}: {second.losses}")
    if again.read_bytes() != third.read_bytes():
        count.wrong.append(f"{what}: a third repair writes other bytes than the second")
    return set(first.kept)


def run(folder: Path, mutants: range, files: range) -> Count:
    """Wrecks of `mutants`, by number, and of the cuts of `files`, by number."""
    count = Count()
    for number in mutants:
        repaired(folder, *mutant(number), count)
    for number in files:
        before: set[str] = set()
        for what, data in cut(number):
            kept = repaired(folder, what, data, count)
            if before - kept:
                count.wrong.append(f"{what}: a longer file keeps less: not {sorted(before - kept)[:3]}")
            before = kept
    return count


def main(folder: Path) -> int:
    """Print the row of the table; the number of faults that were found."""
    count = run(folder, range(1500), range(2 * len(seeds())))
    return report(f"T12  {sum(count.ends.values()):,} wrecks", (count.ends, count.wrong), 10)
