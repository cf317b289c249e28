"""Patterns and keys that a user typed: an error for those that match nothing, with the keys that may be meant.

Every verb that takes a pattern or a key asks here, so that a misspelled one never writes a silent copy. Prefixes of
``strip-module`` and ``add-module`` and the filter of ``inspect`` are not asked about.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Literal

from ckptfix.errors import CkptfixError, NoSuchTensor
from ckptfix.findings.row import Finding
from ckptfix.findings.table import found
from ckptfix.names.regexes import Regex

Kind = Literal["glob", "regex", "key"]
"""The forms of a pattern. A rule with placeholders counts as a key."""

MOST_NAMES = 5000
"""Keys that difflib compares with a pattern: it takes about 20 microseconds for each."""

MOST_ROWS = 100
"""Findings about patterns that matched nothing."""

LIKENESS = 0.6
"""Least similarity of two words by `difflib`, at which one may be a misspelling of the other."""

_MAGIC = re.compile(r"[*?\[]")


def unmatched(
    texts: Sequence[str], names: Iterable[str], *, kind: Kind, allow: bool, message: str = "matched no key"
) -> tuple[Finding, ...]:
    """Return a finding for each of `texts`, patterns that matched nothing, or raise an error for them.

    Args:
        names: everything that they could have matched.
        allow: the user accepts patterns that match nothing.
        message: the message of a finding.

    Raises:
        NoSuchTensor: there is such a pattern, and `allow` is not set; `near` is what may be meant.
    """
    keys = list(dict.fromkeys(names)) if texts else []
    if texts and not allow:
        raise no_match(texts, keys, kind)
    rows = []
    for index, text in enumerate(texts[:MOST_ROWS]):
        near = meant(text, keys, kind) if index < 3 else ()
        rows.append(found("unused-rule", message + (f"; nearest is {near[0]!r}" if near else ""), where=text))
    return tuple(rows)


def unmatched_rows(rows: Sequence[str], of: int, names: Iterable[str], *, allow: bool) -> tuple[Finding, ...]:
    """Do as `unmatched` for rows of a map or a file of rules that matched nothing: an error only if all did not.

    Args:
        of: the number of all its rows.
    """
    return unmatched(rows, names, kind="key", allow=allow or len(rows) < of)


def no_match(texts: Sequence[str], names: Sequence[str], kind: Kind, *, what: str = "") -> NoSuchTensor:
    """Return the error for patterns that match none of `names`.

    Args:
        what: what matches nothing, where it is not one of `texts`: ``"no line of rules.txt"``.
    """
    near = tuple(dict.fromkeys(name for text in texts[:3] for name in meant(text, names, kind)))[:3]
    quoted = [repr(text) for text in texts]
    more = f" and {len(quoted) - 3:,} more" if len(quoted) > 3 else ""
    verb = "matches" if len(texts) == 1 else "match"
    message = f"{what} matches a key" if what else f"{', '.join(quoted[:3])}{more} {verb} no key"
    if near:
        hint = f"did you mean {' or '.join(map(repr, near))}?"
    elif names:
        hint = f"keys are named like {', '.join(map(repr, islice(names, 2)))}, see `ckptfix inspect`;"
    else:
        hint = "`ckptfix inspect` shows what it holds;"
    return NoSuchTensor(message, near=near, hint=f"{hint} {_ALLOWING}")


_ALLOWING = "--allow-unmatched (allow_unmatched=True) goes on without a match"


def meant(text: str, names: Sequence[str], kind: Kind) -> tuple[str, ...]:
    """Return up to three patterns or keys that may be meant by `text`, which matches none of `names`; best first."""
    if not text or not names:
        return ()
    ways: Iterable[Callable[[], Iterator[str]]] = (
        (lambda: _regexes(text, names),)
        if kind == "regex"
        else (lambda: _globs(text, names, kind), lambda: _respelled(text, names, kind))
    )
    for way in ways:
        made = tuple(islice(dict.fromkeys(way()), 3))
        if made:
            return made
    return nearest(text, names)


def nearest(text: str, names: Iterable[str], most: int = 3) -> tuple[str, ...]:
    """Return up to `most` of the first `MOST_NAMES` names that are similar to `text`, best first."""
    from difflib import get_close_matches

    return tuple(get_close_matches(text, list(islice(names, MOST_NAMES)), most, LIKENESS))


def _globs(text: str, names: Sequence[str], kind: Kind) -> Iterator[str]:
    """Yield the pattern as of a module, below the prefixes that it lacks, or in the case of the keys."""
    tries = [text] if kind == "key" else [text, f"{text.rstrip('.')}.*"]
    for each in tries:
        matches = _matcher(each, kind)
        if each != text and any(map(matches, names)):
            yield each
            return
        heads = list(islice(dict.fromkeys(filter(None, (_head(name, matches) for name in names))), 4))
        if len(heads) > 3 and kind == "glob":
            yield f"*.{each}"
            return
        if heads:
            yield from (f"{head}.{each}" for head in heads)
            return
    for each in tries:
        matches = _matcher(each, kind, re.IGNORECASE)
        yield from islice((name for name in names if matches(name) or _head(name, matches)), 3)


def _matcher(text: str, kind: Kind, flags: int = 0) -> Callable[[str], object]:
    from fnmatch import translate

    return re.compile(translate(text) if kind == "glob" else rf"(?s:{re.escape(text)})\Z", flags).match


def _head(name: str, matches: Callable[[str], object]) -> str:
    """Return the components before the first at which the rest of `name` matches; empty if there are none."""
    end = name.find(".")
    while end >= 0:
        if matches(name[end + 1 :]):
            return name[:end]
        end = name.find(".", end + 1)
    return ""


def _respelled(text: str, names: Sequence[str], kind: Kind) -> Iterator[str]:
    """Yield the pattern with its literal front spelled as in keys; with all of it, where it has no wildcard."""
    magic = _MAGIC.search(text) if kind == "glob" else None
    front = text if magic is None else text[: magic.start()]
    length = front.rstrip(".").count(".") + 1
    holders: dict[str, str] = {}
    for name in names[:MOST_NAMES]:
        parts = name.split(".")
        for start in range(len(parts) - length + 1):
            holders.setdefault(".".join(parts[start : start + length]), ".".join(parts[: start + length]))
    for near in nearest(front.rstrip("."), holders, 1):
        made = f"{holders[near]}{'.' * front.endswith('.')}{text[len(front) :]}"
        if any(map(_matcher(made, kind), names)):
            yield made


def _regexes(text: str, names: Sequence[str]) -> Iterator[str]:
    """Yield the regular expression without its anchor, in any case, or with its words spelled as in keys."""
    few = names[:MOST_NAMES]
    loose = text.removeprefix("^").removesuffix("$")
    for each in dict.fromkeys((loose, f"(?i){loose}")):
        hits = [name for name, hit in zip(few, _searched(each, few), strict=True) if hit]
        if each and each != text and hits:
            yield from hits[:3]
            return
    words = {word: None for name in few for word in re.findall(r"[A-Za-z_]\w*", name)}
    for word in dict.fromkeys(re.findall(r"(?<!\\)[A-Za-z_]\w+", text)):
        for near in nearest(word, words):
            made = text.replace(word, near)
            if made != text and any(_searched(made, few)):
                yield made


def _searched(pattern: str, names: Sequence[str]) -> Sequence[bool]:
    try:
        return Regex(pattern).search(names)
    except (re.error, CkptfixError):
        return [False] * len(names)
