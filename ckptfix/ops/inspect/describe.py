"""Description of a checkpoint from its headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, field

from ckptfix.checkpoint import Checkpoint, StateDict, TensorEntry, bytes_of
from ckptfix.checkpoint.address import is_inside, is_inside_any
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, printable
from ckptfix.findings.row import Finding
from ckptfix.findings.table import as_rows
from ckptfix.formats import FORMATS, format_of
from ckptfix.formats.members import FolderMember
from ckptfix.formats.torch import weights_only as trusted
from ckptfix.formats.torch.common import maybe_pickled_object
from ckptfix.io.read import Progress
from ckptfix.names import kinds
from ckptfix.names import wrappers as keys
from ckptfix.names.adapter_signs import has_signs
from ckptfix.names.attributes import bare_names
from ckptfix.ops import choose, quantized
from ckptfix.ops.candidates import state_dict_of, view
from ckptfix.ops.dequantize.summary import QuantizedWeights, plain_parameters, plain_shapes, summary_of
from ckptfix.ops.inplace import count_edits
from ckptfix.ops.inspect.modules import PickledModule, modules_in, renamed
from ckptfix.ops.inspect.training import shown, training_of
from ckptfix.shown import html, page, text
from ckptfix.words import facts, plural, shape, size, some


@dataclass(frozen=True, slots=True, repr=False)
class Inspection:
    """A checkpoint in numbers.

    Attributes:
        title: name of the format.
        size: bytes of the file.
        traits: facts that the format states about the file.
        tensors: how many keys hold a tensor.
        parameters: elements of the model's tensors, with buffers, tied ones counted once, without the optimizer's.
        nbytes: bytes of all storages, each once.
        dtypes, devices: number of tensors per dtype, and of storages per location tag.
        wrappers: component -> (how many keys have it, the first of them).
        globals: (name, whether weights_only=True accepts it) of every class and function that the pickle names.
        weights_only: why ``torch.load(weights_only=True)`` would refuse the file; None if it would not.
        members: the files of the folder that was asked about, where the checkpoint is one of them.
        training: the training progress that the trainer saved, by address; ``lr`` has the learning rates.
        modules: the whole pickled modules.
        quantization: name of a quantization scheme -> how many weights have it.
        quantized: the quantized weights, by scheme, bits and group.
        plain_parameters: parameters of the model without its quantization; None if it has none, or if it is unknown.
        adapter: the adapter in it, in words; None if it holds none.
        plain_shapes: address of the codes of a quantized weight -> shape of the weight without the quantization.
    """

    path: str
    format: str
    title: str
    size: int
    traits: Mapping[str, object]
    tensors: int
    parameters: int
    nbytes: int
    dtypes: Mapping[str, int]
    devices: Mapping[str, int]
    wrappers: Mapping[str, tuple[int, str]]
    state_dicts: tuple[StateDict, ...]
    globals: tuple[tuple[str, bool], ...]
    weights_only: str | None
    metadata: Mapping[str, str]
    findings: tuple[Finding, ...]
    entries: tuple[TensorEntry, ...]
    members: tuple[FolderMember, ...] = ()
    training: Mapping[str, object] = field(default_factory=dict)
    modules: tuple[PickledModule, ...] = ()
    quantization: Mapping[str, int] = field(default_factory=dict)
    quantized: tuple[QuantizedWeights, ...] = ()
    plain_parameters: int | None = None
    adapter: str | None = None
    plain_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def named_entries(self) -> tuple[TensorEntry, ...]:
        """`entries`, with those of a whole module under the keys of its state dict."""
        return renamed(self.entries, self.modules)

    def __str__(self) -> str:
        """Return the text that ``ckptfix inspect`` prints, with all rows."""
        return text("inspect", self)

    def __repr__(self) -> str:
        return f"<Inspection of {self.path!r}: {self.title}, {plural(self.tensors, 'tensor')}>"

    def _repr_html_(self) -> str:
        tensors = [
            (row.name, row.dtype, shape(row.shape), size(row.nbytes), row.location) for row in self.named_entries
        ]
        members = [(member.name, member.what, size(member.size)) for member in self.members]
        tables = (
            ("files", ("name", "what", "size"), members),
            ("tensors", ("name", "dtype", "shape", "size", "device"), tensors),
        )
        return html(summary(self), tables)

    def to_html(
        self,
        *,
        values: bool = False,
        entries: Sequence[TensorEntry] | None = None,
        command: str | None = None,
        progress: Progress | None = None,
    ) -> str:
        """Return a self-contained HTML page, as written by ``ckptfix inspect --html``.

        Args:
            values: read the tensors, for their statistics and distributions.
            entries: list only these tensors, in this order; all of `named_entries` by default.
            command: the command line shown on the page; ``ckptfix inspect PATH`` by default.
        """
        return page("inspect", self, values=values, entries=entries, command=command, progress=progress)

    def as_dict(self) -> dict[str, object]:
        """Return the description as a JSON object; entries are listed without the positions of their data."""
        return {
            "path": self.path,
            "format": self.format,
            "title": self.title,
            "size": self.size,
            "traits": dict(self.traits),
            "tensors": self.tensors,
            "parameters": self.parameters,
            "nbytes": self.nbytes,
            "dtypes": dict(self.dtypes),
            "devices": dict(self.devices),
            "wrappers": {name: {"keys": count, "example": first} for name, (count, first) in self.wrappers.items()},
            "state_dicts": [_stated(state) for state in self.state_dicts],
            "globals": [{"name": name, "accepted": accepted} for name, accepted in self.globals],
            "weights_only": {"accepted": self.weights_only is None, "reason": self.weights_only},
            "metadata": dict(self.metadata),
            "findings": as_rows(self.findings, self.path),
            "entries": [_row(entry) for entry in self.entries],
            "members": [asdict(member) for member in self.members],
            "training": dict(self.training),
            "modules": [{"at": whole.at, "class": whole.name, "tensors": whole.taken} for whole in self.modules],
            "quantization": dict(self.quantization),
            "quantized": [row.as_dict() for row in self.quantized],
            "plain_parameters": self.plain_parameters,
            "adapter": self.adapter,
            "plain_shapes": {name: list(sizes) for name, sizes in self.plain_shapes.items()},
        }


def _row(entry: TensorEntry) -> dict[str, object]:
    return {
        "name": entry.name,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "stride": list(entry.stride),
        "offset": entry.offset,
        "nbytes": entry.nbytes,
        "device": entry.location,
        "requires_grad": entry.requires_grad,
        "parameter": entry.parameter,
        "kind": entry.kind,
        "detail": entry.detail,
        "storage": None if entry.storage is None else entry.storage.key,
    }


def of_folder(path: str, found: tuple[FolderMember, ...]) -> Inspection:
    """Describe a folder of files in which no single file is the model."""
    return Inspection(
        path=path,
        format="folder",
        title="a folder of files: name one of them",
        size=sum(member.size for member in found),
        traits={},
        tensors=0,
        parameters=0,
        nbytes=0,
        dtypes={},
        devices={},
        wrappers={},
        state_dicts=(),
        globals=(),
        weights_only=None,
        metadata={},
        findings=(),
        entries=(),
        members=found,
    )


def inspect(checkpoint: Checkpoint) -> Inspection:
    """Describe `checkpoint`; no tensor byte is read."""
    entries = checkpoint.entries
    program = format_of(checkpoint).program
    parts = None if program else maybe_pickled_object(checkpoint)
    found = [] if parts is None else parts.global_names()
    edits = count_edits(checkpoint)
    parameters = _parameters(checkpoint)
    return Inspection(
        path=checkpoint.path,
        format=checkpoint.format,
        title=format_of(checkpoint).title,
        size=checkpoint.size,
        traits={**checkpoint.traits, **({"edits in place": edits} if edits else {})},
        tensors=len(entries),
        parameters=parameters,
        nbytes=bytes_of(entries),
        dtypes=dict(Counter(entry.dtype for entry in entries)),
        devices=checkpoint.devices,
        wrappers=_wrappers(checkpoint),
        state_dicts=checkpoint.state_dicts,
        globals=tuple((name, trusted.accepted(name)) for name in found),
        weights_only=parts.refusal() if parts is not None else PROGRAM if program else None,
        metadata=checkpoint.metadata,
        findings=(*checkpoint.findings, *choose.remarks(checkpoint)),
        entries=entries,
        training=training_of(checkpoint.values()),
        modules=modules_in(checkpoint),
        quantization=quantized.quantization_of(checkpoint).counts,
        quantized=summary_of(checkpoint),
        plain_parameters=plain_parameters(checkpoint, parameters),
        adapter=_adapter(checkpoint),
        plain_shapes=plain_shapes(checkpoint),
    )


def _adapter(checkpoint: Checkpoint) -> str | None:
    if not has_signs(entry.key for entry in checkpoint.entries):
        return None
    # Only such files are worth the import.
    from ckptfix.ops.adapter import glance

    found = glance(checkpoint)
    return None if found is None else found.described()


PROGRAM = "it is a program"
"""The reason why ``torch.load`` refuses a program."""


def _wrappers(checkpoint: Checkpoint) -> dict[str, tuple[int, str]]:
    """Return `Inspection.wrappers`, in the order of the table."""
    found: dict[str, tuple[int, str]] = {}
    for site in checkpoint.sites:
        if site.kind == "state_dict":
            for component, (count, first) in keys.wrappers_in(site.names, bare_names(checkpoint, site)).items():
                before, example = found.get(component, (0, first))
                found[component] = (before + count, example)
    return {row.component: found[row.component] for row in keys.WRAPPERS if row.component in found}


def _parameters(checkpoint: Checkpoint) -> int:
    """Count the elements of the model's tensors, tied ones once; of every candidate if several could be the model."""
    seen: set[object] = set()
    count = 0
    for row in choose.meant(checkpoint):
        try:
            entries = state_dict_of(checkpoint, row)
        except CkptfixError:  # a broken module is still to be described
            entries = tuple(entry for entry in checkpoint.entries if is_inside(entry.name, row.at))
        for entry in entries:
            place = view(entry) if entry.storage is not None else (row.at, entry.key)
            if place not in seen:
                seen.add(place)
                count += entry.numel
    return count


