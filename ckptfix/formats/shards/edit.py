"""Edits of a sharded checkpoint: each shard is edited by the format of its file, then the index is updated.

Other files in the folder are copied byte for byte; folders, and files of other checkpoints there, are left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ckptfix.checkpoint import (
    ByteRange,
    Checkpoint,
    Drop,
    Edit,
    OutputFile,
    Plan,
    Put,
    Rename,
    SetLocation,
    SetMetadata,
    TensorEntry,
)
from ckptfix.errors import KeyConflict, NoSuchTensor, Unsupported
from ckptfix.findings.row import Finding
from ckptfix.formats.folders.companions import Beside, beside
from ckptfix.formats.safetensors.ties import share_plan
from ckptfix.formats.safetensors.write import plan_like
from ckptfix.formats.shards import files
from ckptfix.formats.shards.layout import ShardedLayout, ShardFile, data_bytes
from ckptfix.formats.shards.objects import own_storage
from ckptfix.formats.torch.common import maybe_pickled_object
from ckptfix.io.virtual_files import PlannedFile
from ckptfix.urls import as_path, real_path

Site = tuple[str, str]
"""Address and kind of a list of names."""


def plan_edit(checkpoint: Checkpoint, layout: ShardedLayout, edits: Sequence[Edit], dest: str) -> Plan:
    """Plan the files of the checkpoint with `edits`, below `dest`; see the contract in `base`.

    Raises:
        WouldLoseData: shards or tensors of it are missing.
        NoSuchTensor: no shard has a name.
        KeyConflict: names of two shards would become one.
        CkptfixError: an error of the format of the shards.
    """
    layout.refuse_incomplete()
    parts = [_Part(index, shard) for index, shard in enumerate(layout.shards)]
    for edit in edits:
        _refuse_unknown(edit, parts, layout.path)
        for part in parts:
            part.take(edit)
    _refuse_conflicts(parts, layout.path)
    planned: list[OutputFile] = []
    findings: list[Finding] = []
    indexed = layout.index is not None and any(part.left for part in parts)
    for part in parts:
        shard = part.shard
        if indexed and part.emptied:
            continue
        plan = files.file_formats()[shard.read.format].plan_edit(shard.read, part.edits, str(as_path(dest, shard.name)))
        planned += plan.files
        findings += plan.findings
    names = {old: new for part in parts for old, new in part.new.items()}
    resized = any(isinstance(edit, Drop | Put) for edit in edits)
    return _folder(layout, planned, findings, dest, names, resized=resized)


def in_place(layout: ShardedLayout, plan: Plan, block: Callable[[], int]) -> Plan:
    """Rewrite the folder `plan` as an in-place edit, shard by shard; see `Format.in_place`."""
    shards = {real_path(shard.path): shard.read for shard in layout.shards}
    planned: list[OutputFile] = []
    for file in plan.files:
        read = shards.get(real_path(file.path))
        amend = files.file_formats()[read.format].in_place if read is not None else None
        planned += (file,) if read is None or amend is None else amend(read, Plan((file,)), block).files
    return replace(plan, files=tuple(planned))


def plan_files(layout: ShardedLayout, make: Callable[[Checkpoint, str], Plan], dest: str) -> Plan:
    """Plan the folder with each shard as `make` plans it; see `Format.edits_each_file`."""
    layout.refuse_incomplete()
    plans = [make(shard.read, str(as_path(dest, shard.name))) for shard in layout.shards]
    planned = [file for plan in plans for file in plan.files]
    copied = all(
        file.segments == (ByteRange(shard.path, 0, shard.read.size),)
        for file, shard in zip(planned, layout.shards, strict=True)
    )
    findings = [finding for plan in plans for finding in plan.findings]
    made = _folder(layout, planned, findings, dest, {}, resized=not copied)
    return replace(made, holds=tuple(plan.holds for plan in plans))


def plan_rows(
    layout: ShardedLayout, rows: Sequence[tuple[str, TensorEntry]], dest: str, metadata: Mapping[str, str]
) -> Plan:
    """Plan the folder with new tensors: each is stored in the shard of the old key that it comes from.

    Args:
        rows: (old key, tensor under its new key) in order.
        metadata: string pairs that each shard gets in addition to those of its ties.

    Raises:
        WouldLoseData: shards or tensors of the checkpoint are missing, or safetensors cannot hold a tensor.
    """
    layout.refuse_incomplete()
    shard_of = {name: shard.name for shard in layout.shards for name in (*shard.ties, *shard.names)}
    shard_of |= {name: shard.name for shard in layout.shards for name in shard.listed if name in shard_of}
    by_shard: dict[str, list[TensorEntry]] = {shard.name: [] for shard in layout.shards}
    reads = {shard.name: shard.read for shard in layout.shards}
    weight_map: dict[str, str] = {}
    for key, entry in rows:
        by_shard[shard_of[key]].append(entry)
        weight_map[entry.key] = shard_of[key]
    planned: list[OutputFile] = []
    findings: list[Finding] = []
    for name, entries in by_shard.items():
        if not entries:
            continue
        kept, pairs, noticed = share_plan(entries)
        for left_out in {entry.key for entry in entries} - {entry.key for entry in kept}:
            weight_map.pop(left_out)
        plan = plan_like(reads[name], kept, str(as_path(dest, name)), {**metadata, **pairs})
        planned += plan.files
        findings += (*noticed, *plan.findings)
    around = around_of(layout)
    written = [*planned, *around.copied_to(dest)]
    if layout.index is not None:
        text = layout.index.with_map(weight_map, _size(planned))
        written.append(OutputFile.of(as_path(dest, files.relative(layout.index.path, layout.folder)), [text]))
    return Plan(tuple(written), (*findings, *around.findings()))


def _folder(
    layout: ShardedLayout,
    planned: Sequence[OutputFile],
    findings: Sequence[Finding],
    dest: str,
    names: Mapping[str, str | None],
    *,
    resized: bool,
) -> Plan:
    """Return the plan of the planned shards, the companion files, and the index last."""
    around = around_of(layout)
    written = [*planned, *around.copied_to(dest)]
    if layout.index is not None:
        text = layout.index.edited(names, _size(planned) if resized else None)
        written.append(OutputFile.of(as_path(dest, files.relative(layout.index.path, layout.folder)), [text]))
    return Plan(tuple(written), (*findings, *around.findings()))


def around_of(layout: ShardedLayout) -> Beside:
    """Return the companion files of the shards and their index; files of other checkpoints are left behind."""
    own = [shard.name for shard in (*layout.shards, *layout.unread)]
    own += [] if layout.index is None else [files.relative(layout.index.path, layout.folder)]
    others = [name for name in files.find(layout.folder).names() if name not in own]
    around = beside(layout.folder, [str(as_path(layout.folder, name)) for name in (*own, *others) if "\0" not in name])
    return replace(around, left=(*((name, "it belongs to a different checkpoint") for name in others), *around.left))


class _Part:
    """A shard, and the edits that apply to it.

    Attributes:
        new: name at the top level of the shard -> new name; None for a dropped one.
    """

    def __init__(self, number: int, shard: ShardFile) -> None:
        self.number = number
        self.shard = shard
        self.edits: list[Edit] = []
        self.new: dict[str, str | None] = {name: name for name in (*shard.names, *shard.ties)}
        self._sites: dict[Site, set[str]] = {}
        for site in shard.read.sites:
            self._sites.setdefault((site.at, site.kind), set()).update(site.names)

    def names(self, at: str, kind: str = "state_dict") -> set[str]:
        """Return the names at an address, after the edits so far."""
        return self._sites.get((at, kind), set())

    @property
    def left(self) -> bool:
        """True if a name remains at its top level after the edits."""
        return any(new is not None for new in self.new.values())

    @property
    def emptied(self) -> bool:
        """True if the edits remove everything in it, so that no name in an index refers to it."""
        return bool(self.new) and not self.left and not any(at for (at, _), names in self._sites.items() if names)

    def take(self, edit: Edit) -> None:
        """Record the part of `edit` that concerns this shard."""
        if isinstance(edit, Rename):
            self._rename(edit)
        elif isinstance(edit, Drop):
            own = self.names(edit.at)
            gone = tuple(name for name in edit.names if name in own)
            if gone:
                self.edits.append(Drop(edit.at, gone))
                self._changed(edit.at, "state_dict", dict.fromkeys(gone))
        elif isinstance(edit, Put):
            own = self.names(edit.at)
            tensors = {name: self._own(entry) for name, entry in edit.tensors.items() if name in own}
            if tensors:
                self.edits.append(Put(edit.at, tensors))
        elif isinstance(edit, SetLocation):
            if any(location in edit.moves for location in self.shard.read.devices):
                self.edits.append(edit)
        elif isinstance(edit, SetMetadata):
            if maybe_pickled_object(self.shard.read) is not None:
                raise Unsupported("a torch file has no string metadata", path=self.shard.path)
            self.edits.append(edit)

    def _rename(self, edit: Rename) -> None:
        own = self.names(edit.at, edit.kind)
        if len(edit.names) < len(own):
            names = {old: new for old, new in edit.names.items() if old in own}
        else:
            names = {old: edit.names[old] for old in own if old in edit.names}
        if names:
            self.edits.append(replace(edit, names=names))
            self._changed(edit.at, edit.kind, names)

    def _changed(self, at: str, kind: str, names: dict[str, str] | dict[str, None]) -> None:
        own = self._sites[at, kind]
        self._sites[at, kind] = own.difference(names).union(new for new in names.values() if new is not None)
        if not at and kind == "state_dict":
            for old, current in self.new.items():
                if current is not None and current in names:
                    self.new[old] = names[current]

    def _own(self, entry: TensorEntry) -> TensorEntry:
        """Return an entry of the joined checkpoint as this shard has it."""
        if entry.storage is None or maybe_pickled_object(self.shard.read) is None:
            return entry
        return replace(entry, storage=own_storage(entry.storage, self.number))


def _refuse_unknown(edit: Edit, parts: Sequence[_Part], path: str) -> None:
    wanted: Iterable[str] = ()
    kind = "state_dict"
    if isinstance(edit, Rename):
        wanted, kind = edit.names, edit.kind
    elif isinstance(edit, Drop):
        wanted = edit.names
    elif isinstance(edit, Put):
        wanted = edit.tensors
    else:
        return
    known: set[str] = set().union(*(part.names(edit.at, kind) for part in parts))
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise NoSuchTensor("no such tensor", path=path, where=min(unknown))


def _refuse_conflicts(parts: Sequence[_Part], path: str) -> None:
    """Refuse names of different shards that become equal; each file's format checks its own names."""
    taken: dict[str, tuple[_Part, str]] = {}
    clashes: dict[str, tuple[str, str]] = {}
    for part in parts:
        for old, new in part.new.items():
            if new is None:
                continue
            first, name = taken.setdefault(new, (part, old))
            if first is not part:
                clashes.setdefault(new, (name, old))
    if clashes:
        after, (one, other) = next(iter(clashes.items()))
        message = f"{one} and {other} would become {after}"
        raise KeyConflict(message, path=path, pairs=tuple(clashes.items()))


def _size(planned: Sequence[OutputFile]) -> int:
    """Return the number of tensor bytes in planned files."""
    return sum(data_bytes(files.open_file(PlannedFile(file)).entries) for file in planned)
