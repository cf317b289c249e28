"""Results of a comparison of two checkpoints: typed rows, and the object that holds them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, field, replace
from typing import Any, Literal

from ckptfix.checkpoint import FileVersion, TensorEntry, address
from ckptfix.commands import command
from ckptfix.dataclass import dataclass
from ckptfix.elements.pair_sums import ValueDiff
from ckptfix.findings.row import Finding
from ckptfix.findings.table import as_rows
from ckptfix.io.read import Progress
from ckptfix.shown import html, page, text
from ckptfix.words import plural, some

How = Literal["chosen", "main state dict", "optimizer"]
Match = Literal["name", "wrapper", "content"]


@dataclass(frozen=True, slots=True)
class Pairing:
    """Two state dicts that were compared, at `at_a` in A and at `at_b` in B, and the reason."""

    at_a: str
    at_b: str
    how: How


@dataclass(frozen=True, slots=True)
class ModuleRead:
    """A whole module, at `at` of the file `side`, compared as its state dict; `left` are its further tensors."""

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
    """One tensor under two keys. With `of_several`, others have the same bytes, and only their order pairs them."""

    name_a: str
    name_b: str
    of_several: bool = False


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """Tensors with the same bytes under different keys, in unequal numbers in A and B."""

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
    """The differences between two paired tensors.

    Attributes:
        name_a, name_b: their names; for a part of a sparse, quantized or wrapper tensor, the part's names.
        match: how they were paired.
        differences: properties that differ.
        values: how far apart the elements are; None if they are equal, or could not differ.
    """

    name_a: str
    name_b: str
    match: Match
    differences: tuple[Difference, ...] = ()
    values: ValueDiff | None = None

    @property
    def is_alarm(self) -> bool:
        """True if B has a NaN or an infinity where A has a number."""
        return self.values is not None and bool(self.values.nan_b or self.values.infinite_b)

    @property
    def weight(self) -> tuple[bool, bool, float]:
        """The sort key for the largest changes: NaN in B first, and single numbers, such as counters, last."""
        values = self.values
        if values is None or not values.differing:
            return False, False, -1.0
        if values.rel_l2 is not None:
            return self.is_alarm, values.elements > 1, values.rel_l2
        # NaN and infinities on one side are the largest change; overflow of float64 in the squares is no change.
        odd = values.nan_a or values.nan_b or values.infinite or values.max_abs is None
        return self.is_alarm, values.elements > 1, math.inf if odd else 0.0


@dataclass(frozen=True, slots=True)
class Sharing:
    """Tensors that share one storage in the file `side` but not in the other; `names` are those in that file."""

    side: Literal["a", "b"]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ValueChange:
    """A value that is not a tensor. `name_a` or `name_b` is None if that side does not have it."""

    name_a: str | None
    name_b: str | None
    a: object = None
    b: object = None


@dataclass(frozen=True, slots=True)
class Compared:
    """Two paired tensors, or parts of such; `change` has the differences, None if there are none."""

    a: TensorEntry
    b: TensorEntry
    match: Match
    change: TensorChange | None


@dataclass(frozen=True, slots=True)
class ComparedEntries:
    """All tensors that took part, with their offsets in the files, for code that reads their values again.

    Attributes:
        compared: the pairs, in the order of A.
        only_a, only_b: those without a counterpart.
        byteorders: of A and B.
        files: the files that the checkpoints were read from.
        holds: the temporary files among them, which live as long as this.
        codes: address -> description of the tensors of A, and of B, whose elements are codes and not numbers.
    """

    compared: tuple[Compared, ...] = ()
    only_a: tuple[TensorEntry, ...] = ()
    only_b: tuple[TensorEntry, ...] = ()
    byteorders: tuple[str, str] = ("little", "little")
    files: tuple[FileVersion, ...] = ()
    holds: tuple[object, ...] = ()
    codes: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of compared tensors, values and bytes.

    Attributes:
        matched: tensors of A that have a counterpart in B.
        equal: matched tensors with equal properties and values.
        trusted: equal tensors that were not read, because CRC-32 and size are equal.
        nbytes: bytes to compare, of one side.
        values: values that are not tensors, on either side.
    """

    matched: int
    equal: int
    trusted: int
    nbytes: int
    values: int


