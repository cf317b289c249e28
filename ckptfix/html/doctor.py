"""The page of ``ckptfix doctor FILE --html``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from ckptfix.commands import command as line_of
from ckptfix.errors import CkptfixError
from ckptfix.findings.table import ENTRIES
from ckptfix.html.inspect import globals_of
from ckptfix.html.page import facts, pasted, section, table, tiles, whole
from ckptfix.html.text import Html, join, tag
from ckptfix.io.source import found_as
from ckptfix.ops import inspect
from ckptfix.ops.doctor.groups import OF_THE_FORMAT, FindingGroup
from ckptfix.ops.doctor.report import Diagnosis
from ckptfix.ops.inspect.describe import Inspection, summed_up
from ckptfix.words import plural

WORDS = {"error": "Errors", "warning": "Warnings", "info": "Notes"}

PLACES = 100
"""Maximum places listed for a finding."""


def page(done: Diagnosis, *, command: str | None = None) -> str:
    """Return the page; see `Diagnosis.to_html`."""
    inspection = _inspected(done)
    name = PurePath(done.path).name or done.path or "An error message"
    counts = {severity: sum(row.severity == severity for row in done.findings) for severity in WORDS}
    kind, word = ("warn", "Warnings") if counts["warning"] else ("good", "No problems")
    if counts["error"]:
        kind, word = "error", "Errors"
    if not done.path:
        kind, word = "warn", "An error message without its file"
    rows = [
        (f"{count:,}", WORDS[severity].lower() if count != 1 else WORDS[severity].lower()[:-1], mark if count else "")
        for (severity, count), mark in zip(counts.items(), ("error", "bad", ""), strict=True)
    ]
    lines = [tag("p", _capital(line)) for line in (done.sentence, done.survivors) if line]
    head = join((
        tag("h1", name), tag("p", word, class_=f"verdict {kind}"), tiles(rows) if done.path else "",
        tag("div", *lines, class_="lines"),
    ))  # fmt: skip
    sections = [*_fix(done), *_message(done), *_findings(done)]
    if inspection is not None:
        known = [row for row in summed_up(inspection, 20) if row[0] not in ("metadata", "globals", "folder", "traits")]
        sections += [section("About this file", facts(known)), *globals_of(inspection)]
    elif done.path:
        sections.append(section("About this file", facts([("file", [done.path]), ("type", [done.title])])))
    if done.looked_at:
        sections.append(section("Checks", tag("p", ", ".join(done.looked_at))))
    sections.append(section("Made by", pasted(command or line_of("doctor", *([done.path] if done.path else [])))))
    return whole(f"{name}: {word.lower()}", "ckptfix doctor", head, sections, [], {})


def _capital(line: str) -> str:
    """Begin a sentence with a capital, unless its first word is a name of Python: ``torch.load refuses``."""
    return line if {".", "_"} & set(line.partition(" ")[0]) else line[:1].upper() + line[1:]


def _inspected(done: Diagnosis) -> Inspection | None:
    """Inspect the file, if it can be read."""
    if not done.path or not found_as(done.path):
        return None
    try:
        return inspect.inspect(done.path)
    except CkptfixError:
        return None


def _fix(done: Diagnosis) -> Iterator[Html]:
    """Yield the section with the commands and the advice for everything found."""
    parts: list[object] = [] if done.advice is None else [tag("p", "Try: ", done.advice)]
    for line in done.lines():
        if line.kind == "command":
            word, _, text = line.text.partition(": ")
            parts += [*([] if word == "Fix" else [tag("p", f"{word}:", class_="note")]), pasted(text)]
    if parts:
        yield section("Fix", *parts)


def _message(done: Diagnosis) -> Iterator[Html]:
    message = done.message
    if message is None:
        return
    if message.explained:
        said = [f"It is explained by: {', '.join(message.explained)}."]
    else:
        said = [f"It usually means: {meaning}" for meaning in message.meanings] or ["ckptfix does not know it."]
    yield section("The error message", *(tag("p", line) for line in said))


def _findings(done: Diagnosis) -> Iterator[Html]:
    groups = done.groups
    for severity, title in WORDS.items():
        found = [group for group in groups if group.severity == severity]
        if found:
            yield section(title, *map(_group, found))


def _group(group: FindingGroup) -> Html:
    """Draw a finding: the problem, its cause, its places, and the remedy."""
    entry = ENTRIES.get(group.id)
    parts: list[object] = [tag("h3", group.text()), tag("span", group.id, class_="id")]
    fix = None if group.id in OF_THE_FORMAT else next((row.fix for row in group.findings if row.fix), None)
    if fix is not None and fix.startswith("ckptfix "):
        parts.append(pasted(fix))
    elif group.advice or fix:
        parts.append(tag("p", "Remedy: ", group.advice or fix))
    if entry is not None:
        parts.append(tag("details", tag("summary", "Meaning"), tag("p", entry.story)))
    rows = [
        (row.where, "" if row.offset is None else f"{row.offset:#x}", row.message) for row in group.findings[:PLACES]
    ]
    if len(rows) > 1 or any(row[1] for row in rows):
        places = tag("summary", plural(len(group.findings), "place"))
        parts.append(tag("details", places, table(("Where", "Offset", "Message"), rows)))
    return tag("div", *parts, class_=f"finding {group.severity}")
