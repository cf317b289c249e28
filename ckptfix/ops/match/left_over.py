"""Reasons why tensors that shapes relate have no counterpart, and the lines of rules that would pair them.

Nothing is paired here: that two shapes fit each other does not show that the tensors do. The order of gates, or of
heads, is that of the author of each model, and only a run of both models shows it (`gradients`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ckptfix.names.lines import line
from ckptfix.names.operations import Operation
from ckptfix.names.slots import Slot

VERIFY = "--verify, with both models, finds out and proves it; or state it in a rules file (`ckptfix help rules`)"
"""The hint on all of these reasons."""

_RECURRENT = re.compile(r"(?:.*\.)?weight_(ih|hh)(?:_l\d+)?(?:_reverse)?", re.DOTALL)

GATES = {3: "reset, update, new", 4: "input, forget, cell, output"}
"""Rows of the weights of `torch.nn.GRU` and `torch.nn.LSTM`, in order (torch/nn/modules/rnn.py)."""

_NUMBER = re.compile(r"(?<=\.)\d{1,9}(?=\.)")


def reasons(ours: Sequence[Slot], theirs: Sequence[Slot]) -> Iterator[str]:
    """Yield a sentence for each way in which the tensors that are left over on one side resemble those of the other.

    Args:
        ours, theirs: the tensors of IN and TARGET without a counterpart.
    """
    for one, other, where in ((ours, theirs, "IN"), (theirs, ours, "TARGET")):
        yield from _gates(one, other, where)
        yield from _heads(one, other, where)
    yield from _transposed(ours, theirs)


def _gates(wholes: Sequence[Slot], others: Sequence[Slot], where: str) -> Iterator[str]:
    """Yield one sentence if torch's recurrent layers are left, and tensors that may be the same or their gates."""
    for slot in wholes:
        if _RECURRENT.fullmatch(slot.name) is None or len(slot.shape) != 2:
            continue
        rows, columns = slot.shape
        for count, order in GATES.items():
            hidden, odd = divmod(rows, count)
            hidden_side = any(other.shape == (rows, hidden) for other in wholes)
            parts = {(rows, columns), (hidden, columns), (columns, hidden), (columns, rows)}
            if not odd and hidden_side and any(other.shape in parts for other in others):
                yield (
                    f"{where} has {slot.name} {list(slot.shape)} with {count} gates in torch's order ({order}); other "
                    "layers have their own order"
                )
                return


def _heads(wholes: Sequence[Slot], others: Sequence[Slot], where: str) -> Iterator[str]:
    """Yield one sentence if tensors are left that have the rows of several equal ones, which a number counts."""
    counted: dict[str, list[Slot]] = {}
    for slot in others:
        if _NUMBER.search(slot.name):
            counted.setdefault(_NUMBER.sub("{}", slot.name), []).append(slot)
    for slot in wholes:
        for parts in counted.values():
            shape = parts[0].shape
            joined = (shape[0] * len(parts), *shape[1:]) if shape else ()
            if len(parts) > 1 and len(shape) == 2 and slot.shape == joined and len({one.shape for one in parts}) == 1:
                beyond = "TARGET" if where == "IN" else "IN"
                yield (
                    f"{where} has {slot.name} {list(slot.shape)}, which may be {len(parts)} tensors of {beyond}, such "
                    f"as {parts[0].name} {list(shape)}, one after another"
                )
                return


def _transposed(ours: Sequence[Slot], theirs: Sequence[Slot]) -> Iterator[str]:
    """Yield one sentence if each matrix that is left has its only transpose among those of the other side."""
    matrices = [[slot for slot in side if len(slot.shape) == 2] for side in (ours, theirs)]
    if not matrices[0] or any(slot.shape[0] == slot.shape[1] for side in matrices for slot in side):
        return
    turned = {slot.shape[::-1]: slot for slot in matrices[1]}
    if len(turned) != len(matrices[1]) or {slot.shape for slot in matrices[0]} != turned.keys():
        return
    one = matrices[0][0]
    other = turned[one.shape]
    written = line((one.name,), (other.name,), (Operation("transpose"),))
    if written is not None:
        text = " ".join(part for part in (written[0], "->", written[1], written[2]) if part)
        yield (
            f"{one.name} {list(one.shape)} has the shape of {other.name} {list(other.shape)} transposed: if they are "
            f"the same, add lines such as `{text}` to the rules that --partial --rules FILE writes"
        )
