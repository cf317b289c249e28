"""Run the commands and loaders on the files of a folder, in this process: ``python -m property.run_shared FOLDER``.

All of them on each in a long run; else every second, and on the next file the others. A line before each, and
``done`` at the end: where the output stops is what did not come back.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path

from file_commands import IN, OTHER, OUT, SHARED, lines
from torch import nn, optim

import ckptfix
from ckptfix.cli import commands
from ckptfix.errors import CkptfixError

LONG = os.environ.get("CKPTFIX_LONG") == "1"


def operations(path: Path, folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    for name, line in lines(SHARED).items():
        out = str(folder / ("out.safetensors" if "safetensors" in line else "out.pth"))
        places = {IN: str(path), OTHER: str(path), OUT: out}
        words = [*(places.get(word, word) for word in line), *(["-f"] if OUT in line else [])]
        yield name, lambda words=words: run(words)  # type: ignore[misc]
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(nn.Linear(2, 1).weight[0].detach().clone()))
    model.get_extra_state = lambda: None  # type: ignore[method-assign]
    model.set_extra_state = lambda state: None  # type: ignore[method-assign]
    yield "load_checkpoint", lambda: ckptfix.load_checkpoint(path)
    yield "load_state_dict", lambda: ckptfix.load_state_dict(path)
    yield "load_into", lambda: ckptfix.load_into(model, path, strict=False)
    yield "load_into at", lambda: ckptfix.load_into(model, path, at="hyper/1/1/1/1/1/1", strict=False)
    yield "load_optimizer", lambda: ckptfix.load_optimizer(optim.Adam(model.parameters()), path, model=model)


def run(words: list[str]) -> None:
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as said:
        commands.main(words, standalone_mode=False)
    if "bug in ckptfix" in said.getvalue():
        raise AssertionError(said.getvalue())


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    for turn, path in enumerate(sorted(folder.glob("*.pth"))):
        out = folder / "out"
        out.mkdir(exist_ok=True)
        found = [*operations(path, out)]
        for name, operation in found if LONG else found[turn % 2 :: 2]:
            print(f"{path.stem}: {name}", flush=True)
            with suppress(CkptfixError):
                operation()
    print("done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
