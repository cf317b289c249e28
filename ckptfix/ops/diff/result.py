"""What a comparison of two checkpoints found: typed rows, and the result that holds them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from ckptfix.checkpoint import Mark, TensorEntry, address
from ckptfix.commands import command
from ckptfix.findings.row import Finding
from ckptfix.findings.table import as_rows
from ckptfix.io.read import Progress
from ckptfix.ops.diff.sums import ValueDiff
from ckptfix.shown import html, page, text
from ckptfix.words import plural

How = Literal["chosen", "main state dict", "optimizer"]
Match = Literal["name", "wrapper", "content"]


@dataclass(frozen=True, slots=True)
class Pairing:
    """The mapping at `at_a` in A was compared with the one at `at_b` in B, and why those two."""

    at_a: str
    at_b: str
    how: How


@dataclass(frozen=True, slots=True)
class ModuleRead:
    """The whole module at `at` of the file `side` was compared as its state dict; `left` are its tensors outside."""

    side: Literal["a", "b"]
    at: str
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OneSided:
    """A tensor that only one side has."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, entry: TensorEntry) -> OneSided:
        return cls(entry.name, entry.dtype, entry.shape)


@dataclass(frozen=True, slots=True)
class NamePair:
    """One tensor under two names. `of_several` when others have the same bytes: then only their order pairs them."""

    name_a: str
    name_b: str
    of_several: bool = False


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """Tensors with the same bytes under other names, of which A and B have unequal numbers."""

    names_a: tuple[str, ...]
    names_b: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """A property in which two tensors differ: shape, dtype, device, requires_grad, parameter, stride, kind, detail."""

    what: str
    a: object
    b: object


@dataclass(frozen=True, slots=True)
class TensorChange:
    """What differs between two tensors that belong together.

    Attributes:
        name_a, name_b: their names; for a part of a sparse, quantized or wrapper tensor, the part's names.
        match: what brought them together.
        differences: properties that differ.
        values: how far apart the elements are; None if they are equal, or could not differ.
    """

    name_a: str
    name_b: str
    match: Match
    differences: tuple[Difference, ...] = ()
    values: ValueDiff | None = None


@dataclass(frozen=True, slots=True)
class Sharing:
    """Tensors that share one storage in the file `side` and do not in the other; `names` are as in that file."""

    side: Literal["a", "b"]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ValueChange:
    """A value that is not a tensor. `name_a` or `name_b` is None where that side does not have it."""

    name_a: str | None
    name_b: str | None
    a: object = None
    b: object = None


@dataclass(frozen=True, slots=True)
class Compared:
    """Two tensors that were brought together, or parts of such; `change` says what differs, None where nothing does."""

    a: TensorEntry
    b: TensorEntry
    match: Match
    change: TensorChange | None


@dataclass(frozen=True, slots=True)
class Entries:
    """All tensors that took part, by their places in the files, for who looks at their values again.

    Attributes:
        compared: the pairs, in the order of A.
        only_a, only_b: those without a counterpart.
        byteorders: of A and B.
        files: what the checkpoints were read from.
    """

    compared: tuple[Compared, ...] = ()
    only_a: tuple[TensorEntry, ...] = ()
    only_b: tuple[TensorEntry, ...] = ()
    byteorders: tuple[str, str] = ("little", "little")
    files: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True)
class Counts:
    """How much was compared.

    Attributes:
        matched: tensors of A that have a counterpart in B.
        equal: of these, how many have equal properties and values.
        trusted: of these, how many were not read, because CRC-32 and size are equal.
        nbytes: bytes of one side that were to be compared.
        values: values that are not tensors, on either side.
    """

    matched: int
    equal: int
    trusted: int
    nbytes: int
    values: int


