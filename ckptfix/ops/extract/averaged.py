"""Averaged weights in a training checkpoint: where trainers store them, and the keys that a plain model uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ckptfix.checkpoint import Checkpoint, address
from ckptfix.checkpoint.tree import TensorValue
from ckptfix.dataclass import dataclass
from ckptfix.errors import Refused, Undecided
from ckptfix.formats.torch.calls import detached_entry
from ckptfix.formats.torch.common import maybe_pickled_object, pickled_object
from ckptfix.formats.torch.tensors import BadTensor
from ckptfix.formats.torch.weights import Weights
from ckptfix.names import averaged_keys
from ckptfix.names.averaged_keys import AveragedKeys
from ckptfix.ops.candidates import Candidate, at_address
from ckptfix.ops.candidates.averages import is_average
from ckptfix.ops.choose import ANY, choices, listed, meant
from ckptfix.ops.extract.sources import picked, read

SHADOW_LIST = "shadow_params"
"""Key in torch_ema's ExponentialMovingAverage.state_dict(): a list of tensors in the order of the parameters."""

STATISTICS = frozenset(("running_mean", "running_var", "num_batches_tracked"))
"""Last components of the keys of buffers, which no list of parameters contains."""


@dataclass(frozen=True, slots=True)
class Averaged:
    """Averaged weights: their address, and the function that reads them."""

    at: str
    read: Callable[[], Weights]


def averaged(checkpoint: Checkpoint, found: list[Candidate], at: str | None) -> Weights:
    """Return the averaged weights of a checkpoint, under the keys of a plain model.

    Args:
        found: the state dicts in the checkpoint.
        at: address of those to read, if there are several.

    Raises:
        Refused: there are no averaged weights, or several sets.
    """
    rows = [*_named(checkpoint, found), *_swapped(checkpoint, found)]
    rows += [*_flat(checkpoint, found), *_beside(checkpoint, found), *_lists(checkpoint, found)]
    if at is not None:
        rows = [row for row in rows if row.at == address.given(at)]
        rows = rows or [Averaged(at, lambda: _plain(read(checkpoint, at_address(checkpoint, at))))]
    if len(rows) == 1:
        return rows[0].read()
    if not rows:
        ats = choices(checkpoint, (candidate.at for candidate in found[:8]), ANY)
        hint = f"--at extracts the state dict at {listed(ats)}" if ats else "run `ckptfix inspect` to list its content"
        raise Refused("the file has no averaged weights that ckptfix recognizes", path=checkpoint.path, hint=hint)
    ats = choices(checkpoint, (row.at for row in rows), ANY)
    message = f"it holds {len(rows)} sets of averaged weights: {listed(ats)}"
    choice = {"ema": True, "at": ats[0]} if ats else {}
    raise Undecided(message, choices=ats, choice=choice, path=checkpoint.path)


def _named(checkpoint: Checkpoint, found: list[Candidate]) -> list[Averaged]:
    out = []
    for candidate in found:
        if is_average(candidate.at, candidate.names) and not _is_swapped(candidate, found):
            out.append(Averaged(candidate.at, lambda candidate=candidate: _plain(read(checkpoint, candidate))))  # type: ignore[misc]
    return out


def _is_swapped(candidate: Candidate, found: list[Candidate]) -> bool:
    """Return whether a state dict under a key for averages holds MMEngine's weights before averaging."""
    names = candidate.names
    return candidate.at == "ema_state_dict" and "steps" in names and any(row.at == "state_dict" for row in found)


def _swapped(checkpoint: Checkpoint, found: list[Candidate]) -> list[Averaged]:
    """Find averages saved as ``state_dict`` by trainers that keep the weights before averaging beside it.

    Sources: mmengine/hooks/ema_hook.py, before_save_checkpoint (its averaged model has the buffer ``steps``);
    lightning/pytorch/callbacks/weight_averaging.py, on_save_checkpoint.
    """
    if any(_is_swapped(candidate, found) for candidate in found):
        writer, others = "MMEngine", "ema_state_dict"
    elif any(row.at == "current_model_state" for row in found):
        writer, others = "Lightning's WeightAveraging", "current_model_state"
    else:
        return []
    candidate = next((candidate for candidate in found if candidate.at == "state_dict"), None)
    if candidate is None:
        return []
    why = f"the averaged weights, which {writer} saves as state_dict (the other weights are in {others})"
    return [Averaged("state_dict", lambda: replace(read(checkpoint, candidate), what=why))]


def _plain(weights: Weights) -> Weights:
    """Remove the prefix and the counters that a wrapper for averaging adds."""
    names = [entry.key for entry in weights.entries]
    what = f"the averaged weights at {address.shown(weights.at)}"
    # ema-pytorch keeps both models, and counters, in one state dict.
    inner = [name for name in names if name.startswith("ema_model.")]
    prefix = "ema_model" if inner else "module"
    if "n_averaged" in names or "steps" in names:
        inner = [name for name in names if name not in ("n_averaged", "steps")]
    if not inner or not all(name.startswith(f"{prefix}.") for name in inner):
        return replace(weights, what=what)
    return picked(weights, {name: name[len(prefix) + 1 :] for name in inner}, f"{what}, without {prefix}.", prefix)


