"""``ckptfix.cast``: the same numbers in a different dtype, bit for bit as torch converts them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from threading import Lock
from typing import Any, Literal

from ckptfix.arguments import checks_types
from ckptfix.checkpoint import Checkpoint, Data, Edit, OutputFile, Plan, Put, Storage, TensorEntry, dtypes
from ckptfix.checkpoint.quantization_signs import observers
from ckptfix.dataclass import dataclass
from ckptfix.elements import arrays
from ckptfix.elements.arrays import Encoding
from ckptfix.errors import Refused, StrPath, WouldLoseData, file_name
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats import FORMATS, format_of, located, states
from ckptfix.formats.in_place import A_COPY
from ckptfix.io.elements import resolved, why_unresolved
from ckptfix.io.parallel_map import mapped
from ckptfix.io.read import Progress
from ckptfix.names import typed
from ckptfix.names.globs import Globs
from ckptfix.ops import choose, quantized
from ckptfix.ops.any_source import takes_any_source
from ckptfix.ops.audit.promise import everything, holders, listed
from ckptfix.ops.choose import refuse_damaged
from ckptfix.ops.writing import OLD_BYTES, Draft, Result, WriteOptions, carry_out, copy_note, plan_edits
from ckptfix.words import plural, some

SHORT = {
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64",
    "f16": "float16", "f32": "float32", "f64": "float64", "half": "float16", "float": "float32", "double": "float64",
    "fp8": "float8_e4m3fn", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2",
    "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
}  # fmt: skip
"""Alternative names of dtypes."""

STAY: dict[str, str] = {
    "running_mean": "torch.nn.BatchNorm and InstanceNorm: statistics that are accumulated in float32",
    "running_var": "torch.nn.BatchNorm and InstanceNorm: statistics that are accumulated in float32",
    "num_batches_tracked": "torch.nn.BatchNorm and InstanceNorm: a counter",
    "n_averaged": "torch.optim.swa_utils.AveragedModel: a counter",
    "inv_freq": "rotary embeddings: frequencies whose rounding errors grow with the position",
}
"""Last component of a key -> why it is not cast unless named. Scales are in `checkpoint.quantization`."""


@dataclass(slots=True)
class Tally:
    """Counts of the elements of a tensor that changed by more than rounding.

    Attributes:
        overflow: finite numbers that became infinite or NaN.
        saturated: numbers, including infinities, that became the largest number of the dtype.
        underflow: numbers that became zero.
    """

    overflow: int = 0
    saturated: int = 0
    underflow: int = 0


@dataclass(slots=True)
class Tallies:
    """Tallies by storage and piece: a piece that is computed twice, for its checksum and for the output, counts once.

    Attributes:
        strict: raise an error at the first number that leaves the range.
    """

    strict: bool
    _pieces: dict[tuple[str, int], Tally] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def note(self, name: str, first: int, tally: Tally) -> None:
        if self.strict and (tally.overflow or tally.saturated):
            hint = "--on-overflow count continues, and counts them"
            raise WouldLoseData("a number is out of the range of the dtype", where=name, hint=hint)
        if tally.overflow or tally.saturated or tally.underflow:
            with self._lock:
                self._pieces[name, first] = tally

    def of(self) -> dict[str, Tally]:
        """Return the tally of each tensor with elements that changed by more than rounding, by name."""
        made: dict[str, Tally] = {}
        for (name, _), piece in sorted(self._pieces.items()):
            row = made.setdefault(name, Tally())
            row.overflow += piece.overflow
            row.saturated += piece.saturated
            row.underflow += piece.underflow
        return made


@dataclass(frozen=True, slots=True)
class Casts:
    """The plan of a cast.

    Attributes:
        edits: edits for `plan_edit`.
        puts: address of a tensor -> the tensor that replaces it.
        old: address of a tensor -> its former dtype.
        kept: address of a floating-point tensor of a model that is not cast -> the reason.
        tallies: counts of changed elements, filled while the output is written.
        findings: globs that matched nothing.
    """

    edits: tuple[Edit, ...]
    puts: Mapping[str, TensorEntry]
    old: Mapping[str, str]
    kept: Mapping[str, str]
    tallies: Tallies
    findings: tuple[Finding, ...]


def dtype_of(name: str) -> str:
    """Return the dtype that a user calls `name`.

    Raises:
        Refused: it is not a dtype, or numbers cannot be rounded to it.
    """
    known = SHORT.get(name.lower(), name.lower().removeprefix("torch."))
    if known not in arrays.TARGETS:
        raise Refused(f"cannot cast to {name!r}", hint=f"choose one of {', '.join(arrays.TARGETS)}")
    return known


def plan_cast(
    checkpoint: Checkpoint,
    to: str,
    *,
    only: Sequence[str] = (),
    keep: Sequence[str] = (),
    at: str | None = None,
    strict: bool = False,
    allow_unmatched: bool = False,
) -> Casts:
    """Plan the cast of the model's state dicts to the dtype `to`.

    Raises:
        Refused: there is no such dtype; or the selection includes codes of a quantized weight, or their companions.
        NoSuchTensor: there is no state dict at `at`, or a glob matches no key and `allow_unmatched` is not set.
    """
    to = dtype_of(to)
    only_by, kept_by = Globs(only), Globs(keep)
    sites = choose.chosen_sites(checkpoint, at, weights_only=True)
    if not sites and at is None:
        choose.refuse_module(checkpoint)
    ats = {site.at for site in sites}
    kept: dict[str, str] = {}
    wanted: list[TensorEntry] = []
    everyone = listed(checkpoint)
    called = Counter(entry.name for entry in everyone)
    around = holders(everyone)
    optimizer = {entry.name for entry in choose.optimizer_tensors(checkpoint)} if at is None else set()
    mine = [entry for entry in everyone if entry.at in ats and entry.name not in optimizer]
    _refuse_quantized(checkpoint, mine, only_by, kept_by)
    observed = observers(mine)
    for entry in mine:
        named, stays = only_by.match(entry.key), kept_by.match(entry.key)
        why = _why_not(entry, named=named, asked=bool(only_by), stays=stays)
        if why is None and not named:
            why = observed.get(entry.name)
        if why is None and entry.name in around:
            why = "it carries other tensors"
        if why is None and called[entry.name] > 1:
            why = "another tensor has the same address"
        if why is None and entry.dtype != to:
            # Some dtypes have no negation in torch, so a tensor of them that is marked as negated would be unreadable.
            lasts = why_unresolved(replace(entry, dtype=to)) is None
            wanted.append(entry if lasts else resolved(entry, checkpoint.byteorder))
        elif why:
            kept[entry.name] = why
    unused = [*only_by.unused(), *kept_by.unused()]
    findings = typed.unmatched(unused, (entry.key for entry in mine), kind="glob", allow=allow_unmatched)
    tallies = Tallies(strict)
    puts: dict[str, TensorEntry] = {}
    chosen = {entry.name for entry in wanted}
    made: dict[tuple[str, str], Storage] = {}
    others = _others(everyone, chosen)
    for entry in wanted:
        storage = entry.storage
        assert storage is not None and storage.data is not None
        other = others.get(storage.identity, entry)
        if other is not entry and other.dtype != to:
            kept[entry.name] = f"it shares its bytes with {other.name}, which is not cast"
            continue
        if storage.identity not in made:
            made[storage.identity] = _cast_storage(checkpoint, entry, storage, storage.data, to, tallies)
        puts[entry.name] = replace(entry, dtype=to, storage=made[storage.identity])
    by_at: dict[str, dict[str, TensorEntry]] = {}
    for entry in wanted:
        if entry.name in puts:
            by_at.setdefault(entry.at, {})[entry.key] = puts[entry.name]
    old = {entry.name: entry.dtype for entry in wanted if entry.name in puts}
    edits = tuple(Put(at, tensors) for at, tensors in by_at.items())
    return Casts(edits, puts, old, kept, tallies, findings)


def _refuse_quantized(checkpoint: Checkpoint, mine: Sequence[TensorEntry], only: Globs, keep: Globs) -> None:
    """Raise `Refused` if the selection includes codes of quantized weights, or tensors that belong to them."""
    roles = quantized.quantization_of(checkpoint).roles
    if not roles:
        return
    taken = [entry for entry in mine if (only.match(entry.key) if only else True) and not keep.match(entry.key)]
    belonging = [entry.key for entry in mine if entry.name in roles]
    others = [entry for entry in taken if entry.name not in roles]
    castable = [entry.key for entry in others if _why_not(entry, named=False, asked=False, stays=False) is None]
    options = quantized.selecting(belonging, castable)
    hint = f"{options or '--keep GLOB'} leaves the quantized weights unchanged"
    if not castable:
        hint = "`ckptfix convert --dequantize` writes plain weights; nothing else in the file can be cast"
    quantized.refuse(checkpoint, [entry.name for entry in taken], "a cast would change its weights", hint)


def _why_not(entry: TensorEntry, *, named: bool, asked: bool, stays: bool) -> str | None:
    """Return why a tensor is not cast: "" if the reason is obvious, None if it is cast."""
    row = dtypes.find(entry.dtype)
    if stays:
        return "as requested"
    if entry.kind == "meta":
        return "the file does not hold its data"
    if entry.kind != "dense" or row is None or row.family not in ("float", "int", "bool"):
        said = named or (row is not None and row.family in ("float", "complex"))
        return f"a {entry.kind} tensor of {entry.dtype}" if said else ""
    if entry.storage is None or entry.storage.data is None:
        return "the file does not hold its data"
    if asked:
        return None if named else ""
    if row.family != "float":
        return ""
    return STAY.get(entry.key.rpartition(".")[2])


def _others(everyone: Sequence[TensorEntry], chosen: set[str]) -> dict[tuple[str, str], TensorEntry]:
    """Map each storage to a tensor on it that is not cast, or whose dtype differs from the first one that is cast."""
    found: dict[tuple[str, str], TensorEntry] = {}
    first: dict[tuple[str, str], TensorEntry] = {}
    for entry in everyone:
        if entry.storage is None:
            continue
        identity = entry.storage.identity
        if entry.name not in chosen or first.setdefault(identity, entry).dtype != entry.dtype:
            found.setdefault(identity, entry)
    return found


def _cast_storage(
    checkpoint: Checkpoint, entry: TensorEntry, storage: Storage, data: Data, to: str, tallies: Tallies
) -> Storage:
    source, target = (Encoding.of(dtype, checkpoint.byteorder) for dtype in (entry.dtype, to))
    name = entry.name

    def compute(first: int, pieces: Sequence[bytes | memoryview]) -> bytes:
        made, tally = cast_bytes(pieces[0], source, target)
        tallies.note(name, first, tally)
        return made

    whole = data.length - data.length % source.itemsize
    if whole != data.length:
        raise WouldLoseData(f"{data.length} bytes are not a whole number of {entry.dtype} elements", where=name)
    stream = mapped([data], [source.itemsize], target.itemsize, compute, f"cast to {to}")
    return Storage(storage.key, to, stream.length, storage.location, stream)


def cast_bytes(data: bytes | memoryview, source: Encoding, target: Encoding) -> tuple[bytes, Tally]:
    """Return the elements of `data`, encoded as `source`, encoded as `target`, and a tally of unusual results."""
    import numpy

    tally = Tally()
    to = target.dtype.name
    made = numpy.empty(len(data) // source.itemsize, f"u{target.itemsize}")
    start = 0
    with numpy.errstate(all="ignore"):
        for block in source.blocks(data):
            into = made[start : start + block.size]
            start += block.size
            arrays.rounded(block, to, into)
            if to != "float64" and arrays.unusual(into, to):
                _count(block, into, to, tally)
    return target.stored(made), tally


def _count(block: arrays.Elements, made: arrays.Elements, to: str, tally: Tally) -> None:
    import numpy

    most = arrays.MOST[to]
    # torch converts a float64 to a narrower dtype by way of float32.
    near = numpy.abs(block.astype(numpy.float64 if to == "float32" else numpy.float32, copy=False))
    if to == "float8_e4m3fn":
        tally.saturated += int(numpy.count_nonzero(near > most))
    else:
        tally.overflow += int(numpy.count_nonzero((near >= most) & numpy.isfinite(block)))
    nothing = arrays.zeros(made, to)
    if nothing:
        tally.underflow += nothing - int(numpy.count_nonzero(block == 0))


def overflow_findings(tallies: Mapping[str, Tally], to: str) -> list[Finding]:
    """Return a finding for each tensor with elements that left the range of the dtype."""
    rows: list[Finding] = []
    for name, tally in tallies.items():
        what = []
        if tally.overflow:
            what.append(f"{tally.overflow:,} elements are beyond the range of {to}")
        if tally.saturated:
            what.append(f"{tally.saturated:,} elements became the largest number of {to}")
        if what:
            rows.append(found("out-of-range", "; ".join(what), where=name))
    return rows


OnOverflow = Literal["count", "error"]

ScaleFor = Literal["tensor", "row", "block"]
"""The elements that share a scale: those of a tensor, of a row, or of a block of 128 x 128."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CastResult(Result):
    """The result of a cast.

    Attributes:
        to: the new dtype.
        cast: address of a tensor -> its former dtype.
        kept: address of a tensor that holds numbers but was not cast -> the reason.
        rounded: address of a tensor -> how many of its elements left the range of the dtype; empty after a dry run. For
            tensors that share their bytes, only the first one is listed.
        scale: the elements that share a scale; None without scales.
        scales: address of a weight -> key of its scale.
        quantization_config: the settings that config.json needs; None without scales.
    """

    to: str = ""
    cast: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    rounded: Mapping[str, Tally] = field(default_factory=dict)
    scale: ScaleFor | None = None
    scales: Mapping[str, str] = field(default_factory=dict)
    quantization_config: Mapping[str, Any] | None = None

    def _details(self) -> dict[str, Any]:
        return {
            "to": self.to,
            "cast": [{"name": name, "dtype": dtype} for name, dtype in self.cast.items()],
            "kept": [{"name": name, "reason": why} for name, why in self.kept.items()],
            "rounded": [
                {"name": name, "overflow": row.overflow, "saturated": row.saturated, "underflow": row.underflow}
                for name, row in self.rounded.items()
            ],
            "scale": self.scale,
            "scales": [{"name": name, "key": key} for name, key in self.scales.items()],
            "quantization_config": None if self.quantization_config is None else dict(self.quantization_config),
        }


