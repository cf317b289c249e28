"""The keys and shapes that a model expects, as slots: from a checkpoint, a file of keys, or the model itself.

::

    {"fc.weight": [5, 3], "fc.bias": [5]}                                  keys.json: name -> shape, in definition order
    {"fc.weight": {"shape": [5, 3], "dtype": "float32"}}                   ... with dtypes
    [["fc.weight", [5, 3], "float32"], ["fc.bias", [5]]]                   ... or as rows
    {"entries": [{"name": "model/fc.weight", ...}], "state_dicts": ...}    the output of `ckptfix inspect --json`
    package.module:Class                                                   a callable without arguments
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace

from ckptfix.arguments import LIVE
from ckptfix.checkpoint import Checkpoint, FileVersion, TensorEntry, address, dtypes, same_place
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError, Refused, Undecided, file_name, not_readable
from ckptfix.formats import FORMATS, is_index_name, open_checkpoint, states, weights_of
from ckptfix.io.source import found_as, is_local
from ckptfix.names import bases
from ckptfix.names.slots import Slot
from ckptfix.ops import choose
from ckptfix.ops.candidates import Candidate, state_dict_of, whole_module
from ckptfix.words import where_else

_FACTORY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_FORMS = 'give {"name": [shape]}, {"name": {"shape": ..., "dtype": ...}}, or the output of `ckptfix inspect --json`'


@dataclass(frozen=True, slots=True)
class ExpectedModel:
    """One side of a match.

    Attributes:
        label: its name in messages: the file, or ``module:factory``.
        slots: its tensors in order.
        at: address of their state dict; None if there are no addresses.
        in_order: whether the order is the definition order; safetensors files are sorted differently.
        checkpoint, entries: the source of the values, if there are any.
        files: the state of the files that it was read from, if it is a checkpoint.
    """

    label: str
    slots: tuple[Slot, ...]
    at: str | None = None
    in_order: bool = True
    checkpoint: Checkpoint | None = field(default=None, repr=False, compare=False)
    entries: Sequence[TensorEntry] = field(default=(), repr=False, compare=False)
    files: tuple[FileVersion, ...] = field(default=(), repr=False, compare=False)

    def without_values(self) -> ExpectedModel:
        """Return it without the source of the values, which has much more memory than the names."""
        return replace(self, checkpoint=None, entries=())

    def without_entries(self) -> ExpectedModel:
        """Return it without its tensors; the checkpoint still has them."""
        return replace(self, entries=())


def read(target: str | os.PathLike[str], *, at: str | None = None, allow_import: bool = False) -> ExpectedModel:
    """Read the side that `target` describes: a checkpoint, a file of keys, or ``module:factory``.

    Args:
        at: address of the state dict, if there are several.
        allow_import: import the module of ``module:factory`` and call the factory, which runs their code.

    Raises:
        Refused: ``module:factory`` without `allow_import`, or several state dicts without `at`.
        CkptfixError: the file has no shapes, or the model cannot be built.
    """
    text = file_name(target, "the model's file or module:factory")
    if text in LIVE:
        from ckptfix.ops.target.model import rows_of

        return ExpectedModel(text, _slots(rows_of(text, LIVE[text])))
    if is_factory(text):
        return _model(text, allow_import)
    if text.endswith(".json") and is_local(text) and found_as(text) == "file" and not is_index_name(text):
        return _keys_file(text, at)
    try:
        return of_checkpoint(open_checkpoint(text), at, doubt=False)
    except Undecided as error:
        if error.choices:
            error.choose_with({"like_at": error.choices[0]})
        raise


def is_factory(text: str) -> bool:
    """Return whether a target is named as ``module:factory``, and not a file."""
    return _FACTORY.fullmatch(text) is not None and not found_as(text)


def of_checkpoint(
    checkpoint: Checkpoint, at: str | None = None, *, doubt: bool = True, takes: choose.Takes = choose.MAPPINGS
) -> ExpectedModel:
    """Return the state dict at `at`, or the only one that looks like a model's; no tensor byte is read.

    Args:
        doubt, takes: as `choose.mapping`.

    Raises:
        Refused: there is no state dict, or there are several.
        NoSuchTensor: there is no state dict at `at`.
    """
    return of_candidate(checkpoint, choose.mapping(checkpoint, at, doubt=doubt, takes=takes))


def of_candidate(checkpoint: Checkpoint, row: Candidate) -> ExpectedModel:
    """Return one state dict of a checkpoint, or the state dict of a whole module.

    Raises:
        CkptfixError: a module is malformed, or one of its tensors cannot be read.
    """
    # Recorded views would be compared with their bases byte by byte, while keys need only the ties.
    entries = state_dict_of(checkpoint, row) if row.module is not None else weights_of(checkpoint, row.at, views=False)
    slots = ((entry.key, entry.shape, entry.dtype, same_place(entry)) for entry in entries)
    in_order = states(checkpoint, "order")
    return ExpectedModel(
        checkpoint.path, _slots(slots), row.at, in_order, checkpoint, entries, checkpoint.files
    )


def of_fitting(checkpoint: Checkpoint, target: ExpectedModel) -> ExpectedModel:
    """Return the state dict whose keys agree best with those of `target`; if none agree, the default state dict.

    Raises:
        Refused: there is no state dict, or there are several equally good ones.
    """
    wanted = [slot.name for slot in target.slots]

    def score(row: Candidate) -> int:
        return agreement(of_candidate(checkpoint, row), wanted).agreeing

    row = choose.best(checkpoint, score, takes=choose.EDITABLE)
    if row is not None and row.module is not None:
        raise whole_module(checkpoint, row.at)
    return of_checkpoint(checkpoint, takes=choose.EDITABLE) if row is None else of_candidate(checkpoint, row)


def agreement(side: ExpectedModel, wanted: Sequence[str]) -> bases.Renaming:
    """Find the renaming that brings the names of `side` closest to those that are `wanted`."""
    loose = [slot.name for slot in side.slots if not slot.shape]
    return bases.find([slot.name for slot in side.slots], wanted, loose=loose)


def _slots(rows: Iterable[tuple[str, tuple[int, ...], str, object]]) -> tuple[Slot, ...]:
    """Build slots from rows of (name, shape, dtype, place).

    Tensors with the same place, shape and dtype are tied; a place of None is never shared.
    """
    slots: dict[str, Slot] = {}
    first: dict[object, str] = {}
    for name, shape, dtype, place in rows:
        origin = name if place is None else first.setdefault((place, shape, dtype), name)
        slots[name] = Slot(name, shape, dtype, None if origin == name else origin)
    return tuple(slots.values())


def _model(text: str, allow_import: bool) -> ExpectedModel:
    if not allow_import:
        raise Refused(
            f"no such file: {text}",
            hint="add --allow-import to import it, which runs its code, or pass a checkpoint or keys.json",
        )
    from ckptfix.ops.target.model import build

    return ExpectedModel(text, _slots(build(text)))


class _Wrong(Exception):
    """A malformed file of keys, described in words."""


def _keys_file(path: str, at: str | None) -> ExpectedModel:
    try:
        with open(path, encoding="utf-8-sig") as file:
            document = json.load(file, object_pairs_hook=_unique)
        if isinstance(document, dict) and isinstance(document.get("entries"), list):
            return _inspection(path, document, at)
        if at:
            raise Refused("a file of keys has no addresses", path=path, where=at)
        return ExpectedModel(path, _slots(_rows(document)))
    except OSError as error:
        raise not_readable(error, path) from None
    except UnicodeDecodeError as error:
        raise CkptfixError("a file of keys must be UTF-8 text", path=path, offset=error.start) from None
    except json.JSONDecodeError as error:
        raise CkptfixError(f"not JSON: {error.msg}", path=path, where=f"line {error.lineno}") from None
    except RecursionError:
        raise CkptfixError("not a file of keys: its JSON is nested too deeply", path=path) from None
    except (_Wrong, ValueError) as error:
        raise CkptfixError(str(error), path=path, hint=_FORMS) from None


def _unique(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _Wrong(f"{twice!r} appears twice")
    return found


def _rows(document: object) -> list[tuple[str, tuple[int, ...], str, object]]:
    """Return the rows of a keys.json in any of its forms.

    Raises:
        _Wrong: it has a different form.
    """
    if isinstance(document, dict):
        if isinstance(document.get("weight_map"), dict):
            raise _Wrong("an index of shards lists tensors without their shapes: pass a file with shapes")
        named: list[tuple[str, object]] = [(name, value) for name, value in document.items() if name != "__metadata__"]
    elif isinstance(document, list):
        named = [_listed(row) for row in document]
    else:
        raise _Wrong("neither an object of keys nor a list of them")
    if not named:
        raise _Wrong("it lists no tensors")
    if len(dict(named)) < len(named):
        names = [name for name, _ in named]
        raise _Wrong(f"{next(name for name in names if names.count(name) > 1)!r} appears twice")
    return [(name, *_fields(name, value), None) for name, value in named]


def _listed(row: object) -> tuple[str, dict[str, object]]:
    if isinstance(row, str):
        raise _Wrong(f"{row!r} is a name without a shape")
    if isinstance(row, dict) and isinstance(row.get("name"), str):
        return row["name"], row
    if isinstance(row, list) and 2 <= len(row) <= 3 and isinstance(row[0], str):
        return row[0], {"shape": row[1], "dtype": row[2] if len(row) > 2 else None}
    raise _Wrong(f"a row that is not [name, shape, dtype]: {json.dumps(row)[:80]}")


def _fields(name: str, value: object) -> tuple[tuple[int, ...], str]:
    """Return (shape, dtype) of a value; the dtype is ``""`` if the value does not name one."""
    given = value if isinstance(value, dict) else {"shape": value}
    shape, dtype = given.get("shape"), given.get("dtype")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise _Wrong(f"{name!r} has no shape: {json.dumps(shape)[:80]} is not a list of sizes")
    if dtype is None:
        return tuple(shape), ""
    row = None
    if isinstance(dtype, str):
        row = dtypes.find(dtype.removeprefix("torch.")) or dtypes.by_safetensors(dtype)
    if row is None:
        raise _Wrong(f"{name!r} has an unknown dtype: {json.dumps(dtype)[:80]}")
    return tuple(shape), row.name


def _below(names: Iterable[object], at: str) -> tuple[str, ...]:
    front = f"{at}/" if at else ""
    return tuple(name[len(front) :] for name in names if isinstance(name, str) and name.startswith(front))


def _inspection(path: str, document: Mapping[str, object], at: str | None) -> ExpectedModel:
    """Return the state dict at `at` in the output of ``inspect --json``, or the only one that looks like a model's."""
    listed = document.get("state_dicts")
    states = [
        state
        for state in (listed if isinstance(listed, list) else ())
        if isinstance(state, dict) and isinstance(state.get("at"), str)
    ]
    models = [state["at"] for state in states if state.get("weights")]
    models = models or [state["at"] for state in states if not state.get("optimizer")] or [""]
    entries = document["entries"]
    assert isinstance(entries, list)
    names = [entry["name"] for entry in entries if isinstance(entry, dict) and "name" in entry]
    rows_of = [Candidate(each, None, _below(names, each)) for each in models]
    wanted = [row.at for row in choose.narrowed(rows_of)] if at is None else [address.given(at)]
    if len(wanted) > 1:
        message = f"it holds {len(wanted)} state dicts: {choose.listed(wanted)}"
        raise Undecided(message, choices=tuple(wanted), choice={"like_at": wanted[0]}, path=path)
    prefix = f"{wanted[0]}/" if wanted[0] else ""
    others = [f"{state['at']}/" for state in states if state["at"] and len(state["at"]) >= len(prefix)]
    rows = []
    for entry in entries:
        name, value = _listed(entry)
        inside = name.removeprefix(prefix)
        if not name.startswith(prefix) or any(name.startswith(other) for other in others if other != prefix):
            continue
        place = json.dumps([value.get(field) for field in ("storage", "offset", "stride")])
        rows.append((inside, *_fields(name, value), place if value.get("storage") is not None else None))
    if not rows:
        hint = where_else([state["at"] for state in states]) if states else None
        raise CkptfixError(f"it lists no tensors at {wanted[0]!r}", path=path, hint=hint)
    format = FORMATS.get(str(document.get("format")))
    return ExpectedModel(path, _slots(rows), wanted[0], format is None or "order" in format.states)
