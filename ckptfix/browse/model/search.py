"""Search as you type: a part of a name, a glob, or ``/REGEX/``, as in ``inspect --filter``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from ckptfix.browse.model.contents import ContentItem
from ckptfix.names.globs import pattern

BATCH = 5000
"""Names between two checks for new input: a few milliseconds."""

_MAGIC = frozenset("*?[")


def filter_of(text: str) -> str | None:
    """Return the ``inspect --filter`` argument that finds the same; None for an empty text.

    A text without ``*``, ``?`` and ``[`` is a part of a name; it ignores case unless it has a capital letter.
    """
    if not text:
        return None
    if _is_regex(text) or _MAGIC & set(text):
        return text
    quoted = re.escape(text)
    return f"/{quoted}/" if text != text.lower() else f"/(?i){quoted}/"


def _is_regex(text: str) -> bool:
    return len(text) > 2 and text.startswith("/") and text.endswith("/")


def matcher(text: str) -> Callable[[Sequence[ContentItem]], list[ContentItem]]:
    """Return a function that selects the items that `text` finds.

    Raises:
        re.error: the text is not a regular expression.
    """
    if _is_regex(text) or _MAGIC & set(text):
        match = pattern(text)

        def matching(items: Sequence[ContentItem]) -> list[ContentItem]:
            names, keys = match([item.name for item in items]), match([key_of(item) for item in items])
            return [item for item, *fits in zip(items, names, keys, strict=True) if any(fits)]

        return matching
    if text != text.lower():
        return lambda items: [item for item in items if text in item.name]
    return lambda items: [item for item in items if text in item.name.lower()]


def key_of(item: ContentItem) -> str:
    """Return the key in the innermost mapping: the part after the last slash that ends a component."""
    shown = item.shown
    return shown.key if shown is not None else item.name.rpartition("/")[2]


def find(items: Sequence[ContentItem], text: str) -> Iterator[list[ContentItem]]:
    """Yield what `text` finds among `items`, one batch of names at a time.

    Raises:
        re.error: the text is not a regular expression.
        Refused: the expression takes too long on a name; see `Regex`.
    """
    found = matcher(text)
    for start in range(0, len(items), BATCH):
        yield found(items[start : start + BATCH])
