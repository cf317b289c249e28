"""Names found while they are typed: a part of a name, a glob, or ``/REGEX/``, as ``inspect --filter`` takes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from ckptfix.browse.model.contents import Item
from ckptfix.names.globs import pattern

BATCH = 5000
"""Names between two looks at whether something else was typed: some milliseconds."""

_MAGIC = frozenset("*?[")


def filter_of(text: str) -> str | None:
    """What ``inspect --filter`` is given to find the same; None for nothing typed.

    A text without ``*``, ``?`` and ``[`` is a part of a name, in either case as long as it has no capital letter.
    """
    if not text:
        return None
    if _is_regex(text) or _MAGIC & set(text):
        return text
    quoted = re.escape(text)
    return f"/{quoted}/" if text != text.lower() else f"/(?i){quoted}/"


def _is_regex(text: str) -> bool:
    return len(text) > 2 and text.startswith("/") and text.endswith("/")


def matcher(text: str) -> Callable[[Sequence[Item]], list[Item]]:
    """Those of some items that are found by `text`.

    Raises:
        re.error: it is not a regular expression.
    """
    if _is_regex(text) or _MAGIC & set(text):
        match = pattern(text)

        def matching(items: Sequence[Item]) -> list[Item]:
            names, keys = match([item.name for item in items]), match([key_of(item) for item in items])
            return [item for item, *fits in zip(items, names, keys, strict=True) if any(fits)]

        return matching
    if text != text.lower():
        return lambda items: [item for item in items if text in item.name]
    return lambda items: [item for item in items if text in item.name.lower()]


def key_of(item: Item) -> str:
    """The name in its mapping: what stands behind the last slash that ends a component."""
    shown = item.shown
    return shown.key if shown is not None else item.name.rpartition("/")[2]


def find(items: Sequence[Item], text: str) -> Iterator[list[Item]]:
    """What `text` finds among `items`, a batch of names at a time.

    Raises:
        re.error: it is not a regular expression.
        Refused: a name takes it too long; see `Regex`.
    """
    found = matcher(text)
    for start in range(0, len(items), BATCH):
        yield found(items[start : start + BATCH])
