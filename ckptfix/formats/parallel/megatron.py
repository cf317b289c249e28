"""Megatron-LM's classic checkpoints: a file for each rank of tensor, pipeline and expert parallelism.

::

    {"args": argparse.Namespace, "checkpoint_version": 3.0, "iteration": 500, "model": {...}, "optimizer": {...}, ...}
    {..., "model0": {...}, "model1": {...}}      with a virtual pipeline: each rank has several chunks of the layers

In a file, the layers of a chunk and the experts of a rank count from 0. Chunk 0 of all stages comes first, then chunk 1
of all stages (tools/checkpoint/loader_base.py). A rank's name has a number for each kind of parallelism that has more
than one rank, and only `args` says which: ``mp_rank_00_001`` is a stage, or a group of experts.

`args` is an object of any class. Its plain fields are read as text, and nothing of it is called or imported.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace
from itertools import groupby, product

from ckptfix.checkpoint import Checkpoint
from ckptfix.dataclass import dataclass
from ckptfix.errors import DamagedFile, Refused, UnknownFormat, Unsupported
from ckptfix.findings.table import found
from ckptfix.formats.base import AS_THE_FILES_SAY, JoinOptions
from ckptfix.formats.folders.assembly import mapping
from ckptfix.formats.members import NEMO_JOINS
from ckptfix.formats.parallel import nemo
from ckptfix.formats.parallel.cuts import Shape
from ckptfix.formats.parallel.files import (
    FoundFiles,
    RankPart,
    json_settings,
    open_part,
    plain,
    same_values,
    settings_of,
)
from ckptfix.formats.parallel.model import JoinedModel, assembled
from ckptfix.formats.parallel.tables import MEGATRON, PACKED_HINT
from ckptfix.formats.torch.state import fields
from ckptfix.pickles.graph import Node
from ckptfix.urls import as_path
from ckptfix.words import plural

NAME = "megatron"

LAYER = re.compile(r"(.*?\blayers\.)(\d+)(\..+)")
EXPERT = re.compile(r"(.*\bexperts\.)(?:(local_experts\.)(\d+)(\..+)|(linear_fc[12]\.(?:weight|bias))(\d+))")
PACKED = re.compile(r"(?:.*\.)?experts\.(?!.*_extra_state$).+")
WORDS = re.compile(r"(?:.*\.)?word_embeddings\.weight")
HEAD_COPY = re.compile(r"(?:.*\.)?word_embeddings_for_head\.weight|model\.word_embeddings\.weight")
"""The copy of the embeddings in the last stage, with the name in NeMo (modules/common/megatron/module.py) last."""
OUTPUT = re.compile(r"(?:.*\.)?output_layer\.weight")
_CHUNK = re.compile(r"model(\d*)")

SAME = (
    *("tensor_model_parallel_size", "model_parallel_size", "pipeline_model_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("num_experts", "padded_vocab_size", "swiglu", "untie_embeddings_and_output_weights", "q_lora_rank"),
)
"""Arguments that all ranks of a job have in common; others, such as its rank, differ."""

MOST_RANKS = 1 << 15

Place = tuple[int, int, int]
"""The ranks of a file: of tensor, pipeline and expert parallelism."""


@dataclass(frozen=True, slots=True)
class MegatronSizes:
    """The numbers of ranks that the arguments state."""

    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int
    virtual: int

    @classmethod
    def of(cls, args: Mapping[str, object], chunks: int, path: str, stated_in: str = "args") -> MegatronSizes:
        """Return the sizes in `args`, which `stated_in` has.

        Raises:
            DamagedFile: a number is missing, or beyond any job.
        """

        def size(*names: str, default: int | None = 1) -> int:
            value = next((args[name] for name in names if args.get(name) is not None), default)
            if type(value) is not int or not 0 < value <= MOST_RANKS:
                message = f"no {names[0]} is in its {stated_in}, so the number of files is unknown"
                raise DamagedFile(message, path=path)
            return value

        tensor = size("tensor_model_parallel_size", "model_parallel_size", default=None)
        made = cls(
            tensor,
            size("pipeline_model_parallel_size"),
            size("expert_model_parallel_size"),
            size("expert_tensor_parallel_size", default=tensor),
            max(chunks, size("virtual_pipeline_model_parallel_size")),
        )
        if made.tensor * made.pipeline * made.expert > MOST_RANKS:
            raise DamagedFile("its args state more ranks than any job has", path=path)
        if made.expert_tensor not in (1, made.tensor):
            message = f"its experts are cut into {made.expert_tensor} parts, and the other tensors into {made.tensor}"
            raise Unsupported(message, path=path, hint="save with --ckpt-format torch_dist, and convert its folder")
        return made

    def place(self, numbers: tuple[int, ...], path: str) -> Place:
        """Return the ranks that the numbers in the name of a folder are."""
        ways = [self.tensor, *(size for size in (self.pipeline, self.expert) if size > 1)]
        if len(numbers) != len(ways) or any(own >= size for own, size in zip(numbers, ways, strict=True)):
            stated = f"tensor {self.tensor}, pipeline {self.pipeline}, expert {self.expert}"
            message = f"its name does not fit the parallel sizes in the args of the first file: {stated}"
            raise DamagedFile(message, path=path)
        rest = list(numbers[1:])
        pipeline = rest.pop(0) if self.pipeline > 1 else 0
        return numbers[0], pipeline, rest.pop(0) if self.expert > 1 else 0

    def folder(self, place: Place) -> str:
        """Return the name of the folder of a rank (get_checkpoint_name)."""
        name = f"mp_rank_{place[0]:02d}"
        name += f"_{place[1]:03d}" if self.pipeline > 1 else ""
        return name + (f"_{place[2]:03d}" if self.expert > 1 else "")

    def expected(self) -> Iterator[Place]:
        """Yield the ranks of all files that a save writes."""
        for tensor, pipeline, expert in product(range(self.tensor), range(self.pipeline), range(self.expert)):
            # Where the experts are not cut, ranks that follow each other have different groups of experts.
            if self.expert_tensor == self.tensor or (tensor - expert) % math.gcd(self.tensor, self.expert) == 0:
                yield tensor, pipeline, expert


@dataclass(frozen=True, slots=True)
class SaveLayout:
    """The layout of a library for the files of ranks of a model that Megatron-LM cut.

    Attributes:
        holder: the key of the state dict in the joined object; ``""`` if the object is the state dict.
        settings: the arguments that state the sizes: of these files, and the first one of them that can be read.
        stated_in: the name of what has them.
        chunks: the keys of the model in a file.
        version: the checkpoint version, which says how queries, keys and values are ordered.
        folder: the name of the folder of a rank.
        joins: what joins files that are not joined here; None if nothing is known.
    """

    name: str
    holder: str
    settings: Callable[[FoundFiles, RankPart], dict[str, object]]
    stated_in: str
    chunks: Callable[[RankPart], list[str]]
    version: Callable[[Mapping[str, object], RankPart], object]
    folder: Callable[[MegatronSizes, Place], str]
    joins: str | None = None


@dataclass(slots=True)
class _Save:
    """The files of one save, by their ranks."""

    layout: SaveLayout
    sizes: MegatronSizes
    args: dict[str, object]
    model: JoinedModel
    files: dict[Place, RankPart] = field(default_factory=dict)
    lost: dict[Place, str] = field(default_factory=dict)

    @property
    def first(self) -> RankPart:
        return self.files[min(self.files)]

    def settings(self, part: RankPart) -> dict[str, object]:
        """Return the arguments, and the version of the file of a rank."""
        return {**self.args, "checkpoint_version": self.layout.version(self.args, part)}

    def folder(self, place: Place) -> str:
        """Return the name of the folder of a rank."""
        return self.layout.folder(self.sizes, place)


def read(
    path: str, files: FoundFiles, options: JoinOptions = AS_THE_FILES_SAY, layout: SaveLayout | None = None
) -> Checkpoint:
    """Read the files of all ranks as one checkpoint; a missing file, or one of another step, is a finding.

    Raises:
        DamagedFile: the files do not belong together, or nothing says how the model was cut.
    """
    save = _opened(path, files, options, layout or LAYOUT)
    _judge(save)
    _join(save)
    save.model.cut_vocabulary(save.settings(save.first), json_settings(path, "config.json"))
    save.model.finish()
    beside = _beside(save, files)
    sizes = save.sizes
    traits: dict[str, object] = {
        "tensor parallel": sizes.tensor,
        "pipeline parallel": sizes.pipeline,
        "expert parallel": sizes.expert,
        "files": len(save.files),
    }
    marks = tuple({part.mark.path: part.mark for part in save.files.values()}.values())
    layout = save.layout
    return assembled(save.model, layout.holder, beside, format=layout.name, files=marks, traits=traits)


def _opened(path: str, files: FoundFiles, options: JoinOptions, layout: SaveLayout) -> _Save:
    parts: dict[tuple[int, ...], RankPart] = {}
    why: dict[tuple[int, ...], str] = {}
    for numbers, name in sorted(files.paths.items()):
        try:
            parts[numbers] = open_part(name)
        except (DamagedFile, UnknownFormat) as error:
            why[numbers] = f"cannot be read ({error.message})"
    if not parts:
        raise DamagedFile("none of the files of its ranks can be read", path=path)
    first = parts[min(parts)]
    args = layout.settings(files, first)
    if not args:
        raise DamagedFile(f"it has no {layout.stated_in}, so nothing says how the model was cut",
                          path=first.path if layout.holder else path)  # fmt: skip
    sizes = MegatronSizes.of(args, len(layout.chunks(first)), first.path, layout.stated_in)
    save = _Save(layout, sizes, args, JoinedModel(path, MEGATRON, options))
    for numbers, part in parts.items():
        save.files[sizes.place(numbers, part.path)] = part
    reasons = {sizes.place(numbers, files.paths[numbers]): reason for numbers, reason in why.items()}
    for place in sizes.expected():
        if place not in save.files:
            save.lost[place] = str(as_path(files.folder, save.folder(place)))
            reason = reasons.get(place, "is missing")
            held = "" if sizes.pipeline == 1 else f", and holds the layers of stage {place[1]} of {sizes.pipeline}"
            message = f"rank {save.folder(place)} {reason}; it is one part of {len(list(sizes.expected()))}{held}"
            save.model.findings.append(found("missing-rank", message, where=save.lost[place]))
    return save


def _chunks(part: RankPart) -> list[str]:
    """Return the keys of the model in a file: ``model``, or ``model0``, ``model1`` and so on."""
    numbered = sorted((int(match[1] or -1), key) for key in part.top if (match := _CHUNK.fullmatch(key)) is not None)
    return [key for _, key in numbered]


def _judge(save: _Save) -> None:
    """Report files of a different step, or with different arguments, than most of the others."""
    parts = save.files.values()
    steps = {part.path: plain(part.top.get("iteration")) for part in parts}
    args = {part.path: settings_of(part.top.get("args")) for part in parts}
    counted = Counter(map(repr, steps.values()))
    usual = max(counted, key=lambda step: counted[step])
    common = {name: Counter(repr(own.get(name)) for own in args.values()).most_common(1)[0][0] for name in SAME}
    ranks = {part.path: settings_of(part.top.get("args")).get("rank") for part in parts}
    apart = len(set(map(repr, ranks.values()))) == len(ranks) and all(type(rank) is int for rank in ranks.values())
    for place, part in save.files.items() if apart else ():
        rank = ranks[part.path]
        # Ranks of tensor parallelism follow each other (megatron/core/parallel_state.py, RankGenerator).
        if type(rank) is int and rank % save.sizes.tensor != place[0]:
            name = as_path(part.path).parent.name
            message = f"{name}: rank {rank} saved it, whose tensor rank is {rank % save.sizes.tensor}"
            save.model.findings.append(found("other-save", message, where=part.path))
    for path, own in args.items():
        name = as_path(path).parent.name
        if repr(steps[path]) != usual:
            message = f"{name}: its iteration is {steps[path]}, and that of the other ranks is {usual}"
            save.model.findings.append(found("other-save", message, where=path))
            continue
        odd = next((key for key in SAME if repr(own.get(key)) != common[key]), None)
        if odd is not None:
            message = f"{name}: {odd} in its args is {own.get(odd)!r}, and {common[odd]} in those of the other ranks"
            save.model.findings.append(found("other-save", message, where=path))


@dataclass(slots=True)
class _Layers:
    """The layers so far: prefix of their names, such as ``decoder.layers.`` -> their number."""

    before: dict[str, int] = field(default_factory=dict)
    inside: dict[str, int] = field(default_factory=dict)

    def named(self, name: str) -> str:
        """Return the name in the whole model of a tensor of a layer."""
        found = LAYER.fullmatch(name)
        if found is None:
            return name
        prefix, number, rest = found.groups()
        self.inside[prefix] = max(self.inside.get(prefix, 0), int(number) + 1)
        return f"{prefix}{self.before.get(prefix, 0) + int(number)}{rest}"

    def end_chunk(self) -> None:
        for prefix, count in self.inside.items():
            self.before[prefix] = self.before.get(prefix, 0) + count
        self.inside.clear()


def _join(save: _Save) -> None:
    layers = _Layers()
    sizes = save.sizes
    for chunk in range(sizes.virtual):
        for stage in range(sizes.pipeline):
            own = {place: part for place, part in save.files.items() if place[1] == stage}
            if own:
                _join_chunk(save, own, chunk, layers)
            layers.end_chunk()
    stated = save.args.get("num_layers")
    main = [count for prefix, count in layers.before.items() if not prefix.startswith("mtp.")]
    if type(stated) is int and main and stated not in main and not save.lost:
        message = f"its files have {max(main)} layers, and num_layers in its args is {stated}"
        raise DamagedFile(message, path=save.model.path)


def _join_chunk(save: _Save, own: Mapping[Place, RankPart], chunk: int, layers: _Layers) -> None:
    """Add the tensors of a chunk of the layers of one pipeline stage."""
    named: dict[Place, dict[str, str]] = {}
    for place, part in own.items():
        keys = save.layout.chunks(part)
        if chunk >= len(keys):
            size = f"virtual_pipeline_model_parallel_size in {save.layout.stated_in} is {save.sizes.virtual}"
            message = f"{size}, and it has {plural(len(keys), 'chunk')} of the model"
            raise DamagedFile(message, path=part.path, hint=save.layout.joins)
        named[place] = part.named(keys[chunk])
        _leave_values(save, part, keys[chunk])
    by_group: dict[int, dict[int, Place]] = {}
    for place in sorted(named):
        by_group.setdefault(place[2], {})[place[0]] = place
    least = by_group[min(by_group)]
    names = named[least[min(least)]]
    count = _local_experts(save, names)
    for is_expert, group in groupby(names, _expert_layer):
        rows = list(group)
        if is_expert is None:
            for name in rows:
                _refuse_packed(save, name)
                _add(save, own, named, name, name, layers)
            continue
        for expert, places in by_group.items():
            there = {place: own[place] for place in places.values()}
            for name in rows:
                _add(save, there, named, name, _global_expert(name, expert * count), layers, is_expert=True)
    _refuse_others(own, named, names)


def _refuse_packed(save: _Save, name: str) -> None:
    """Refuse a tensor of several experts together: each group of experts has other ones under the same name."""
    if save.sizes.expert > 1 and PACKED.fullmatch(name) is not None:
        message = f"each of {save.sizes.expert} groups of experts has other experts in it, and they cannot be joined"
        raise Refused(message, path=save.first.path, where=name, hint=PACKED_HINT)


def _expert_layer(name: str) -> str | None:
    """Return the prefix of an expert's tensor, ``decoder.layers.0.mlp.experts.``; None for other tensors."""
    found = EXPERT.fullmatch(name)
    return None if found is None else found[1]


