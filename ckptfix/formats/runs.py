r"""Run folders: the checkpoints that a training run left in one folder, and the parts that resuming needs.

::

    RUN/checkpoint-500/{model.safetensors, optimizer.pt, scheduler.pt, rng_state_0.pth, trainer_state.json}   Trainer
    RUN/checkpoint_3/{model.safetensors, optimizer.bin, scheduler.bin, random_states_0.pkl}                   accelerate
    RUN/epoch=1-step=500.ckpt, RUN/last.ckpt                                                                  Lightning
    RUN/global_step500/{mp_rank_00_model_states.pt, zero_pp_rank_0_mp_rank_00_optim_states.pt}, RUN/latest    DeepSpeed
    RUN/iter_0000500/mp_rank_00/model_optim_rng.pt, RUN/latest_checkpointed_iteration.txt                     Megatron
    RUN/step-500/{.metadata, __0_0.distcp}                                                                    torchtitan
    RUN/model--val_loss=1.25-step=500-last/{weights/, context/}, RUN/...-unfinished                           NeMo
    RUN/epoch_3.pth, RUN/last.pth, RUN/best.pth, each with the state dicts of model and optimizer             torch.save

`LAYOUTS` has one row for each layout; only names are compared here, and nothing is opened but the files that name the
newest checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from itertools import islice
from typing import Literal, NamedTuple

from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError
from ckptfix.formats.deepspeed import LATEST
from ckptfix.io.source import found_as, open_source
from ckptfix.urls import as_path, is_url, scan_folder

Need = Literal["always", "if others", "exact"]
"""``"if others"``: needed if another checkpoint of the run has the part. ``"exact"``: resuming works without it, with
other random numbers."""


class RunPart(NamedTuple):
    """A part of a checkpoint that a trainer loads when it resumes.

    Attributes:
        what: its name in messages.
        names: pattern of its paths in the folder of the checkpoint. The group ``rank`` is the rank of a file, numbers
            joined by ``_``.
        keys: pattern of its keys at the top level of a file, or of a DCP folder, that holds all parts; or `MODEL` or
            `OPTIMIZER`, which stand for a state dict of a model or an optimizer under any key.
        need: whether resuming needs it.
        inside: pattern of other paths in the folder that hold the part too.
    """

    what: str
    names: str = ""
    keys: str = ""
    need: Need = "always"
    inside: str = ""


class SavedStep(NamedTuple):
    """A place inside a checkpoint that has the step.

    Attributes:
        names: pattern of the paths of the files that have it; empty for a checkpoint that is a file.
        key: the address of the number.
        named: it must equal the number in the name of the checkpoint; False where it only is the same in all files.
        sure: a difference is an error; False for a number that a user or mixed precision can change.
    """

    names: str
    key: str
    named: bool = True
    sure: bool = True


class RunLayout(NamedTuple):
    """A way in which a library lays out the checkpoints of a run.

    Attributes:
        name: the name in JSON.
        title: the name of the library in text.
        source: where the library writes it.
        checkpoint: pattern of the name of a checkpoint; the group ``step`` is its step.
        evidence: pattern of a path in the folder of a checkpoint that shows the layout.
        parts: the parts of a checkpoint.
        resume: how to resume, with the fields ``{run}``, ``{path}``, ``{name}`` and ``{step}``.
        files: checkpoints may be files, and have this key; empty where they are folders.
        pointers: files of the run, or of a checkpoint, that name the newest checkpoint.
        pointed: the library resumes only from the checkpoint that a pointer of the run names.
        tag: the name of the checkpoint for the number in a pointer; empty where the pointer has the name itself.
        steps: the places that have the step.
        staging: pattern of the name of a folder that is still being written.
        marker: end of the name of a file that is beside an unfinished checkpoint.
    """

    name: str
    title: str
    source: str
    checkpoint: str
    evidence: str
    parts: tuple[RunPart, ...]
    resume: str
    files: str = ""
    pointers: tuple[str, ...] = ()
    pointed: bool = False
    tag: str = ""
    steps: tuple[SavedStep, ...] = ()
    staging: str = ""
    marker: str = ""


MODEL, OPTIMIZER = "@model", "@optimizer"
"""Keys of a file with a state dict of that kind, whatever the user called it."""

_PLAIN = (
    r"((global_?)?(step|iter|iteration)[-_=]?(?P<step>\d+)"
    r"|(epoch|ep|model|net|checkpoint|ckpt|state|snapshot)([-_=]?(epoch|ep))?[-_=]?\d+"
    r"|((model|net|checkpoint|ckpt)[-_])?(last|best|latest|final)([-_](model|net|checkpoint|ckpt))?)"
    r"\.(pth|pt|th|pth\.tar|pt\.tar|tar)"
)
"""Names that scripts with a training loop of their own give to the files of torch.save."""

_SHARD = r"(-\d{5}-of-\d{5})?\.(safetensors|bin)"
_WEIGHTS = (
    rf"(model|pytorch_model|adapter_model|pytorch_lora_weights)(_\d+)?(\.[a-z0-9_]+)?{_SHARD}"
    r"|(model\.safetensors|pytorch_model\.bin)\.index\.json"
    rf"|[a-z_]+\d?/(diffusion_pytorch_)?(model|adapter_model){_SHARD}"
    r"|pytorch_model_fsdp(_\d+)?(\.bin|/\.metadata)"
)
"""Files of ``save_pretrained``, ``save_file``, ``save_fsdp_model`` and the hooks of diffusers."""

_STATES = r"(bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_\d+"
_MODEL_STATES = rf"(mp_rank_\d+|{_STATES}|layer_\d+-model_\d+)_model_states\.pt|layer_\d+-model_.*states\.pt"
_OPTIM_STATES = rf"{_STATES}_?optim_states\.pt"

LAYOUTS: tuple[RunLayout, ...] = (
    RunLayout(
        "nemo", "NeMo", "nemo/lightning/pytorch/callbacks/model_checkpoint.py",
        r".*\bstep=(?P<step>\d+)(?!.*\.ckpt$).*",
        r"(weights|context|model_weights)/.*|common\.pt|\.metadata|.*\.distcp",
        (
            RunPart("model", names=r"((model_)?weights/)?\.metadata"),
            RunPart("common state", names=r"((model_)?weights/)?common\.pt", need="if others"),
            RunPart("context", names=r"context/.*", need="if others"),
        ),
        "nemo.lightning.AutoResume(resume_from_path={path!r})",
        marker="-unfinished",
    ),
    RunLayout(
        "megatron", "Megatron-LM", "megatron/training/checkpointing.py: get_checkpoint_name",
        r"iter_(?P<step>\d{7,})",
        r"mp_rank_[\d_]+/.*|common\.pt|metadata\.json|\.metadata|.*\.distcp",
        (
            RunPart("model", names=r"mp_rank_(?P<rank>\d+(_\d+)*)/model_(optim_)?rng\.pt|\.metadata"),
            RunPart("optimizer", names=r"mp_rank_(?P<rank>\d+(_\d+)*)/(distrib_)?optim\.pt", need="if others"),
            RunPart("common state", names=r"common\.pt", need="if others"),
        ),
        "pass --load {run} --ckpt-step {step} to the training script",
        pointers=("latest_checkpointed_iteration.txt",), pointed=True, tag="iter_{:07d}",
        steps=(SavedStep(r"mp_rank_[\d_]+/model_(optim_)?rng\.pt|common\.pt", "iteration"),),
    ),
    RunLayout(
        "torchtitan", "torchtitan", "torchtitan/components/checkpoint.py: _find_load_step",
        r"step-(?P<step>\d+)",
        r"\.metadata|.*\.distcp|model\.safetensors\.index\.json",
        (
            RunPart("model", names=r"\.metadata|model\.safetensors\.index\.json"),
            RunPart("optimizer", keys=r"optimizer", need="if others"),
            RunPart("scheduler", keys=r"lr_scheduler", need="if others"),
            RunPart("training state", keys=r"train_state", need="if others"),
            RunPart("data loader", keys=r"dataloader", need="if others"),
        ),
        "pass --checkpoint.load_step {step} to torchtitan",
    ),
    RunLayout(
        "trainer", "transformers' Trainer", "transformers/trainer.py: _save_checkpoint",
        r"checkpoint-(?P<step>\d+)",
        r"trainer_state\.json|optimizer\.pt|scheduler\.pt|rng_state(_\d+)?\.pth",
        (
            RunPart("model", names=_WEIGHTS, inside=rf"global_step\d+/({_MODEL_STATES})"),
            RunPart(
                "optimizer",
                names=rf"optimizer\.(pt|bin)|optimizer_\d+/\.metadata|global_step\d+/({_OPTIM_STATES})",
            ),
            RunPart("scheduler", names=r"scheduler\.pt", inside=r"global_step\d+/.*_states\.pt"),
            RunPart("gradient scaler", names=r"scaler\.pt", need="if others"),
            RunPart("trainer state", names=r"trainer_state\.json"),
            RunPart("random states", names=r"rng_state(_(?P<rank>\d+))?\.pth", need="exact"),
        ),
        "trainer.train(resume_from_checkpoint={path!r})",
        pointers=LATEST,
        steps=(
            SavedStep(r"trainer_state\.json", "global_step"),
            SavedStep(r"scheduler\.pt", "last_epoch", sure=False),
        ),
        staging=r"tmp-checkpoint-(?P<step>\d+)",
    ),
    RunLayout(
        "accelerate", "accelerate", "accelerate/checkpointing.py: save_accelerator_state",
        r"(checkpoint|step|epoch|state)[-_](?P<number>\d+)",
        r"random_states_\d+\.pkl|optimizer(_\d+)?\.bin|scheduler(_\d+)?\.bin|custom_checkpoint_\d+\.pkl",
        (
            RunPart("model", names=_WEIGHTS, inside=rf"pytorch_model/({_MODEL_STATES})"),
            RunPart(
                "optimizer",
                names=rf"optimizer(_\d+)?\.bin|optimizer(_\d+)?/\.metadata|pytorch_model/({_OPTIM_STATES})",
            ),
            RunPart("scheduler", names=r"scheduler(_\d+)?\.bin", need="if others"),
            RunPart("gradient scaler", names=r"scaler\.pt", need="if others"),
            RunPart("sampler", names=r"(sampler|dl_state_dict)(_\d+)?\.bin", need="if others"),
            RunPart("registered objects", names=r"custom_checkpoint_(?P<rank>\d+)\.pkl", need="if others"),
            RunPart("random states", names=r"random_states_(?P<rank>\d+)\.pkl", need="exact"),
        ),
        "accelerator.load_state({path!r})",
        pointers=LATEST,
        steps=(SavedStep(r"random_states_\d+\.pkl", "step", named=False),),
    ),
    RunLayout(
        "deepspeed", "DeepSpeed", "deepspeed/runtime/engine.py: save_checkpoint",
        r".*step[-_=]?(?P<step>\d+)|.*\d",
        _MODEL_STATES,
        (
            RunPart("model", names=_MODEL_STATES),
            RunPart("optimizer", names=_OPTIM_STATES, need="if others", inside=r"zero/.*"),
        ),
        "engine.load_checkpoint({run!r}, tag={name!r})",
        pointers=LATEST, pointed=True,
        steps=(SavedStep(r"(mp_rank_\d+|.*zero_pp_rank_\d+_mp_rank_\d+)_model_states\.pt", "global_steps"),),
    ),
    RunLayout(
        "lightning", "Lightning", "lightning/pytorch/trainer/connectors/checkpoint_connector.py: dump_checkpoint",
        r"(.*step[=_-]?(?P<step>\d+).*|.*epoch[=_-]?\d+.*|(.*-)?last(-v\d+)?)\.ckpt",
        r"meta\.pt|\.metadata|checkpoint/.*_states\.pt",
        (
            RunPart("model", keys=r"state_dict", names=rf"\.metadata|checkpoint/({_MODEL_STATES})"),
            RunPart("optimizer", keys=r"optimizer_states", names=rf"\.metadata|checkpoint/({_OPTIM_STATES})"),
            RunPart("schedulers", keys=r"lr_schedulers", names=r"meta\.pt|checkpoint/.*", need="if others"),
            RunPart("loops", keys=r"loops", names=r"meta\.pt|checkpoint/.*", need="if others"),
        ),
        "trainer.fit(model, ckpt_path={path!r})",
        files="pytorch-lightning_version",
        pointers=("last.ckpt",),
        steps=(SavedStep("", "global_step", sure=False),),
        marker="-unfinished",
    ),
    RunLayout(
        "dcp", "torch.distributed.checkpoint", "torch/distributed/checkpoint/state_dict_saver.py: save",
        # accelerate's folders of one save, as FSDP writes them, are no steps.
        r"(?!(pytorch_model_fsdp|optimizer)_\d+$).*?(?P<step>\d+)",
        r"\.metadata|.*\.distcp",
        (
            RunPart("model", names=r"\.metadata"),
            RunPart("optimizer", keys=r"optim(izer)?(_states?)?", need="if others"),
        ),
        "torch.distributed.checkpoint.load(state_dict, checkpoint_id={path!r})",
    ),
    RunLayout(
        "torch", "torch.save", "docs.pytorch.org/tutorials/beginner/saving_loading_models.html: a general checkpoint",
        _PLAIN,
        r"(?!)",
        (
            RunPart("model", keys=MODEL),
            RunPart("optimizer", keys=OPTIMIZER, need="if others"),
            RunPart("scheduler", keys=r"(lr_?)?sched(uler)?s?(_state)?(_?dict)?", need="if others"),
            RunPart("gradient scaler", keys=r"((grad|amp)_?)?scaler(_state)?(_?dict)?", need="if others"),
        ),
        "ckptfix.load_into(model, {path!r}); ckptfix.load_optimizer(optimizer, {path!r}, model=model)",
        files=OPTIMIZER,
    ),
)  # fmt: skip
"""The one table of layouts. If several fit a folder equally well, the first is used."""

INSIDE = ("checkpoints", "checkpoint", "lightning_logs")
"""Folders of a run that hold its checkpoints: Lightning and NeMo (``checkpoints``), torchtitan (``checkpoint``)."""

MOST = 100_000
"""The number of entries of a folder that are looked at."""

MOST_TRIED, MOST_SHOWN = 64, 5_000
"""Numbers of folders, and of entries of each, that are looked at to recognize a layout."""

MOST_TEXT = 1024
"""Greatest number of bytes of a pointer that are read."""


@dataclass(frozen=True, slots=True)
class RunCheckpoint:
    """A checkpoint of a run.

    Attributes:
        name: its name in the run.
        path: its path.
        step: the number in its name; None without one.
        folder: it is a folder.
        members: path in the folder -> bytes; for a file, its own name.
        unfinished: why its name or a marker shows that it was not finished; empty if nothing shows it.
    """

    name: str
    path: str
    step: int | None
    folder: bool
    members: Mapping[str, int] = field(repr=False)
    unfinished: str = ""


@dataclass(frozen=True, slots=True)
class RunPointer:
    """A file, or a link, that names the newest checkpoint.

    Attributes:
        path: its path.
        place: the folder whose entries it names.
        tag: the name of the checkpoint; None if the text cannot be a name.
        text: the text, or the target of the link.
        link: it is a link that leads nowhere.
    """

    path: str
    place: str
    tag: str | None
    text: str
    link: bool = False


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A folder that holds the checkpoints of a training run.

    Attributes:
        path: the folder of the checkpoints, which may be inside the folder that was named.
        layout: the row of `LAYOUTS`.
        checkpoints: sorted by step, the newest last.
        pointers: the files that name the newest checkpoint, of the run and of its checkpoints.
    """

    path: str
    layout: RunLayout
    checkpoints: tuple[RunCheckpoint, ...]
    pointers: tuple[RunPointer, ...]


