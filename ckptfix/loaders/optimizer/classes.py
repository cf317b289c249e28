"""Telling torch's optimizers apart, by the options of their groups and the state of their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ckptfix.errors import Refused, WrongType
from ckptfix.loaders.model.report import named

if TYPE_CHECKING:
    import torch

SCHEDULED = frozenset(("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"))
"""Options that learning-rate schedulers add to groups (torch/optim/lr_scheduler.py)."""

MACHINE = frozenset(("foreach", "fused", "capturable", "differentiable"))
"""Options that say how to compute on this machine, not how the model was trained."""

OWN = frozenset((
    *("betas", "amsgrad", "momentum_decay", "decoupled_weight_decay"),  # Adam and its kin
    *("momentum", "dampening", "nesterov"),  # SGD
    *("alpha", "centered", "rho", "lr_decay", "initial_accumulator_value"),  # RMSprop, Adadelta, Adagrad
    *("lambd", "t0", "etas", "step_sizes", "beta2_decay", "d", "ns_coefficients", "ns_steps", "adjust_lr_fn"),
    *("max_iter", "max_eval", "tolerance_grad", "tolerance_change", "history_size", "line_search_fn"),  # LBFGS
))  # fmt: skip
"""Options of only some classes of torch.optim: if just one side has such an option, the classes differ."""

STATE: Mapping[str, tuple[str, ...]] = {
    "Adam": ("exp_avg", "exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq"),  # a kind of Adam since torch 2.7
    "NAdam": ("exp_avg", "exp_avg_sq", "mu_product"),
    "RAdam": ("exp_avg", "exp_avg_sq"),
    "SparseAdam": ("exp_avg", "exp_avg_sq"),
    "Adamax": ("exp_avg", "exp_inf"),
    "Adagrad": ("sum",),
    "Adadelta": ("square_avg", "acc_delta"),
    "RMSprop": ("square_avg",),
    "Rprop": ("prev", "step_size"),
    "ASGD": ("eta", "mu", "ax"),
    "LBFGS": ("func_evals", "n_iter"),
}
"""Class of torch.optim -> the state that it writes for every parameter that had a step (torch/optim/*.py)."""

EIGHT_BIT = frozenset(("state1", "qmap1"))
"""Keys of the state of bitsandbytes' 8-bit optimizers (bitsandbytes/optim/optimizer.py): codes and their code book."""

PARAMETER_SHAPED = frozenset((
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum"),
    *("exp_inf", "prev", "step_size", "ax", "mu_product_buffer"),
))  # fmt: skip
"""State that torch.optim keeps in the shape of its parameter (torch/optim/*.py). Other state may have any shape."""

FLAT = frozenset(("old_dirs", "prev_flat_grad"))
"""Keys of state that covers all parameters in one flat tensor, in their order (torch/optim/lbfgs.py)."""


def refuse_not_an_optimizer(optimizer: object) -> None:
    """Refuse an object that is not an optimizer. Any class counts that has groups, state and a way to load them.

    Raises:
        WrongType: `optimizer` is not an optimizer.
    """
    if not all(hasattr(optimizer, name) for name in ("param_groups", "state", "load_state_dict")):
        hint = "pass the optimizer itself; load_checkpoint(...) returns the state of a scheduler"
        raise WrongType(f"this is not an optimizer but a {type(optimizer).__name__}", hint=hint)


def refuse_other_options(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, object], own: Mapping[str, object]
) -> None:
    """Compare the options of a group of the file, `saved`, with the optimizer's `own`.

    Raises:
        Refused: they belong to a different optimizer.
    """
    strange, lacking = set(saved) - set(own) - SCHEDULED, set(own) - set(saved) - SCHEDULED
    hint = f"this one is {type(optimizer).__name__}"
    torchs = type(optimizer).__module__.startswith("torch.optim")
    if strange and (lacking or (torchs and strange & OWN)):
        reasons = [f"it has {named(sorted(strange))}", *([f"and not {named(sorted(lacking))}"] if lacking else [])]
        raise Refused(f"a different optimizer saved it: {', '.join(reasons)}", hint=hint)
    key = "decoupled_weight_decay"
    if key in saved and key in own and bool(saved[key]) != bool(own[key]):
        kind = "AdamW" if saved[key] else "Adam"
        message = f"a different optimizer saved it: {kind}, because {key} is {saved[key]!r} there and {own[key]!r} here"
        raise Refused(message, hint=hint)


def refuse_other_state(optimizer: torch.optim.Optimizer, states: Mapping[str, Mapping[str, object]]) -> None:
    """Compare the state of parameters, by name, with what the optimizer's class writes.

    Raises:
        Refused: it belongs to a different optimizer.
    """
    kinds = [kind for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim")]
    needed = next((STATE[kind.__name__] for kind in kinds if kind.__name__ in STATE), ())
    for name, state in states.items():
        lacking = [key for key in needed if key not in state]
        if state and lacking and EIGHT_BIT <= state.keys():
            codes = f"the state of {name} has 8-bit codes (state1, qmap1), and not {named(lacking)}"
            hint = f"load it into the optimizer of bitsandbytes; this one is torch's {kinds[0].__name__}"
            raise Refused(f"bitsandbytes saved it: {codes}", hint=hint)
        if state and lacking:
            has = named(sorted(map(str, state)))
            message = f"a different optimizer saved it: the state of {name} has {has}, and not {named(lacking)}"
            raise Refused(message, hint=f"this one is {type(optimizer).__name__}")


def refuse_swapped(saved: Sequence[Mapping[str, object]], own: Sequence[Mapping[str, object]]) -> None:
    """Refuse groups without names if their options are those of the optimizer's groups in a different order.

    Args:
        saved, own: options of the groups in their order.

    Raises:
        Refused: the options agree only in a different order.
    """
    for passing in (SCHEDULED, SCHEDULED | {"lr"}):
        rows = [_comparable(group, own[0], passing) for group in saved]
        mine = [_comparable(group, saved[0], passing) for group in own]
        if rows != mine and sorted(rows) == sorted(mine):
            message = "the groups of the file have the options of these groups in a different order, and no names"
            raise Refused(message, hint="give the optimizer its groups in the order that they had when it was saved")


def _comparable(group: Mapping[str, object], other: Mapping[str, object], passing: frozenset[str]) -> str:
    """Return the options that both sides have, as text."""
    return repr(sorted((key, group[key]) for key in group if key in other and key not in passing | MACHINE))
