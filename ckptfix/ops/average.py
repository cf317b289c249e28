"""``ckptfix.average``: one set of weights from several, as in stochastic weight averaging and model soups."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import field, replace
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

from ckptfix import formats
from ckptfix.arguments import checks_types
from ckptfix.checkpoint import (
    Checkpoint,
    Data,
    Edit,
    Put,
    RangeCheck,
    Storage,
    TensorEntry,
    contiguous_stride,
    dtypes,
    same_place,
)
from ckptfix.checkpoint.tensors import NO_DATA, NO_DATA_HINT
from ckptfix.command_table import COMMANDS
from ckptfix.dataclass import dataclass
from ckptfix.elements import arrays
from ckptfix.elements.arrays import Encoding
from ckptfix.elements.nonfinite import NonFinite
from ckptfix.errors import Refused, StrPath, about, file_name
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats import without_optimizer
from ckptfix.formats.members import role_of
from ckptfix.formats.target import of_suffix
from ckptfix.formats.torch.tensors import KINDS
from ckptfix.io.elements import resolved, row_major, why_unresolved
from ckptfix.io.parallel_map import mapped
from ckptfix.io.read import Progress
from ckptfix.io.source import found_as, shares_open_files
from ckptfix.ops import choose, quantized
from ckptfix.ops.adapter import differences, glance
from ckptfix.ops.any_source import as_state_dict, takes_any_source
from ckptfix.ops.audit.promise import everything, holders, listed
from ckptfix.ops.writing import Draft, Result, WriteOptions, carry_out, is_folder, plan_edits, refuse_destination
from ckptfix.urls import as_path, scan_folder
from ckptfix.words import plural, some

NORMS = ("running_mean", "running_var")
"""Last components of the keys of BatchNorm statistics, which no longer fit the weights once these are averaged."""

APART = (
    "lora_A and lora_B were averaged apart, which is not the mean of the updates: `ckptfix lora merge BASE A B -o OUT "
    "--scale 0.5` makes that of two adapters"
)
"""The line about adapters."""

MOST_NAMED = 100

TOGETHER = 1 << 17
"""Elements whose mean is computed by one call: with shorter calls, two threads wait for each other more often."""

Table = dict[str, TensorEntry]


@dataclass(slots=True)
class Oddities:
    """Non-finite elements of the inputs, recorded by piece: a piece that is computed twice counts once."""

    _pieces: dict[tuple[str, int, int], NonFinite] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def note(self, name: str, first: int, number: int, odd: NonFinite) -> None:
        """Record the non-finite elements of a piece of tensor `name`, from element `first` on, in input `number`."""
        with self._lock:
            self._pieces[name, first, number] = odd

    def of(self, number: int) -> dict[str, NonFinite]:
        """Return the non-finite elements of input `number`, by the name of the tensor."""
        made: dict[str, NonFinite] = {}
        for (name, _, which), odd in sorted(self._pieces.items()):
            if which == number:
                made.setdefault(name, NonFinite()).join(odd)
        return made


@dataclass(frozen=True, slots=True)
class Averaging:
    """The plan of an averaging.

    Attributes:
        edits: edits of the last checkpoint, for `plan_edit`.
        puts: address of a tensor -> the tensor that replaces it.
        taken: addresses of tensors copied from the last checkpoint: integers, and tensors without numbers.
        moments: addresses of optimizer tensors in the same state dict, which are copied from the last checkpoint too.
        norms: whether BatchNorm statistics are among the averaged tensors.
        checks: checks of the input bytes that have a checksum.
        oddities: non-finite elements, filled while the output is written.
    """

    edits: tuple[Edit, ...]
    puts: Mapping[str, TensorEntry]
    taken: tuple[str, ...]
    moments: tuple[str, ...]
    norms: bool
    checks: tuple[RangeCheck, ...]
    oddities: Oddities


def plan_average(checkpoints: Sequence[Checkpoint], weights: Sequence[float], *, at: str | None = None) -> Averaging:
    """Plan the weighted mean of the floating-point tensors of the chosen state dicts, as edits of the last checkpoint.

    Args:
        weights: weight of each checkpoint; they are divided by their sum.
        at: address of the state dict in each checkpoint.

    Raises:
        Refused: keys, shapes or dtypes differ, and the message lists all such keys. Or a tensor belongs to a quantized
            weight, or has no data.
    """
    ats = [choose.mapping(checkpoint, at).at for checkpoint in checkpoints]
    tables = [_table(checkpoint, at) for checkpoint, at in zip(checkpoints, ats, strict=True)]
    _refuse_others(checkpoints, tables)
    _refuse_without_values(checkpoints, tables)
    mine = tables[-1]
    puts: Table = {}
    made: dict[object, Storage] = {}
    oddities = Oddities()
    whole = _whole_storages(tables)
    around = holders(checkpoints[-1].entries)
    for key, entry in mine.items():
        if not _has_mean(entry) or entry.name in around:
            continue
        others = [table[key] for table in tables]
        if key in whole:
            place: object = tuple(_storage(other).identity for other in others)
            inputs = [_data_of(other) for other in others]
        else:
            place = tuple(map(same_place, others))
            orders = (checkpoint.byteorder for checkpoint in checkpoints)
            inputs = [row_major(other, order) for other, order in zip(others, orders, strict=True)]
            entry = replace(resolved(entry, checkpoints[-1].byteorder), stride=contiguous_stride(entry.shape), offset=0)
        if place not in made:
            made[place] = _mean(entry, inputs, checkpoints, weights, oddities)
        puts[key] = replace(entry, storage=made[place])
    edits = (Put(ats[-1], puts),) if puts else ()
    used = {_storage(table[key]).identity: _storage(table[key]) for table in tables[:-1] for key in puts}
    return Averaging(
        edits,
        {mine[key].name: entry for key, entry in puts.items()},
        tuple(entry.name for key, entry in mine.items() if key not in puts),
        tuple(entry.name for entry in listed(checkpoints[-1]) if entry.at == ats[-1] and entry.key not in mine),
        any(key.rpartition(".")[2] in NORMS for key in puts),
        tuple(
            RangeCheck(storage.key, storage.data, storage.crc32)
            for storage in used.values()
            if storage.data is not None and storage.crc32 is not None
        ),
        oddities,
    )


def _table(checkpoint: Checkpoint, at: str) -> Table:
    choose.refuse_damaged(checkpoint)
    return {entry.key: entry for entry in without_optimizer(tuple(row for row in listed(checkpoint) if row.at == at))}


def _refuse_others(checkpoints: Sequence[Checkpoint], tables: Sequence[Table]) -> None:
    """Raise `Refused` unless all tables have the same keys, shapes and dtypes."""
    first = tables[0]
    for checkpoint, table in zip(checkpoints[1:], tables[1:], strict=True):
        faults = [f"missing: {_named(missing)}"] if (missing := [key for key in first if key not in table]) else []
        if extra := [key for key in table if key not in first]:
            faults.append(f"not in the first: {_named(extra)}")
        both = [key for key in first if key in table]
        for what in ("shape", "dtype", "kind"):
            other = [key for key in both if getattr(first[key], what) != getattr(table[key], what)]
            if other:
                one, two = getattr(first[other[0]], what), getattr(table[other[0]], what)
                faults.append(f"different {what}: {_named(other)} ({one} and {two})")
                break
        if faults:
            hint = f"the first is {checkpoints[0].path}; run `ckptfix diff` to compare them"
            if any(row.id == "adapters-differ" for row in differences([checkpoints[0], checkpoint])):
                hint = f"the first is {checkpoints[0].path}; `ckptfix lora resize` changes the rank of an adapter"
            raise Refused(f"cannot be averaged with the first: {'; '.join(faults)}", path=checkpoint.path, hint=hint)


def _refuse_without_values(checkpoints: Sequence[Checkpoint], tables: Sequence[Table]) -> None:
    """Raise `Refused` for tensors that have no mean: quantized codes and their scales, and tensors without data."""
    hint = "load the files with the library that wrote them, and average the weights that it dequantizes"
    for checkpoint, table in zip(checkpoints, tables, strict=True):
        names = [entry.name for entry in table.values()]
        quantized.refuse(checkpoint, names, "averaging codes or scales does not average the weights", hint)
        codes = next((entry for entry in table.values() if KINDS[entry.kind].codes), None)
        if codes is not None:
            message = f"a quantized tensor ({codes.dtype}): averaging codes or scales does not average the weights"
            raise Refused(message, path=checkpoint.path, where=codes.name, hint=hint)
        empty = next((entry for entry in table.values() if not entry.has_data), None)
        if empty is not None:
            raise Refused(NO_DATA, path=checkpoint.path, where=empty.name, hint=NO_DATA_HINT)


def _named(names: Sequence[str]) -> str:
    return some(names, MOST_NAMED)


def _has_mean(entry: TensorEntry) -> bool:
    row = dtypes.find(entry.dtype)
    return (
        entry.kind == "dense"
        and row is not None
        and row.family in ("float", "complex")
        and entry.storage is not None
        and entry.storage.data is not None
        and why_unresolved(entry) is None
    )


def _storage(entry: TensorEntry) -> Storage:
    assert entry.storage is not None
    return entry.storage


def _data_of(entry: TensorEntry) -> Data:
    data = _storage(entry).data
    assert data is not None
    return data


class _View(NamedTuple):
    """A tensor as a view of its storage: its layout, its lazy operations, and the size of the storage."""

    name: str
    dtype: str
    offset: int
    stride: tuple[int, ...]
    lazy: tuple[str, ...]
    nbytes: int


def _whole_storages(tables: Sequence[Table]) -> set[str]:
    """Return the keys whose storages can be averaged whole: every input has the same tensors at the same offsets there.

    Ties and views that all inputs share are then ties and views in the output.
    """
    groups: list[dict[str, frozenset[_View]]] = []
    last: list[list[str]] = []
    for table in tables:
        on: dict[tuple[str, str], list[str]] = {}
        for key, entry in table.items():
            if entry.storage is not None:
                on.setdefault(entry.storage.identity, []).append(key)
        group: dict[str, frozenset[_View]] = {}
        for names in on.values():
            # All keys on a storage share one set: there may be a hundred thousand of them.
            group |= dict.fromkeys(names, frozenset(_view(table[name], name) for name in names))
        groups.append(group)
        last = list(on.values())
    found: set[str] = set()
    for names in last:
        views = groups[-1][names[0]]
        entry = tables[-1][names[0]]
        alike = all(group.get(names[0]) == views for group in groups)
        one_dtype = all(view.dtype == entry.dtype for view in views)
        if alike and one_dtype and _has_mean(entry) and _data_of(entry).length % entry.itemsize == 0:
            found.update(names)
    return found


def _view(entry: TensorEntry, name: str) -> _View:
    return _View(name, entry.dtype, entry.offset, entry.stride, entry.lazy, _storage(entry).nbytes)


def _mean(
    entry: TensorEntry,
    inputs: Sequence[Data],
    checkpoints: Sequence[Checkpoint],
    weights: Sequence[float],
    oddities: Oddities,
) -> Storage:
    encodings = [Encoding.of(entry.dtype, checkpoint.byteorder) for checkpoint in checkpoints]
    width = encodings[-1].itemsize
    total = sum(weights)

    def compute(first: int, pieces: Sequence[bytes | memoryview]) -> bytes:
        made, odd = mean_bytes(pieces, encodings, weights, total)
        for number, counts in enumerate(odd):
            if counts.nan or counts.infinite:
                oddities.note(entry.name, first, number, counts)
        return made

    stream = mapped(inputs, [width] * len(inputs), width, compute, f"mean of {plural(len(inputs), 'file')}")
    stored = _storage(entry)
    return Storage(stored.key, entry.dtype, stream.length, stored.location, stream)


def mean_bytes(
    pieces: Sequence[bytes | memoryview], encodings: Sequence[Encoding], weights: Sequence[float], total: float
) -> tuple[bytes, Sequence[NonFinite]]:
    """Return the weighted mean of the elements in `pieces`, and the non-finite elements of each piece.

    All pieces have one dtype; the mean is encoded like the last piece.
    """
    import numpy

    row = encodings[-1].dtype
    into = numpy.empty(len(pieces[-1]) // row.unit, f"u{row.unit}")
    odd = [NonFinite() for _ in pieces]
    parts = (encoding.parts(piece, TOGETHER) for encoding, piece in zip(encodings, pieces, strict=True))
    start = 0
    with numpy.errstate(all="ignore"):
        for several in zip(*parts, strict=True):
            mean = _mean_of(_decoded(several, encodings), row, weights, total)
            # A non-finite element of one input makes the mean non-finite there, and the sum of the mean too.
            if not numpy.isfinite(mean.sum()):
                for found, block in zip(odd, _decoded(several, encodings), strict=True):
                    found.add(block)
            made = _rounded(mean, row).view(into.dtype)
            into[start : start + made.size] = made
            start += made.size
    return encodings[-1].stored(into), odd


def _decoded(several: Sequence[memoryview], encodings: Sequence[Encoding]) -> Iterator[arrays.Elements]:
    return (encoding.decoded(part) for encoding, part in zip(encodings, several, strict=True))


def _mean_of(
    blocks: Iterable[arrays.Elements], row: dtypes.Dtype, weights: Sequence[float], total: float
) -> arrays.Elements:
    """Return the mean of the blocks, in float64 or complex128."""
    import numpy

    if row.name in ("float64", "complex128"):
        return _own_mean(list(blocks), weights, total)
    wide = numpy.complex128 if row.family == "complex" else numpy.float64
    sums: arrays.Elements | None = None
    for block, weight in zip(blocks, weights, strict=True):
        if sums is None:
            sums = block.astype(wide)
            if weight != 1:
                sums *= weight
        elif weight == 1:
            sums += block
        else:
            sums += numpy.multiply(block, weight, dtype=wide)
    assert sums is not None
    if total != 1:
        sums /= total
    return sums


def _rounded(mean: arrays.Elements, row: dtypes.Dtype) -> arrays.Elements:
    return mean.astype(row.name, copy=False) if row.family == "complex" else arrays.once(mean, row.name)


def _own_mean(
    blocks: Sequence[arrays.Elements], weights: Sequence[float], total: float
) -> arrays.Elements:
    """Return the mean of float64 blocks, in steps from the first one: elements that are equal in all blocks stay exact.

    Steps from and to infinity are undefined: such elements are summed instead.
    """
    import numpy

    mean = blocks[0].copy()
    so_far = weights[0]
    for block, weight in zip(blocks[1:], weights[1:], strict=True):
        so_far += weight
        mean += (block - mean) * (weight / so_far if so_far else numpy.nan)
    wrong = ~numpy.isfinite(mean)
    if wrong.any():
        mean[wrong] = sum(block[wrong] * (weight / total) for block, weight in zip(blocks, weights, strict=True))
    return mean


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AverageResult(Result):
    """The result of an averaging.

    Attributes:
        inputs: each file, and its weight in the mean; the weights add up to 1.
        averaged: addresses of the averaged tensors.
        taken: addresses of the tensors copied from the last file, such as integers and optimizer state.
    """

    inputs: tuple[tuple[str, float], ...] = ()
    averaged: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()

    def _details(self) -> dict[str, Any]:
        return {
            "inputs": [{"path": path, "weight": weight} for path, weight in self.inputs],
            "averaged": list(self.averaged),
            "taken": list(self.taken),
        }


@checks_types
@shares_open_files()
def average(
    sources: Sequence[StrPath],
    dest: StrPath,
    *,
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    last: int | None = None,
    at: str | None = None,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> AverageResult:
    """Write the last of `sources` to `dest`, with the mean of all inputs in place of its floating-point tensors.

    Sums are in float64 and are rounded once, to the dtype of each tensor. Integers, the optimizer and everything else
    are copied from the last file.

    Args:
        sources: checkpoints of the same model, in any format; with `last`, a folder of them.
        weights: weight of each file in the mean, 1 by default.
        ema: a decay between 0 and 1, for the exponential moving average of the files in their order.
        last: number of checkpoints to use from a folder, counted from the end by the numbers in their names.
        at: address of the state dict in each file; the only one that looks like a model's by default.
        force, keep_old, dry_run, progress: as in `strip_module`.

    Raises:
        Refused: keys, shapes or dtypes differ, and the message lists all such keys; or there are fewer than two files.
        CkptfixError: a file cannot be read, or `dest` cannot be written.
    """
    paths = [file_name(source) for source in sources]
    if last is not None:
        if len(paths) != 1:
            raise Refused("last needs exactly one folder")
        paths = last_of(paths[0], last)
    if len(paths) < 2:
        hint = "--last N averages those in a folder" if len(paths) == 1 and found_as(paths[0]) == "folder" else None
        raise Refused("average needs at least two inputs", hint=hint)
    shares = _shares(len(paths), weights, ema)

    @takes_any_source()
    def averaged(source: StrPath, dest: StrPath, *, at: str | None = None, **how: Any) -> AverageResult:
        made = partial(make, here=at)
        return carry_out(source, dest, made, WriteOptions(**how))

    def make(checkpoint: Checkpoint, dest: str, here: str | None) -> Draft[AverageResult]:
        try:
            choose.mapping(checkpoint, here)
        except Refused as error:
            if error.of_module:
                raise  # this is called again with its state dict, which is at the top level
        others: list[Checkpoint] = []
        for path in paths[:-1]:
            with about(path):
                others.append(as_state_dict(path, name, at, stack))
        done = plan_average([*others, checkpoint], shares, at=here)
        total = sum(shares)
        lines = [f"averaged {plural(len(done.puts), 'tensor')} of {plural(len(paths), 'file')}, in float64"]
        if done.taken:
            lines.append(f"not averaged, copied from {checkpoint.path}: {some(done.taken)}")
        if done.moments:
            lines.append(f"not averaged, optimizer state copied from {checkpoint.path}: {some(done.moments)}")
        findings = [found("batchnorm", where=checkpoint.path)] if done.norms else []
        findings += differences([*others, checkpoint])
        if glance(checkpoint) is not None:
            lines.append(APART)
        made = plan_edits(checkpoint, done.edits, dest)
        return Draft(
            result=partial(
                AverageResult,
                inputs=tuple((path, share / total) for path, share in zip(paths, shares, strict=True)),
                averaged=tuple(done.puts),
                taken=(*done.taken, *done.moments),
                finish=partial(_with_odd, done, paths),
            ),
            format=checkpoint.format,
            plan=replace(made, checks=(*made.checks, *done.checks), holds=(made.holds, others)),
            promise=replace(everything(checkpoint), puts=done.puts),
            lines=lines,
            findings=findings,
            read=tuple(mark for other in others for mark in other.files),
        )

    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, progress=progress)
    name = os.fspath(dest)
    refuse_destination(dest, paths[:-1], how, folder=is_folder(paths[-1]) and of_suffix(name) is None)
    with ExitStack() as stack:
        return averaged(paths[-1], dest, at=at, **how.keywords())


def _with_odd(plan: Averaging, paths: Sequence[str], result: AverageResult) -> AverageResult:
    """Add the NaN values and infinities of the inputs, which are known once their mean is computed."""
    counts = [plan.oddities.of(number) for number in range(len(paths))]
    findings = [row for path, odd in zip(paths, counts, strict=True) for row in _not_finite(path, odd, counts)]
    return replace(result, findings=(*result.findings, *findings)) if findings else result


OddCounts = Mapping[str, NonFinite]


def _not_finite(path: str, odd: OddCounts, everyone: Sequence[OddCounts]) -> Iterator[Finding]:
    """Yield a finding for the NaN values of an input, and one for its infinities: the mean inherits them."""
    nan = {name: row.nan for name, row in odd.items() if row.nan}
    infinite = {name: row.infinite for name, row in odd.items() if row.infinite}
    # A mask has the same number of infinities in every input; a weight has not.
    is_mask = all(name in row and row[name].infinite == count for name, count in infinite.items() for row in everyone)
    if nan:
        yield found("nan-values", _counted("NaN value", nan), where=path)
    if infinite:
        message = _counted("infinite value", infinite)
        yield found("infinite-values", message, where=path, severity=None if is_mask else "warning")


def _counted(what: str, counts: Mapping[str, int]) -> str:
    names = some([f"{name} ({count:,})" for name, count in counts.items()], 5)
    total, tensors = plural(sum(counts.values()), what), plural(len(counts), "tensor")
    return f"{total} in {tensors}, which the mean inherits: {names}"


def _shares(count: int, weights: Sequence[float] | None, ema: float | None) -> list[float]:
    """Return the weights of `count` files.

    Raises:
        Refused: the number of weights is not `count`, or they do not define a mean.
    """
    if weights is not None and ema is not None:
        raise Refused("weights and ema both set how much each file counts: pass only one of them")
    if ema is not None:
        if not 0 <= ema < 1:
            raise Refused(f"the decay must be at least 0 and below 1, not {ema}")
        return [ema ** (count - 1), *((1 - ema) * ema ** (count - 1 - index) for index in range(1, count))]
    shares = [float(weight) for weight in weights] if weights is not None else [1.0] * count
    if len(shares) != count:
        raise Refused(f"{plural(len(shares), 'weight')} for {plural(count, 'file')}")
    if not all(map(math.isfinite, shares)) or sum(shares) == 0 or not math.isfinite(sum(shares)):
        raise Refused("the weights must be finite numbers whose sum is not zero")
    return shares


def last_of(folder: str, count: int) -> list[str]:
    """Return the last `count` checkpoints of a folder, ordered by the numbers in their names; averages are left out.

    Raises:
        Refused: there are fewer, or their names follow different patterns.
    """
    if found_as(folder) != "folder":
        raise Refused("last needs a folder of checkpoints", path=folder)
    series: dict[str, list[tuple[tuple[int, ...], str]]] = {}
    for entry in scan_folder(folder):
        numbers = re.findall(r"\d+", entry.name)
        ours = f".{COMMANDS['average'].output_word}" in entry.name
        if not numbers or ours or entry.name.startswith(".") or role_of(entry.name) == "beside":
            continue
        if formats.is_folder_checkpoint(entry.path) if entry.is_dir() else formats.is_checkpoint(entry.path):
            row = tuple(map(int, numbers)), entry.path
            series.setdefault(re.sub(r"\d+", "N", entry.name), []).append(row)
    if len(series) > 1:
        several = ", ".join(sorted(series))
        raise Refused(f"the checkpoints belong to several series: {several}", path=folder, hint="list the files")
    rows = sorted(row for steps in series.values() for row in steps)
    if len(rows) < count or count < 1:
        raise Refused(f"only {plural(len(rows), 'checkpoint')} in it with a number in the name", path=folder)
    return [str(as_path(path)) for _, path in rows[-count:]]