def _folder_of(source: StrPath, dest: StrPath) -> bool:
    """Return whether the output is a folder because the source is one that holds a model in a single file.

    fp8 weights are not loaded without the settings in config.json, so a model's folder becomes a folder.
    """
    path = located(source)
    alone = path != file_name(source) and FORMATS.with_suffix(file_name(dest)) is None
    return alone and FORMATS.with_suffix(path) is FORMATS["safetensors"]


def _scaled(
    checkpoint: Checkpoint, source: StrPath, dest: str, casts: Casts, scale: ScaleFor, *, named: bool
) -> Draft[CastResult]:
    """Return the draft of fp8 codes with scales for the tensors of `casts` that get some.

    Args:
        named: the user named the tensors.
    """
    # Other casts start faster without this import.
    from ckptfix.ops.cast.scales import FLOATS, plan_quantization, why_not_linear

    kept = dict(casts.kept)
    wanted: list[TensorEntry] = []
    for entry in listed(checkpoint):
        if entry.name not in casts.puts:
            continue
        why = None if named else why_not_linear(entry.key)
        if len(entry.shape) != 2:
            why = "only a matrix gets a scale"
        elif entry.dtype not in FLOATS:
            why = f"a matrix of {entry.dtype} gets no scale"
        if why is None:
            wanted.append(entry)
        elif named:
            raise Refused(why, where=entry.name, hint="--keep leaves it unchanged")
        else:
            kept[entry.name] = why
    others = _others(listed(checkpoint), {entry.name for entry in wanted})
    for entry in list(wanted):
        assert entry.storage is not None
        other = others.get(entry.storage.identity)
        if other is not None and other.name != entry.name:
            kept[entry.name] = f"it shares its bytes with {other.name}, which is not cast"
            wanted.remove(entry)
    target = FORMATS["hf"] if _folder_of(source, dest) else format_of(checkpoint)
    done = plan_quantization(checkpoint, wanted, scale, kept, dest, target, source)
    was = ", ".join(dict.fromkeys(done.old.values()))
    lines = [f"cast {plural(len(done.old), 'tensor')} to float8_e4m3fn (from {was}), a scale for each {scale}"]
    if not wanted:
        lines = ["nothing to do: no matrix to cast"]
    if kept:
        lines.append(f"unchanged: {some(list(kept))}")
    if wanted and not done.configured:
        lines.append(f"config.json needs \"quantization_config\": {json.dumps(done.config)}")
    return Draft(
        result=partial(
            CastResult,
            to="float8_e4m3fn",
            cast=done.old,
            kept=kept,
            scale=scale,
            scales=done.scales,
            quantization_config=done.config if wanted else None,
        ),
        format=target.name,
        plan=done.plan,
        promise=done.promise,
        lines=lines,
        findings=(*casts.findings, *done.plan.findings),
    )


