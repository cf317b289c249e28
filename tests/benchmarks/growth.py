"""How the work of each command grows with its input, and its memory: ``python tests/benchmarks/growth.py``.

Checkpoints of many tensors in one record, many records, many dicts, many frames, and files of the other formats, each
at a size and at eight times that size. A command runs in a fork of a process that has imported it, so that what is
counted is CPU time and memory of the work alone. The exponent is that of the growth between the two sizes: 1 is linear.
The memory is a multiple of the pickle or header that is read. Exit status: 1 where an exponent or a multiple is above
its limit.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from inputs import Distributed
from measure import RSS_UNIT, removed
from packages import ROOT

MOST = 100_000
TIMES = 8
EXPONENT = 1.1
TRIES = 3
"""Measurements of a command that seems to grow faster: other work on the machine makes one look so, and none slower."""

MULTIPLE = 64
MULTIPLE_OF_OPCODES = 256
"""Most bytes of memory for a byte of the pickle or header, beyond what the program has at its start; and where the
pickle is made of the smallest opcodes that there are. Both are for `READERS`; what writes holds the output too.
"""

OUT, IN, LIKE, MORE = "{out}", "{in}", "{like}", "{more}"
COMMANDS: dict[str, tuple[str, ...]] = {
    "ls": ("ls", IN),
    "inspect": ("inspect", IN),
    "doctor": ("doctor", IN),
    "doctor --fast": ("doctor", IN, "--fast"),
    "diff": ("diff", IN, IN),
    "fix": ("fix", IN, OUT),
    "strip-module": ("strip-module", IN, OUT),
    "add-module": ("add-module", IN, OUT),
    "unwrap": ("unwrap", IN, OUT),
    "rename": ("rename", IN, OUT, "--sub", "weight$=kernel"),
    "match": ("match", IN, OUT, "--like", LIKE),
    "to-cpu": ("to-cpu", IN, OUT),
    "map-location": ("map-location", IN, OUT, "cuda:0=cuda:1"),
    "convert --to zip": ("convert", IN, OUT, "--to", "zip"),
    "convert --to legacy": ("convert", IN, OUT, "--to", "legacy"),
    "convert --to safetensors": ("convert", IN, OUT, "--to", "safetensors"),
    "convert --to hf": ("convert", IN, OUT, "--to", "hf"),
    "convert --to dcp": ("convert", IN, OUT, "--to", "dcp"),
    "extract": ("extract", IN, OUT, "--to", "zip"),
    "sanitize": ("sanitize", IN, OUT, "--torch", "1.13"),
    "slim": ("slim", IN, OUT, "--dedupe"),
    "repair": ("repair", IN, OUT),
    "select": ("select", IN, OUT, "--drop", "*.part7.*"),
    "digest": ("digest", IN),
    "stats": ("stats", IN),
    "cast": ("cast", IN, OUT, "--to", "bfloat16"),
    "average": ("average", IN, IN, "-o", OUT),
    "inspect --tensors": ("inspect", IN, "--tensors", "--json"),
    "inspect --html": ("inspect", IN, "--html", OUT),
    "diff --html": ("diff", IN, IN, "--html", OUT),
    "doctor --like": ("doctor", IN, "--like", IN),
    "digest --check": ("digest", IN, "--check", IN),
    "git textconv": ("git", "textconv", IN),
    "merge": ("merge", IN, MORE, "-o", OUT, "--to", "zip"),
    "set-metadata": ("set-metadata", IN, OUT, "--set", "a=b"),
    "add-module --in-place": ("add-module", IN, "--in-place"),
    "undo": ("undo", IN),
}


def _saved(path: Path, state: Any, **options: Any) -> int:
    """Save with torch; the size of the pickle."""
    import zipfile

    import torch

    torch.save(state, path, **options)
    if not zipfile.is_zipfile(path):
        return path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        return next(row.file_size for row in archive.infolist() if row.filename.endswith("data.pkl"))


def _tagged() -> None:
    import torch

    torch.serialization.register_package(0, lambda storage: "cuda:0", lambda storage, location: None)


def _names(count: int) -> list[str]:
    return [f"module.blocks.{number // 10}.part{number % 10}.weight" for number in range(count)]


def tensors(path: Path, count: int) -> int:
    import torch

    whole = torch.arange(2.0 * count)
    return _saved(path, {name: whole[2 * at : 2 * at + 2] for at, name in enumerate(_names(count))})


def records(path: Path, count: int) -> int:
    import torch

    return _saved(path, {name: torch.full((2,), float(at)) for at, name in enumerate(_names(count))})


def dicts(path: Path, count: int) -> int:
    import torch

    whole = torch.arange(2.0 * count)
    return _saved(path, {str(at): {"module.fc.weight": whole[2 * at : 2 * at + 2]} for at in range(count)})


def frames(path: Path, count: int) -> int:
    """A frame of the pickle for each key."""
    from builders import Tensor, assemble, push, tensor_ops, torch_zip

    parts = [assemble(("PROTO", 4), "EMPTY_DICT", "MARK")]
    for at, name in enumerate(_names(count)):
        body = assemble(*push(name), *tensor_ops(Tensor("0", (2,), 2 * count, location="cuda:0", offset=2 * at)))
        parts += [assemble(("FRAME", len(body))), body]
    pickle = b"".join((*parts, assemble("SETITEMS", "STOP")))
    path.write_bytes(torch_zip(pickle, [bytes(8 * count)]))
    return len(pickle)


def legacy(path: Path, count: int) -> int:
    import torch

    state = {name: torch.full((2,), float(at)) for at, name in enumerate(_names(count))}
    return _saved(path, state, _use_new_zipfile_serialization=False)


def safetensors(path: Path, count: int) -> int:
    import torch
    from safetensors.torch import save_file

    save_file({name: torch.full((2,), float(at)) for at, name in enumerate(_names(count))}, path)
    with path.open("rb") as file:
        return int.from_bytes(file.read(8), "little")


def dcp(path: Path, count: int) -> int:
    """A folder of torch.distributed.checkpoint, in which each tensor is whole on one of eight ranks."""
    import torch

    with Distributed(path, 8) as saved:
        for at, name in enumerate(_names(count)):
            saved.add(name, {at % 8: torch.full((2,), float(at))})
    return (path / ".metadata").stat().st_size


def _beside(path: Path, body: bytes) -> int:
    """A zip of one tensor beside what the opcodes `body` push; the size of the pickle."""
    from builders import Tensor, assemble, push, tensor_ops, torch_zip

    weight = tensor_ops(Tensor("0", (2,), 2, location="cuda:0"))
    head = assemble(("PROTO", 2), "EMPTY_DICT", "MARK", *push("module.weight"), *weight, *push("more"))
    pickle = head + body + assemble("SETITEMS", "STOP")
    path.write_bytes(torch_zip(pickle, [bytes(8)]))
    return len(pickle)


def strings(path: Path, count: int) -> int:
    from builders import assemble, push

    return _beside(path, b"](" + b"".join(assemble(*push(f"{at:0100}")) for at in range(count)) + b"e")


def globals_(path: Path, count: int) -> int:
    return _beside(path, b"](" + b"".join(b"cmodule_%d\nname\n" % at for at in range(count)) + b"e")


def nesting(path: Path, count: int) -> int:
    return _beside(path, b"]" * count + b"a" * (count - 1))


def opcodes(path: Path, count: int) -> int:
    """The smallest that make something: lists and numbers, each put into the memo."""
    return _beside(path, b"](" + b"]\x94K\x01\x94" * count + b"e")


SHAPES: dict[str, Callable[[Path, int], int]] = {
    "tensors": tensors, "records": records, "dicts": dicts, "frames": frames, "legacy": legacy,
    "safetensors": safetensors, "dcp": dcp,
}  # fmt: skip
ODD: dict[str, Callable[[Path, int], int]] = {
    "strings": strings, "globals": globals_, "nesting": nesting, "opcodes": opcodes,
}  # fmt: skip
"""What only those commands meet that read files of strangers: `READERS`."""

MILLION = 1_000_000
OF_A_MILLION = ("inspect", "strip-module", "to-cpu")
"""What is run on a million tensors too: growth stays linear beyond what any model has."""

READERS = ("inspect", "doctor", "doctor --fast", "sanitize", "repair")

FOLDER_TENSORS = 20_000
OF_FOLDERS = ("inspect", "doctor", "convert --to zip")
"""How many tensors a folder has at most, as each is an archive of its own, and what is run on it."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A command at one size: its exit status, seconds of CPU, and bytes of memory beyond those at its start."""

    status: int
    seconds: float
    memory: int


