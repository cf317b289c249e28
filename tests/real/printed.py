"""Commands as doctor prints them, run as printed: where a file is, and what is left to find in the output.

A case is a file or folder, with or without a model and a pasted message. `KINDS` has the places that it is read from,
`faults` runs what doctor prints about it there. Nothing of a hostile file is run: the commands do not, and of the lines
in Python only ckptfix's own loaders are tried, which read pickles as text.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cli.conftest import shell_words
from click.testing import CliRunner
from stores import Bucket, WebServer
from torch import nn

import ckptfix
from ckptfix.cli import commands
from ckptfix.errors import CkptfixError, Refused
from ckptfix.findings.steps import shell_line

LINE = re.compile(r"\s*(Fix|Or|Then|Try): (.*)")
COMMAND = re.compile(r"`(ckptfix [^`]*)`")
PYTHON = re.compile(r"(ckptfix\.load_\w+\((?:[^()'\"]|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")*\))")
MOST = 1 << 24
"""The most elements of a model that is made; hostile files promise more than memory has."""
PLACEHOLDER = re.compile(r"\b(FILE|OUT|TARGET|MODEL|BASE|FOLDER|ADAPTER|[A-Z]+_[A-Z]+)\b")


class Case(NamedTuple):
    """Something that doctor is asked about.

    Attributes:
        path: a file or a folder.
        message: the error message that was pasted.
        like: the model that the thread has; None for one made of the file's own state dict.
    """

    path: Path
    message: str = ""
    like: Path | None = None


class Placed(NamedTuple):
    """A case in one of the places of `KINDS`.

    Attributes:
        name: its name on a command line.
        data: what standard input has.
    """

    name: str
    data: bytes | None = None


class Places(NamedTuple):
    """The places of one test: a folder, which is the current one, and servers where the kind needs one."""

    folder: Path
    bucket: Bucket | None = None
    web: WebServer | None = None


def _copied(path: Path, folder: Path) -> Path:
    """The file in a folder of its own; with what lies beside it, where it is only a part."""
    if path.is_dir():
        return Path(shutil.copytree(path, folder / path.name, copy_function=shutil.copyfile))
    if path.suffix == ".distcp":
        return _copied(path.parent, folder) / path.name
    return Path(shutil.copyfile(path, folder / path.name))


def _file(path: Path, at: Places) -> Placed:
    return Placed(str(_copied(path, at.folder).relative_to(at.folder)))


def _folder(path: Path, at: Places) -> Placed:
    if path.is_dir():
        return Placed(_copied(path, at.folder).name)
    inner = at.folder / "run"
    inner.mkdir()
    return Placed(str(_copied(path, inner).relative_to(at.folder).parent))


def _s3(path: Path, at: Places) -> Placed:
    assert at.bucket is not None
    top = path.parent if path.suffix == ".distcp" else path
    if top.is_dir():
        for file in top.rglob("*"):
            if file.is_file():
                at.bucket.put(f"runs/{top.name}/{file.relative_to(top)}", file.read_bytes())
        inner = "" if top is path else f"/{path.name}"
        return Placed(at.bucket.url(f"runs/{top.name}{inner}"))
    return Placed(at.bucket.put(f"runs/{path.name}", path.read_bytes()))


def _web(path: Path, at: Places) -> Placed | None:
    assert at.web is not None
    if path.is_dir() or path.suffix == ".distcp":
        return None  # a web server lists no folder
    return Placed(at.web.put(path.name, path.read_bytes()))


def _stdin(path: Path, at: Places) -> Placed | None:
    return None if path.is_dir() or path.suffix == ".distcp" else Placed("-", path.read_bytes())


KINDS: dict[str, Callable[[Path, Places], Placed | None]] = {
    "file": _file, "folder": _folder, "s3": _s3, "https": _web, "stdin": _stdin
}  # fmt: skip
"""Kind of source -> the function that places a case there; None where the kind has no such thing."""


def run(words: Sequence[str], data: bytes | None = None) -> tuple[int, str, str]:
    """The exit code of ``ckptfix WORDS``, its standard output and its standard error."""
    done = CliRunner().invoke(commands, list(words), input=data)
    assert done.exception is None or isinstance(done.exception, SystemExit), f"{words}: {done.exception!r}"
    return done.exit_code, done.stdout, done.stderr


class Model(nn.Module):
    """A module with the keys and shapes of a state dict."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        super().__init__()
        for name, value in state.items():
            *path, last = name.split(".")
            inner: nn.Module = self
            for part in path:
                if part not in inner._modules:
                    inner.add_module(part, Model({}))
                inner = inner._modules[part]  # type: ignore[assignment]
            tensor = torch.zeros_like(value)
            if tensor.is_floating_point() and not last.startswith("running_"):
                inner.register_parameter(last, nn.Parameter(tensor))
            else:
                inner.register_buffer(last, tensor)


