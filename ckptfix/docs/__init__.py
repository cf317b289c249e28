"""The user's documentation: one Markdown page for each topic, shown by ``ckptfix help TOPIC``.

The tests run the console and Python blocks of every page, and compare the pages made of tables with their tables.
"""

from __future__ import annotations

from importlib.resources import files

TOPICS: dict[str, str] = {
    "commands": "Every command, with an example and its output.",
    "python": "Loading into a model, and the commands as functions.",
    "recipes": "Recipes by task: for files that do not load, do not fit or were cut off.",
    "rules": "Rules files: rename keys; split, join and reshape tensors.",
    "names": "One model's keys in Meta's, transformers', Megatron's and other code.",
    "remote": "Checkpoints in buckets, on the hub and on web servers.",
    "fleets": "Thousands of checkpoints: planned, resumed, reported.",
    "ranks": "One checkpoint written by several processes: torchrun, Slurm.",
    "formats": "The formats that ckptfix reads, edits and writes; limits.",
    "findings": "Every finding of doctor, its meaning and its fix.",
    "browsing": "The browser in the terminal: keys, search, values, two files.",
    "json": "The output of --json: every field, and what stays stable.",
    "speed": "Measured times and memory.",
    "design": "How ckptfix works inside.",
    "changelog": "New features and changes.",
}
"""Topic -> one line about it, in reading order. The page is ``TOPIC.md`` in this folder."""


SCHEMA = "json-schema"
"""Topic of the JSON Schema of the output of ``--json``, which is not a page."""

SUMMARY = "The JSON Schema of the output of --json."
"""One line about the schema."""


def schema() -> str:
    """Return the JSON Schema of the output of ``--json``, ``schema.json`` in this folder."""
    return files(__name__).joinpath("schema.json").read_text(encoding="utf-8")


def page(topic: str) -> str:
    """Return the Markdown text of the page `topic`, one of `TOPICS`."""
    return files(__name__).joinpath(f"{topic}.md").read_text(encoding="utf-8")
