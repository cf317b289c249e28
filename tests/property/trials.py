"""One mutant by one command or loader, in this process: what `property.campaign` does a million times.

Mutant n is always the same: of sixteen mutants one is of a folder, two of a hostile file (where
``../shared/attacks`` is there), the others of good files. Commands and loaders come in turn, and every kind of mutant
meets all of them.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from property.folder_mutants import MAKE, contents, folder_mutant, write
from property.mutants import FIXTURES, attack, mutant
from property.verbs import COMMANDS, LOADERS, Outcome, run_commands, run_loaders

ATTACKS = FIXTURES.parents[1] / "shared" / "attacks"
CALLS = (*COMMANDS, *LOADERS)
KEEPING = frozenset({"to-cpu", "convert zip", "convert legacy", "sanitize", "repair", "slim"})
"""Commands whose output must hold the values of the input, where torch reads it and exit code is 0."""

MISREAD = "so torch loads other bytes; the saved ones are kept"
"""What repair says of records that torch reads from the wrong place."""

ELEMENTS = 1 << 16
"""Tensors of more are compared by shape alone: a hostile one may be of any size."""


@cache
def attacks() -> tuple[tuple[str, bytes], ...]:
    return tuple((path.name, path.read_bytes()) for path in sorted(ATTACKS.rglob("*.p*")))


def calls_of(number: int, how_many: int) -> tuple[str, ...]:
    """The commands and loaders that mutant `number` meets."""
    start = number * how_many
    return tuple(CALLS[(at + at // len(CALLS)) % len(CALLS)] for at in range(start, start + how_many))


class Place:
    """Where a worker puts its mutants. Of a folder only what differs from the good one is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "in.pth"
        self._good: set[str] = set()

    def put(self, number: int) -> tuple[str, Path]:
        """(kind of mutant, path)."""
        if number % 16 == 7:
            kind = list(MAKE)[(number // 16) % len(MAKE)]
            return kind, self._folder(kind, folder_mutant(kind, number)[1])
        hostile = number % 8 == 3 and attacks()
        name, data = attack(number, attacks()) if hostile else mutant(number)
        self.file.write_bytes(data)
        return ("hostile file" if hostile else name.split(" ")[1]), self.file

    def _folder(self, kind: str, files: dict[str, bytes]) -> Path:
        path = self.folder / kind.replace(" ", "-") / "in"
        good = contents(kind)
        if kind not in self._good:
            shutil.rmtree(path, ignore_errors=True)
            write(good, path)
        for name in good.keys() - files.keys():
            (path / name).unlink()
        write({name: data for name, data in files.items() if data is not good.get(name)}, path)
        self._good.discard(kind)
        return path


def trial(path: Path, calls: Iterable[str]) -> Iterator[Outcome]:
    """What some commands and loaders say about a mutant; an output is there until the next is asked for."""
    for name in calls:
        yield from run_commands(path, (name,)) if name in COMMANDS else run_loaders(path, (name,))


def changed(outcome: Outcome, path: Path) -> str | None:
    """How what torch loads of the output differs from what it loads of the input, or None."""
    import torch

    out = path.with_name("verbs-out")
    if outcome.name not in KEEPING or outcome.code != 0 or not out.is_file() or not path.is_file():
        return None
    if MISREAD in outcome.stderr:
        return None
    with warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore")
        wanted = leaves(torch.load(path, map_location="cpu", weights_only=True))
        try:
            found = leaves(torch.load(out, map_location="cpu", weights_only=True))
        except Exception as error:
            return f"torch loads the input and not the output: {type(error).__name__}: {error!s:.300}"
        if wanted != found:
            pairs = zip(wanted, found, strict=False)
            at = next((row for row in pairs if row[0] != row[1]), (f"{len(wanted)} values", f"{len(found)} values"))
            return f"torch loads other values: {at[0]!r:.200} became {at[1]!r:.200}"
    return None


def leaves(value: Any) -> list[object]:
    """The values in a loaded object, tensors as dtype, shape and bytes."""
    from collections.abc import Mapping

    import torch

    found: list[object] = []
    seen: set[int] = set()

    def walk(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            if part.numel() > ELEMENTS:
                found.append((str(part.dtype), tuple(part.shape)))
                return
            dense = part.detach().contiguous() if part.layout is torch.strided else part.detach()
            flat = not dense.is_quantized and dense.layout is torch.strided and dense.device.type == "cpu"
            # The bytes of the elements, or what torch prints where there is more than that.
            data = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if flat and dense.dim() else str(dense)
            found.append((str(part.dtype), tuple(part.shape), data))
        elif isinstance(part, Mapping | list | tuple | set | frozenset):
            if id(part) in seen:
                found.append("again")
                return
            seen.add(id(part))
            rows = part.items() if isinstance(part, Mapping) else part
            found.append((type(part).__name__, len(part)))
            for row in rows:
                walk(row)
        else:
            found.append(f"{type(part).__name__} {part!r:.200}")

    walk(value)
    return found


