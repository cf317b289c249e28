"""Families of files that belong to the ranks of one job, recognized by their names.

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
from dataclasses import field
from itertools import islice

from ckptfix.dataclass import dataclass
from ckptfix.formats.members import role_of
from ckptfix.io.source import is_folder
from ckptfix.urls import as_path

_RANK = re.compile(r"(?P<head>.*?(?:^|[._-]))(?P<word>rank[._-]?)(?P<rank>\d{1,6})(?P<tail>[._-].*)?", re.IGNORECASE)
_WORLD = re.compile(r"world[._-]?size[._-]?(\d{1,6})", re.IGNORECASE)
_OF_OTHERS = re.compile(r"zero_pp_rank_|_optim_states\.pt|_model_states\.pt")
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
MAX_FILES = 200_000


@dataclass(slots=True)
class RankFamily:
    """Files whose names differ only in the rank.

    Attributes:
        pattern: the name, with a ``*`` for the rank.
        files: rank -> file name.
        world: the number of ranks, if the names state it.
    """

    pattern: str
    files: dict[int, str] = field(default_factory=dict)
    world: int | None = None

    @property
    def is_model(self) -> bool:
        """True if its files hold the model, not the other things that a trainer saves for each rank."""
        role = role_of(self.pattern.replace("*", "0"))
        if role != "other":
            return role == "model"
        return re.search(r"model|fsdp|weights|state_dict", self.pattern) is not None and not re.search(
            r"optim|extra|sched|rng|scaler|data", self.pattern
        )


def rank_of(name: str) -> int | None:
    """Return the rank that a file's name states; None if it states none."""
    found = None if _OF_OTHERS.search(name) else _RANK.fullmatch(name)
    return None if found is None else int(found["rank"])


def families(names: Iterable[str]) -> list[RankFamily]:
    """Return the families among these file names; each has files of at least two ranks."""
    found: dict[str, RankFamily] = {}
    for name in names:
        match = _RANK.fullmatch(name)
        if match is None or _OF_OTHERS.search(name) or not name.lower().endswith(SUFFIXES):
            continue
        pattern = f"{match['head']}{match['word']}*{match['tail'] or ''}"
        world = _WORLD.search(pattern)
        family = found.setdefault(pattern, RankFamily(pattern, world=None if world is None else int(world[1])))
        if int(match["rank"]) in family.files:
            # rank1 and rank01: it is unclear which one counts.
            family.files.clear()
            family.world = 0
        elif family.world != 0:
            family.files[int(match["rank"])] = name
    return [family for family in found.values() if len(family.files) > 1]


def in_folder(path: str) -> list[RankFamily]:
    """Return the families in the folder `path`."""
    if not is_folder(path):
        return []
    try:
        return families(sorted(entry.name for entry in islice(as_path(path).iterdir(), MAX_FILES) if entry.is_file()))
    except OSError:
        return []


def meant(path: str) -> RankFamily | None:
    """Return the family that the folder `path` stands for: its only one, or the model's; None if that is ambiguous."""
    found = in_folder(path)
    own = found if len(found) == 1 else [family for family in found if family.is_model]
    return own[0] if len(own) == 1 else None


def beside(path: str) -> list[str]:
    """Return the files of all ranks that belong with the file `path`, in order; only `path` if there are no others."""
    place = as_path(path)
    for family in in_folder(str(place.parent)):
        if place.name in family.files.values():
            return [str(place.parent / name) for _, name in sorted(family.files.items())]
    return [path]
