"""``ckptfix help WORDS``: commands, sections of the pages and findings that are about these words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckptfix.command_table import COMMANDS
from ckptfix.docs import TOPICS, page
from ckptfix.findings.table import ENTRIES

PAGES = tuple(topic for topic in TOPICS if topic not in ("findings", "changelog", "design", "json", "speed"))
"""Pages whose sections are searched; findings are searched in their table."""

MOST = 5
"""Hits of one kind that are shown."""

_TITLE, _MOST_IN_TEXT = 8, 4
"""Weight of a word in a title, against one in the text, and the most that a text counts."""

_HEADING = re.compile(r"^#{2,4} (.+)$", re.MULTILINE)
_COMMAND = re.compile(r"^(?:\$ )?(ckptfix [a-z-]+ .+?)(?: *#.*)?$", re.MULTILINE)


class Hit(NamedTuple):
    """Something that is about the words.

    Attributes:
        kind: the heading of the list.
        title: what it is about.
        line: the command line to run.
    """

    kind: str
    title: str
    line: str


def search(words: Sequence[str]) -> list[Hit]:
    """Return the hits by kind, the best first; those with all words, or else those with any of them."""
    wanted = [_stem(word) for text in words for word in re.findall(r"[\w.-]+", text.lower())]
    rows = [(hit, [_score(word, title, text) for word in wanted]) for hit, title, text in _entries()]
    scored = [(hit, scores) for hit, scores in rows if any(scores)]
    scored = [row for row in scored if all(row[1])] or scored
    ordered = sorted(scored, key=lambda row: -sum(row[1]))
    return [hit for kind in _KINDS for hit in [hit for hit, _ in ordered if hit.kind == kind][:MOST]]


_KINDS = ("Recipes", "Commands", "Findings")


def _stem(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") else word


def _score(word: str, title: str, text: str) -> int:
    pattern = re.compile(rf"(?<![a-z0-9]){re.escape(word)}(?![a-z0-9]{{3}})", re.IGNORECASE)
    return _TITLE * bool(pattern.search(title)) + min(len(pattern.findall(text)), _MOST_IN_TEXT)


def _entries() -> Iterator[tuple[Hit, str, str]]:
    """Yield (hit, title, text) of everything that is searched."""
    for name, row in COMMANDS.items():
        known = " ".join((name, row.summary, *row.other_words))
        yield Hit("Commands", f"{name}: {row.summary}", f"ckptfix {name} --help"), known, ""
    for topic in PAGES:
        text = page(topic)
        marks = list(_HEADING.finditer(text))
        for mark, end in zip(marks, [*(row.start() for row in marks[1:]), len(text)], strict=True):
            section = text[mark.end() : end]
            command = _COMMAND.search(section)
            title = mark[1].replace("`", "")
            where = f"ckptfix help {topic}"
            hit = Hit("Recipes", f"{title} ({where})", command[1]) if command else Hit("Recipes", title, where)
            yield hit, title, section
    for id, entry in ENTRIES.items():
        hit = Hit("Findings", f"{id}: {entry.title}", f"ckptfix doctor --explain {id}")
        yield hit, f"{id} {entry.title}", entry.story
