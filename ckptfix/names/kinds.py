"""Kinds of state: what a dict in a checkpoint holds, judged by its own key and by the keys in it.

This is the one answer for the choice of the model's state dict, `slim`, `doctor`, `inspect` and the loaders. A dict's
own key is the name that its writer chose (`optimizer`, `g_ema`, `train_state`). The keys in it show what it is under
any name: `state` and `param_groups` belong to an optimizer. So do ``state.fc.weight.exp_avg`` and
``optimizer.state.exp_avg.fc.weight``, in which the levels of an optimizer's state were flattened into one key.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import Literal

from ckptfix.names import wrappers

Kind = Literal[
    "optimizer",
    "average",
    "scheduler",
    "scaler",
    "rng",
    "data loader",
    "replay buffer",
    "training state",
    "callbacks",
    "statistics",
    "loss",
    "settings",
]
"""The kind of a dict that is not a model's state dict."""

ASIDE: dict[str, tuple[Kind, str]] = {
    "hyper_parameters": ("settings", "Lightning: arguments of the module (save_hyperparameters), networks among them"),
    "datamodule_hyper_parameters": ("settings", "Lightning: arguments of the data module"),
    "hparams": ("settings", "trainers that save their arguments"),
    "args": ("settings", "trainers that save their arguments"),
    "config": ("settings", "trainers that save their arguments"),
    "cfg": ("settings", "trainers that save their arguments"),
    "serialized_constants.pt": ("settings", "torch.export.save before torch 2.8: tensors that are in no state dict"),
    "serialized_example_inputs.pt": ("settings", "torch.export.save before torch 2.8: arguments of the program"),
    "callbacks": ("callbacks", "Lightning: state of its callbacks"),
    "loops": ("callbacks", "Lightning: counters"),
    "averaging_state": ("callbacks", "Lightning WeightAveraging: n_averaged"),
    "train_state": ("training state", "torchtitan: step, tokens, losses"),
    "trainer_state": ("training state", "trainers that save their counters"),
    "training_state": ("training state", "trainers that save their counters"),
    "loop_state": ("training state", "trainers that save their counters"),
    "metrics": ("training state", "losses and scores by step"),
    "losses": ("training state", "losses by step"),
    "history": ("training state", "losses and scores by step"),
    "loss": ("loss", "a loss with its own weights"),
    "loss_fn": ("loss", "a loss with its own weights"),
    "loss_func": ("loss", "fastai Learner.export"),
    "criterion": ("loss", "a loss with its own weights"),
    "loss_state_dict": ("loss", "a loss with its own weights"),
    "criterion_state_dict": ("loss", "a loss with its own weights"),
    "opt": ("optimizer", "fastai save_model: the optimizer's state, one row per parameter"),
    "opt_state": ("optimizer", "trainers that use this name, after optax"),
    "opt_state_dict": ("optimizer", "trainers that call it opt"),
    "optim_state": ("optimizer", "trainers that call it optim"),
    "scaler": ("scaler", "torch.amp.GradScaler"),
    "grad_scaler": ("scaler", "torch.amp.GradScaler"),
    "rng": ("rng", "states of random generators"),
    "rng_state": ("rng", "states of random generators"),
    "random_state": ("rng", "states of random generators"),
    "random_states": ("rng", "states of random generators"),
    "random": ("rng", "states of random generators"),
    "replay_buffer": ("replay buffer", "Stable-Baselines3 and other reinforcement learning"),
    "replay_memory": ("replay buffer", "reinforcement learning"),
    "rollout_buffer": ("replay buffer", "Stable-Baselines3"),
    "normalizer": ("statistics", "mean and deviation of inputs"),
    "statistics": ("statistics", "mean and deviation of inputs"),
    "stats": ("statistics", "mean and deviation of inputs, losses"),
    "running_stats": ("statistics", "mean and deviation of inputs"),
    "norm_stats": ("statistics", "mean and deviation of inputs"),
    "dataset_stats": ("statistics", "LeRobot, ACT: mean and deviation of inputs"),
    "obs_rms": ("statistics", "reinforcement learning: mean and deviation of observations"),
    "ret_rms": ("statistics", "reinforcement learning: mean and deviation of returns"),
}
"""Key of a dict that trainers save beside a model, and that may look like one -> its kind, and who writes it."""

