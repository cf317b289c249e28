"""Which files are those of the ranks of one job, by their names.

::

    fsdp2_rank0.pt  fsdp2_rank1.pt                  torch.save on each rank
    model_world_size_8_rank_3.pt                    verl, beside optim_... and extra_state_...
    pytorch_model_fsdp_rank0.bin                    accelerate, LOCAL_STATE_DICT
    model_final.rank_0.pth                          dinov2
    rank0.pt                                        OLMo
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from ckptfix.formats.members import role_of
from ckptfix.urls import as_path

_RANK = re.compile(r"(?P<head>.*?(?:^|[._-]))(?P<word>rank[._-]?)(?P<rank>\d{1,6})(?P<tail>[._-].*)?", re.IGNORECASE)
_WORLD = re.compile(r"world[._-]?size[._-]?(\d{1,6})", re.IGNORECASE)
_OF_OTHERS = re.compile(r"zero_pp_rank_|_optim_states\.pt|_model_states\.pt")
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
MAX_FILES = 200_000


@dataclass(slots=True)
class Family:
    """Files whose names differ in the rank alone.

    Attributes:
        pattern: the name, with a ``*`` for the rank.
        files: rank -> file name.
        world: how many ranks there were, where the names say it.
    """

    pattern: str
    files: dict[int, str] = field(default_factory=dict)
    world: int | None = None

    @property
    def is_model(self) -> bool:
        """Whether it is the model's, among others that a trainer saves of each rank."""
        role = role_of(self.pattern.replace("*", "0"))
        if role != "other":
            return role == "model"
        return re.search(r"model|fsdp|weights|state_dict", self.pattern) is not None and not re.search(
            r"optim|extra|sched|rng|scaler|data", self.pattern
        )


def rank_of(name: str) -> int | None:
    """The rank that a file's name states."""
    found = None if _OF_OTHERS.search(name) else _RANK.fullmatch(name)
    return None if found is None else int(found["rank"])


def families(names: Iterable[str]) -> list[Family]:
    """The families among these file names, each with a file of two ranks or more."""
    found: dict[str, Family] = {}
    for name in names:
        match = _RANK.fullmatch(name)
        if match is None or _OF_OTHERS.search(name) or not name.lower().endswith(SUFFIXES):
            continue
        pattern = f"{match['head']}{match['word']}*{match['tail'] or ''}"
        world = _WORLD.search(pattern)
        family = found.setdefault(pattern, Family(pattern, world=None if world is None else int(world[1])))
        if int(match["rank"]) in family.files:
            # rank1 and rank01: nobody knows which one counts.
            family.files.clear()
            family.world = 0
        elif family.world != 0:
            family.files[int(match["rank"])] = name
    return [family for family in found.values() if len(family.files) > 1]


def in_folder(path: str) -> list[Family]:
    """The families in the folder `path`."""
    if not as_path(path).is_dir():
        return []
    try:
        return families(sorted(entry.name for entry in islice(as_path(path).iterdir(), MAX_FILES) if entry.is_file()))
    except OSError:
        return []


def meant(path: str) -> Family | None:
    """The family that the folder `path` is about: its only one, or the model's; None where that is not clear."""
    found = in_folder(path)
    own = found if len(found) == 1 else [family for family in found if family.is_model]
    return own[0] if len(own) == 1 else None


def beside(path: str) -> list[str]:
    """The files of all ranks that the file `path` belongs to, in order; itself alone where there are no others."""
    place = as_path(path)
    for family in in_folder(str(place.parent)):
        if place.name in family.files.values():
            return [str(place.parent / name) for _, name in sorted(family.files.items())]
    return [path]
