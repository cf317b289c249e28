"""Names of outputs that the user did not name: after the input, beside it or in another folder."""

from __future__ import annotations

import os
from pathlib import Path

from ckptfix import formats
from ckptfix.errors import CkptfixError, StrPath, UnknownFormat, file_name
from ckptfix.findings.table import proposed, suffixed
from ckptfix.formats.base import PACKED
from ckptfix.formats.target import fitting_suffix, of_suffix
from ckptfix.io.source import found_as, is_local
from ckptfix.urls import as_path, normal


def named_beside(source: StrPath, word: str, suffix: str | None = None, *, folder: bool = False) -> str:
    """Return an unused name for an output beside `source`, in the same way as doctor proposes one.

    The model in a folder is named after the folder, and its output is beside the folder: inside it, there would be two.

    Args:
        word: what was done: ``"stripped"`` makes ``x.stripped.pth`` of ``x.pth``.
        suffix: suffix of the output; by default that of the input, or of its format if that of the input is wrong.
        folder: whether the output is a folder: ``x.hf``.
    """
    name, inner = _called(source), formats.located(file_name(source))
    is_file = found_as(inner) != "folder"
    if suffix is None and not folder and stays_folder(source, inner):
        name, folder = normal(file_name(source)), True
    if folder:
        stem = suffixed(name, "")[0] if is_file else as_path(name).name
        return proposed(str(as_path(name).with_name(f"{stem}.{word}")), "")
    if suffix is not None and not is_file:
        name = f"{normal(name)}{suffix}"
    if suffix is None and not is_file and name == file_name(source) and _becomes_file(name, word):
        name = f"{normal(name)}{DEFAULT_SUFFIX}"
    return proposed(name, word, suffix, _output_suffix(name) if suffix is None and is_file else None)


CONFIGS = ("adapter_config.json", "config.json")
"""Files without which a loader cannot use the weights beside them (peft, transformers from_pretrained)."""


def stays_folder(source: StrPath, path: StrPath) -> bool:
    """Return whether an edit of the folder `source`, whose model is the file `path`, makes a folder like it.

    It does if a loader needs a configuration beside the weights.
    """
    if os.fspath(path) == os.fspath(source) or found_as(file_name(source)) != "folder":
        return False
    return found_as(file_name(path)) == "file" and any(
        found_as(str(as_path(source, name))) == "file" for name in CONFIGS
    )


def kept_suffix(path: str, format: str | None) -> str | None:
    """Return the suffix of outputs in the format of `path`, where that of `path` belongs to another format.

    A format that is only read becomes a torch file.
    """
    if format is None:
        return None
    if formats.FORMATS[format].edits:
        return fitting_suffix(path, format)
    return None if _suits_output(suffixed(path, "")[1]) else DEFAULT_SUFFIX


DEFAULT_SUFFIX = ".pth"
"""The suffix of an output whose format nothing else determines: a torch zip."""


def _suits_output(suffix: str) -> bool:
    """Return whether a checkpoint is written under this suffix; a ``.tar`` without ``.pth`` looks like an archive."""
    return of_suffix(f"x{suffix}") is not None and suffix != ".tar"


def _output_suffix(path: str) -> str | None:
    """Return the suffix of what is made of the file at `path`; None to keep its own."""
    try:
        return kept_suffix(path, formats.detect(path).name)
    except UnknownFormat as error:
        packed = error.kind in PACKED and not _suits_output(suffixed(path, "")[1])
        return DEFAULT_SUFFIX if packed else None
    except (CkptfixError, OSError):
        return None


_ONE_FILE = ("plain", "repaired", "slim")
"""The words of commands that make one file of a folder, unless they write each of its files anew."""


def _becomes_file(path: str, word: str) -> bool:
    """Return whether the output of an edit of the folder at `path`, which `word` describes, is a file."""
    try:
        format = formats.detect(path)
    except (CkptfixError, OSError):
        return False
    return not format.edits or (word in _ONE_FILE and format.edits_each_file is None)


def last_suffix(path: str, target: str) -> str:
    """Return the suffix of what a chain of commands makes of `path`, whose last output is called `target`.

    Where `target` has the suffix of no format, what follows its last dot may be only a word, such as ``stripped``: then
    the suffix is that of `path`.
    """
    return suffixed(target if of_suffix(target) else path, "fixed")[1]


def name_kept(source: StrPath, word: str, suffix: str | None = None, *, folder: bool = False) -> str:
    """Return the name of an output in another folder: that of `source`, with the suffix that the operation implies.

    Args:
        word, suffix, folder: as for `named_beside`.
    """
    name, inner = os.path.normpath(as_path(Path.cwd(), _called(source))), formats.located(file_name(source))
    if suffix is None and not folder and stays_folder(source, inner):
        return as_path(os.path.normpath(as_path(Path.cwd(), normal(file_name(source))))).name
    is_folder = found_as(inner) == "folder"
    # Thousands of inputs are named before the first is opened, so a suffix that fits an output is kept without a look.
    keeps = is_folder or _suits_output(suffixed(name, "")[1])
    stem, own = suffixed(name, word, None if keeps else _output_suffix(name))
    if folder:
        return as_path(name).name if is_folder else stem
    if is_folder and suffix is None and not _suits_output(own) and _becomes_file(name, word):
        return f"{as_path(name).name}{DEFAULT_SUFFIX}"
    return f"{stem}{own if suffix is None else suffix}"


def _called(source: StrPath) -> str:
    """Return the name of `source`; for a folder that holds one model or several checkpoints, add their suffix."""
    name = file_name(source)
    path = formats.located(name)
    if path != name:
        return f"{normal(name)}{as_path(path).suffix}"
    if found_as(name) != "folder" or not is_local(name) or formats.is_folder_checkpoint(name):
        return name
    from ckptfix.formats.foreign.archives import checkpoints_in

    suffixes = {as_path(inner).suffix for inner in checkpoints_in(name)}
    return f"{normal(name)}{suffixes.pop()}" if len(suffixes) == 1 else name
