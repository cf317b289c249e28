"""What the output of a verb has to hold, and how the tensors of its input fared."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckptfix.checkpoint import Checkpoint, Data, Storage, TensorEntry
from ckptfix.checkpoint.address import is_inside_any, keys_of, of_keys
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats import format_of
from ckptfix.formats.torch.common import pickled
from ckptfix.formats.torch.tensors import BadTensor
from ckptfix.pickles import PersId
from ckptfix.pickles.reemit import every_node
from ckptfix.words import some


@dataclass(frozen=True, slots=True)
class Promise:
    """What the output of a verb has to hold.

    Attributes:
        kept: the tensors that it has to hold, under the names that the input gives them.
        storages: storages of the input that something in it refers to, listed as a tensor or not.
        others: every other tensor of the input, left out by request or because the verb takes one state dict.
        puts: name -> the tensor that the verb puts in its place: in another shape, or of other bytes.
        made: name -> the tensors that the verb makes of it, with others of the input or alone.
        partly: names in `made` of which not every byte goes into them, as the verb says itself.
        summed: identities of storages whose checksum is a part of one that the output states.
        same: (bytes of the input, equal bytes of it that take their place).
        reported: addresses that the verb itself lists as left behind or lost, each with all that is below it.
        names_stay: the verb gives no tensor the name of another.
        edited: the input, where the verb keeps its object and changes names and devices alone.
        chosen: the input, where the verb leaves out what is `reported` and keeps all else as it is.
        source: the input whose storages `storages` are.
    """

    kept: Sequence[TensorEntry] = ()
    storages: Sequence[Storage] = ()
    others: Sequence[TensorEntry] = ()
    puts: Mapping[str, TensorEntry] = field(default_factory=dict)
    made: Mapping[str, Sequence[TensorEntry]] = field(default_factory=dict)
    partly: Collection[str] = ()
    summed: Collection[tuple[str, str]] = ()
    same: Sequence[tuple[Data, Data]] = ()
    reported: Collection[str] = ()
    names_stay: bool = True
    edited: Checkpoint | None = None
    chosen: Checkpoint | None = None
    source: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class Account:
    """How the tensors of an input fared.

    Attributes:
        tensors, nbytes: names of the input, and bytes of the storages that they view.
        written, nbytes_written: the same of the output.
        left: names of tensors that are not in the output and that the verb did not list.
        lost: names of tensors that should be in the output and are not, and storages of `unlisted`.
        unlisted: storages in `lost`, as they are named there, that no tensor views which the input lists.
        excused: the verb itself names losses; what it left out may have held those in `lost`.
        damaged: what the input does not hold as it describes it, and was copied as it is.
    """

    tensors: int = 0
    nbytes: int = 0
    written: int = 0
    nbytes_written: int = 0
    left: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()
    excused: bool = False
    damaged: tuple[Finding, ...] = ()

    def lines(self) -> tuple[str, ...]:
        """A sentence for the tensors that are lost, and one for those that the input does not hold itself."""
        lines = []
        if self.lost:
            lines.append(f"LOST: {some(self.lost)}")
        if self.damaged:
            names = list(dict.fromkeys(finding.where for finding in self.damaged))
            lines.append(f"DAMAGED in the input, and copied as it is: {some(names)}; repair keeps what is intact")
        return tuple(lines)

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "tensors": self.tensors,
            "nbytes": self.nbytes,
            "tensors_written": self.written,
            "nbytes_written": self.nbytes_written,
            "left_behind": list(self.left),
            "lost": list(self.lost),
            "excused": self.excused,
        }

    def findings(self) -> tuple[Finding, ...]:
        """A note for each name in `left`, and a finding for each loss."""
        behind = [*self.damaged, *(found("left-behind", "is not in the output", where=name) for name in self.left)]
        return (*behind, *(self._loss(name) for name in self.lost))

    def _loss(self, name: str) -> Finding:
        if self.excused:
            return found("lost", "was in what is left out", where=name)
        if INSIDE in name or name in self.unlisted:
            message = "is not in the output: it was in the arguments or state of an object of another form there"
            return found("lost", message, where=name)
        message = "it should be in the output and is not: a fault in ckptfix; please report it"
        return found("lost", message, where=name, severity="error")


INSIDE = "/()"
"""What the address of a tensor has that stands in what makes an object, and in nothing that anybody named."""


def everything(checkpoint: Checkpoint, reported: Iterable[str] = ()) -> Promise:
    """The promise of a verb that keeps all tensors of `checkpoint` but those at or below an address in `reported`."""
    gone = frozenset(reported)
    entries = listed(checkpoint)
    if not gone:
        return Promise(entries, list(referred(checkpoint)), source=checkpoint)
    kept = [entry for entry in entries if not is_inside_any(entry.name, gone)]
    return Promise(kept, others=[entry for entry in entries if is_inside_any(entry.name, gone)], reported=gone)


def damaged(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """What the file does not hold as it describes it, which an edit of names would copy as it is."""
    parts = pickled(checkpoint)
    if parts is not None and not parts.storages.all_there(parts.graph):
        # The findings that name the tensors are made with the entries, which an edit does without.
        _ = checkpoint.entries
    rows = [finding for finding in checkpoint.findings if finding.id in ("bad-tensor", "truncated")]
    return tuple(dict.fromkeys(rows))


def listed(checkpoint: Checkpoint) -> list[TensorEntry]:
    """Every tensor of a checkpoint, names that metadata only ties to another among them."""
    entries = list(checkpoint.entries)
    tied = format_of(checkpoint).ties(checkpoint)
    if tied:
        found = {entry.key: entry for entry in entries}
        entries += [replace(found[base], key=name) for name, base in tied.items()]
    return entries


def holders(entries: Iterable[TensorEntry]) -> set[str]:
    """Addresses that others are below: a tensor there carries tensors, which go if another one takes its place."""
    ats = {entry.at for entry in entries}
    return {of_keys(keys[:end]) for keys in map(keys_of, ats) for end in range(1, len(keys) + 1)}


def referred(checkpoint: Checkpoint, *, in_object: bool = False) -> Iterator[Storage]:
    """Every storage that the pickle of a torch checkpoint refers to, whatever holds the reference.

    Args:
        in_object: leave out references that the pickle makes and throws away, which takes a walk of the whole object.
    """
    parts = pickled(checkpoint)
    if parts is None:
        return
    graph = parts.graph
    nodes = every_node(graph.root) if in_object else ()
    for persid in (node for node in nodes if type(node) is PersId) if in_object else graph.persids:
        try:
            yield parts.storages(persid)
        except BadTensor:
            continue
