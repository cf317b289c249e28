"""Layers that are stacked in one tensor each, as Megatron-LM's ``torch_dist`` folders have them, and what divides them.

::

    decoder.layers.mlp.linear_fc1.weight     [layers, rows, columns]

Source: megatron/core/transformer/transformer_block.py, ``sharded_state_dict``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from ckptfix.commands import command, word
from ckptfix.findings.row import Finding
from ckptfix.findings.steps import step
from ckptfix.findings.table import found
from ckptfix.names.kinds import optimizer_names

_STACKED = re.compile(r"(?:.*\.)?layers\.(?!\d+\.)[^.]+\..+")
_ECOSYSTEM = "megatron-dist"
"""The ecosystem of such keys in the tables of names."""


def stacked_layers(path: str, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Finding]:
    """Yield a finding if tensors of these names and shapes hold all layers, with the command that divides them.

    Args:
        path: the folder that has them.
    """
    rows = {name: shape for name, shape in shapes.items() if shape and _STACKED.fullmatch(name)}
    if len(rows) < 2:
        return
    gone = optimizer_names(shapes)
    rows = {name: shape for name, shape in rows.items() if name not in gone and not name.endswith("_extra_state")}
    counts = Counter(shape[0] for shape in rows.values())
    if not counts:
        return
    layers, count = counts.most_common(1)[0]
    if count < 2:
        return
    name = max((name for name, shape in rows.items() if shape[0] == layers), key=lambda name: len(rows[name]))
    way = _names_for([key for key in shapes if key not in gone])
    fronts = dict.fromkeys(name.partition("layers.")[0] for name in rows)
    rules = [f"{front}layers.{{*}} -> {front}layers.{{n}}.{{*}} | unstack" for front in fronts]
    line = command("rename" if way is None else "convert", path, "OUT.safetensors", names=way)
    line += "".join(f" --line {word(rule)}" for rule in rules if way is None)
    message = f"its shape is {list(rows[name])}, and {count} tensors hold all {layers} layers like it"
    message += f": `{line}` gives each its own"
    fix = None if way is None else step("convert", names=way)
    yield found("stacked-layers", message, where=name, fix=fix)


def _names_for(keys: list[str]) -> str | None:
    """Return the conversion that gives each layer its own tensors, if a table of names has lines for these keys."""
    from ckptfix.names import tables

    likely = (row for row in tables.shipped() if _ECOSYSTEM in row.names and row.may_match(keys[0]))
    ways = (way for row in likely for way in row.ways if way.old == _ECOSYSTEM)
    return next((f"{way.old}:{way.new}" for way in ways if not way.rules().unmatched(keys)[0]), None)
