"""The user's documentation: one Markdown page for each topic, shown by ``ckptfix help TOPIC``.

The tests run the console and Python blocks of every page, and compare the pages made of tables with their tables.
"""

from __future__ import annotations

from importlib.resources import files

TOPICS: dict[str, str] = {
    "commands": "Every command, with an example and what it prints.",
    "python": "Loading into a model, and the commands as functions.",
    "recipes": "Common tasks, and questions that the tutorials leave open.",
    "formats": "What is read, edited and written, and the limits.",
    "findings": "Every finding of doctor: what it means, and the fix.",
    "json": "The fields that --json prints.",
    "speed": "Measured times and memory.",
    "design": "How ckptfix works inside.",
    "changelog": "What is new, and what changed.",
}
"""Topic -> one line about it, in reading order. The page is ``TOPIC.md`` in this folder."""


def page(topic: str) -> str:
    """The Markdown text of the page `topic`, one of `TOPICS`."""
    return files(__name__).joinpath(f"{topic}.md").read_text(encoding="utf-8")
