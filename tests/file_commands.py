"""The one table of command lines: every command, in a form that ends well and needs no torch.

What a command writes, and whether it has ``--in-place``, is in `ckptfix.command_table`; here is what it needs for that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from builders import Tensor, assemble, push, safetensors, state_dict_ops, torch_zip, written

from ckptfix.command_table import COMMANDS as ROWS


class Line(NamedTuple):
    """What a command that writes is given besides its input and its output.

    Attributes:
        options: the words after IN and OUT.
        keywords: the same for its function in Python; ``"{torch}"`` is the input.
        more: further inputs, which need ``-o OUT``.
        only: the one kind of file that it is for: ``"torch"`` or ``"safetensors"``; empty for both.
        suffix: of the output.
        by_suffix: the suffix of the output says in which format it is written.
    """

    options: tuple[str, ...] = ()
    keywords: Mapping[str, Any] = MappingProxyType({})
    more: tuple[str, ...] = ()
    only: str = ""
    suffix: str = ".pth"
    by_suffix: bool = False


LINES = {
    "fix": Line(by_suffix=True),
    "rename": Line(("--sub", "w=v"), {"subs": [("w", "v")]}),
    "match": Line(("--like", "{torch}"), {"like": "{torch}"}),
    "select": Line(("--keep", "*"), {"keep": ["*"]}),
    "cast": Line(("--to", "bfloat16"), {"to": "bfloat16"}),
    "set-metadata": Line(("--set", "a=b"), {"pairs": {"a": "b"}}, only="safetensors", suffix=".safetensors"),
    "map-location": Line(("cuda:1",), {"target": "cuda:1"}),
    "merge": Line(more=("{safetensors}",), by_suffix=True),
    "average": Line(more=("{torch}",)),
    "convert": Line(suffix=".safetensors", by_suffix=True),
    "extract": Line(by_suffix=True),
    "sanitize": Line(only="torch"),
}
"""Command -> what it needs. One that takes ``IN OUT`` and nothing else has no row."""

READS = {
    "ls": ["ls", "{torch}", "{safetensors}"],
    "browse": ["browse", "--help"],
    "stats": ["stats", "{torch}", "{safetensors}"],
    "diff": ["diff", "{torch}", "{safetensors}"],
    "git": ["git", "textconv", "{torch}"],
    "fleet": ["fleet", "status", "{plan}"],
    "completion": ["completion", "bash"],
    "help": ["help", "recipes"],
}
"""Command that writes no output -> arguments. One that takes one file and nothing else has no row."""

VARIANTS = {
    "convert back": ["convert", "{safetensors}", "{out}.pth"],
    "convert to legacy": ["convert", "{torch}", "{out}.pth", "--to", "legacy"],
    "sanitize for old versions": ["sanitize", "{torch}", "{out}.pth", "--torch", "1.5"],
    "repair safetensors": ["repair", "{safetensors}", "{out}.safetensors"],
    "slim safetensors": ["slim", "{safetensors}", "{out}.safetensors"],
    "inspect in full": ["inspect", "{torch}", "--tensors", "--json"],
    "inspect safetensors": ["inspect", "{safetensors}"],
    "doctor with a target": ["doctor", "{torch}", "--like", "{torch}"],
    "git and its configuration": ["git", "enable", "--global", "--dry-run"],
    "fleet run": ["fleet", "run", "{plan}", "--dry-run"],
    "the overview": ["--help"],
    "an error": ["inspect", "{out}"],
}
"""Name -> arguments; the first word of the name is the command where it is one."""


def line_of(command: str) -> Line:
    """What a command that writes is given."""
    return LINES.get(command, Line())


def words_of(command: str) -> list[str]:
    """A command line of `command` that ends well, with fields for its files."""
    if not ROWS[command].writes:
        return READS.get(command, [command, "{torch}"])
    line = line_of(command)
    source = "{safetensors}" if line.only == "safetensors" else "{torch}"
    out = f"{{out}}{line.suffix}"
    return [command, source, *([*line.more, "-o", out] if line.more else [out]), *line.options]


COMMANDS = {**{name: words_of(name) for name in ROWS}, **VARIANTS}
"""Every command, and some in other forms: name -> arguments."""

WRITERS = tuple(name for name, row in ROWS.items() if row.writes and not line_of(name).more)
"""The commands that write one output of one input."""

EDITS = tuple(name for name in WRITERS if not line_of(name).by_suffix)
"""Those that write the format that they read."""


def in_python(command: str) -> Callable[[Any, Any], Any]:
    """The function of a command that writes, of its input and its output."""
    keywords = line_of(command).keywords

    def call(source: Any, dest: Any) -> Any:
        import ckptfix

        given = {name: source if value == "{torch}" else value for name, value in keywords.items()}
        return getattr(ckptfix, ROWS[command].function)(source, dest, **given)

    return call


CODES = {"diff": 1, "an error": 2}
"""Exit codes that are not 0."""


def small_files(folder: Path) -> tuple[str, str]:
    """A torch zip with wrapped names on a GPU, and a safetensors file."""
    model = state_dict_ops({"module.w": Tensor("0", (2,), 2, location="cuda:0")})
    pickle = assemble(("PROTO", 2), "EMPTY_DICT", "MARK", *push("model"), *model, "SETITEMS", "STOP")
    raw = bytes(8)
    return (
        str(written(folder / "in.pth", torch_zip(pickle, [raw]))),
        str(written(folder / "in.safetensors", safetensors([("w", "F32", [2], raw)]))),
    )


def job(path: str) -> bytes:
    """The plan of a fleet: one job, which looks at a file."""
    line = {"input": path, "identity": None, "output": None, "bytes": 0, "argv": ["inspect", path]}
    return json.dumps(line).encode() + b"\n"


def arguments(name: str, folder: Path) -> list[str]:
    """The command line of `name` on small files, which are written to `folder`, as its output is."""
    torch_file, safetensors_file = small_files(folder)
    values = {"torch": torch_file, "safetensors": safetensors_file, "out": str(folder / "out")}
    values["plan"] = str(written(folder / "plan.jsonl", job(torch_file)))
    return [argument.format(**values) for argument in VARIANTS.get(name) or words_of(name)]
