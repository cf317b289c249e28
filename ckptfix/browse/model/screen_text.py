"""The text of the screen: the title, the status line, and the details of a node, as plain text."""

from __future__ import annotations

import time
from collections.abc import Iterator

from ckptfix.browse.model import facts
from ckptfix.browse.model.contents import ContentItem
from ckptfix.browse.model.facts import Line
from ckptfix.browse.model.outline import OutlineNode
from ckptfix.browse.model.session import RUNNING, Session
from ckptfix.browse.model.text_drawing import shown
from ckptfix.ops.dequantize.summary import described_tensor
from ckptfix.words import plural, short, size

STALE = "The file changed on disk: r reads it again."


def name_of(session: Session) -> str:
    """Return the label of the root row."""
    if session.other is not None:
        return "A and B"
    path = session.path if session.contents is None else session.contents.path
    return shown(path.rstrip("/").rpartition("/")[2] or path, 200)


def title(session: Session) -> tuple[str, str]:
    """Return the name of the open file, and a short description."""
    name = shown(session.path, 200)
    if session.other is not None:
        return f"A {name}    B {shown(session.other, 200)}", ""
    found = session.inspection
    if found is None:
        return name, ""
    about = [found.title, size(found.size), plural(found.tensors, "tensor")]
    parameters = found.parameters if found.plain_parameters is None else found.plain_parameters
    about += [f"{short(parameters)} parameters"] if parameters else []
    return name, " · ".join(map(shown, about))


def state(session: Session) -> tuple[str, bool]:
    """Return the status line (running jobs and findings), and whether it reports a problem."""
    if session.stale:
        return STALE, True
    if "read" in session.jobs:
        what = "sizes" if session.items else "names and shapes"
        return f"Reading {what} ... {time.monotonic() - session.began:.1f} s", False
    if session.trouble is not None:
        what = "It cannot be opened" if session.other is None else "They cannot be compared"
        return f"{what}. y copies the command that shows more.", True
    return "   ".join(filter(None, [*_running(session), _found(session)])), False


def _running(session: Session) -> Iterator[str]:
    for name, what in RUNNING.items():
        job = session.jobs.get(name)
        if job is not None:
            yield f"{what}: {job.done / job.total:.0%} of {size(job.total)}, esc stops" if job.total else f"{what} ..."


def _found(session: Session) -> str:
    if session.pairs is not None:
        counts = session.counts
        unknown = f", C compares the values of {plural(counts['?'], 'tensor')}" if counts["?"] else ""
        return f"{counts['~']:,} changed, {counts['+']:,} added, {counts['-']:,} removed{unknown}"
    if session.marks.diagnosis is None:
        return "" if "judge" in session.jobs else "f looks for problems"
    severities = [row.finding.severity for row in session.marks.rows]
    words = [plural(severities.count(name), name) for name in ("error", "warning") if name in severities]
    return f"{', '.join(words)}: f lists them" if words else "no problems found without reading tensors"


LOW = 14
"""Panels of fewer lines get a histogram of half height."""


def details(
    session: Session, node: OutlineNode | None, width: int, height: int, *, everything: bool = False
) -> Iterator[Line]:
    """Yield the details of a node, for a panel of `width` and `height`; `everything` means the root node."""
    if session.trouble is not None:
        message, hint = session.trouble
        yield "error", shown(message, 4000)
        if hint:
            yield "", f"hint: {shown(hint)}"
        rows = [row.finding for row in session.marks.rows if row.finding.severity != "info"]
        yield from facts.findings([finding for finding in rows if finding.message not in message])
        if session.marks.fix is not None:
            yield "", ""
            yield "added", f"Fix: {shown(session.marks.fix)}"
    elif node is None or (node.items and node.items[0].pending):
        return
    elif everything and session.pairs is not None:
        yield from facts.of_two(node, (session.path, session.other or ""), session.notes)
    elif everything:
        yield from facts.of_file(session.facts, session.marks, session.notes)
    elif node.item is None:
        yield from facts.of_module(node, session.marks)
    elif node.item.is_value:
        yield from facts.of_value(node.item, session.marks)
    else:
        yield from facts.of_tensor(node.item, session.marks)
        yield from _quantized(session, node.item)
        yield from _numbers(session, node.item, width, facts.HEIGHT if height >= LOW else facts.HEIGHT // 2)


def _quantized(session: Session, item: ContentItem) -> Iterator[Line]:
    """Yield the role of a tensor in a quantized weight, and the shape of the plain weight."""
    for side, contents, entry in session.sides(item):
        for line in described_tensor(contents.checkpoint, entry.name):
            yield "dim", shown(f"{side}  {line}" if side else line, 300)


def _numbers(session: Session, item: ContentItem, width: int, height: int) -> Iterator[Line]:
    """Yield the differences of the two sides and the statistics of each, or the reason why they are missing."""
    if session.stale:
        yield "", ""
        yield "error", STALE
        return
    yield from facts.of_changes(session.changes.get(id(item), ()))
    known = [
        (side, session.summaries[id(entry)]) for side, _, entry in session.sides(item) if id(entry) in session.summaries
    ]
    ends = facts.ends_of([made for _, made in known])
    for side, made in known:
        yield from facts.of_summary(made, width, side, ends, height)
    if id(item) in session.failures:
        yield "", ""
        yield "error", session.failures[id(item)]
    elif not known and "compute" not in session.jobs:
        yield "", ""
        yield "dim", f"c reads its {size(item.nbytes)} for statistics and a histogram"
