"""The files of a folder that form a sharded checkpoint, and the reader of one shard."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice

from ckptfix.checkpoint import Checkpoint, FileVersion
from ckptfix.dataclass import dataclass
from ckptfix.errors import Refused, not_readable
from ckptfix.formats.base import Format, unknown
from ckptfix.formats.shards.index import INDEX, OTHERS
from ckptfix.io.source import open_source
from ckptfix.urls import as_path, scan_folder
from ckptfix.words import some

HEAD = 4096

NAME, TORCH, SLICES = "hf", "hf-bin", "hf-dcp"

NUMBERED = re.compile(r"(.+)-(\d{5,6})-of-(\d{5,6})(\.[\w.-]*)?\.(safetensors|bin|pt|pth)")
"""``model-00001-of-00003.safetensors``; a variant of diffusers has ``.fp16`` before its suffix."""

RANK = re.compile(r"shard-(\d{5})-.+-(\d{5})-of-(\d{5})\.safetensors")
"""``shard-00001-model-00001-of-00002.safetensors``: the slices of one rank."""


@dataclass(frozen=True, slots=True)
class ShardFiles:
    """The files of a folder that form a sharded checkpoint, judged by their names.

    Attributes:
        folder: their folder.
        indexes: files with the name of an index.
        ranks: files of tensor slices, one or more for each rank.
        groups: (name, suffix, stated number of files) -> number -> file.
        doubles: files with the number of another file, written with a different count of zeros.
        wholes: files that, by their names, hold all of a model that is also here in shards.
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
        """Return all of these files."""
        numbered = (name for group in self.groups.values() for name in group.values())
        return (*self.indexes, *self.ranks, *numbered, *self.doubles, *self.wholes)

    def left_out(self, listed: Container[str]) -> list[str]:
        """Return the files of a numbered series that are not `listed`, if other files of the series are."""
        series = (group.values() for group in self.groups.values() if any(name in listed for name in group.values()))
        return [name for names in series for name in names if name not in listed]

    def refuse_several(self) -> None:
        """Refuse a folder of several checkpoints if the path names none of them.

        Raises:
            Refused: the message names them.
        """
        if len(self.indexes) > 1:
            names: Sequence[str] = self.indexes
            hint = "name the index of one of them"
            raise Refused(f"the folder has {len(names)} checkpoint indexes: {some(names)}", path=self.folder, hint=hint)
        if not self.indexes and not self.ranks and len(self.groups) > 1:
            names = [next(iter(files.values())) for files in self.groups.values()]
            hint = "move the shards of each checkpoint to a separate folder"
            raise Refused(
                f"the folder has shards of {len(names)} checkpoints: {some(names)}", path=self.folder, hint=hint
            )
        if self.indexes or self.ranks:
            return
        if self.doubles:
            names = [*self.doubles, *(name for group in self.groups.values() for name in group.values())]
            hint = "name one of the files, or move the shards of each checkpoint to a separate folder"
            raise Refused(f"the folder has shards of two checkpoints: {some(names)}", path=self.folder, hint=hint)
        for name, suffix, _ in self.groups:
            whole = f"{name}{suffix}"
            if whole in self.wholes:
                hint = f"name {as_path(self.folder, whole)}, or move it away to use the shards"
                message = (
                    f"the folder has two checkpoints: {whole}, and shards that no index lists ({self.names()[0]} ...)"
                )
                raise Refused(message, path=self.folder, hint=hint)


@cache
def file_formats() -> dict[str, Format]:
    """Return the formats of single files that a shard may have, by name."""
    from ckptfix.formats.safetensors import format as safetensors
    from ckptfix.formats.torch import legacy, zip

    return {format.name: format for format in (zip.FORMAT, legacy.FORMAT, safetensors.FORMAT)}


def format_of_shards(formats: Collection[str]) -> str:
    """Return the name of the format of shards whose files are in these formats."""
    return NAME if set(formats) == {"safetensors"} else TORCH


def find(folder: str) -> ShardFiles:
    """Find the files of a sharded checkpoint in `folder`, without opening them.

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
    return ShardFiles(folder, indexes, tuple(ranks), groups, tuple(doubles), wholes)


def _wholes(name: str, suffix: str) -> tuple[str, ...]:
    """Return the files that may hold the same model as the series ``name-00001-of-00002`` + `suffix`.

    They are ``model.safetensors`` and ``pytorch_model.bin`` for transformers.
    """
    variant, _, kind = suffix.rpartition(".")
    bare = name.removeprefix("pytorch_")
    other = f"{bare}{variant}.safetensors" if kind != "safetensors" else f"pytorch_{bare}{variant}.bin"
    return f"{name}{suffix}", other


def open_file(path: str) -> Checkpoint:
    """Read one shard: names, shapes and offsets.

    Raises:
        CkptfixError: it is not a checkpoint, or cannot be read.
    """
    with open_source(path) as source:
        head = source.read(0, min(HEAD, source.size))
        able = list(file_formats().values())
        scores = [format.score(path, head, source.size) for format in able]
        if not any(scores):
            raise unknown(path, head, source.size)
        checkpoint = able[scores.index(max(scores))].read(source.name)
        return replace(checkpoint, files=(FileVersion(source.name, source.mark),))


def missing_numbers(count: int, have: dict[int, str], name: str, suffix: str) -> list[str]:
    """Return the files that a numbered series lacks; only the first few if it lacks nearly all."""
    numbers = (number for number in range(1, count + 1) if number not in have)
    most = 3 if count > 10 * len(have) + 100 else count
    return [f"{name}-{number:05d}-of-{count:05d}{suffix}" for number in islice(numbers, most)]


def relative(path: str, folder: str) -> str:
    """Return `path` relative to `folder`."""
    return str(as_path(path).relative_to(folder))
