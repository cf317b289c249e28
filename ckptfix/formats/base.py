"""The contract of a format: what its files can state, and the functions that read, judge and plan them.

A format's module ends with one `Format`; tests/contract runs the same suite over all of them. Code outside this package
never compares format names: it asks what a format states, or calls its functions (tests/unit/test_layers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from ckptfix.checkpoint import Checkpoint, Edit, OutputFile, Plan, TensorEntry
from ckptfix.dataclass import dataclass
from ckptfix.errors import StrPath, Truncated, UnknownFormat
from ckptfix.findings.row import Finding
from ckptfix.io.source import truncated_hint

if TYPE_CHECKING:
    from ckptfix.formats.repairs import Repair, RepairTools

Aspect = Literal[
    "device", "requires_grad", "parameter", "stride", "detail", "sharing", "objects", "order", "metadata", "checksums",
]  # fmt: skip
"""Properties that a file may state besides names, dtypes, shapes and bytes; see `Format.states`."""

OF_OBJECTS: frozenset[Aspect] = frozenset(
    {"device", "requires_grad", "parameter", "stride", "detail", "sharing", "objects", "order"}
)
"""Properties that a pickled torch object states."""

TORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".tar")
"""Suffixes of torch files in any of its formats; none belongs to one format alone. ``.tar`` covers ``.pth.tar`` (the
ImageNet example) and other names.
"""

SAFETENSORS_SUFFIXES = (".safetensors",)

PACKED = frozenset(("compressed", "zip-in-zip", "tar-archive"))
"""Kinds of unknown files that may be a checkpoint inside something else (`UnknownFormat.kind`)."""

Shared = tuple[tuple[TensorEntry, ...], dict[str, str], tuple[Finding, ...]]
"""The tensors to write, metadata pairs from which `Format.weights` restores the rest, and findings."""


class PlanWrite(Protocol):
    """The type of `Format.plan_write`."""

    def __call__(
        self, entries: Sequence[TensorEntry], dest: str, *, metadata: Mapping[str, str] | None = None
    ) -> Plan: ...


PlanLike = Callable[[Checkpoint, Sequence[TensorEntry], str, Mapping[str, str]], Plan]
"""The type of `Format.plan_like`."""


PlanRows = Callable[[Checkpoint, Sequence[tuple[str, TensorEntry]], str, Mapping[str, str]], Plan]
"""The type of `Format.plan_rows`."""


class WeightsOf(Protocol):
    """The type of `Format.weights`."""

    def __call__(
        self, checkpoint: Checkpoint, at: str | None = None, *, views: bool = True
    ) -> tuple[TensorEntry, ...]: ...


def plain_weights(checkpoint: Checkpoint, at: str | None = None, *, views: bool = True) -> tuple[TensorEntry, ...]:
    """Return the tensors as they are: the `Format.weights` of a format whose entries already share storages."""
    return tuple(entry for entry in checkpoint.entries if at is None or entry.at == at)


def no_ties(checkpoint: Checkpoint) -> Mapping[str, str]:
    """Return no ties: the `Format.ties` of a format that records no tied names besides its entries."""
    return {}


def as_they_are(entries: Sequence[TensorEntry]) -> Shared:
    """Return the tensors unchanged: the `Format.split_ties` of a format whose tensors can share storages."""
    return tuple(entries), {}, ()


def nothing(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield no finding: the `Format.notes` of a format without general remarks."""
    return iter(())


def nothing_beside(checkpoint: Checkpoint, dest: str) -> tuple[OutputFile, ...]:
    """Return no files: the `Format.companions` of a format of single files."""
    return ()


@dataclass(frozen=True, slots=True)
class SelectedWeights:
    """The part of a checkpoint that `convert` writes, when the checkpoint holds its weights in several forms.

    Attributes:
        checkpoint: a checkpoint whose object is what the output holds.
        at: the address of that object in the whole object; None for several.
        left: addresses of the parts that are left out.
    """

    checkpoint: Checkpoint
    at: str | None
    left: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """The statements of a user about a model that was cut into the files of ranks.

    Attributes:
        dims: names or globs of tensors -> a dimension, ``DIM/N`` for N matrices stacked along it, or ``copy``.
        vocab_size: the number of rows of the embeddings to keep, or where it is stated: ``"args"`` or ``"config"``.
    """

    dims: Mapping[str, object] = field(default_factory=dict)
    vocab_size: int | str | None = None