@dataclass(frozen=True, slots=True, repr=False)
class DiffResult:
    """How two checkpoints differ. A is the first one, and B the reference of relative numbers.

    Attributes:
        path_a, path_b, format_a, format_b: the files.
        keys_only: whether only names, shapes and dtypes were compared.
        pairings: which mappings were compared with each other under different addresses, or on request.
        only_a, only_b: tensors without a counterpart.
        wrapped: pairs whose names differ only by wrapper prefixes, such as ``module.``.
        renamed: pairs of equal bytes under different names.
        ambiguous: equal tensors under other names that could not be paired; they are in `only_a` and `only_b` too.
        changed: matched tensors that differ, beyond the tolerance.
        close: matched tensors whose values are the same, and their bytes are not: within the tolerance, zeros of
            different sign, NaNs of different payload. No difference in the sense of `same`.
        sharing: tensors that share a storage on one side only.
        values: values that are not tensors and differ.
        unread: what one of the files has and could not be read; the files are then not the same.
        counts: how much was compared.
        modules: whole pickled modules that were compared as their state dicts.
        notes: for each side, whether the choice of its main state dict is in doubt (`choose.remarks`); no difference.
        tensors: all that took part, equal ones too; not in the JSON.
    """

    path_a: str
    path_b: str
    format_a: str
    format_b: str
    keys_only: bool
    pairings: tuple[Pairing, ...]
    only_a: tuple[OneSided, ...]
    only_b: tuple[OneSided, ...]
    wrapped: tuple[NamePair, ...]
    renamed: tuple[NamePair, ...]
    ambiguous: tuple[Ambiguous, ...]
    changed: tuple[TensorChange, ...]
    close: tuple[TensorChange, ...]
    sharing: tuple[Sharing, ...]
    values: tuple[ValueChange, ...]
    unread: tuple[Finding, ...]
    counts: Counts
    modules: tuple[ModuleRead, ...] = ()
    notes: tuple[Finding, ...] = ()
    tensors: Entries = field(default=Entries(), compare=False)

    def __str__(self) -> str:
        """What ``ckptfix diff`` prints, all rows."""
        return text("diff", self)

    def __repr__(self) -> str:
        what = "the same" if self.same else "different"
        return f"<DiffResult of {self.path_a!r} and {self.path_b!r}: {what}>"

    def _repr_html_(self) -> str:
        pair = ("A", "B")
        tensor = ("name", "dtype", "shape")
        changed = [
            (row.name_a, row.name_b, found.what, found.a, found.b) for row in self.changed for found in row.differences
        ]
        apart = [
            (row.name_a, row.name_b, row.values.differing, row.values.elements, row.values.max_abs, row.values.reason)
            for row in self.changed
            if row.values is not None
        ]
        tables = (
            ("only in A", tensor, [(row.name, row.dtype, list(row.shape)) for row in self.only_a]),
            ("only in B", tensor, [(row.name, row.dtype, list(row.shape)) for row in self.only_b]),
            ("equal names but for a wrapper's prefix", pair, [(row.name_a, row.name_b) for row in self.wrapped]),
            ("renamed", pair, [(row.name_a, row.name_b) for row in self.renamed]),
            ("properties", (*pair, "what", "in A", "in B"), changed),
            ("values", (*pair, "differing", "elements", "max |a-b|", "note"), apart),
            ("other than tensors", (*pair, "in A", "in B"), [(v.name_a, v.name_b, v.a, v.b) for v in self.values]),
        )
        return html(self.lines, tables)

    def to_html(
        self, *, histograms: bool = True, command: str | None = None, progress: Progress | None = None
    ) -> str:
        """One HTML page that needs nothing else: what ``ckptfix diff --html`` writes.

        Args:
            histograms: read the tensors that differ once more, for their distributions.
            command: the command line that the page says it was made by; ``ckptfix diff A B`` by default.

        Raises:
            CkptfixError: the files are not what they were any more.
        """
        return page("diff", self, histograms=histograms, command=command, progress=progress)

    @property
    def same(self) -> bool:
        """Whether nothing differs: neither a name, nor a property, nor an element or value beyond the tolerance."""
        rows = (
            self.only_a,
            self.only_b,
            self.wrapped,
            self.renamed,
            self.changed,
            self.sharing,
            self.values,
            self.unread,
        )
        return not any(rows)

    @property
    def exit_code(self) -> int:
        """0 for the same, 1 for different, as of ``diff`` and ``cmp``."""
        return 0 if self.same else 1

    @property
    def lines(self) -> tuple[str, ...]:
        """The result in a few sentences for a person."""
        return tuple(_sentences(self))

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON. Floats that JSON lacks and values of other types become strings."""
        plain = {name: jsonable(value) for name, value in asdict(replace(self, tensors=Entries())).items()}
        modules = [{"side": row.side, "at": row.at, "left_behind": list(row.left)} for row in self.modules]
        del plain["unread"], plain["notes"], plain["tensors"]
        findings = as_rows((*self.unread, *self.notes), self.path_a)
        return {"same": self.same, **plain, "modules": modules, "findings": findings, "summary": list(self.lines)}


_ODD_FLOATS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def jsonable(value: object) -> object:
    """`value` as JSON can say it."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _ODD_FLOATS[repr(value)]
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [jsonable(item) for item in value]
    if isinstance(value, bytes):
        return value.hex() if len(value) <= 64 else f"{value[:64].hex()}... ({len(value)} bytes)"
    return repr(value)