def find_run(folder: str) -> RunFolder | None:
    """Return the run whose checkpoints are in `folder`, or in a folder inside that usually has them; None without one.

    The newest version of Lightning's logs counts (``version_3/checkpoints``).
    """
    for place in _places(folder):
        run = _run_in(place)
        if run is not None:
            return run
    return None


def _places(folder: str, depth: int = 3) -> Iterator[str]:
    yield folder
    inner = [name for name, row in _entries(folder).items() if row.folder]
    versions = sorted((int(name[8:]), name) for name in inner if re.fullmatch(r"version_\d{1,9}", name))
    below = [name for name in INSIDE if name in inner] + [name for _, name in reversed(versions)]
    for name in below:
        if depth:
            yield from _places(str(as_path(folder, name)), depth - 1)


class _Entry(NamedTuple):
    size: int
    folder: bool
    lost: bool


def _entries(folder: str, most: int = MOST) -> dict[str, _Entry]:
    """Return the files, the folders and the links that lead nowhere in `folder`; nothing if it cannot be read."""
    found: dict[str, _Entry] = {}
    try:
        with scan_folder(folder) as rows:
            for row in islice(rows, most):
                try:
                    inner = row.is_dir()
                    regular = not inner and row.is_file()
                    lost = not inner and not regular and row.is_symlink()
                    size = as_path(row.path).stat().st_size if regular else 0
                except OSError:
                    continue
                if inner or regular or lost:
                    found[row.name] = _Entry(size, inner, lost)
    except (OSError, CkptfixError):
        return found
    return found


