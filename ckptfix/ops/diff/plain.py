"""Comparison of what checkpoints hold besides tensors: epochs, hyper-parameters, optimizer groups, metadata."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from ckptfix.formats import states
from ckptfix.ops.diff.pairs import DiffInput, bare_address
from ckptfix.ops.diff.result import ValueChange

Place = tuple[int, str]
Found = dict[Place, tuple[str, object]]
Same = Callable[[object, object], bool]


def compare_values(a: DiffInput, b: DiffInput, *, rtol: float, atol: float) -> tuple[list[ValueChange], int]:
    """Return the values that differ, in the order of A and then of B, and the number of values on either side.

    Floats are the same within the tolerance, and NaN equals NaN. Names of parameters (an optimizer's ``param_names``)
    are compared like keys, without the prefixes to ignore.
    """
    found_a, found_b = dict(_values(a)), dict(_values(b))
    if a.everything and all(states(side.checkpoint, "metadata") for side in (a, b)):
        found_a |= _metadata(a)
        found_b |= _metadata(b)
    partner = _partners(found_a, found_b)
    _leave_out_marks(a, found_a, set(partner))
    _leave_out_marks(b, found_b, set(partner.values()))
    total = len(found_a) + len(found_b) - len(partner)
    changes = []
    for place, (name, value) in found_a.items():
        other = partner.get(place)
        if other is None:
            changes.append(ValueChange(name, None, value, None))
        elif not same_value(value, found_b[other][1], rtol, atol):
            changes.append(ValueChange(name, found_b[other][0], value, found_b[other][1]))
    matched = set(partner.values())
    changes += [
        ValueChange(None, name, None, value) for place, (name, value) in found_b.items() if place not in matched
    ]
    return changes, total


def _values(side: DiffInput) -> Iterator[tuple[Place, tuple[str, object]]]:
    lists_of_names = {site.at for site in side.checkpoint.sites if site.kind == "param_names"}
    for address, value in side.checkpoint.values():
        place = side.place(address)
        if place is None or not side.chosen(address):
            continue
        if address in lists_of_names and isinstance(value, (list, tuple)):
            value = [side.stripped(item) if isinstance(item, str) else item for item in value]
        elif address.rpartition("/")[0] in lists_of_names and isinstance(value, str):
            value = side.stripped(value)
        index, rest = place
        yield (index, "/".join(map(side.stripped, rest.split("/")))), (address, value)


def _leave_out_marks(side: DiffInput, found: Found, matched: set[Place]) -> None:
    """Drop plain attributes of plain tensors that only one file has: a library's notes for its own use.

    FSDP sets ``_has_been_cloned`` on every tensor that it saves; load_state_dict ignores such attributes.
    """
    tensors = {entry.name for entry in side.checkpoint.entries if entry.kind == "dense"}
    for place in [place for place, (name, _) in found.items() if place not in matched]:
        if found[place][0].rpartition("/")[0] in tensors:
            del found[place]


def _metadata(side: DiffInput) -> Found:
    """Return the string pairs that the format keeps beside the tensors, as values at addresses of their own."""
    pairs = side.checkpoint.metadata.items()
    return {(-2, key): (f"__metadata__/{key}", text) for key, text in pairs if side.chosen(f"__metadata__/{key}")}


def _partners(found_a: Found, found_b: Found) -> dict[Place, Place]:
    """Map each place in A to its place in B: the same one, or else the same without wrapper prefixes."""
    partner = {place: place for place in found_a if place in found_b}
    bare_b = {(index, bare_address(rest)): (index, rest) for index, rest in found_b if (index, rest) not in partner}
    for place in found_a:
        if place not in partner:
            other = bare_b.pop((place[0], bare_address(place[1])), None)
            if other is not None:
                partner[place] = other
    return partner


def same_value(a: object, b: object, rtol: float = 0.0, atol: float = 0.0) -> bool:
    """Return whether two values are equal and of the same type; NaN equals NaN.

    Floats may be ``atol + rtol * abs(b)`` apart, also inside tuples, lists and dicts. The order of dicts does not
    matter.
    """
    stack = [(a, b)]
    while stack:
        x, y = stack.pop()
        if type(x) is not type(y):
            return False
        if isinstance(x, float) and isinstance(y, float):
            if x != y and not (math.isnan(x) and math.isnan(y)) and not _near(x, y, rtol, atol):
                return False
        elif isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)):
            if len(x) != len(y):
                return False
            stack.extend(zip(x, y, strict=True))
        elif isinstance(x, dict) and isinstance(y, dict):
            if x.keys() != y.keys():
                return False
            stack.extend((value, y[key]) for key, value in x.items())
        elif isinstance(x, complex) and isinstance(y, complex):
            stack += [(x.real, y.real), (x.imag, y.imag)]
        elif x != y:
            return False
    return True


def _near(x: float, y: float, rtol: float, atol: float) -> bool:
    return math.isfinite(x) and math.isfinite(y) and abs(x - y) <= atol + rtol * abs(y)
