"""Which state dict of a checkpoint is meant: one answer for every verb.

The answer is an address of the caller, or else what these steps leave of the candidates:

1. Unlikely ones are dropped: what else trainers keep (`ASIDE`: hyper-parameters, losses, optimizers) where
   there is a model or an average; averages and other copies (`COPIES`) where there is a model.
2. Kept is the one with a name that training code gives its model (`NAMES`), the outermost of several.
3. Several names for the same tensors are one state dict.

What still are several is a tie (a generator and a discriminator), and is asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ckptfix.checkpoint import Checkpoint, NameSite, StateDict, address
from ckptfix.commands import command
from ckptfix.errors import CkptfixError, Refused, Undecided, WouldLoseData
from ckptfix.findings.folders import LOST
from ckptfix.formats.torch.call_classes import named_arrays
from ckptfix.formats.torch.common import pickled
from ckptfix.io.source import truncated_hint
from ckptfix.ops import averages
from ckptfix.ops.candidates import Candidate, at_address, candidates, module_of, state_dict_of, view, whole_module

NAMES: dict[str, str] = {
    "model": "torchvision references, fvcore Checkpointer, Ultralytics, fairseq, fastai save_model with its optimizer",
    "model_state_dict": "PyTorch tutorial 'Saving and loading a general checkpoint'",
    "model_state": "pycls checkpoint.py",
    "state_dict": "pytorch/examples imagenet/main.py, Lightning, MMEngine, timm",
    "net": "kuangliu/pytorch-cifar main.py",
    "net_state_dict": "trainers that call the model net",
    "network": "trainers that call the model network",
    "network_weights": "nnU-Net nnUNetTrainer.save_checkpoint",
    "network_state_dict": "trainers that call the model network",
    "module": "DeepSpeed engine.py _save_checkpoint",
    "params": "BasicSR models/base_model.py save_network",
    "weights": "trainers that save weights alone",
    "serialized_state_dict.pt": "torch.export.save before torch 2.8",
}
"""Key of the model's state dict -> who writes it so. Each stands at the top, or under others of these and `AROUND`."""

AROUND = frozenset(("checkpoint", "ckpt", "state", "app"))
"""Keys of mappings around all that a trainer saves."""

ASIDE: dict[str, str] = {
    "hyper_parameters": "Lightning: arguments of the module (save_hyperparameters), networks and losses among them",
    "datamodule_hyper_parameters": "Lightning: arguments of the data module",
    "hparams": "trainers that save their arguments",
    "args": "trainers that save their arguments",
    "config": "trainers that save their arguments",
    "cfg": "trainers that save their arguments",
    "callbacks": "Lightning: what its callbacks keep",
    "loops": "Lightning: counters",
    "averaging_state": "Lightning WeightAveraging: n_averaged",
    "loss": "a loss with its own weights",
    "loss_fn": "a loss with its own weights",
    "loss_func": "fastai Learner.export",
    "criterion": "a loss with its own weights",
    "loss_state_dict": "a loss with its own weights",
    "criterion_state_dict": "a loss with its own weights",
    "opt": "fastai save_model: the optimizer's state, a row a parameter",
    "optim": "an optimizer whose state is not torch's",
    "optimizer": "an optimizer whose state is not torch's",
    "optimizers": "optimizers whose state is not torch's",
    "optimizer_state": "an optimizer whose state is not torch's",
    "optimizer_states": "Lightning: optimizers",
    "optimizer_state_dict": "an optimizer whose state is not torch's",
    "scheduler": "a scheduler that keeps tensors",
    "lr_scheduler": "a scheduler that keeps tensors",
    "lr_schedulers": "Lightning: schedulers",
    "scaler": "a gradient scaler",
    "rng_state": "states of random generators",
    "serialized_constants.pt": "torch.export.save before torch 2.8: tensors that are in no state dict",
    "serialized_example_inputs.pt": "torch.export.save before torch 2.8: arguments of the program",
}
"""Key of what trainers keep beside a model, and which may look like one -> what it is."""

