"""Which format an output has."""

from __future__ import annotations

import os

from ckptfix.commands import command
from ckptfix.errors import Refused, Unsupported
from ckptfix.formats import FORMATS

ALIASES = {"torch": "zip", "pt": "zip", "pth": "zip", "pytorch": "zip", "st": "safetensors"}


def target_format(source: str, dest: str, to: str | None) -> str:
    """The name of the format that `source` is to be written in: `to`, or what the suffix of `dest` says.

    Raises:
        Unsupported: neither determines it.
        Refused: as `refuse_other_suffix`.
    """
    name = _target_format(dest, to)
    refuse_other_suffix(source, dest, name, chosen=True)
    return name


def _target_format(dest: str, to: str | None) -> str:
    if to is not None:
        name = ALIASES.get(to.lower(), to.lower())
        if name not in FORMATS:
            raise Unsupported(f"no format called {to!r}", hint=f"formats are {', '.join(FORMATS)}")
        return name
    for format in FORMATS.values():
        if dest.lower().endswith(format.suffixes):
            return format.name
    suffix = os.path.splitext(dest)[1]  # noqa: PTH122 (dest is text, whatever the system makes of it)
    what = f"the suffix {suffix!r}" if suffix else "a name without a suffix"
    message = f"cannot tell the output format from {what}"
    raise Unsupported(message, path=dest, hint="use another suffix, or --to zip, --to legacy or --to safetensors")


def is_folder(to: str | None) -> bool:
    """Whether the format that the user asks for by `to` writes a folder; one that a suffix names never does."""
    format = None if to is None else FORMATS.get(ALIASES.get(to.lower(), to.lower()))
    return format is not None and format.folder


def refuse_other_suffix(source: str, dest: str, name: str, *, chosen: bool = False) -> None:
    """A file of one format must not have another's suffix: its reader would take it for that format.

    Args:
        source: the file that `dest` is made of.
        name: the format of the output.
        chosen: the user asked for this format (``--to``), instead of what the suffix says.

    Raises:
        Refused: the suffix of `dest` belongs to another format, and not to `name`.
    """
    own = FORMATS[name].suffixes
    for other in FORMATS.values():
        if dest.lower().endswith(other.suffixes) and not dest.lower().endswith(own):
            way = command("convert", source, dest)
            first = f"without --to it writes {other.name}" if chosen else f"`{way}` first, and work on that"
            raise Refused(
                f"the output would be {FORMATS[name].title}, but its suffix suggests {other.title}",
                path=dest,
                hint=f"{first}; or call the output {f'*{own[0]}' if own else 'something else'}",
            )
