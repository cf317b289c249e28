"""The tensors of a base that the modules of an adapter belong to, and their rows.

Names agree except for their beginning: with one prefix that is left out and one that is put before them, the names of
all modules of a container are those of the base. Paths of kohya have underscores for dots. A base may fuse tensors
that the adapter has apart, or have fused ones apart: the table of fusions is that of `match`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from math import prod
from typing import NamedTuple, TypeAlias

from ckptfix.checkpoint import TensorEntry
from ckptfix.dataclass import dataclass
from ckptfix.errors import Refused
from ckptfix.names import adapters, diffusion
from ckptfix.names.spellings import FUSIONS, HEAD_BY_HEAD, UNTOLD
from ckptfix.ops.adapter import Adapter, AdapterModule
from ckptfix.words import plural, some

WEIGHT, IN_PROJ = ".weight", "_weight"

LEVELS = (".linear", ".to_wrap")
"""Levels that LitGPT and NeMo put around a layer of the base, where its file has them."""

CONV1D = ("c_attn", "c_proj", "c_fc", "q_attn")
"""Layers of `transformers.Conv1D`, whose weights have the inputs in their rows."""

DROPPED = 3
"""Components at the front of a path that the base may lack."""

MOST_SHOWN = 5


def has_conv1d(shapes: Mapping[str, Sequence[int]]) -> bool:
    """Return whether a model has layers of `transformers.Conv1D`, as the shape of queries, keys and values shows."""
    fused = (shape for key, shape in shapes.items() if key.endswith("c_attn.weight"))
    return any(len(shape) == 2 and shape[1] == 3 * shape[0] for shape in fused)


class Place(NamedTuple):
    """The place of an update.

    Attributes:
        key: of the base's weight.
        first: first row of the weight.
        rows: number of rows.
        start: first row of the update.
    """

    key: str
    first: int
    rows: int
    start: int = 0


class Halves(NamedTuple):
    """A weight whose two halves are the other way round in the names of the adapter."""

    key: str


class Part(NamedTuple):
    """A module that is one of several parts of a fused tensor of the base."""

    key: str
    number: int
    of: int


Found: TypeAlias = Part | Halves | str
"""A weight for a name: a part of one, one whose halves are turned round, or the key of a whole one."""


@dataclass(slots=True)
class Base:
    """The names of a base's modules.

    Attributes:
        entries: plain key -> tensor.
        stems: path of a module -> the key of its weight.
        paths: spelling of a path, with dots -> the paths that have it.
        flat: the same, with underscores.
        twice: name that the module has in another code -> the weights.
    """

    entries: Mapping[str, TensorEntry]
    stems: dict[str, str] = field(default_factory=dict)
    paths: dict[str, set[str]] = field(default_factory=dict)
    flat: dict[str, set[str]] = field(default_factory=dict)
    twice: dict[str, list[Found]] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Mapping[str, TensorEntry]) -> Base:
        """Return the names of a state dict: plain key -> tensor."""
        base = cls(entries)
        for key in entries:
            for end in (WEIGHT, IN_PROJ if key.endswith("in_proj_weight") else WEIGHT):
                if key.endswith(end) and len(key) > len(end):
                    base.stems[key[: -len(end)]] = key
        for stem in base.stems:
            for name in _spellings(stem):
                base.paths.setdefault(name, set()).add(stem)
                base.flat.setdefault(name.replace(".", "_"), set()).add(stem)
        base.twice.update((name, rows) for name, rows in base._twice() if name not in base.paths)
        base.twice.update({name.replace(".", "_"): rows for name, rows in base.twice.items()})
        return base

    def _twice(self) -> Iterator[tuple[str, list[Found]]]:
        """Yield the names that modules have in another code (`names.diffusion`), and their weights."""
        old = diffusion.original_models(self.stems)
        new = [] if old and old != ["OpenCLIP"] else diffusion.other_models(_tails(self.stems))
        apart: dict[tuple[str, str], dict[int, Found]] = {}
        rows: dict[tuple[str, str], diffusion.Row] = {}
        for stem, key in self.stems.items():
            for front, tail in diffusion.tails(stem):
                for model in old:
                    row = diffusion.original_row(model, tail)
                    if row is not None:
                        yield from self._parts(front, row, key)
                for model in new:
                    row = diffusion.other_row(model, tail)
                    if row is not None and row.part is not None:
                        place = front, row.original
                        apart.setdefault(place, {})[row.part] = self._whole(row, key)
                        rows[place] = row
        for (front, name), parts in apart.items():
            if len(parts) == len(rows[front, name].others):
                yield front + name, [parts[number] for number in sorted(parts)]

    def _parts(self, front: str, row: diffusion.Row, key: str) -> Iterator[tuple[str, list[Found]]]:
        if len(row.others) == 1:
            yield front + row.others[0], [self._whole(row, key)]
            return
        for number, name in enumerate(row.others):
            yield front + name, [Part(key, number, len(row.others))]

    def _whole(self, row: diffusion.Row, key: str) -> Found:
        shape = self.entries[key].shape
        return Halves(key) if row.row.halves and len(shape) == 2 and shape[0] == 2 * shape[1] else key

    def bias_of(self, key: str) -> str:
        """Return the key of the bias beside a weight."""
        return f"{key.removesuffix('weight')}bias"


def _tails(stems: Iterable[str]) -> list[str]:
    return [tail for stem in stems for _, tail in diffusion.tails(stem)]


def _spellings(stem: str) -> Iterator[str]:
    """Yield the names of a module: its own, and that of diffusers for one of Stable Diffusion's U-Net."""
    yield stem
    for start in ("model.diffusion_model.", "diffusion_model.", ""):
        if stem.startswith(start):
            yield from (f"{start}{name}" for name in adapters.names_of_diffusers(stem[len(start) :]))
            return


