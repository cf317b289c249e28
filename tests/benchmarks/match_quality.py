"""How good ``ckptfix match`` is, beside simpler ways: ``PYTHONPATH=tests python tests/benchmarks/match_quality.py``.

Pairs of models that compute the same and are named differently (tests/architectures), every ordered pair of styles,
and variants of each. A cell counts pairs as equal / wrong / refused, then keys as right / wrong: equal are the pairs
whose outputs are equal after renaming and loading, wrong those that were matched whole and are not. Keys are judged
in refused pairs too. Tables are markdown, on stdout. Exit status: 0 structure has nothing wrong, 1 it has.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from architectures.families import FAMILIES, PAIRS
from architectures.family import Pair, randomise, slots
from architectures.judge import (
    MATCHERS,
    SAME,
    Judged,
    Matcher,
    distance,
    judge,
    judge_variant,
    outputs,
    variants,
)

import ckptfix
from ckptfix.errors import NoMatch

OURS = "structure"


class Tally:
    """Counts over pairs."""

    def __init__(self) -> None:
        self.verdicts: Counter[str] = Counter()
        self.right = self.wrong = 0

    def add(self, judged: Judged) -> None:
        self.verdicts[judged.verdict] += 1
        self.right += len(judged.right)
        self.wrong += len(judged.wrong)

    @property
    def clean(self) -> bool:
        return not (self.verdicts["wrong"] or self.wrong)

    def __str__(self) -> str:
        verdicts = " / ".join(str(self.verdicts[verdict]) for verdict in ("equal", "wrong", "refused"))
        return f"{verdicts}; {self.right} / {self.wrong}"


def row(label: str, count: int, tallies: Iterable[Tally]) -> str:
    return "| " + " | ".join((label, str(count), *map(str, tallies))) + " |"


def head(label: str) -> str:
    return "| " + " | ".join((label, "pairs", *MATCHERS)) + " |\n|---|--:|" + "---|" * len(MATCHERS)


def plain(pair: Pair, matcher: Matcher) -> Judged:
    return judge(pair, matcher(slots(pair.source().state_dict()), slots(pair.target().state_dict())))


def by_family() -> dict[str, Tally]:
    """Print a row for each family and a sum; returns the sum of each matcher."""
    sums = {name: Tally() for name in MATCHERS}
    print(head("architecture"))
    for family in FAMILIES:
        mine = [pair for pair in PAIRS if pair.family is family]
        for expect, words in (("match", ""), ("refused", ", cut otherwise")):
            chosen = [pair for pair in mine if pair.expect == expect]
            tallies = {name: Tally() for name in MATCHERS}
            for pair in chosen:
                for name, matcher in MATCHERS.items():
                    judged = plain(pair, matcher)
                    tallies[name].add(judged)
                    sums[name].add(judged)
            if chosen:
                print(row(family.name + words, len(chosen), tallies.values()), flush=True)
    print(row("all", len(PAIRS), sums.values()))
    return sums


def by_variant(chosen: Sequence[Pair]) -> dict[str, Tally]:
    """Print a row for each variant of `chosen`; returns the sum of each matcher."""
    rows: dict[str, dict[str, Tally]] = {}
    sums = {name: Tally() for name in MATCHERS}
    for pair in chosen:
        for variant in variants(pair):
            tallies = rows.setdefault(variant.name, {name: Tally() for name in MATCHERS})
            for name, matcher in MATCHERS.items():
                judged = judge_variant(pair, variant, matcher(variant.source, variant.target))
                tallies[name].add(judged)
                sums[name].add(judged)
    print(head("variant"))
    for label, tallies in rows.items():
        print(row(label, sum(tallies[OURS].verdicts.values()), tallies.values()))
    return sums


def by_command() -> Counter[str]:
    """Print what the command makes of each pair, with parts cut, joined and turned where it finds them; the counts."""
    counts: dict[str, Counter[str]] = {}
    with TemporaryDirectory() as folder:
        source_file, target_file, out = (Path(folder, name) for name in ("source.pth", "target.pth", "out.pth"))
        for pair in PAIRS:
            source, target = randomise(pair.source(), 1), randomise(pair.target(), 2)
            torch.save(source.state_dict(), source_file)
            torch.save(target.state_dict(), target_file)
            try:
                ckptfix.match(source_file, out, target_file, force=True)
                target.load_state_dict(torch.load(out), strict=False)
                same = distance(outputs(source, pair.inputs()), outputs(target, pair.inputs())) < SAME
                verdict = "equal" if same else "wrong"
            except NoMatch:
                verdict = "refused"
            except RuntimeError:
                verdict = "wrong"
            label = "cut otherwise" if pair.expect == "refused" else "cut alike"
            counts.setdefault(label, Counter())[verdict] += 1
    print("| the command | equal / wrong / refused |\n|---|---|")
    for label, found in counts.items():
        print(f"| {label} | {' / '.join(str(found[verdict]) for verdict in ('equal', 'wrong', 'refused'))} |")
    return sum(counts.values(), Counter())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=3, help="variants of every N-th pair that can be matched (3)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sums = by_family()
    print()
    matchable = [pair for pair in PAIRS if pair.expect == "match"]
    harder = by_variant(matchable[:: arguments.every])
    print()
    written = by_command()
    return 0 if sums[OURS].clean and harder[OURS].clean and not written["wrong"] else 1


if __name__ == "__main__":
    sys.exit(main())