def _global_expert(name: str, offset: int) -> str:
    found = EXPERT.fullmatch(name)
    assert found is not None
    if found[2]:
        return f"{found[1]}{found[2]}{offset + int(found[3])}{found[4]}"
    return f"{found[1]}{found[5]}{offset + int(found[6])}"


def _local_experts(save: _Save, names: Mapping[str, str]) -> int:
    """Return the number of experts of a rank."""
    found = [int(match[3] or match[6]) for name in names if (match := EXPERT.fullmatch(name)) is not None]
    own = max(found, default=-1) + 1
    stated = save.args.get("num_experts")
    if own and type(stated) is int and stated != own * save.sizes.expert:
        message = f"a rank has {own} experts, and args state {stated} on {save.sizes.expert} ranks"
        raise DamagedFile(message, path=save.first.path)
    return own


def _add(
    save: _Save,
    own: Mapping[Place, RankPart],
    named: Mapping[Place, Mapping[str, str]],
    name: str,
    renamed: str,
    layers: _Layers,
    *,
    is_expert: bool = False,
) -> None:
    """Add one tensor: the copies of other groups of experts are compared, and the parts of tensor ranks joined."""
    if name.endswith("._extra_state") or name == "_extra_state":
        layers.named(name)
        return
    ranks = save.sizes.expert_tensor if is_expert else save.sizes.tensor
    copies: dict[int, list[tuple[str, RankPart]]] = {}
    for place, part in sorted(own.items()):
        address = named[place].get(name)
        if address is None:
            raise DamagedFile(f"it lacks {name}, which other ranks have", path=part.path)
        copies.setdefault(place[0] if ranks > 1 else 0, []).append((address, part))
    place = min(own)
    shapes: Mapping[str, Shape] = _Shapes(own[place], named[place])
    context = save.model.context(shapes, ranks, save.settings(own[place]))
    whole = layers.named(renamed)
    if _is_copy(save, whole):
        kept = next((other for other in save.model.tensors if WORDS.fullmatch(other)), None)
        if kept is not None:
            whole = kept
    parts = {}
    for rank, rows in copies.items():
        entries = [(part.entry(address), part.path) for address, part in rows]
        parts[rank] = entries[0]
        if not all(same_values(entries[0][0], other) for other, _ in entries[1:]):
            save.model.unequal.append(whole)
    gone = {lost[0]: path for lost, path in save.lost.items() if lost[1] == place[1] and lost[0] not in parts}
    save.model.add(whole, name, parts, context, gone if ranks > 1 else {})


