"""Parsed key names: modules, and the numbers and words in their paths.

The structural matcher compares modules rather than keys: a convolution's weight and bias belong together. The path of a
module is a template (``layer{}.{}.conv{}``) and the numbers in it, so that a thousand layers share one template.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import field
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from ckptfix.dataclass import cached_property, dataclass
from ckptfix.names import no_weights, spellings
from ckptfix.names.letters import COUNTING, spelled
from ckptfix.names.slots import Slot

_OWN = """
weight bias running_mean running_var num_batches_tracked weight_ih weight_hh bias_ih bias_hh weight_hr
weight_g weight_v weight_orig weight_u scale zero_point
"""
LEAVES = frozenset(_OWN.split())
"""Names that modules of torch.nn give their own tensors; any other parameter is a unit by itself."""

_RECURRENT = re.compile(r"(weight|bias)_(ih|hh|hr)_l(\d+)(_reverse)?")  # torch/nn/modules/rnn.py RNNBase
_PARAMETRIZED = re.compile(r"(?:(.*)\.)?(parametrizations\.[^.]+\.[^.]+(?:\._[uv])?)")  # torch/nn/utils/parametrize.py
_TOKEN = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_NUMBER = re.compile(
    rf"(?<!\bw(?=[1-3]\b))\d{{1,18}}|(?<=\d){COUNTING}(?![A-Za-z])|(?<=_){COUNTING}(?![A-Za-z0-9])"
)
# Letters count too: res2a_branch2b in Caffe's ResNet, conv_a and conv_b elsewhere. The numbers of w1, w2, w3 do not:
# if there are three, the second is the last to run (LLaMA, llama/model.py FeedForward).
_NUMBERED = re.compile(f"({_NUMBER.pattern})")


Signature = frozenset[tuple[str, tuple[int, ...], str]]


@dataclass(slots=True, eq=False)
class Unit:
    """The tensors that a module itself has, or one parameter by itself.

    Attributes:
        path: of the module, in canonical spelling (see `ckptfix.names.spellings` and `letters`).
        slots: leaf -> its slot, as named in the state dict; the leaf of a lone parameter is ``""``.
        optional: leaf, slot and family's id for those that a family allows to be absent.
        first, last: positions of its keys in the state dict.
        template, numbers: of the path.
        fronts, holders: those of the path; the modules of a block share them.
        signature: requirements for a module that takes its place: leaves, shapes, and integer or float.
        kind: requirements for its counterpart: the signature, or that of a lone tensor, which may have any name.
    """

    path: str
    first: int
    last: int
    slots: dict[str, Slot] = field(default_factory=dict)
    optional: tuple[tuple[str, Slot, str], ...] = ()
    template: str = ""
    numbers: tuple[int, ...] = ()
    fronts: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    signature: Signature = frozenset()
    kind: Hashable = ()


def number_kind(dtype: str) -> str:
    """Return ``"integer"``, or ``"float"``, also for an unknown dtype. Precision makes no difference."""
    return "integer" if dtype.startswith(("int", "uint", "bool")) else "float"


@dataclass(eq=False)
class ModelSide:
    """One of the two state dicts.

    Attributes:
        units: in the order of their first keys.
        aliases: slots that share the tensor of another slot.
        scattered: whether the keys of many modules are not together.
    """

    units: tuple[Unit, ...]
    aliases: tuple[Slot, ...]
    scattered: bool

    @cached_property
    def under(self) -> Counter[str]:
        """Path that ends in a number -> count of the units under it that the other side must have too."""
        return Counter({front: count for front, (count, _) in self.contents.items()})

    @cached_property
    def contents(self) -> dict[str, tuple[int, int]]:
        """Block or module -> count of the units in it that the other side must have too, and a sum of signatures."""
        found: dict[str, tuple[int, int]] = {}
        alone: dict[int, tuple[int, int]] = {}  # most of them hold one module
        for unit in self.units:
            if unit.slots:
                own = hash(unit.kind)
                for front in unit.holders:
                    held = found.get(front)
                    found[front] = (held[0] + 1, held[1] + own) if held else alone.setdefault(own, (1, own))
        return found

    @cached_property
    def following(self) -> dict[int, Signature]:
        """Position of a unit -> signature of the unit after it."""
        return {one.first: after.signature for one, after in pairwise(self.units)}

    def forget(self) -> None:
        """Free what was derived from the units; it is derived again when it is needed."""
        for name in ("under", "contents", "following", "_places"):
            self.__dict__.pop(name, None)

    @cached_property
    def _places(self) -> dict[Unit, int]:
        return {unit: place for place, unit in enumerate(self.units)}

    def beside(self, unit: Unit) -> tuple[Unit | None, Unit | None]:
        """Return the units just before and just after `unit`."""
        place = self._places[unit]
        after = self.units[place + 1] if place + 1 < len(self.units) else None
        return (self.units[place - 1] if place else None), after

    @cached_property
    def in_order(self) -> bool:
        """True if the keys seem to be in the order in which modules were defined.

        Alphabetical order does not count, because safetensors may have sorted the keys.
        """
        return self.numbers_rise and not self._alphabetical

    @cached_property
    def numbers_rise(self) -> bool:
        """True if the keys of each module are together, and numbers in paths go up, also from 9 to 10."""
        if self.scattered:
            return False
        paths = [unit.path for unit in self.units]
        if len(paths) > 4 and self._alphabetical and paths != sorted(paths, key=natural):
            return False
        latest: dict[str, tuple[int, ...]] = {}
        falls = 0
        for unit in self.units:
            falls += latest.get(unit.template, ()) > unit.numbers
            latest[unit.template] = unit.numbers
        return falls * 10 <= len(self.units)

    @cached_property
    def _alphabetical(self) -> bool:
        return all(one.path <= other.path for one, other in pairwise(self.units))


def natural(path: str) -> list[tuple[int, str]]:
    """Return a sort key that puts ``10`` after ``9``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", path)]


