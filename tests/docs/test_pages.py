"""What holds of every page: a topic each, links that lead somewhere, lines that a terminal shows whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs.pages import ALL, FOLDER, PAGES, ROOT

from ckptfix.docs import TOPICS, page

pytestmark = pytest.mark.sampled(1_000)  # each row is a rule of its own

COLUMNS = 80


def prose(text: str) -> Iterator[str]:
    """The lines outside fenced code."""
    fenced = False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield line


def links(text: str) -> list[str]:
    """Targets of the links; what looks like one inside code is not."""
    return [link for link in re.findall(r"`[^`]*`|\[[^\]]+\]\(([^)\s]+)\)", "\n".join(prose(text))) if link]


def anchors(text: str) -> set[str]:
    """What may follow a ``#``, as GitHub makes it of the headings."""
    titles = (line.lstrip("#").strip().lower() for line in prose(text) if re.match(r"#{1,6} ", line))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


def broken(path: Path, text: str) -> list[str]:
    """The relative links in `text`, the page `path`, that lead nowhere."""
    found = []
    for link in links(text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        there = text if target == path else target.read_text(encoding="utf-8") if target.is_file() else ""
        if not target.exists() or (anchor and anchor not in anchors(there)):
            found.append(link)
    return found


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    assert not broken(path, path.read_text(encoding="utf-8"))


def test_a_broken_link_is_seen() -> None:
    text = "# Some Title: `x`\n[a](none.md) [b](#some-title-x) [c](#no) `[d](e)`\n[`f`](README.md#no)\n"
    assert broken(ROOT / "README.md", text) == ["none.md", "#no", "README.md#no"]


def test_every_page_is_a_topic_and_the_readme_links_it() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == set(TOPICS)
    assert {f"ckptfix/docs/{topic}.md" for topic in TOPICS} <= set(links((ROOT / "README.md").read_text("utf-8")))


@pytest.mark.parametrize("topic", TOPICS)
def test_a_page_begins_with_its_title(topic: str) -> None:
    assert page(topic).startswith("# ")
    assert page(topic).endswith("\n") and not page(topic).endswith("\n\n")


@pytest.mark.parametrize("topic", TOPICS)
def test_a_terminal_shows_the_lines_whole(topic: str) -> None:
    lines = (re.sub(r"(?<=\])\([^)\s]*\)", "", line) for line in prose(page(topic)))
    assert not [line for line in lines if len(line) > COLUMNS]


TASKS = (
    "My keys begin with `module.`", "The class is gone", "It wants cuda:3", "Out of memory while converting",
    "Move to safetensors", "The disk filled up", "Compare two runs", "Resume on other GPUs",
    "Make one file from the files of eight ranks",
)  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_a_recipe_is_found_by_its_task_and_run(task: str) -> None:
    text = page("recipes")
    (body,) = re.findall(rf"^## {re.escape(task)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert re.search(r"^```console\n\$ ckptfix |^```python\n", body, re.MULTILINE), "nothing that the tests run"
    assert f"- [{task}](#" in text.partition("\n## ")[0]


def test_the_readme_is_short() -> None:
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= 150