COPIES: dict[str, str] = {
    "current_model_state": "Lightning WeightAveraging: the weights before averaging; state_dict has the average",
    "module_16bit": "formats.zero: what a DeepSpeed model computed with; module has the fp32 weights",
    "frozen_param_fragments": "DeepSpeed engine.py: parts of frozen parameters; module has them, or zero_to_fp32 does",
}
"""Key of weights that stand beside the model's under the same names -> what they are. Averages are others."""

_NAMED, _OTHER, _COPY, _ASIDE = range(4)


def choose(checkpoint: Checkpoint, at: str | None = None) -> Candidate:
    """The state dict or whole module that is meant.

    Args:
        at: its address, where the caller says it.

    Raises:
        NoSuchTensor: there is none at `at`.
        Undecided: there are several, and nothing decides between them.
        Refused: there is none.
    """
    if at is not None:
        return at_address(checkpoint, at)
    rows = meant(checkpoint)
    if not rows:
        raise Refused("no state dict and no module was found in it", path=checkpoint.path, hint=_instead(checkpoint))
    if len(rows) > 1:
        raise undecided(checkpoint, rows)
    return rows[0]


def _instead(checkpoint: Checkpoint) -> str:
    """What helps with a file that holds no state dict."""
    parts = pickled(checkpoint)
    if parts is not None and any(named_arrays(parts.graph.root)):
        made = command("sanitize", checkpoint.path, "OUT")
        return f"its weights are NumPy arrays: `{made}` makes tensors of them; take the state dict from that"
    return "`ckptfix inspect` shows what it holds"


def mapping(checkpoint: Checkpoint, at: str | None = None) -> Candidate:
    """The state dict that is meant, for verbs that work on mappings alone.

    Raises:
        Refused: it is a whole module; or as `choose`.
    """
    row = choose(checkpoint, at)
    if row.module is not None:
        raise whole_module(checkpoint, row.at)
    return row


def meant(checkpoint: Checkpoint, rows: Sequence[Candidate] | None = None) -> list[Candidate]:
    """The candidates between which nothing decides: one, if the answer is known.

    Args:
        rows: the candidates to choose among; by default all that the file holds.
    """
    found = narrowed(candidates(checkpoint) if rows is None else rows)
    if len(found) < 2:
        return found
    first: dict[object, Candidate] = {}
    for row in sorted(found, key=lambda row: row.module is not None):
        first.setdefault(_tensors(checkpoint, row), row)
    kept = {id(row) for row in first.values()}
    return [row for row in found if id(row) in kept]


def narrowed(rows: Sequence[Candidate]) -> list[Candidate]:
    """As `meant`, by addresses and names alone."""
    if len(rows) < 2:
        return list(rows)
    standing = {row.at: _standing(row) for row in rows}
    best = min(standing.values())
    return [row for row in rows if standing[row.at] == best]


def _standing(row: Candidate) -> tuple[int, int]:
    parts = row.at.split("/") if row.at else []
    if any(part in ASIDE for part in parts):
        return _ASIDE, 0
    if averages.is_average(row.at, row.names) or any(part in COPIES for part in parts):
        return _COPY, 0
    if all(part in NAMES or part in AROUND for part in parts) and (not parts or parts[-1] in NAMES):
        return _NAMED, len(parts)
    return _OTHER, 0


def _tensors(checkpoint: Checkpoint, row: Candidate) -> object:
    """Equal for candidates made of the same tensors of the file."""
    try:
        entries = state_dict_of(checkpoint, row)
        return frozenset(view(entry) for entry in entries) or row.at
    except CkptfixError:
        return row.at


def models(checkpoint: Checkpoint) -> list[Candidate]:
    """Every candidate that is a model or a copy of one, those that are meant first.

    What is set aside is among them only where there is nothing else.
    """
    return list(checkpoint.once(_models))


def _models(checkpoint: Checkpoint) -> list[Candidate]:
    rows = candidates(checkpoint)
    found = [row for row in rows if _standing(row)[0] != _ASIDE] or rows
    first = {row.at for row in meant(checkpoint, found)}
    return sorted(found, key=lambda row: row.at not in first)


def states(checkpoint: Checkpoint) -> list[StateDict]:
    """The mappings among `models`, for verbs that do all of them."""
    by_at = {state.at: state for state in checkpoint.state_dicts}
    return [by_at[row.at] for row in models(checkpoint) if row.module is None]


