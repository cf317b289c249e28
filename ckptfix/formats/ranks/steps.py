"""Detection of files from another save: the step counters in them differ from those of the other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from ckptfix.checkpoint.address import join
from ckptfix.errors import CkptfixError
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.folders.steps import counted
from ckptfix.formats.ranks.file import RankFile
from ckptfix.formats.torch.tensors import BadTensor, is_tensor
from ckptfix.pickles.graph import Node, pairs
from ckptfix.urls import as_path

COUNTERS = frozenset({"step", "steps", "global_step", "global_steps", "epoch", "iteration"})

DEPTH = 4
"""The depth of ``optimizer/state/NAME/step``."""


def other_saves(files: Mapping[int, RankFile]) -> list[Finding]:
    """Return a finding for each file whose counters differ from most; reads one element of each counter."""
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
            others = f"but {usual[odd]:g} in the other ranks' files"
            message = f"rank {rank}: {as_path(files[rank].path).name}: {odd} is {own[odd]:g}, {others}"
            rows.append(found("other-save", f"{message}: it is from a different save", where=files[rank].path))
    return rows


def _counts(file: RankFile, node: Node, at: str, depth: int) -> Iterator[tuple[str, float]]:
    """Yield the address and the value of each counter in a dict and its nested dicts."""
    for key, value in pairs(node) or ():
        address = join(at, str(key))
        if key in COUNTERS:
            number = _number(file, value, address)
            if number is not None:
                yield address, number
        elif depth > 1:
            yield from _counts(file, value, address, depth - 1)


def _number(file: RankFile, value: Node, address: str) -> float | None:
    try:
        if is_tensor(value):
            return counted(file.entry(address)) if address in file.nodes else None
        return counted(value)
    except (CkptfixError, BadTensor):
        return None  # damage is reported where the value is read
