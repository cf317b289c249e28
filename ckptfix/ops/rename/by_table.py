"""Names by table: which conversion of `names.tables` fits a checkpoint, and the sizes of the model that it needs."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from ckptfix import formats
from ckptfix.align.fused import Heads
from ckptfix.checkpoint import ByteRange, Checkpoint, NameList, TensorEntry, dtypes
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, Refused, StrPath, about, file_name
from ckptfix.formats import weights_of
from ckptfix.io.virtual_files import SplicedFile, SplicedPiece
from ckptfix.names import tables
from ckptfix.names.rulefile import HEADS, Rules, TensorRule
from ckptfix.names.rules import NameRule, RuleTable
from ckptfix.names.tables import NameConversion, Route
from ckptfix.ops import any_source
from ckptfix.ops.any_source import PlannedCommand
from ckptfix.ops.chain import Chain
from ckptfix.ops.choose import chosen_sites
from ckptfix.ops.quantized import file_beside, holders_of, json_beside
from ckptfix.ops.rename.run import text_in
from ckptfix.ops.rename.transform import TransformedTensors
from ckptfix.ops.writing import Result, WriteOptions

R = TypeVar("R", bound=Result)

CONFIGS = ("config.json", "params.json", "lit_config.json")
"""Files beside a checkpoint that state the sizes of its model: of transformers, of Meta, of old LitGPT."""

ARGUMENTS = ("common.pt",)
"""Torch files in the folder of a checkpoint that hold the arguments of its run: of Megatron's torch_dist."""

SIZES: Mapping[str, tuple[str, ...]] = {
    "heads": ("num_attention_heads", "n_heads", "n_head", "num_heads", "attention.head_count"),
    "kv": (
        *("num_key_value_heads", "n_kv_heads", "n_query_groups", "num_query_groups", "num_kv_heads"),
        "attention.head_count_kv",
    ),
}
"""Size in a rules file -> the names that configurations have for it; any other size has its own name there."""

ARCHITECTURE = "general.architecture"
"""The key of GGUF's metadata that states the family; the keys of its sizes begin with that word."""

NO_HEADS = Heads()

_NUMBERED = re.compile(r"(.*[.]vars[.])(\d)", re.DOTALL)
"""A variable of a layer in a file of Keras 3; a line names up to `_MOST_VARIABLES` of them."""

_MOST_VARIABLES = 5


@dataclass(frozen=True, slots=True)
class Origin:
    """The file that the user named, whose configuration counts.

    Attributes:
        path: its name: a config.json is beside it.
        read: the file that is read: the one at `path`, or what was unpacked from it.
    """

    path: StrPath
    read: StrPath


@dataclass(frozen=True, slots=True)
class RouteStep:
    """A conversion with its rules for one model."""

    conversion: NameConversion
    rules: Rules

    @property
    def words(self) -> tuple[str, ...]:
        """The command that carries it out."""
        if not any(self.conversion.names):
            return "rename", "--map", self.conversion.path
        return "rename", "--names", f"{self.conversion.old}:{self.conversion.new}"


def route_of(
    source: StrPath | Checkpoint,
    names: str | None,
    rules: StrPath | None = None,
    lines: Sequence[str] = (),
    *,
    at: str | None = None,
    heads: Heads = NO_HEADS,
    reverse: bool = False,
    origin: Origin | None = None,
) -> tuple[RouteStep, ...]:
    """Return the conversions for a checkpoint, one or two.

    Args:
        names: ``"FROM:TO"``, or ``"TO"`` if the keys show the rest; None for a file of one conversion.
        rules: a file of rules, in place of the tables of the package.
        lines: lines of such a file, in place of it.
        origin: the file that the user named, if `source` is a planned one.

    Raises:
        Refused: no table fits, or a size is not known; the error names the first key that does not fit.
        CkptfixError: the file of rules is malformed.
    """
    if names is None:
        path = "the lines" if rules is None else file_name(rules)
        one = _only("\n".join(lines) if rules is None else text_in(path), path)
        one = one.turned() if reverse else one
        made = one.rules()
        if not one.needs:
            return (RouteStep(one, made),)
        origin = origin or _origin(source)
        with _opened(source, at) as checkpoint:
            return (RouteStep(one, one.rules(_sizes(_original(checkpoint, origin), (one,), heads, origin))),)
    own = None if rules is None else tables.conversions(text_in(file_name(rules)), file_name(rules))
    family, old, new = pair_of(names)
    origin = origin or _origin(source)
    with _opened(source, at) as checkpoint:
        return steps(checkpoint, old, new, family=family, at=at, heads=heads, rows=own, origin=origin)


