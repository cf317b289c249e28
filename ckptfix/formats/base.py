"""The contract of a format: what its files can state, and the functions that read, judge and plan them.

A format's module ends with one `Format`; tests/contract runs the same suite over all of them. No code outside this room
compares names of formats: it asks what a format states, or calls its functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from ckptfix.checkpoint import Checkpoint, Edit, OutputFile, Plan, TensorEntry
from ckptfix.errors import UnknownFormat
from ckptfix.findings.row import Finding

Aspect = Literal[
    "device", "requires_grad", "parameter", "stride", "detail", "sharing", "objects", "order", "metadata", "checksums",
]  # fmt: skip
"""What a file may state beside names, dtypes, shapes and bytes; see `Format.states`."""

OF_OBJECTS: frozenset[Aspect] = frozenset(
    {"device", "requires_grad", "parameter", "stride", "detail", "sharing", "objects", "order"}
)
"""What a pickled object of torch states."""

Shared = tuple[tuple[TensorEntry, ...], dict[str, str], tuple[Finding, ...]]
"""The tensors to be written, metadata pairs from which `Format.weights` gets the rest, and what was noticed."""


class PlanWrite(Protocol):
    """The type of `Format.plan_write`."""

    def __call__(
        self, entries: Sequence[TensorEntry], dest: str, *, metadata: Mapping[str, str] | None = None
    ) -> Plan: ...


class WeightsOf(Protocol):
    """The type of `Format.weights`."""

    def __call__(
        self, checkpoint: Checkpoint, at: str | None = None, *, views: bool = True
    ) -> tuple[TensorEntry, ...]: ...


def plain_weights(checkpoint: Checkpoint, at: str | None = None, *, views: bool = True) -> tuple[TensorEntry, ...]:
    """`Format.weights` of a format whose entries share their storages as the tensors did."""
    return tuple(entry for entry in checkpoint.entries if at is None or entry.at == at)


def no_ties(checkpoint: Checkpoint) -> Mapping[str, str]:
    """`Format.ties` of a format that ties no names beside its entries."""
    return {}


def as_they_are(entries: Sequence[TensorEntry]) -> Shared:
    """`Format.share` of a format in which tensors share storages."""
    return tuple(entries), {}, ()


def nothing(checkpoint: Checkpoint) -> Iterator[Finding]:
    """`Format.remarks` of a format about whose files there is nothing to say."""
    return iter(())


def nothing_beside(checkpoint: Checkpoint, dest: str) -> tuple[OutputFile, ...]:
    """`Format.beside` of a format of one file."""
    return ()


@dataclass(frozen=True, slots=True)
class Taken:
    """What `convert` takes of a checkpoint that holds its weights in several forms.

    Attributes:
        checkpoint: its object is what the output holds.
        at: the address of that object in the whole; None for several.
        left: addresses of what is not taken.
    """

    checkpoint: Checkpoint
    at: str | None
    left: tuple[str, ...]


InPlace = Callable[[Checkpoint, Plan, Callable[[], int]], Plan]
"""The type of `Format.in_place`."""

ByFile = Callable[[Checkpoint, Callable[[Checkpoint, str], Plan], str], Plan]
"""The type of `Format.by_file`."""


class Planned(Protocol):
    """What a verb makes of one file."""

    @property
    def plan(self) -> Plan: ...


Made = TypeVar("Made", bound=Planned)


def file_by_file(
    by_file: ByFile, checkpoint: Checkpoint, make: Callable[[Checkpoint, str], Made], dest: str
) -> tuple[Plan, list[Made]]:
    """The plan of a folder whose files a verb does one by one, and what it made of each."""
    done: list[Made] = []

    def one(file: Checkpoint, dest: str) -> Plan:
        done.append(make(file, dest))
        return done[-1].plan

    return by_file(checkpoint, one, dest), done


@dataclass(frozen=True, slots=True)
class Format:
    """A format of checkpoints.

    Attributes:
        name: in commands.
        title: in text.
        suffixes: of its files.
        states: what its files can state. ``device``, ``requires_grad``, ``parameter``, ``stride`` and ``detail`` are
            fields of a tensor; ``sharing``: tensors that view one storage; ``objects``: any object, not a mapping of
            tensors alone; ``order``: the order of the tensors is that of the state dict; ``metadata``: string pairs
            beside the tensors; ``checksums``: of the data.
        score: (path, first bytes, size) -> how surely the content is this format; 0 for not at all. `path` may be a
            folder, which has no bytes.
        read: forgiving; builds what it can and notes the rest as findings.
        judge: strict; names all that is wrong with a checkpoint that was read.
        skim: the same by what was read already, of a format whose `judge` reads more, and what that is: for
            ``--fast`` in a store.
        weights: (checkpoint, address) -> the tensors of that state dict, or of all for None, with ties and views as
            they were before the file was written. ``views=False`` restores ties alone, which reads no tensor byte.
        refuses: why files of the format cannot hold a tensor as it is; None if they can.
        plan_edit: the checkpoint with edits; everything else byte for byte.
        plan_write: a fresh file that holds one state dict.
        folder: a checkpoint is a folder of files, not one file.
        edits: `plan_edit` makes one of another; False for what is only read, and is converted to be edited.
        writes: `plan_write` makes one.
        sized: (bytes) -> a `plan_write` whose files hold at most so many bytes of tensors; None for a format of one
            file.
        by_file: (checkpoint, plan of one file, folder) -> the folder, each of its files planned anew by itself, and the
            rest as it was; None for one file, or for files that say nothing by themselves.
        beside: (checkpoint, folder) -> copies of what else lies in its folder, which go along to another one.
        share: what of the tensors of a state dict `plan_write` gets.
        ties: names that metadata ties to a tensor -> that tensor.
        remarks: what is known of every file of the format.
        since: the torch release that first read it; None where torch is not what reads it, or always did.
        plan_state_dict: a fresh file of a `torch.weights.Weights`, with what is not dense and the versions of
            modules, as ``torch.save(model.state_dict())`` writes it; None for a format without objects.
        sized_recode: the same for `recode`.
        recode: a checkpoint of another format with objects as this one, the object unchanged.
        plan_packed: the file without bytes that no tensor claims, and how many they were; None for a format that
            `slim` rewrites through its object.
        take: (checkpoint, weights, optimizer) -> what `convert` takes of it: `weights` is ``"fp32"``, ``"model"`` or
            None for what is usual, `optimizer` whether its state is taken too. None for a format that holds one form
            of its weights.
        read_stream: the container of a file and the pickle of its object, which is not parsed.
        read_planned: what a planned folder will be read as; None where each of its files is a checkpoint by itself.
        in_place: (checkpoint, plan of an edit whose output is the checkpoint itself, block) -> a plan of the same
            content in which data stays where it is, or moves as a whole by a multiple of ``block()`` bytes, if that is
            not 0. None for a format that is not edited in place.
        keeps_all: whether a plan surely is an edit that keeps each tensor but those at or below some addresses; False
            says nothing.
    """

    name: str
    title: str
    suffixes: tuple[str, ...]
    states: frozenset[Aspect]
    score: Callable[[str, bytes, int], int]
    read: Callable[[str], Checkpoint]
    judge: Callable[[Checkpoint], Iterable[Finding]]
    weights: WeightsOf
    refuses: Callable[[TensorEntry], str | None]
    plan_edit: Callable[[Checkpoint, Sequence[Edit], str], Plan]
    plan_write: PlanWrite
    skim: tuple[str, Callable[[Checkpoint], Iterable[Finding]]] | None = None
    folder: bool = False
    edits: bool = True
    writes: bool = True
    sized: Callable[[int], PlanWrite] | None = None
    by_file: ByFile | None = None
    beside: Callable[[Checkpoint, str], tuple[OutputFile, ...]] = nothing_beside
    share: Callable[[Sequence[TensorEntry]], Shared] = as_they_are
    ties: Callable[[Checkpoint], Mapping[str, str]] = no_ties
    remarks: Callable[[Checkpoint], Iterator[Finding]] = nothing
    since: tuple[int, int] | None = None
    plan_state_dict: Callable[[Any, str], Plan] | None = None
    recode: Callable[[Checkpoint, str], Plan] | None = None
    sized_recode: Callable[[int], Callable[[Checkpoint, str], Plan]] | None = None
    plan_packed: Callable[[Checkpoint, str], tuple[Plan, int]] | None = None
    take: Callable[[Checkpoint, str | None, bool], Taken] | None = None
    read_stream: Callable[[str], tuple[Any, bytes]] | None = None
    read_planned: Callable[[Plan], Checkpoint] | None = None
    keeps_all: Callable[[Checkpoint, Plan, Collection[str]], bool] | None = None
    in_place: InPlace | None = None

    def check(self, path: str) -> Iterator[Finding]:
        """What is wrong with the file at `path` as it stands: `judge` of what `read` makes of it."""
        yield from self.judge(self.read(path))


def unknown(path: str, head: bytes, size: int) -> UnknownFormat:
    """The error for a file or folder that is none of our formats: what it is instead, and what to do."""
    from ckptfix.formats.foreign import kinds

    kind, what, hint = kinds.describe(path, head, size)
    return UnknownFormat(what, kind=kind, path=path, hint=hint)
