"""The files of a DeepSpeed save, and the rank of each.

::

    FOLDER/latest                                            the name of the newest save; or latest_universal
    FOLDER/global_step3/mp_rank_00_model_states.pt           stages 0 to 2: the whole module
    FOLDER/global_step3/zero_pp_rank_0_mp_rank_00_model_states.pt     stage 3: one such file for each rank
    FOLDER/global_step3/[bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt
    FOLDER/zero_to_fp32.py                                   put there by stages 1 to 3
    UNIVERSAL/zero/NAME/fp32.pt                              written by ds_to_universal.py: one file for each parameter

Source: deepspeed/runtime/engine.py (``_get_ckpt_name``, ``_get_zero_ckpt_name``, ``_save_checkpoint``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import field
from itertools import islice
from pathlib import PurePosixPath

from ckptfix.commands import command, quoted
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, DamagedFile, Unsupported
from ckptfix.io.source import is_file, is_folder, is_place, open_source
from ckptfix.urls import as_path, real_path, scan_folder

LATEST = ("latest", "latest_universal")
PARAMETERS = "zero"
"""The folder of a universal checkpoint that has a folder for each parameter."""

MAX_FILES = 200_000
"""The number of files of a folder that are looked at: DeepSpeed writes two for each rank."""

STATES = ("_model_states.pt", "_optim_states.pt")
_MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_MODEL_OF_RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_\d+_?(?:optim|model)_states")
_LAYER = re.compile(r"layer_\d+-model_.*states\.pt")
_EXPERT = re.compile(r"(?:layer_\d+_)?exp(?:ert|p_rank)_\d+_.*states\.pt")


@dataclass(slots=True)
class Save:
    """The files of one save.

    Attributes:
        path: the folder that the user named.
        folder: the folder of the files.
        pointer: the file that named `folder`; None where the user named it, or where it is the only save.
        models, optims: rank -> file name.
        partitioned: each rank has its own model states, as stage 3 writes them.
        universal: each parameter has a folder of its own.
        sliced: there are several model-parallel ranks, each with slices of some parameters.
        slices: the model states of all model-parallel ranks but the first.
        trouble: the error that says why the save cannot be read.
    """

    path: str
    folder: str
    pointer: str | None = None
    models: dict[int, str] = field(default_factory=dict)
    optims: dict[int, str] = field(default_factory=dict)
    partitioned: bool = False
    universal: bool = False
    sliced: bool = False
    slices: list[str] = field(default_factory=list)
    trouble: CkptfixError | None = None

    def expected(self, rank: int) -> str:
        """Return the path that the optimizer states of `rank` would have, derived from the name for another rank."""
        name = next(iter(self.optims.values()), "zero_pp_rank_0_mp_rank_00_optim_states.pt")
        return os.path.join(self.folder, re.sub(r"pp_rank_\d+", f"pp_rank_{rank}", name))  # noqa: PTH118


def rank_of(stem: str) -> int | None:
    """Return the data-parallel rank in the name of a rank's file, without its suffix; None for any other name."""
    found = _RANK.fullmatch(stem)
    return None if found is None else int(found[1])


def find(path: str) -> Save | None:
    """Return the save in the folder `path`, or the save that its file ``latest`` names; None if there is no save.

    A folder that contains only one save needs no ``latest``.
    """
    if not is_place(path) or not is_folder(path):
        return None
    own = _save(path, path)
    if own is not None:
        return own
    for name in LATEST:
        pointer = as_path(path, name)
        if is_file(pointer):
            step = _named(path, str(pointer))
            found = None if step is None else _save(path, step)
            if found is not None:
                found.pointer = str(pointer)
                return found
    steps = [found for inner in _folders_of(path) if (found := _save(path, inner)) is not None]
    return steps[0] if len(steps) == 1 else None


def read_save(path: str) -> Save:
    """Return the save in the folder `path`.

    Raises:
        Unsupported: it is partitioned in a way that only a running program can join.
        DamagedFile: it is no longer a save, or two files claim to be the same.
    """
    found = find(path)
    if found is None:
        raise DamagedFile("the folder contains no DeepSpeed save", path=path)
    if found.trouble is not None:
        raise found.trouble
    return found


def _named(path: str, pointer: str) -> str | None:
    """Return the folder that the file `pointer` names; None if the file is missing or the name leads out of `path`."""
    try:
        with open_source(pointer) as source:
            tag = source.read(0, min(source.size, 1024)).decode("utf-8", "replace").strip()
    except CkptfixError:
        return None
    parts = PurePosixPath(tag).parts
    if not tag or "\0" in tag or "\\" in tag or ".." in parts or PurePosixPath(tag).is_absolute():
        return None
    step = as_path(path, tag)
    try:
        inside = is_folder(step) and as_path(real_path(step)).is_relative_to(real_path(path))
    except OSError:
        return None
    return str(step) if inside else None


def entries_of(folder: str) -> list[str]:
    """Return the sorted names in a folder; an empty list if it cannot be read."""
    try:
        with scan_folder(folder) as rows:
            return sorted(row.name for row in islice(rows, MAX_FILES))
    except OSError:
        return []


