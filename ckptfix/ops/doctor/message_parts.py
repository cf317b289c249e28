"""Messages about parts of a file: a key that a script looked up, a value of an optimizer's state, a form of a model.

They name no keys of tensors that the file and a model could be compared by.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ckptfix.checkpoint import Checkpoint
from ckptfix.findings.message_names import Listed
from ckptfix.findings.row import Finding
from ckptfix.findings.steps import Value, step
from ckptfix.findings.table import found
from ckptfix.formats import FORMATS, format_of
from ckptfix.names import bases, library_names
from ckptfix.ops import choose
from ckptfix.ops.doctor.groups import TOLD
from ckptfix.words import some

OPTIMIZERS: tuple[tuple[str, str], ...] = (
    ("exp_avg_var", "AdaBelief"), ("exp_inf", "Adamax"), ("max_exp_avg_sq", "Adam with amsgrad"),
    ("exp_avg_sq", "Adam or a relative"), ("exp_avg", "Lion"), ("momentum_buffer", "SGD with momentum"),
    ("acc_delta", "Adadelta"), ("square_avg", "RMSprop"), ("prev", "Rprop"), ("state1", "bitsandbytes"),
    ("sum", "Adagrad"),
)  # fmt: skip
"""A value of an optimizer's state, and the class that has it; the first that a file has counts (torch/optim)."""

_DIFFUSION = re.compile(
    r"(?:double_blocks|single_blocks|joint_blocks|double_layers|input_blocks|middle_block|blocks)\.\d"
)
"""Keys of diffusion models in the names of their authors, which ComfyUI detects by the prefix before them."""

MOST_PARTS = 12
"""Modules that one command leaves out."""


def scan(checkpoint: Checkpoint, names: Listed) -> list[Finding]:
    """Return the findings about parts that a message names; empty if it names none."""
    if names.names or names.modules:
        shared = _shared(checkpoint, names.missing)
        return [shared] if shared is not None and not names.unexpected else []
    return [*_parts(checkpoint, names.parts), *_states(checkpoint, names.states), *_wholes(checkpoint, names.wholes)]


def _parts(checkpoint: Checkpoint, parts: Sequence[str]) -> Iterator[Finding]:
    if not parts:
        return
    shared = _shared(checkpoint, parts)
    if shared is not None:
        yield shared
        return
    tops = _tops(checkpoint)
    lacking = [name for name in parts if name not in tops]
    if not lacking:
        message = f"the file has {some(parts)}: the message is about a different file"
        yield found("other-file", message, about=TOLD, fix="")
        return
    asked = some(lacking)
    states = [row.at for row in choose.meant(checkpoint)]
    if len(parts) == len(states) == 1 and parts[0] in (*choose.NAMES, "params_ema"):
        yield _nest(checkpoint, parts[0], states[0])
        return
    if "" in states:
        message = f"the file has no {asked} at its top: it is a state dict itself"
        advice = "load it as it is: model.load_state_dict(torch.load({source!r}, weights_only=True))"
        inside = [name for name in lacking if any(entry.key.startswith(f"{name}.") for entry in checkpoint.entries)]
        if inside:
            message += f", whose keys begin with {inside[0]}."
    else:
        message = f"the file has no {asked} at its top: it has {some(list(tops))}"
        advice = f"use the key {states[0]!r}, which has the weights" if states and "/" not in states[0] else ""
    yield found("missing-keys", message, about=TOLD, fix=advice)


def _nest(checkpoint: Checkpoint, asked: str, at: str) -> Finding:
    """Return the finding about a model that a script looks up under a key which the file does not have."""
    keys = [entry.key for entry in checkpoint.entries_at(at)]
    _, wrappers = bases.unwrapped(keys)
    options: dict[str, Value] = {"at": at} if at else {}
    fix = step("extract", nest=(f"{asked}=",), **options)
    if wrappers:  # the next thing that such a script would refuse
        fix += step("strip-module") if set(wrappers) == {"module"} else step("unwrap")
    own = f"its weights are at {at!r}" if at else "it is a state dict itself"
    message = f"the file has no {asked} at its top: {own}; the command puts them there, or let the script use "
    message += f"the key {at!r}" if at else "the loaded object as it is"
    return found("missing-keys", message, where=at, about=TOLD, fix=fix)


