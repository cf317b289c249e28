"""Averages (EMA) that a trainer keeps in the state dict of the weights that they average: the spelling of their keys.

::

    ema_backbone_conv1_weight      backbone.conv1.weight    mmcv: dots became underscores
    model_ema.conv1weight          model.conv1.weight       latent-diffusion: without dots
    generator_ema.conv.weight      generator.conv.weight    a second module beside the first
    ema.conv.weight                conv.weight              the same, around everything
    conv.weight_ema                conv.weight              a second parameter of the module
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ckptfix.dataclass import dataclass

COUNTERS = frozenset({"decay", "num_updates", "n_averaged", "steps", "step", "initted", "updates"})
"""Last components of the keys of buffers in which averages are counted."""

Plain = Callable[[str], Iterable[str]]
"""Returns the keys of the weights that a key may be the average of; nothing for keys that are not averages."""


@dataclass(frozen=True, slots=True)
class AveragedSpelling:
    """A row of the table.

    Attributes:
        writer: who writes it, and the file that defines it; empty for a habit of many.
        flat: what the keys of averages have in place of dots; None where they keep them.
        front: the beginning of their keys; empty if `plain` recognizes them.
        swapped: the trainer exchanges both sets before it saves, so that the plain keys have the averages.
        plain: for keys with dots.
    """

    writer: str = ""
    front: str = ""
    flat: str | None = None
    swapped: bool = False
    plain: Plain | None = None


def _of_module(name: str) -> Iterator[str]:
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        words = part.split("_")
        if "ema" not in (words[0], words[-1]):
            continue
        rest = "_".join(words[1:] if words[0] == "ema" else words[:-1])
        for other in (rest, "", "model"):
            yield ".".join(filter(None, (*parts[:place], other, *parts[place + 1 :])))


def _of_leaf(name: str) -> Iterator[str]:
    if name.endswith("_ema"):
        yield name.removesuffix("_ema")


SPELLINGS: tuple[AveragedSpelling, ...] = (
    AveragedSpelling("EMAHook of mmcv and mmdetection (mmcv/runner/hooks/ema.py)", "ema_", "_", swapped=True),
    AveragedSpelling("LitEma of latent-diffusion (ldm/modules/ema.py)", "model_ema.", ""),
    AveragedSpelling(plain=_of_module),
    AveragedSpelling(plain=_of_leaf),
)
"""The spellings; the first that accounts for all keys counts."""


@dataclass(frozen=True, slots=True)
class AveragedKeys:
    """The averages in a state dict.

    Attributes:
        pairs: key of an average -> key of the weight that it averages.
        counters: keys of buffers in which averages are counted.
    """

    spelling: AveragedSpelling
    pairs: Mapping[str, str]
    counters: tuple[str, ...] = ()

    @property
    def glob(self) -> str | None:
        """The glob of exactly the averages and their counters, if they are all the keys with one beginning."""
        front = self.spelling.front or next(iter(self.pairs)).partition(".")[0] + "."
        keys = [*self.pairs, *self.counters]
        weights = self.pairs.values()
        whole = all(key.startswith(front) for key in keys) and not any(key.startswith(front) for key in weights)
        return f"{front}*" if whole else None


def find(names: Sequence[str]) -> AveragedKeys | None:
    """Return the averages among the keys of a state dict; None if there are none, or not every one has its weight."""
    rows = [name for name in names if "ema" in name]
    if not rows:
        return None
    there = dict.fromkeys(names)
    for spelling in SPELLINGS:
        if (made := _found(spelling, rows, there)) is not None:
            return made
    return None


def _found(spelling: AveragedSpelling, rows: Iterable[str], there: Mapping[str, None]) -> AveragedKeys | None:
    pairs: dict[str, str] = {}
    counters: list[str] = []
    plain = spelling.plain or _unflattened(spelling, there)
    for name in rows:
        asked = list(plain(name))
        if not asked:
            continue
        weight = next((other for other in asked if other in there and other != name), None)
        if weight is not None:
            pairs[name] = weight
        elif name.rpartition(".")[2] in COUNTERS:
            counters.append(name)
        else:
            return None
    unique = len(set(pairs.values())) == len(pairs) and not set(pairs) & set(pairs.values())
    return AveragedKeys(spelling, pairs, tuple(counters)) if pairs and unique else None


def _unflattened(spelling: AveragedSpelling, there: Iterable[str]) -> Plain:
    """Return the function for keys in which dots were replaced or removed, which compares them without dots."""
    front, flat = spelling.front, spelling.flat or ""
    # latent-diffusion averages only the module `model`, and leaves that level out.
    level = "" if flat else "model."
    full: dict[str, list[str]] = {}
    for name in there:
        if name.startswith(level) and not name.startswith(front):
            full.setdefault(name.removeprefix(level).replace(".", flat), []).append(name)

    def plain(name: str) -> Iterable[str]:
        if not name.startswith(front) or (flat and "." in name):
            return ()
        others = full.get(name.removeprefix(front), [])
        return others if len(others) == 1 else [name]

    return plain