AS_THE_FILES_SAY = JoinOptions()


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """The numbers of ranks that a model is cut for: by tensors, by layers and by experts; see `Format.parallel`."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    dims: Mapping[str, object] = field(default_factory=dict)


InPlace = Callable[[Checkpoint, Plan, Callable[[], int]], Plan]
"""The type of `Format.in_place`."""

ByFile = Callable[[Checkpoint, Callable[[Checkpoint, str], Plan], str], Plan]
"""The type of `Format.edits_each_file`."""


class Planned(Protocol):
    """The result of a command for one file."""

    @property
    def plan(self) -> Plan: ...


Made = TypeVar("Made", bound=Planned)


def file_by_file(
    by_file: ByFile, checkpoint: Checkpoint, make: Callable[[Checkpoint, str], Made], dest: str
) -> tuple[Plan, list[Made]]:
    """Return the plan of a folder whose files a command changes one by one, and the result for each file."""
    done: list[Made] = []

    def one(file: Checkpoint, dest: str) -> Plan:
        done.append(make(file, dest))
        return done[-1].plan

    return by_file(checkpoint, one, dest), done


@dataclass(frozen=True, slots=True, eq=False, repr=False)  # there is one of each, and 36 fields take 2 ms
class Format:
    """A format of checkpoints.

    Attributes:
        name: the name used in commands.
        title: the name used in text.
        suffixes: the suffixes of its files.
        states: properties that its files can state. ``device``, ``requires_grad``, ``parameter``, ``stride`` and
            ``detail`` are fields of a tensor; ``sharing``: several tensors can view one storage; ``objects``: any
            object, not only a flat dict of tensors; ``order``: the tensors are in the order of the state dict;
            ``metadata``: string pairs beside the tensors; ``checksums``: checksums of the data.
        score: (path, first bytes, size) -> the confidence that the content is this format; 0 means that it is not.
            `path` may be a folder, which has no bytes.
        read: forgiving reader: builds what it can and reports the rest as findings.
        validate: strict check: reports everything that is wrong with a checkpoint that was read.
        validate_headers: for a format whose `validate` reads more of the file: a description of the part that was read
            already, and the same check on that part alone. ``--fast`` uses it on a store.
        weights: (checkpoint, address) -> the tensors of that state dict, or all tensors for None, with ties and views
            as they were before the file was written. ``views=False`` restores ties alone, which reads no tensor bytes.
        refuses: the reason why files of the format cannot hold a tensor unchanged; None if they can.
        plan_edit: the plan of the checkpoint with edits applied; everything else stays byte for byte the same.
        plan_write: the plan of a new file that holds one state dict.
        plan_like: (checkpoint, tensors, file, metadata) -> the plan of a new file that holds one state dict, laid out
            like the checkpoint, which is of this format; None where `plan_write` already does that.
        folder: the checkpoint is a folder of files, not one file.
        edits: `plan_edit` is supported; False for a read-only format, which must be converted before it can be edited.
        writes: `plan_write` is supported.
        models: its files are models of another framework, so that a search of a folder finds them; others may be data.
        program: its files hold a program, and only the weights are read; torch.load does not read them.
        sized: (bytes) -> a `plan_write` whose files hold at most that many bytes of tensors; None for a format of
            single files.
        edits_each_file: (checkpoint, planner of one file, folder) -> the plan of a folder in which each checkpoint file
            is planned separately and the rest is unchanged; None for single files, or for files that mean nothing
            separately.
        companions: (checkpoint, folder) -> copies of the companion files in the checkpoint's folder, which go along to
            another folder.
        split_ties: the tensors of a state dict -> the input of `plan_write`.
        ties: keys that metadata ties to a tensor -> the key of that tensor.
        notes: findings that apply to every file of the format.
        one_stream: the file is one stream of pickles and data without a directory, so a reader finds a storage by the
            sizes of those before it, and a reference to a storage has a field for views.
        read_files: (files of all ranks of a job) -> the checkpoint that they are together; None where each file, or
            only their folder, is a checkpoint.
        plan_rows: (checkpoint, (old key, tensor under its new key), folder, metadata) -> the plan of a folder without
            objects whose tensors stay in their files; None where `plan_like` or `plan_write` does that.
        listed_beside: (file) -> the keys that an index beside it lists in other files, each with the name of its file;
            empty for a file that no index lists.
        since: the first torch release that reads the format; None where torch is not its reader, or always was.
        plan_state_dict: the plan of a new file of a `torch.weights.Weights`, including non-dense tensors and the
            versions of modules, as ``torch.save(model.state_dict())`` writes it; None for a format without objects.
        sized_recode: the same as `sized`, for `recode`.
        recode: the plan that writes a checkpoint of another format with objects in this one, the object unchanged.
        plan_packed: the plan of the file without bytes that no tensor uses, and the number of those bytes; None for a
            format that `slim` rewrites through its object.
        select_weights: (checkpoint, weights, optimizer) -> the part that `convert` writes: `weights` is ``"fp32"``,
            ``"model"`` or None for the default; `optimizer` includes the optimizer state. None for a format that holds
            one form of its weights.
        read_planned: the checkpoint that a planned folder will be read as; None where each of its files is a checkpoint
            by itself.
        in_place: (checkpoint, plan of an edit whose output is the checkpoint itself, block) -> a plan of the same
            content in which data keeps its offset, or moves as a whole by a multiple of ``block()`` bytes, if that is
            not 0. None for a format that cannot be edited in place.
        rejoined: (checkpoint, what the user says about its cuts) -> the checkpoint joined in that way; None where
            tensor parallelism did not cut the files.
        parallel: (checkpoint, numbers of ranks) -> a `plan_write` of the files of that many ranks; None for a format
            that has no such files.
        kept_beside: keys of the source's object that `parallel` keeps beside the state dict.
        repair: (folder or its index, tools) -> the plan of what can be saved; None for a folder whose readable tensors
            are all that can be saved, and for files.
        keeps_all: whether a plan is certainly an edit that keeps each tensor except those at or below the given
            addresses; False means that it is unknown.
    """

    name: str
    title: str
    suffixes: tuple[str, ...]
    states: frozenset[Aspect]
    score: Callable[[str, bytes, int], int]
    read: Callable[[str], Checkpoint]
    validate: Callable[[Checkpoint], Iterable[Finding]]
    weights: WeightsOf
    refuses: Callable[[TensorEntry], str | None]
    plan_edit: Callable[[Checkpoint, Sequence[Edit], str], Plan]
    plan_write: PlanWrite
    plan_like: PlanLike | None = None
    validate_headers: tuple[str, Callable[[Checkpoint], Iterable[Finding]]] | None = None
    folder: bool = False
    edits: bool = True
    writes: bool = True
    models: bool = False
    program: bool = False
    sized: Callable[[int], PlanWrite] | None = None
    edits_each_file: ByFile | None = None
    companions: Callable[[Checkpoint, str], tuple[OutputFile, ...]] = nothing_beside
    split_ties: Callable[[Sequence[TensorEntry]], Shared] = as_they_are
    ties: Callable[[Checkpoint], Mapping[str, str]] = no_ties
    notes: Callable[[Checkpoint], Iterator[Finding]] = nothing
    one_stream: bool = False
    read_files: Callable[[Sequence[StrPath]], Checkpoint] | None = None
    plan_rows: PlanRows | None = None
    listed_beside: Callable[[str], Mapping[str, str]] | None = None
    since: tuple[int, int] | None = None
    plan_state_dict: Callable[[Any, str], Plan] | None = None
    recode: Callable[[Checkpoint, str], Plan] | None = None
    sized_recode: Callable[[int], Callable[[Checkpoint, str], Plan]] | None = None
    plan_packed: Callable[[Checkpoint, str], tuple[Plan, int]] | None = None
    select_weights: Callable[[Checkpoint, str | None, bool], SelectedWeights] | None = None
    read_planned: Callable[[Plan], Checkpoint] | None = None
    keeps_all: Callable[[Checkpoint, Plan, Collection[str]], bool] | None = None
    in_place: InPlace | None = None
    repair: Callable[[str, RepairTools], Repair] | None = None
    rejoined: Callable[[Checkpoint, JoinOptions], Checkpoint] | None = None
    parallel: Callable[[Checkpoint, ParallelSizes], PlanWrite] | None = None
    kept_beside: frozenset[str] = frozenset()

    @property
    def has_ties(self) -> bool:
        """True if `ties` may find any."""
        return self.ties is not no_ties

    @property
    def joins_ranks(self) -> bool:
        """True if a checkpoint is joined from the files that each rank of a job saved."""
        return self.read_files is not None

    @property
    def own_suffix(self) -> str | None:
        """The suffix that all files of the format have; None if there is not exactly one."""
        return self.suffixes[0] if len(self.suffixes) == 1 else None

    def check(self, path: str) -> Iterator[Finding]:
        """Yield all faults of the file at `path`: read it, and run `validate` on the result."""
        yield from self.validate(self.read(path))


def refuse_truncated(checkpoint: Checkpoint) -> None:
    """Raise Truncated for a checkpoint of any format that ends before its last tensor does."""
    for finding in checkpoint.findings:
        if finding.id == "truncated":
            hint = truncated_hint(checkpoint.path)
            raise Truncated(finding.message, path=checkpoint.path, offset=finding.offset, hint=hint)


def unknown(path: str, head: bytes, size: int) -> UnknownFormat:
    """Return the error for a file or folder in no known format: it says what the file is, and what to do."""
    from ckptfix.formats.foreign import kinds

    kind, what, hint = kinds.describe(path, head, size)
    return UnknownFormat(what, kind=kind, path=path, hint=hint)
