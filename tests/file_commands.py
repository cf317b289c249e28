"""Every command that works on files, each in a form that ends well; none of them needs torch."""

from __future__ import annotations

import json
from pathlib import Path

from builders import Tensor, assemble, push, safetensors, state_dict_ops, torch_zip, written

COMMANDS = {
    "fix": ["fix", "{torch}", "{out}.pth"],
    "strip-module": ["strip-module", "{torch}", "{out}.pth"],
    "add-module": ["add-module", "{torch}", "{out}.pth"],
    "unwrap": ["unwrap", "{torch}", "{out}.pth"],
    "rename": ["rename", "{torch}", "{out}.pth", "--sub", "w=v"],
    "select": ["select", "{torch}", "{out}.pth", "--keep", "*"],
    "merge": ["merge", "{torch}", "{safetensors}", "-o", "{out}.pth"],
    "set-metadata": ["set-metadata", "{safetensors}", "{out}.safetensors", "--set", "a=b"],
    "cast": ["cast", "{torch}", "{out}.pth", "--to", "bfloat16"],
    "average": ["average", "{torch}", "{torch}", "-o", "{out}.pth"],
    "match": ["match", "{torch}", "{out}.pth", "--like", "{torch}"],
    "to-cpu": ["to-cpu", "{torch}", "{out}.pth"],
    "undo": ["undo", "{torch}"],
    "map-location": ["map-location", "{torch}", "{out}.pth", "cuda:1"],
    "convert": ["convert", "{torch}", "{out}.safetensors"],
    "convert back": ["convert", "{safetensors}", "{out}.pth"],
    "convert to legacy": ["convert", "{torch}", "{out}.pth", "--to", "legacy"],
    "sanitize": ["sanitize", "{torch}", "{out}.pth"],
    "sanitize for old versions": ["sanitize", "{torch}", "{out}.pth", "--torch", "1.5"],
    "repair": ["repair", "{torch}", "{out}.pth"],
    "repair safetensors": ["repair", "{safetensors}", "{out}.safetensors"],
    "slim": ["slim", "{torch}", "{out}.pth"],
    "slim safetensors": ["slim", "{safetensors}", "{out}.safetensors"],
    "ls": ["ls", "{torch}", "{safetensors}"],
    "inspect": ["inspect", "{torch}"],
    "inspect in full": ["inspect", "{torch}", "--tensors", "--json"],
    "inspect safetensors": ["inspect", "{safetensors}"],
    "browse": ["browse", "--help"],
    "digest": ["digest", "{torch}"],
    "stats": ["stats", "{torch}", "{safetensors}"],
    "diff": ["diff", "{torch}", "{safetensors}"],
    "doctor": ["doctor", "{torch}"],
    "doctor with a target": ["doctor", "{torch}", "--like", "{torch}"],
    "git": ["git", "textconv", "{torch}"],
    "git and its configuration": ["git", "enable", "--global", "--dry-run"],
    "fleet": ["fleet", "status", "{plan}"],
    "fleet run": ["fleet", "run", "{plan}", "--dry-run"],
    "extract": ["extract", "{torch}", "{out}.pth"],
    "completion": ["completion", "bash"],
    "help": ["help", "recipes"],
    "the overview": ["--help"],
    "an error": ["inspect", "{out}"],
}
"""Name -> arguments; the first word of the name is the command where it is one."""

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
    return [argument.format(**values) for argument in COMMANDS[name]]