def forked(work: Callable[[], int]) -> Measured:
    """Run `work`, which returns an exit status, in a fork of this process. What it prints is thrown away."""
    child = os.fork()
    if not child:
        code = 70
        with contextlib.suppress(BaseException):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            code = work()
        os._exit(code)
    _, status, usage = os.wait4(child, 0)
    return Measured(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, usage.ru_maxrss * RSS_UNIT)


def command(arguments: Sequence[str]) -> int:
    from ckptfix.cli import commands

    code = commands.main(list(arguments), standalone_mode=False)
    return int(code)


def measured(arguments: Sequence[str], out: Path) -> Measured:
    idle = forked(lambda: 0)
    done = forked(lambda: command(arguments))
    removed(out)
    return Measured(done.status, max(done.seconds - idle.seconds, 0.001), max(done.memory - idle.memory, 0))


@dataclass(frozen=True, slots=True)
class Row:
    """How a command grew: exponent of its CPU time, and bytes of memory for a byte of the pickle or header."""

    shape: str
    verb: str
    seconds: float
    exponent: float
    memory: int
    multiple: float

    @property
    def good(self) -> bool:
        most = MULTIPLE_OF_OPCODES if self.shape == "opcodes" else MULTIPLE
        return self.exponent <= EXPONENT and (self.multiple <= most or self.verb not in READERS)

    @property
    def cells(self) -> tuple[str, ...]:
        figures = f"{self.seconds:.2f} s", f"{self.exponent:.2f}", f"{self.memory / 1e6:.0f}", f"{self.multiple:.1f}"
        return self.shape, self.verb, *figures, "" if self.good else "above"


