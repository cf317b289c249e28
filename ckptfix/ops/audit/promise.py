"""The content that the output of an operation must have, and the account of its tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from ckptfix.checkpoint import Checkpoint, Data, Storage, TensorEntry
from ckptfix.checkpoint.address import is_inside_any, keys_of, of_keys
from ckptfix.dataclass import dataclass
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats import format_of
from ckptfix.formats.torch.common import maybe_pickled_object, referred
from ckptfix.words import some


@dataclass(frozen=True, slots=True)
class Promise:
    """The content that the output of an operation must have.

    Attributes:
        kept: the tensors that it must have, under their keys in the input.
        storages: storages of the input with a reference in it, whether listed as a tensor or not.
        others: every other tensor of the input, left out on request or because only one state dict is written.
        puts: name -> the tensor that replaces it: in a new shape, or with new bytes.
        made: name -> the tensors that are made of it, with other tensors of the input or alone.
        partly: names in `made` that do not use every byte of their tensor, as the operation itself states.
        summed: identities of storages whose checksum is a part of one that the output states.
        same: (bytes of the input, equal bytes of it that replace them).
        reported: addresses that the operation lists as left behind or lost, each with everything below it.
        names_stay: whether no tensor gets the name of another.
        edited: the input, if the operation keeps its object and changes only keys and devices.
        chosen: the input, if the operation leaves out the `reported` addresses and keeps everything else unchanged.
        source: the input of `storages`.
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
    """The account of an input's tensors.

    Attributes:
        tensors, nbytes: number of keys in the input, and bytes of the storages that they view.
        written, nbytes_written: the same for the output.
        left: names of tensors that are not in the output and that the operation did not list.
        lost: names of tensors that should be in the output but are not, and storages of `unlisted`.
        unlisted: storages in `lost`, by their names there, that no listed tensor of the input views.
        excused: whether the operation itself reports losses; what it left out may have held those in `lost`.
        damaged: data that the input does not hold as it describes it, and that was copied unchanged.
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
        """Return a sentence for lost tensors, and one for those that are damaged in the input."""
        lines = []
        if self.lost:
            lines.append(f"LOST: {some(self.lost)}")
        if self.damaged:
            names = list(dict.fromkeys(finding.where for finding in self.damaged))
            lines.append(f"DAMAGED in the input, and copied unchanged: {some(names)}; repair keeps what is intact")
        return tuple(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return the account for JSON."""
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
        """Return a note for each name in `left`, and a finding for each loss."""
        behind = [*self.damaged, *(found("left-behind", "is not in the output", where=name) for name in self.left)]
        return (*behind, *(self._loss(name) for name in self.lost))

    def _loss(self, name: str) -> Finding:
        if self.excused:
            return found("lost", "was in an object that was left out", where=name)
        if INSIDE in name or name in self.unlisted:
            message = "is not in the output: it was in the arguments or state of an object that has a new form there"
            return found("lost", message, where=name)
        message = "should be in the output but is not: a bug in ckptfix; please report it"
        return found("lost", message, where=name, severity="error")


INSIDE = "/()"
"""Marker in the address of a tensor that is an argument or state of an object, and that nobody named."""


def everything(checkpoint: Checkpoint, reported: Iterable[str] = ()) -> Promise:
    """Return the promise to keep all tensors of `checkpoint`, except those at or below an address in `reported`."""
    gone = frozenset(reported)
    entries = listed(checkpoint)
    if not gone:
        return Promise(entries, list(referred(checkpoint)), source=checkpoint)
    kept = [entry for entry in entries if not is_inside_any(entry.name, gone)]
    return Promise(kept, others=[entry for entry in entries if is_inside_any(entry.name, gone)], reported=gone)


def damaged(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """Return findings about data that the file does not hold as described, and that an edit would copy unchanged."""
    parts = maybe_pickled_object(checkpoint)
    if parts is not None and not parts.all_there():
        # The findings that name the tensors are made with the entries, which an edit does not need.
        _ = checkpoint.entries
    rows = [finding for finding in checkpoint.findings if finding.id in ("bad-tensor", "truncated")]
    return tuple(dict.fromkeys(rows))


def listed(checkpoint: Checkpoint) -> list[TensorEntry]:
    """List every tensor of a checkpoint, including keys that metadata only ties to another."""
    entries = list(checkpoint.entries)
    tied = format_of(checkpoint).ties(checkpoint)
    if tied:
        found = {entry.key: entry for entry in entries}
        entries += [replace(found[base], key=name) for name, base in tied.items()]
    return entries


def holders(entries: Iterable[TensorEntry]) -> set[str]:
    """Return addresses with others below them: a tensor there carries tensors, which are lost if it is replaced."""
    ats = {entry.at for entry in entries}
    return {of_keys(keys[:end]) for keys in map(keys_of, ats) for end in range(1, len(keys) + 1)}