def counted(one: str, other: str) -> bool:
    """Return whether the first difference of two paths is a number that goes up."""
    for here, there in zip(natural(one), natural(other), strict=False):
        if here != there:
            return here[0] >= 0 and there[0] > here[0]
    return False


def side(slots: Sequence[Slot], places: frozenset[str] | None = None) -> ModelSide:
    """Return `slots`, in the order of a state dict, as units.

    Args:
        places: where letters count (see `letters.series`); None for all of them.
    """
    canonical = spellings.canonical([slot.name for slot in slots])
    shared: dict[object, Any] = {}  # thousands of modules have the same signature and template: keep each once
    homes: dict[str, PathParts] = {}
    units: dict[str, Unit] = {}
    aliases = []
    scattered = 0
    position = -1
    for slot in slots:
        if slot.tied is not None:
            aliases.append(slot)
            continue
        position += 1
        path, leaf = _split(canonical.get(slot.name, slot.name))
        path = path if places is None else spelled(path, places)
        leaf = shared.setdefault(leaf, leaf)
        unit = units.get(path)
        if unit is None or leaf in unit.slots:
            path = path if unit is None else slot.name
            unit = units[path] = Unit(path, position, position)
            text, unit.numbers, unit.fronts, unit.holders = taken_apart(path, homes)
            unit.template = shared.setdefault(text, text)
        scattered += position > unit.last + 1
        unit.last = position
        family = no_weights.optional(slot)
        if family is None:
            unit.slots[leaf] = slot
        else:
            unit.optional = *unit.optional, (leaf, slot, family.id)
    for unit in units.values():
        kinds = frozenset((leaf, slot.shape, number_kind(slot.dtype)) for leaf, slot in unit.slots.items())
        unit.signature = shared.setdefault(kinds, kinds)
        alone = next(iter(kinds))[1:] if len(kinds) == 1 else kinds
        unit.kind = shared.setdefault(alone, alone)
    return ModelSide(tuple(units.values()), tuple(aliases), scattered * 4 > len(units))