def _is_copy(save: _Save, name: str) -> bool:
    """Return whether a tensor of the last stage is a copy of the embeddings in the first, to which it is tied."""
    if HEAD_COPY.fullmatch(name):
        return True
    tied = save.args.get("untie_embeddings_and_output_weights") is False
    return tied and OUTPUT.fullmatch(name) is not None and save.sizes.pipeline * save.sizes.virtual > 1


class _Shapes(Mapping[str, Shape]):
    """The shapes of a rank's tensors, each read when it is asked for."""

    def __init__(self, part: RankPart, named: Mapping[str, str]) -> None:
        self._part = part
        self._named = named

    def __getitem__(self, name: str) -> Shape:
        return self._part.entry(self._named[name]).shape

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)


def _refuse_others(
    own: Mapping[Place, RankPart], named: Mapping[Place, Mapping[str, str]], names: Mapping[str, str]
) -> None:
    """Refuse a file with tensors that the other files of its stage do not have."""
    for place, part in own.items():
        more = [name for name in named[place] if name not in names]
        if more:
            raise DamagedFile(f"it has {more[0]}, which other ranks do not have", path=part.path)


def _leave_values(save: _Save, part: RankPart, key: str) -> None:
    """Report the state of modules of Transformer Engine, which differs between ranks and is not a weight."""
    beside = fields(part.top.get(key)) if key else part.top
    if any(str(name).endswith("_extra_state") for name in (*part.named(key), *beside)):
        where = "model/*._extra_state" if key else "*._extra_state"
        if not any(row.where == where for row in save.model.findings):
            save.model.leave(where, "the fp8 state of each rank's modules is not joined")