LINES = 8
"""Lines of one fact in the summary that a terminal gets."""


def summary(inspection: Inspection, most: int = LINES) -> list[str]:
    """List the facts about the file, one a line; a fact with more lines has at most `most`, 0 for all."""
    return facts(summed_up(inspection, most))


def summed_up(inspection: Inspection, most: int = LINES) -> list[tuple[str, list[str]]]:
    """Return the facts of `summary`, each with its values, which may be empty."""
    listed = _capped([_member(member) for member in inspection.members], 2 * most)
    if inspection.format == "folder":
        return [("folder", [inspection.path]), ("format", [inspection.title]), ("holds", listed)]
    folder = FORMATS[inspection.format].folder
    names = [name for name, accepted in inspection.globals if not accepted]
    names += [name for name, accepted in inspection.globals if accepted]
    rows: list[tuple[str, Sequence[str]]] = [
        ("file", [inspection.path]),
        ("folder", listed),
        ("format", [inspection.title]),
        ("size", [_size(inspection.size)]),
        ("state dicts", _capped(list(state_dicts_of(inspection)), most)),
        ("parameters", [f"{inspection.parameters:,}"]),
        ("tensors", [f"{inspection.tensors:,} holding {size(inspection.nbytes)}"]),
        ("dtypes", [counts(inspection.dtypes)]),
        ("adapter", [inspection.adapter or ""]),
        ("quantized", _capped([str(row) for row in inspection.quantized], most)),
        ("plain model", [] if inspection.plain_parameters is None else [f"{inspection.plain_parameters:,} parameters"]),
        ("devices", [counts(inspection.devices)]),
        ("wrappers", _capped([_wrapper(*item) for item in inspection.wrappers.items()], most)),
        ("training", [shown(inspection.training)]),
        ("metadata", _capped([f"{name}: {_short(value)}" for name, value in inspection.metadata.items()], most)),
        ("weights_only", [] if folder else [_verdict(inspection, most // 2)]),
        # The line above names those that matter to a person.
        ("globals", [] if folder or most else [", ".join(names)]),
        ("traits", [", ".join(_trait(name, value) for name, value in inspection.traits.items())]),
    ]
    return [(name, [value for value in values if value]) for name, values in rows]


def notes(
    shown: Sequence[TensorEntry], entries: Sequence[TensorEntry], plain: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Describe each tensor in `shown`: its kind, its stride, and which of `entries` it shares a storage with.

    Args:
        plain: as `Inspection.plain_shapes`.
    """
    first: dict[tuple[str, str], TensorEntry] = {}
    for entry in entries:
        if entry.storage is not None:
            first.setdefault(entry.storage.identity, entry)
    return [", ".join(_notes(entry, first, plain.get(entry.name))) for entry in shown]


def _notes(
    entry: TensorEntry, first: Mapping[tuple[str, str], TensorEntry], plain: tuple[int, ...] | None
) -> Iterator[str]:
    if plain is not None:
        yield f"codes of {shape(plain)}"
    if entry.kind != "dense":
        yield f"{entry.kind} {entry.detail}".rstrip()
    if entry.requires_grad:
        yield "requires grad"
    if not entry.is_contiguous:
        yield f"stride {shape(entry.stride)}"
    owner = entry if entry.storage is None else first[entry.storage.identity]
    if owner is not entry and entry.numel and owner.name != entry.name:
        yield f"shares storage with {owner.name}"


def _size(nbytes: int) -> str:
    return f"{nbytes:,} bytes" if nbytes < 1000 else f"{size(nbytes)} ({nbytes:,} bytes)"


def _member(member: FolderMember) -> str:
    what = f"{member.what}, " if member.what else ""
    return f"{printable(member.name)}: {what}{'a folder' if member.folder else size(member.size)}"


def _trait(name: str, value: object) -> str:
    label = name.replace("_", " ")
    if value is True:
        return label
    if isinstance(value, list | tuple):
        return f"{label} {', '.join(map(str, value))}"
    return f"no {label}" if value is False or value is None else f"{label} {value}"


def counts(found: Mapping[str, int]) -> str:
    """Format counts by name, the largest first: ``float32 x 12, int64 x 1``."""
    return ", ".join(f"{name} x {count:,}" for name, count in sorted(found.items(), key=lambda item: -item[1]))


def _wrapper(component: str, found: tuple[int, str]) -> str:
    count, example = found
    return f"{component} on {plural(count, 'key')}, as in {example}"


def _stated(state: StateDict) -> dict[str, object]:
    """Return a state dict for JSON, without the field that only edits need."""
    return {name: value for name, value in asdict(state).items() if name != "payload"}


def state_dicts_of(inspection: Inspection) -> Iterator[str]:
    """Yield a line per state dict or module, the model's first; those of an optimizer share one line."""
    modules = inspection.modules
    taken = {whole.at for whole in modules}
    states = [row for row in inspection.state_dicts if not is_inside_any(row.at, taken)]
    lines: list[tuple[bool, str]] = []
    for whole in modules:
        kind = f" of class {whole.name}" if whole.name else ""
        line = f"{whole.at or 'the file itself'}: a whole module{kind}, {plural(whole.taken, 'tensor')}"
        lines.append((kinds.of(whole.at, ()) not in (None, "average"), line))
    for state in states:
        if not state.optimizer:
            extra = f" and {plural(state.extra, 'other value')}" if state.extra else ""
            line = f"{state.at or 'the file itself'}: {plural(state.tensors, 'tensor')}{extra}"
            lines.append((not state.weights, line))
    yield from (line for _, line in sorted(lines, key=lambda row: row[0]))
    inner = [state for state in states if state.optimizer]
    if len(inner) == 1:
        yield f"{inner[0].at or 'the file itself'}: {plural(inner[0].tensors, 'tensor')} of an optimizer"
    elif inner:
        total = sum(state.tensors for state in inner)
        yield f"{inner[0].at} to {inner[-1].at}: {plural(total, 'tensor')} of an optimizer"


def _verdict(inspection: Inspection, most: int) -> str:
    if not inspection.globals and inspection.weights_only is None:
        return ""
    if inspection.weights_only is None:
        return "torch.load(weights_only=True) accepts it"
    refused = [name for name, accepted in inspection.globals if not accepted]
    because = f"it contains {some(refused, most)}" if refused else inspection.weights_only
    return f"torch.load(weights_only=True) refuses it: {because}"


def _short(text: str, most: int = 80) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _capped(values: list[str], most: int) -> list[str]:
    hidden = len(values) - most
    return values if hidden <= 0 or not most else [*values[:most], f"... {hidden:,} more (--json has all)"]
