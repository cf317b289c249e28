"""The one table of command lines that tests run.

`COMMANDS` has every command in a form that ends well on a good file and needs no torch; what a command writes is in
`ckptfix.command_table`, here is what it needs for that. `FORMS` has forms of commands for files of all kinds.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from enum import Flag, auto
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
    "lora": ["lora", "--help"],
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


IN, OUT, OTHER = "{in}", "{out}", "{other}"


class Use(Flag):
    """Which tests run a command line on files of all kinds, whatever comes of it."""

    ANY = auto()  # on damaged, hostile and odd files, as recorded answers, and on failing machines
    RECORDED = auto()  # as recorded answers alone
    MACHINE = auto()  # on pipes, devices, links and folders alone
    WRITES = auto()  # on full and failing disks alone
    WEIGHTS = auto()  # under the weight audit
    WEIGHTS_AT = auto()  # the same, at every state dict
    WEIGHTS_LIKE = auto()  # the same, beside a file of the keys that the model should have
    KEYS = auto()  # on keys that are easily taken for each other
    SHARED = auto()  # on objects that are shared and nested deeply


ANY, RECORDED, MACHINE, WRITES, WEIGHTS, WEIGHTS_AT, WEIGHTS_LIKE, KEYS, SHARED = Use


class Form(NamedTuple):
    """A form of a command, for files of all kinds.

    Attributes:
        line: the command line, with fields for its files; `{other}` is a good file.
        uses: the tests that run it.
        part: it takes a part of the file, by its definition or by request; the rest is to be listed.
        arrays: numpy arrays may become tensors.
        ties: what a torch file keeps of ties: ``"storages"``, or ``"places"`` where a storage may be cut in parts.
    """

    line: str
    uses: Use
    part: bool = False
    arrays: bool = False
    ties: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(shlex.split(self.line))


FORMS = {
    "inspect": Form("inspect {in}", ANY | SHARED),
    "inspect --tree": Form("inspect {in} --tree", ANY | SHARED),
    "inspect --json": Form("inspect {in} --json", ANY),
    "inspect --tensors": Form("inspect {in} --tensors --sort size --filter *.weight --limit 3", ANY | SHARED),
    "inspect --html": Form("inspect {in} --html {out} --force --values", ANY),
    "doctor": Form("doctor {in}", ANY | SHARED),
    "doctor --html": Form("doctor {in} --html {out} --force", ANY),
    "doctor --fast": Form("doctor {in} --fast --json", ANY | SHARED),
    "doctor --like": Form("doctor {in} --like {other}", ANY),
    "doctor --error": Form("""doctor {in} --error 'Error(s) in loading state_dict: Missing key(s) "w"'""", ANY),
    "diff": Form("diff {in} {in}", ANY | SHARED),
    "diff other": Form("diff {in} {other} --rtol 1e-3 --json", ANY),
    "diff --html": Form("diff {in} {other} --html {out} --force", ANY),
    "git textconv": Form("git textconv {in}", ANY),
    "diff --keys-only": Form("diff {other} {in} --keys-only --strip module", ANY),
    "diff --quick": Form("diff {in} {in} --quick", ANY),
    "digest": Form("digest {in}", ANY),
    "digest --check": Form("digest {in} --check {other} --json", ANY),
    "digest as original": Form("digest {other} --check {in}", ANY),
    "digest --files": Form("digest --files {in} --hub", ANY),
    "stats": Form("stats {in} --by-layer", ANY),
    "stats --csv": Form("stats {in} --csv --depth 1 --filter *w* --allow-unmatched", ANY),
    "strip-module": Form("strip-module {in} {out}", ANY | WEIGHTS | SHARED, ties="storages"),
    "strip-module --partial": Form("strip-module {in} {out} --partial --all-levels --dry-run", ANY),
    "add-module": Form("add-module {in} {out}", ANY | WEIGHTS | KEYS | SHARED, ties="storages"),
    "unwrap": Form("unwrap {in} {out}", ANY | WEIGHTS | SHARED, ties="storages"),
    "rename": Form(r"rename {in} {out} --sub w=v --sub '^module\.=' --allow-unmatched", ANY | SHARED),
    "match": Form("match {in} {out} --like {other} --partial --report", ANY),
    "match --by": Form("match {in} {out} --like {other} --by position --reshape --accept-ambiguous", ANY),
    "match as target": Form("match {other} {out} --like {in} --partial --accept-ambiguous", ANY),
    "to-cpu": Form("to-cpu {in} {out}", ANY | WEIGHTS | KEYS | SHARED, ties="storages"),
    "map-location": Form("map-location {in} {out} cpu=cuda:0 cuda:0=cuda:1", ANY | SHARED),
    "convert zip": Form("convert {in} {out} --to zip", ANY | WEIGHTS | KEYS | SHARED, ties="storages"),
    "convert legacy": Form("convert {in} {out} --to legacy --drop-unsupported", ANY | SHARED),
    "convert safetensors": Form(
        "convert {in} {out} --to safetensors --drop-unsupported", ANY | WEIGHTS | KEYS | SHARED, part=True
    ),
    "extract": Form("extract {in} {out} --to zip --drop-unsupported", ANY | SHARED),
    "extract legacy": Form("extract {in} {out} --to legacy --drop-unsupported", ANY),
    "extract safetensors": Form(
        "extract {in} {out} --to safetensors --drop-unsupported", ANY | WEIGHTS | KEYS, part=True
    ),
    "extract --ema": Form("extract {in} {out} --to zip --ema", ANY | WEIGHTS | SHARED, part=True),
    "sanitize": Form("sanitize {in} {out}", ANY | WEIGHTS | SHARED, arrays=True),
    "sanitize --torch": Form("sanitize {in} {out} --torch 1.5", ANY | WEIGHTS | SHARED, arrays=True),
    "sanitize --torch 1.13": Form("sanitize {in} {out} --torch 1.13 --encoding latin-1", ANY),
    "sanitize --keep-only": Form("sanitize {in} {out} --keep-only weights", ANY | WEIGHTS, part=True, arrays=True),
    "repair": Form("repair {in} {out}", ANY | WEIGHTS | KEYS | SHARED, ties="places"),
    "repair --check-only": Form("repair {in} --check-only --json", ANY | SHARED),
    "repair --fill": Form("repair {in} {out} --fill zeros", ANY),
    "repair --fill nan": Form("repair {in} {out} --fill nan --dry-run", ANY),
    "repair --fill-from": Form("repair {in} {out} --fill-from {other}", ANY),
    "repair from it": Form("repair {other} {out} --fill-from {in}", ANY),
    "repair --like": Form("repair {in} {out} --like {other}", ANY),
    "cast": Form("cast {in} {out} --to bfloat16", ANY),
    "cast fp8": Form("cast {in} {out} --to e4m3 --only * --on-overflow error", ANY),
    "average": Form("average {in} {in} -o {out}", ANY),
    "average others": Form("average {other} {in} -o {out} --ema 0.5", ANY),
    "select": Form("select {in} {out} --drop *w --drop *.1.* --allow-unmatched", ANY),
    "merge": Form("merge {in} {other} -o {out} --to zip", ANY),
    "set-metadata": Form("set-metadata {in} {out} --set a=b", ANY),
    "slim": Form("slim {in} {out}", ANY | WEIGHTS | KEYS | SHARED, ties="places"),
    "slim --dedupe": Form("slim {in} {out} --dedupe --contiguous --no-optimizer", ANY | SHARED),
    "slim --check-only": Form("slim {in} {out} --check-only", ANY),
    "strip-module -i": Form("strip-module {in} -i", RECORDED | MACHINE),
    "unwrap -i": Form("unwrap {in} -i", RECORDED),
    "to-cpu -i": Form("to-cpu {in} -i", RECORDED),
    "convert dcp": Form("convert {in} {out} --to dcp --drop-unsupported", RECORDED),
    "convert hf": Form("convert {in} {out} --to hf --shard-size 24 --drop-unsupported", RECORDED),
    "ls": Form("ls {in} {other} --json", RECORDED),
    "rename into other files": Form(
        "rename {in} {out} --sub a=zz --sub layers=blocks --sub epoch=e --allow-unmatched", RECORDED
    ),
    "select some": Form("select {in} {out} --keep *a* --allow-unmatched", RECORDED),
    "cast some": Form("cast {in} {out} --to float16 --only *a* --allow-unmatched", RECORDED),
    "convert legacy, all of it": Form("convert {in} {out} --to legacy", WEIGHTS | KEYS, ties="storages"),
    "convert safetensors, all of it": Form("convert {in} {out} --to safetensors", WEIGHTS, part=True),
    "convert safetensors --at": Form(
        "convert {in} {out} --to safetensors --drop-unsupported --at {at}", WEIGHTS_AT, part=True
    ),
    "convert dcp, all of it": Form("convert {in} {out} --to dcp", WRITES | KEYS),
    "convert hf, all of it": Form("convert {in} {out} --to hf", WRITES),
    "convert hf, in one file": Form("convert {in} {out} --to hf --drop-unsupported", KEYS),
    "extract, all of it": Form("extract {in} {out} --to zip", WEIGHTS | KEYS, part=True),
    "extract legacy, all of it": Form("extract {in} {out} --to legacy", WEIGHTS, part=True),
    "extract --at": Form("extract {in} {out} --to zip --at {at}", WEIGHTS_AT, part=True),
    "extract safetensors --at": Form(
        "extract {in} {out} --to safetensors --drop-unsupported --at {at}", WEIGHTS_AT, part=True
    ),
    "extract in its own format": Form("extract {in} {out}", SHARED),
    "extract from deep inside": Form("extract {in} {out} --at hyper/1/1/1", SHARED),
    "map-location of all": Form("map-location {in} {out} cuda:7", WEIGHTS, ties="storages"),
    "match itself": Form("match {in} {out} --like {in}", WEIGHTS | SHARED, ties="storages"),
    "match the truth": Form("match {in} {out} --like {truth}", WEIGHTS_LIKE, ties="storages"),
    "match --rules": Form("match {other} {out} --like {in} --rules {out}.rules", MACHINE),
    "rename weights": Form("rename {in} {out} --sub weight$=weight_", WEIGHTS, ties="storages"),
    "rename one": Form("rename {in} {out} --sub w=W", KEYS),
    "rename all": Form(r"rename {in} {out} --sub '(.*)=x.\1'", KEYS),
    "rename --map": Form("rename {in} {out} --map {in}", MACHINE),
    "select one": Form("select {in} {out} --keep w", KEYS),
    "select others": Form("select {in} {out} --drop w", KEYS),
    "select none": Form("select {in} {out} --drop *", KEYS),
    "cast to more": Form("cast {in} {out} --to float64", KEYS),
    "slim --no-optimizer": Form("slim {in} {out} --no-optimizer", WEIGHTS | KEYS, part=True),
    "slim copies": Form("slim {in} {out} --dedupe", WEIGHTS),
    "slim --contiguous": Form("slim {in} {out} --contiguous", WEIGHTS, ties="places"),
    "strip-module, the keys that have it": Form("strip-module {in} {out} --partial", KEYS),
    "fix": Form("fix {in} {out}", WRITES | MACHINE),
    "ls of one": Form("ls {in}", MACHINE),
    "undo": Form("undo {in}", MACHINE),
    "undo --list": Form("undo {in} --list", MACHINE),
    "fleet status": Form("fleet status {in}", MACHINE),
    "fleet run": Form("fleet run {in}", MACHINE),
    "no command": Form("{in}", MACHINE),
}  # fmt: skip
"""Name -> form. Recorded answers are kept by the name."""

NOT_AUDITED = {
    "average": "it computes values, from several inputs",
    "cast": "it computes values",
    "fix": "it runs the others",
    "merge": "it has several inputs",
    "select": "it drops what it is asked to; tests/property/test_odd_keys.py judges it",
    "set-metadata": "it is for safetensors alone",
}
"""Commands that write and that no test runs under the weight audit -> why."""


def forms(use: Use) -> dict[str, Form]:
    """Return the forms that a test runs; a command that writes ``IN OUT`` and has no form is under all that may be."""
    found = {name: form for name, form in FORMS.items() if use & form.uses}
    have = {form.words[0] for form in FORMS.values()}
    for name in WRITERS if use & (ANY | WEIGHTS) else ():
        if name not in have:
            options = (word.format(torch=OTHER) for word in line_of(name).options)
            found[name] = Form(shlex.join((name, IN, OUT, *options)), ANY | WEIGHTS, ties="storages")
    return found


def lines(use: Use) -> dict[str, tuple[str, ...]]:
    """Return the command lines that a test runs, by name."""
    return {name: form.words for name, form in forms(use).items()}