def _members(folder: str, most: int = MOST) -> dict[str, int]:
    """Return the files of a checkpoint and of the folders in it: path in the folder -> bytes."""
    found: dict[str, int] = {}
    for name, row in _entries(folder, most).items():
        if not row.folder and not row.lost:
            found[name] = row.size
        elif row.folder:
            inner = _entries(str(as_path(folder, name)), most)
            found |= {f"{name}/{below}": one.size for below, one in inner.items() if not one.folder and not one.lost}
    return found


def _run_in(folder: str) -> RunFolder | None:
    entries = _entries(folder)
    members: dict[str, dict[str, int]] = {}
    best: tuple[int, RunLayout, list[str]] | None = None
    for layout in LAYOUTS:
        fitting = [name for name in entries if re.fullmatch(layout.checkpoint, name)]
        tried = sorted(fitting, key=natural_key)[-MOST_TRIED:]
        shown = [name for name in tried if _is_shown(layout, folder, name, entries[name], members)]
        if shown and (best is None or len(shown) > best[0]):
            best = len(shown), layout, shown
    if best is None:
        return None
    _, layout, shown_names = best
    families = {_family(name) for name in shown_names}
    checkpoints = []
    for name, row in entries.items():
        of_name = re.fullmatch(layout.checkpoint, name)
        staged = re.fullmatch(layout.staging, name) if layout.staging else None
        if row.lost or not (row.folder or layout.files) or not (of_name or staged):
            continue
        if not staged and name not in shown_names and _family(name) not in families:
            continue
        path = str(as_path(folder, name))
        inside = _members(path) if row.folder else {name: row.size}
        marker = f"{name.removesuffix('.ckpt')}{layout.marker}" if layout.marker else ""
        why = "its name is that of an unfinished save" if staged else ""
        why = why or (f"{marker} is beside it" if marker in entries and not entries[marker].folder else "")
        step = _number((of_name or staged), "step")
        checkpoints.append(RunCheckpoint(name, path, step, row.folder, inside, why))
    checkpoints.sort(key=lambda one: (-1 if one.step is None else one.step, natural_key(one.name)))
    pointers = [*_pointers(layout, folder, entries)]
    for one in checkpoints:
        if one.folder:
            pointers += _pointers(layout, one.path, {name: _Entry(0, False, False) for name in one.members})
    return RunFolder(folder, layout, tuple(checkpoints), tuple(pointers))


