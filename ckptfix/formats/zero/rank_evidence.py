"""Evidence for the rank of a file, besides its name: two files that were exchanged would join to a wrong model.

::

    the name of its records   torch.save(..., path) writes the file's own; a buffer and older engines leave ``archive``
    its padding               stages 1 and 2: only the last rank's part of a row is padded
    its weights               stages 1 and 2: the module has them all, rounded to the dtype that it computes in

Stage 3 leaves nothing of the weights in the module, and its files state no rank. Source: deepspeed/runtime/zero/
stage_1_and_2.py (``groups_padding``, ``_update_scale`` to ``all_gather_dp_groups``), runtime/engine.py.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence

from ckptfix.checkpoint import TensorEntry
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError
from ckptfix.formats.deepspeed import rank_of
from ckptfix.formats.torch.tensors import is_tensor
from ckptfix.formats.zero.partitions import Cuts
from ckptfix.formats.zero.states import Model, Optim
from ckptfix.io.read import read_chunks

ELEMENTS = 64
"""How many weights in a row are compared at most."""

FEWEST = 8
"""With fewer in a row, another rank might have the same by chance."""

PROBES = 16
"""How many rows of weights are looked at, until one is found whose elements differ."""


@dataclass(slots=True)
class Ranks:
    """The optimizer's states of a save, by the ranks in the names of their files.

    Attributes:
        model: model states of a rank; `cuts` says where the parameters in them are among the ranks.
    """

    there: Mapping[int, Optim]
    model: Model
    cuts: Cuts
    count: int

    def exchanged(self) -> list[tuple[Optim, str]]:
        """Return the ranks whose file is that of another rank, and what shows it; reads a few bytes of each."""
        for found in (self._by_name(), self._by_padding(), self._by_weights()[1]):
            if found:
                return found
        return []

    def unverified(self) -> list[int]:
        """Return the ranks that nothing but the names of their files tells apart; none if there is one alone."""
        known = {rank for rank, own in self.there.items() if rank_of(own.file.saved_as) == rank}
        known |= {rank for rank, own in self.there.items() if rank == self.count - 1 and any(own.paddings)}
        left = sorted(self.there.keys() - known)
        if len(left) > 1:
            left = sorted(set(left) - self._by_weights()[0])
        return left if len(left) > 1 and not self.exchanged() else []

    def _by_name(self) -> list[tuple[Optim, str]]:
        said = ((own, rank, rank_of(own.file.saved_as)) for rank, own in self.there.items())
        wrong = ((own, other) for own, rank, other in said if other not in (None, rank))
        return [(own, f"it was saved as the file of rank {other}") for own, other in wrong]

    def _by_padding(self) -> list[tuple[Optim, str]]:
        last = self.count - 1
        wrong = [
            own for rank, own in self.there.items() if rank != last and not own.partitioned and any(own.paddings)
        ]
        return [(own, f"its part is padded, so it is from the last rank, {last}") for own in wrong]

    def _by_weights(self) -> tuple[set[int], list[tuple[Optim, str]]]:
        """Return the ranks whose weights are the module's, and those that have the module's of another rank."""
        held: dict[int, set[int]] = {}
        for rank in self.there:
            for (first, group), expected in self._expected(rank):
                found = {other for other, own in self.there.items() if _weights(own, group, first, expected)}
                # Where nobody has them, training went on without the optimizer's states: that shows nothing.
                if len(found) == 1:
                    held[rank] = found
                    break
        right = {rank for rank, found in held.items() if rank in found}
        wrong = []
        for rank, (other,) in held.items():
            if other != rank and other not in right:
                wrong.append((self.there[other], f"its weights are those that the model states have for rank {rank}"))
        return right, wrong

    def _expected(self, rank: int) -> Iterator[tuple[tuple[int, int], tuple[str, bytes]]]:
        """Yield places in the flat tensors of `rank`, and what the module has of them: its dtype and bytes."""
        rows = dict(self.model.module)
        tried = 0
        for cuts in self.cuts:
            for name, cut in cuts.items():
                at = 0
                for run in cut.runs():
                    node = rows.get(name)
                    if run.rank == rank and is_tensor(node):
                        made = _piece(self.model, name, node, at, min(run.count, ELEMENTS))
                        tried += 1
                        if made is not None:
                            yield (run.first, run.group), made
                        if tried == PROBES:
                            return
                    at += run.count


def _piece(model: Model, name: str, node: object, first: int, count: int) -> tuple[str, bytes] | None:
    """Return `count` elements of a tensor of the module; None if they are all the same, or it is not a whole one."""
    try:
        entry = model.file.tensor(node, f"module/{name}")  # type: ignore[arg-type]
        if count < FEWEST or math.prod(entry.shape) < first + count or entry.dtype not in _ROUNDED:
            return None
        data = _bytes(entry, first, count)
    except CkptfixError:
        return None
    return None if data == data[: entry.itemsize] * count else (entry.dtype, data)


def _weights(own: Optim, group: int, first: int, expected: tuple[str, bytes]) -> bool:
    """Tell whether a rank has these elements, rounded, at a place in one of its flat tensors."""
    dtype, data = expected
    count = len(data) // (4 if dtype == "float32" else 2)
    if group >= len(own.flat) or own.flat[group].dtype != "float32" or own.flat[group].numel < first + count:
        return False
    try:
        return _ROUNDED[dtype](_bytes(own.flat[group], first, count)) == data
    except (CkptfixError, OverflowError):
        return False


def _bytes(entry: TensorEntry, first: int, count: int) -> bytes:
    return b"".join(read_chunks(entry.data.sub(first * entry.itemsize, count * entry.itemsize)))


def _half(data: bytes) -> bytes:
    values: Sequence[float] = struct.unpack(f"<{len(data) // 4}f", data)
    return struct.pack(f"<{len(values)}e", *values)


def _bfloat16(data: bytes) -> bytes:
    """Round to the nearest bfloat16, a tie to the even one."""
    values: Sequence[int] = struct.unpack(f"<{len(data) // 4}I", data)
    return struct.pack(f"<{len(values)}H", *((value + 0x7FFF + (value >> 16 & 1) >> 16) & 0xFFFF for value in values))


_ROUNDED: Mapping[str, Callable[[bytes], bytes]] = {"float32": bytes, "float16": _half, "bfloat16": _bfloat16}