def _tops(checkpoint: Checkpoint) -> dict[str, None]:
    """Return the keys of the object of a file."""
    places = [*(entry.name for entry in checkpoint.entries), *(place for place, _ in checkpoint.values())]
    return dict.fromkeys(place.partition("/")[0] for place in places)


def _shared(checkpoint: Checkpoint, asked: Sequence[str]) -> Finding | None:
    """Return the finding about a file that was trained as one model, and that two models read in parts."""
    for row in library_names.SHARED_FILES:
        for state in choose.states(checkpoint):
            keys = [entry.key for entry in checkpoint.entries_at(state.at)]
            there = set(keys)
            whole = all(any(key.startswith(old) for key in keys) for old, _ in row.pairs)
            wanted = {new.rstrip(".") for _, new in row.pairs}
            under = any(all(old + name in there for name in asked) for old, _ in row.pairs)
            if not whole or not asked or not (under or set(asked) <= wanted):
                continue
            subs = tuple((f"^{old.replace('.', '[.]')}", new) for old, new in row.pairs)
            gone = [key for key in keys if not any(key.startswith(old) for old, _ in row.pairs)]
            drops = tuple(f"{front}.{{*}} | drop" for front in dict.fromkeys(key.partition(".")[0] for key in gone))
            if len(drops) > MOST_PARTS:
                continue
            options: dict[str, Value] = {"at": state.at} if state.at else {}
            if drops:
                options["lines"] = drops
            fix = step("rename", subs=subs, **options)
            if format_of(checkpoint) is not FORMATS["safetensors"]:
                fix += step("convert", to="safetensors")
            message = f"{row.about}; the file has them as {some([old.rstrip('.') for old, _ in row.pairs])}"
            return found("library-names", message, where=state.at, fix=fix, about=TOLD)
    return None


def _states(checkpoint: Checkpoint, states: Sequence[str]) -> Iterator[Finding]:
    if not states:
        return
    tensors = choose.optimizer_tensors(checkpoint)
    have = dict.fromkeys(entry.name.replace("/", ".").rpartition(".")[2] for entry in tensors)
    if not have:
        message = f"the file has no state of an optimizer, and the optimizer asks for {states[0]}"
    elif states[0] in have:
        message = f"the file has {states[0]}, but not for all parameters that the optimizer steps"
        advice = "pair the state by parameter, in Python: ckptfix.load_optimizer(optimizer, {source!r}, model=model)"
        yield found("optimizer-state", message, where=tensors[0].at, about=TOLD, fix=advice)
        return
    else:
        by = next((title for name, title in OPTIMIZERS if name in have), "")
        whose = f", as of {by}" if by else ""
        message = f"an optimizer of a different class saved the state: it has {some(list(have))}{whose}, and no "
        message += states[0]
    advice = "use the class of optimizer that saved it, or resume with a new one: the weights do not need the state"
    yield found("optimizer-state", message, where=tensors[0].at if tensors else "", about=TOLD, fix=advice)


def _wholes(checkpoint: Checkpoint, wholes: Sequence[str]) -> Iterator[Finding]:
    for front in wholes:
        keys = [entry.key for entry in checkpoint.entries if not entry.at]
        if not keys or any(key.startswith(f"{front}.") for key in keys):
            continue
        if any(map(_DIFFUSION.match, keys)):
            message = f"the file is a diffusion model alone, and that loader looks for keys that begin with `{front}.`"
            message += ": keep the file in models/diffusion_models for the node Load Diffusion Model, or add the prefix"
            yield found("names-prefixed", message, about=TOLD, fix=step("add-module", prefix=front))
            continue
        message = f"the loader looks for keys that begin with `{front}.`, and the file has keys like {keys[0]}"
        yield found("missing-keys", message, about=TOLD, fix="load it with the node for this kind of model")
