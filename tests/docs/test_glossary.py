"""The glossary of the design page is made of the docstrings of classes; ``CKPTFIX_UPDATE_DOCS=1`` writes it."""

from __future__ import annotations

import textwrap
from itertools import groupby

import pytest
from class_names import shared
from docs.pages import UPDATE, page_of

from ckptfix.docs import page

pytestmark = pytest.mark.xdist_group("layers")  # where the trees of the package are

BEGIN = "## Glossary\n"
END = "## Rules\n"
HEAD = """
The classes that more than one room uses, by the room that defines them. Each
name means one thing in the whole package.
"""


def made() -> str:
    """Return the glossary: a heading for each room, and an item for each class."""
    lines = [HEAD]
    for room, rows in groupby(sorted(shared(), key=lambda row: (row.room, row.name)), lambda row: row.room):
        lines += [f"### {room}", ""]
        for row in rows:
            text = f"- `{row.name}`: {row.summary}"
            lines += textwrap.wrap(text, 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        lines.append("")
    return "\n".join(lines) + "\n"


@pytest.mark.slow
def test_the_glossary_has_every_noun_that_rooms_share() -> None:
    text = page("design")
    before, mark, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert mark and end
    whole = before + mark + made() + end + after
    if UPDATE:
        page_of("design").write_text(whole, encoding="utf-8")
    assert UPDATE or text == whole, "CKPTFIX_UPDATE_DOCS=1 pytest tests/docs makes it again"


def test_every_noun_has_a_line() -> None:
    assert not sorted(f"{row.module}.{row.name}" for row in shared() if not row.summary)