def _flat(checkpoint: Checkpoint, found: list[Candidate]) -> list[Averaged]:
    """Find averages of latent-diffusion's LitEma: ``model.a.b`` is averaged as ``model_ema.ab`` in the same state dict.

    Source: CompVis/latent-diffusion ldm/modules/ema.py. A key without dots is matched to the key that equals it once
    its dots are removed.
    """
    out = []
    for candidate in found:
        names = candidate.names
        if {"model_ema.decay", _NUM_UPDATES} <= set(names):
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
    what = "the averaged weights model_ema.*, under the keys of the weights that they average"
    return picked(weights, renamed | rest, what)


def _beside(checkpoint: Checkpoint, found: list[Candidate]) -> list[Averaged]:
    """Find averages with keys of their own in the state dict of the weights that they average."""
    out = []
    for candidate in found:
        made = None if _NUM_UPDATES in candidate.names else averaged_keys.find(candidate.names)
        if made is not None and not is_average(candidate.at, candidate.names):
            out.append(Averaged(candidate.at, partial(_from_beside, checkpoint, candidate, made)))
    return out


def _from_beside(checkpoint: Checkpoint, candidate: Candidate, made: AveragedKeys) -> Weights:
    """Return the averages under the keys of the weights that they average, and what is not averaged.

    Raises:
        Refused: a tensor has a different shape than its average.
    """
    weights = read(checkpoint, candidate)
    shapes = {entry.key: entry.shape for entry in weights.entries}
    odd = next((old for old, new in made.pairs.items() if shapes.get(old) != shapes.get(new)), None)
    if odd is not None:
        message = f"{odd} has a different shape than {made.pairs[odd]}, so it cannot be its average"
        raise Refused(message, path=checkpoint.path, where=weights.at or None)
    swapped = made.spelling.swapped or ("ema_swapped", True) in checkpoint.values()  # the second is nequip's
    averages = made.pairs if not swapped else {new: new for new in made.pairs.values()}
    gone = {*made.pairs, *made.pairs.values(), *made.counters}
    rest = {key: key for key in shapes if key not in gone}
    first = next(iter(made.pairs))
    what = f"the averaged weights, such as {first}, under the keys of the weights that they average"
    if swapped:
        what = f"the averaged weights, which the trainer saves under the plain keys (the others are keys like {first})"
    return picked(weights, {**averages, **rest}, what)


_NUM_UPDATES = "model_ema.num_updates"
"""A buffer that LitEma always has."""


def _lists(checkpoint: Checkpoint, found: list[Candidate]) -> list[Averaged]:
    """Find lists of averaged parameters without keys."""
    parts = maybe_pickled_object(checkpoint)
    if parts is None:
        return []
    tensors = parts.found.tensors
    places = dict.fromkeys(at for at, _, _ in tensors if at.rpartition("/")[2] == SHADOW_LIST)
    models = meant(checkpoint, [row for row in found if SHADOW_LIST not in row.at.split("/")])
    return [Averaged(at, lambda at=at: _from_list(checkpoint, at, models)) for at in places]  # type: ignore[misc]


def _from_list(checkpoint: Checkpoint, at: str, models: list[Candidate]) -> Weights:
    """Return the parameters of a list under the keys of the one model beside it; the buffers are the model's own.

    Raises:
        Refused: the counts or the shapes do not match.
    """
    if len(models) != 1:
        message = f"the averages at {at} have no keys, and {len(models)} models could provide them"
        raise Refused(message, path=checkpoint.path, hint="exactly one model must be beside them to name them")
    weights = read(checkpoint, models[0])
    parts = pickled_object(checkpoint)
    try:
        values = [
            detached_entry(item.entry(key, ""), key)
            for key, item in parts.tensors_at(at)
            if isinstance(item, TensorValue)
        ]
    except BadTensor as error:
        raise Refused(f"cannot read an average: {error}", path=checkpoint.path, where=at) from None
    named = [entry for entry in weights.entries if entry.key.rpartition(".")[2] not in STATISTICS]
    if [entry.shape for entry in named] != [entry.shape for entry in values]:
        where = address.shown(models[0].at)
        message = f"the {len(values)} averages at {at} do not match the {len(named)} parameters at {where}"
        hint = "their counts or shapes differ, so their keys are unknown"
        raise Refused(message, path=checkpoint.path, hint=hint)
    new = {old.key: replace(value, key=old.key) for old, value in zip(named, values, strict=True)}
    entries = tuple(new.get(entry.key, entry) for entry in weights.entries)
    what = f"the averaged parameters at {at}, in order, under the keys at {address.shown(models[0].at)}"
    replaced = tuple(address.join(weights.at, name) for name in new)
    return replace(weights, entries=entries, what=what, left=(*weights.left, *replaced))
