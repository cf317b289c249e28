"""Commands as doctor prints them, run as printed: where a file is, and what is left to find in the output.

A case is a file or folder, with or without a model and a pasted message. `KINDS` has the places that it is read from,
`faults` runs what doctor prints about it there. Nothing of a hostile file is run: the commands do not, and of the lines
in Python only ckptfix's own loaders are tried, which read pickles as text.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cli.conftest import shell_words
from click.testing import CliRunner
from stores import Bucket, WebServer
from torch import nn

import ckptfix
from ckptfix.cli import commands
from ckptfix.errors import CkptfixError

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


def _file(path: Path, at: Places) -> Placed | None:
    return Placed(_copied(path, at.folder).name) if path.suffix != ".distcp" else Placed(
        str(_copied(path, at.folder).relative_to(at.folder)))


def _folder(path: Path, at: Places) -> Placed | None:
    if path.is_dir():
        return Placed(_copied(path, at.folder).name)
    inner = at.folder / "run"
    inner.mkdir()
    return Placed(str(_copied(path, inner).relative_to(at.folder).parent))


def _s3(path: Path, at: Places) -> Placed | None:
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
        loaded = {
            name: value for name, value in ckptfix.load_state_dict(case.path).items() if isinstance(value, torch.Tensor)
        }
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


class Found(NamedTuple):
    """What doctor found: its exit code, the lines that it printed, and ids -> severity."""

    code: int
    text: str
    ids: dict[str, str]
    document: dict[str, Any]


def look(name: str, options: Sequence[str], data: bytes | None = None) -> Found:
    code, text, said = run(["doctor", name, *options], data)
    lines = run(["doctor", name, *options, "--json"], data)[1].splitlines()
    document = json.loads(lines[0]) if len(lines) == 1 else {}  # a folder of several has one for each
    if "findings" not in document:
        return Found(code, text, {}, document)
    severe: dict[str, str] = {}
    for row in document["findings"]:
        severe.setdefault(row["id"], row["severity"])
    return Found(code, text, severe, document)


def printed(text: str) -> Iterator[list[str]]:
    """The commands that a report prints: each list is run in its order."""
    several: list[str] = []
    for line in text.splitlines():
        found = LINE.fullmatch(line)
        if found is None:
            continue
        label, said = found.groups()
        if label == "Fix" and said.startswith("ckptfix "):
            several = [said]
            yield several
        elif label == "Or":
            several = [said]
            yield several
        elif label == "Then":
            several.append(said)
        elif label == "Try":
            yield from ([line] for line in COMMAND.findall(said) if not PLACEHOLDER.search(line))


def python_lines(text: str) -> list[str]:
    return [line for row in text.splitlines() if (found := LINE.fullmatch(row)) for line in PYTHON.findall(found[2])]


def faults(case: Case, kind: str, at: Places) -> Iterator[str]:
    """What is wrong with what doctor prints about a case, without and with the models."""
    placed = KINDS[kind](case.path, at)
    if placed is None:
        return
    error = ["--error", case.message] if case.message else []
    likes: list[Path | None] = [None, *models(case, at.folder)]
    for like in likes:
        options = [] if like is None else ["--like", like.name if like.parent == at.folder else str(like)]
        for fault in _of_one(placed, options, error, like or (likes[-1] if len(likes) > 1 else None), at.bucket):
            yield f"{shown(['doctor', placed.name, *options, *error])}: {fault}"


def shown(words: Sequence[str]) -> str:
    return " ".join(word if len(word) < 60 else f"{word[:57]}..." for word in words)


def _of_one(
    placed: Placed, options: list[str], error: list[str], like: Path | None, bucket: Bucket | None
) -> Iterator[str]:
    before = look(placed.name, [*options, *error], placed.data)
    fixed = {row["id"] for row in before.document.get("findings", ()) if row["fixes"] and row["severity"] != "info"}
    lines = list(printed(before.text))
    lines += [[shell(words) for words in row["fixes"]] for row in before.document.get("findings", ())
              if row["severity"] != "info" and row["fixes"]]
    told: list[list[str]] = []
    for several in lines:
        if several in told:
            continue
        told.append(several)
        made = ""
        for line in several:
            words = shell_words(line) if isinstance(line, str) else line
            code, out, said = run(words[1:], placed.data)
            writes = len(words) > 3 and not words[3].startswith("-")
            if code not in (0, 3) and not (words[1] in LOOKS and code in (0, 1)):
                yield f"`{line}` exits with {code}: {said.strip()[:400]}"
                break
            if writes:
                made = words[3]
        else:
            if made:
                after = look(made, options)
                if "findings" not in after.document:
                    yield f"`{' && '.join(several)}` left no output {made}: {after.document.get('error')}"
                    continue
                known = {id for id, severity in before.ids.items() if severity != "info"}
                worse = {id for id, severity in after.ids.items() if severity != "info"} - known
                left = fixed_by(several, before) & {id for id, severity in after.ids.items() if severity != "info"}
                if worse:
                    yield f"`{' && '.join(several)}`: doctor finds {sorted(worse)} in the output"
                if left:
                    yield f"`{' && '.join(several)}`: doctor finds {sorted(left)} again"
        for line in several:
            words = shell_words(line)
            if len(words) > 3 and not words[3].startswith("-"):
                _remove(words[3], bucket)
    if like is None:
        return
    for line in python_lines(before.text):
        model = Model(torch.load(like, weights_only=True))
        optimizer = torch.optim.Adam(model.parameters()) if list(model.parameters()) else None
        try:
            eval(line, {"ckptfix": ckptfix, "model": model, "optimizer": optimizer})
        except Exception as raised:
            yield f"`{line}` raises {type(raised).__name__}: {str(raised)[:300]}"


LOOKS = ("doctor", "inspect", "ls", "digest", "diff", "stats")


def _remove(name: str, bucket: Bucket | None) -> None:
    if bucket is not None and name.startswith(bucket.url("")):
        for key in bucket.below(name.removeprefix(bucket.url(""))):
            bucket.client.delete_object(Bucket=bucket.name, Key=key)
    elif Path(name).is_dir():
        shutil.rmtree(name)
    else:
        Path(name).unlink(missing_ok=True)


def shell(words: Sequence[str]) -> str:
    from ckptfix.findings.steps import shell_line

    return shell_line(words)


def fixed_by(several: Sequence[str], before: Found) -> set[str]:
    """The ids of the findings that these commands fix: all that have commands, or those whose own commands they are."""
    rows = [row for row in before.document["findings"] if row["severity"] != "info" and row["fixes"]]
    if several and shell_words(several[0])[1] == "fix":
        return {row["id"] for row in rows}
    own = {row["id"] for row in rows if [shell(words) for words in row["fixes"]] == list(several)}
    return own or {row["id"] for row in rows if any(words[1] in {shell_words(line)[1] for line in several}
                                                    for words in row["fixes"])}