def models(case: Case, folder: Path) -> Iterator[Path]:
    """The models that a case is compared with, as files: its own one, and that without its last tensor."""
    if case.like is not None:
        yield case.like
        return
    try:
        loaded = {name: value for name, value in ckptfix.load_state_dict(case.path).items() if name != "n_averaged"}
        if sum(value.numel() for value in loaded.values()) > MOST:
            return
        state = {name: value.clone() for name, value in loaded.items()}
    except (CkptfixError, RuntimeError, NotImplementedError):  # torch itself clones no such tensor
        return
    own = folder / "model-own.pt"
    try:
        torch.save(state, own)
    except (RuntimeError, NotImplementedError):
        return
    yield own
    if len(state) > 2:
        less = folder / "model-less.pt"
        torch.save(dict(list(state.items())[:-1]), less)
        yield less


class Report(NamedTuple):
    """What doctor says of a source: the findings that are more than notes, all of the JSON, and the text."""

    ids: frozenset[str]
    rows: list[dict[str, Any]]
    document: dict[str, Any]
    text: str = ""


def found_in(name: str, options: Sequence[str], data: bytes | None = None) -> Report:
    """The report without its text, for which doctor runs once more."""
    lines = run(["doctor", name, *options, "--json"], data)[1].splitlines()
    document = json.loads(lines[0]) if len(lines) == 1 else {}  # a folder of several has one for each
    rows = [row for row in document.get("findings", ()) if row["severity"] != "info"]
    return Report(frozenset(row["id"] for row in rows), rows, document)


def look(name: str, options: Sequence[str], data: bytes | None = None) -> Report:
    text = run(["doctor", name, *options], data)[1]
    return found_in(name, options, data)._replace(text=text)


class Commands(NamedTuple):
    """Command lines that are run one after the other.

    Attributes:
        lines: as they are printed.
        fixed: ids of the findings that they fix.
        whole: they are to leave nothing new to fix; other commands are steps of those.
    """

    lines: tuple[str, ...]
    fixed: frozenset[str]
    whole: bool = False


def commands_in(report: Report) -> list[Commands]:
    """The commands of a report, each list once: what is printed, and what the JSON has for each finding."""
    # Where a message is explained, the command is about the message: warnings about other things stay.
    told = bool((report.document.get("load_error") or {}).get("explained"))
    every = frozenset(row["id"] for row in report.rows if row["fixes"] and not (told and row["severity"] == "warning"))
    found: list[Commands] = []
    for label, line in (row.groups() for row in map(LINE.fullmatch, report.text.splitlines()) if row):
        if label == "Then":
            found[-1] = found[-1]._replace(lines=(*found[-1].lines, line))
        elif label == "Try":
            found += [Commands((one,), frozenset()) for one in COMMAND.findall(line) if not PLACEHOLDER.search(one)]
        elif line.startswith("ckptfix "):
            found.append(Commands((line,), every if report.rows else frozenset(), whole=bool(report.rows)))
    own: dict[tuple[str, ...], set[str]] = {}
    for row in report.rows:
        if row["fixes"]:
            own.setdefault(tuple(map(shell_line, row["fixes"])), set()).add(row["id"])
    printed = {one.lines for one in found}
    return found + [Commands(lines, frozenset(ids)) for lines, ids in own.items() if lines not in printed]


