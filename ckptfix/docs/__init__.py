"""The user's documentation: one Markdown page for each topic, shown by ``ckptfix help TOPIC``.

The tests run the console and Python blocks of every page, and compare the pages made of tables with their tables.
"""

from __future__ import annotations

from importlib.resources import files

TOPICS: dict[str, str] = {
    "commands": "Every command, with an example and what it prints.",
    "python": "Loading into a model, and the commands as functions.",
    "recipes": "By task: what to run when something does not load, fit or end.",
    "rules": "Rules files: names, and tensors split, joined and turned.",
    "remote": "Checkpoints in buckets, on the hub and on web servers.",
    "fleets": "Thousands of checkpoints: planned, resumed, reported.",
    "ranks": "One checkpoint written by several processes: torchrun, Slurm.",
    "formats": "What is read, edited and written, and the limits.",
    "findings": "Every finding of doctor: what it means, and the fix.",
    "browsing": "The browser in the terminal: keys, search, values, two files.",
    "json": "What --json prints: every field, and the promise about them.",
    "speed": "Measured times and memory.",
    "design": "How ckptfix works inside.",
    "changelog": "What is new, and what changed.",
}
"""Topic -> one line about it, in reading order. The page is ``TOPIC.md`` in this folder."""


SCHEMA = "json-schema"
"""Topic of the JSON Schema of what ``--json`` prints, which is no page."""

SUMMARY = "The JSON Schema of what --json prints."
"""One line about it."""


def schema() -> str:
    """The JSON Schema of what ``--json`` prints, ``schema.json`` in this folder."""
    return files(__name__).joinpath("schema.json").read_text(encoding="utf-8")


def page(topic: str) -> str:
    """The Markdown text of the page `topic`, one of `TOPICS`."""
    return files(__name__).joinpath(f"{topic}.md").read_text(encoding="utf-8")