def natural_key(name: str) -> list[tuple[int, str]]:
    """Return a sort key that places ``epoch=9`` before ``epoch=10``."""
    stem = name.removesuffix(".ckpt")  # Lightning writes a second file of the same name as NAME-v1.ckpt
    return [(int(part[:18]), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", stem)]


def _is_shown(
    layout: RunLayout, folder: str, name: str, row: _Entry, members: dict[str, dict[str, int]]
) -> bool:
    """Return whether an entry of a folder is certainly a checkpoint of `layout`; `members` keeps what was listed."""
    if row.lost:
        return False
    if not row.folder:
        return bool(layout.files)
    if name not in members:
        members[name] = _members(str(as_path(folder, name)), MOST_SHOWN)
    return any(re.fullmatch(layout.evidence, path) for path in members[name])


def step_in_name(name: str) -> int | None:
    """Return the step that the name of a checkpoint states in the way of a library; None for any other name."""
    for layout in LAYOUTS:
        found = re.fullmatch(layout.checkpoint, name) if layout.name != "dcp" else None
        if (step := _number(found, "step")) is not None:
            return step
    return None


def _family(name: str) -> str:
    """Return a name without its numbers, by which checkpoints of one run are recognized."""
    return re.sub(r"\d+(\.\d+)?", "", name)


def _number(found: re.Match[str] | None, group: str) -> int | None:
    text = found.groupdict().get(group) if found is not None else None
    return int(text) if text is not None and len(text) <= 18 else None


def _pointers(layout: RunLayout, place: str, entries: Mapping[str, _Entry]) -> Iterator[RunPointer]:
    """Yield the files of a folder that name the newest checkpoint, and links to checkpoints that lead nowhere."""
    for name, row in entries.items():
        path = str(as_path(place, name))
        if row.lost:
            if name in layout.pointers or re.fullmatch(layout.checkpoint, name):
                yield RunPointer(path, place, None, _target(path), link=True)
        elif name in layout.pointers and not row.folder and not layout.files:
            text = _text(path)
            yield RunPointer(path, place, _tag(layout, text), text)


def _target(path: str) -> str:
    try:
        return "" if is_url(path) else os.readlink(path)  # noqa: PTH115
    except OSError:
        return ""


def _text(path: str) -> str:
    try:
        if found_as(path) != "file":
            return ""
        with open_source(path) as source:
            return source.read(0, min(source.size, MOST_TEXT)).decode("utf-8", "replace").strip()
    except (CkptfixError, OSError):
        return ""


def _tag(layout: RunLayout, text: str) -> str | None:
    """Return the name of the checkpoint that the text of a pointer means; None if it cannot be a name."""
    if layout.tag:
        if text == "release":
            return text
        return layout.tag.format(int(text)) if re.fullmatch(r"[0-9]{1,18}", text) else None
    plain = 0 < len(text) < 256 and text not in (".", "..") and not re.search(r"[/\\\x00\n]", text)
    return text if plain else None


def ranks_of(part: RunPart, paths: Iterable[str]) -> dict[tuple[int, ...], str]:
    """Return the rank of each path that belongs to `part` and has one: rank, a number or several -> path."""
    found: dict[tuple[int, ...], str] = {}
    for path in paths:
        match = re.fullmatch(part.names, path) if part.names else None
        if match is not None and (rank := match.groupdict().get("rank")) is not None and len(rank) <= 40:
            found[tuple(map(int, rank.split("_")))] = path
    return found


def not_written_yet(members: Iterable[str]) -> list[str]:
    """Return the paths of files that a save writes last, which are missing beside those that it writes before."""
    own = set(members)
    above = {path.rpartition("/")[0] for path in own if path.endswith(".distcp")}
    lasts = (f"{folder}/.metadata".lstrip("/") for folder in sorted(above))
    return [path for path in lasts if path not in own]


def states_ranks(path: str) -> bool:
    """Return whether the file `path` of a checkpoint states how many ranks saved it: DeepSpeed's files of ranks do."""
    return path.endswith(("_model_states.pt", "_optim_states.pt")) and "layer_" not in path


def means_its_folder(path: str) -> bool:
    """Return whether the checkpoint that the file `path` belongs to is its folder, and not the file."""
    return path.rpartition("/")[2] == ".metadata" or states_ranks(path)


def is_index_of_shards(path: str) -> bool:
    """Return whether the file `path` is an index of shards by its name."""
    return path.endswith(".index.json")


def is_shard(path: str) -> bool:
    """Return whether the file `path` is a shard by its name."""
    return re.search(r"-\d{5}-of-\d{5}\.[^/]*$", path) is not None