def _origin(source: StrPath | Checkpoint) -> Origin | None:
    return None if isinstance(source, Checkpoint) else Origin(source, source)


def between(
    checkpoint: Checkpoint,
    names: str | None,
    rules: StrPath | None,
    *,
    at: str | None = None,
    heads: Heads = NO_HEADS,
) -> tuple[Checkpoint, str]:
    """Return a checkpoint as it would be after `names`, or after the lines of `rules`, and the conversions in words.

    Raises:
        CkptfixError: as `route_of` and `converted`.
    """
    route = route_of(checkpoint, names, rules, at=at, heads=heads)
    return converted(checkpoint, route, at), " and ".join(str(one.conversion) for one in route)


def names_for(checkpoint: Checkpoint, wanted: Mapping[str, tuple[int, ...]], at: str | None = None) -> str | None:
    """Return the ``FROM:TO`` of the package's tables after which a checkpoint has these keys and shapes; None without.

    The sizes that the table needs must be known.
    """
    return next(
        (
            names
            for names, made in _made_by_tables(checkpoint, wanted, at)
            if made and all(wanted.get(key) == shape for key, shape in made.items())
        ),
        None,
    )


def names_making(
    checkpoint: Checkpoint, wanted: Collection[str], unwanted: Collection[str], at: str | None = None
) -> str | None:
    """Return the ``FROM:TO`` of the package's tables after which a checkpoint has all `wanted` keys; None without.

    The sizes that the table needs must be known, and none of the keys may be `unwanted`.
    """
    return next(
        (
            names
            for names, made in _made_by_tables(checkpoint, wanted, at)
            if all(key in made for key in wanted) and not any(key in made for key in unwanted)
        ),
        None,
    )


def _made_by_tables(
    checkpoint: Checkpoint, wanted: Iterable[str], at: str | None
) -> Iterator[tuple[str, Mapping[str, tuple[int, ...]]]]:
    """Yield the keys and shapes after each single conversion that fits a checkpoint, with its ``FROM:TO``.

    Conversions that cannot make the first of the `wanted` keys are left out.
    """
    keys = list(_keys(checkpoint, at))
    ends = (*keys[:1], *islice(wanted, 1))
    likely = (way for one in tables.shipped() if all(map(one.may_match, ends)) for way in one.ways)
    # A table that lacks one of a few keys needs no look at all of them.
    known = (way for way in likely if not way.rules().unmatched(keys[:3])[0])
    fitting = [way for way in known if not way.rules().unmatched(keys)[0]]
    for old, new in dict.fromkeys((row.old, row.new) for row in fitting):
        with suppress(CkptfixError):
            after = converted(checkpoint, steps(checkpoint, old, new, at=at), at)
            yield f"{old}:{new}", {entry.key: entry.shape for entry in _entries(after, at)}


def _only(text: str, path: str) -> NameConversion:
    """Return the one conversion of a file."""
    rows = tables.conversions(text, path)
    if len(rows) > 1:
        shown = ", ".join(f"{one.old}:{one.new}" for one in rows)
        raise Refused(f"it holds {len(rows)} conversions: {shown}", path=path, hint="choose one with --names")
    return replace(rows[0], names=("", ""))


def pair_of(names: str) -> tuple[str | None, str | None, str]:
    """Return the family and the ecosystems of ``FROM:TO``, ``TO`` or ``FAMILY/FROM:TO``; None for what is not stated.

    Raises:
        Refused: it has another form.
    """
    family, _, pair = names.strip().rpartition("/")
    parts = [tables.ecosystem(part.strip()) for part in pair.split(":")]
    if not 1 <= len(parts) <= 2 or not all(parts):
        raise Refused(f"expected FROM:TO, such as meta:hf, found {names!r}", hint="`ckptfix help names` lists both")
    if len(parts) == 2 and parts[0] == parts[1]:
        raise Refused(f"both sides of {names!r} are the same")
    return family or None, (parts[0] if len(parts) == 2 else None), parts[-1]


@contextmanager
def _opened(source: StrPath | Checkpoint, at: str | None) -> Iterator[Checkpoint]:
    """Open a checkpoint whose keys are looked at: unpacked if it is packed, the state dict of a whole module."""
    if isinstance(source, Checkpoint):
        yield source
        return
    with ExitStack() as stack:
        yield any_source.as_state_dict(os.fspath(source), os.fspath(source), at, stack)


