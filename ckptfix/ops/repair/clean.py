"""Removal of code from a repaired file: calls in its object, and records beside it that no tensor needs.

A damaged file is as risky as an intact one, and repair would make it loadable. The
contents of a user's class are kept, as repair gives back what was saved; `sanitize` removes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import field

from ckptfix.checkpoint import ByteRange, Data
from ckptfix.checkpoint.tree import (
    Item,
    ListValue,
    MapValue,
    ObjectValue,
    ReferenceValue,
    StorageValue,
    TensorValue,
    Value,
    every_value,
    identity,
)
from ckptfix.dataclass import dataclass
from ckptfix.errors import CkptfixError
from ckptfix.findings import table
from ckptfix.formats.loading import hidden_globals as scan_inside
from ckptfix.formats.loading.hidden_globals import LIMIT, HiddenContents
from ckptfix.formats.repairs import LeftOut
from ckptfix.formats.torch.damaged.object import DamagedObject
from ckptfix.formats.torch.dangerous_globals import is_dangerous
from ckptfix.io.layers import Memory, WindowSource
from ckptfix.io.read import read_chunks
from ckptfix.io.source import open_source

MOST_PLACES = 3
"""Addresses that a finding lists per function."""


@dataclass(slots=True)
class Cleaned:
    """The parts of an object that are left out; values are named by their `identity`.

    Attributes:
        gone: values that are written as None, or not written where they are the value of a dict.
        items: a dict -> positions of its items whose key or value is gone.
        kept: every value that is still in the object; None when nothing is left out.
        findings: the functions, each with the addresses of the values that they make.
    """

    gone: set[int] = field(default_factory=set)
    items: dict[int, set[int]] = field(default_factory=dict)
    kept: set[int] | None = None
    findings: list[LeftOut] = field(default_factory=list)

    def lost(self, value: int) -> bool:
        return self.kept is not None and value not in self.kept


def clean(found: DamagedObject) -> Cleaned:
    """Find the code in an object, and everything that it makes."""
    root = found.root
    names = {value: name for value, name, _ in found.globals() if is_dangerous(name)}
    names |= {value: name for value, text in found.texts() if (name := scan_inside.dangerous_in(text))}
    if not names:
        return Cleaned()
    made_by = dict(names)
    _spread(root, made_by)
    out = Cleaned(set(made_by))
    for value in every_value(root):
        rows = _written(value)
        places = {place for place, row in enumerate(rows) if any(identity(part) in out.gone for part in row)}
        if places:
            out.items[value.identity] = places
    out.kept = found.still_written(out.gone, out.items)
    out.findings += _findings(found, names, made_by)
    return out


def _bad(inside: HiddenContents) -> str:
    return next((name for name in inside.names if is_dangerous(name)), "")


def _written(value: Value) -> Iterable[tuple[Item, Item]]:
    """Return the items of a mapping, as they were written."""
    if isinstance(value, MapValue):
        return value.written()
    call = value.call if isinstance(value, TensorValue) else value
    return (call.items or ()) if isinstance(call, ObjectValue) else ()


def _spread(root: Item, made_by: dict[int, str]) -> None:
    """Add every object and reference that has one of the values as its function or as an argument."""
    users: dict[int, list[int]] = {}
    for value in every_value(root):
        for part in _consumed(value):
            users.setdefault(identity(part), []).append(value.identity)
    queue = list(made_by)
    while queue:
        place = queue.pop()
        for user in users.get(place, ()):
            if user not in made_by:
                made_by[user] = made_by[place]
                queue.append(user)


def _consumed(value: Value) -> Iterator[Item]:
    """Yield what makes a value: the function and the arguments of an object, the fields of a reference."""
    call = value.call if isinstance(value, TensorValue) else value
    if isinstance(call, ObjectValue):
        yield call.maker
        yield from _inside(call.args)
    elif isinstance(value, ReferenceValue | StorageValue):
        for part in value.parts():
            yield from _inside(part)


def _inside(item: Item) -> Iterable[Item]:
    """Return the items of a tuple; otherwise the item itself."""
    return item if isinstance(item, ListValue) and item.kind == "tuple" else (item,)


def _findings(found: DamagedObject, names: dict[int, str], made_by: dict[int, str]) -> Iterator[LeftOut]:
    """Yield a finding for each function, with the first addresses that hold what it makes."""
    places: dict[str, list[str]] = {name: [] for name in dict.fromkeys(names.values())}
    for at, value in found.addresses():
        name = made_by.get(value)
        if name is not None and at not in places[name]:
            places[name].append(at)
    starts = {name: start for _, name, start in reversed([*found.globals()])}
    for name, several in places.items():
        shown = ", ".join(several[:MOST_PLACES])
        more = f" and {len(several) - MOST_PLACES} more places" if len(several) > MOST_PLACES else ""
        held = f" ({shown}{more})" if any(several) else ""
        message = f"{name} can run code: left out, with everything it makes{held}"
        where = several[0] if several else ""
        made = table.found("dangerous-global", message, where=where, offset=starts.get(name), severity="warning")
        yield LeftOut(name, made)


def clean_records(extras: dict[str, tuple[Data, int | None]]) -> list[LeftOut]:
    """Remove the records with a pickle that runs code, and return a finding for each."""
    out: list[LeftOut] = []
    for name in list(extras):
        inside = _record(extras[name][0], name)
        bad = _bad(inside)
        if bad or inside.cut:
            del extras[name]
            why = f"a pickle that names {bad}, which can run code" if bad else "packed, and too large to search"
            message = f"{why}: the record is left out"
            out.append(LeftOut(bad or name, table.found("hidden-pickle", message, where=name, severity="warning")))
    return out


def _record(data: Data, name: str) -> HiddenContents:
    if isinstance(data, ByteRange):
        with suppress(CkptfixError), open_source(data.path) as reader:
            return scan_inside.look_into(WindowSource(reader, data.offset, data.length), name)
        return HiddenContents()
    first = _first(read_chunks(data))
    inside = scan_inside.look_into(Memory(first, ""), name)
    inside.cut |= len(first) < data.length
    return inside


def _first(chunks: Iterable[bytes]) -> bytes:
    """Return the first bytes of a stream, up to the limit."""
    pieces: list[bytes] = []
    made = 0
    with suppress(CkptfixError):
        for chunk in chunks:
            pieces.append(chunk)
            made += len(chunk)
            if made >= LIMIT:
                break
    return b"".join(pieces)


def listed(left_out: Collection[LeftOut]) -> str:
    """List what was left out, in one line."""
    return ", ".join(dict.fromkeys(row.finding.where or row.name for row in left_out))