def _listed(parts: Iterable[tuple[int, str]]) -> str:
    return ", ".join(f"{count:,} {what}" for count, what in parts if count)


def _sentences(result: DiffResult) -> Iterable[str]:
    counts = result.counts
    tensors = plural(counts.matched, "tensor")
    if result.same:
        if result.keys_only:
            yield f"Same: names, shapes and dtypes of {tensors}."
        else:
            yield f"Same: {tensors} ({counts.nbytes:,} bytes), {plural(counts.values, 'other value')}."
    else:
        found = _listed(
            (
                (counts.equal, "the same in shape and dtype" if result.keys_only else "equal"),
                (sum(1 for row in result.changed if row.differences), "with other properties"),
                (sum(1 for row in result.changed if row.values is not None), "with other values"),
            )
        )
        yield f"Different: {tensors} in both{', ' + found if found else ''}."
        names = _listed(
            (
                (len(result.only_a), "only in A"),
                (len(result.only_b), "only in B"),
                (len(result.wrapped), "under a name that differs by a wrapper prefix"),
                (len(result.renamed), "renamed"),
                (len(result.sharing), "shared storages on one side only"),
            )
        )
        if names:
            yield f"Names: {names}."
        if result.values:
            yield f"Other values: {len(result.values):,} of {counts.values:,} differ."
        if result.unread:
            yield f"Not comparable: {plural(len(result.unread), 'tensor')} could not be read."
    if result.ambiguous:
        yield f"{plural(len(result.ambiguous), 'group')} of equal tensors could not be paired by content."
    if result.close:
        yield f"{plural(len(result.close), 'tensor')} with other bytes count as equal in value."
    if counts.trusted:
        yield f"{plural(counts.trusted, 'tensor')} not read: equal CRC-32 and size."
    for pairing in result.pairings:
        if pairing.at_a != pairing.at_b:
            a, b = (address.shown(at) for at in (pairing.at_a, pairing.at_b))
            yield f"Compared {a} of A with {b} of B ({pairing.how})."
    for row in result.modules:
        path = result.path_a if row.side == "a" else result.path_b
        what = f"the module {row.at}" if row.at else "the module"
        way = command("extract", path, "OUT", at=row.at or None)
        yield f"{row.side.upper()}: {what} was compared as its state dict, which `{way}` writes."
        if row.left:
            yield f"{row.side.upper()}: not compared, as no state dict has them: {', '.join(row.left)}."