WORDS: dict[str, Kind] = {
    "optimizer": "optimizer",
    "optimizers": "optimizer",
    "optim": "optimizer",
    "optims": "optimizer",
    "scheduler": "scheduler",
    "schedulers": "scheduler",
    "sched": "scheduler",
    "rng": "rng",
    "dataloader": "data loader",
    "dataloaders": "data loader",
    "datasampler": "data loader",
    "gradscaler": "scaler",
    "normalizer": "statistics",
    "normalizers": "statistics",
}
"""Word in a key, as in ``optimizer_G`` or ``critic_optim_state_dict`` -> kind of the dict."""

AVERAGES: dict[str, str] = {
    "ema": "Ultralytics YOLOv5 train.py (a whole module); trainers with ema-pytorch (EMA.state_dict)",
    "ema_model": "trainers that save the model as model",
    "model_ema": "torchvision references/classification/train.py (AveragedModel.state_dict)",
    "model_ema_state_dict": "trainers that save the model as model_state_dict",
    "ema_model_state_dict": "trainers that save the model as model_state_dict",
    "ema_state_dict": "trainers that save the model as state_dict; not MMEngine, see `extract.averaged`",
    "state_dict_ema": "timm utils/checkpoint_saver.py",
    "ema_state": "trainers that save the model as state",
    "ema_weights": "trainers that save the model as weights",
    "averaged_model": "torch.optim.swa_utils.AveragedModel under the name of its documentation",
    "swa_model": "torch.optim.swa_utils.AveragedModel under the name of its documentation",
    "swa_state_dict": "trainers that save the model as state_dict",
    "shadow": "tutorials' class EMA (a dict of names)",
    "params_ema": "BasicSR models/base_model.py save_network, with params beside it",
    "g_ema": "rosinality/stylegan2-pytorch train.py, with g and d beside it",
    "G_ema": "NVlabs/stylegan2-ada-pytorch training_loop.py, with G and D beside it",
    "generator_ema": "trainers of GANs that save generator and discriminator",
}
"""Key of averaged weights in an address -> who writes it."""

RECOGNISED: frozenset[Kind] = frozenset(
    ("optimizer", "average", "scheduler", "scaler", "rng", "data loader", "replay buffer")
)
"""Kinds that may be larger than a model and still are certainly not the model."""

SLOTS = frozenset((
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"),
    *("sum", "prev", "step_size", "mu_product", "eta", "mu", "ax", "exp_avg_sq_row", "exp_avg_sq_col", "row_var"),
    *("col_var", "variance", "fp32_param", "param", "master_param", "exp_avg_diff", "neg_pre_grad", "z", "state1"),
    *("state2", "absmax1", "absmax2", "qmap1", "qmap2", "prev_flat_grad", "d", "lr"),
))  # fmt: skip
"""State that torch.optim, Megatron and common optimizers keep for a parameter."""

_SURE = SLOTS - {"sum", "prev", "param", "z", "d", "lr", "mu", "ax", "eta", "variance", "step_size"}
"""The names in `SLOTS` that no module uses for a parameter."""

OPTIMIZER = frozenset(("state", "param_groups"))
"""Keys of the dict that ``Optimizer.state_dict()`` returns."""

_STATE, _GROUPS = "state.", "param_groups."
_LEVELS = (_STATE, _GROUPS, "distributed.")
_FRONT = re.compile(r"(?:chained_\d+\.)?(?:\w*optim(?:izer)?s?\w*\.)(?:\d+\.)?", re.ASCII | re.IGNORECASE)
"""Levels before an optimizer's state in a flattened key: ``optimizer.``, ``chained_0.optimizer.``, ``optim.0.``."""

PATH_OF_PARAMETER = re.compile(r"(\w+\.)+(?!(?:ckpt|pt|pth|bin)$)\w+", re.ASCII)
"""Pattern of a dotted name that is not a file name: Lightning keeps a score per file name (``best_k_models``)."""

LEAVES = frozenset(("weight", "bias", "weight_g", "weight_v", "running_mean", "running_var"))
"""Names of parameters and buffers that even a single layer has."""

