"""The pages of the documentation, and whether the tests may bring them up to date."""

from __future__ import annotations

import os
from pathlib import Path

from ckptfix.docs import TOPICS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "ckptfix/docs"

UPDATE = os.environ.get("CKPTFIX_UPDATE_DOCS") == "1"
"""Write what is shown or made into the pages, instead of comparing."""


def page_of(topic: str) -> Path:
    """The file of a topic of ``ckptfix help``."""
    return FOLDER / f"{topic}.md"


PAGES = [ROOT / "README.md", *map(page_of, TOPICS)]
"""What users read; its console and Python blocks are run."""

ALL = [*PAGES, *sorted((ROOT / ".github").glob("*.md"))]
"""Every page; its links are followed."""
