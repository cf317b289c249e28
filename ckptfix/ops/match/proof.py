"""Proof by equal outputs: of the pairs of tensors that the outputs depend on, in all of their parts but one.

Outputs say nothing about what they do not depend on: an expert that is not chosen, queries and keys if there is one
token, the gates of a hidden state of zeros. If all parts of a tensor but one are
proved, the last one has the place that is left. Outputs do not show either which of two tensors is which if the model
does the same with both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckptfix.align.result import MatchedPair, Matching
from ckptfix.ops.match.fused import Operations
from ckptfix.ops.match.gradients import EQUAL, equal_numbers, leaf
from ckptfix.ops.match.running import STATISTICS, Models, gradients, kept_states, outputs

if TYPE_CHECKING:
    import torch

    from ckptfix.ops.match.running import Arguments

PROVED = "verified on outputs"
"""Reason to pair tensors; it overrides all others."""

NOTHING = 1e-12
"""Greatest gradient up to which a tensor does not matter: the bias of keys changes no attention, but for rounding."""

PARTS = 2, 3, 4
"""Numbers of equal parts that a tensor may hold: halves of a GLU; queries, keys and values; gates of GRU and LSTM."""

_SHAPES = re.compile(r"\b(?:transpose|permute|reshape)\b[^|]*\|?|\bdim=\d+")


class Proof:
    """The result of one run of the source, which shows the tensors that its outputs depend on.

    Attributes:
        reached: names of the tensors that the outputs depend on, in all of their parts but one.
        twins: name -> a second tensor, if exchanging the two changes no output.
    """

    def __init__(self, both: Models, arguments: Arguments, among: Sequence[str]) -> None:
        """Run the source.

        Args:
            both: their source has the weights that gave equal outputs.
            among: the outputs that were compared, by name.

        Raises:
            Refused: the source has no gradients.
        """
        import torch

        self._both, self._arguments, self._among = both, arguments, among
        self.twins: dict[str, str] = {}
        self._state: Mapping[str, torch.Tensor] = both.source.state_dict(keep_vars=True)
        self._slopes = self._gradients()
        self._tables = {
            id(module.weight) for module in both.source.modules()
            if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag)
        }  # fmt: skip
        self.reached = {
            name for name, slope in self._slopes.items()
            if float(slope.abs().max()) > NOTHING
            and (self._is_table(name) or _parts_unreached(slope, PARTS, square=True) < 2)
        }  # fmt: skip
        self.reached.update(name for name in _used(both.source, arguments) if name.endswith(STATISTICS))

    def _gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients by all names of the tensors."""
        _, found = gradients(self._both.source, self._arguments, "the model of --source", self._among)
        by_tensor = {id(self._state[name]): slope for name, slope in found.items() if slope.numel()}
        return {name: by_tensor[id(one)] for name, one in self._state.items() if id(one) in by_tensor}

    def settled(self, found: Matching, steps: Operations, before: Matching) -> tuple[Matching, Operations]:
        """Return the matching with the proved pairs certain. The others stay as open as they were.

        A pair that was certain is open if as many rows as its tensor has turned out to be reordered in another one.

        Args:
            found: the matching that gives equal outputs.
            before: the first proposals.
        """
        doubts = {_key(pair): pair for pair in before.pairs}
        certain = {key for key, pair in doubts.items() if not pair.instead}
        places = {pair.source: pair.target for pair in found.pairs if _key(pair) not in certain}
        self.twins = self._twins(places, {pair.source: pair.instead for pair in before.pairs})
        interchangeable = {_module(name) for name in self.twins}
        proved = {
            _key(pair)
            for pair in found.pairs
            if _module(pair.source) not in interchangeable and self._proves(pair, found.pairs)
        }
        proved |= {_key(pair) for pair in _following(found.pairs, proved, self._state)}
        moved = {self._rows(pair) for pair in found.pairs if _key(pair) in proved and _rows_moved(pair)} - {1}
        pairs: list[MatchedPair] = []
        open_: set[str] = set()
        for pair in found.pairs:
            if _key(pair) in proved:
                pairs.append(replace(pair, confidence=1.0, why=PROVED, instead=()))
            elif _key(pair) in doubts and (_rows_moved(pair) or self._rows(pair) not in moved):
                pairs.append(doubts[_key(pair)])
            else:
                open_.add(pair.source)
        taken = tuple(one for one in steps.taken if open_.isdisjoint(one.old))
        open_.update(name for one in steps.taken if one not in taken for name in one.old)
        gone = [pair for pair in found.pairs if pair.source in open_]
        done = replace(
            found,
            pairs=tuple(pair for pair in pairs if pair.source not in open_),
            left=(*found.left, *dict.fromkeys(pair.source for pair in gone)),
            missing=(*found.missing, *dict.fromkeys(pair.target for pair in gone)),
        )
        whole = all(_key(pair) in proved for pair in found.pairs if pair.source in self._slopes)
        return done, replace(steps, taken=taken, refused=steps.refused and not whole)

    def _rows(self, pair: MatchedPair) -> int:
        shape = self._state[pair.source].shape
        return shape[0] if len(shape) else 1

    def _proves(self, pair: MatchedPair, pairs: Sequence[MatchedPair]) -> bool:
        """Return whether outputs show where a tensor goes."""
        slope = self._slopes.get(pair.source)
        if pair.source not in self.reached or slope is None or not pair.operation or self._is_table(pair.source):
            return pair.source in self.reached
        targets = [one.target for one in pairs if one.source == pair.source]
        unreached = _parts_unreached(slope, {*PARTS, len(targets), *_moved(pair.operation)})
        return unreached == 0 or (unreached == 1 and len(set(map(_block, targets))) == 1)

    def _is_table(self, name: str) -> bool:
        return id(self._state[name]) in self._tables

    def unproved(self, names: Sequence[str]) -> str:
        """Return a sentence on the tensors among `names` that equal outputs do not prove; empty if there are none."""
        learned = [name for name in names if name in self._state and _is_learned(self._state[name])]
        hidden = [
            name for name in learned
            if name not in self.reached and _partner(name, learned, self._state) not in self.reached
        ]  # fmt: skip
        if hidden:
            more = "" if len(hidden) == 1 else f" and {len(hidden) - 1:,} more tensors"
            return f"the outputs for this input do not depend on all of {hidden[0]}{more}"
        for one, other in self.twins.items():
            return f"for this input, the model does the same with {one} and {other}"
        return ""

    def _twins(self, places: Mapping[str, str], rivals: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Return the matrices that may be exchanged, because the model does the same with both.

        If they hold equal numbers, their gradients are equal.

        Args:
            places: open tensor -> its counterpart.
            rivals: tensor -> other counterparts that names leave open; all, if names find none.
        """
        import torch

        matrices = [name for name in places if name in self.reached and self._state[name].dim() > 1]
        shapes = [tuple(self._state[name].shape) for name in matrices]
        if len(set(shapes)) == len(matrices):
            return {}
        scale = 0.5 / math.sqrt(max(min(shape[:2]) for shape in shapes))  # larger ones would saturate attention
        with kept_states(self._both):
            with torch.no_grad():
                for tensor in (self._state[name] for name in places):
                    if _is_learned(tensor):
                        tensor.copy_(equal_numbers(tuple(tensor.shape), scale))
            slopes = self._gradients()
        found: dict[str, str] = {}
        groups: dict[tuple[object, ...], list[str]] = {}
        for name, shape in zip(matrices, shapes, strict=True):
            if name in slopes:
                groups.setdefault(shape, []).append(name)
        for group in groups.values():
            for at, one in enumerate(group):
                for other in group[:at]:
                    either = places[one] in rivals.get(other, places.values())
                    either = either or places[other] in rivals.get(one, places.values())
                    if either and self._state[one] is not self._state[other] and _equal(slopes[one], slopes[other]):
                        found |= {other: one, one: other}
        return found


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if abs(float(one.norm() - other.norm())) > EQUAL * float(one.norm()):
        return False  # without a third tensor of this size
    return float((one - other).abs().max()) <= EQUAL * float(one.abs().max())


def _is_learned(tensor: Any) -> bool:
    import torch

    return isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point()


def _parts_unreached(slope: torch.Tensor, counts: Collection[int], *, square: bool = False) -> int:
    """Return how many of the equal parts of a tensor have a gradient of zero, by the division that shows most of them.

    Args:
        counts: numbers of parts along the first or the second dimension.
        square: only parts with as many rows as columns count, such as queries and keys; not the rows of a table.
    """
    most = 0
    for dim in range(min(2, slope.dim())):
        size = slope.shape[dim]
        rows = slope.abs().movedim(dim, 0).reshape(size, -1).amax(1)
        for count in counts:
            if size % count == 0 and (not square or (slope.dim() > 1 and slope.shape[1 - dim] * count == size)):
                most = max(most, int((rows.reshape(count, -1).amax(1) <= NOTHING).sum()))
    return most


def _moved(operation: str) -> Iterator[int]:
    """Yield the numbers of parts that the operations of a pair move."""
    for step in operation.split(" | "):
        options = dict(re.findall(r"(\w+)=([\d,]+)", step))
        if step.startswith("order"):
            yield options["to"].count(",") + 1
        if "groups" in options and "parts" in options:
            yield int(options["groups"]) * int(options["parts"])


def _following(
    pairs: Sequence[MatchedPair], proved: set[tuple[str, str, str]], state: Mapping[str, torch.Tensor]
) -> Iterator[MatchedPair]:
    """Yield the pairs that are certain because another tensor of both modules is proved.

    A matrix and its bias go together. Beside proved tensors that are not cut, a tensor goes to the one of its name, or
    to the only one of its shape.
    """
    modules: dict[tuple[str, str], list[MatchedPair]] = {}
    for pair in pairs:
        modules.setdefault((_module(pair.source), _module(pair.target)), []).append(pair)
    for inside in modules.values():
        sure = {one.source: one for one in inside if _key(one) in proved}
        names = list(dict.fromkeys(one.source for one in inside))
        for pair in inside if sure else ():
            if _key(pair) in proved:
                continue
            other = sure.get(_partner(pair.source, names, state) or "")
            together = other is not None and _rows_moved(other) == _rows_moved(pair)
            named = leaf(pair.source) == leaf(pair.target) or _alone(pair.source, names, state)
            if together or (named and not any(map(_rows_moved, inside))):
                yield pair


def _rows_moved(pair: MatchedPair) -> str:
    """Return the operations of a pair that cut a tensor or reorder its parts, in whichever dimension."""
    return _SHAPES.sub("", pair.operation).strip(" |")


def _alone(name: str, names: Sequence[str], state: Mapping[str, torch.Tensor]) -> bool:
    return sum(state[one].shape == state[name].shape for one in names) == 1


def _partner(name: str, names: Sequence[str], state: Mapping[str, torch.Tensor]) -> str | None:
    """Return the matrix of a bias, or the bias of a matrix: the only two tensors of a module that are as long."""
    near = [one for one in names if _module(one) == _module(name)]
    for length in set(state[name].shape[:2]):
        vectors = [one for one in near if tuple(state[one].shape) == (length,)]
        matrices = [one for one in near if state[one].dim() > 1 and length in state[one].shape[:2]]
        if len(vectors) == len(matrices) == 1 and name in (*vectors, *matrices):
            return vectors[0] if name == matrices[0] else matrices[0]
    return None


def _used(model: torch.nn.Module, arguments: Arguments) -> set[str]:
    """Return the names of the tensors of a model that a run uses."""
    from torch.overrides import TorchFunctionMode

    state = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    used: set[str] = set()

    def look(value: object) -> None:
        if isinstance(value, list | tuple):
            for one in value:
                look(one)
        elif isinstance(value, dict):
            look(list(value.values()))
        else:
            used.update(names.get(id(value), ()))

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") != "__get__":
                look(args)
                look(kwargs or {})
            return func(*args, **(kwargs or {}))

    with Watch():
        outputs(model, arguments, "the model")
    return used


def _key(pair: MatchedPair) -> tuple[str, str, str]:
    return pair.source, pair.target, pair.operation


def _module(name: str) -> str:
    return name.rpartition(".")[0] or name


def _block(name: str) -> str:
    """Return the module around that of a tensor; empty for a module of the model itself."""
    return _module(name).rpartition(".")[0]
