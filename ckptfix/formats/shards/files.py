"""Which files of a folder are a sharded checkpoint, and one such file opened by its content."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ckptfix.checkpoint import Checkpoint, Mark
from ckptfix.errors import Refused, not_readable
from ckptfix.formats.base import Format, unknown
from ckptfix.formats.safetensors import format as safetensors
from ckptfix.formats.shards.index import INDEX, OTHERS
from ckptfix.formats.torch import legacy as torch_legacy
from ckptfix.formats.torch import zip as torch_zip
from ckptfix.io.source import open_source
from ckptfix.urls import as_path, scan_folder
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
        doubles: files whose number another file has, written with other zeros.
        wholes: files that hold all of a model that is here in shards too, by their names.
    """

    folder: str
    indexes: tuple[str, ...]
    ranks: tuple[str, ...]
    groups: dict[tuple[str, str, int], dict[int, str]]
    doubles: tuple[str, ...] = ()
    wholes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.indexes or self.ranks or self.groups)

    def names(self) -> tuple[str, ...]:
        """All of them."""
        numbered = (name for group in self.groups.values() for name in group.values())
        return (*self.indexes, *self.ranks, *numbered, *self.doubles, *self.wholes)

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
        if self.indexes or self.ranks:
            return
        if self.doubles:
            names = [*self.doubles, *(name for group in self.groups.values() for name in group.values())]
            hint = "name the file that is meant, or move the shards of each checkpoint to a folder of their own"
            raise Refused(f"shards of two checkpoints: {some(names)}", path=self.folder, hint=hint)
        for name, suffix, _ in self.groups:
            whole = f"{name}{suffix}"
            if whole in self.wholes:
                hint = f"name {as_path(self.folder, whole)}, or move it away to take the shards"
                message = f"two checkpoints: {whole}, and shards that no index lists ({self.names()[0]} ...)"
                raise Refused(message, path=self.folder, hint=hint)


def find(folder: str) -> Found:
    """What `folder` holds of a sharded checkpoint; its files are not opened.

    Raises:
        CkptfixError: the folder cannot be listed.
    """
    try:
        with scan_folder(folder) as rows:
            names = sorted(row.name for row in rows)
    except OSError as error:
        raise not_readable(error, folder) from None
    groups: dict[tuple[str, str, int], dict[int, str]] = {}
    ranks, doubles = [], []
    for name in names:
        if RANK.fullmatch(name):
            ranks.append(name)
        elif (match := NUMBERED.fullmatch(name)) is not None:
            suffix = f"{match[4] or ''}.{match[5]}"
            group = groups.setdefault((match[1], suffix, int(match[3])), {})
            if group.setdefault(int(match[2]), name) is not name:
                doubles.append(name)
    indexes = tuple(name for name in names if INDEX.search(name) and not OTHERS.search(name))
    wanted = {whole for name, suffix, _ in groups for whole in _wholes(name, suffix)}
    for name in indexes:
        stem, variant, _ = INDEX.split(name)
        stem, _, kind = stem.rpartition(".")
        wanted.update(_wholes(stem, f"{variant or ''}.{kind}"))
    wholes = tuple(name for name in names if name in wanted)
    return Found(folder, indexes, tuple(ranks), groups, tuple(doubles), wholes)


def _wholes(name: str, suffix: str) -> tuple[str, ...]:
    """The files that hold what the series ``name-00001-of-00002`` + `suffix` does, in its container and in the other.

    They are ``model.safetensors`` and ``pytorch_model.bin`` for transformers.
    """
    variant, _, kind = suffix.rpartition(".")
    bare = name.removeprefix("pytorch_")
    other = f"{bare}{variant}.safetensors" if kind != "safetensors" else f"pytorch_{bare}{variant}.bin"
    return f"{name}{suffix}", other


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
    return str(as_path(path).relative_to(folder))
