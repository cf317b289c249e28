"""The role of each file in a trainer's folder, and the choice of the one that is the model.

A checkpoint of many files is a format of its own. Here the files are checkpoints by themselves, and a command that
names the folder means only one of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

from ckptfix.dataclass import dataclass
from ckptfix.errors import printable
from ckptfix.io.source import is_folder
from ckptfix.urls import as_path

CHECKPOINTS = (".pth", ".pt", ".ckpt", ".bin", ".th", ".safetensors", ".distcp", ".pth.tar")
"""Suffixes of checkpoint files."""

MEGATRON_FOLDER = re.compile(r"mp_rank_(\d{2,5})(?:_(\d{3,5}))?(?:_(\d{3,5}))?")
STEP_FOLDER = re.compile(r"iter_\d{7,}|release")
"""Names of the folders of a rank and of a save of Megatron-LM (get_checkpoint_name)."""

RANKS_METADATA = "metadata.pkl"
"""The file in which torch_checkpointing lists the files of the ranks (distributed_metadata.py, e57668f)."""

NEMO_FOLDER = re.compile(r"(?:mp|tp)_rank_\d{2,5}(?:_pp_rank_\d{3,5})?")
NEMO_FILE = "model_weights.ckpt"
NEMO_JOINS = (
    "NeMo joins the files of all ranks: examples/nlp/language_modeling/megatron_change_num_partitions.py with "
    "--target_tensor_model_parallel_size 1 and --target_pipeline_model_parallel_size 1"
)
"""Source: nemo/utils/model_utils.py inject_model_parallel_rank."""

GGUF_PART = re.compile(r"(.*-)(\d{5})-of-(\d{5})[.]gguf", re.DOTALL)
"""The name of a file of a model in several GGUF files; the first of them is read with the others."""

MOST = 2000
"""The number of entries of a folder that are looked at."""

Role = Literal["model", "optimizer", "beside", "other"]


@dataclass(frozen=True, slots=True)
class MemberKind:
    """The kind of a file or folder among those that a trainer saves.

    Attributes:
        role: ``"model"``; ``"optimizer"`` and ``"beside"`` are files that trainers save with a model; ``"other"`` is
            unknown.
        what: a description; ``""`` where nothing is known.
    """

    role: Role
    what: str


WEIGHTS = MemberKind("model", "the weights")
WEIGHTS_OF_RANK = MemberKind("model", "the weights of a rank")
ADAPTER = MemberKind("model", "the weights of an adapter")
INDEX = MemberKind("beside", "the index of a sharded checkpoint")
OPTIMIZER = MemberKind("optimizer", "the optimizer's state")
SCHEDULER = MemberKind("beside", "the state of a learning rate scheduler")
SCALER = MemberKind("beside", "the state of a gradient scaler")
GENERATORS = MemberKind("beside", "states of random generators")
DATA = MemberKind("beside", "the state of a sampler or data loader")
EXTRA = MemberKind("beside", "the states of a rank's scheduler and random generators")
ARGUMENTS = MemberKind("beside", "arguments of transformers' Trainer")
PROGRESS = MemberKind("beside", "the progress of transformers' Trainer")
REGISTERED = MemberKind("beside", "an object that was registered with accelerate")
CONFIGURATION = MemberKind("beside", "the configuration")
TOKENIZER = MemberKind("beside", "the tokenizer")
UNKNOWN = MemberKind("other", "")

_RANK = r"([._-]world[._-]?size[._-]?\d+)?[._-]rank[._-]?\d+"
"""The part of a file's name that gives the rank that saved it, with verl's job size before it."""

KINDS: tuple[tuple[str, MemberKind], ...] = (
    # transformers, diffusers, peft, accelerate: `save_pretrained`, `Trainer._save`, `save_state`, `save_fsdp_model`
    (r"(model|pytorch_model|diffusion_pytorch_model)(\.[a-z0-9_]+)?\.(safetensors|bin)", WEIGHTS),
    (r"adapter_model\.(safetensors|bin)", ADAPTER),
    (r"pytorch_model_fsdp(_\d+)?(\.bin)?", WEIGHTS),
    (rf"(model|model_state|pytorch_model_fsdp(_\d+)?){_RANK}\.(pt|pth|bin)", WEIGHTS_OF_RANK),
    (r"(.*\.)?(safetensors|bin)\.index\.json", INDEX),
    (rf"optim(izer)?(_\d+)?({_RANK})?(\.(pt|bin|pth|safetensors))?", OPTIMIZER),
    (rf"(lr_)?scheduler(_\d+)?({_RANK})?\.(pt|bin|pth)", SCHEDULER),
    (rf"(grad_)?scaler(_\d+)?({_RANK})?\.(pt|bin|pth)", SCALER),
    (rf"(rng_state|random_states)(_\d+)?({_RANK})?\.(pth|pkl|pt)", GENERATORS),
    (r"(sampler|dl_state_dict)(_\d+)?\.(bin|pt)", DATA),
    (rf"extra_state({_RANK})?\.(pt|pth)", EXTRA),
    (r"training_args\.bin", ARGUMENTS),
    (r"trainer_state\.json", PROGRESS),
    (r"custom_checkpoint_\d+\.pkl", REGISTERED),
    (r"(.*_)?config\.json|model_index\.json|modules\.json", CONFIGURATION),
    (r"(tokenizer|special_tokens|vocab|merges|added_tokens).*\.(json|txt|model)", TOKENIZER),
)
"""(pattern of the name, kind of the file): the one table for listing files and for choosing among them."""


@dataclass(frozen=True, slots=True)
class FolderMember:
    """A file or folder inside a folder.

    Attributes:
        name: its name in the folder.
        role: ``"model"`` by its name; ``"optimizer"`` and ``"beside"`` are files that trainers save with a model;
            ``"other"`` where the name says nothing.
        what: a description; ``""`` where the name says nothing.
        size: bytes; 0 for a folder.
        folder: it is a folder.
    """

    name: str
    role: Role
    what: str
    size: int
    folder: bool

    @property
    def may_be_checkpoint(self) -> bool:
        # A .distcp file is only a part of its folder.
        return self.folder or (self.name.lower().endswith(CHECKPOINTS) and not self.name.endswith(".distcp"))


def members(folder: str) -> tuple[FolderMember, ...]:
    """Return the files and folders in `folder`, sorted by name, without hidden ones.

    Raises:
        OSError: the folder cannot be read.
    """
    entries = sorted(islice(as_path(folder).iterdir(), MOST), key=lambda entry: entry.name)
    return tuple(_member(entry) for entry in entries if not entry.name.startswith("."))


def _member(entry: Path) -> FolderMember:
    inner = entry.is_dir()
    size = 0 if inner or not entry.is_file() else entry.stat().st_size
    kind = kind_of(entry.name)
    return FolderMember(entry.name, kind.role, kind.what, size, inner)


def kind_of(name: str) -> MemberKind:
    """Return the kind of a file or folder that a trainer saves, judged by its name alone."""
    return next((kind for pattern, kind in KINDS if re.fullmatch(pattern, name)), UNKNOWN)


def read_with(name: str) -> str:
    """Return the file of the same folder that is read with the file `name`; its own name where that is itself."""
    part = GGUF_PART.fullmatch(name)
    return name if part is None else f"{part[1]}{1:05d}-of-{part[3]}.gguf"


def role_of(name: str) -> Role:
    """Return the role of a file or folder, judged by its name alone."""
    return kind_of(name).role


def model_of(
    folder: str, is_checkpoint: Callable[[str], bool], holds_weights: Callable[[str], bool] = lambda path: True
) -> str | None:
    """Return the path of the one checkpoint in `folder` that is a model, judged by names; None where there are several.

    A name of a model is preferred to a name that says nothing, a file to a folder of the same role, and with the same
    stem safetensors to a pickle, as in ``from_pretrained``. A file that a trainer saves beside a model is chosen only
    if nothing else is there.

    Args:
        is_checkpoint: whether the folder at a path is a checkpoint.
        holds_weights: whether the file at a path has tensors that may be a model's. It is asked about a file whose name
            says nothing, when a folder with a checkpoint is beside it.
    """
    try:
        found = [member for member in members(folder) if member.may_be_checkpoint]
    except OSError:
        return None

    def path(member: FolderMember) -> str:
        return str(as_path(folder, member.name))

    files = [member for member in found if not member.folder]
    named, unnamed = ([member for member in files if member.role == role] for role in ("model", "other"))
    if named:
        return path(_preferred(named)) if _is_one(named) else None
    folders = [member for member in found if member.folder]
    models = [member for member in folders if member.role == "model"]
    if models:
        # A damaged model folder is still the model: no file beside it can be.
        return path(models[0]) if len(models) == 1 and is_checkpoint(path(models[0])) else None
    inner = [member for member in folders if member.role == "other" and is_checkpoint(path(member))]
    if unnamed and not (inner and _is_one(unnamed) and not holds_weights(path(_preferred(unnamed)))):
        return path(_preferred(unnamed)) if _is_one(unnamed) else None
    if inner:
        return path(inner[0]) if len(inner) == 1 else None
    alone = len(files) == 1 and not any(member.role == "optimizer" for member in folders)
    return path(files[0]) if alone else None


def _is_one(files: Sequence[FolderMember]) -> bool:
    """Return whether the names of `files` differ only in format, so that they are one model."""
    return len({_stem(member.name) for member in files}) == 1


def _preferred(files: Sequence[FolderMember]) -> FolderMember:
    return next((member for member in files if member.name.endswith(".safetensors")), files[0])


def _stem(name: str) -> str:
    return name.rpartition(".")[0].removeprefix("pytorch_")


def rivals_of(folder: str, taken: str) -> tuple[str, ...]:
    """Return the other files in `folder` whose names make them the same kind of model as the file `taken`."""
    own = as_path(taken).name
    try:
        found = [member for member in members(folder) if member.may_be_checkpoint and not member.folder]
    except OSError:
        return ()
    same = [member.name for member in found if member.role in ("model", "other") and _stem(member.name) == _stem(own)]
    return tuple(name for name in same if name != own)


def optimizer_of(path: str) -> str | None:
    """Return the only optimizer file or folder that a trainer saved in the folder `path`; None without one."""
    if not is_folder(path):
        return None
    try:
        found = [member.name for member in members(path) if member.role == "optimizer"]
    except OSError:
        return None
    return str(as_path(path, found[0])) if len(found) == 1 else None


def listed(folder: str) -> str:
    """Return a short list of the checkpoints in a folder."""
    names = [member.name + ("/" if member.folder else "") for member in members(folder) if member.may_be_checkpoint]
    shown = ", ".join(map(printable, names[:4]))
    return f"{shown} and {len(names) - 4:,} more" if len(names) > 4 else shown
