"""What the tests of the browser share: files to look at, and the app under a pilot."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from builders import Op, Tensor, assemble, push, safetensors, state_dict_ops, torch_zip, written

from ckptfix.browse.view import browser
from ckptfix.browse.view.app import BrowseApp
from ckptfix.browse.view.browser import Browser
from ckptfix.browse.view.tree import Tree

Played = Callable[[Any], Awaitable[None]]

RESTING = 0.05
"""Seconds until the cursor has rested: more than the pause of the browser, which the same event loop measures."""

HOSTILE = (
    "\x1b[31mred\x1b[0m.weight",
    "[red]markup[/red].[@click=app.quit]weight",
    "\u202ertl\u2066.weight",
    "new\nline.\r\ttab",
    "nul\0.\x9bcsi",
    "\ud800lone",
    "x" * 5000 + ".weight",
    "",
    ".",
    "..weight",
    "/abc/",
    "*?[glob].weight",
    "-option 'quoted' $(x)",
    "中文宽字符.权重",
    "e\u0301\u0301\u0301.weight",
)
"""Names that a terminal, a markup or a shell would take for something else."""


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def training(folder: Path, name: str = "train.pth", *, prefix: str = "", epoch: int = 3, scale: float = 1.0) -> Path:
    """A training checkpoint: a model of two layers and a norm, an epoch, arguments."""
    names = {
        f"{prefix}layers.{layer}.{part}.weight": Tensor(str(2 * layer + half), (2, 3), 6)
        for layer in range(2)
        for half, part in enumerate(("attn", "mlp"))
    }
    model = state_dict_ops({**names, f"{prefix}norm.bias": Tensor("4", (25,), 25)})
    ops: list[Op] = ["EMPTY_DICT", "MARK", *push("model"), *model, *push("epoch"), *push(epoch)]
    ops += [*push("args"), *push({"lr": 0.5, "name": "run"}), "SETITEMS", "STOP"]
    data = [floats(*(scale * (layer + value) for value in range(6))) for layer in range(4)]
    return written(folder / name, torch_zip(assemble(("PROTO", 2), *ops), [*data, floats(*range(25))]))


def tensors(path: Path, rows: Mapping[str, tuple[float, ...]]) -> Path:
    """A safetensors file of flat float32 tensors."""
    return written(path, safetensors([(name, "F32", [len(row)], floats(*row)) for name, row in rows.items()]))


def hostile(path: Path) -> Path:
    """A torch zip whose names are `HOSTILE`, and a value of each."""
    names = {name: Tensor(str(index), (2,), 2) for index, name in enumerate(HOSTILE)}
    ops: list[Op] = ["EMPTY_DICT", "MARK", *push("model"), *state_dict_ops(names)]
    for name in HOSTILE[:5]:
        ops += [*push(f"value {name}"), *push(f"text {name}")]
    pickle = assemble(("PROTO", 2), *ops, "SETITEMS", "STOP")
    return written(path, torch_zip(pickle, [floats(1, 2)] * len(HOSTILE)))


def play(app: BrowseApp, script: Played, size: tuple[int, int] = (80, 24)) -> None:
    """Run `script` with a pilot of `app`."""

    async def run() -> None:
        async with app.run_test(size=size, notifications=True) as pilot:
            await script(pilot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(browser, "PAUSE", RESTING / 5)
        asyncio.run(run())


async def until(pilot: Any, true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until something is true."""
    for _ in range(int(seconds / 0.02)):
        if true():
            await pilot.pause()
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {screen(pilot.app)}")


async def settled(pilot: Any) -> None:
    """Wait until nothing runs, and the cursor has rested."""
    await pilot.pause(RESTING)
    shown = pilot.app.screen
    if isinstance(shown, Browser):
        await until(pilot, lambda: not shown.session.jobs)


def screen(app: Any) -> str:
    """What is seen, line by line."""
    width, height = app.size
    rows = [[" "] * width for _ in range(height)]
    for y, strip in enumerate(app.screen._compositor.render_strips()):
        if y < height:
            rows[y] = list(strip.text[:width])
    return "\n".join("".join(row).rstrip() for row in rows)


def labels(app: Any) -> list[str]:
    """The labels of the rows of the tree."""
    tree = app.screen.query_one(Tree)
    return [tree.at(row).label for row in range(tree.count())]
