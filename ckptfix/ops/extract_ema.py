"""Averaged weights in a training checkpoint: where trainers put them, and the names that a plain model has for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ckptfix import keys
from ckptfix.checkpoint import Checkpoint
from ckptfix.errors import Refused
from ckptfix.formats.torch_common import Parts
from ckptfix.formats.torch_detach import detached_entry
from ckptfix.formats.torch_tensors import BadTensor, tensor_entry
from ckptfix.formats.weights import Weights
from ckptfix.ops.averages import KEYS as KEYS
from ckptfix.ops.averages import is_under_key
from ckptfix.ops.extract_sources import Candidate, at_address, picked, read

SHADOW_LIST = "shadow_params"
"""Key of torch_ema's ExponentialMovingAverage.state_dict(): a list of tensors in the order of the parameters."""

STATISTICS = frozenset(("running_mean", "running_var", "num_batches_tracked"))
"""Last components of names that are buffers and no parameters, which no list of parameters holds."""


@dataclass(frozen=True, slots=True)
class Averaged:
    """Averaged weights: where they are, and how they are read."""

    at: str
    read: Callable[[], Weights]


def averaged(checkpoint: Checkpoint, found: list[Candidate], at: str | None) -> Weights:
    """The averaged weights of a checkpoint, under the names of a plain model.

    Args:
        found: the state dicts in it.
        at: address of those to take, where there are several.

    Raises:
        Refused: there are none, or several.
    """
    rows = [*_named(checkpoint, found), *_swapped(checkpoint, found)]
    rows += [*_flat(checkpoint, found), *_lists(checkpoint, found)]
    if at is not None:
        rows = [row for row in rows if row.at == at.strip("/")]
        rows = rows or [Averaged(at, lambda: _plain(read(checkpoint, at_address(checkpoint, at))))]
    if len(rows) == 1:
        return rows[0].read()
    if not rows:
        addresses = ", ".join(candidate.at or "''" for candidate in found[:8])
        hint = f"--at takes the state dict at {addresses}" if found else "`ckptfix inspect` shows what it holds"
        raise Refused("no averaged weights were found in it", path=checkpoint.path, hint=hint)
    addresses = ", ".join(row.at or "''" for row in rows)
    hint = f"choose one with --ema --at {rows[0].at or repr('')}"
    raise Refused(f"it holds {len(rows)} sets of averaged weights: {addresses}", path=checkpoint.path, hint=hint)


def is_averaged(checkpoint: Checkpoint, candidate: Candidate) -> bool:
    """Whether a state dict stands under a key for averaged weights, or is that of an AveragedModel."""
    if is_under_key(candidate.at):
        return True
    names = _names(checkpoint, candidate)
    return "n_averaged" in names or keys.is_average(names)


def _names(checkpoint: Checkpoint, candidate: Candidate) -> tuple[str, ...]:
    """Keys of the mapping of a candidate, or of the buffers of a module."""
    at = f"{candidate.at}/_buffers".lstrip("/") if candidate.module is not None else candidate.at
    return next((site.names for site in checkpoint.sites if site.at == at and site.kind == "state_dict"), ())


def _named(checkpoint: Checkpoint, found: list[Candidate]) -> list[Averaged]:
    out = []
    for candidate in found:
        if is_averaged(checkpoint, candidate) and not _is_swapped(checkpoint, candidate, found):
            out.append(Averaged(candidate.at, lambda candidate=candidate: _plain(read(checkpoint, candidate))))  # type: ignore[misc]
    return out


def _is_swapped(checkpoint: Checkpoint, candidate: Candidate, found: list[Candidate]) -> bool:
    names = _names(checkpoint, candidate)
    if candidate.at != "ema_state_dict" or "steps" not in names:
        return False
    return any(other.at == "state_dict" for other in found)


def _swapped(checkpoint: Checkpoint, found: list[Candidate]) -> list[Averaged]:
    """MMEngine's EMAHook puts the averaged weights into ``state_dict``, and the others into ``ema_state_dict``.

    Source: mmengine/hooks/ema_hook.py, before_save_checkpoint. Its averaged model has the buffer ``steps``.
    """
    if not any(_is_swapped(checkpoint, candidate, found) for candidate in found):
        return []
    candidate = next(candidate for candidate in found if candidate.at == "state_dict")
    why = "the averaged weights, which MMEngine saves as state_dict (its ema_state_dict has the others)"
    return [Averaged("state_dict", lambda: replace(read(checkpoint, candidate), what=why))]


