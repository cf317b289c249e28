"""The joined model of all ranks: its tensors, what is left out, and the object that one save of it would be."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from fnmatch import fnmatchcase
from itertools import islice

from ckptfix.checkpoint import Checkpoint, FileVersion, RangeCheck, TensorEntry, dtypes, same_place
from ckptfix.commands import command, verbatim, word
from ckptfix.dataclass import dataclass
from ckptfix.errors import DamagedFile, Refused, about
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.base import JoinOptions
from ckptfix.formats.folders.assembly import Assembly, mapping, ordered
from ckptfix.formats.folders.copies import differing
from ckptfix.formats.parallel.cuts import JoinedFile, RankCut, Shape, joined
from ckptfix.formats.parallel.files import same_values
from ckptfix.formats.parallel.tables import COPY, CutContext, CutRow, decided, given_cuts, row_of
from ckptfix.io.elements import row_major
from ckptfix.io.virtual_files import SplicedFile, SplicedPiece
from ckptfix.pickles.graph import Node
from ckptfix.urls import as_path
from ckptfix.words import some


@dataclass(frozen=True, slots=True)
class WholeTensor:
    """A tensor of the joined model.

    Attributes:
        parts: rank of tensor parallelism -> its part; each rank has the whole tensor if it is not cut.
        lost: rank -> the file that is missing.
    """

    name: str
    dtype: str
    shape: Shape
    cut: RankCut
    ranks: int
    parts: Mapping[int, TensorEntry]
    lost: Mapping[int, str]

    @property
    def is_cut(self) -> bool:
        return self.cut.dim is not None and self.ranks > 1

    @property
    def first(self) -> TensorEntry:
        return self.parts[min(self.parts)]


@dataclass(slots=True)
class JoinedModel:
    """The model while its parts are added.

    Attributes:
        table: the dimensions along which its tensors are cut.
        options: what the user said about the cuts.
        undecided: names of tensors whose cut nobody states.
        unequal: names of tensors that every rank holds whole, and whose values differ.
    """

    path: str
    table: tuple[CutRow, ...]
    options: JoinOptions
    tensors: dict[str, WholeTensor] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)

    def context(self, shapes: Mapping[str, Shape], ranks: int, settings: Mapping[str, object]) -> CutContext:
        return CutContext(shapes, ranks, settings, given_cuts(self.options.dims))

    def add(
        self,
        name: str,
        own_name: str,
        parts: Mapping[int, tuple[TensorEntry, str]],
        context: CutContext,
        lost: Mapping[int, str],
    ) -> None:
        """Add a tensor under `name`, which is called `own_name` in the files.

        Args:
            parts: rank -> the tensor in its file, and the file.

        Raises:
            DamagedFile: the ranks' tensors differ in shape or dtype, or they contradict the table.
            Refused: the table has no cut for such tensors.
        """
        (first, path), *others = (parts[rank] for rank in sorted(parts))
        for other, there in others:
            if (other.dtype, other.shape) != (first.dtype, first.shape):
                kinds = [f"{one.dtype} {list(one.shape)}" for one in (first, other)]
                raise DamagedFile(f"it is {kinds[1]} here, and {kinds[0]} in {_short(path)}", path=there, where=name)
        with about(path):
            ranks = context.ranks
            cut = decided(self.table, own_name, context) if ranks > 1 or self._has_tokens(name) else COPY
        if cut is None:
            if ranks > 1 and name not in self.tensors:
                self.undecided.append(name)
            cut = COPY
        whole = cut.whole(first.shape, ranks)
        entries = {rank: entry for rank, (entry, _) in parts.items()}
        tensor = WholeTensor(name, first.dtype, whole, cut, ranks, entries, dict(lost))
        if name in self.tensors:
            self.compare(name, tensor)
            return
        whole_everywhere = not tensor.is_cut and name not in self.undecided
        if whole_everywhere and not all(same_values(first, other) for other, _ in others):
            self.unequal.append(name)
        self.tensors[name] = tensor

    def compare(self, name: str, other: WholeTensor) -> None:
        """Compare a further copy of a tensor, as of the embeddings in the last stage, with the one that is kept."""
        own = self.tensors[name]
        ranks = own.parts.keys() & other.parts.keys()
        alike = (own.shape, own.dtype) == (other.shape, other.dtype)
        if not alike or not all(same_values(own.parts[rank], other.parts[rank]) for rank in ranks):
            self.unequal.append(name)

    def _has_tokens(self, name: str) -> bool:
        row = row_of(self.table, name)
        return row is not None and row.vocabulary

    def leave(self, where: str, message: str) -> None:
        """Report something that the joined checkpoint does not have."""
        self.findings.append(found("left-behind", message, where=where))

    def cut_vocabulary(self, settings: Mapping[str, object], beside: Mapping[str, object]) -> None:
        """Cut the rows of padding from the embeddings, if the user asked for that.

        Args:
            settings: of the model, in its files.
            beside: of the file config.json in the folder.

        Raises:
            Refused: the size is unknown, or larger than the table of embeddings.
        """
        asked = self.options.vocab_size
        if asked is None:
            return
        sources = {"args": settings, "config": beside}
        value = sources[str(asked)].get("vocab_size") if str(asked) in sources else asked
        text = str(value)
        if not text.isdecimal() or not text.isascii() or len(text) > 10 or int(text) < 1:
            known = f"{asked} has no vocab_size" if str(asked) in sources else f"{asked!r} is not a number of rows"
            raise Refused(known, path=self.path, hint="give the number of tokens: --vocab-size 50257")
        size = int(text)
        hit = False
        for name, tensor in self.tensors.items():
            if not self._has_tokens(name) or not tensor.shape:
                continue
            hit = True
            rows = tensor.shape[0]
            if size > rows:
                raise Refused(f"it has {rows:,} rows, fewer than --vocab-size {size:,}", path=self.path, where=name)
            if size < rows:
                self.tensors[name] = replace(tensor, shape=(size, *tensor.shape[1:]))
                self.leave(f"{name}[{size}:{rows}]", f"{rows - size:,} rows of padding are left out")
        if not hit:
            raise Refused("no tensor has a row for each token", path=self.path, hint="leave out --vocab-size")

    def finish(self) -> None:
        """Add the findings about all tensors together.

        Raises:
            Refused: a name or glob of --dim fits no tensor.
        """
        for glob in self.options.dims:
            if not any(name == glob or fnmatchcase(name, glob) for name in self.tensors):
                raise Refused(f"--dim {glob}: no tensor has that name", path=self.path,
                              hint="`ckptfix ls` lists the names; a glob such as '*.weight' fits several")  # fmt: skip
        self.findings += differing(list(dict.fromkeys(self.unequal)), "the first file")
        if self.undecided:
            tensor = self.tensors[self.undecided[0]]
            shape = list(tensor.first.shape)
            message = f"{tensor.ranks} ranks have {shape} of it, and neither a table nor the settings of the model say"
            more = f"; the same for {some(self.undecided[1:])}" if len(self.undecided) > 1 else ""
            message = f"{message} along which dimension it was cut{more}"
            self.findings.append(found("cut-unknown", message, where=tensor.name, fix=verbatim(self._way_out())))

    def _way_out(self) -> str:
        """Return the command that joins the tensors whose cut nobody states, with a proposal for each of them."""
        proposed = {name: self._proposed(self.tensors[name]) for name in self.undecided}
        grouped: dict[tuple[str, str], list[str]] = {}
        for name, cut in proposed.items():
            grouped.setdefault((_NUMBER.sub("*", name), cut), []).append(name)
        dims = {name: str(cut) for name, cut in self.options.dims.items()}
        for (glob, cut), names in grouped.items():
            fitting = [name for name in self.tensors if fnmatchcase(name, glob)] if len(names) > 1 else []
            dims |= {glob: cut} if fitting == names else dict.fromkeys(names, cut)
        size = self.options.vocab_size
        line = command("convert", self.path, "OUT.safetensors", vocab_size=None if size is None else str(size))
        line += "".join(f" --dim {word(f'{name}={cut}')}" for name, cut in islice(dims.items(), MOST_PROPOSED))
        equal = " and takes tensors that are equal on all ranks as whole" if "copy" in proposed.values() else ""
        other = "change =0 to =1 where columns were cut, or to =copy where every rank has the whole tensor"
        return f"`{line}` joins along dimension 0{equal}; {other}"

    def _proposed(self, tensor: WholeTensor) -> str:
        """Return the likely cut of a tensor: none if all ranks have the same values, else along dimension 0."""
        first, *others = tensor.parts.values()
        return "copy" if not first.shape or all(same_values(first, other) for other in others) else "0"


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")

MOST_PROPOSED = 40
"""The most cuts that a message proposes."""


def _short(path: str) -> str:
    place = as_path(path)
    return f"{place.parent.name}/{place.name}"


def assembled(
    model: JoinedModel,
    holder: str,
    beside: Mapping[str, Node],
    *,
    format: str,
    files: Sequence[FileVersion],
    traits: Mapping[str, object],
) -> Checkpoint:
    """Return the checkpoint of a joined model.

    Args:
        holder: the key of the state dict in the object; ``""`` if the object is the state dict.
        beside: further items of the object.
    """
    rows = list(model.tensors.values())
    claimed: set[tuple[str, str]] = set()
    claims: list[tuple[RangeCheck, ...]] = []
    for row in rows:
        checks = []
        for entry in row.parts.values() if row.is_cut else ():
            storage = entry.storage
            if storage is None or storage.data is None or storage.crc32 is None or storage.identity in claimed:
                continue
            claimed.add(storage.identity)
            checks.append(RangeCheck(storage.key, storage.data, storage.crc32))
        claims.append(tuple(checks))

    def make(number: int) -> SplicedPiece:
        row = rows[number]
        for rank, path in row.lost.items():
            raise DamagedFile(f"rank {rank}'s part of it is missing", path=path, where=row.name)
        with about(model.path):
            shape = row.cut.whole(row.first.shape, row.ranks)
            return SplicedPiece(joined(row.name, shape, row.cut, row.parts, row.ranks).segments, claims[number])

    lengths = [_nbytes(row.dtype, row.cut.whole(row.first.shape, row.ranks)) if row.is_cut else 0 for row in rows]
    file = JoinedFile.of(model.path, lengths, make, [(row.cut, row.parts, row.ranks) for row in rows])
    assembly = Assembly()
    keys: dict[object, str] = {}
    nodes: dict[str, Node] = {}
    for number, row in enumerate(rows):
        nbytes = _nbytes(row.dtype, row.shape)
        tie = (row.shape, row.dtype, *(same_place(entry) for entry in row.parts.values()))
        if None in tie or tie not in keys:
            if row.is_cut:
                key = assembly.storage(file.place(number).sub(0, nbytes))
            else:
                key = _adopted(assembly, row.first, nbytes)
            keys[tie] = key
        nodes[row.name] = assembly.tensor(keys[tie], row.dtype, row.shape)
    state = ordered(nodes)
    root: Node = mapping({holder: state, **beside}) if holder else state
    return assembly.checkpoint(
        root, model.path, format=format, files=tuple(files), traits=traits, findings=model.findings
    )


def _adopted(assembly: Assembly, entry: TensorEntry, nbytes: int) -> str:
    """Add the first `nbytes` bytes of a tensor as a storage."""
    data = row_major(entry, "little")
    storage = entry.storage
    whole = storage is not None and storage.nbytes == entry.nbytes == nbytes and entry.is_contiguous
    crc32 = storage.crc32 if storage is not None and whole else None
    if data.length == nbytes:
        return assembly.storage(data, crc32)
    piece = SplicedFile(entry.name, [data.length], lambda _: SplicedPiece((data,))).place(0)
    return assembly.storage(piece.sub(0, nbytes))


def _nbytes(dtype: str, shape: Shape) -> int:
    return dtypes.by_name(dtype).nbytes(math.prod(shape))
