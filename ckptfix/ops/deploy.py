"""``ckptfix.convert``: a checkpoint in another format, and what a deployed model needs changed on the way.

The changes are those of other commands (`OPERATIONS`), each on the plan of the one before it, and one write.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

from ckptfix.arguments import checks_types
from ckptfix.checkpoint import Checkpoint, OutputFile
from ckptfix.commands import quoted
from ckptfix.errors import CutUnknown, NoSuchTensor, PartialPrefix, Refused, StrPath
from ckptfix.findings.steps import Invocation, Step, shell_line
from ckptfix.findings.table import found
from ckptfix.formats import FORMATS, open_checkpoint
from ckptfix.formats.target import FormatName, named_format, of_suffix
from ckptfix.io.read import Progress
from ckptfix.ops import any_source
from ckptfix.ops import convert as plain
from ckptfix.ops.any_source import PlannedCommand
from ckptfix.ops.cast import cast as cast_tensors
from ckptfix.ops.cast import dtype_of
from ckptfix.ops.chain import Chain
from ckptfix.ops.convert import ConvertResult
from ckptfix.ops.rename import RenameResult, apply_rules, sites, strip_module, unwrap
from ckptfix.ops.select import select
from ckptfix.ops.writing import Result, WriteOptions
from ckptfix.urls import as_path


class Row(NamedTuple):
    """An operation of convert: a command, its function, and its keywords by the options of convert.

    Attributes:
        unpacked: as in `PlannedCommand`.
    """

    command: str
    function: Callable[..., Result]
    keywords: Mapping[str, str]
    more: tuple[str, ...] = ()
    unpacked: str = ""


def _stripped(
    source: StrPath, dest: StrPath, *, prefix: str, at: str | None = None, allow_unmatched: bool = False, **how: Any
) -> RenameResult:
    """Remove `prefix` from the keys.

    Raises:
        NoSuchTensor: no key has it; the nearest one is in the hint.
        PartialPrefix: only some keys of a state dict have it.
    """
    try:
        done = strip_module(source, dest, prefix=prefix, at=at, **how)
    except PartialPrefix as error:
        error.hint = f"--drop leaves out those without it, such as --drop {error.others[0]!r}"
        raise
    if not done.changes:
        near = sites.nearest_prefix(open_checkpoint(source), prefix, at)
        if allow_unmatched:
            nearest = f"; nearest is '{near}.'" if near else ""
            row = found("unused-rule", f"no key begins with it{nearest}", where=prefix)
            return replace(done, findings=(*done.findings, row))
        hint = f"did you mean --strip-prefix {near}.?" if near else "`ckptfix inspect` lists the keys;"
        near_ones = () if near is None else (f"{near}.",)
        hint = f"{hint} --allow-unmatched (allow_unmatched=True) goes on without a match"
        raise NoSuchTensor(f"no key begins with '{prefix.strip('.')}.'", near=near_ones, hint=hint)
    return done


def _named(
    source: StrPath,
    dest: StrPath,
    *,
    names: str,
    heads: int | None = None,
    kv_heads: int | None = None,
    origin: StrPath,
    unpacked: str,
    at: str | None = None,
    **how: Any,
) -> RenameResult:
    """Write the model with the names of another library; `origin` or `unpacked` states its sizes."""
    from ckptfix.align.fused import Heads
    from ckptfix.ops.rename import by_table

    said = by_table.Origin(origin, unpacked)
    route = by_table.route_of(source, names, at=at, heads=Heads(heads, kv_heads), origin=said)
    if len(route) > 1:
        return by_table.in_steps(apply_rules, source, dest, route, WriteOptions(**how), at=at)
    return apply_rules(source, dest, given=route[0].rules, at=at, **how)


OPERATIONS = (
    Row("select", select, {"keep": "keep", "drop": "drop"}, ("allow_unmatched",)),
    Row("unwrap", unwrap, {"unwrap": ""}),
    Row("strip-module", _stripped, {"strip_prefix": "prefix"}, ("allow_unmatched",)),
    Row("rename", _named, {"names": "names"}, ("heads", "kv_heads", "origin"), "unpacked"),
    Row("cast", cast_tensors, {"dtype": "to"}),
)
"""The operations in their order. Tensors are chosen first, by the keys of the input; they are cast last, as a command
that follows would have to wait for the checksums of what is computed.
"""


def operations(asked: Mapping[str, Any]) -> Iterator[PlannedCommand]:
    """Yield the operations for these options of convert."""
    for row in OPERATIONS:
        options = {name: asked[option] for option, name in row.keywords.items() if asked.get(option)}
        if not options:
            continue
        words = [row.command]
        for name, value in options.items():
            if name:
                for one in value if isinstance(value, list | tuple) else (value,):
                    words += [f"--{name}", str(one)]
        keywords = {name: value for name, value in options.items() if name}
        keywords |= {name: asked[name] for name in row.more if asked.get(name)}
        yield PlannedCommand(tuple(words), row.function, {**keywords, "at": None}, row.unpacked)


@checks_types
def convert(
    source: StrPath | Sequence[StrPath],
    dest: StrPath,
    *,
    to: FormatName | None = None,
    at: str | None = None,
    dtype: str | None = None,
    unwrap: bool = False,
    strip_prefix: str | None = None,
    names: str | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    keep: Sequence[str] = (),
    drop: Sequence[str] = (),
    allow_unmatched: bool = False,
    drop_unsupported: bool = False,
    weights: Literal["fp32", "model"] | None = None,
    optimizer: bool = False,
    shard_size: int | str | None = None,
    dequantize: bool = False,
    dims: Mapping[str, int | str] | None = None,
    vocab_size: int | str | None = None,
    tp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    force: bool = False,
    keep_old: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ConvertResult:
    """Write `source` to `dest` in a different format, and change its weights on the way.

    Args:
        source: a file or a folder; or the files of all ranks of a job, which are joined.
        to: ``"zip"``, ``"legacy"``, ``"safetensors"`` or ``"hf"``, a folder of shards; by default, the suffix of `dest`
            decides.
        at: address of the state dict to write, if there are several; of a torch file, it is written alone.
        dtype: cast the floating-point tensors, as `cast` does. With `dequantize` it is the dtype of the plain weights
            only; by default that in which the scheme's own code computes them.
        unwrap: remove the prefixes of known wrappers, as `unwrap` does.
        strip_prefix: remove this prefix from the keys, such as ``"model."``; it is an error if no key has it.
        names: give the model the names and the layout of this ecosystem, such as ``"hf"``; also ``"meta:hf"``. See
            `rename`, and `ckptfix help names`.
        heads, kv_heads: as for `rename`.
        keep, drop: globs of keys, as in `select`; they match the keys of `source`.
        allow_unmatched: a glob or a prefix that matches no key is a finding, not an error.
        drop_unsupported: leave out tensors that the format cannot hold; they are listed, and `exit_code` is 3.
        shard_size: bytes of tensors per file in a folder of shards, or a string such as ``"500MB"``; 5GB by default.
        weights: for a DeepSpeed folder: ``"fp32"``, the master weights, by default; or ``"model"``, the weights that
            the model computed with.
        optimizer: for a DeepSpeed folder: write the optimizer state too, by parameter name; not to safetensors.
        dequantize: write plain weights instead of quantized ones, with the keys and shapes of the model before it was
            quantized. Scales and zero points are left out, and ``quantization_config`` in a folder's config.json.
        dims: for the files of ranks that tensor parallelism cut: name or glob -> the dimension along which they cut a
            tensor, where nothing in them says it; ``"0/2"`` for two matrices stacked along 0, ``"copy"`` for none.
        vocab_size: for the same files: the rows of the embeddings to keep, or ``"args"`` or ``"config"``, which state
            them. By default the rows of padding are kept.
        tp, pp, ep: with `to` ``"megatron"`` or ``"meta"``: the numbers of ranks to cut the tensors, the layers and the
            experts for.

    The other arguments are those of `strip_module`.

    Raises:
        NoSuchTensor: no key begins with `strip_prefix`, or matches a glob; or there is nothing at `at`.
        CkptfixError: as the commands.
    """
    how = WriteOptions(force=force, keep_old=keep_old, dry_run=dry_run, progress=progress)
    if to is None and shard_size is not None and not as_path(dest).suffix:
        to = "hf"
    asked: dict[str, Any] = {"unwrap": unwrap, "strip_prefix": strip_prefix, "keep": keep, "drop": drop}
    asked |= {"allow_unmatched": allow_unmatched, "dtype": None if dequantize else dtype}
    asked |= {"names": names, "heads": heads, "kv_heads": kv_heads, "origin": _first(source)}
    changes = list(operations(asked))
    given: dict[str, Any] = {
        "drop_unsupported": drop_unsupported,
        "weights": weights,
        "optimizer": optimizer,
        "dequantize": dequantize,
        "dtype": dtype if dequantize else None,
        "vocab_size": vocab_size,
    }
    shapes: dict[str, Any] = {"shard_size": shard_size, "tp": tp, "pp": pp, "ep": ep}
    # The output's cuts, or those of the input.
    (given if to is None or named_format(to).parallel is None else shapes)["dims"] = dims or None
    conversion = {name: value for name, value in given.items() if value}
    shaping: dict[str, Any] = {name: value for name, value in shapes.items() if value is not None}
    paths = [source] if isinstance(source, str | os.PathLike) else list(source)
    if dtype is not None and not dequantize:
        dtype_of(dtype)
    try:
        if not changes and not (at is not None and len(paths) == 1 and _keeps_object(dest, to) and not conversion):
            return plain.convert(source, dest, to=to, at=at, **conversion, **shaping, **how.keywords())
        if not paths:
            raise Refused("there is no file to convert")
        return any_source.carry_out(
            *(paths[0], dest, changes, _finish, how),
            to=to,
            at=at,
            alone=True,
            several=paths if len(paths) > 1 else (),
            conversion=conversion,
            shaping=shaping,
            headline=True,
            amend=None if dtype is None or dequantize else partial(_with_dtype, dtype=dtype_of(dtype)),
        )
    except CutUnknown as error:
        options = {"to": to, **shaping, **asked, **conversion, "at": at, "dtype": dtype}
        options |= {"force": force, "keep_old": keep_old, "dims": {**(dims or {}), **error.dims}}
        error.hint = _with_dims(paths, dest, options)
        raise


def _with_dims(paths: Sequence[StrPath], dest: StrPath, options: Mapping[str, Any]) -> str:
    """Return the hint with the command of these options, which include the cuts that nothing states."""
    words = {name: _as_words(value) for name, value in options.items() if value and name != "origin"}
    first, *more = (os.fspath(path) for path in paths)
    if more:
        words = {"output": os.fspath(dest), **words}
    line = shell_line(Invocation(Step("convert", tuple(words.items())), first, "" if more else os.fspath(dest)).argv())
    line = " ".join([line, *map(quoted, more)])
    return f"`{line}` cuts it along dimension 0; change =0 to =1 for dimension 1"


def _as_words(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple((str(name), str(one)) for name, one in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(str, value))
    return value if isinstance(value, bool) else str(value)


def _first(source: StrPath | Sequence[StrPath]) -> StrPath | None:
    """Return the file, or the first of several."""
    return source if isinstance(source, str | os.PathLike) else next(iter(source), None)


def _with_dtype(checkpoint: Checkpoint, files: Sequence[OutputFile], *, dtype: str) -> Sequence[OutputFile]:
    # Few outputs are folders, and other conversions start faster without this import.
    from ckptfix.ops.cast.config import with_dtype

    return with_dtype(checkpoint, files, dtype)


def _keeps_object(dest: StrPath, to: str | None) -> bool:
    """Return whether the output is in a format that holds a whole object."""
    name = of_suffix(os.fspath(dest)) if to is None else named_format(to).name
    return name is not None and "objects" in FORMATS[name].states


def _finish(chain: Chain, done: Sequence[Result], made: Sequence[Result]) -> Callable[..., ConvertResult]:
    left = [where for one in (*done, *made) for where in one.left_out]
    converted = next((one for one in made if isinstance(one, ConvertResult)), None)
    fields: dict[str, Any] = {"at": None, "left": tuple(dict.fromkeys(left)), "steps": chain.steps}
    if converted is not None:
        names = ("at", "lost", "dequantized", "companions")
        fields |= {name: getattr(converted, name) for name in names}
    finishes = [one.finish for one in done if one.finish is not None]
    account = chain.account
    count = 0 if account is None else account.written
    return partial(ConvertResult, **fields, tensors=count, finish=partial(_finished, finishes) if finishes else None)


def _finished(finishes: Sequence[Callable[[Any], Any]], result: ConvertResult) -> ConvertResult:
    """Add what is known of the operations once the output is written."""
    for finish in finishes:
        result = finish(result)
    return replace(result, finish=None)
