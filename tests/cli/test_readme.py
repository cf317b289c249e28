"""The README's console blocks: every ``$ ckptfix`` line is run, in order, and shows what the README says.

They run in one folder that holds the files of `FILES`. In the expected output ``...`` stands for anything; on a line of
its own, for any number of lines. ``$ echo $?`` shows the exit code of the command before it; nothing else is run.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from builders import Tensor, assemble, state_dict_ops, torch_zip, written
from cli.conftest import state, wrapped

README = Path(__file__).parents[2] / "README.md"



def model(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """A torch zip of float32 zeros on the CPU."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    items = {
        name: Tensor(str(index), shape, size)
        for index, ((name, shape), size) in enumerate(zip(shapes.items(), sizes, strict=True))
    }
    return torch_zip(assemble(("PROTO", 2), *state_dict_ops(items), "STOP"), [bytes(4 * size) for size in sizes])


def transformer(layer: str, modules: str, *, width: int = 8, depth: int = 2) -> bytes:
    """A checkpoint of `depth` layers; `modules` has them in order, each after what it is: linear, up, down or norm."""
    shapes = {"linear": (width, width), "up": (4 * width, width), "down": (width, 4 * width), "norm": (width,)}
    rows = [row.split() for row in modules.strip().splitlines()]
    named: dict[str, tuple[int, ...]] = {}
    for index in range(depth):
        for kind, path in rows:
            named[f"{layer.format(index)}.{path}.weight"] = shapes[kind]
            named[f"{layer.format(index)}.{path}.bias"] = shapes[kind][:1]
    return model(named)


BERT = """
linear attention.self.query
linear attention.self.key
linear attention.self.value
linear attention.output.dense
norm attention.output.LayerNorm
up intermediate.dense
down output.dense
norm output.LayerNorm
"""

MINE = """
linear attn.k
linear attn.v
linear attn.q
linear attn.proj
norm norm1
up mlp.0
down mlp.2
norm norm2
"""

def saved(contents: Callable[[], Any]) -> bytes:
    """What torch.save makes of `contents`."""
    import torch

    file = io.BytesIO()
    torch.save(contents(), file)
    return file.getvalue()


def with_settings() -> Any:
    """A training checkpoint with what only its own libraries unpickle."""
    import numpy as np
    import torch

    settings = argparse.Namespace(lr=0.1, out=PurePosixPath("runs/7"))
    return {"state_dict": {"fc.weight": torch.ones(2, 3)}, "best": np.float64(0.75), "args": settings}


def one_row() -> Any:
    """A view of six elements that drags a storage of 60,000 along."""
    import torch

    return {"head.weight": torch.zeros(10_000, 6)[0]}


FILES = {
    "ddp.pth": wrapped(),
    "multi_gpu.pth": wrapped(),
    "cuda.pth": wrapped(""),
    "compiled.pth": wrapped("module._orig_mod."),
    "model.pth": wrapped("", "cpu"),
    "a.pth": state(fc__weight=(1, 2, 3), fc__bias=(4, 5)),
    "b.pth": state(fc__weight=(1, 2, 4), fc__bias=(4, 5)),
    "bert.pth": transformer("bert.encoder.layer.{}", BERT),
    "mine.pth": transformer("blocks.{}", MINE),
    "cut.pth": transformer("blocks.{}", MINE)[:9000],
    "settings.pth": saved(with_settings),
    "view.pth": saved(one_row),
    "heads.pth": model({"left.weight": (4, 4), "right.weight": (4, 4)}),
    "like.pth": model({"one.weight": (4, 4), "other.weight": (4, 4)}),
}
"""What the README may call by name: small checkpoints."""


@dataclass(frozen=True)
class Command:
    """A line of a console block, and the output that is shown below it."""

    line: str
    expected: str


def console(text: str) -> Iterator[Command]:
    """The commands of all console blocks."""
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, expected = part.partition("\n")
            yield Command(line.strip(), expected.rstrip())


def matches(expected: str, shown: str) -> bool:
    """Whether `shown` is `expected`, in which ``...`` is anything; spaces at the ends of lines do not count."""
    pattern = []
    for line in expected.splitlines():
        if line.strip() == "...":
            pattern.append(r"(?:[^\n]*\n)*?")
        else:
            pattern.append(".*".join(map(re.escape, line.rstrip().split("..."))) + r"[ ]*\n")
    return re.fullmatch("".join(pattern), shown.rstrip("\n") + "\n" if shown.strip() else "") is not None


@pytest.mark.slow
def test_the_readme_shows_what_happens(tmp_path: Path) -> None:
    commands = list(console(README.read_text(encoding="utf-8")))
    assert any(command.line.startswith("ckptfix ") for command in commands)
    binaries = tmp_path / "bin"
    folder = tmp_path / "folder"
    binaries.mkdir()
    folder.mkdir()
    shim = written(binaries / "ckptfix", f'#!/bin/sh\nexec "{sys.executable}" -m ckptfix "$@"\n'.encode())
    shim.chmod(0o755)
    for name, content in FILES.items():
        written(folder / name, content)
    environment = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "COLUMNS": "100"}
    code = 0
    for command in commands:
        if command.line == "echo $?":
            assert command.expected.strip() == str(code)
        if not command.line.startswith("ckptfix "):
            continue
        done = subprocess.run(
            ["sh", "-c", command.line],
            cwd=folder,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        code = done.returncode
        assert matches(command.expected, done.stdout), (
            f"$ {command.line}\nshows\n{done.stdout}\nand the README says\n{command.expected}"
        )


def test_console_blocks_are_taken_apart() -> None:
    text = "x\n```console\n$ a b\none\ntwo\n\n$ c\n```\n```sh\n$ no\n```\n```console\n$ d\nthree\n```\n"
    assert list(console(text)) == [Command("a b", "one\ntwo"), Command("c", ""), Command("d", "three")]


@pytest.mark.parametrize(
    ("expected", "shown", "same"),
    [
        ("one", "one\n", True),
        ("one", "one\ntwo\n", False),
        ("one\n...", "one\ntwo\nthree\n", True),
        ("one\n...\nfour", "one\ntwo\nthree\nfour\n", True),
        ("one\n...\nfour", "one\ntwo\nthree\n", False),
        ("one ... three", "one two three\n", True),
        ("one ... three", "one\ntwo three\n", False),
        ("", "", True),
        ("", "one\n", False),
        ("a.b", "axb\n", False),
    ],
)
def test_the_comparison_can_fail(expected: str, shown: str, same: bool) -> None:
    assert matches(expected, shown) is same