def _plain(weights: Weights) -> Weights:
    """Without what a wrapper for averaging adds to the names."""
    names = [entry.key for entry in weights.entries]
    what = f"the averaged weights at {weights.at or 'the top'}"
    # ema-pytorch keeps both models, and counters, in one state dict.
    inner = [name for name in names if name.startswith("ema_model.")]
    prefix = "ema_model" if inner else "module"
    if "n_averaged" in names or "steps" in names:
        inner = [name for name in names if name not in ("n_averaged", "steps")]
    if not inner or not all(name.startswith(f"{prefix}.") for name in inner):
        return replace(weights, what=what)
    return picked(weights, {name: name[len(prefix) + 1 :] for name in inner}, f"{what}, without {prefix}.", prefix)


def _flat(checkpoint: Checkpoint, found: list[Candidate]) -> list[Averaged]:
    """LitEma of latent-diffusion: ``model.a.b`` is averaged as ``model_ema.ab``, in the same state dict.

    Source: CompVis/latent-diffusion ldm/modules/ema.py. Names without dots are looked up among those with them.
    """
    out = []
    for candidate in found:
        names = _names(checkpoint, candidate)
        if {"model_ema.decay", "model_ema.num_updates"} <= set(names):
            out.append(Averaged(candidate.at, lambda candidate=candidate: _unflattened(checkpoint, candidate)))  # type: ignore[misc]
    return out


def _unflattened(checkpoint: Checkpoint, candidate: Candidate) -> Weights:
    weights = read(checkpoint, candidate)
    full: dict[str, list[str]] = {}
    for entry in weights.entries:
        if entry.key.startswith("model."):
            full.setdefault(entry.key.removeprefix("model.").replace(".", ""), []).append(entry.key)
    renamed = {}
    for entry in weights.entries:
        flat = entry.key.removeprefix("model_ema.")
        if flat == entry.key or flat in ("decay", "num_updates"):
            continue
        names = full.get(flat, [])
        if len(names) != 1:
            message = f"{entry.key} is the average of {' or '.join(names) or 'a tensor that the file lacks'}"
            raise Refused(message, path=checkpoint.path, where=weights.at or None)
        renamed[entry.key] = names[0]
    averaged_names = set(renamed.values())
    rest = {
        entry.key: entry.key
        for entry in weights.entries
        if not entry.key.startswith("model_ema.") and entry.key not in averaged_names
    }
    what = "the averaged weights model_ema.*, under the names of those that they are averages of"
    return picked(weights, renamed | rest, what)


def _lists(checkpoint: Checkpoint, found: list[Candidate]) -> list[Averaged]:
    """Lists of averaged parameters without names."""
    if not isinstance(checkpoint.graph, Parts):
        return []
    tensors = checkpoint.graph.found.tensors
    places = dict.fromkeys(at for at, _, _ in tensors if at.rpartition("/")[2] == SHADOW_LIST)
    models = [candidate for candidate in found if not is_averaged(checkpoint, candidate) or SHADOW_LIST in candidate.at]
    models = [candidate for candidate in models if SHADOW_LIST not in candidate.at.split("/")]
    return [Averaged(at, lambda at=at: _from_list(checkpoint, at, models)) for at in places]  # type: ignore[misc]


def _from_list(checkpoint: Checkpoint, at: str, models: list[Candidate]) -> Weights:
    """The parameters of a list under the names of the one model beside it; its buffers are the model's own.

    Raises:
        Refused: numbers or shapes do not go together.
    """
    if len(models) != 1:
        message = f"averages without names at {at}, and {len(models)} models that could have them"
        raise Refused(message, path=checkpoint.path, hint="one model must be beside them, whose names they get")
    weights = read(checkpoint, models[0])
    parts: Parts = checkpoint.graph
    try:
        values = [
            detached_entry(tensor_entry(node, key, "", parts.storages), key)
            for where, key, node in parts.found.tensors
            if where == at
        ]
    except BadTensor as error:
        raise Refused(f"an average that can not be read: {error}", path=checkpoint.path, where=at) from None
    named = [entry for entry in weights.entries if entry.key.rpartition(".")[2] not in STATISTICS]
    if [entry.shape for entry in named] != [entry.shape for entry in values]:
        where = models[0].at or "the top"
        message = f"the {len(values)} averages at {at} are not those of the {len(named)} parameters at {where}"
        hint = "their numbers or shapes differ, so their names are not known"
        raise Refused(message, path=checkpoint.path, hint=hint)
    new = {old.key: replace(value, key=old.key) for old, value in zip(named, values, strict=True)}
    entries = tuple(new.get(entry.key, entry) for entry in weights.entries)
    what = f"the averaged parameters at {at}, by their order, under the names at {models[0].at or 'the top'}"
    return replace(weights, entries=entries, what=what)
