"""The files of one save as they were read: parameters, shapes, flat tensors of each rank, and other fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TypeVar

from ckptfix.checkpoint import FileVersion, TensorEntry
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, DamagedFile, NoSuchFile, UnknownFormat, Unsupported, about
from ckptfix.formats.deepspeed import Save, to_universal
from ckptfix.formats.folders.nodes import listed, number, numbered, open_torch, text_of
from ckptfix.formats.folders.safe_paths import file_inside
from ckptfix.formats.folders.steps import counted
from ckptfix.formats.torch.common import Storages
from ckptfix.formats.torch.state import fields
from ckptfix.formats.torch.tensors import BadTensor, is_tensor, sizes, tensor_entry
from ckptfix.formats.zero.partitions import Shape
from ckptfix.io.source import mark
from ckptfix.pickles import Call
from ckptfix.pickles.graph import Node, label, pairs
from ckptfix.urls import as_path

Made = TypeVar("Made")

FLAT = {"single_partition_of_fp32_groups": False, "fp32_flat_groups": True}
"""Key of a rank's fp32 weights -> whether it splits each parameter (stage 3), or the concatenation of all of them."""

MOST_RANKS = 1 << 16

MOST_GROUPS = 1 << 12
"""The limit of groups of options without a flat tensor: a group of frozen parameters may have no flat tensor."""


@dataclass(frozen=True, slots=True)
class ZeroRankFile:
    """A file of one rank as it was read.

    Attributes:
        root: its object; `top`: the fields of `root`.
        saved_as: as in `Opened`.
    """

    path: str
    mark: FileVersion
    root: Node
    top: Mapping[str, Node]
    storages: Storages
    saved_as: str = ""

    def tensor(self, node: Node, where: str) -> TensorEntry:
        """Return the tensor that `node` of this file describes.

        Raises:
            DamagedFile: it does not describe a contiguous dense tensor.
        """
        with about(self.path):
            if not is_tensor(node):
                raise DamagedFile("a tensor is expected here", where=where)
            entry = tensor_entry(node, where, "", self.storages)
            if entry.kind != "dense" or not entry.is_contiguous or entry.lazy:
                raise DamagedFile("the tensor is not contiguous", where=where)
            return entry


@dataclass(frozen=True, slots=True)
class Lost:
    """A rank whose file is missing or cannot be read, and the reason."""

    path: str
    why: str


@dataclass(slots=True)
class Optim:
    """The optimizer states of one rank.

    Attributes:
        flat: its fp32 weights, a tensor for each group.
        states: for each group, the optimizer state by key: tensors with as many elements, and other values.
        options: for each group of the optimizer, its options (the learning rate ...), and numbers of the groups above.
    """

    file: ZeroRankFile
    partitioned: bool
    ranks: int
    stage: int | None
    flat: list[TensorEntry] = field(default_factory=list)
    states: list[dict[str, Node]] = field(default_factory=list)
    options: list[Node] = field(default_factory=list)
    paddings: list[int] = field(default_factory=list)


def file_of(save: Save, name: str) -> str:
    """Return the path of one of the files of a save. Raises as `file_inside`."""
    return file_inside(save.folder, name, where=save.folder)


def attempt(save: Save, name: str | None, read: Callable[[str], Made], otherwise: str) -> Made | Lost:
    """Return the result of `read` for the file `name`, or the reason if the file is missing or damaged."""
    if name is None:
        return Lost(otherwise, "is missing")
    try:
        return read(file_of(save, name))
    except NoSuchFile as error:
        return Lost(error.path or otherwise, "is missing")
    except (DamagedFile, UnknownFormat) as error:
        if isinstance(error, DamagedFile) and error.path == save.folder:
            raise
        return Lost(str(as_path(save.folder, name)), f"cannot be read ({error.message})")


def read_file(path: str) -> ZeroRankFile:
    """Read the torch file at `path`. Raises as `open_torch`."""
    before = mark(path)
    with about(path):
        opened = open_torch(path)
        return ZeroRankFile(path, before, opened.root, fields(opened.root), opened.storages, opened.saved_as)


