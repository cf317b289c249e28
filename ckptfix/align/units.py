"""Key names taken apart: modules, the numbers and the words in their paths.

The structural matcher compares modules rather than keys: a convolution's weight and bias go together. The path of a
module is a template (``layer{}.{}.conv{}``) and the numbers that stand in it, so that a thousand layers are one
template.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from ckptfix.names import spellings
from ckptfix.names.slots import Slot

_OWN = """
weight bias running_mean running_var num_batches_tracked weight_ih weight_hh bias_ih bias_hh weight_hr
weight_g weight_v weight_orig weight_u scale zero_point
"""
LEAVES = frozenset(_OWN.split())
"""What modules of torch.nn call the tensors that are their own; any other parameter stands for itself."""

_RECURRENT = re.compile(r"(weight|bias)_(ih|hh|hr)_l(\d+)(_reverse)?")  # torch/nn/modules/rnn.py RNNBase
_PARAMETRIZED = re.compile(r"(?:(.*)\.)?(parametrizations\.[^.]+\.[^.]+(?:\._[uv])?)")  # torch/nn/utils/parametrize.py
_TOKEN = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_NUMBER = re.compile(r"(?<!\bw(?=[1-3]\b))\d{1,18}|(?<=\d)[a-h](?![A-Za-z])|(?<=_)[a-h](?![A-Za-z0-9])")
# Letters count too: res2a_branch2b in Caffe's ResNet, conv_a and conv_b elsewhere. The numbers of w1, w2, w3 do not:
# where there are three, the second is the last to run (LLaMA, llama/model.py FeedForward).


Signature = frozenset[tuple[str, tuple[int, ...], str]]


@dataclass(slots=True, eq=False)
class Unit:
    """The tensors that are a module's own, or one parameter that stands for itself.

    Attributes:
        path: of the module, in canonical spelling (see `ckptfix.names.spellings`).
        slots: leaf -> its slot, as named in the state dict; the leaf of a lone parameter is ``""``.
        optional: the same for slots that a family lets pass, with its id.
        first, last: positions of its keys in the state dict.
        template, numbers: of the path.
        signature: what another module must have to take its place: leaves, shapes, and whether they count or measure.
    """

    path: str
    first: int
    last: int
    slots: dict[str, Slot] = field(default_factory=dict)
    optional: dict[str, tuple[Slot, str]] = field(default_factory=dict)
    template: str = ""
    numbers: tuple[int, ...] = ()
    signature: Signature = frozenset()


def number_kind(dtype: str) -> str:
    """``"integer"``, or ``"float"``, which an unknown dtype passes for; precision is not a difference."""
    return "integer" if dtype.startswith(("int", "uint", "bool")) else "float"


@dataclass(eq=False)
class Side:
    """One of the two state dicts.

    Attributes:
        units: in the order of their first keys.
        aliases: slots that are another one's tensor.
        scattered: the keys of many modules are not together.
    """

    units: tuple[Unit, ...]
    aliases: tuple[Slot, ...]
    scattered: bool

    @cached_property
    def under(self) -> Counter[str]:
        """How many units that the other side must have too stand under each path that ends in a number."""
        return Counter({front: count for front, (count, _) in self.contents.items()})

    @cached_property
    def contents(self) -> dict[str, tuple[int, int]]:
        """Of the units that `under` counts, how many stand under each such path, and a sum of their signatures."""
        found: dict[str, tuple[int, int]] = {}
        for unit in self.units:
            if unit.slots:
                own = hash(unit.signature)
                for front in fronts(unit.path):
                    count, sum_ = found.get(front, (0, 0))
                    found[front] = count + 1, sum_ + own
        return found

    @cached_property
    def following(self) -> dict[int, Signature]:
        """Position of a unit -> signature of the unit after it."""
        return {one.first: after.signature for one, after in pairwise(self.units)}

    @cached_property
    def _places(self) -> dict[Unit, int]:
        return {unit: place for place, unit in enumerate(self.units)}

    def beside(self, unit: Unit) -> tuple[Unit | None, Unit | None]:
        """The units just before and just after `unit`."""
        place = self._places[unit]
        after = self.units[place + 1] if place + 1 < len(self.units) else None
        return (self.units[place - 1] if place else None), after

    @cached_property
    def in_order(self) -> bool:
        """Whether the order of the keys is that in which modules were defined, as far as one can see.

        An alphabetical one may be what safetensors made of it.
        """
        return self.numbers_rise and not self._alphabetical

    @cached_property
    def numbers_rise(self) -> bool:
        """Whether the keys of a module stand together, and numbers in paths go up, also from 9 to 10."""
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
    """A sort key by which ``10`` comes after ``9``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", path)]


def counted(one: str, other: str) -> bool:
    """Whether a number is the first difference of two paths, and goes up."""
    for here, there in zip(natural(one), natural(other), strict=False):
        if here != there:
            return here[0] >= 0 and there[0] > here[0]
    return False


def side(slots: Sequence[Slot]) -> Side:
    """`slots`, in the order of a state dict, as units."""
    canonical = spellings.canonical([slot.name for slot in slots])
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
        unit = units.get(path)
        if unit is None or leaf in unit.slots:
            path = path if unit is None else slot.name
            unit = units[path] = Unit(path, position, position)
            unit.template, unit.numbers = template(path)
        scattered += position > unit.last + 1
        unit.last = position
        family = spellings.optional(slot)
        if family is None:
            unit.slots[leaf] = slot
        else:
            unit.optional[leaf] = (slot, family.id)
    for unit in units.values():
        kinds = ((leaf, slot.shape, number_kind(slot.dtype)) for leaf, slot in unit.slots.items())
        unit.signature = frozenset(kinds)
    return Side(tuple(units.values()), tuple(aliases), scattered * 4 > len(units))


def _split(name: str) -> tuple[str, str]:
    """(path of the unit, leaf) of a canonical name."""
    match = _PARAMETRIZED.fullmatch(name)
    if match is not None:
        return match[1] or "", match[2]
    path, _, leaf = name.rpartition(".")
    match = _RECURRENT.fullmatch(leaf)
    if match is not None:
        layer = f"l{match[3]}" + (".reverse" if match[4] else "")
        return f"{path}.{layer}" if path else layer, f"{match[1]}_{match[2]}"
    return (path, leaf) if leaf in LEAVES else (name, "")


def template(path: str) -> tuple[str, tuple[int, ...]]:
    """``layer1.0.conv2`` as (``layer{}.{}.conv{}``, (1, 0, 2))."""
    numbers = tuple(number(text) for text in _NUMBER.findall(path))
    return _NUMBER.sub("{}", path.replace("{}", "<>")), numbers


def number(text: str) -> int:
    return int(text) if text.isdecimal() else ord(text) - ord("a")


def fronts(path: str) -> list[str]:
    """The beginnings of `path` that end in a number, as ``layer1`` and ``layer1.0`` of ``layer1.0.conv``."""
    return [path[: match.end()] for match in _NUMBER.finditer(path)]


def words(text: str) -> list[str]:
    """The words of a path or template, small, in order, without numbers."""
    return [token.lower() for token in _TOKEN.findall(text)]
