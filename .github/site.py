"""Build the site: python .github/site.py. The pages are those of ``ckptfix help``, with the README in front.

Pages that are kept elsewhere in the repository are put beside them, and links between files become links between pages.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path, PurePosixPath
from posixpath import normpath

ROOT = Path(__file__).parents[1]
DOCS = PurePosixPath("ckptfix/docs")
BUILD = ROOT / "build"
CONFIG = ROOT / ".github/site.toml"
"""Configuration of the generator, which wants it above pages and site."""

ELSEWHERE = {
    "README.md": "index.md",
    ".github/CONTRIBUTING.md": "contributing.md",
    ".github/SECURITY.md": "security.md",
    ".github/verdict.svg": "verdict.svg",
    ".github/browse.svg": "browse.svg",
    ".github/site.js": "site.js",
    "ckptfix/docs/schema.json": "schema.json",
}
"""File of the repository -> its place in the site, for all but the pages in `DOCS`."""

WEB = "https://unpkg.com/iframe-worker/shim"
"""What the generator names for searching a site that no server shows."""


def sources() -> dict[PurePosixPath, str]:
    """Return the place in the site of each file that is part of it."""
    pages = sorted((ROOT / DOCS).glob("*.md"))
    return {**{DOCS / page.name: page.name for page in pages}, **{PurePosixPath(k): v for k, v in ELSEWHERE.items()}}


def moved(text: str, source: PurePosixPath, places: dict[PurePosixPath, str]) -> str:
    """Return the page `text`, kept at `source`, with its links to files of the repository made links of the site."""

    def link(found: re.Match[str]) -> str:
        name, mark, anchor = found[1].partition("#")
        place = places.get(PurePosixPath(normpath(source.parent / name)), name)
        return f"]({place}{mark}{anchor})"

    return re.sub(r"\]\((?![a-z]+:|#)([^)\s]+)\)", link, text)


def without_network(site: Path) -> None:
    """Give the pages in `site` the script of this folder for the one that they would fetch from the web."""
    for page in site.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        if WEB not in text:
            raise SystemExit(f"{page.name} does not name {WEB} any more: see how the generator searches without it.")
        page.write_text(text.replace(WEB, "site.js"), encoding="utf-8")


def main() -> int:
    """Put the pages into one folder, and return the exit code of the generator."""
    shutil.rmtree(BUILD / "pages", ignore_errors=True)
    (BUILD / "pages").mkdir(parents=True)
    places = sources()
    for source, place in places.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if source.suffix == ".md":
            text = moved(text, source, places)
        (BUILD / "pages" / place).write_text(text, encoding="utf-8")
    shutil.copyfile(CONFIG, BUILD / "zensical.toml")
    words = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    code = subprocess.run(words, cwd=BUILD).returncode
    if not code:
        without_network(BUILD / "site")
    return code


if __name__ == "__main__":
    sys.exit(main())
