"""``ckptfix.select``: some tensors of a state dict, chosen by their keys."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ckptfix.arguments import checks_types
from ckptfix.checkpoint import Checkpoint, Drop, Edit, NameList, Rename, address
from ckptfix.dataclass import dataclass
from ckptfix.errors import Refused, StrPath
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats import format_of, states
from ckptfix.io.read import Progress
from ckptfix.names import typed
from ckptfix.names.globs import Globs
from ckptfix.ops import choose
from ckptfix.ops.any_source import takes_any_source
from ckptfix.ops.audit.promise import everything
from ckptfix.ops.choose import refuse_damaged
from ckptfix.ops.writing import OLD_BYTES, Draft, Result, WriteOptions, carry_out, copy_note, plan_edits
from ckptfix.words import plural, some

STATE_OF_MODULE = "_extra_state"
"""Last component of the key under which a module stores data other than tensors (torch/nn/modules/module.py)."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The plan of a selection.

    Attributes:
        edits: edits for `plan_edit`.
        dropped: address of a state dict -> its keys that are left out.
        kept: address of a state dict -> number of its tensors that stay.
        findings: globs that matched nothing, and an optimizer that is unchanged.
    """

    edits: tuple[Edit, ...]
    dropped: Mapping[str, tuple[str, ...]]
    kept: Mapping[str, int]
    findings: tuple[Finding, ...]

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of everything that is left out."""
        return tuple(address.join(at, key) for at, keys in self.dropped.items() for key in keys)


def plan_selection(
    checkpoint: Checkpoint,
    *,
    keep: Sequence[str] = (),
    drop: Sequence[str] = (),
    at: str | None = None,
    allow_unmatched: bool = False,
) -> Selection:
    """Plan to keep the tensors that match a glob of `keep` and no glob of `drop`; an empty `keep` matches all.

    A value that is not a tensor stays unless a glob of `drop` matches it. The extra state of a module goes with its
    tensors.

    Raises:
        Refused: there is no glob; or no tensor would be left, and then nothing is written.
        NoSuchTensor: there is no state dict at `at`, or a glob matches no key and `allow_unmatched` is not set.
    """
    if not keep and not drop:
        raise Refused("no tensors were selected", hint="pass --keep GLOB or --drop GLOB")
    kept_by, dropped_by = Globs(keep), Globs(drop)
    edits: list[Edit] = []
    dropped: dict[str, tuple[str, ...]] = {}
    kept: dict[str, int] = {}
    all_names: list[str] = []
    ties = format_of(checkpoint).ties(checkpoint)
    sites = choose.chosen_sites(checkpoint, at, weights_only=True)
    if not sites and at is None:
        choose.refuse_module(checkpoint)
    for site in sites:
        tensors = _tensors(checkpoint, site, ties)
        # A glob takes a key that is not text as it is written.
        names = (*site.names, *choose.unnamed_keys(checkpoint, site))
        all_names += names
        gone = [name for name in names if _goes(name, name in tensors, kept_by, dropped_by)]
        kept[site.at] = len(tensors.difference(gone))
        if gone:
            dropped[site.at] = tuple(gone)
            edits += dropping(site.at, gone, ties)
    unused = [*kept_by.unused(), *dropped_by.unused()]
    findings = [*typed.unmatched(unused, all_names, kind="glob", allow=allow_unmatched)]
    if not any(kept.values()):
        _refuse_empty(checkpoint, keep)
    if dropped:
        findings += optimizers_left(checkpoint, dropped)
    return Selection(tuple(edits), dropped, kept, tuple(findings))


def optimizers_left(checkpoint: Checkpoint, places: Collection[str]) -> Iterator[Finding]:
    """Yield a finding for each optimizer that stays as it is, where tensors of `places` are left out."""
    optimizers = [state.at for state in checkpoint.state_dicts if state.optimizer]
    if not set(optimizers) & set(places):
        message = "optimizer unchanged: its state still covers the parameters that were left out"
        for at in dict.fromkeys(at.partition("/")[0] for at in optimizers):
            yield found("optimizer-left", message, where=at)


def _tensors(checkpoint: Checkpoint, site: NameList, ties: Mapping[str, str]) -> set[str]:
    names = {entry.key for entry in checkpoint.entries_at(site.at)}
    return names.union(ties) if not site.at else names


