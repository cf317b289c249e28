"""Which names are an optimizer's, where a model has modules and parameters of the same names."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from ckptfix.names import kinds

PARAMETERS = ("fc.weight", "fc.bias", "blocks.0.attn.weight")
SLOTS = ("exp_avg", "exp_avg_sq")
MODEL = frozenset(f"backbone.{name}" for name in PARAMETERS)


def flattened(front: str) -> frozenset[str]:
    """An optimizer's state as torch.distributed.checkpoint flattens it."""
    return frozenset(f"{front}state.{name}.{slot}" for name in PARAMETERS for slot in SLOTS)


def megatron(front: str) -> frozenset[str]:
    """An optimizer's state as Megatron flattens it."""
    return frozenset(f"{front}state.{slot}.{name}" for name in PARAMETERS for slot in (*SLOTS, "fp32_param"))


@pytest.mark.parametrize("front", ["optimizer.", "optim.", "chained_0.optimizer.", "optimizer.0.", "critic_optimizer."])
@pytest.mark.parametrize("made", [flattened, megatron])
def test_a_flattened_optimizer_is_found_beside_a_model(made: Callable[[str], frozenset[str]], front: str) -> None:
    names = made(front)
    assert kinds.optimizer_names(MODEL | names) == names
    assert kinds.optimizer_names(names) == names


def test_a_flattened_optimizer_without_a_front_is_found() -> None:
    names = flattened("")
    assert kinds.optimizer_names(MODEL | names) == names


MODULES = (
    *("state", "optimizer", "optim", "param_groups"),
    *("optimizer.state", "optimal_transport.state", "state.optimizer"),
)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("parameter", sorted(kinds.SLOTS | {"step"}))
def test_a_module_of_such_a_name_keeps_its_parameters(module: str, parameter: str) -> None:
    own = frozenset((f"{module}.proj.weight", f"{module}.proj.bias", f"{module}.{parameter}"))
    assert not kinds.optimizer_names(own)
    assert not kinds.optimizer_names(MODEL | own)
    assert not kinds.is_optimizer(own)


@pytest.mark.parametrize("parameter", sorted(kinds.SLOTS))
def test_a_parameter_with_the_name_of_a_slot_beside_a_weight_is_a_modules(parameter: str) -> None:
    own = frozenset(("state.proj.weight", f"state.proj.{parameter}"))
    assert not kinds.optimizer_names(MODEL | own)


def test_modules_called_as_an_optimizers_keys_are_no_optimizer() -> None:
    names = [f"{module}.{leaf}" for module, leaf in itertools.product(("state", "param_groups"), ("weight", "bias"))]
    assert not kinds.is_optimizer(names)


@pytest.mark.parametrize("key", ["opt", "optimizer", "scheduler_net", "random_state", "scaler", "replay_buffer"])
def test_a_key_alone_does_not_show_that_weights_under_it_are_no_model(key: str) -> None:
    assert not kinds.is_recognised(key, sorted(MODEL))
    assert kinds.is_recognised(key, ("0", "1", "last"))


@pytest.mark.parametrize("key", ["ema", "g_ema", "state_dict_ema"])
def test_an_average_has_the_names_of_a_model(key: str) -> None:
    assert kinds.is_recognised(key, sorted(MODEL))
