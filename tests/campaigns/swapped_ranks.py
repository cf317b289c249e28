"""DeepSpeed saves whose rank files are exchanged, copied over each other, lost, or of another step or another run.

The values of every save are made so that no two of them agree. Whatever was done to the files, a verb that writes, and
the loader, gives the values of the save bit for bit, or refuses; and where the files do not belong together, doctor
names one of them.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from campaigns.frame import Table, report, start
from zero_files import KEYS, Run

import ckptfix
from ckptfix.errors import CkptfixError
from ckptfix.ops.doctor import doctor

HALVES = (torch.float32, torch.bfloat16)
Spoil = Callable[[Path, Path, random.Random], str]
"""Changes the first folder, with the same save of another step at hand; what was done."""


def saved(folder: Path, ranks: int, stage: int, half: torch.dtype, step: int) -> Run:
    """A save of which each value is its own: the step decides them."""
    generator = torch.Generator().manual_seed(step)
    first = {"a.weight": torch.randn(10, 4, generator=generator), "a.bias": torch.randn(4, generator=generator)}
    second = {"b.weight": torch.randn(6, 4, generator=generator)}
    frozen = {"c.weight": torch.randn(8, 3, generator=generator).to(half)}
    run = Run([first, second], ranks, stage, half, step=step, frozen=frozen)
    run.save(folder)
    return run


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*_states.pt"))


def _two(folder: Path, chance: random.Random, kind: str) -> tuple[Path, Path]:
    first, second = chance.sample([path for path in files_of(folder) if kind in path.name], 2)
    return first, second


def swapped(folder: Path, other: Path, chance: random.Random) -> str:
    first, second = _two(folder, chance, "optim")
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    return f"{first.name} and {second.name} exchanged"


def duplicated(folder: Path, other: Path, chance: random.Random) -> str:
    first, second = _two(folder, chance, "optim")
    shutil.copy(first, second)
    return f"{first.name} copied over {second.name}"


def missing(folder: Path, other: Path, chance: random.Random) -> str:
    path = chance.choice(files_of(folder))
    path.unlink()
    return f"{path.name} lost"


def of_another_step(folder: Path, other: Path, chance: random.Random) -> str:
    path = chance.choice(files_of(folder))
    (theirs,) = other.glob(f"*/{path.name}")
    shutil.copy(theirs, path)
    return f"{path.name} of another step"


def model_files(folder: Path, other: Path, chance: random.Random) -> str:
    paths = [path for path in files_of(folder) if "model" in path.name]
    if len(paths) < 2:  # stages 1 and 2 have one for all
        return missing(folder, other, chance)
    first, second = chance.sample(paths, 2)
    shutil.copy(first, second)
    return f"{first.name} copied over {second.name}"


SPOILS: tuple[Spoil, ...] = (swapped, duplicated, missing, of_another_step, model_files)


def outcomes(folder: Path, out: Path) -> Iterator[tuple[str, Callable[[], dict[str, torch.Tensor]]]]:
    """Name, and what gives the weights of the model in `folder`."""

    def converted(**options: object) -> dict[str, torch.Tensor]:
        ckptfix.convert(folder, out, force=True, **options)  # type: ignore[arg-type]
        found = torch.load(out, weights_only=True)
        return dict(found.get("module", found))

    def moments() -> dict[str, torch.Tensor]:
        ckptfix.convert(folder, out, optimizer=True, force=True)
        found = torch.load(out, weights_only=True)["optimizer"]["state"]
        return {f"{name} {key}": state[key] for name, state in found.items() for key in ("exp_avg", "exp_avg_sq")}

    yield "convert", converted
    yield "convert --optimizer", moments
    yield "load_state_dict", lambda: dict(ckptfix.load_state_dict(folder))


def _same(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return found.keys() == right.keys() and all(torch.equal(found[name], value) for name, value in right.items())


def run(place: Path, count: int, first: int = 0) -> Table:
    """Spoil `count` saves, by number from `first` on; how the calls ended, and what was wrong."""
    ends: Counter[str] = Counter()
    wrong: list[str] = []
    for number in range(first, first + count):
        chance = random.Random(number)
        ranks, stage, half = chance.choice((2, 3, 4)), chance.choice((1, 2, 3)), chance.choice(HALVES)
        folder, other = place / f"{number}", place / f"{number}-other"
        real = saved(folder, ranks, stage, half, 3)
        saved(other, ranks, stage, half, 4)
        spoil = SPOILS[number % len(SPOILS)]
        what = spoil(folder, other, chance)
        weights = {**real.weights}
        rights = [weights, {**real.model}] if "model_states" in what or "lost" in what else [weights]
        trained = [name for name in weights if name not in real.frozen]
        moments = {f"{name} {key}": real.moment(name, key) for name in trained for key in KEYS}
        refused = False
        for call, give in outcomes(folder, place / "out.pth"):
            try:
                found = give()
            except CkptfixError:
                ends[f"{spoil.__name__}: refused"] += 1
                refused = True
                continue
            except Exception as error:  # a fault is a line of the report
                wrong.append(f"{number} {what}, stage {stage}, {ranks} ranks: {call}: {error!r}")
                continue
            if any(_same(found, right) for right in ([moments] if "optimizer" in call else rights)):
                ends[f"{spoil.__name__}: right"] += 1
            else:
                ends[f"{spoil.__name__}: WRONG"] += 1
                wrong.append(f"{number} {what}, stage {stage}, {ranks} ranks, {half}: {call} gives other values")
        said = doctor(folder).findings
        named = [row.id for row in said if row.severity in ("error", "warning")]
        ends[f"{spoil.__name__}: doctor {'names it' if named else 'says nothing'}"] += 1
        if refused and not named:
            wrong.append(f"{number} {what}, stage {stage}, {ranks} ranks: refused, and doctor finds nothing")
        shutil.rmtree(folder)
        shutil.rmtree(other)
    return ends, wrong


def main(folder: Path, count: int = 300) -> int:
    """Print the table; the number of faults that were found."""
    return report(f"swapped ranks  {count:6} saves", run(folder, count))


if __name__ == "__main__":
    start(main)
