"""Names chosen by globs, and which of the globs chose none."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import translate

from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.names.regexes import Regex


def pattern(text: str) -> Callable[[Sequence[str]], Sequence[bool]]:
    """What says of names whether they match: a glob as a whole, or, for ``/regex/``, anywhere in them.

    What is returned raises as `Regex.search`.

    Raises:
        re.error: what stands between the slashes is not a regular expression.
    """
    if len(text) > 2 and text.startswith("/") and text.endswith("/"):
        return Regex(text[1:-1]).search
    matches = re.compile(translate(text)).match
    return lambda names: [matches(name) is not None for name in names]


class Globs:
    """Globs that names are matched with, case and all; ``*`` also stands for dots."""

    def __init__(self, globs: Sequence[str]) -> None:
        self._rows = [(glob, re.compile(translate(glob)).match) for glob in globs]
        self._used: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._rows)

    def match(self, name: str) -> bool:
        """Whether one of them matches `name`; all that do count as used."""
        fits = [glob for glob, matches in self._rows if matches(name)]
        self._used.update(fits)
        return bool(fits)

    def unused(self) -> Iterator[Finding]:
        """A finding for each glob that has matched nothing."""
        for glob, _ in self._rows:
            if glob not in self._used:
                yield found("unused-rule", "matched no key", where=glob)