def _folders_of(folder: str) -> list[str]:
    """Return the sorted paths of the folders in a folder; files, which may be many, are not looked at."""
    try:
        with scan_folder(folder) as rows:
            return sorted(row.path for row in islice(rows, MAX_FILES) if row.is_dir())
    except OSError:
        return []


def _save(path: str, folder: str) -> Save | None:
    """Return the save whose files are in `folder`; None if there is no such file."""
    if not is_folder(folder):
        return None
    found = Save(path, folder)
    odd: list[str] = []
    for name in entries_of(folder):
        model, of_rank, optim = (pattern.fullmatch(name) for pattern in (_MODEL, _MODEL_OF_RANK, _OPTIM))
        if _LAYER.fullmatch(name) or _EXPERT.fullmatch(name):
            odd.append(name)
        elif model is not None:
            _note(found, found.models, 0, int(model[1]), name)
        elif of_rank is not None:
            found.partitioned = True
            _note(found, found.models, int(of_rank[1]), int(of_rank[2]), name)
        elif optim is not None:
            _note(found, found.optims, int(optim[1]), int(optim[2]), name)
    found.universal = is_folder(as_path(folder, PARAMETERS)) and any(True for _ in islice(parameters(folder), 1))
    if not (found.models or found.optims):
        return None
    if odd:
        stages = any(_LAYER.fullmatch(name) for name in odd)
        what = "pipeline stages" if stages else "experts"
        message = f"a DeepSpeed checkpoint of {what} ({odd[0]}): the program that saved it partitioned the parameters"
        found.trouble = Unsupported(message, path=folder, hint=to_universal(folder) if stages else EXPERTS)
    return found


def _note(save: Save, ranks: dict[int, str], rank: int, model_rank: int, name: str) -> None:
    if model_rank:
        save.sliced = True
        save.slices += [name] if ranks is save.models else []
        message = f"a DeepSpeed checkpoint of several model-parallel ranks ({name}) that does not say how it was split"
        hint = to_universal(save.folder)
        if not is_folder(as_path(save.folder, PARAMETERS)):
            save.trouble = save.trouble or Unsupported(message, path=save.folder, hint=hint)
        return
    if rank in ranks:
        message = f"rank {rank} has two files, {ranks[rank]} and {name}: two saves are in one folder"
        save.trouble = save.trouble or DamagedFile(message, path=save.folder, hint="move the files of one save away")
    ranks[rank] = name


EXPERTS = (
    "load it in the program that saved it, and save the model's state dict there: DeepSpeed's ds_to_universal.py "
    "joins only experts that AutoEP placed"
)


def to_universal(folder: str) -> str:
    """Return a hint to run DeepSpeed's own script, for partitions that only the model states describe.

    Source: deepspeed/checkpoint/ds_to_universal.py of 0.19: without ``universal_checkpoint_info`` it fails with an
    AssertionError; ``--inject_missing_state`` adds an empty one, with which every parameter is joined along dimension
    0.
    """
    out = quoted(f"{str(folder).rstrip('/')}_universal")
    line = f"python -m deepspeed.checkpoint.ds_to_universal --input_folder {quoted(folder)} --output_folder {out}"
    return (
        f"run `{line}` to join it, where DeepSpeed is installed and the model states have universal_checkpoint_info "
        "(Megatron-DeepSpeed saves it); ckptfix reads the folder that it writes. Do not use --inject_missing_state: "
        "it joins all parameters along dimension 0, also those that were split differently or not at all"
    )


def parameters(folder: str) -> Iterator[str]:
    """Yield the names of the parameters of a universal checkpoint."""
    for name in entries_of(str(as_path(folder, PARAMETERS))):
        if is_file(as_path(folder, PARAMETERS, name, "fp32.pt")):
            yield name


def way_out(path: str) -> tuple[str, bool]:
    """Return how to get one file from the save that the path `path` belongs to, and whether that is a command."""
    place = as_path(path)
    folder = place if is_folder(place) else place.parent
    found = find(str(folder))
    if found is not None and found.trouble is not None:
        return found.trouble.hint or found.trouble.message, False
    if found is not None and (is_folder(place) or _is_complete(found)):
        return command("convert", folder, "OUT.pth"), True
    below = [] if found is not None or not is_folder(place) else steps(path)
    if below:
        return command("convert", place / below[-1], "OUT.pth"), True
    put = "put it back in its folder, next to the files of the other ranks; then run " if is_file(place) else ""
    return f"{put}`{command('convert', 'FOLDER', 'OUT.pth')}`, where FOLDER holds the files of one save", False


def steps(folder: str) -> list[str]:
    """Return the names of the folders in `folder` that are saves, the newest last."""
    return sorted((name for name in entries_of(folder) if _save(folder, str(as_path(folder, name)))), key=_natural)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that places global_step9 before global_step10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def _is_complete(save: Save) -> bool:
    """Return whether the save could be complete, judged by the kinds of files it has."""
    return save.universal or bool(save.models and (save.optims or not save.partitioned))
