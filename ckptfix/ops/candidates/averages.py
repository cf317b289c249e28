"""Averaged weights in a checkpoint: where they are, and whether a ``module.`` prefix is their wrapper's own.

A wrapper that averages is a module around a copy of the model: ``AveragedModel(net).load_state_dict`` needs the
``module.`` that it wrote. Without that level its state dict loads nowhere. Two things distinguish its ``module.`` from
DataParallel's:

- Its counter of updates is beside the keys (`wrappers.COUNTERS`). Around a DataParallel model the keys have two
  levels, ``module.module.x``: one of them is DataParallel's.
- It is under a key for averages (`kinds.AVERAGES`), with one level more than the model beside it. The same holds for
  ``ModelEmaV2.state_dict()`` of timm, which has no counter (timm/utils/model_ema.py).

An average without a counter, and with no more levels than the model, is the copy of a DataParallel model: both lose
the level together. Libraries load it that way: timm saves without the wrapper (``unwrap_model`` in
timm/utils/model.py), and ``ModelEma._load_checkpoint`` accepts keys with and without ``module.``.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptfix.checkpoint import Checkpoint, NameList
from ckptfix.commands import word
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.names import kinds, wrappers
from ckptfix.words import plural


def is_under_key(at: str) -> bool:
    """Return whether the address `at` contains a key for averaged weights."""
    return any(part in kinds.AVERAGES for part in at.split("/"))


def is_average(at: str, names: Sequence[str]) -> bool:
    """Return whether the state dict at `at` is under a key for averages, or belongs to a wrapper that averages."""
    return is_under_key(at) or "n_averaged" in names or wrappers.is_average(names)


def has_own_level(checkpoint: Checkpoint, site: NameList, names: Sequence[str]) -> bool:
    """Return whether the first ``module.`` of `names`, the current names of `site`, is from a wrapper that averages."""
    counted = not wrappers.COUNTERS.keys().isdisjoint(names)
    if counted and wrappers.is_average(counting(checkpoint, site, names, wrappers.AVERAGED)):
        return True
    if not is_under_key(site.at) or any(name in wrappers.COUNTERS for name in site.names):
        return False
    shaped = checkpoint.shaped(site.at, site.names) - kinds.optimizer_names(site.names)
    names = [name for name, before in zip(names, site.names, strict=True) if before in shaped]
    levels = _levels(names)
    if not levels:
        return False
    bare = {name.removeprefix("module." * levels) for name in names}
    beside = [other for other in checkpoint.sites if other.kind == "state_dict" and not is_under_key(other.at)]
    found = []
    for other in (tuple(checkpoint.shaped(other.at, other.names)) for other in beside):
        if len(other) != len(names):
            continue
        count = _levels(other)
        if bare == {name.removeprefix("module." * count) for name in other}:
            found.append(count)
    return bool(found) and levels > max(found)


def counting(checkpoint: Checkpoint, site: NameList, names: Sequence[str], *prefixes: str) -> list[str]:
    """Return the `names` that decide whether a prefix is on all of them; `names` are the current names of `site`.

    Numbers, text, mappings, 0-d tensors and optimizer tensors may be the trainer's. They count only if they have one of
    the `prefixes` themselves: ``module.bn.num_batches_tracked`` is the model's, and ``epoch`` proves nothing.
    """
    having = [any(wrappers.has_prefix(name, prefix) for prefix in prefixes) for name in names]
    if site.kind != "state_dict" or all(having) or not any(having):
        return list(names)
    shaped = checkpoint.shaped(site.at, site.names) - kinds.optimizer_names(site.names)
    rows = zip(names, site.names, having, strict=True)
    return [name for name, before, has in rows if has or before in shaped or name in wrappers.COUNTERS]


def scalars_left(checkpoint: Checkpoint, site: NameList, names: Sequence[str], *prefixes: str) -> list[str]:
    """Return the 0-d tensors that `counting` leaves out: they lack the prefix, and keep their names."""
    if site.kind != "state_dict":
        return []
    seen = set(counting(checkpoint, site, names, *prefixes))
    if seen.issuperset(names):
        return []
    tensors = {entry.key for entry in checkpoint.entries_at(site.at)} - kinds.optimizer_names(site.names)
    rows = zip(names, site.names, strict=True)
    return [name for name, before in rows if name not in seen and before in tensors]


def _levels(names: Sequence[str]) -> int:
    """Count how many times ``module.`` is repeated at the start of all `names`."""
    levels = 0
    while names and all(name.startswith("module." * (levels + 1)) for name in names):
        levels += 1
    return levels


def inside(names: Sequence[str]) -> list[str]:
    """Return the keys of the model inside a wrapper: without the wrapper's level and its counter."""
    return [wrappers.strip(name, wrappers.AVERAGED) for name in names if wrappers.has_prefix(name, wrappers.AVERAGED)]


def with_level(rule: wrappers.Rule) -> wrappers.Rule:
    """Return `rule`, which renames keys inside a wrapper that averages, as a rule for the wrapper's own keys."""

    def outside(name: str) -> str:
        if not name.startswith(f"{wrappers.AVERAGED}."):
            return name
        return wrappers.add(rule(wrappers.strip(name, wrappers.AVERAGED)), wrappers.AVERAGED)

    return outside


def within(rule: wrappers.Rule) -> wrappers.Rule:
    """Return `rule`, which renames a wrapper's own keys, as a rule for the keys that `inside` returns."""
    return lambda name: wrappers.strip(rule(wrappers.add(name, wrappers.AVERAGED)), wrappers.AVERAGED)


def wrapper(names: Sequence[str]) -> str:
    """Name the class that wraps averages with these keys, for messages."""
    made = (maker.partition(" ")[0] for counter, maker in wrappers.COUNTERS.items() if counter in names)
    return next(made, "its wrapper")


def is_kept(checkpoint: Checkpoint, site: NameList, names: Sequence[str], at: str | None) -> bool:
    """Return whether a wrapper that averages keeps its ``module.`` in `names`, the current names of `site`.

    It keeps the level unless the user asks for its address `at`, or the file holds nothing else: then nothing else can
    be meant.
    """
    if at is not None or not site.at or site.kind != "state_dict":
        return False
    return has_own_level(checkpoint, site, names)


def note_kept(findings: list[Finding], site: NameList, names: Sequence[str]) -> None:
    """Record, once, that `names` keep the level of their wrapper."""
    if not any(row.id == "average-kept" and row.where == site.at for row in findings):
        kept = plural(len(inside(names)), "key")
        message = f"left the 'module.' of {wrapper(names)} on {kept}, as it is not DataParallel's"
        findings.append(_kept(site, f"{message} (--at {word(site.at)} removes it too)"))


def left(site: NameList) -> Finding:
    """Return the finding of add-module for averages that already have the level of their wrapper."""
    at = word(site.at)
    return _kept(site, f"unchanged, with the 'module.' of {wrapper(site.names)} (--at {at} adds another)")


def _kept(site: NameList, message: str) -> Finding:
    return found("average-kept", message, where=site.at)