def steps(
    checkpoint: Checkpoint,
    old: str | None,
    new: str,
    *,
    family: str | None = None,
    at: str | None = None,
    heads: Heads = NO_HEADS,
    rows: Sequence[NameConversion] | None = None,
    origin: Origin | None = None,
) -> tuple[RouteStep, ...]:
    """Return the conversions from the names of `old`, or of any ecosystem, to those of `new` that fit the checkpoint.

    Every key must have a line. If several tables fit, the one with the fewest lines that match no key is chosen.

    Args:
        family: the table; by default the keys decide.
        rows: conversions in place of those of the package.

    Raises:
        Refused: none fits; the error names the first key that does not.
    """
    known = [one for one in (tables.shipped() if rows is None else rows) if family in (None, one.family)]
    if not known:
        families = dict.fromkeys(one.family for one in tables.shipped())
        raise Refused(f"there is no table called {family!r}", hint=f"they are {', '.join(families)}")
    ways = list(tables.routes(known, old, new))
    if not ways:
        raise _unknown(known, old, new)
    keys = list(_keys(checkpoint, at))
    if not keys:
        raise Refused("it has no tensors to rename", path=checkpoint.path)
    original = _original(checkpoint, origin)
    kind, stated = _model_type(original, origin)
    fits: list[tuple[int, int, Route]] = []
    misfits: list[tuple[int, int, str, Route]] = []
    for number, way in enumerate(ways):
        left, unused = way[0].rules().unmatched(keys)
        if left:
            misfits.append((len(left), number, left[0], way))
        else:
            fits.append((unused, number, way))
    if not fits:
        if any(not way[-1].turned().rules().unmatched(keys)[0] for way in ways if len(way[-1].ways) > 1):
            raise Refused(f"its keys are those of {new} already", path=checkpoint.path)
        count, _, key, way = min(misfits, key=lambda row: row[:2])
        raise _refusal(checkpoint, keys, count, key, way)
    fits = [row for row in fits if row[2][0].made_for(original.format)] or fits
    named = [row for row in fits if kind is None or not row[2][0].types or kind in row[2][0].types]
    if not named:
        way = min(fits, key=lambda row: row[:2])[2]
        message = f"{stated} {kind!r}, which the table {way[0].family} is not for"
        raise Refused(message, path=checkpoint.path, hint="with --map FILE, --names takes a table of your own")
    _, _, way = min(named, key=lambda row: row[:2])
    sizes = _sizes(original, way, heads, origin)
    with about(checkpoint.path):
        made = tuple(RouteStep(one, one.rules(sizes)) for one in way)
    _refuse_widths(checkpoint, made[0].rules, at)
    refuse_misread(checkpoint, made[0].rules, at)
    return made


def _model_type(original: Checkpoint, origin: Origin | None) -> tuple[object, str]:
    """Return the type of the model that the file states, or the config.json beside it, and who states it."""
    own = original.metadata.get(ARCHITECTURE)
    if own is not None:
        return own, "the file says architecture"
    return json_beside_of(origin, original, "config.json").get("model_type"), "config.json says model_type"


def _original(checkpoint: Checkpoint, origin: Origin | None) -> Checkpoint:
    """Return the file that the user named: a planned one may be in a format that holds tensors alone."""
    if origin is not None:
        with suppress(CkptfixError):
            return formats.open_checkpoint(formats.located(os.fspath(origin.read)))
    return checkpoint


def _refuse_widths(checkpoint: Checkpoint, rules: Rules, at: str | None) -> None:
    """Raise `Refused` if the heads of queries and those of keys would have different numbers of rows."""
    lines = [rule for rule in rules.tensors if rule.operations[0].name == "rope" and not rule.old.axes]
    patterns = [(NameRule(rule.old.text, ""), rule.operations[0].number("heads") or 1) for rule in lines]
    widths: dict[float, str] = {}
    for entry in _entries(checkpoint, at) if patterns else ():
        for pattern, heads in patterns:
            if entry.shape and pattern.values(entry.key) is not None:
                widths.setdefault(entry.shape[0] / heads, f"{entry.key} has {entry.shape[0]} rows, for {heads} heads")
    if len(widths) > 1:
        message = f"heads would have different sizes: {'; '.join(widths.values())}"
        raise Refused(message, path=checkpoint.path, hint="state the numbers of heads with --heads N --kv-heads N")


