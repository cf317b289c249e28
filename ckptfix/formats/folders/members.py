"""A folder of files as a trainer leaves it: what each of them is, and which one is the model.

A checkpoint of many files is a format of its own. Here the files are checkpoints by themselves, and only one of them is
what a command means by the folder's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from ckptfix.errors import printable
from ckptfix.formats.foreign.archives import CHECKPOINTS
from ckptfix.urls import as_path

MOST = 2000
"""Entries of a folder that are looked at."""

Role = Literal["model", "optimizer", "beside", "other"]

ROLES: tuple[tuple[str, Role, str], ...] = (
    # transformers, diffusers, peft, accelerate: `save_pretrained`, `Trainer._save`, `save_state`, `save_fsdp_model`
    (r"(model|pytorch_model|diffusion_pytorch_model)(\.[a-z0-9_]+)?\.(safetensors|bin)", "model", "the weights"),
    (r"adapter_model\.(safetensors|bin)", "model", "the weights of an adapter"),
    (r"pytorch_model_fsdp(_\d+)?(\.bin)?", "model", "the weights"),
    (r"(.*\.)?(safetensors|bin)\.index\.json", "beside", "the index of a sharded checkpoint"),
    (r"optimizer(_\d+)?(\.(pt|bin|pth|safetensors))?", "optimizer", "the optimizer's state"),
    (r"(lr_)?scheduler(_\d+)?\.(pt|bin|pth)", "beside", "the state of a learning rate scheduler"),
    (r"(grad_)?scaler(_\d+)?\.(pt|bin|pth)", "beside", "the state of a gradient scaler"),
    (r"(rng_state|random_states)(_\d+)?\.(pth|pkl|pt)", "beside", "states of random generators"),
    (r"(sampler|dl_state_dict)(_\d+)?\.(bin|pt)", "beside", "the state of a sampler or data loader"),
    (r"training_args\.bin", "beside", "arguments of transformers' Trainer"),
    (r"trainer_state\.json", "beside", "the progress of transformers' Trainer"),
    (r"custom_checkpoint_\d+\.pkl", "beside", "an object that was registered with accelerate"),
    (r"(.*_)?config\.json|model_index\.json|modules\.json", "beside", "the configuration"),
    (r"(tokenizer|special_tokens|vocab|merges|added_tokens).*\.(json|txt|model)", "beside", "the tokenizer"),
)
"""(what the name matches, the role of such a file, what it is)."""


@dataclass(frozen=True, slots=True)
class Member:
    """A file or folder of a folder.

    Attributes:
        name: in the folder.
        role: ``"model"`` by its name; ``"optimizer"`` and ``"beside"`` are what trainers save with one; ``"other"`` for
            names that say nothing.
        what: in words; ``""`` where the name says nothing.
        size: bytes; 0 for a folder.
        folder: it is one.
    """

    name: str
    role: Role
    what: str
    size: int
    folder: bool

    @property
    def may_be_checkpoint(self) -> bool:
        # A .distcp is a part of its folder.
        return self.folder or (self.name.lower().endswith(CHECKPOINTS) and not self.name.endswith(".distcp"))


def members(folder: str) -> tuple[Member, ...]:
    """The files and folders in `folder`, in the order of their names; hidden ones are left out.

    Raises:
        OSError: it cannot be read.
    """
    entries = sorted(islice(as_path(folder).iterdir(), MOST), key=lambda entry: entry.name)
    return tuple(_member(entry) for entry in entries if not entry.name.startswith("."))


def _member(entry: Path) -> Member:
    inner = entry.is_dir()
    size = 0 if inner or not entry.is_file() else entry.stat().st_size
    return Member(entry.name, *_row_of(entry.name), size, inner)


def role_of(name: str) -> Role:
    """What a file is among those that trainers save, as far as its name says."""
    return _row_of(name)[0]


def _row_of(name: str) -> tuple[Role, str]:
    return next(((role, what) for pattern, role, what in ROLES if re.fullmatch(pattern, name)), ("other", ""))


def model_of(folder: str, is_checkpoint: Callable[[str], bool]) -> str | None:
    """The path of the one checkpoint in `folder` that is a model, as far as names say; None where there are several.

    Files come before folders, names of models before others, and of the same name safetensors before a pickle, as
    ``from_pretrained`` takes them.

    Args:
        is_checkpoint: whether the folder at a path is a checkpoint.
    """
    try:
        found = [member for member in members(folder) if member.may_be_checkpoint]
    except OSError:
        return None
    left = [member for member in found if member.role in ("model", "other")]
    files = [member for member in left if not member.folder]
    for chosen in ([member for member in files if member.role == "model"], files):
        stems = {_stem(member.name) for member in chosen}
        if len(stems) == 1:
            best = next((member for member in chosen if member.name.endswith(".safetensors")), chosen[0])
            return str(as_path(folder, best.name))
    if files:
        return None
    alone = [member for member in found if not member.folder]
    if len(alone) == 1:
        return str(as_path(folder, alone[0].name))
    inner = [member for member in left if member.folder and is_checkpoint(str(as_path(folder, member.name)))]
    return str(as_path(folder, inner[0].name)) if len(inner) == 1 and not alone else None


def _stem(name: str) -> str:
    return name.rpartition(".")[0].removeprefix("pytorch_")


def rivals_of(folder: str, taken: str) -> tuple[str, ...]:
    """The other files in `folder` that are called a model as the file `taken` of it is."""
    own = as_path(taken).name
    try:
        found = [member for member in members(folder) if member.may_be_checkpoint and not member.folder]
    except OSError:
        return ()
    same = [member.name for member in found if member.role in ("model", "other") and _stem(member.name) == _stem(own)]
    return tuple(name for name in same if name != own)


def optimizer_of(path: str) -> str | None:
    """The file or folder that a trainer saved beside the model in the folder `path`; None for another path."""
    if not as_path(path).is_dir():
        return None
    try:
        found = [member.name for member in members(path) if member.role == "optimizer"]
    except OSError:
        return None
    return str(as_path(path, found[0])) if len(found) == 1 else None


def listed(folder: str) -> str:
    """What is in a folder, in a few words."""
    names = [member.name + ("/" if member.folder else "") for member in members(folder) if member.may_be_checkpoint]
    shown = ", ".join(map(printable, names[:4]))
    return f"{shown} and {len(names) - 4:,} more" if len(names) > 4 else shown