def undecided(checkpoint: Checkpoint, rows: Sequence[Candidate], *, fit: bool = False) -> Undecided:
    """The error that asks for one of `rows`, which the file holds, or which fit a model equally well."""
    addresses = ", ".join(address.shown(row.at, to_type=True) for row in rows)
    several = f"{len(rows)} state dicts"
    message = f"{several} fit equally well: {addresses}" if fit else f"it holds {several}: {addresses}"
    modules = [row.at for row in rows if row.module is not None]
    if modules and len(modules) < len(rows):
        message += f"; {', '.join(modules)} {'is a whole pickled module' if len(modules) == 1 else 'are whole modules'}"
    ats = tuple(row.at for row in rows)
    return Undecided(message, choices=ats, choice={"at": ats[0]}, path=checkpoint.path)


MISREAD = LOST | {"bad-tensor", "unknown-dtype", "too-deep", "duplicate-record", "duplicate-key"}
"""What is not as its writer meant it, and no length and no checksum shows it."""

BROKEN = MISREAD | {"bad-crc", "truncated"}
"""Findings of tensors that cannot be read as they were written."""


def refuse_damaged(
    checkpoint: Checkpoint,
    ids: Collection[str] = BROKEN,
    below: str = "",
    left_out: Collection[str] = (),
    *,
    listed: bool = True,
) -> None:
    """Tensors that were listed as broken would be missing from the output, or stand there as something else.

    Args:
        ids: what is looked for.
        below: an address; findings about tensors elsewhere do not count.
        left_out: names and addresses that the output is not to have; neither do those about them.
        listed: tensors are listed first, which makes the findings about them. A verb that keeps a tensor that it
            cannot read as it is, and names it, looks at the container alone.

    Raises:
        WouldLoseData: a finding says that a tensor cannot be read as its writer meant it.
    """
    if listed:
        _ = checkpoint.entries
    broken = [row for row in checkpoint.findings if row.id in ids and not row.where.startswith("__metadata__/")]
    if left_out:
        broken = [row for row in broken if not address.is_inside_any(row.where, left_out)]
    if below:
        elsewhere = {entry.name for entry in checkpoint.entries if not address.is_inside(entry.name, below)}
        broken = [row for row in broken if row.where not in elsewhere]
    if broken:
        message = f"{broken[0].message} ({len(broken)} such)" if len(broken) > 1 else broken[0].message
        where, offset = broken[0].where or None, broken[0].offset
        hint = truncated_hint(checkpoint.path) if broken[0].id == "truncated" else None
        raise WouldLoseData(message, path=checkpoint.path, where=where, offset=offset, hint=hint)


def chosen_sites(checkpoint: Checkpoint, at: str | None, *, weights_only: bool = False) -> list[NameSite]:
    """The state dicts to work on: the one at `at`, or all, or those that look like a model's.

    Raises:
        NoSuchTensor: there is none at `at`.
        Refused: a whole module is there.
    """
    fixed = {state.at for state in checkpoint.state_dicts if state.payload}
    sites = [site for site in checkpoint.sites if site.kind == "state_dict" and site.at not in fixed]
    if at is not None:
        row = at_address(checkpoint, at)
        if row.module is not None:
            raise whole_module(checkpoint, row.at)
        if row.at in fixed:
            hint = f"`{command('extract', checkpoint.path, 'OUT', at=row.at)}` takes its tensors"
            message = "only the class of the object around it knows what its keys mean, so they are not edited"
            raise Refused(message, path=checkpoint.path, where=row.at, hint=hint)
        return [site for site in sites if site.at == row.at]
    inside = module_of(checkpoint)
    sites = [site for site in sites if site.at not in inside]
    if weights_only:
        weights = {state.at for state in states(checkpoint)}
        return [site for site in sites if site.at in weights]
    return sites


def refuse_module(checkpoint: Checkpoint) -> None:
    """Nothing was found to work on: is it that what the file holds is a whole module?

    Raises:
        Refused: it is one.
    """
    if not module_of(checkpoint):
        return
    module = next((row for row in meant(checkpoint) if row.module is not None), None)
    if module is not None:
        raise whole_module(checkpoint, module.at)