@dataclass(frozen=True, slots=True, repr=False)
class DiffResult:
    """The differences between two checkpoints. A is the first one, and B the reference of relative numbers.

    Attributes:
        path_a, path_b, format_a, format_b: the files.
        keys_only: whether only keys, shapes and dtypes were compared.
        pairings: state dicts that were compared under different addresses, or on request.
        only_a, only_b: tensors without a counterpart.
        wrapped: pairs whose keys differ only by wrapper prefixes, such as ``module.``.
        renamed: pairs of equal bytes under different keys.
        ambiguous: equal tensors under different keys that could not be paired; they are in `only_a` and `only_b` too.
        changed: matched tensors that differ, beyond the tolerance.
        close: matched tensors with the same values but different bytes: within the tolerance, zeros of different sign,
            NaNs of different payload. They do not count as a difference for `same`.
        sharing: tensors that share a storage on one side only.
        values: values that are not tensors and differ.
        unread: tensors of either file that could not be read; the files then count as different.
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
    tensors: ComparedEntries = field(default=ComparedEntries(), compare=False)

    def __str__(self) -> str:
        """Return the text that ``ckptfix diff`` prints, with all rows."""
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
            for row in self.largest
            if row.values is not None
        ]
        tables = (
            ("only in A", tensor, [(row.name, row.dtype, list(row.shape)) for row in self.only_a]),
            ("only in B", tensor, [(row.name, row.dtype, list(row.shape)) for row in self.only_b]),
            ("keys that differ by a wrapper prefix", pair, [(row.name_a, row.name_b) for row in self.wrapped]),
            ("renamed", pair, [(row.name_a, row.name_b) for row in self.renamed]),
            ("properties", (*pair, "what", "in A", "in B"), changed),
            ("values", (*pair, "differing", "elements", "max |a-b|", "note"), apart),
            ("other values", (*pair, "in A", "in B"), [(v.name_a, v.name_b, v.a, v.b) for v in self.values]),
        )
        return html(self.lines, tables)

    def to_html(
        self, *, histograms: bool = True, command: str | None = None, progress: Progress | None = None
    ) -> str:
        """Return a self-contained HTML page, as written by ``ckptfix diff --html``.

        Args:
            histograms: read the tensors that differ once more, for their distributions.
            command: the command line shown on the page; ``ckptfix diff A B`` by default.

        Raises:
            CkptfixError: the files have changed since.
        """
        return page("diff", self, histograms=histograms, command=command, progress=progress)

    @property
    def same(self) -> bool:
        """True if nothing differs: neither a key, nor a property, nor an element or value beyond the tolerance."""
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
    def alarms(self) -> tuple[TensorChange, ...]:
        """The tensors with NaN or infinity in B where A has numbers, the largest change first."""
        return tuple(row for row in self.largest if row.is_alarm)

    @property
    def largest(self) -> tuple[TensorChange, ...]:
        """`changed`, the largest change first."""
        return tuple(sorted(self.changed, key=lambda row: row.weight, reverse=True))

    @property
    def overall(self) -> float | None:
        """``||A - B|| / ||B||`` over all elements of the tensors that differ; None where it is undefined."""
        rows = [row.values for row in self.changed if row.values is not None and row.values.differing]
        known = [(row.rel_l2, row.norm_b) for row in rows if row.rel_l2 is not None and row.norm_b]
        below = math.hypot(*(norm for _, norm in known))
        apart = math.hypot(*(change * norm for change, norm in known))
        return apart / below if below and math.isfinite(apart) and math.isfinite(below) else None

    @property
    def exit_code(self) -> int:
        """0 for the same, 1 for different, as with ``diff`` and ``cmp``."""
        return 0 if self.same else 1

    @property
    def lines(self) -> tuple[str, ...]:
        """The result in a few sentences for a person."""
        return tuple(_sentences(self))

    def as_dict(self) -> dict[str, Any]:
        """Return the result as a JSON object. Floats that JSON lacks, and values of other types, become strings."""
        plain = {name: jsonable(value) for name, value in asdict(replace(self, tensors=ComparedEntries())).items()}
        modules = [{"side": row.side, "at": row.at, "left_behind": list(row.left)} for row in self.modules]
        del plain["unread"], plain["notes"], plain["tensors"]
        findings = as_rows((*self.unread, *self.notes), self.path_a)
        return {"same": self.same, **plain, "modules": modules, "findings": findings, "summary": list(self.lines)}


_ODD_FLOATS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def jsonable(value: object) -> object:
    """Convert `value` to what JSON can express."""
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


LARGEST = 3
"""Tensors that the sentences name."""


def _alarm(row: TensorChange) -> str:
    values = row.values
    assert values is not None
    found = _listed(((values.nan_b, "NaN"), (values.infinite_b, "infinite")))
    return f"{row.name_b} ({found} of {values.elements:,})"


def _listed(parts: Iterable[tuple[int, str]]) -> str:
    return ", ".join(f"{count:,} {what}" for count, what in parts if count)


def _sentences(result: DiffResult) -> Iterable[str]:
    counts = result.counts
    tensors = plural(counts.matched, "tensor")
    if result.alarms:
        yield f"NaN or infinity in B where A has numbers: {some([_alarm(row) for row in result.alarms], LARGEST)}."
    if result.same:
        if result.keys_only:
            yield f"Same: keys, shapes and dtypes of {tensors}."
        else:
            yield f"Same: {tensors} ({counts.nbytes:,} bytes), {plural(counts.values, 'other value')}."
    else:
        found = _listed(
            (
                (counts.equal, "the same in shape and dtype" if result.keys_only else "equal"),
                (sum(1 for row in result.changed if row.differences), "with different properties"),
                (sum(1 for row in result.changed if row.values is not None), "with different values"),
            )
        )
        yield f"Different: {tensors} in both{', ' + found if found else ''}."
        if result.overall is not None:
            # The first sentence names those with new NaN, whose change is that of their other numbers.
            largest = [row for row in result.largest if row.values is not None and row.values.rel_l2]
            largest = [row for row in largest if not row.is_alarm][:LARGEST]
            shown = [f"{row.name_a} {row.values.rel_l2:.3g}" for row in largest if row.values is not None]
            names = f"; largest: {', '.join(shown)}" if shown else ""
            yield f"Relative change of the tensors that differ: {result.overall:.3g}{names}."
        names = _listed(
            (
                (len(result.only_a), "only in A"),
                (len(result.only_b), "only in B"),
                (len(result.wrapped), "under a key that differs by a wrapper prefix"),
                (len(result.renamed), "renamed"),
                (len(result.sharing), "shared storages on one side only"),
            )
        )
        if names:
            yield f"Keys: {names}."
        if result.values:
            yield f"Other values: {len(result.values):,} of {counts.values:,} differ."
        if result.unread:
            yield f"Not comparable: {plural(len(result.unread), 'tensor')} could not be read."
    if result.ambiguous:
        yield f"{plural(len(result.ambiguous), 'group')} of equal tensors could not be paired by content."
    if result.close:
        yield f"{plural(len(result.close), 'tensor')} with different bytes count as equal in value."
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
        yield f"{row.side.upper()}: {what} was compared as its state dict (write it with `{way}`)."
        if row.left:
            yield f"{row.side.upper()}: not compared, as they are in no state dict: {', '.join(row.left)}."