def refuse_misread(checkpoint: Checkpoint, rules: Rules, at: str | None) -> None:
    """Raise `Refused` for a tensor that a line takes for one of another layer, as its shape and those beside it show.

    Keras 3 and Flax give the kernels of all layers the same name. That of a depthwise convolution is (height, width,
    channels, multiplier), and a bias has all its outputs; attention has (heads, size of a head, outputs) after its
    values. Keras 3 numbers the variables of a layer, whichever of them it has.
    """
    lines = [(NameRule(name, ""), rule) for rule in rules.tensors for name in rule.old.names]
    if not any(rule.operations[0].name == "outputs" for _, rule in lines):
        return
    depthwise = any("depthwise" in rule.old.text for _, rule in lines)
    entries = {entry.key: entry for entry in _entries(checkpoint, at)}
    shapes = {key: entry.shape for key, entry in entries.items()}
    plain = RuleTable([NameRule(old, "") for old in rules.names])
    for key, entry in entries.items():
        rule = next((rule for pattern, rule in lines if pattern.values(key) is not None), None)
        message = _misnumbered(key, shapes, plain) if rule is None else ""
        if rule is not None and rule.new is not None:
            message = _misread(key, entry, rule, shapes, depthwise)
        if message:
            hint = "a line for it in a rules file, which --map FILE takes, says otherwise"
            if rule is None:
                hint = f"save the model as .h5 with Keras, which gives its variables names; or {hint}"
            raise Refused(message, path=checkpoint.path, where=key, hint=hint)


def _misnumbered(key: str, keys: Collection[str], plain: RuleTable) -> str:
    """Return why the number of a variable does not say what it is; empty if it does.

    A norm has all variables that its lines name, or its numbers count from another one.
    """
    found = _NUMBERED.fullmatch(key)
    if found is None:
        return ""
    front, number = found[1], int(found[2])
    known = [one for one in range(_MOST_VARIABLES) if _fits(f"{front}{one}", plain)]
    absent = [one for one in known if f"{front}{one}" not in keys]
    if number not in known or not absent:
        return ""
    have = len(known) - len(absent)
    return (f"its layer has {have} of {len(known)} variables (scale=False or center=False), and their numbers do not "
            "say which is missing")  # fmt: skip


def _fits(key: str, plain: RuleTable) -> bool:
    return any(rule.values(key) is not None for rule in plain.about(key))


def _misread(
    key: str, entry: TensorEntry, rule: TensorRule, shapes: Mapping[str, tuple[int, ...]], depthwise: bool
) -> str:
    """Return why a tensor may not be that of a line with operations; empty if it may."""
    shape, first = entry.shape, rule.operations[0].name
    kind = dtypes.find(entry.dtype)
    if kind is not None and kind.family == "int":
        return f"its numbers are {entry.dtype}, and the table has no lines for the codes of a quantized layer"
    if first == "unstack" and len(shape) == 1:
        return "it is of a GRU with reset_after=False, which torch does not have"
    if first == "outputs" and len(shape) > 2:
        return _misread_kernel(key, shape, shapes, depthwise)
    if first == "flatten" and rule.operations[0].number("first") == 1 and len(shape) == 3:
        heads = [(shapes[one], 2) for one in _biases(key) if one in shapes]
        heads += [(shapes[one], 3) for one in _outs(key) if one in shapes]
        if any(len(other) == dimensions and other[:2] != shape[1:] for other, dimensions in heads):
            return "it is not (inputs, heads, size of a head), as what is beside it shows"
    return ""


def _misread_kernel(
    key: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]], depthwise: bool
) -> str:
    """Return why a kernel may not be that of a convolution; empty if it may."""
    inputs, outputs = shape[-2:]
    bias = next((shapes[one] for one in _biases(key) if one in shapes), None)
    front = key.removesuffix("out.kernel")
    if (front != key and len(shapes.get(f"{front}query.kernel", ())) == 3) or (bias is not None and len(bias) > 1):
        return "it is of attention with a dimension for the heads, and the table takes it for a convolution"
    alone = outputs == 1 < inputs
    # A bias as long as the inputs is one of a transposed convolution, whose outputs come before its inputs.
    fits = not alone if bias is None else bias == (outputs,) or (bias == (inputs,) and not alone)
    if depthwise and "kernel" in key and not fits:
        return f"its name does not say whether it is a depthwise convolution, which its shape {list(shape)} may be"
    return ""


def _biases(key: str) -> Iterator[str]:
    """Yield the names that the bias beside a kernel may have."""
    front, found, end = key.rpartition("kernel")
    if found:
        yield f"{front}bias{end}"
        yield f"{front.removesuffix('_')}bias{end}"
    elif key.endswith(".vars.0"):
        yield f"{key[:-1]}1"