EXTRA_STATE = "_extra_state"
"""Last component of the key for a module's data that is not a tensor (torch.nn.Module.get_extra_state)."""

_PROGRESS = frozenset((
    *("epoch", "epochs", "step", "steps", "iter", "iters", "iteration", "iterations", "updates", "samples", "episode"),
    *("best", "loss", "acc", "acc1", "top1", "accuracy", "score", "metric", "fitness", "reward", "auc", "f1", "bleu"),
    *("lr", "arch", "globalstep", "it"),
))  # fmt: skip
"""Words of the keys under which trainers save counters and scores."""

_NO_PROGRESS = frozenset(("size", "every", "max", "min", "num", "per", "warmup", "milestones", "scale"))
"""Words of the keys of settings: ``step_size``, ``max_epochs``."""

_CONTENTS: tuple[tuple[frozenset[str], Kind], ...] = (
    (frozenset(("last_epoch", "_step_count")), "scheduler"),
    (frozenset(("last_epoch", "base_lrs")), "scheduler"),
    (frozenset(("scale", "growth_factor", "backoff_factor")), "scaler"),
    (frozenset(("torch_rng_state",)), "rng"),
    (frozenset(("python", "numpy", "cpu")), "rng"),
    (frozenset(("python", "numpy", "torch")), "rng"),
    (frozenset(("actions", "rewards", "observations")), "replay buffer"),
    (frozenset(("actions", "rewards", "states")), "replay buffer"),
    (frozenset(("actions", "rewards", "dones")), "replay buffer"),
    (frozenset(("action", "reward", "done")), "replay buffer"),
)
"""Keys that a dict has -> its kind."""

_GENERATORS = ((5056,), (16,))
"""Shapes of the byte tensors in which torch saves the state of a generator: CPU, GPU."""

_STATISTICS = frozenset(("mean", "std", "var", "count", "min", "max", "running_mean", "running_var", "m2"))
"""Keys of a dict of statistics, which has two or more of them and nothing else."""


def words(key: str) -> list[str]:
    """Return the words of a key: ``lr_schedulerState1`` has lr, scheduler, state, 1."""
    apart = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", key).lower()
    return re.findall(r"[a-z]+|\d+", apart)


def of_key(key: str) -> Kind | None:
    """Return the kind that a key suggests; None for a model or an unknown key."""
    if key in ASIDE:
        return ASIDE[key][0]
    if key in AVERAGES:
        return "average"
    return next((WORDS[word] for word in words(key) if word in WORDS), None)


def of_names(names: Collection[str]) -> Kind | None:
    """Return the kind of a dict with these keys, as far as they show it; None for a model or unknown keys."""
    return _of_names(tuple(names))


@lru_cache(maxsize=16)  # a file of thousands of dicts has few different ones
def _of_names(names: tuple[str, ...]) -> Kind | None:
    here = set(names)
    if is_optimizer(names):
        return "optimizer"
    if "n_averaged" in here or wrappers.is_average(list(names)):
        return "average"
    if len(here & _STATISTICS) > 1 and here <= _STATISTICS:
        return "statistics"
    if are_parameters(list(names)):
        return None
    return next((kind for marks, kind in _CONTENTS if marks <= here), None)