COLUMNS = ("many", "command", "CPU", "exponent", "MB", "x pickle", "")


def ready(folder: Path) -> None:
    """Import what the commands need, by running each on a small file in this process."""
    _tagged()
    path, out, like, more = folder / "warm.pth", folder / "warm-out", folder / "warm.json", folder / "more.pth"
    tensors(path, 20)
    _beside(more, b"N")
    like.write_text(json.dumps({"a": [2]}))
    places = {IN: str(path), OUT: str(out), LIKE: str(like), MORE: str(more)}
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        for arguments in COMMANDS.values():
            command([places.get(word, word) for word in arguments])
            removed(out)
    gc.collect()
    gc.freeze()


def build(shape: str, path: Path, count: int, sizes: Path) -> int:
    sizes.write_text(str({**SHAPES, **ODD}[shape](path, count)))
    return 0


def rows(folder: Path, most: int, shapes: Iterable[str], verbs: Iterable[str]) -> Iterator[Row]:
    """Each command on each shape; without those that refuse it."""
    ready(folder)
    like = folder / "like.json"
    for shape in shapes:
        made = {}
        largest = min(most, FOLDER_TENSORS) if shape == "dcp" else most
        suffix = {"safetensors": ".safetensors", "dcp": ""}.get(shape, ".pth")
        for count in (largest // TIMES, largest):
            path = folder / f"{shape}-{count}{suffix}"
            # In a process of its own: what torch leaves behind would be in every measurement.
            sizes = path.with_suffix(".size")
            if forked(partial(build, shape, path, count, sizes)).status:
                raise SystemExit(f"{path} could not be made")
            made[count] = path, int(sizes.read_text())
        of_folders = [verb for verb in OF_FOLDERS if verb in verbs]
        for verb in READERS if shape in ODD else of_folders if shape == "dcp" else verbs:
            tries: list[Row] = []
            while not tries or (tries[-1].exponent > EXPONENT and len(tries) < TRIES):
                results = []
                for count, (path, _) in made.items():
                    out = folder / "out"
                    like.write_text(json.dumps({f"trunk.{n // 10}.piece_{n % 10}.weight": [2] for n in range(count)}))
                    places = {IN: str(path), OUT: str(out), LIKE: str(like), MORE: str(folder / "more.pth")}
                    results.append(measured([places.get(word, word) for word in COMMANDS[verb]], out))
                    if results[-1].status not in (0, 1, 3):
                        print(f"  {shape}, {verb}: exit status {results[-1].status}", file=sys.stderr)
                        break
                if len(results) < len(made) or results[-1].status not in (0, 1, 3):
                    break
                small, large = results
                exponent = math.log(large.seconds / small.seconds, TIMES)
                tries.append(Row(shape, verb, large.seconds, exponent, large.memory, large.memory / made[largest][1]))
            if tries:
                yield min(tries, key=lambda row: row.exponent)
        for path, _ in made.values():
            removed(path)


def table(folder: Path, most: int, shapes: Iterable[str], verbs: Iterable[str]) -> bool:
    """Print a row for each command and shape; whether all are within their limits."""
    print(f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}", sep="\n", flush=True)
    good = True
    for row in rows(folder, most, shapes, verbs):
        print(f"| {' | '.join(row.cells)} |", flush=True)
        good = good and row.good
    return good


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/benchmarks/growth.py", description=__doc__)
    parser.add_argument("--most", type=int, default=MOST, help="the larger of the two sizes (100,000)")
    parser.add_argument("--million", action="store_true", help=f"a million tensors alone: {', '.join(OF_A_MILLION)}")
    parser.add_argument("--shape", action="append", choices=[*SHAPES, *ODD])
    parser.add_argument("--verb", action="append", choices=COMMANDS)
    parser.add_argument("--dir", type=Path, default=ROOT / ".bench")
    chosen = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    folder = chosen.dir.resolve() / "growth"
    folder.mkdir(parents=True, exist_ok=True)
    shapes, verbs = chosen.shape or [*SHAPES, *ODD], chosen.verb or COMMANDS
    everything = not (chosen.shape or chosen.verb or chosen.million)
    try:
        good = chosen.million or table(folder, chosen.most, shapes, verbs)
        if chosen.million or everything:
            good = table(folder, MILLION, ("tensors",), OF_A_MILLION) and good
        return 0 if good else 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
