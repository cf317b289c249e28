"""The families of ``ckptfix help names`` are made of the tables; ``CKPTFIX_UPDATE_DOCS=1`` writes them."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import fill

from docs.pages import UPDATE, page_of

from ckptfix.names import tables
from ckptfix.names.tables import NameConversion

BEGIN = "## Families\n"


def section(family: str, rows: list[NameConversion]) -> Iterator[str]:
    about = rows[0].about
    yield f"### {family}\n\n{fill(about['models'][0].upper() + about['models'][1:], 79)}.\n\n"
    for one in rows:
        left, right = one.names
        note = f" Note: {one.about['note']}." if "note" in one.about else ""
        needs = " It needs the number of heads." if one.needs else ""
        text = f"- **{left}:{right}**: {one.about['versions']}.{note}{needs} Source: {one.about['source']}."
        yield fill(text, 79, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False) + "\n"
    yield "\n"


def made() -> str:
    """The part of the page below its head."""
    families: dict[str, list[NameConversion]] = {}
    for one in tables.shipped():
        families.setdefault(one.family, []).append(one)
    parts = [part for family, rows in families.items() for part in section(family, rows)]
    return f"{BEGIN}\n{''.join(parts)}".rstrip("\n") + "\n"


def test_the_page_lists_the_tables() -> None:
    path = page_of("names")
    head, _, _ = path.read_text("utf-8").partition(BEGIN)
    if UPDATE:
        path.write_text(head + made(), "utf-8")
    assert path.read_text("utf-8") == head + made()
