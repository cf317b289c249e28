"""A state dict to be written to a separate file, independent of its source.

Sources are state dicts inside a checkpoint, whole pickled modules, TorchScript archives and exported programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from ckptfix.checkpoint import Checkpoint, Derived, FileVersion, OutputFile, Plan, Storage, TensorEntry, with_parts
from ckptfix.dataclass import dataclass
from ckptfix.errors import Truncated, WouldLoseData
from ckptfix.findings.row import Finding
from ckptfix.formats.torch import emit as torch_emit
from ckptfix.formats.torch import legacy_layout, zip_layout
from ckptfix.formats.torch.common import element_sizes, little_endian
from ckptfix.formats.torch.emit import Calls
from ckptfix.io.source import truncated_hint


@dataclass(frozen=True, slots=True)
class Weights:
    """A state dict that was found in a file.

    Attributes:
        path: the file.
        what: a description of the source: ``"the module models.Net"``.
        at: its address in the file; ``""`` for the whole of it.
        entries: its tensors in order, each under its full name, detached.
        versions: module path -> its ``_metadata``; None if that is unknown.
        calls: the rebuild calls of the `entries` that are not dense.
        left: addresses of the other contents of the file.
        classes: classes that it names; no code of them was run.
        findings: notes on what it may lack; those with the id ``not-taken`` are losses.
        byteorder: byte order of the data.
        beside: the other tensors of the file.
        files: files of the checkpoint that it was in; empty for a program.
        dicts: first components of keys that become dicts of their own in the output.
    """

    path: str
    what: str
    at: str
    entries: tuple[TensorEntry, ...]
    versions: Mapping[str, Mapping[str, Any]] | None = None
    calls: Calls | None = None
    left: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    byteorder: Literal["little", "big"] = "little"
    beside: tuple[TensorEntry, ...] = ()
    files: tuple[FileVersion, ...] = ()
    dicts: tuple[str, ...] = ()

    def as_checkpoint(self) -> Checkpoint:
        """Return a checkpoint that holds only this state dict."""
        return Checkpoint(
            path=self.path,
            format="state dict",
            size=0,
            traits={},
            load_entries=lambda: self.entries,
            load_values=lambda: iter(()),
            byteorder=self.byteorder,
        )


def check_whole(weights: Weights, size_of: Callable[[str], int]) -> None:
    """Refuse tensors whose bytes a file lacks, by the sizes that `size_of` returns.

    Raises:
        WouldLoseData: a tensor is on the meta device.
        Truncated: its bytes are after the end of the file.
    """
    for entry in with_parts(weights.entries):
        if entry.storage is None:
            continue
        data = entry.storage.data
        if data is None:
            message = "its data is not in the file (a tensor on the meta device)"
            raise WouldLoseData(message, path=weights.path, where=entry.name)
        for part in data.sources if isinstance(data, Derived) else (data,):
            if part.end > (size := size_of(part.path)):
                message = f"{part.length:,} bytes are expected, but only {max(size - part.offset, 0):,} are left"
                hint = truncated_hint(weights.path)
                raise Truncated(message, path=weights.path, where=entry.name, offset=part.offset, hint=hint)


def plan_torch(weights: Weights, dest: str, *, legacy: bool) -> Plan:
    """Plan a torch file at `dest` that holds the state dict as ``torch.save(model.state_dict(), dest)`` would.

    Raises:
        WouldLoseData: the data of a tensor is not in the file, or torch would not load it from a legacy file.
        Unsupported: a tensor cannot be rewritten.
    """
    how: dict[str, Any] = {"versions": weights.versions, "calls": weights.calls, "dicts": weights.dicts}
    if not legacy:
        made = torch_emit.fresh(weights.entries, **how)
        segments = zip_layout.fresh(made.pickle, made.storages, weights.byteorder)
        return Plan((OutputFile.of(dest, segments),))
    legacy_layout.refuse_unloadable(weights.entries, weights.path)
    if weights.byteorder == "big":
        weights = in_little(weights)
        how["calls"] = weights.calls
    made = torch_emit.fresh(weights.entries, legacy=True, **how)
    sized = [(key, data, made.itemsizes[key]) for key, data, _ in made.storages]
    return Plan((OutputFile.of(dest, legacy_layout.fresh(made.pickle, sized, dest)),))


def in_little(weights: Weights) -> Weights:
    """Return the same weights, with every storage converted to little-endian as it streams."""
    units = element_sizes(weights.as_checkpoint())
    turned: dict[Storage, Storage] = {}

    def turn(storage: Storage) -> Storage:
        if storage not in turned:
            assert storage.data is not None
            data = little_endian(storage.data, "big", units.get(storage.identity, 1))
            turned[storage] = replace(storage, data=data, crc32=None)
        return turned[storage]

    entries = tuple(
        entry if entry.storage is None else replace(entry, storage=turn(entry.storage)) for entry in weights.entries
    )
    calls = weights.calls
    if calls is not None:
        storage_of = calls.storage_of
        calls = replace(calls, storage_of=lambda persid: turn(storage_of(persid)))
    return replace(weights, entries=entries, calls=calls, byteorder="little")
