"""Files of another save among those of the ranks: what counts the steps of a training says other numbers in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from ckptfix.checkpoint.address import join
from ckptfix.errors import CkptfixError
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.folders.steps import counted
from ckptfix.formats.ranks.file import File
from ckptfix.formats.torch.tensors import BadTensor, is_tensor
from ckptfix.pickles.graph import Node, pairs
from ckptfix.urls import as_path

COUNTERS = frozenset({"step", "steps", "global_step", "global_steps", "epoch", "iteration"})

DEPTH = 4
"""As in ``optimizer/state/NAME/step``."""


def other_saves(files: Mapping[int, File]) -> list[Finding]:
    """A finding for each file that counts other steps than most; reads an element of each counter."""
    counts = {rank: dict(_counts(file, file.parts.graph.root, "", DEPTH)) for rank, file in files.items()}
    there: dict[str, list[float]] = {}
    for own in counts.values():
        for address, value in own.items():
            there.setdefault(address, []).append(value)
    usual = {address: Counter(values).most_common(1)[0][0] for address, values in there.items()}
    rows = []
    for rank, own in counts.items():
        odd = next((address for address, value in own.items() if value != usual[address]), None)
        if odd is not None:
            others = f"in the other ranks' files {usual[odd]:g}"
            message = f"rank {rank}: {as_path(files[rank].path).name}: {odd} is {own[odd]:g}, {others}"
            rows.append(found("other-save", f"{message}: it is of another save", where=files[rank].path))
    return rows


def _counts(file: File, node: Node, at: str, depth: int) -> Iterator[tuple[str, float]]:
    """The address and the value of each counter in a mapping, and in those within it."""
    for key, value in pairs(node) or ():
        address = join(at, str(key))
        if key in COUNTERS:
            number = _number(file, value, address)
            if number is not None:
                yield address, number
        elif depth > 1:
            yield from _counts(file, value, address, depth - 1)


def _number(file: File, value: Node, address: str) -> float | None:
    try:
        if is_tensor(value):
            return counted(file.entry(address)) if address in file.nodes else None
        return counted(value)
    except (CkptfixError, BadTensor):
        return None  # what is damaged is named where it is read