def read_optim(path: str) -> Optim:
    """Read the optimizer states at `path`.

    Raises:
        DamagedFile: ZeRO does not write such a file.
    """
    file = read_file(path)
    own = fields(file.top.get("optimizer_state_dict"))
    key = next((key for key in FLAT if key in own), None)
    if key is None:
        raise DamagedFile("it has no flat groups of fp32 weights", path=path, where="optimizer_state_dict")
    counts = own.get("partition_count")
    ranks = {number for number in (counts if isinstance(counts, list) else [counts]) if type(number) is int}
    if len(ranks) > 1:
        message = "its groups are partitioned over different numbers of ranks (expert parallelism)"
        raise Unsupported(message, path=path, hint=to_universal(str(as_path(path).parent)))
    if not ranks or not 0 < next(iter(ranks)) <= MOST_RANKS:
        raise DamagedFile("it does not state the number of ranks", path=path, where="partition_count")
    made = Optim(file, FLAT[key], ranks.pop(), stage_of(own.get("zero_stage")))
    for place, own_group in numbered(own.get("ds_zero_partition_groups")).items():
        if fields(own_group).get("partition_count", made.ranks) != made.ranks:
            message = f"group {place} is partitioned over a different number of ranks (expert parallelism)"
            raise Unsupported(message, path=path, hint=to_universal(str(as_path(path).parent)))
    groups = own[key]
    flat = listed(groups) if isinstance(groups, (list, tuple)) else [groups]
    made.flat = [file.tensor(node, f"{key}/{place}") for place, node in enumerate(flat)]
    base = own.get("optimizer_state_dict" if made.partitioned else "base_optimizer_state")
    states = numbered(base) if isinstance(base, list) else numbered(fields(base).get("state"))
    made.states = [fields(states.get(place)) for place in range(len(made.flat))]
    made.options = listed(fields(base).get("param_groups"))
    if len(made.options) > len(made.flat) + MOST_GROUPS:
        message = f"it has {len(made.options):,} groups of options, but {len(made.flat):,} flat groups of weights"
        raise DamagedFile(message, path=path, where="param_groups")
    made.paddings = [number for number in listed(own.get("group_paddings")) if type(number) is int]
    return made


def stage_of(node: Node) -> int | None:
    """Return the number of a ZeroStageEnum."""
    if type(node) is Call and node.arguments:
        node = node.arguments[0]
    return number(node)


@dataclass(slots=True)
class Model:
    """The model states of one rank, or of all ranks.

    Attributes:
        module: the rows of its state dict.
        groups: the parameters of each group of the optimizer, and their shapes.
        frozen: the parameters that are not trained, and their shapes; `fragments`: the values of them in this file.
        shared: name -> the parameter that it duplicates.
    """

    file: ZeroRankFile
    module: list[tuple[str, Node]] = field(default_factory=list)
    groups: list[dict[str, Shape]] = field(default_factory=list)
    frozen: dict[str, Shape] = field(default_factory=dict)
    fragments: dict[str, Node] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()

    @property
    def step(self) -> int | None:
        return number(self.file.top.get("global_steps"))

    @property
    def version(self) -> str | None:
        return text_of(self.file.top, "ds_version")


def read_model(path: str) -> Model:
    """Read the model states at `path`.

    Raises:
        DamagedFile: the file has no model states.
    """
    file = read_file(path)
    rows = pairs(file.top.get("module"))
    if rows is None:
        raise DamagedFile("it has no state dict of a module", path=path, where="module")
    made = Model(file, [(str(key), value) for key, value in rows if isinstance(key, str)])
    shapes = file.top.get("param_shapes")
    with about(path):
        made.groups = [_shapes(group) for group in ([shapes] if pairs(shapes) is not None else listed(shapes))]
        made.frozen = _shapes(file.top.get("frozen_param_shapes"))
    made.fragments = fields(file.top.get("frozen_param_fragments"))
    shared = fields(file.top.get("shared_params"))
    made.shared = {name: str(other) for name, other in shared.items() if isinstance(other, str)}
    made.buffers = frozenset(str(name) for name in listed(file.top.get("buffer_names")) if isinstance(name, str))
    names = [name for group in made.groups for name in group]
    if len(set(names)) != len(names):
        raise DamagedFile("a parameter is in two groups", path=path, where="param_shapes")
    return made


def _shapes(node: Node) -> dict[str, Shape]:
    found: dict[str, Shape] = {}
    for key, shape in pairs(node) or ():
        name = label(key)
        try:
            found[name] = sizes(shape)
        except BadTensor as error:
            raise DamagedFile(error.message, where=f"param_shapes/{name}") from None
    return found


def step_values(optim: Optim) -> list[float | None]:
    """Return the optimizer's step count of each group; reads an element of each tensor."""
    found: list[float | None] = []
    for place, state in enumerate(optim.states):
        node = state.get("step")
        try:
            found.append(counted(optim.file.tensor(node, f"state/{place}/step") if is_tensor(node) else node))
        except CkptfixError:
            found.append(None)
    return found
