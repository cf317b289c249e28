"""Selection of names by globs, with the globs that matched nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import translate

from ckptfix.names.regexes import Regex


def pattern(text: str) -> Callable[[Sequence[str]], Sequence[bool]]:
    """Return a function that tests names: against the whole name for a glob, or anywhere in it for ``/regex/``.

    The returned function raises as `Regex.search` does.

    Raises:
        re.error: the text between the slashes is not a regular expression.
    """
    if len(text) > 2 and text.startswith("/") and text.endswith("/"):
        return Regex(text[1:-1]).search
    matches = re.compile(translate(text)).match
    return lambda names: [matches(name) is not None for name in names]


class Globs:
    """Globs to match names with, case-sensitively; ``*`` also matches dots."""

    def __init__(self, globs: Sequence[str]) -> None:
        self._rows = [(glob, re.compile(translate(glob)).match) for glob in globs]
        self._used: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._rows)

    def match(self, name: str) -> bool:
        """Return whether any glob matches `name`; every glob that does counts as used."""
        fits = [glob for glob, matches in self._rows if matches(name)]
        self._used.update(fits)
        return bool(fits)

    def unused(self) -> list[str]:
        """Return the globs that have matched nothing."""
        return [glob for glob in dict.fromkeys(glob for glob, _ in self._rows) if glob not in self._used]
