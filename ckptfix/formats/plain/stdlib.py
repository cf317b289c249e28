"""Objects of the standard library as plain values: a table with a row for each class or function.

The rule of a row maps the arguments of the call and its state, as inert nodes, to plain values. Nothing is called;
the encodings are those of each class's ``__reduce__`` in CPython.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePosixPath, PureWindowsPath
from typing import TypeAlias

from ckptfix.formats.numpy_pickles import BadValue, raw_bytes
from ckptfix.pickles import Call
from ckptfix.pickles.graph import Node, attributes

Args: TypeAlias = tuple[Node, ...]
Rule: TypeAlias = Callable[[Args, Node], Node]
MOST_LISTED = 100_000
MAX_BITS = 4096
"""Python does not convert an int of more than 4,300 digits to text."""


def _posix(args: Args, state: Node) -> str:
    return str(PurePosixPath(*_strings(args)))


def _windows(args: Args, state: Node) -> str:
    return str(PureWindowsPath(*_strings(args)))


def _strings(args: Args) -> list[str]:
    if not all(isinstance(part, str) for part in args):
        raise BadValue("a path whose parts are not strings")
    return [str(part) for part in args]


def _one_string(args: Args, state: Node) -> str:
    if not args or not isinstance(args[0], str):
        raise BadValue("an object without its text")
    return str(args[0])


def _fraction(args: Args, state: Node) -> str:
    numbers = [part for part in args if type(part) is int and part.bit_length() < MAX_BITS]
    if len(numbers) == len(args) == 2:
        return f"{numbers[0]}/{numbers[1]}"
    return _one_string(args, state)


def _uuid(args: Args, state: Node) -> str:
    number = dict(_named(state)).get("int")
    if type(number) is not int or not 0 <= number < 1 << 128:
        raise BadValue("a UUID without its number")
    text = f"{number:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _named(state: Node) -> list[tuple[str, Node]]:
    return [(str(name), value) for name, value in attributes(state) if isinstance(name, str)]


def _packed(args: Args, size: int) -> bytes:
    raw = raw_bytes(args[0]) if args else None
    if raw is None or len(raw) != size:
        raise BadValue("a date or time whose bytes are not in Python's packed form")
    return raw


def _date(args: Args, state: Node) -> str:
    raw = _packed(args, 4)
    return f"{raw[0] << 8 | raw[1]:04}-{raw[2]:02}-{raw[3]:02}"


def _clock(raw: bytes) -> str:
    micro = int.from_bytes(raw[3:6], "big")
    return f"{raw[0] & 0x7F:02}:{raw[1]:02}:{raw[2]:02}" + (f".{micro:06}" if micro else "")


def _time(args: Args, state: Node) -> str:
    return _clock(_packed(args, 6)) + _zone(args)


def _datetime(args: Args, state: Node) -> str:
    raw = _packed(args, 10)
    # The highest bit of the month selects one of two equal times in autumn (PEP 495).
    return f"{raw[0] << 8 | raw[1]:04}-{raw[2] & 0x7F:02}-{raw[3]:02}T{_clock(raw[4:])}" + _zone(args)


def _zone(args: Args) -> str:
    zone = args[1] if len(args) > 1 else None
    if type(zone) is not Call or type(zone.args) is not tuple:
        return ""
    if not zone.args:
        return "+00:00" if getattr(zone.func, "name", "") == "UTC" else ""
    offset = zone.args[0]
    if type(offset) is not Call or type(offset.args) is not tuple or len(offset.args) != 3:
        return ""
    seconds = _seconds(offset.args, None)
    minutes = int(abs(seconds)) // 60
    return f"{'-' if seconds < 0 else '+'}{minutes // 60:02}:{minutes % 60:02}"


def _seconds(args: Args, state: Node) -> float:
    parts = [part for part in args if type(part) is int]
    if len(parts) != 3 or len(args) != 3:
        raise BadValue("a timedelta without its arguments")
    days, seconds, micro = parts
    if abs(days) > 999_999_999:
        raise BadValue("a timedelta out of Python's range")
    whole = days * 86400 + seconds
    return whole + micro / 1e6 if micro else float(whole)


def _range(args: Args, state: Node) -> Node:
    ends = [part for part in args if type(part) is int]
    if not 1 <= len(args) <= 3 or len(ends) != len(args) or (len(ends) == 3 and not ends[2]):
        raise BadValue("a range without its ends")
    try:
        numbers = range(*ends)
        return list(numbers) if len(numbers) <= MOST_LISTED else f"range({', '.join(map(hex, ends))})"
    except OverflowError:
        return f"range({', '.join(map(hex, ends))})"


def _sequence(args: Args, state: Node) -> Node:
    return list(args)


def _member(args: Args, state: Node) -> str:
    # Python 3.11 writes members of some enums as getattr(Class, 'NAME').
    if len(args) != 2 or not isinstance(args[1], str):
        raise BadValue("an attribute of an unknown object")
    return str(args[1])


def _empty_bytes(args: Args, state: Node) -> bytes:
    raw = raw_bytes(args[0]) if args else b""
    if raw is None:
        raise BadValue("bytes of an unknown object")
    return raw


def _first(args: Args, state: Node) -> Node:
    if len(args) > 1:
        raise BadValue("it is made of several values")
    return args[0] if args else None


_PATHS = {
    f"{module}.{name}": (rule, "str")
    for module in ("pathlib", "pathlib._local")
    for name, rule in (
        *(("PosixPath", _posix), ("PurePosixPath", _posix), ("Path", _posix), ("PurePath", _posix)),
        *(("WindowsPath", _windows), ("PureWindowsPath", _windows)),
    )
}

RULES: dict[str, tuple[Rule, str]] = {
    **_PATHS,
    "decimal.Decimal": (_one_string, "str"),
    "fractions.Fraction": (_fraction, "str"),
    "uuid.UUID": (_uuid, "str"),
    "re._compile": (_one_string, "str"),
    "datetime.date": (_date, "str"),
    "datetime.time": (_time, "str"),
    "datetime.datetime": (_datetime, "str"),
    "datetime.timedelta": (_seconds, "float"),
    "builtins.range": (_range, "list"),
    "builtins.slice": (_sequence, "list"),
    "builtins.getattr": (_member, "str"),
    "builtins.bytes": (_empty_bytes, "bytes"),
    **{f"builtins.{name}": (_first, name) for name in ("int", "float", "str", "bool", "list", "tuple", "dict")},
}
"""Global -> (rule, new kind). The result of a rule is converted again: it may hold other objects."""

STATEFUL = frozenset({"types.SimpleNamespace", "argparse.Namespace"})
"""Classes of the standard library that are pickled as a call, and whose content is only in their state."""

MAPPINGS = frozenset({"collections.defaultdict", "collections.ChainMap", "collections.UserDict"})
LISTS = frozenset({"collections.deque"})
