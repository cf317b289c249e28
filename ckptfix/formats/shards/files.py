"""Which files of a folder are a sharded checkpoint, and one such file opened by its content."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from ckptfix.checkpoint import Checkpoint, Mark
from ckptfix.errors import Refused, not_readable
from ckptfix.formats.base import Format, unknown
from ckptfix.formats.safetensors import format as safetensors
from ckptfix.formats.shards.index import INDEX, OTHERS
from ckptfix.formats.torch import legacy as torch_legacy
from ckptfix.formats.torch import zip as torch_zip
from ckptfix.io.source import open_source
from ckptfix.words import some

HEAD = 4096

FILES: dict[str, Format] = {
    format.name: format for format in (torch_zip.FORMAT, torch_legacy.FORMAT, safetensors.FORMAT)
}
"""The formats of single files that a shard may have."""

NUMBERED = re.compile(r"(.+)-(\d{5,6})-of-(\d{5,6})(\.[\w.-]*)?\.(safetensors|bin|pt|pth)")
"""``model-00001-of-00003.safetensors``; a variant of diffusers has ``.fp16`` before its suffix."""

RANK = re.compile(r"shard-(\d{5})-.+-(\d{5})-of-(\d{5})\.safetensors")
"""``shard-00001-model-00001-of-00002.safetensors``: the slices of one rank."""


@dataclass(frozen=True, slots=True)
class Found:
    """The files of a folder that are a sharded checkpoint, by name.

    Attributes:
        folder: where they are.
        indexes: what is called like an index.
        ranks: files of slices of tensors, a file or more for each rank.
        groups: (name, suffix, how many there should be) -> number -> file.
    """

    folder: str
    indexes: tuple[str, ...]
    ranks: tuple[str, ...]
    groups: dict[tuple[str, str, int], dict[int, str]]

    def __bool__(self) -> bool:
        return bool(self.indexes or self.ranks or self.groups)

    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.indexes, *self.ranks, *(name for group in self.groups.values() for name in group.values()))

    def left_out(self, listed: Container[str]) -> list[str]:
        """The files of a numbered series of which only some are `listed`."""
        series = (group.values() for group in self.groups.values() if any(name in listed for name in group.values()))
        return [name for names in series for name in names if name not in listed]

    def refuse_several(self) -> None:
        """Refuse a folder of several checkpoints, of which none is named.

        Raises:
            Refused: the message names them.
        """
        if len(self.indexes) > 1:
            names: Sequence[str] = self.indexes
            hint = "name the index of the one that is meant"
            raise Refused(f"{len(names)} indexes of checkpoints: {some(names)}", path=self.folder, hint=hint)
        if not self.indexes and not self.ranks and len(self.groups) > 1:
            names = [next(iter(files.values())) for files in self.groups.values()]
            hint = "move the shards of each to a folder of their own"
            raise Refused(f"shards of {len(names)} checkpoints: {some(names)}", path=self.folder, hint=hint)


def find(folder: str) -> Found:
    """What `folder` holds of a sharded checkpoint; its files are not opened.

    Raises:
        CkptfixError: the folder cannot be listed.
    """
    try:
        with os.scandir(folder) as rows:
            names = sorted(row.name for row in rows)
    except OSError as error:
        raise not_readable(error, folder) from None
    groups: dict[tuple[str, str, int], dict[int, str]] = {}
    ranks = []
    for name in names:
        if RANK.fullmatch(name):
            ranks.append(name)
        elif (match := NUMBERED.fullmatch(name)) is not None:
            suffix = f"{match[4] or ''}.{match[5]}"
            groups.setdefault((match[1], suffix, int(match[3])), {})[int(match[2])] = name
    indexes = tuple(name for name in names if INDEX.search(name) and not OTHERS.search(name))
    return Found(folder, indexes, tuple(ranks), groups)


def open_file(path: str) -> Checkpoint:
    """One shard: names, shapes and places.

    Raises:
        CkptfixError: it is no checkpoint, or cannot be read.
    """
    with open_source(path) as source:
        head = source.read(0, min(HEAD, source.size))
        scores = [format.score(path, head, source.size) for format in FILES.values()]
        if not any(scores):
            raise unknown(path, head, source.size)
        checkpoint = list(FILES.values())[scores.index(max(scores))].read(source.name)
        return replace(checkpoint, files=(Mark(source.name, source.mark),))


def missing_numbers(count: int, have: dict[int, str], name: str, suffix: str) -> list[str]:
    """The files that a numbered series lacks; of a series that lacks nearly all, the first ones."""
    numbers = (number for number in range(1, count + 1) if number not in have)
    most = 3 if count > 10 * len(have) + 100 else count
    return [f"{name}-{number:05d}-of-{count:05d}{suffix}" for number in islice(numbers, most)]


def relative(path: str, folder: str) -> str:
    """How the files of `folder` call `path`."""
    return str(Path(path).relative_to(folder))