def _args(files: FoundFiles, first: RankPart) -> dict[str, object]:
    return settings_of(first.top.get("args"))


def _version(args: Mapping[str, object], part: RankPart) -> object:
    return plain(part.top.get("checkpoint_version")) or 0


LAYOUT = SaveLayout(NAME, "model", _args, "args", _chunks, _version, MegatronSizes.folder)


def _nemo_folder(sizes: MegatronSizes, place: Place) -> str:
    tensor, pipeline, _ = place
    return f"tp_rank_{tensor:02d}_pp_rank_{pipeline:03d}" if sizes.pipeline > 1 else f"mp_rank_{tensor:02d}"


NEMO_LAYOUT = SaveLayout(
    nemo.NAME,
    "",
    lambda files, first: nemo.arguments(nemo.configuration(files.folder)),
    nemo.CONFIG,
    lambda part: [""],
    lambda args, part: nemo.version(args),
    _nemo_folder,
    NEMO_JOINS,
)
NEMO_ARCHIVE_LAYOUT = replace(NEMO_LAYOUT, name=nemo.ARCHIVE_NAME)

_WEIGHTS = ("args", "checkpoint_version", "iteration")


def _beside(save: _Save, files: FoundFiles) -> dict[str, Node]:
    """Return the plain settings that the joined object keeps, and report everything else."""
    first = save.first
    if not save.layout.holder:
        own = first.named("")
        for name in first.top:
            if name not in own and not name.endswith("_extra_state"):
                save.model.leave(name, "it is not a tensor of the model")
        return {}
    kept: dict[str, Node] = {"args": mapping({name: _node(value) for name, value in save.args.items()})}
    for name in fields(first.top.get("args")):
        if name not in save.args:
            save.model.leave(f"args/{name}", "it is an object, and not a plain value")
    for name, value in first.top.items():
        if name in ("iteration", "checkpoint_version") and plain(value) is not None:
            kept[name] = _node(plain(value))
        elif name not in _WEIGHTS and _CHUNK.fullmatch(name) is None:
            save.model.leave(name, "it is the state of the training, which differs between ranks")
    for path in dict.fromkeys(as_path(path).name for path in files.beside):
        save.model.leave(path, "it is the state of the optimizer, which is divided among the ranks")
    return kept


def _node(value: object) -> Node:
    if isinstance(value, list):
        return [_node(item) for item in value]
    return value  # type: ignore[return-value]

