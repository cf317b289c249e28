"""The shards of a checkpoint in their folder, and the comparison of the index with the shards.

Reading is forgiving: a shard that is missing, damaged or outside the folder is a finding, and the others are read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import field, replace

from ckptfix.checkpoint import Checkpoint, FileVersion, TensorEntry
from ckptfix.commands import command
from ckptfix.dataclass import dataclass
from ckptfix.errors import BadIndex, CkptfixError, NoSuchFile, WouldLoseData
from ckptfix.findings.folders import LOST
from ckptfix.findings.row import Finding
from ckptfix.findings.steps import Step
from ckptfix.findings.table import found
from ckptfix.formats.folders.safe_paths import file_inside
from ckptfix.formats.shards import files
from ckptfix.formats.shards.index import INDEX, MAX_SHARDS, Index, read_index
from ckptfix.formats.torch.common import maybe_pickled_object
from ckptfix.io.source import is_folder, mark
from ckptfix.urls import as_path, headers_of, real_path
from ckptfix.words import some


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One file of the checkpoint.

    Attributes:
        name: its name in the index or the folder.
        path: its path.
        listed: the tensors that the index lists for it.
        checkpoint: its content; None if it cannot be read.
        names: names of its tensors and other values at the top level; names that it only ties are in `ties`.
        ties: name that its metadata ties to a tensor -> that tensor.
        values: those of `names` that are not tensors.
    """

    name: str
    path: str
    listed: tuple[str, ...] = ()
    checkpoint: Checkpoint | None = None
    names: tuple[str, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    values: frozenset[str] = frozenset()

    @property
    def read(self) -> Checkpoint:
        """The content of a shard that could be read."""
        assert self.checkpoint is not None
        return self.checkpoint


@dataclass(frozen=True, slots=True)
class ShardedLayout:
    """A sharded checkpoint.

    Attributes:
        path: the path that was named: the folder, or the index.
        folder: the folder of its files.
        index: the index; None without one.
        shards: the files that could be read, sorted by name.
        unread: the files that could not be read.
        ranks: each file holds slices of tensors.
        findings: faults of the checkpoint.
        marks: every file that was read.
    """

    path: str
    folder: str
    index: Index | None
    shards: tuple[ShardFile, ...]
    unread: tuple[ShardFile, ...]
    ranks: bool
    findings: tuple[Finding, ...]
    marks: tuple[FileVersion, ...]

    def refuse_incomplete(self) -> None:
        """Refuse an incomplete checkpoint.

        Raises:
            WouldLoseData: a shard or a tensor of it is missing, or is in it twice.
        """
        lost = [finding for finding in self.findings if finding.id in LOST]
        if lost:
            more = f" ({len(lost)} such faults)" if len(lost) > 1 else ""
            first = "get the missing files"
            if "a symbolic link" in lost[0].message:
                first = "if the file is yours, replace the link by a copy of it"
            hint = f"{first}; or run `{command('repair', self.path, 'OUT')}` to keep the files that are there"
            raise WouldLoseData(lost[0].message + more, path=self.path, where=lost[0].where or None, hint=hint)


def open_layout(path: str) -> ShardedLayout:
    """Read the checkpoint at the folder or index `path`: only the headers and pickles of its files.

    Raises:
        BadIndex: the index cannot be read.
        Refused: the folder has several checkpoints.
        CkptfixError: the folder cannot be listed.
    """
    folder, index_path = path, None
    if not is_folder(path):
        folder, index_path = os.path.dirname(path) or ".", path  # noqa: PTH120 (the text of the name is kept)
    there = files.find(folder)
    if index_path is None:
        there.refuse_several()
        index_path = file_inside(folder, there.indexes[0], where=folder) if there.indexes else None
    if index_path is not None:
        before = mark(index_path)
        index = read_index(index_path)
        return _from_index(path, folder, index, before, there)
    return _from_names(path, folder, there)


def _from_index(path: str, folder: str, index: Index, before: FileVersion, there: files.ShardFiles) -> ShardedLayout:
    listed: dict[str, list[str]] = {}
    for name, shard in index.weight_map.items():
        listed.setdefault(shard, []).append(name)
    opened = _Opened(folder, index.path)
    headers_of(folder, sorted(listed))
    for shard, names in sorted(listed.items()):
        opened.take(shard, tuple(names))
    findings = [*opened.findings, *_compared(opened, index), *others(there, listed)]
    return ShardedLayout(
        path, folder, index, tuple(opened.shards), tuple(opened.unread), False, tuple(findings), (before, *opened.marks)
    )


def _from_names(path: str, folder: str, there: files.ShardFiles) -> ShardedLayout:
    most = max(len(there.ranks), *(len(group) for group in there.groups.values()), 0)
    if most > MAX_SHARDS:
        raise BadIndex(f"the folder has {most:,} shards and no index; the limit is {MAX_SHARDS:,}", path=path)
    opened = _Opened(folder, folder)
    headers_of(folder, (*there.ranks, *(file for group in there.groups.values() for file in group.values())))
    if there.ranks:
        for name in there.ranks:
            opened.take(name, ())
        return ShardedLayout(
            path, folder, None, tuple(opened.shards), tuple(opened.unread), True, tuple(opened.findings),
            tuple(opened.marks),
        )  # fmt: skip
    if not there.groups:
        raise BadIndex("the folder has no index and no numbered shards", path=path)
    (name, suffix, count), numbered = next(iter(there.groups.items()))
    for _, file in sorted(numbered.items()):
        opened.take(file, ())
    findings = [found("no-index", f"{len(numbered):,} shards, {name}-*-of-{count:05d}{suffix}, have no index")]
    for file in files.missing_numbers(count, numbered, name, suffix):
        message = f"{file} is missing; without the index, its content is unknown"
        findings.append(found("missing-shard", message, where=file))
    findings += [*opened.findings, *_doubled(opened.holders()), *_wholes(there, ())]
    return ShardedLayout(
        path, folder, None, tuple(opened.shards), tuple(opened.unread), False, tuple(findings), tuple(opened.marks)
    )


def open_ranks(folder: str, names: Sequence[str], where: str) -> ShardedLayout:
    """Read the files of ranks that the file `where` lists."""
    opened = _Opened(folder, where)
    headers_of(folder, names)
    for name in names:
        opened.take(name, ())
    shards, unread = tuple(opened.shards), tuple(opened.unread)
    marks = (mark(where), *opened.marks)
    return ShardedLayout(folder, folder, None, shards, unread, True, tuple(opened.findings), marks)


class _Opened:
    """Shards while they are being opened."""

    def __init__(self, folder: str, where: str) -> None:
        self.folder = folder
        self.where = where
        self.shards: list[ShardFile] = []
        self.unread: list[ShardFile] = []
        self.findings: list[Finding] = []
        self.marks: list[FileVersion] = []
        self._seen: dict[str, str] = {}

    def take(self, name: str, listed: tuple[str, ...]) -> None:
        """Open the file `name` in the folder; `listed` are the tensors that the index lists for it."""
        shard = ShardFile(name, str(as_path(self.folder, name)) if "\0" not in name else self.folder, listed)
        holds = f"; it should hold {some(listed, 3)}" if listed else ""
        try:
            path = file_inside(self.folder, name, where=self.where)
        except NoSuchFile:
            self._unread(shard, found("missing-shard", f"{name} is missing{holds}", where=name))
            return
        except CkptfixError as error:
            self._unread(shard, found("shard-path", f"{error.message}{holds}", where=name))
            return
        if INDEX.search(name) is not None:
            self._unread(shard, found("shard-path", f"{name} is an index and holds no tensors{holds}", where=name))
            return
        real = real_path(path)
        if real in self._seen:
            message = f"{name} and {self._seen[real]} are the same file{holds}"
            self._unread(shard, found("shard-path", message, where=name))
            return
        self._seen[real] = name
        try:
            checkpoint = files.open_file(path)
        except CkptfixError as error:
            fix = (Step("doctor", source=path),)
            message = f"{name} cannot be read: {error.message}{holds}"
            self._unread(shard, found("missing-shard", message, where=name, offset=error.offset, fix=fix))
            return
        ties = files.file_formats()[checkpoint.format].ties(checkpoint)
        names = [key for site in checkpoint.sites if site.kind == "state_dict" and not site.at for key in site.names]
        own = tuple(key for key in names if key not in ties)
        parts = maybe_pickled_object(checkpoint)
        tensors = own if parts is None else [key for at, key, _ in parts.found.tensors if not at]
        values = frozenset(own).difference(tensors)
        self.shards.append(replace(shard, path=path, checkpoint=checkpoint, names=own, ties=ties, values=values))
        self.marks += checkpoint.files
        self.findings += (prefixed(finding, name) for finding in checkpoint.findings)

    def holders(self) -> dict[str, list[str]]:
        """Return name -> the shards that have it."""
        held: dict[str, list[str]] = {}
        for shard in self.shards:
            for name in (*shard.names, *shard.ties):
                held.setdefault(name, []).append(shard.name)
        return held

    def _unread(self, shard: ShardFile, finding: Finding) -> None:
        self.unread.append(shard)
        self.findings.append(finding)


def prefixed(finding: Finding, shard: str) -> Finding:
    """Return a finding about a shard as one about the whole checkpoint."""
    return replace(finding, where=f"{shard}: {finding.where}" if finding.where else shard, fix=None, steps=None)


def _compared(opened: _Opened, index: Index) -> Iterator[Finding]:
    """Yield contradictions between the index and the shards."""
    holders = opened.holders()
    for shard in opened.shards:
        elsewhere = [name for name in shard.listed if shard.name not in holders.get(name, (shard.name,))]
        if elsewhere:
            message = f"the index says that {shard.name} holds {some(elsewhere, 3)}; another shard does"
            yield found("index-mismatch", message, where=shard.name)
        absent = [name for name in shard.listed if name not in holders]
        if absent:
            message = f"the index says that {shard.name} holds {some(absent, 3)}; no shard does"
            yield found("missing-tensors", message, where=shard.name)
    free = {name for shard in opened.shards for name in (*shard.ties, *shard.values)}
    unlisted = [name for name in holders if name not in index.weight_map and name not in free]
    if unlisted:
        yield found("index-mismatch", f"the shards hold {some(unlisted, 3)}, which the index does not list")
    yield from _doubled(holders)


def _doubled(holders: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """Yield a finding for tensors that several shards hold."""
    twice = {name: shards for name, shards in holders.items() if len(shards) > 1}
    if twice:
        shards = sorted({shard for several in twice.values() for shard in several})
        message = f"several shards ({some(shards, 3)}) hold {some(list(twice), 3)}"
        yield found("doubled-tensors", message, where=shards[0])


def others(there: files.ShardFiles, listed: Collection[str]) -> Iterator[Finding]:
    """Yield findings for unlisted shards in the folder, and for other models there."""
    suffixes = {as_path(shard).suffix for shard in listed}
    same = there.left_out(listed)
    for name in same:
        message = f"{name} is in the same series as the listed shards, but the index does not list it"
        yield found("missing-tensors", message, where=name)
    for group in there.groups.values():
        for name in group.values():
            if name not in listed and name not in same and as_path(name).suffix in suffixes:
                yield found("extra-shard", f"{name} is in the folder, but the index does not list it", where=name)
    for name in there.doubles:
        if name not in listed:
            yield found("extra-shard", f"{name} is in the folder, but the index does not list it", where=name)
    yield from _wholes(there, listed)


def _wholes(there: files.ShardFiles, listed: Container[str]) -> Iterator[Finding]:
    """Yield a finding for each file beside the shards that may be the same model, or a different one."""
    for name in there.wholes:
        if name in listed:
            continue
        message = f"{name} is in the folder too, and was not used; other programs may use it instead of the shards"
        yield found("other-model", message, where=name)


def data_bytes(entries: Sequence[TensorEntry]) -> int:
    """Return the size of the tensors as ``total_size`` counts it: tied tensors once."""
    seen: dict[object, int] = {}
    for entry in entries:
        place = (entry.storage.identity if entry.storage else entry.name, entry.offset, entry.shape)
        seen[place] = entry.nbytes
    return sum(seen.values())