def fault_of(one: Commands, before: Report, placed: Placed, options: Sequence[str]) -> str:
    """Run commands as printed; what is wrong with them, or with what doctor finds in the output."""
    made = ""
    for line in one.lines:
        words = shell_words(line)
        code, _, said = run(words[1:], placed.data)
        if code not in (0, 3) and not (code == 1 and "--partial" in words):  # match: not every key has a counterpart
            return f"`{line}` exits with {code}: {said.strip()[:300]}"
        if len(words) > 3 and not words[3].startswith("-"):
            made = words[3]
    if not made:
        return ""
    after = found_in(made, options)
    if not after.document:
        return f"`{' && '.join(one.lines)}` made no {made}: {run(['doctor', made, *options])[1][:300]}"
    if "--partial" in one.lines[-1]:
        return ""  # it renames what has a counterpart, and the rest is found again
    left = sorted(one.fixed & after.ids)
    new = sorted(after.ids - before.ids if one.whole else ())
    return f"`{' && '.join(one.lines)}`: doctor finds {left or new} in the output" if left or new else ""


def _remove(one: Commands, bucket: Bucket | None) -> None:
    for name in (words[3] for words in map(shell_words, one.lines) if len(words) > 3 and words[3][0] != "-"):
        if bucket is not None and name.startswith(bucket.url("")):
            for key in bucket.below(name.removeprefix(bucket.url(""))):
                bucket.client.delete_object(Bucket=bucket.name, Key=key)
        elif Path(name).is_dir():
            shutil.rmtree(name)
        else:
            Path(name).unlink(missing_ok=True)


def python_faults(text: str, like: Path) -> Iterator[str]:
    """Run the lines of Python in a report, with a model of the keys of `like`, and an optimizer of its parameters.

    The optimizer is not the one that the file was saved from, and may be refused for that.
    """
    lines = [line for row in map(LINE.fullmatch, text.splitlines()) if row for line in PYTHON.findall(row[2])]
    for line in lines:
        model = Model(torch.load(like, weights_only=True))
        optimizer = torch.optim.Adam([*model.parameters(), nn.Parameter(torch.zeros(1))])
        try:
            eval(line, {"ckptfix": ckptfix, "model": model, "optimizer": optimizer})
        except Refused as refused:
            if "load_optimizer" not in line:
                yield f"`{line}` raises {refused}"
        except CkptfixError as error:
            yield f"`{line}` raises {error}"


def faults(case: Case, kind: str, at: Places) -> Iterator[str]:
    """What is wrong with what doctor prints about a case, without and with the models."""
    placed = KINDS[kind](case.path, at)
    if placed is None:
        return
    error = ["--error", case.message] if case.message else []
    likes = [*models(case, at.folder)]
    for like in (None, *likes):
        options = [] if like is None else ["--like", like.name if like.parent == at.folder else str(like)]
        asked = " ".join(word[:60] for word in ("doctor", placed.name, *options, *error))
        before = look(placed.name, [*options, *error], placed.data)
        if error:  # beside a message that is solved, the other findings are notes
            before = before._replace(ids=before.ids | found_in(placed.name, options, placed.data).ids)
        for one in commands_in(before):
            if fault := fault_of(one, before, placed, options):
                yield f"{asked}: {fault}"
            _remove(one, at.bucket)
        if likes and placed.data is None:
            yield from (f"{asked}: {fault}" for fault in python_faults(before.text, like or likes[0]))
