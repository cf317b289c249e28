"""What ``match`` answers on random models: right, wrong or refused, and how many certain pairs are wrong.

    python -m campaigns.match_answers [--count 100000] [--from N] [--workers 2] [--names mixed]

A complete answer must be the true one. Of a refused answer, `--partial` writes the certain pairs: a wrong one among
them counts too. With ``--names mixed``, some parts of every model have words that say nothing, on each side others: the
hardest for what is left over, and answered least.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from campaigns.match_models import NAMED, pair

from ckptfix.align.match import match

COUNT = 100_000
STEP = 100


@dataclass(slots=True)
class Answers:
    """How the models of some seeds were answered; `wrong` and `slips` are seeds.

    Attributes:
        ends: models by how they were answered.
        pairs: certain pairs, right or wrong.
        wrong: complete answers that are not the true one.
        slips: refused answers with a wrong pair among the certain ones.
    """

    ends: Counter[str] = field(default_factory=Counter)
    pairs: Counter[bool] = field(default_factory=Counter)
    wrong: list[int] = field(default_factory=list)
    slips: list[int] = field(default_factory=list)

    def add(self, other: Answers) -> None:
        self.ends += other.ends
        self.pairs += other.pairs
        self.wrong += other.wrong
        self.slips += other.slips

    def __str__(self) -> str:
        ends = " / ".join(f"{self.ends[end]:,}" for end in ("right", "wrong", "refused"))
        pairs = f"{self.pairs[True]:,} right, {self.pairs[False]:,} wrong"
        return (
            f"{sum(self.ends.values()):,} models  right / wrong / refused: {ends}  "
            f"certain pairs: {pairs}, in {len(self.slips):,} refused answers"
        )


def answered(seeds: Iterable[int], names: str = "") -> Answers:
    """The answers for the models of these seeds, with parts called as `match_models.NAMED` has it."""
    found = Answers()
    for seed in seeds:
        one, other = pair(seed, names)
        ours, theirs = ({slot.name: key for slot, key in side} for side in (one, other))
        matching = match([slot for slot, _ in one], [slot for slot, _ in other])
        verdicts = [ours[row.source] == theirs[row.target] for row in matching.pairs if not row.instead]
        found.pairs.update(verdicts)
        right = all(verdicts)
        found.ends["refused" if not matching.complete else "right" if right else "wrong"] += 1
        if not right:
            (found.wrong if matching.complete else found.slips).append(seed)
    return found


def campaign(first: int, count: int, workers: int = 1, names: str = "") -> Answers:
    """The answers for `count` models from the seed `first` on."""
    chunks = [range(at, min(at + STEP, first + count)) for at in range(first, first + count, STEP)]
    found = Answers()
    if workers == 1:
        for chunk in chunks:
            found.add(answered(chunk, names))
        return found
    with ProcessPoolExecutor(workers) as pool:
        for part in pool.map(partial(answered, names=names), chunks):
            found.add(part)
    return found


def report(found: Answers) -> int:
    """Print what was found; the number of faults."""
    print(f"match  {found}")
    for label, seeds in (("complete and wrong", found.wrong), ("certain and wrong", found.slips)):
        if seeds:
            print(f"       {label}: seeds {', '.join(map(str, seeds[:20]))}")
    return len(found.wrong)


def main(folder: Path) -> int:
    """The row of ``make campaigns``."""
    count = int(os.environ.get("COUNT") or COUNT)
    return report(campaign(0, count, os.cpu_count() or 1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--names", choices=sorted(set(NAMED)), default="")
    options = parser.parse_args()
    sys.exit(report(campaign(options.first, options.count, options.workers, options.names)) > 0)