@checks_types
@takes_any_source()
def cast(
    source: StrPath,
    dest: StrPath | None,
    to: str,
    *,
    only: Sequence[str] = (),
    keep: Sequence[str] = (),
    at: str | None = None,
    on_overflow: OnOverflow = "count",
    scale: ScaleFor | None = None,
    allow_unmatched: bool = False,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    in_place: bool = False,
    progress: Progress | None = None,
) -> CastResult:
    """Write `source` to `dest` with its floating-point tensors in a different dtype, converted as ``tensor.to`` does.

    Integers, the optimizer and the tensors in a table of exceptions (such as BatchNorm statistics) are not cast.

    Args:
        to: a dtype such as ``"bfloat16"`` or ``"float8_e4m3fn"``.
        only: globs; only tensors whose keys match are cast, including integers and those in the table.
        keep: globs; tensors whose keys match are not cast.
        at: address of the one state dict to cast; all that look like a model's by default.
        on_overflow: ``"error"``: stop at a number that leaves the range of the dtype, and write nothing.
        scale: write fp8 codes with scales, as transformers and vLLM read them; `to` must be ``"float8_e4m3fn"``. Only
            the matrices of linear layers are quantized, or those that `only` names.
        allow_unmatched: a glob that matches no key is a finding, not an error.
        force, keep_old, dry_run, in_place, progress: as in `strip_module`. In place, a torch zip also keeps the old
            tensors, which `slim` removes; other formats refuse it, because their data would move.

    Raises:
        Refused: the dtype does not exist; or the tensors include codes of a quantized weight, or their scales.
        WouldLoseData: a number leaves the range, with ``on_overflow="error"``.
        NoSuchTensor, WouldOverwrite, DamagedFile, UnknownFormat, WriteFailed.
    """
    if on_overflow not in ("count", "error"):
        raise Refused(f"on_overflow must be 'count' or 'error', not {on_overflow!r}")
    if scale is not None and dtype_of(to) != "float8_e4m3fn":
        raise Refused(f"scales are for float8_e4m3fn, not {dtype_of(to)}", hint="--to float8_e4m3fn")
    if scale is not None and in_place:
        raise Refused("codes with scales need a new file", path=file_name(source), hint=A_COPY)

    def make(checkpoint: Checkpoint, dest: str) -> Draft[CastResult]:
        strict = on_overflow == "error" and scale is None
        refuse_damaged(checkpoint)
        done = plan_cast(
            checkpoint, to, only=only, keep=keep, at=at, strict=strict, allow_unmatched=allow_unmatched
        )
        if scale is not None:
            return _scaled(checkpoint, source, dest, done, scale, named=bool(only))
        name = dtype_of(to)
        dtypes = dict.fromkeys(done.old.values())
        line = f"cast {plural(len(done.puts), 'tensor')} to {name} (from {', '.join(dtypes)})"
        if not done.puts:
            line = f"nothing to do: no tensor to cast to {name}" + copy_note(True)
        lines = [line]
        if done.kept:
            lines.append(f"unchanged: {some(list(done.kept))}")
        if done.puts and in_place and states(checkpoint, "objects"):
            lines.append(OLD_BYTES)
        return Draft(
            result=partial(
                CastResult, to=name, cast=done.old, kept=done.kept, finish=partial(_counted, done.tallies, name)
            ),
            format=checkpoint.format,
            plan=_planned(checkpoint, done, dest, None if only else name),
            promise=replace(everything(checkpoint), puts=done.puts),
            lines=lines,
            findings=done.findings,
            amend=None if only else partial(_with_dtype, checkpoint, name),
        )

    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, in_place=in_place, progress=progress)
    folder = True if scale is not None and dest is not None and _folder_of(source, dest) else None
    return carry_out(source, dest, make, how, folder=folder)


