"""What an output is called that was not named: after its input, beside it or in another folder."""

from __future__ import annotations

import os
from pathlib import Path

from ckptfix import formats
from ckptfix.errors import StrPath, file_name
from ckptfix.findings.table import proposed, suffixed
from ckptfix.formats.target import of_suffix
from ckptfix.io.source import found_as
from ckptfix.urls import as_path, normal


def named_beside(source: StrPath, word: str, suffix: str | None = None, *, folder: bool = False) -> str:
    """The name of an output that was not named, beside `source`, as doctor proposes it; nothing has it.

    The model among the files of a folder is named after the folder, and stands beside that: in it, there would be two.

    Args:
        word: what is done: ``"stripped"`` makes ``x.stripped.pth`` of ``x.pth``.
        suffix: of the output; that of the input by default.
        folder: it is to be a folder: ``x.hf``.
    """
    name = _called(source)
    is_file = found_as(formats.located(file_name(source))) != "folder"
    if folder:
        stem = as_path(name).with_suffix("") if is_file else as_path(name)
        return proposed(f"{stem}.{word}", "")
    if suffix is not None and not is_file:
        name = f"{normal(name)}{suffix}"
    return proposed(name, word, suffix)


def last_suffix(path: str, target: str) -> str:
    """Return the suffix of what a chain of commands makes of `path`, whose last output is called `target`.

    Where `target` has the suffix of no format, what follows its last dot may be only a word, such as ``stripped``: then
    the suffix is that of `path`.
    """
    return suffixed(target if of_suffix(target) else path, "fixed")[1]


def name_kept(source: StrPath, word: str, suffix: str | None = None, *, folder: bool = False) -> str:
    """The name of an output in another folder: that of `source`, with the suffix that goes with what is done.

    Args:
        word, suffix, folder: as for `named_beside`.
    """
    name = os.path.normpath(as_path(Path.cwd(), _called(source)))
    is_folder = found_as(formats.located(file_name(source))) == "folder"
    stem, own = suffixed(name, word)
    if is_folder:
        stem, own = f"{stem}{own}", ""
        if word == "fixed" and not formats.detect(source).edits:
            own = ".pth"  # what is only read becomes one file
    return stem if folder else f"{stem}{own if suffix is None else suffix}"


def _called(source: StrPath) -> str:
    """What `source` is called; a folder that stands for the model in it has the suffix of that."""
    name = file_name(source)
    path = formats.located(name)
    return name if path == name else f"{normal(name)}{as_path(path).suffix}"
