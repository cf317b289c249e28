"""Repair of a sharded checkpoint: each shard is repaired as a file, and the index lists what is there.

A tensor that two shards hold is kept in the shard that the old index names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace

from ckptfix.checkpoint import Drop, OutputFile, Plan, TensorEntry, dtypes
from ckptfix.dataclass import dataclass
from ckptfix.errors import BadIndex, CkptfixError, DamagedFile, NoSuchFile, Refused
from ckptfix.findings.folders import BROKEN, LOST
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.folders.companions import Beside, beside
from ckptfix.formats.folders.safe_paths import file_inside
from ckptfix.formats.repairs import LostTensor, Repair, RepairTools
from ckptfix.formats.shards import files, slices, write
from ckptfix.formats.shards.index import Index, looks_like_index, read_index, written
from ckptfix.formats.shards.layout import data_bytes, open_layout, others, prefixed
from ckptfix.io.source import found_as, is_folder, open_source
from ckptfix.urls import as_path, real_path


def _is_sharded(path: str) -> bool:
    """Return whether `path` is a folder of shards, with or without an index, or an index."""
    kind = found_as(path)
    if kind == "folder":
        return bool(files.find(path))
    if kind != "file" or not path.endswith(".json"):
        return False
    with open_source(path) as reader:
        return looks_like_index(path, reader.read(0, min(reader.size, files.HEAD)))


def repair(path: str, tools: RepairTools) -> Repair:
    """Plan what can be saved of the sharded checkpoint whose folder or index is `path`.

    Raises:
        DamagedFile: none of its tensors are intact.
        Refused: the folder has several checkpoints.
    """
    work = _Work(path)
    if work.is_sliced():
        return _of_slices(path)
    for name, listed in work.wanted():
        work.take(name, listed, tools.file)
    work.settle()
    if not work.kept:
        raise DamagedFile(f"none of its {len(work.losses)} tensors is intact", path=path)
    formats = {one.repair.format for one in work.done}
    format = files.format_of_shards(formats)
    left_out = tuple(row for one in work.done for row in one.repair.left_out)
    return Repair(format, tuple(work.kept), tuple(work.losses), tuple(work.notes()), work.plan_to, left_out)


@dataclass(slots=True)
class _Done:
    """A shard that could be repaired; `drop` holds the keys that are kept in a different shard."""

    name: str
    path: str
    repair: Repair
    drop: set[str] = field(default_factory=set)

    def plan_to(self, dest: str) -> tuple[OutputFile, ...]:
        repair = self.repair
        if not self.drop:
            return repair.plan_to(dest).files
        format = files.file_formats()[repair.format]
        if repair.losses or repair.left_out:
            hint = "repair each shard by itself first"
            raise Refused("a damaged shard also holds tensors of other shards", path=self.path, hint=hint)
        return format.plan_edit(files.open_file(self.path), [Drop("", tuple(self.drop))], dest).files

    def names(self) -> dict[str, TensorEntry]:
        """Map keys to what the repaired file holds: intact tensors, and those that were filled."""
        kept = {entry.key: entry for entry in self.repair.kept if not entry.at}
        return {name: entry for name, entry in kept.items() if name not in self.drop}


class _Work:
    """The state of a repair in progress."""

    def __init__(self, path: str) -> None:
        self.path = path
        named = None if is_folder(path) else path
        self.folder = path if named is None else str(as_path(path).parent)
        self.there = files.find(self.folder)
        if named is None:
            self.there.refuse_several()
            if self.there.indexes:
                named = file_inside(self.folder, self.there.indexes[0], where=self.folder)
        self.index: Index | None = None
        self.index_path = named
        self.trouble = ""
        if named is not None:
            try:
                self.index = read_index(named)
            except BadIndex as error:
                self.trouble = error.message
        self.done: list[_Done] = []
        self.kept: list[TensorEntry] = []
        self.losses: list[LostTensor] = []
        self._notes: list[Finding] = []
        self._seen: set[str] = set()

    def wanted(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield the shards, and the keys that each should hold."""
        if self.index is not None:
            listed: dict[str, list[str]] = {}
            for name, shard in self.index.weight_map.items():
                listed.setdefault(shard, []).append(name)
            yield from ((shard, tuple(names)) for shard, names in sorted(listed.items()))
            yield from ((shard, ()) for shard in self.there.left_out(listed))
            return
        if len(self.there.groups) != 1:
            raise DamagedFile(f"its index is lost ({self.trouble}), and its shards are not numbered", path=self.path)
        (name, suffix, count), numbered = next(iter(self.there.groups.items()))
        there = [*numbered.values(), *files.missing_numbers(count, numbered, name, suffix)]
        yield from ((shard, ()) for shard in sorted(there))

    def is_sliced(self) -> bool:
        """Return whether the files hold slices of tensors."""
        try:
            return slices.is_sliced(open_layout(self.path))
        except BadIndex:
            return False

    def take(self, name: str, listed: Sequence[str], repair_file: Callable[[str], Repair]) -> None:
        """Repair the shard called `name`, which should hold `listed`."""
        try:
            path = file_inside(self.folder, name, where=self.index_path or self.folder)
            if (real := real_path(path)) in self._seen:
                return
            self._seen.add(real)
            if _is_sharded(path):
                # Its own shards may be this checkpoint again, which would never end.
                self._lost(name, listed, f"its shard {name} is an index, which holds no tensors")
                return
            repair = repair_file(path)
        except NoSuchFile:
            self._lost(name, listed, f"its shard {name} is missing")
            return
        except CkptfixError as error:
            self._lost(name, listed, f"its shard {name}: {error.message}")
            return
        self.done.append(_Done(name, path, repair))
        self._notes += (prefixed(note, name) for note in repair.notes)

    def _lost(self, shard: str, listed: Sequence[str], reason: str) -> None:
        if not listed:
            reason += "; without the index, its content is unknown"
        self.losses += [LostTensor(name, None, "", reason) for name in listed or (shard,)]

    def settle(self) -> None:
        """Decide between shards that hold the same key, and collect what is kept and lost."""
        weight_map: Mapping[str, str] = {} if self.index is None else self.index.weight_map
        holders: dict[str, list[_Done]] = {}
        for one in self.done:
            for name in one.names():
                holders.setdefault(name, []).append(one)
        for name, several in holders.items():
            if len(several) > 1:
                first = next((one for one in several if one.name == weight_map.get(name)), several[0])
                for one in several:
                    if one is not first:
                        one.drop.add(name)
                message = f"{first.name} and {several[-1].name} both hold it; the tensor of the second is left out"
                self._notes.append(found("doubled-tensors", message, where=name, severity="warning"))
        for one in self.done:
            self.kept += [entry for entry in one.repair.kept if entry.at or entry.key not in one.drop]
            self.losses += one.repair.losses
        self._found_elsewhere(holders)
        lost = {loss.name for loss in self.losses}
        unseen = [name for name in weight_map if name not in holders and name not in lost]
        tied = self._ties()
        self.losses += [LostTensor(name, None, "", "the index lists it, but no shard holds it")
                        for name in unseen if name not in tied]  # fmt: skip

    def _found_elsewhere(self, holders: Mapping[str, Sequence[_Done]]) -> None:
        """Remove from the losses what the index expects in an unreadable shard and a different shard holds."""
        for loss in [loss for loss in self.losses if loss.shape is None and loss.name in holders]:
            self.losses.remove(loss)
            message = f"{loss.reason}; {holders[loss.name][0].name} holds it too, and that one is kept"
            self._notes.append(found("index-mismatch", message, where=loss.name, severity="warning"))

    def _ties(self) -> set[str]:
        found: set[str] = set()
        for one in self.done:
            if files.file_formats()[one.repair.format].has_ties:
                checkpoint = files.open_file(one.path)
                found |= set(files.file_formats()[checkpoint.format].ties(checkpoint))
        return found

    def notes(self) -> list[Finding]:
        """List what happened to the checkpoint as a whole."""
        made = list(self._notes)
        for row in others(self.there, {one.name for one in self.done}):
            made.append(replace(row, message=f"{row.message}: left out", fix=None, steps=None))
        if self.trouble:
            made.append(found("bad-index", f"the index is rewritten: {self.trouble}", severity="info"))
        elif self.index is None:
            made.append(found("no-index", "the index is rewritten from the headers of the shards", severity="info"))
        elif self.index is not None and self._changed():
            made.append(found("index-mismatch", "the index is rewritten to match the shards", severity="info"))
        return made

    def _weight_map(self) -> dict[str, str]:
        """Map each key to its shard, in the order of the old index."""
        holders = {name: one.name for one in self.done for name in self._held(one)}
        old = [] if self.index is None else [name for name in self.index.weight_map if name in holders]
        return {name: holders[name] for name in (*old, *holders)}

    def _held(self, one: _Done) -> list[str]:
        filled = [loss.name for loss in one.repair.losses if loss.filled]
        return [*one.names(), *filled]

    def _changed(self) -> bool:
        assert self.index is not None
        tied = self._ties()
        old = {name: shard for name, shard in self.index.weight_map.items() if name not in tied}
        stated = self.index.total_size
        return self._weight_map() != old or (type(stated) is int and stated != self._total())

    def _total(self) -> int:
        """Return the bytes of the tensors that are kept or filled."""
        total = data_bytes(self.kept)
        for loss in (loss for one in self.done for loss in one.repair.losses):
            if loss.filled and loss.shape is not None:
                total += dtypes.by_name(loss.dtype).nbytes(math.prod(loss.shape))
        return total

    def plan_to(self, dest: str) -> Plan:
        planned = [file for one in self.done for file in one.plan_to(str(as_path(dest, one.name)))]
        around = self._beside()
        planned += around.copied_to(dest)
        index = self._index(dest)
        return Plan((*planned, *((index,) if index is not None else ())), around.findings())

    def _beside(self) -> Beside:
        names = [*self.there.names(), *(one.name for one in self.done)]
        return beside(self.folder, [str(as_path(self.folder, name)) for name in names])

    def _index(self, dest: str) -> OutputFile | None:
        """Plan the index of what is kept; the old one byte for byte if it is right."""
        if self.index_path is not None:
            path = as_path(dest, as_path(self.index_path).name)
        else:
            (name, suffix, _), _ = next(iter(self.there.groups.items()))
            *variant, kind = suffix.strip(".").split(".")
            path = as_path(dest, ".".join((name, kind, "index", *variant, "json")))
        if self.index is not None and not self._changed():
            return OutputFile.of(path, [self.index.edited({})])
        document: dict[str, object] = {} if self.index is None else dict(self.index.document)
        about = document.get("metadata")
        document["metadata"] = {**(about if isinstance(about, dict) else {}), "total_size": self._total()}
        document["weight_map"] = self._weight_map()
        return OutputFile.of(path, [written(document) + b"\n"])


def _of_slices(path: str) -> Repair:
    """Plan the tensors whose slices are all present, joined in shards."""
    layout = open_layout(path)
    entries, findings = slices.joined(layout)
    own = (row for shard in layout.shards for row in shard.read.findings if row.id in BROKEN)
    whole = (row for row in layout.findings if row.id in LOST)
    reasons = {row.where: row.message for row in (*whole, *own, *findings, *slices.judged(layout))}
    kept = tuple(entry for entry in entries if entry.key not in reasons)
    if not kept:
        raise DamagedFile("every tensor lacks at least one slice", path=path)
    by_name = {entry.key: entry for entry in entries}
    losses = tuple(
        LostTensor(name, by_name[name].shape if name in by_name else None,
             by_name[name].dtype if name in by_name else "", reason)
        for name, reason in reasons.items()
    )  # fmt: skip

    def plan_to(dest: str) -> Plan:
        return write.plan_write(kept, dest, metadata=slices.without_slices(layout.shards[0].read.metadata))

    return Repair(files.NAME, kept, losses, (), plan_to)