def _planned(checkpoint: Checkpoint, casts: Casts, dest: str, dtype: str | None) -> Plan:
    """Plan the output; with `dtype`, the config.json of a folder states it."""
    plan = plan_edits(checkpoint, casts.edits, dest)
    if dtype is None or not casts.puts or not format_of(checkpoint).folder:
        return plan
    return replace(plan, files=_with_dtype(checkpoint, dtype, plan.files))


def _with_dtype(checkpoint: Checkpoint, dtype: str, files: Iterable[OutputFile]) -> tuple[OutputFile, ...]:
    # Few outputs are folders, and other casts start faster without this import.
    from ckptfix.ops.cast.config import with_dtype

    return with_dtype(checkpoint, files, dtype)


def _counted(counts: Tallies, to: str, result: Result) -> Result:
    """Add the elements that left the range of the dtype `to`, which are known once they are computed."""
    tallies = counts.of()
    if not tallies:
        return result
    under = sum(row.underflow for row in tallies.values())
    lines = [f"underflow: {plural(under, 'element')} became zero"] if under else []
    findings = overflow_findings(tallies, to)
    result = replace(result, lines=(*result.lines, *lines), findings=(*result.findings, *findings))
    return replace(result, rounded=tallies) if isinstance(result, CastResult) else result
