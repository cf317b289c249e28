"""Weights out of files that cannot or should not be unpickled: a new file with one state dict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain

from ckptfix.checkpoint import Checkpoint, Plan, address
from ckptfix.errors import Refused, Undecided
from ckptfix.findings.table import found
from ckptfix.formats import FORMATS, open_checkpoint
from ckptfix.formats.base import Format
from ckptfix.formats.programs import exported, torchscript
from ckptfix.formats.target import fitting, not_written, target_format
from ckptfix.formats.torch import calls
from ckptfix.formats.torch.weights import Weights
from ckptfix.formats.torch.weights_only import accepted
from ckptfix.io.source import found_as
from ckptfix.ops.audit.promise import Promise
from ckptfix.ops.averages import is_average
from ckptfix.ops.candidates import candidates
from ckptfix.ops.choose import choose as chosen_state_dict
from ckptfix.ops.convert.plan import little
from ckptfix.ops.extract.averaged import averaged
from ckptfix.ops.extract.sources import read
from ckptfix.ops.hazards import globals_below
from ckptfix.ops.rank_shards import refuse_piece


@dataclass(frozen=True, slots=True)
class Extraction:
    """The plan of an extraction.

    Attributes:
        weights: the extracted weights.
        plan: files to write; its findings list what is left out, and what the state dict may lack.
        format: format of the output.
        lost: keys of tensors that its format cannot hold.
        others: addresses of other state dicts that could have been extracted.
    """

    weights: Weights
    plan: Plan
    format: str
    lost: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def allows(self) -> Callable[[str], bool]:
        """Return a test of whether the output may name a global: torch's own, or one that is reported as kept."""
        kept = frozenset(foreign(self.weights))
        return lambda name: _is_own(name) or name in kept

    def promise(self) -> Promise:
        """Return the content that the output must have: the extracted tensors, except those its format cannot hold."""
        weights = self.weights
        kept = [entry for entry in weights.entries if entry.key not in self.lost]
        return Promise(kept, others=weights.beside, reported=frozenset(weights.left))


def choose(checkpoint: Checkpoint, at: str | None, ema: bool) -> tuple[Weights, tuple[str, ...]]:
    """Return the requested state dict, or the only one of a model; and the addresses of the others.

    Raises:
        NoSuchTensor: there is no state dict at `at`.
        Refused: there is no state dict, or there are several equally good ones.
    """
    if at is None:
        refuse_piece(checkpoint)
    found = candidates(checkpoint)
    if ema:
        weights = averaged(checkpoint, found, at)
        return weights, tuple(row.at for row in found if row.at != weights.at)
    if at is not None:
        refuse_piece(checkpoint, address.given(at))
    try:
        chosen = chosen_state_dict(checkpoint, at)
    except Undecided as error:
        error.averages = any(is_average(row.at, row.names) for row in found)
        error.choose_with(error.choice)
        raise
    others = tuple(row.at for row in found if row.at != chosen.at) if at is None else ()
    return read(checkpoint, chosen), others


def plan(weights: Weights, dest: str, *, to: str | None = None, drop_unsupported: bool = False) -> Extraction:
    """Plan a file at `dest` that holds `weights`.

    Raises:
        Refused: there are no tensors in it.
        WouldLoseData: there are tensors that the format cannot hold, without `drop_unsupported`.
        Unsupported: the format is unknown, or a tensor cannot be written again.
    """
    target = FORMATS[target_format(weights.path, dest, to)]
    if not weights.entries:
        first = weights.findings[0].message if weights.findings else "a module without parameters and buffers"
        hint = f"--at {torchscript.CONSTANTS} extracts its constants" if torchscript.CONSTANTS in weights.left else None
        raise Refused(f"{weights.what} holds no tensors: {first}", path=weights.path, hint=hint)
    lost: tuple[str, ...] = ()
    if target.plan_state_dict is not None:
        made = target.plan_state_dict(weights, dest)
    else:
        made, lost = _tensors_alone(weights, dest, target, drop_unsupported)
    kept = foreign(weights) if "objects" in target.states else []
    named = [found("foreign-global", KEPT, where=name, severity="warning") for name in kept]
    noticed = (*weights.findings, *named, *made.findings, *not_written(weights.left, lost, target))
    return Extraction(weights, Plan(made.files, noticed), target.name, lost)


KEPT = "a class or function that builds tensors; weights_only=True refuses it, and the output names it"


def foreign(weights: Weights) -> list[str]:
    """Return the globals in the calls of its tensors that are not torch's own."""
    nodes = () if weights.calls is None else weights.calls.nodes.values()
    return [name for name in dict.fromkeys(chain.from_iterable(map(globals_below, nodes))) if not _is_own(name)]


def _is_own(name: str) -> bool:
    """Return whether a global is torch's own: weights_only=True accepts it, or it builds a tensor of torch."""
    return accepted(name) or name in _REBUILDS


_REBUILDS = frozenset(row.full for row in calls.TABLE)


def _tensors_alone(
    weights: Weights, dest: str, target: Format, drop_unsupported: bool
) -> tuple[Plan, tuple[str, ...]]:
    hint = "--drop-unsupported leaves them out, and lists them; a torch file can hold them"
    taken, lost = fitting(
        weights.entries, target, drop_unsupported=drop_unsupported, path=weights.path, at=weights.at, hint=hint
    )
    kept, metadata, findings = target.split_ties(taken)
    view = replace(weights, entries=kept).as_checkpoint()
    made = target.plan_write(little(view, kept), dest, metadata={"format": "pt", **metadata})
    return Plan(made.files, (*findings, *made.findings)), lost


def open_weights(path: str, at: str | None, ema: bool) -> tuple[Weights, tuple[str, ...]]:
    """Return the weights to extract from the file at `path`, and the addresses of other state dicts in it.

    Raises:
        UnknownFormat: the file holds no weights.
        CkptfixError: as `choose`.
    """
    if found_as(path) != "file":
        return choose(open_checkpoint(path), at, ema)
    weights = read_program(path, at)
    if weights is None:
        return choose(open_checkpoint(path), at, ema)
    if ema:
        raise Refused("a program holds only one set of weights; --ema is for training checkpoints", path=path)
    return weights, ()


def read_program(path: str, at: str | None = None) -> Weights | None:
    """Return the state dict of a TorchScript archive or an exported program; None for every other file.

    Raises:
        CkptfixError: as `torchscript.read` and `exported.read`.
    """
    if found_as(path) != "file":
        return None
    return next((found for program in (torchscript, exported) if (found := program.read(path, at)) is not None), None)