def is_generator(dtype: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is the state of a random generator, wherever it is stored."""
    return dtype == "uint8" and shape in _GENERATORS


def of(at: str, names: Collection[str]) -> Kind | None:
    """Return the kind of the dict at the address `at` with these keys. They take precedence over the keys above it."""
    found = of_names(names)
    if found is not None and found != "average":
        return found
    above = [kind for kind in map(of_key, at.split("/") if at else ()) if kind is not None]
    aside = [kind for kind in above if kind != "average"]
    return (aside or above or [found])[0]


def is_recognised(at: str, names: Collection[str]) -> bool:
    """Return whether the dict at the address `at` with these keys is certainly not a model, however large it is.

    A key alone does not prove that for layer weights: ``opt`` may be an optimizer or a language model.
    """
    kind = of(at, names)
    if kind not in RECOGNISED or kind == "average" or of_names(names) == kind:
        return kind in RECOGNISED
    return not any("." in name and name.rpartition(".")[2] in LEAVES for name in names)


def is_optimizer(names: Collection[str]) -> bool:
    """Return whether these are the keys of an optimizer's state, nested or flattened."""
    return OPTIMIZER <= set(names) or is_flat_optimizer(names)


def is_flat_optimizer(names: Collection[str]) -> bool:
    """Return whether these are the keys of a flattened optimizer's state: ``state.fc.weight.exp_avg``.

    torch.distributed.checkpoint.state_dict writes this with flatten_optimizer_state_dict=True. Megatron puts
    ``optimizer.`` in front, and the parameter last.
    """
    first = next(iter(names), "")
    if not (first.startswith((_STATE, _GROUPS)) or _front(first)):
        return False
    if all(name.startswith((_STATE, _GROUPS)) for name in names) and any(name.startswith(_GROUPS) for name in names):
        return not any(map(_is_modules, names))
    return optimizer_names(names) == set(names)


def optimizer_names(names: Iterable[str]) -> frozenset[str]:
    """Return those of these keys that are an optimizer's; they may appear beside a model's.

    One key that only an optimizer has (`SLOTS`) proves it for all keys with the same front. If the front is only
    ``state.``, it proves it for the keys of the same parameter. A ``weight`` or ``bias`` among them shows that a model
    has a module called ``state`` or ``optimizer``.
    """
    fronted: dict[str, list[str]] = {}
    plain: dict[str, list[str]] = {}
    sure: set[str] = set()
    modules: set[str] = set()
    for name in names:
        if "state." not in name and "param_groups" not in name and "optim" not in name:
            continue
        front = _front(name)
        parts = name[len(front) :].split(".")
        if front:
            fronted.setdefault(front, []).append(name)
            if f"{parts[0]}." in _LEVELS and len(parts) > 2 and SLOTS & {parts[1], parts[-1]}:
                sure.add(front)
            if _is_modules(name[len(front) :]):
                modules.add(front)
        elif name.startswith((_STATE, _GROUPS)):
            parameter = ".".join(parts[1:-1])
            plain.setdefault(parameter, []).append(name)
            if parameter and parts[0] == "state" and parts[-1] in _SURE:
                sure.add(parameter)
            if _is_modules(name):
                modules.update(".".join(parts[1:length]) for length in range(2, len(parts)))
    found = [name for front, rows in fronted.items() if front in sure - modules for name in rows]
    found += [name for parameter, rows in plain.items() if parameter in sure - modules for name in rows]
    return frozenset(found)


def flat_levels(name: str) -> tuple[str, str]:
    """Split a key of a flattened optimizer: the levels before a parameter, such as ``optimizer.state.``, and the rest.

    Both are empty for a key without such a level.
    """
    front = _front(name)
    level = next((level for level in (_STATE, _GROUPS) if name.startswith(level, len(front))), "")
    return (front + level, name[len(front + level) :]) if level else ("", "")


def _front(name: str) -> str:
    """Return the levels before an optimizer's state; empty if a word only starts like one: ``optimal_transport``."""
    front = _FRONT.match(name)
    return front.group() if front and any(WORDS.get(word) == "optimizer" for word in words(front.group())) else ""


def _is_modules(name: str) -> bool:
    """Return whether a key is that of a layer's tensor, with no optimizer level in it: ``state.proj.weight``."""
    *above, leaf = name.split(".")
    return leaf in LEAVES and not {*SLOTS, "step"}.intersection(above)


def are_parameters(names: Sequence[str], *, nested: bool = False) -> bool:
    """Return whether tensors with these keys look like a module's: dotted paths, or keys that a single layer has.

    Args:
        nested: the dict also holds other dicts; then one key such as ``weight`` may be a loss's weights.
    """
    own = list(map(wrappers.unwrapped, names))
    if any(PATH_OF_PARAMETER.fullmatch(name) for name in own):
        return True
    return len(LEAVES.intersection(own)) > (1 if nested else 0)


def is_progress(key: str) -> bool:
    """Return whether a key is that of a trainer's counter or score: ``epoch``, ``best_loss``."""
    found = set(re.findall(r"[a-z]+\d*", re.sub(r"([a-z])([A-Z])", r"\1_\2", key).lower()))
    return bool(found & _PROGRESS) and not found & _NO_PROGRESS and not key.startswith("_") and "." not in key