def _split(name: str) -> tuple[str, str]:
    """Return (path of the unit, leaf) of a canonical name."""
    match = _PARAMETRIZED.fullmatch(name) if "parametrizations." in name else None
    if match is not None:
        return match[1] or "", match[2]
    path, _, leaf = name.rpartition(".")
    if leaf in LEAVES:
        return path, leaf
    match = _RECURRENT.fullmatch(leaf)
    if match is not None:
        layer = f"l{match[3]}" + (".reverse" if match[4] else "")
        return f"{path}.{layer}" if path else layer, f"{match[1]}_{match[2]}"
    return name, ""


class PathParts(NamedTuple):
    """A path taken apart; attributes as those of `Unit`."""

    template: str
    numbers: tuple[int, ...]
    fronts: tuple[str, ...]
    holders: tuple[str, ...]


def taken_apart(path: str, homes: dict[str, PathParts] | None = None) -> PathParts:
    """Split a path into its parts.

    Args:
        homes: paths up to their last dots -> their parts, which the parts of longer paths share.
    """
    start = path.rfind(".") + 1
    front = path[:start]
    home = None if homes is None else homes.get(front)
    if home is None:
        home = _around(front)
        if homes is not None:
            homes[front] = home
    text, numbers, ends = _of_component(path[start:])
    if not ends:
        return PathParts(home.template + text, home.numbers, home.fronts, home.holders)
    own = tuple([path[: start + end] for end in ends])
    return PathParts(home.template + text, home.numbers + numbers, home.fronts + own, home.holders + own)


def template(path: str) -> tuple[str, tuple[int, ...]]:
    """Return ``layer1.0.conv2`` as (``layer{}.{}.conv{}``, (1, 0, 2))."""
    return taken_apart(path)[:2]


def fronts(path: str) -> tuple[str, ...]:
    """Return the fronts of `path` that end in a number, as ``layer1`` and ``layer1.0`` of ``layer1.0.conv``."""
    return taken_apart(path).fronts


def holders(path: str) -> tuple[str, ...]:
    """Return the blocks and modules that contain the module at `path`: its `fronts`, and the modules on the way."""
    return taken_apart(path).holders


CACHED = 1 << 11
"""Blocks whose paths are taken apart once, and components; not for each module. Modules of a block are near each other.
"""


@lru_cache(CACHED)
def _around(front: str) -> PathParts:
    """Split the path of a module that holds others, with its last dot."""
    texts: list[str] = []
    numbers: list[int] = []
    for component in front.split("."):
        text, own, _ = _of_component(component)
        texts.append(text)
        numbers += own
    ends = [match.end() for match in _NUMBER.finditer(front)]
    dots = [match.start() for match in re.finditer(r"\.", front)]
    fronts, holders = (tuple(front[:end] for end in rows) for rows in (ends, sorted({*ends, *dots})))
    return PathParts(".".join(texts), tuple(numbers), fronts, holders)


@lru_cache(CACHED)
def _of_component(component: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return the text and the numbers of a component, and where these end: they depend on no other component."""
    pieces = _NUMBERED.split(component.replace("{}", "<>"))
    ends = tuple(match.end() for match in _NUMBER.finditer(component))
    return "{}".join(pieces[::2]), tuple(map(number, pieces[1::2])), ends


def number(text: str) -> int:
    return int(text) if text.isdecimal() else ord(text) - ord("a")


def is_numbered(component: str) -> bool:
    """Return whether a component of a path has a number."""
    return bool(_of_component(component)[1])


def siblings(unit: Unit) -> tuple[str, ...]:
    """Return the `fronts` of a module, and the module that holds it directly, the innermost last."""
    found = unit.fronts
    parent = unit.path.rpartition(".")[0]
    return (*found, parent) if parent and (not found or len(found[-1]) < len(parent)) else found


def words(text: str) -> list[str]:
    """Return the words of a path or template in lower case, in order, without numbers."""
    return [token.lower() for token in _TOKEN.findall(text)]
