"""The site of `make docs`: all pages are in its navigation, and its links lead to pages of the site."""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from docs.pages import ROOT
from docs.test_pages import links

pytestmark = pytest.mark.sampled(1_000)  # each row is a rule of its own

SITE: dict[str, Any] = runpy.run_path(str(ROOT / ".github/site.py"))
PLACES: dict[PurePosixPath, str] = SITE["sources"]()
PAGES = {source: place for source, place in PLACES.items() if source.suffix == ".md"}
NAV = tomllib.loads((ROOT / ".github/site.toml").read_text(encoding="utf-8"))["project"]["nav"]


def test_the_navigation_names_each_page_once() -> None:
    named = [page for group in NAV for rows in group.values() for row in rows for page in row.values()]
    assert sorted(named) == sorted(PAGES.values())
    assert named[0] == "index.md"


@pytest.mark.parametrize("source", PAGES, ids=str)
def test_links_lead_to_files_of_the_site(source: PurePosixPath) -> None:
    text = SITE["moved"]((ROOT / source).read_text(encoding="utf-8"), source, PLACES)
    targets = {link.partition("#")[0] for link in links(text) if not re.match(r"[a-z]+:|#", link)}
    assert targets <= set(PLACES.values())


def test_git_ignores_what_is_built() -> None:
    assert f"{SITE['BUILD'].name}/" in (ROOT / ".gitignore").read_text(encoding="utf-8").split()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("zensical") is None, reason="needs zensical: pip install 'ckptfix[docs]'")
def test_the_site_is_built_and_a_broken_link_stops_it(tmp_path: Path) -> None:
    pages = [*PLACES, PurePosixPath(".github/site.py"), PurePosixPath(".github/site.toml")]
    for page in pages:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_bytes((ROOT / page).read_bytes())
    built = subprocess.run([sys.executable, tmp_path / ".github/site.py"], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    site = tmp_path / "build/site"
    for place in PAGES.values():
        text = (site / place).with_suffix(".html").read_text(encoding="utf-8")
        assert not re.findall(r"""(?:src|href)=["']?https?:[^ >]*\.(?:js|css|woff2?)\b""", text)
    assert "reflink" in (site / "search.js").read_text(encoding="utf-8")
    readme = tmp_path / "README.md"
    readme.write_text(readme.read_text(encoding="utf-8") + "[x](ckptfix/docs/commands.md#nowhere)\n", encoding="utf-8")
    assert subprocess.run([sys.executable, tmp_path / ".github/site.py"], capture_output=True).returncode == 1
