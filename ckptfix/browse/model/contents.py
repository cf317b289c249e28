"""The contents of a checkpoint in one list: tensors, values that are not tensors, and string metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

from ckptfix.checkpoint import Checkpoint, TensorEntry
from ckptfix.checkpoint.address import is_inside, join
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError
from ckptfix.io.source import is_local, refuse_changed, shares_open_files, stamp
from ckptfix.pickles.collector import gc_paused

METADATA = "__metadata__"
"""The address of the string metadata that a format stores beside tensors, as in `diff`."""

ATTRIBUTES = "(attributes)/"
"""The component for the attributes of a whole module, which no state dict has."""

DEPTH = 100
"""Maximum levels: a longer name keeps its rest in one piece."""

Status = Literal["", "?", "=", "~", "+", "-"]
"""With two files: not compared yet, equal, different, only in the second, only in the first. With one file: empty."""


class ContentItem:
    """A leaf: a tensor or a value; with two files compared, from both sides.

    Attributes:
        name: its address.
        parts: the components of `name`, each with its final slash or dot; joined, they are `name`.
        entry, other: the tensor in the first file and in the second.
        value, other_value: the values there, if this is not a tensor.
        is_value: this is not a tensor.
        nbytes: bytes of the tensor.
        pending: only the name is known so far.
        status: the result of comparing the two sides.
    """

    __slots__ = ("entry", "is_value", "name", "nbytes", "other", "other_value", "parts", "pending", "status", "value")

    def __init__(
        self,
        name: str,
        parts: tuple[str, ...],
        entry: TensorEntry | None = None,
        other: TensorEntry | None = None,
        *,
        value: object = None,
        other_value: object = None,
        status: Status = "",
        pending: bool = False,
    ) -> None:
        self.pending = pending
        self.name = name
        self.parts = parts if len(parts) <= DEPTH else (*parts[: DEPTH - 1], "".join(parts[DEPTH - 1 :]))
        self.entry = entry
        self.other = other
        self.value = value
        self.other_value = other_value
        self.status: Status = status
        shown = entry if entry is not None else other
        self.is_value = shown is None and not pending
        self.nbytes = 0 if shown is None else _nbytes(shown)

    @property
    def shown(self) -> TensorEntry | None:
        """The tensor of the first file, or of the second if only that has it."""
        return self.entry if self.entry is not None else self.other


def _nbytes(entry: TensorEntry) -> int:
    try:
        return entry.nbytes
    except CkptfixError:  # an unknown dtype
        return 0


def parts_of(at: str, key: str) -> tuple[str, ...]:
    """Return the components of the address of `key` in the mapping at `at`, each with its final slash or dot."""
    pieces = key.split(".", DEPTH + 1)
    made = [f"{piece}." for piece in pieces]
    made[-1] = pieces[-1]
    if at:
        made[:0] = [f"{part}/" for part in at.split("/", DEPTH + 1)]
    return tuple(made)


@dataclass(frozen=True, slots=True)
class Contents:
    """A checkpoint and everything in it."""

    checkpoint: Checkpoint
    items: Sequence[ContentItem]

    @property
    def path(self) -> str:
        """The file or folder."""
        return self.checkpoint.path

    def refuse_changed(self, *, again: bool = False) -> None:
        """Refuse a file that was changed or replaced since it was read.

        Args:
            again: this is the second check, after the read; the first one was enough for remote files.

        Raises:
            DamagedFile: the file changed; nothing known about it may be shown as its current content.
        """
        for mark in self.checkpoint.files:
            if not again or is_local(mark.path):
                refuse_changed(mark.path, stamp(mark.path), mark.stamp)


MANY = 10_000
"""Number of names from which they are shown before the tensors are known, which takes half the time."""


@gc_paused
@shares_open_files()
def read(path: str, named: Callable[[list[ContentItem]], object] | None = None) -> Contents:
    """Read the headers of the checkpoint at `path`, without any tensor bytes.

    Args:
        named: called with the names alone, as soon as they are known, if there are many.

    Raises:
        CkptfixError: the checkpoint cannot be read.
    """
    from ckptfix.formats import open_checkpoint  # imported here, so that the screen is drawn meanwhile
    from ckptfix.ops.inspect.modules import modules_in, renamed

    checkpoint = open_checkpoint(path)
    sites = [site for site in checkpoint.sites if site.kind == "state_dict"]
    known: dict[str, tuple[str, ...]] = {}
    if named is not None and sum(len(site.names) for site in sites) >= MANY:
        pending = [
            ContentItem(join(site.at, key), parts_of(site.at, key), pending=True)
            for site in sites
            for key in site.names
        ]
        known = {item.name: item.parts for item in pending}
        named(pending)
    modules = modules_in(checkpoint)
    entries = renamed(checkpoint.entries, modules)
    items = [_item(entry, known) for entry in entries]
    others = values_of(checkpoint, [row.at for row in modules])
    values = (ContentItem(name, parts, value=value) for name, parts, value in others)
    return Contents(checkpoint, [*items, *values])


def _item(entry: TensorEntry, known: Mapping[str, tuple[str, ...]]) -> ContentItem:
    name = entry.name
    return ContentItem(name, known.get(name) or parts_of(entry.at, entry.key), entry)


def values_of(checkpoint: Checkpoint, modules: Sequence[str] = ()) -> Iterator[tuple[str, tuple[str, ...], object]]:
    """Yield (address, its components, value) for everything that is not a tensor.

    Args:
        modules: addresses of whole modules; their many attributes are grouped under one component.
    """
    mappings = {state.at for state in checkpoint.state_dicts}
    for address, value in checkpoint.values():
        at = next((at for at in modules if is_inside(address, at)), None)
        if at is None:
            yield address, placed(address, mappings), value
        else:
            inner = address[len(at) + 1 :] if at else address
            yield address, (*(f"{part}/" for part in at.split("/") if at), ATTRIBUTES, *placed(inner, ())), value
    for key, text in checkpoint.metadata.items():
        yield f"{METADATA}/{key}", (f"{METADATA}/", key), text


def placed(address: str, mappings: Iterable[str]) -> tuple[str, ...]:
    """Return the components of a value's address; in a state dict its key is split at dots, like keys of tensors."""
    at, slash, key = address.rpartition("/")
    if (at if slash else "") in mappings:
        return parts_of(at, key)
    return (*(f"{part}/" for part in at.split("/", DEPTH + 1) if slash), key)