class Fit(NamedTuple):
    """The change that makes names of the base of the paths of a container: `add` takes the place of `drop` in front."""

    drop: str
    add: str


@dataclass(slots=True)
class Group:
    """The modules of one container.

    Attributes:
        flat: their paths have underscores for dots.
    """

    base: Base
    modules: Sequence[AdapterModule]
    flat: bool

    @property
    def index(self) -> Mapping[str, set[str]]:
        """Spelling of a path -> the paths of the base."""
        return self.base.flat if self.flat else self.base.paths

    def found(self, text: str) -> list[Found]:
        """Return the weights for a name: the keys of whole weights in the order of their rows, or a part of one."""
        stem = self._stem(text)
        if stem is not None:
            return [self.base.stems[stem]]
        if text in self.base.twice:
            return self.base.twice[text]
        dot = "_" if self.flat else "."
        for family, fused, splits in FUSIONS:
            for split in splits:
                for number, part in enumerate(split):
                    if not text.endswith(f"{dot}{part}") or (family == "gate-up of xformers"):
                        continue
                    front = text[: -len(part)]
                    for name in fused:
                        whole = self._stem(f"{front}{name}") if name not in (*HEAD_BY_HEAD, *UNTOLD) else None
                        if whole is not None:
                            return [Part(self.base.stems[whole], number, len(split))]
            for name in fused:
                if text.endswith(f"{dot}{name}") and name not in (*HEAD_BY_HEAD, *UNTOLD):
                    front = text[: -len(name)]
                    for split in splits:
                        stems = [self._stem(f"{front}{part}") for part in split]
                        if all(one is not None for one in stems):
                            return [self.base.stems[one] for one in stems if one is not None]
        return []

    def _stem(self, text: str) -> str | None:
        for name in (text, *(text + (level.replace(".", "_") if self.flat else level) for level in LEVELS)):
            stems = self.index.get(name)
            if stems is not None:
                if len(stems) > 1:
                    message = f"{name} may be each of {len(stems)} modules of the base: {some(sorted(stems), 4)}"
                    raise Refused(message, hint="--only merges the other modules")
                return next(iter(stems))
        return None

    def fit(self) -> tuple[Fit, dict[str, list[Found]]]:
        """Return how names become those of the base, and the weights for the name of each module.

        Raises:
            Refused: several tensors of the base fit equally well.
        """
        paths = [one.path for one in self.modules]
        best: list[tuple[int, Fit]] = []
        for one in self._fits(paths):
            count = sum(bool(self.found(one.add + path[len(one.drop) :])) for path in paths if self._has(path, one))
            best.append((count, one))
        best.sort(key=lambda row: (-row[0], len(row[1].drop), len(row[1].add)))
        if not best or not best[0][0]:
            return Fit("", ""), {}
        count, chosen = best[0]
        rivals = [one for number, one in best if number == count and one.drop == chosen.drop and one != chosen]
        if rivals:
            fitting = [one for one in (chosen, *rivals) if self._is_as_wide(one)]
            if fitting:
                chosen, *rivals = fitting
        if rivals and chosen.add:
            shown = some([one.add for one in (chosen, *rivals)], 4)
            raise Refused(f"several parts of the base have the modules of the adapter: {shown}",
                          hint="name the part with --at, or extract it first")  # fmt: skip
        found = {
            path: self.found(chosen.add + path[len(chosen.drop) :]) for path in paths if self._has(path, chosen)
        }
        return chosen, {path: rows for path, rows in found.items() if rows}

    def _is_as_wide(self, fit: Fit) -> bool:
        """Return whether the weights of a fit have the columns of the updates, or their rows."""
        from ckptfix.ops.lora.updates import size_of

        for module in self.modules:
            size = size_of(module)
            rows = self.found(fit.add + module.path[len(fit.drop) :]) if self._has(module.path, fit) else []
            for row in rows if size is not None else []:
                shape = self.base.entries[row if isinstance(row, str) else row.key].shape
                if size is not None and size[1] not in (prod(shape[1:]), *shape[:1]):
                    return False
        return True

    @staticmethod
    def _has(path: str, fit: Fit) -> bool:
        return path.startswith(fit.drop) and len(path) > len(fit.drop)

    def _fits(self, paths: Sequence[str]) -> list[Fit]:
        """Return the fits to try: those that make a name of the base of one of some paths."""
        dot = "_" if self.flat else "."
        tried = dict.fromkeys([paths[0], paths[len(paths) // 2], paths[-1]])
        fits: dict[Fit, None] = {}
        for path in tried:
            parts = path.split(dot)
            for count in range(min(DROPPED, len(parts) - 1) + 1):
                tail = dot.join(parts[count:])
                drop = path[: len(path) - len(tail)]
                ends = dict.fromkeys((tail, *self._others(tail, dot)))
                for name in (*self.index, *self.base.twice):
                    for end in ends:
                        if name == end or name.endswith(f"{dot}{end}"):
                            fits[Fit(drop, name[: len(name) - len(end)])] = None
        return list(fits)

    @staticmethod
    def _others(tail: str, dot: str) -> Iterator[str]:
        """Yield the names that a tail has where the base fuses it, or has it apart, or with another level."""
        yield from (f"{tail}{level.replace('.', dot)}" for level in LEVELS)
        for _, fused, splits in FUSIONS:
            for split in splits:
                for part in split:
                    if tail.endswith(f"{dot}{part}"):
                        yield from (f"{tail[: -len(part)]}{name}" for name in fused)
            for name in fused:
                if tail.endswith(f"{dot}{name}"):
                    yield from (f"{tail[: -len(name)]}{split[0]}" for split in splits)


@dataclass(frozen=True, slots=True)
class Targets:
    """The places of the updates and tensors of an adapter.

    Attributes:
        places: name of a module -> places in the base.
        whole: plain key in the base -> the tensor that replaces it; the base may lack the key.
        missing: names of modules that the base has no tensor for.
    """

    places: Mapping[str, tuple[Place, ...]]
    whole: Mapping[str, TensorEntry]
    missing: tuple[str, ...]


def resolved(adapter: Adapter, base: Base, modules: Iterable[AdapterModule]) -> Targets:
    """Find the tensors of the base that modules of an adapter belong to.

    Raises:
        Refused: several fit.
    """
    groups: dict[str, list[AdapterModule]] = {}
    for module in modules:
        groups.setdefault(module.container, []).append(module)
    places: dict[str, tuple[Place, ...]] = {}
    missing: list[str] = []
    fits: dict[str, Fit] = {}
    for container, rows in groups.items():
        flat = any(one.name == f"{container}_{one.path}" for one in rows) and bool(container)
        group = Group(base, rows, flat)
        fits[container], found = group.fit()
        missing += [one.name for one in rows if one.path not in found]
        places |= _placed([one for one in rows if one.path in found], found, base)
    whole: dict[str, TensorEntry] = {}
    for key, entry in adapter.whole.items():
        container, path = adapters.container_of(key)
        fit = fits.get(container) or next(iter(fits.values()), Fit("", ""))
        whole[fit.add + path.removeprefix(fit.drop)] = entry
    return Targets(places, whole, tuple(missing))


def _placed(
    modules: Sequence[AdapterModule], found: Mapping[str, Sequence[Found]], base: Base
) -> dict[str, tuple[Place, ...]]:
    """Return the rows of each module's update."""
    parts: dict[str, dict[int, int]] = {}
    for module in modules:
        for row in found[module.path]:
            if isinstance(row, Part):
                rows = rows_of(module)
                if rows is None:
                    message = f"the base fuses {module.name} in {row.key}, and its update has no rows of its own"
                    raise Refused(message)
                parts.setdefault(row.key, {})[row.number] = rows
    made: dict[str, tuple[Place, ...]] = {}
    for module in modules:
        mine: list[Place] = []
        start = 0
        for row in found[module.path]:
            key = row if isinstance(row, str) else row.key
            total = base.entries[key].shape[0] if base.entries[key].shape else 0
            if isinstance(row, Halves):
                half = total // 2
                mine += [Place(key, half, half, start), Place(key, 0, half, start + half)]
                start += total
            elif isinstance(row, Part):
                sizes = _sizes(parts[key], row.of, total, module.name, key)
                mine.append(Place(key, sum(sizes[: row.number]), sizes[row.number]))
            else:
                mine.append(Place(key, 0, total, start))
                start += total
        made[module.name] = tuple(mine)
    return made


def rows_of(module: AdapterModule) -> int | None:
    """Return the rows of a plain LoRA's update; None for another."""
    up = module.tensors.get("up")
    if module.method != "LoRA" or up is None or len(up.shape) < 2:
        return None
    return up.shape[1] if module.turned else up.shape[0]


def _sizes(known: Mapping[int, int], count: int, total: int, name: str, key: str) -> list[int]:
    """Return the rows of each part of a fused tensor: keys and values have the same number.

    Raises:
        Refused: they do not add up.
    """
    sizes = dict(known)
    if count == 3:
        for one, other in ((1, 2), (2, 1)):
            if one in sizes:
                sizes.setdefault(other, sizes[one])
        if 1 in sizes:
            sizes.setdefault(0, total - 2 * sizes[1])
        else:
            sizes |= {1: (total - sizes[0]) // 2, 2: (total - sizes[0]) // 2}
    elif count == 4:
        # Query, key and value have the same number of rows, and what is fused with them has the others.
        wide = next((sizes[one] for one in (0, 1, 2) if one in sizes), (total - sizes.get(3, 0)) // 3)
        sizes = {0: wide, 1: wide, 2: wide, 3: total - 3 * wide, **sizes}
    else:
        for one, other in ((0, 1), (1, 0)):
            if one in sizes:
                sizes.setdefault(other, total - sizes[one])
    made = [sizes[number] for number in range(count)]
    if sum(made) != total or min(made) < 1:
        raise Refused(f"{name} is a part of {key}, whose {total} rows are not {' + '.join(map(str, made))}")
    return made


def refuse_others(adapter: Adapter, targets: Targets, asked: int) -> None:
    """Raise `Refused` for an adapter with modules that the base lacks."""
    if targets.missing:
        count = f"{len(targets.missing):,} of {plural(asked, 'module')}"
        raise Refused(
            f"the base has no tensor for {count} of the adapter: {some(targets.missing, MOST_SHOWN)}",
            path=adapter.path,
            hint="it is an adapter for another base, or for another part of it; --only merges some of its modules",
        )