def _outs(key: str) -> Iterator[str]:
    """Yield the names that the kernel after the values may have, for the kernel of the queries of attention."""
    front, found, end = key.rpartition("query")
    if found:
        yield from (f"{front}{out}{end}" for out in ("out", "output", "attention_output"))


def _unknown(rows: Sequence[NameConversion], old: str | None, new: str) -> Refused:
    known = tables.ecosystems(rows)
    odd = next((name for name in (old, new) if name is not None and name not in known), None)
    if odd is not None:
        message = f"no table has names of {odd!r}"
        return Refused(message, hint=f"they have {', '.join(known)}: `ckptfix help names`" if known[0] else None)
    return Refused(f"no table leads from {old} to {new}", hint="`ckptfix help names` lists the families")


def _refusal(checkpoint: Checkpoint, keys: Sequence[str], count: int, key: str, way: Route) -> Refused:
    """Return the error for a checkpoint that no table covers: the nearest one, and the first key that it lacks."""
    first = way[0]
    hint = "with --map FILE, --names takes a table of your own"
    parts = keys[0].split(".")[:-1]
    for end in range(1, len(parts) + 1):
        prefix = ".".join(parts[:end])
        if not all(one.startswith(f"{prefix}.") for one in keys):
            break
        if not first.rules().unmatched([one[len(prefix) + 1 :] for one in keys])[0]:
            hint = f"all keys fit without the prefix {prefix!r}: run `ckptfix strip-module` with --prefix {prefix}"
            break
    fronts = {old.split(".")[0] for old in first.rules().lines}
    for prefix in sorted(front for front in fronts if "{" not in front):
        if not first.rules().unmatched([f"{prefix}.{one}" for one in keys])[0]:
            hint = f"all keys fit below {prefix!r}: run `ckptfix add-module` with --prefix {prefix}"
            break
    more = f", and for {count - 1:,} more" if count > 1 else ""
    message = f"the table {first.family} has no line for {key!r} in names of {first.old}{more} of {len(keys):,} keys"
    return Refused(message, path=checkpoint.path, where=key, hint=hint)


def _sites(checkpoint: Checkpoint, at: str | None) -> list[NameList]:
    return chosen_sites(checkpoint, at, weights_only=True)


def _entries(checkpoint: Checkpoint, at: str | None) -> Iterator[TensorEntry]:
    for site in _sites(checkpoint, at):
        yield from weights_of(checkpoint, site.at, views=False)


def _keys(checkpoint: Checkpoint, at: str | None) -> Iterable[str]:
    return dict.fromkeys(entry.key for entry in _entries(checkpoint, at))


def json_beside_of(origin: Origin | None, checkpoint: Checkpoint, name: str) -> Mapping[str, Any]:
    """Return the object in a JSON file next to the file that the user named; empty if it does not exist."""
    path = checkpoint.path if origin is None else os.fspath(origin.path)
    try:
        return json_beside(replace(checkpoint, path=formats.located(path)), name)
    except CkptfixError:
        return {}


def _sizes(
    original: Checkpoint, way: Sequence[NameConversion], heads: Heads, origin: Origin | None
) -> Mapping[str, int]:
    """Return the sizes that these conversions need, as far as the file that the user named, or files beside it, say.

    Raises:
        Refused: the number of heads of keys does not divide that of queries.
    """
    needs = frozenset[str]().union(*(one.needs for one in way))
    if not needs:
        return {}
    found = {name: value for name, value in zip(HEADS, (heads.query, heads.kv), strict=True) if value is not None}
    for holder in _holders(original, origin):
        if needs <= found.keys():
            break
        for name in needs - found.keys():
            value = next((holder[word] for word in SIZES.get(name, (name,)) if _is_size(holder.get(word))), None)
            if value is not None:
                found[name] = value
    if "heads" in found:
        query = found["heads"]
        key = found.setdefault("kv", query)
        if query < 1 or key < 1 or query % key:
            raise Refused(f"{key} key/value heads do not divide {query} query heads")
    return found


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _holders(original: Checkpoint, origin: Origin | None) -> Iterator[Mapping[str, Any]]:
    """Yield what may state the sizes of the model: files beside the checkpoint, then arguments in it."""
    for name in CONFIGS:
        yield from holders_of(json_beside_of(origin, original, name))
    stated = original.metadata
    front = f"{stated.get(ARCHITECTURE)}."
    yield {key.removeprefix(front): int(text) for key, text in stated.items() if text.isdecimal() and len(text) < 10}
    yield from _arguments(original)
    for name in ARGUMENTS:
        with suppress(CkptfixError):
            if (file := file_beside(original, name)) is not None:
                yield from _arguments(formats.open_checkpoint(file))


