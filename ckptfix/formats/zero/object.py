"""The assembly of the object of a save from its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from ckptfix.checkpoint import Checkpoint, FileVersion
from ckptfix.dataclass import dataclass
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats.folders.assembly import Assembly, mapping, ordered
from ckptfix.formats.folders.nodes import storage_key
from ckptfix.formats.torch.tensors import is_tensor
from ckptfix.formats.zero.joined_tensors import Joiner
from ckptfix.formats.zero.moments import OptimizerMoments
from ckptfix.formats.zero.partitions import Shape
from ckptfix.formats.zero.states import Model
from ckptfix.pickles import Dict
from ckptfix.pickles.graph import Node, pairs

NAME = "zero"

MODULE, COPY, OPTIMIZER = "module", "module_16bit", "optimizer"
"""Addresses of the weights, of the weights in the dtype that the model computed with, and of the optimizer state."""

OWN = frozenset({
    *("buffer_names", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments"),
    *(MODULE, OPTIMIZER),
})  # fmt: skip
"""Fields of the model states that describe the partition."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the whole model: `number` is its number in the joiner."""

    dtype: str
    shape: Shape
    number: int


@dataclass(slots=True)
class ZeroCheckpoint:
    """A save that was read, before its object is assembled.

    Attributes:
        model: the model states that supply names, buffers and settings.
        parameters: name -> the joined tensor, for the parameters that `model` does not hold whole.
        masters: the fp32 weights are among `parameters`.
        moments: the optimizer state; None if it is unknown, or is in `model` in the layout of torch.optim.
    """

    model: Model
    joiner: Joiner
    stage: int | None = None
    ranks: int | None = None
    masters: bool = False
    parameters: dict[str, Parameter] = field(default_factory=dict)
    moments: OptimizerMoments | None = None
    files: list[FileVersion] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def assembled(
    path: str, whole: ZeroCheckpoint, files: tuple[FileVersion, ...], traits: Mapping[str, Any]
) -> Checkpoint:
    """Return the checkpoint of a save."""
    model = whole.model
    assembly = Assembly()
    findings = list(whole.findings)
    top = model.file.top
    keeps = [name for name in top if name not in OWN or (name == OPTIMIZER and whole.moments is None)]
    rest = mapping({name: top[name] for name in keeps if top[name] is not None or name != OPTIMIZER})
    own = {name: node for name, node in model.module if name not in whole.parameters}
    copy = _has_copy(whole)
    adopted = _adopted(assembly, model, [
        mapping(own), mapping(model.fragments), top[MODULE] if copy else None, rest, getattr(top[MODULE], "state", None)
    ])  # fmt: skip
    plain, fragments, module_16bit, others, state = adopted
    plain_rows, fragment_rows = dict(pairs(plain) or ()), dict(pairs(fragments) or ())
    made: dict[str, Node] = {}
    keys: dict[str, str] = {}

    def joined(name: str, base: str) -> Node:
        parameter = whole.parameters[base]
        if base not in keys:
            keys[base] = assembly.storage(whole.joiner.place(parameter.number))
        return assembly.tensor(keys[base], parameter.dtype, parameter.shape)

    ties = _ties(whole)
    for name, node in model.module:
        base = ties.get(name, name)
        if base in whole.parameters:
            made[name] = joined(name, base)
        elif _is_emptied(whole, name, node):
            made[name] = plain_rows[name]
            message = "it is empty in the files of all ranks, and no other name of it is known"
            findings.append(found("missing-rank", message, where=f"{MODULE}/{name}"))
        else:
            made[name] = plain_rows[base] if base in plain_rows else plain_rows[name]
    for name in (*whole.parameters, *model.shared):
        base = model.shared.get(name, name)
        if name not in made and base in whole.parameters:
            made[name] = joined(name, base)
    for name in model.frozen:
        if name not in made and name in fragment_rows:
            made[name] = fragment_rows[name]
        elif name not in made:
            findings.append(found("missing-rank", "it is frozen, and no file holds it", where=f"{MODULE}/{name}"))
    module = ordered(made)
    module.state = state
    rows: dict[str, Node] = {MODULE: module}
    if module_16bit is not None:
        rows[COPY] = module_16bit
    if whole.moments is not None:
        rows[OPTIMIZER] = whole.moments.node(assembly, whole.joiner)
    rows |= {name: value for name, value in pairs(others) or () if isinstance(name, str)}
    return assembly.checkpoint(mapping(rows), path, format=NAME, files=files, traits=traits, findings=findings)


def _adopted(assembly: Assembly, model: Model, parts: list[Node]) -> list[Node]:
    """Return copies of nodes of the model states that keep their sharing; their tensors are on the CPU."""
    found = assembly.adopt(parts, model.file.storages, "model.", location="cpu")
    assert isinstance(found, list)
    return found


def model_dtype(whole: ZeroCheckpoint) -> str | None:
    """Return the dtype that the model computed with, if it differs from that of the joined weights."""
    for name, node in whole.model.module:
        parameter = whole.parameters.get(name)
        if parameter is not None and name not in whole.model.frozen and is_tensor(node):
            dtype = whole.model.file.tensor(node, f"{MODULE}/{name}").dtype
            if dtype != parameter.dtype:
                return dtype
    return None


def _has_copy(whole: ZeroCheckpoint) -> bool:
    """Return whether the model states hold the parameters a second time, in a different dtype."""
    if not whole.masters or model_dtype(whole) is None:
        return False
    rows = dict(whole.model.module)
    whole_there = (
        whole.model.file.tensor(rows[name], f"{MODULE}/{name}").shape == parameter.shape
        for name, parameter in whole.parameters.items()
        if name in rows and name not in whole.model.frozen
    )
    return all(whole_there)


def _ties(whole: ZeroCheckpoint) -> dict[str, str]:
    """Return name -> the parameter that it duplicates, as the model states list it or a shared storage shows."""
    ties = {name: base for name, base in whole.model.shared.items() if name not in whole.parameters}
    by_storage = {
        storage_key(node): name for name, node in reversed(whole.model.module) if name in whole.parameters
    }
    for name, node in whole.model.module:
        key = storage_key(node)
        if name not in whole.parameters and name not in ties and key is not None and _is_emptied(whole, name, node):
            base = by_storage.get(key)
            if base is not None:
                ties[name] = base
    return ties


def _is_emptied(whole: ZeroCheckpoint, name: str, node: Node) -> bool:
    """Return whether stage 3 left nothing of a parameter in the module."""
    if name in whole.model.buffers or not whole.masters or not is_tensor(node):
        return False
    return whole.stage == 3 and whole.model.file.tensor(node, f"{MODULE}/{name}").shape == (0,)


def root_rows(root: Node) -> dict[str, Node]:
    """Return the rows of the object that `assembled` built."""
    assert isinstance(root, Dict)
    return {str(name): value for name, value in root.items}
