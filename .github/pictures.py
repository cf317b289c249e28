"""Draw the pictures of the README from real runs: ``python .github/pictures.py``.

``verdict.svg`` shows ``ckptfix FILE``, ``fix`` and the verdict on its output; ``browse.svg`` shows ``ckptfix browse``.
It needs torch and textual. Without arguments it replaces the pictures beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent
COLUMNS, LINE, CHAR, TOP = 100, 19, 8.43, 44
"""Columns of the terminal; the height of a line, the width of a character and the height of the title, in pixels."""

CLASSES = {"1;31": "error", "31": "error", "33": "warning", "32": "good", "36": "fix", "2": "note"}
"""Code of a color -> class in the picture."""

STYLE = """
text { font: 14px ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace; fill: #d8dee9; white-space: pre }
.error { fill: #ff6b6b } .warning { fill: #ffd166 } .good { fill: #80d493 } .fix { fill: #5fd7ff }
.note { fill: #8b949e } .prompt { fill: #80d493; font-weight: bold }
"""


class Net(nn.Module):
    """A small vision model with the names that a reader knows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 7, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(32, 32, 3, bias=False), nn.BatchNorm2d(32)) for _ in range(4)
        )
        self.fc = nn.Linear(32, 1000)


def checkpoint(folder: Path) -> None:
    """Write ``model.pth``: the checkpoint of a training with DataParallel, an optimizer and arguments."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    state = {f"module.{name}": value for name, value in model.state_dict().items()}
    config = argparse.Namespace(lr=3e-4, data="imagenet")
    torch.save({"epoch": 90, "model": state, "optimizer": optimizer.state_dict(), "args": config}, folder / "model.pth")


def verdict(folder: Path) -> str:
    """Return the picture of three commands and what they print."""
    lines = []
    for words in (["model.pth"], ["fix", "model.pth"], ["model.fixed.pth"]):
        command = [sys.executable, "-m", "ckptfix", *words, "--color", "always"]
        environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONPATH": str(HERE.parent)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        lines.append(f"\x1b[prompt$\x1b[0m ckptfix {' '.join(words)}")
        lines += [*done.stdout.rstrip("\n").split("\n"), ""]
    return drawn([part for line in lines[:-1] for part in broken(line)])


def broken(line: str) -> list[str]:
    """Break a line at a space where the terminal ends, behind the label."""
    plain = re.sub(r"\x1b\[[^m$]*m", "", line)
    if len(plain) <= COLUMNS or "\x1b" in line[20:]:
        return [line]
    cut = line.rfind(" ", 0, COLUMNS + len(line) - len(plain))
    return [line[:cut], *broken(" " * 12 + line[cut + 1 :])]


def drawn(lines: list[str]) -> str:
    """Return the lines of a terminal as SVG."""
    height, width = TOP + LINE * len(lines) + 16, round(COLUMNS * CHAR) + 32
    rows = "\n".join(
        f'<text x="16" y="{TOP + LINE * number + 14}">{spans(line)}</text>' for number, line in enumerate(lines)
    )
    dots = "".join(f'<circle cx="{20 + 18 * n}" cy="20" r="6" fill="{c}"/>' for n, c in enumerate(DOTS))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        f'<style>{STYLE}</style>\n<rect width="100%" height="100%" rx="8" fill="#161b22"/>\n{dots}\n{rows}\n</svg>\n'
    )


KEYS = ("down", "right", "down")
"""Keys that open the model and rest on a tensor."""

DOTS = ("#ff5f56", "#ffbd2e", "#27c93f")


def spans(line: str) -> str:
    """Return a line with its colors as spans."""
    parts = re.split(r"\x1b\[(prompt\$|[\d;]*m)", line)
    out, kind = [escape(parts[0])], ""
    for code, text in zip(parts[1::2], parts[2::2], strict=True):
        if code == "prompt$":
            out.append('<tspan class="prompt">$</tspan>')
        kind = CLASSES.get(code.removesuffix("m"), "")
        out.append(f'<tspan class="{kind}">{escape(text)}</tspan>' if kind else escape(text))
    return "".join(out)


async def browsed(folder: Path) -> str:
    """Return the picture of the browser with a tensor open."""
    from ckptfix.browse.view.app import BrowseApp

    os.chdir(folder)
    shown = BrowseApp("model.pth", None, None, ())
    async with shown.run_test(size=(COLUMNS, 28)) as pilot:
        await pilot.pause(1)
        for key in KEYS:
            await pilot.press(key)
            await pilot.pause(0.3)
        await pilot.pause(2)
        text = shown.export_screenshot(title="ckptfix browse model.pth")
    # The fonts of the reader's machine do; a picture loads nothing from elsewhere.
    return re.sub(r"@font-face\s*{[^}]*}|<!--.*?-->", "", text, flags=re.DOTALL)


def main() -> None:
    """Write both pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE, help="the folder for the pictures")
    out = parser.parse_args().out.resolve()
    with tempfile.TemporaryDirectory() as name:
        checkpoint(Path(name))
        (out / "verdict.svg").write_text(verdict(Path(name)), encoding="utf-8")
        (out / "browse.svg").write_text(asyncio.run(browsed(Path(name))), encoding="utf-8")


if __name__ == "__main__":
    main()
