"""Record names: the unsafe ones, which lead an unpacker out of its folder, and their replacements in a new archive."""

from __future__ import annotations

from collections.abc import Collection


def leads_out(name: str) -> bool:
    """Return whether an unpacker that follows `name` could write outside its folder."""
    parts = name.replace("\\", "/").split("/")
    return ".." in parts or name.startswith("/") or "\\" in name or "\0" in name or name[1:2] == ":"


def safe_name(name: str, taken: Collection[str]) -> str:
    """Return `name` with ``_`` for every part that leads out of a folder, made different from all names in `taken`.

    The names in `taken` are in lower case, because some readers find records without regard to case.
    """
    first, *parts = name.replace("\\", "/").replace("\0", "_").split("/")
    if first == "" or first[1:2] == ":":
        first = f"{first[:1]}_{first[2:]}"
    plain = "/".join("_" if part == ".." else part for part in (first, *parts))
    made, number = plain, 1
    while made.lower() in taken:
        made, number = f"{plain}.{number}", number + 1
    return made
