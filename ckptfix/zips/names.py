"""Names of records: which would lead an unpacker out of its folder, and what they become in a new archive."""

from __future__ import annotations

from collections.abc import Collection


def leads_out(name: str) -> bool:
    parts = name.replace("\\", "/").split("/")
    return ".." in parts or name.startswith("/") or "\\" in name or "\0" in name or name[1:2] == ":"


def safe_name(name: str, taken: Collection[str]) -> str:
    """`name` with ``_`` for what leads out of a folder, and other than all of `taken`, which are in lower case.

    Readers find records with and without regard to case.
    """
    first, *parts = name.replace("\\", "/").replace("\0", "_").split("/")
    if first == "" or first[1:2] == ":":
        first = f"{first[:1]}_{first[2:]}"
    plain = "/".join("_" if part == ".." else part for part in (first, *parts))
    made, number = plain, 1
    while made.lower() in taken:
        made, number = f"{plain}.{number}", number + 1
    return made
