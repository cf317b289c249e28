"""``ckptfix help findings`` is made of the table of findings; ``CKPTFIX_UPDATE_DOCS=1`` writes it."""

from __future__ import annotations

import re
from collections import Counter
from textwrap import fill

from docs.pages import UPDATE, page_of

from ckptfix.findings.contents import CONTENTS
from ckptfix.findings.files import CONTAINERS
from ckptfix.findings.row import FindingKind
from ckptfix.findings.runs import RUNS
from ckptfix.findings.table import ENTRIES
from ckptfix.findings.verbs import VERBS
from ckptfix.ops.doctor.report import readable

HEAD = """# Findings

```console
$ ckptfix doctor --explain wrapped-names
```

A finding is something that `ckptfix` noticed in a file. Each has an id that
never changes its meaning, and a severity:

- **error**: data is lost or wrong, or `torch.load` or a model refuses the file.
- **warning**: a load may fail or go wrong because of it.
- **info**: good to know.

The severity given here is the usual one; a result may raise or lower it. `FILE`
is the file, `OUT` a name for the output, `TARGET` the model.

This page has {count} findings: {sections}.
"""

SECTIONS = {
    "What the file is": CONTAINERS,
    "What it holds": CONTENTS,
    "What a run folder lacks": RUNS,
    "What a command noticed or left out": VERBS,
}


def made() -> str:
    """The page."""
    links = ", ".join(f"[{title.lower()}](#{title.lower().replace(' ', '-')})" for title in SECTIONS)
    parts = [wrapped(HEAD.format(count=len(ENTRIES), sections=links))]
    for title, entries in SECTIONS.items():
        parts += [f"## {title}\n", *map(section, entries)]
    return "\n".join(parts)


def section(entry: FindingKind) -> str:
    """What the page says of one finding."""
    said = [f"### {entry.id}", paragraph(f"**{entry.severity}**: {entry.title}"), paragraph(entry.story)]
    if entry.fix:
        fix = readable(entry.fix)
        code = "".join(f"\n    {line}" for line in fix.split(" && "))
        said.append(f"Fix:\n{code}" if fix.startswith("ckptfix ") else paragraph(f"Fix: {fix}"))
    return "\n\n".join(said) + "\n"


def paragraph(text: str) -> str:
    """`text` wrapped; what Markdown would take for emphasis is made code."""
    parts = re.split(r"(`[^`]*`)", text.replace("**", "\0", 2) if text.startswith("**") else text)
    parts[::2] = [re.sub(r"\S*(?:\*\*|__)[^\s,;:]*", r"`\g<0>`", part) for part in parts[::2]]
    return wrapped("".join(parts).replace("\0", "**"))


def wrapped(text: str) -> str:
    """The lines of `text`, each no longer than a terminal is wide."""
    return "\n".join(
        fill(line, 80, break_long_words=False, break_on_hyphens=False, subsequent_indent="  " * line.startswith("- "))
        for line in text.split("\n")
    )


def test_the_page_is_made_of_the_table() -> None:
    path = page_of("findings")
    there = path.read_text(encoding="utf-8")
    # Console blocks are brought up to date by the test that runs them.
    shown = re.compile(r"(?<=^```console\n).*?(?=^```)", re.MULTILINE | re.DOTALL)
    block = shown.search(there)
    page = made() if block is None else shown.sub(lambda _: block[0], made())
    if UPDATE and there != page:
        path.write_text(page, encoding="utf-8")
    assert UPDATE or there == page, "CKPTFIX_UPDATE_DOCS=1 pytest tests/docs makes it again"


def test_every_finding_is_in_one_section() -> None:
    rows = Counter(entry.id for entries in SECTIONS.values() for entry in entries)
    assert rows == Counter(ENTRIES.keys())
    assert re.findall(r"^### (.*)$", page_of("findings").read_text("utf-8"), re.MULTILINE) == list(rows)


def test_what_markdown_would_take_for_emphasis_is_code() -> None:
    assert paragraph("**error**: 2**62 of `a**b`, __x__.") == "**error**: `2**62` of `a**b`, `__x__.`"
