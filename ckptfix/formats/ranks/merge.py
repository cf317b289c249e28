"""The joined object of all ranks: the object of the first rank, with each part replaced by the whole tensor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import field

from ckptfix.checkpoint import ByteRange, Checkpoint, RangeCheck, TensorEntry, dtypes, same_place
from ckptfix.checkpoint.address import is_inside, is_inside_any, join
from ckptfix.commands import verbatim
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, DamagedFile, about
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.folders.assembly import Assembly
from ckptfix.formats.folders.copies import alike, differing
from ckptfix.formats.folders.mesh import Box
from ckptfix.formats.folders.steps import counted
from ckptfix.formats.ranks.file import RankFile
from ckptfix.formats.ranks.shards import RankTensor
from ckptfix.formats.ranks.wrapped import flat_way, is_flat
from ckptfix.formats.torch.tensors import BadTensor, is_tensor
from ckptfix.io.chunks import Chunk, tiled
from ckptfix.io.elements import row_major
from ckptfix.io.virtual_files import SplicedFile, SplicedPiece
from ckptfix.pickles.graph import Node, pairs
from ckptfix.urls import as_path
from ckptfix.words import some

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


NAME = "ranks"


@dataclass(frozen=True, slots=True)
class JoinedTensor:
    """A tensor whose parts are on several ranks.

    Attributes:
        chunks: its parts, each once: the position, and the file that has it.
        lost: rank -> the parts that only a missing file has.
        entry: the tensor as the first file describes it.
    """

    entry: TensorEntry
    chunks: tuple[tuple[Box, TensorEntry, RankFile], ...]
    lost: Mapping[int, tuple[Box, ...]]


@dataclass(slots=True)
class RankFiles:
    """All files of one job."""

    path: str
    files: Mapping[int, RankFile]
    wholes: dict[str, JoinedTensor] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def first(self) -> RankFile:
        return self.files[min(self.files)]


def together(path: str, files: Mapping[int, RankFile], lost: Mapping[int, str], why: Mapping[int, str]) -> RankFiles:
    """Combine the files, and return the tensors and findings.

    Args:
        lost: rank -> the path that its missing file would have; `why` has the reason for each rank.

    Raises:
        Unsupported: a part is a term of a sum.
        DamagedFile: the files do not belong together.
    """
    made = RankFiles(path, files)
    first = made.first
    unequal: list[str] = []
    copies: list[str] = []
    budget = _Budget()
    for address in first.nodes:
        if made.wholes and is_inside(address, next(reversed(made.wholes))):
            continue
        with about(first.path):
            own = first.held(address)
        if own is not None:
            whole, same = _whole(made, address, own, budget)
            made.wholes[address] = whole
            if not same:
                copies.append(address)
        elif not _equal(made, address):
            unequal.append(address)
    _refuse_others(made)
    made.findings += differing(unequal, as_path(first.path).name)
    if copies:
        message = f"files with the same part differ, so the first of them was used: {some(copies)}"
        made.findings.append(found("ranks-differ", message, where=copies[0]))
    made.findings += other_saves(files)
    made.findings += _missing(made, lost, why)
    flat = [address for address, (_, key, _) in first.nodes.items() if is_flat(key)]
    if flat:
        message = f"{some(flat)}: the flattened parameters of an FSDP unit; no file has their names and shapes"
        way = verbatim(flat_way(first.nodes[flat[0]][1]))
        made.findings.append(found("flat-parameters", message, where=flat[0], fix=way))
    return made


MOST_PARTS = 1 << 23
"""The limit of tensor parts on all ranks that are looked at: a file can state a mesh of any size in a few bytes."""

_NAMED = 8
"""The cost of a missing part against that limit; it is higher because each is reported by name."""


@dataclass(slots=True)
class _Budget:
    left: int = MOST_PARTS

    def take(self, count: int, where: str, made: RankFiles) -> None:
        """Raise DamagedFile once the parts exceed the limit."""
        self.left -= count
        if self.left < 0:
            message = (
                f"its tensors have more parts than in any real job, but there are files of only {len(made.files)} ranks"
            )
            raise DamagedFile(message, path=made.path, where=where)


def _whole(made: RankFiles, address: str, own: RankTensor, budget: _Budget) -> tuple[JoinedTensor, bool]:
    """Return the parts of one tensor in all files, and whether files with the same part agree.

    Raises:
        DamagedFile: the parts belong to different tensors, or there are too many.
    """
    first = made.first
    entry = first.entry(address)
    chunks: dict[Box, tuple[TensorEntry, RankFile]] = {}
    same = True
    for file in made.files.values():
        other = own if file is first else file.held(address) if address in file.nodes else None
        if other is None:
            message = "it lacks this tensor, while other ranks have parts of it"
            raise DamagedFile(message, path=file.path, where=address)
        kind = (other.kind, other.shape, file.entry(address).dtype, other.cut)
        if kind != (own.kind, own.shape, entry.dtype, own.cut):
            message = f"its partition or size differs from {as_path(first.path).name}"
            raise DamagedFile(message, path=file.path, where=address)
        for box, local in other.here:
            if local.dtype != entry.dtype:
                message = f"a part is {local.dtype}, and the tensor is {entry.dtype}"
                raise DamagedFile(message, path=file.path, where=address)
            same = alike(chunks.setdefault(box, (local, file))[0], local) and same
    lost: dict[int, list[Box]] = {}
    parts = own.parts()
    budget.take(len(parts), address, made)
    for rank, box in parts:
        if box not in chunks and all(box[1]):
            budget.take(_NAMED, address, made)
            lost.setdefault(rank, []).append(box)
    rows = tuple((box, local, file) for box, (local, file) in sorted(chunks.items(), key=lambda row: row[0]))
    return JoinedTensor(entry, rows, {rank: tuple(boxes) for rank, boxes in lost.items()}), same


def _equal(made: RankFiles, address: str) -> bool:
    """Return whether all ranks have the same tensor at `address`, as far as checksums tell without reading data."""
    try:
        entries = [file.entry(address) for file in made.files.values() if address in file.nodes]
    except BadTensor:
        return True
    if len(entries) < len(made.files):
        return False
    return all(alike(entries[0], other) for other in entries[1:])


def _refuse_others(made: RankFiles) -> None:
    """Refuse files with parts of tensors that the first file does not have; report other extra tensors as findings."""
    first = made.first
    known = set(first.nodes)
    for file in made.files.values():
        more = [
            address for address in file.nodes if address not in known and not is_inside_any(address, made.wholes)
        ]
        for address in more:
            if file.held(address) is not None:
                message = f"it has a part of a tensor that {as_path(first.path).name} does not have"
                raise DamagedFile(message, path=file.path, where=address)
        if more:
            message = f"only {as_path(file.path).name} has them, so they were left out: {some(more)}"
            made.findings.append(found("ranks-differ", message, where=more[0]))


def _missing(made: RankFiles, lost: Mapping[int, str], why: Mapping[int, str]) -> list[Finding]:
    """Return a finding for each rank whose file is missing and holds parts that no other file has."""
    held: dict[int, list[str]] = {}
    for address, whole in made.wholes.items():
        for rank, boxes in whole.lost.items():
            held.setdefault(rank, []).append(f"{address} ({', '.join(map(_rows, boxes))})")
    rows = []
    for rank in sorted(held):
        path = lost.get(rank, "")
        name = as_path(path).name if path else "its file"
        message = f"rank {rank}: {name} {why.get(rank, 'is missing')}; it holds {some(held[rank])}"
        if rank in made.files:
            path = made.files[rank].path
            message = f"rank {rank}: {as_path(path).name} has another rank's part, and lacks {some(held[rank])}"
        rows.append(found("missing-rank", message, where=path))
    rest = [rank for rank in why if rank not in held]
    if rest:
        name = as_path(lost[rest[0]]).name if rest[0] in lost else "its file"
        more = f", and the same for {len(rest) - 1:,} more ranks" if len(rest) > 1 else ""
        message = f"rank {rest[0]}: {name} {why[rest[0]]}; its content is in the other files too{more}"
        rows.append(found("ranks-differ", message, where=lost.get(rest[0], "")))
    return rows


def _rows(box: Box) -> str:
    offsets, extent = box
    if not extent:
        return "all"
    dim = next((dim for dim, first in enumerate(offsets) if first), 0)
    what = "rows" if dim == 0 and len(extent) > 1 else "elements" if len(extent) == 1 else f"dimension {dim}, indices"
    return f"{what} {offsets[dim]} to {offsets[dim] + extent[dim] - 1}"


def assembled(made: RankFiles, traits: Mapping[str, object]) -> Checkpoint:
    """Return the joined checkpoint of all files."""
    first = made.first
    rows = list(made.wholes.items())
    claimed: set[tuple[str, str]] = set()
    claims: list[list[RangeCheck]] = []
    for _, whole in rows:
        checks: list[RangeCheck] = []
        for _, local, _ in whole.chunks:
            storage = local.storage
            if storage is None or storage.data is None or storage.crc32 is None or storage.identity in claimed:
                continue
            claimed.add(storage.identity)
            checks.append(RangeCheck(storage.key, storage.data, storage.crc32))
        claims.append(checks)

    def make(number: int) -> SplicedPiece:
        address, whole = rows[number]
        with about(made.path):
            return SplicedPiece(_tiled(address, whole), tuple(claims[number]))

    lengths = [dtypes.by_name(whole.entry.dtype).nbytes(math.prod(whole.entry.shape)) for _, whole in rows]
    file = SplicedFile(made.path, lengths, make)
    assembly = Assembly()
    keys: dict[object, str] = {}
    replaced: dict[int, Node] = {}
    for number, (address, whole) in enumerate(rows):
        tie = _tie(whole) or number
        if tie not in keys:
            keys[tie] = assembly.storage(file.place(number))
        entry = whole.entry
        replaced[id(first.nodes[address][2])] = assembly.tensor(
            keys[tie], entry.dtype, entry.shape, requires_grad=entry.requires_grad
        )
    root = assembly.adopt(first.parts.graph.root, first.parts.storages, "first.", location="cpu", replaced=replaced)
    marks = tuple(one.mark for one in made.files.values())
    return assembly.checkpoint(root, made.path, format=NAME, files=marks, traits=traits, findings=made.findings)


def _tie(whole: JoinedTensor) -> object:
    """Return a value that is equal for two names of one tensor: their parts have the same bytes on every rank."""
    own = [
        (file.path, place, box) for box, local, file in whole.chunks if (place := same_place(local)) is not None
    ]
    return (whole.entry.shape, *own) if own else None


def _tiled(address: str, whole: JoinedTensor) -> tuple[ByteRange, ...]:
    itemsize = dtypes.by_name(whole.entry.dtype).itemsize
    chunks = [Chunk(box[0], box[1], _data(local, file)) for box, local, file in whole.chunks]
    try:
        return tiled(whole.entry.shape, itemsize, chunks)  # type: ignore[return-value]
    except CkptfixError as error:
        error.where = error.where or address
        raise


def _data(local: TensorEntry, file: RankFile) -> ByteRange:
    """Return the elements of a part in row-major order, also of a strided view."""
    data = row_major(local, file.checkpoint.byteorder)
    if isinstance(data, ByteRange):
        return data
    return SplicedFile(file.path, [data.length], lambda _: SplicedPiece((data,))).place(0)