def _arguments(checkpoint: Checkpoint) -> Iterator[Mapping[str, Any]]:
    """Yield the mappings and objects in a checkpoint that state sizes of the model."""
    holders: dict[str, dict[str, Any]] = {}
    words = {word for names in SIZES.values() for word in names}
    grouped: dict[str, object] = {}
    for place, value in checkpoint.values():
        above, _, name = place.rpartition("/")
        if name in words and _is_size(value):
            holders.setdefault(above, {})[name] = value
        if name == "group_query_attention":
            grouped[above] = value
    for above, holder in holders.items():
        if grouped.get(above, True) is False:  # num_query_groups of Megatron's arguments counts only with it
            holder.pop("num_query_groups", None)
        yield holder


def in_steps(
    function: Callable[..., R],
    source: StrPath,
    dest: StrPath | None,
    route: Sequence[RouteStep],
    how: WriteOptions,
    *,
    at: str | None,
) -> R:
    """Carry out conversions one after another, with one write.

    Args:
        function: renames, with the rules `given`.

    Raises:
        Refused: the file is to be edited in place.
    """
    if dest is None or how.in_place:
        raise Refused("two conversions one after another need an output", hint="name an output")

    def finish(chain: Chain, done: Sequence[Result], made: Sequence[Result]) -> Callable[..., Any]:
        first, last = done[0], done[-1]
        return partial(_last, last, first)

    commands = [PlannedCommand(one.words, function, {"given": one.rules, "at": at}) for one in route]
    made: R = any_source.carry_out(source, dest, commands, finish, replace(how, link=False), at=at)
    # In a chain, the conversions around this one say what becomes what.
    return replace(made, lines=tuple(line for line in made.lines if not line.startswith("input: ")))


def _last(last: Any, first: Any, **fields: Any) -> Any:
    """Return the result of the last of two conversions, with the changes of both as changes of the first's keys."""
    after = {(one.at, one.old): one.new for one in last.changes}
    changes = [replace(one, new=after.get((one.at, one.new), one.new)) for one in first.changes]
    return replace(last, changes=tuple(changes), references=first.references, **fields)


def converted(checkpoint: Checkpoint, route: Sequence[RouteStep], at: str | None = None) -> Checkpoint:
    """Return the checkpoint with the keys and tensors after these conversions; nothing is computed before it is read.

    Raises:
        Refused: a line does not fit; the error names it.
        KeyConflict: two keys would get the same name.
    """
    for one in route:
        checkpoint = _after(checkpoint, one.rules, at)
    return checkpoint


def _after(checkpoint: Checkpoint, rules: Rules, at: str | None) -> Checkpoint:
    made = TransformedTensors(rules)
    with about(checkpoint.path):
        for site in _sites(checkpoint, at):
            made.add(checkpoint, site, {key: key for key in site.names})
    entries: list[TensorEntry] = []
    changed = {site.at: site for site in made.sites}
    for one in made.sites:
        for old, (new, entry) in one.after():
            if entry is not None:
                entries.append(_readable(entry))
            elif old in one.entries:
                entries.append(replace(one.entries[old], key=new))
    entries += [entry for entry in checkpoint.entries if entry.at not in changed]
    names = {at: tuple(new for _, (new, _) in one.after()) for at, one in changed.items()}
    lists = [
        replace(one, names=names[one.at]) if one.kind == "state_dict" and one.at in names else one
        for one in checkpoint.sites
    ]
    fixed = tuple(entries)
    counts = Counter(entry.at for entry in fixed)
    states = tuple(replace(state, tensors=counts[state.at]) for state in checkpoint.state_dicts)
    return replace(checkpoint, load_entries=lambda: fixed, sites=tuple(lists), state_dicts=states)


def _readable(entry: TensorEntry) -> TensorEntry:
    """Return the tensor with its data as a range, which a further conversion takes."""
    storage = entry.storage
    if storage is None or storage.data is None or isinstance(storage.data, ByteRange):
        return entry
    data = storage.data
    name = SplicedFile(f"{entry.name} (made)", [data.length], lambda _: SplicedPiece((data,)))
    return replace(entry, storage=replace(storage, data=name.place(0)))

