"""The format of an output, and the tensors that this format cannot hold."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Literal

from ckptfix.checkpoint import TensorEntry
from ckptfix.command_table import meant_by
from ckptfix.commands import command, word
from ckptfix.errors import Refused, Unsupported, WouldLoseData
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.formats import FORMATS
from ckptfix.formats.base import Format

FormatName = Literal["zip", "torch", "legacy", "safetensors", "hf", "dcp", "megatron", "meta"]
"""A format that can be written; ``"torch"`` means zip."""

ALIASES = {
    "torch": "zip",
    "pt": "zip",
    "pth": "zip",
    "pytorch": "zip",
    "st": "safetensors",
    "huggingface": "hf",
}


def target_format(source: str, dest: str, to: str | None) -> str:
    """Return the name of the format to write `source` in: `to`, or the format that the suffix of `dest` names.

    Raises:
        Unsupported: neither determines it.
        Refused: as in `refuse_other_suffix`.
    """
    name = _target_format(dest, to)
    refuse_other_suffix(source, dest, name, chosen=True)
    return name


def named_format(to: str) -> Format:
    """Return the format that a user calls `to`.

    Raises:
        Unsupported: no format has this name, or it is read-only.
    """
    name = ALIASES.get(to.lower(), to.lower())
    if name not in FORMATS or not FORMATS[name].writes:
        written = ", ".join(format.name for format in FORMATS.values() if format.writes)
        known = f"ckptfix reads the format {name}, but does not write it"
        message = known if name in FORMATS else f"no format called {to!r}"
        hint = f"formats are {written}"
        if "cast" in meant_by(to.lower()):
            hint = f"`ckptfix cast IN OUT --to {word(to)}` converts dtypes; {hint}"
        raise Unsupported(message, hint=hint)
    return FORMATS[name]


def _target_format(dest: str, to: str | None) -> str:
    if to is not None:
        return named_format(to).name
    if (name := of_suffix(dest)) is not None:
        return name
    suffix = os.path.splitext(dest)[1]  # noqa: PTH122 (dest is text, whatever the system makes of it)
    what = f"the suffix {suffix!r}" if suffix else "a name without a suffix"
    message = f"cannot tell the output format from {what}"
    hint = "use another suffix, or --to zip, legacy or safetensors; --to hf writes a folder of shards"
    raise Unsupported(message, path=dest, hint=hint)


def of_suffix(dest: str) -> str | None:
    """Return the name of the format that the suffix of `dest` names; None if it names no format."""
    format = FORMATS.with_suffix(dest)
    return None if format is None else format.name


def is_folder(to: str | None) -> bool:
    """Return whether the format that the user requests with `to` writes a folder; no suffix names such a one."""
    format = None if to is None else FORMATS.get(ALIASES.get(to.lower(), to.lower()))
    return format is not None and format.folder


def refuse_other_suffix(source: str, dest: str, name: str, *, chosen: bool = False) -> None:
    """Refuse an output whose suffix belongs to another format: readers would take it for that format.

    Args:
        source: the file that `dest` is made from.
        name: the format of the output.
        chosen: the user requested this format (``--to``), instead of leaving it to the suffix.

    Raises:
        Refused: the suffix of `dest` belongs to another format, and not to `name`.
    """
    other = _other_format(dest, name)
    if other is not None:
        own = FORMATS[name].suffixes
        way = command("convert", source, dest)
        first = f"without --to it writes {other.name}" if chosen else f"run `{way}` first, then work on its output"
        raise Refused(
            f"the output would be {FORMATS[name].title}, but its suffix suggests {other.title}",
            path=dest,
            hint=f"{first}; or call the output {f'*{own[0]}' if own else 'something else'}",
        )


def suits(dest: str, name: str) -> bool:
    """Return whether a file of the format `name` may be called `dest`."""
    return _other_format(dest, name) is None


def fitting_suffix(path: str, name: str) -> str | None:
    """Return the suffix of a file of the format `name` that is made from `path`, whose own belongs to another format.

    Returns:
        None if the suffix of `path` suits it, or if the format has no suffix.
    """
    return None if suits(path, name) else next(iter(FORMATS[name].suffixes), None)


def _other_format(dest: str, name: str) -> Format | None:
    """Return the format whose suffix `dest` has, unless it has one of the format `name` too."""
    if dest.lower().endswith(FORMATS[name].suffixes):
        return None
    return FORMATS.with_suffix(dest)


def fitting(
    entries: Sequence[TensorEntry], target: Format, *, drop_unsupported: bool, path: str, at: str, hint: str
) -> tuple[list[TensorEntry], tuple[str, ...]]:
    """Return the tensors of the state dict `at` that `target` can hold, and the keys of the other tensors.

    Raises:
        WouldLoseData: there are other tensors, and `drop_unsupported` is not set; the error is about `path`, and has
            `hint`.
    """
    refused = {entry.key: why for entry in entries if (why := target.refuses(entry)) is not None}
    odd = tuple(entry.key for entry in entries if entry.key in refused)
    if odd and not drop_unsupported:
        shown = ", ".join(f"{key} ({refused[key]})" for key in odd[:5])
        more = f" and {len(odd) - 5} more" if len(odd) > 5 else ""
        message = f"{target.name} cannot hold {len(odd)} of {len(entries)} tensors: {shown}{more}"
        raise WouldLoseData(message, path=path, where=at or None, hint=hint)
    return [entry for entry in entries if entry.key not in refused], odd


def not_written(left: Iterable[str], lost: Iterable[str], target: Format) -> list[Finding]:
    """Return the findings for addresses in `left`, which the output lacks, and keys in `lost`, which it cannot hold."""
    behind = [found("left-behind", "is not in the output", where=address) for address in left]
    return behind + [found("lost", f"{target.name} cannot hold it", where=key) for key in lost]


_UNITS = {"": 1, "B": 1} | {
    f"{letter}{kind}": base**power
    for kind, base in (("", 1000), ("B", 1000), ("IB", 1024))
    for power, letter in enumerate("KMGT", 1)
}
_SIZE = re.compile(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_size(size: int | str) -> int:
    """Return a size such as ``5GB``, ``500M``, ``2GiB`` in bytes: GB or G is 10**9, as on the hub; GiB is 2**30.

    Raises:
        Refused: it is not a size.
    """
    found = None if isinstance(size, int) else _SIZE.fullmatch(size)
    unit = _UNITS.get(found[2].upper()) if found is not None else None
    count = size if isinstance(size, int) else int(float(found[1]) * unit) if found is not None and unit else 0
    if count < 1:
        raise Refused(f"{size!r} is not a shard size", hint="give a size such as 5GB, 500MB or 2GiB")
    return count