def _goes(name: str, is_tensor: bool, keep: Globs, drop: Globs) -> bool:
    """Return whether the key `name` is left out. Both globs are tested, to find those that match nothing."""
    unwanted = drop.match(name)
    wanted = not keep or keep.match(name)
    if is_tensor or name.rpartition(".")[2] == STATE_OF_MODULE:
        return unwanted or not wanted
    return unwanted


def dropping(at: str, gone: Sequence[str], ties: Mapping[str, str]) -> list[Edit]:
    """Plan the removal of the keys `gone`. A key that is only tied to one of them inherits its bytes."""
    lost = set(gone)
    heirs: dict[str, str] = {}
    if not at:
        for name, base in ties.items():
            if base in lost and name not in lost:
                heirs.setdefault(base, name)
    if not heirs:
        return [Drop(at, tuple(gone))]
    # The tie is dropped, and its tensor is renamed to the tied key; other keys tied to it follow.
    names = tuple(name for name in (*gone, *heirs.values()) if name not in heirs)
    return [Drop(at, names), Rename(at, "state_dict", heirs)]


def _refuse_empty(checkpoint: Checkpoint, keep: Sequence[str]) -> None:
    tensors = plural(len(checkpoint.entries), "tensor")
    message = f"none of its {tensors} would be left" if checkpoint.entries else "it holds no tensors"
    asked = f" matches {', '.join(map(repr, keep))}" if keep else ""
    hint = f"no key of a state dict{asked}; run `ckptfix inspect` to list the keys" if asked else None
    raise Refused(message, path=checkpoint.path, hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SelectResult(Result):
    """The result of a selection.

    Attributes:
        kept: number of tensors that stay in the state dicts that the globs apply to.
        dropped: addresses that are left out of them.
    """

    kept: int = 0
    dropped: tuple[str, ...] = ()

    def _details(self) -> dict[str, Any]:
        return {"kept": self.kept, "left_behind": list(self.dropped)}


@checks_types
@takes_any_source()
def select(
    source: StrPath,
    dest: StrPath | None = None,
    *,
    keep: Sequence[str] = (),
    drop: Sequence[str] = (),
    at: str | None = None,
    allow_unmatched: bool = False,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    in_place: bool = False,
    progress: Progress | None = None,
) -> SelectResult:
    """Write `source` to `dest` with only some tensors of its state dicts. Everything else is unchanged.

    Args:
        keep: globs; tensors whose keys match none of them are left out. Without any, all tensors match.
        drop: globs; tensors whose keys match one of them are left out.
        at: address of the one state dict to choose from; all that look like a model's by default.
        allow_unmatched: a glob that matches no key is a finding, not an error.
        force, keep_old, dry_run, in_place, progress: as in `strip_module`. In place, a torch zip keeps the bytes of
            what is left out, which `slim` removes; other formats of files refuse it, because their data would move.

    Raises:
        Refused: there is no glob, or no tensor would be left.
        NoSuchTensor, WouldOverwrite, DamagedFile, UnknownFormat, WriteFailed.
    """

    def make(checkpoint: Checkpoint, dest: str) -> Draft[SelectResult]:
        done = plan_selection(checkpoint, keep=keep, drop=drop, at=at, allow_unmatched=allow_unmatched)
        gone = done.addresses
        kept = sum(done.kept.values())
        line = "nothing to do: every tensor is kept"
        if gone:
            line = f"kept {plural(kept, 'tensor')}, left out {len(gone):,}"
            places = [place for place in done.dropped if place] or list(done.dropped)
            if len(done.dropped) > 1 or places[0]:
                line += f" ({some([address.shown(place) for place in done.dropped])})"
        lines = [line + copy_note(not gone)]
        if gone:
            lines.append(f"left behind: {some(gone)}")
        if gone and in_place and states(checkpoint, "objects"):
            lines.append(OLD_BYTES)
        lines += [f"{row.where}: {row.message}" for row in done.findings if row.id == "optimizer-left"]
        refuse_damaged(checkpoint, left_out=frozenset(gone))
        return Draft(
            result=partial(SelectResult, kept=kept, dropped=gone),
            format=checkpoint.format,
            plan=plan_edits(checkpoint, done.edits, dest),
            promise=replace(everything(checkpoint, gone), chosen=checkpoint if gone else None),
            lines=lines,
            findings=done.findings,
        )

    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, in_place=in_place, progress=progress)
    return carry_out(source, dest, make, how)
