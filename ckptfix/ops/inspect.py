"""What a checkpoint is and holds, from its headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ckptfix import keys
from ckptfix.checkpoint import Checkpoint, Finding, StateDict, TensorEntry
from ckptfix.errors import CkptfixError, printable
from ckptfix.formats import FORMATS, trusted
from ckptfix.formats.torch_common import Parts
from ckptfix.ops import choose
from ckptfix.ops.candidates import is_inside, state_dict_of, view
from ckptfix.ops.inspect_text import summary
from ckptfix.words import plural, shape, size


@dataclass(frozen=True, slots=True, repr=False)
class Inspection:
    """A checkpoint in numbers.

    Attributes:
        title: what the format is called.
        size: bytes of the file.
        traits: what the format states about the file.
        tensors: names that hold a tensor.
        parameters: elements of the model's tensors, buffers too, tied ones once, an optimizer's not.
        nbytes: bytes of all storages, each once.
        dtypes, devices: how many tensors of a dtype, how many places of a location.
        wrappers: component -> (how many keys have it, the first of them).
        globals: (name, whether weights_only=True accepts it) of every class and function that the pickle names.
        weights_only: why ``torch.load(weights_only=True)`` would refuse the file; None if it would not.
    """

    path: str
    format: str
    title: str
    size: int
    traits: Mapping[str, Any]
    tensors: int
    parameters: int
    nbytes: int
    dtypes: Mapping[str, int]
    devices: Mapping[str, int]
    wrappers: Mapping[str, tuple[int, str]]
    state_dicts: tuple[StateDict, ...]
    globals: tuple[tuple[str, bool], ...]
    weights_only: str | None
    metadata: Mapping[str, str]
    findings: tuple[Finding, ...]
    entries: tuple[TensorEntry, ...]

    def __str__(self) -> str:
        """What the file is, a fact a line, and a line for each tensor."""
        shown = "".join(
            f"\n{printable(entry.name)}  {entry.dtype}  {shape(entry.shape)}  {size(entry.nbytes)}  {entry.location}"
            for entry in self.entries
        )
        return "\n".join(summary(self, most=0)) + (f"\n{shown}" if shown else "")

    def __repr__(self) -> str:
        return f"<Inspection of {self.path!r}: {self.title}, {plural(self.tensors, 'tensor')}>"

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON, the entries without their places."""
        return {
            "path": self.path,
            "format": self.format,
            "title": self.title,
            "size": self.size,
            "traits": dict(self.traits),
            "tensors": self.tensors,
            "parameters": self.parameters,
            "nbytes": self.nbytes,
            "dtypes": dict(self.dtypes),
            "devices": dict(self.devices),
            "wrappers": {name: {"keys": count, "example": first} for name, (count, first) in self.wrappers.items()},
            "state_dicts": [asdict(state) for state in self.state_dicts],
            "globals": [{"name": name, "accepted": accepted} for name, accepted in self.globals],
            "weights_only": {"accepted": self.weights_only is None, "reason": self.weights_only},
            "metadata": dict(self.metadata),
            "findings": [asdict(finding) for finding in self.findings],
            "entries": [_row(entry) for entry in self.entries],
        }


def _row(entry: TensorEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "stride": list(entry.stride),
        "offset": entry.offset,
        "nbytes": entry.nbytes,
        "location": entry.location,
        "requires_grad": entry.requires_grad,
        "parameter": entry.parameter,
        "kind": entry.kind,
        "detail": entry.detail,
        "storage": None if entry.storage is None else entry.storage.key,
    }


def inspect(checkpoint: Checkpoint) -> Inspection:
    """Describe `checkpoint`; no tensor byte is read."""
    entries = checkpoint.entries
    storages: dict[str, int] = {}
    stack = list(entries)
    while stack:
        entry = stack.pop()
        stack.extend(entry.parts)
        if entry.storage is not None:
            storages[entry.storage.key] = entry.storage.nbytes
    names = [name for site in checkpoint.sites if site.kind == "state_dict" for name in site.names]
    graph = checkpoint.graph.graph if isinstance(checkpoint.graph, Parts) else None
    found = dict.fromkeys(trusted.canonical(node) for node in graph.globals) if graph else {}
    return Inspection(
        path=checkpoint.path,
        format=checkpoint.format,
        title=FORMATS[checkpoint.format].TITLE,
        size=checkpoint.size,
        traits=checkpoint.traits,
        tensors=len(entries),
        parameters=_parameters(checkpoint),
        nbytes=sum(storages.values()),
        dtypes=dict(Counter(entry.dtype for entry in entries)),
        devices=checkpoint.devices,
        wrappers=keys.wrappers_in(names),
        state_dicts=checkpoint.state_dicts,
        globals=tuple((name, trusted.accepted(name)) for name in found),
        weights_only=trusted.refusal(graph) if graph else None,
        metadata=checkpoint.metadata,
        findings=tuple(checkpoint.findings),
        entries=entries,
    )


def _parameters(checkpoint: Checkpoint) -> int:
    """Elements of the tensors of the model, or of all between which nothing decides; tied ones once."""
    seen: set[object] = set()
    count = 0
    for row in choose.meant(checkpoint):
        try:
            entries = state_dict_of(checkpoint, row)
        except CkptfixError:  # a broken module is still to be described
            entries = tuple(entry for entry in checkpoint.entries if is_inside(entry.name, row.at))
        for entry in entries:
            place = view(entry) if entry.storage is not None else (row.at, entry.key)
            if place not in seen:
                seen.add(place)
                count += entry.numel
    return count
