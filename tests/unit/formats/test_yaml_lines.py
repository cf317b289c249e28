"""Settings in YAML files beside a checkpoint, a line for each."""

from __future__ import annotations

from ckptfix.formats.yaml_lines import plain_values


def test_values_at_the_top() -> None:
    text = "\n".join([
        "tensor_model_parallel_size: 2", "lora_alpha: 16.5  # doubled", "rate: 1e-4", "megatron_legacy: False",
        "tied: ~", "activation: 'fast-swiglu'", "name: a: b", "optim:", "  lr: 3", "- x: 4",
        "run: !!python/object:x {}",
    ])  # fmt: skip
    assert plain_values(text) == {
        "tensor_model_parallel_size": 2, "lora_alpha": 16.5, "rate": 1e-4, "megatron_legacy": False, "tied": None,
        "activation": "fast-swiglu", "name": "a: b", "optim": "", "run": "!!python/object:x {}",
    }  # fmt: skip


def test_numbers_that_are_none() -> None:
    assert plain_values("a: 1e9999\nb: " + "9" * 100) == {"a": "1e9999", "b": "9" * 100}
