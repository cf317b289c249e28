"""Zips, tars and folders that are not checkpoints, identified by the names of their members."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from ckptfix.commands import command, quoted
from ckptfix.errors import CkptfixError, Truncated, printable
from ckptfix.formats.foreign.file import INSTALL, Answer, UnknownFile
from ckptfix.formats.members import (
    CHECKPOINTS,
    MEGATRON_FOLDER,
    RANKS_METADATA,
    STEP_FOLDER,
    kind_of,
)
from ckptfix.formats.signs import Beginning, is_tar_header, mapped
from ckptfix.io.source import Source, is_folder, open_source
from ckptfix.urls import as_path
from ckptfix.words import plural
from ckptfix.zips.read import END, END64, LOCATOR, MAX16, read_directory

_MAX_MEMBERS = 1000
"""The number of members of a tar, or entries of a folder, that are looked at."""

_REPACK = "zip it again so that data.pkl is in one folder: zip -0 -r FIXED.pth FOLDER"


def zip_archive(file: UnknownFile) -> Answer | None:
    """Identify a zip archive, also one with other bytes before it."""
    if not file.head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        before = 0 if is_tar_header(file.head[:512].ljust(512)) else _bytes_before_zip(file)
        if not before:
            return None
        cut = f"tail -c +{before + 1} {quoted(file.path)} > FIXED.pth"
        return Answer("junk-before", f"a zip archive with {before} other bytes before it", f"remove them: {cut}")
    try:
        with open_source(file.path) as reader:
            names = [record.name for record in read_directory(reader).records]
    except CkptfixError as error:
        torch = " that torch.save wrote" if b"/data.pkl" in file.head[:300] else ""
        id = "truncated" if isinstance(error, Truncated) else "bad-directory"
        what = f"a damaged zip archive{torch} ({error.message})"
        return Answer(id, what, error.hint or "copy or download it again")
    return _zip_of(names, file)


def _bytes_before_zip(file: UnknownFile) -> int:
    """Return how many bytes the zip directory is behind the offset in its end record; 0 if there is no directory."""
    start = max(0, file.size - END.size - MAX16)
    tail = file.read(start, file.size - start)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + END.size > len(tail):
        return 0
    size, offset = END.unpack_from(tail, at)[5:7]
    # torch always puts a zip64 end record and its locator between the directory and the end record.
    zip64 = at - END64.size - LOCATOR.size
    if zip64 >= 0 and tail.startswith(b"PK\x06\x06", zip64):
        size, offset = END64.unpack_from(tail, zip64)[8:10]
        at = zip64
    first = start + at - size
    return first - offset if first > offset and file.read(first, 4) == b"PK\x01\x02" else 0


def _zip_of(names: Sequence[str], file: UnknownFile) -> Answer:
    lasts = [name.rpartition("/")[2] for name in names]
    files = [name for name, last in zip(names, lasts, strict=True) if last]
    if not files:
        return Answer("other-archive", "a zip archive without files")
    if "constants.pkl" in lasts:
        hint = f"ckptfix extract {quoted(file.path)} OUT extracts its weights; torch.jit.load({file.name!r}) reads it"
        return Answer("torchscript", "a TorchScript program (torch.jit.save), not a state dict", hint)
    if "archive_format" in lasts:
        hint = (
            f"ckptfix extract {quoted(file.path)} OUT extracts its weights; torch.export.load({file.name!r}) reads it"
        )
        return Answer("exported-program", "an exported program (.pt2), not a state dict", hint)
    if "data.pkl" in lasts:
        mac = ", with the macOS Finder's __MACOSX files" if any(name.startswith("__MACOSX/") for name in names) else ""
        return Answer(
            "repacked-zip", f"a torch checkpoint that was unpacked and zipped again{mac}", f"unzip it, then {_REPACK}"
        )
    if "[Content_Types].xml" in files:
        return Answer("unknown-format", "an office document (Word, Excel or PowerPoint)")
    if "model.weights.h5" in lasts:
        return Answer("other-framework", "a Keras model (.keras)", INSTALL.format("hdf5"))
    if "MAR-INF/MANIFEST.json" in files:
        return Answer("other-framework", "a TorchServe archive (.mar)", f"unpack it first: unzip {quoted(file.path)}")
    if "META-INF/MANIFEST.MF" in files:
        return Answer("unknown-format", "a Java archive")
    inner = [name for name in files if name.lower().endswith(CHECKPOINTS) and not name.startswith("__MACOSX/")]
    unzip = f"unpack it first: unzip {quoted(file.path)}"
    if len(inner) > 1:
        hint = f"unpack it, and name one of its files: unzip {quoted(file.path)}"
        return Answer("other-archive", f"a zip archive of {len(inner)} checkpoints: {_listed(files)}", hint)
    return Answer("zip-in-zip" if inner else "other-archive", f"a zip archive of {_listed(files)}", unzip)


def checkpoints_in(folder: str) -> tuple[str, ...]:
    """Return the files of `folder` that have a checkpoint suffix, sorted by name."""
    files = sorted(entry.name for entry in as_path(folder).iterdir() if entry.is_file())
    return tuple(str(as_path(folder) / name) for name in files if name.endswith(CHECKPOINTS))


def _listed(names: Sequence[str]) -> str:
    """Return the first names, checkpoints before other files, and the number of the rest."""
    ordered = sorted(names, key=lambda name: not name.endswith(CHECKPOINTS))
    shown = ", ".join(printable(name) for name in ordered[:4])
    return f"{shown} and {len(ordered) - 4} more" if len(ordered) > 4 else shown


def tar_archive(file: UnknownFile) -> Answer | None:
    """Identify a tar archive; the tar that torch wrote before 0.1.10 is a format of its own."""
    if len(file.head) < 512 or not is_tar_header(file.head[:512]):
        return None
    names: list[str] = []
    with suppress(CkptfixError), open_source(file.path) as reader:
        names += [name for name, _, _ in tar_members(reader, _MAX_MEMBERS)]
    if {"sys_info", "pickle", "storages"} <= {name.removeprefix("./") for name in names}:
        what = "a torch checkpoint from before torch 0.1.10 (a tar archive), without its file 'tensors'"
        return Answer("tar-archive", what, "no version of torch loads it: look for a different copy")
    inside = {name.removeprefix("./") for name in names}
    if "model_config.yaml" in inside and any(name.startswith("model_weights/") for name in inside):
        own, folder = quoted(file.path), as_path(file.path).with_suffix("")
        unpacked = command("convert", folder / "model_weights", "OUT.safetensors")
        hint = f"unpack it: `mkdir {quoted(str(folder))} && tar -xf {own} -C {quoted(str(folder))}`, then `{unpacked}`"
        what = "an archive of NeMo with a distributed checkpoint in its folder model_weights"
        return Answer("tar-archive", what, hint)
    return Answer("tar-archive", f"a tar archive of {_listed(names)}", f"unpack it first: tar -xf {quoted(file.path)}")


def _unfinished(folder: Path, names: Collection[str]) -> str:
    """Return what is wrong with the metadata of a distributed checkpoint, as a clause for the description."""
    if ".metadata" in names:
        place = folder / ".metadata"
        if is_folder(place):
            return " whose .metadata is a folder, not a file"
        try:
            with open_source(str(place)):
                pass
        except CkptfixError as error:
            return f" whose .metadata cannot be read ({error.message.lower()})"
        return " whose .metadata is not a pickle"
    if any(re.fullmatch(r"__\d+\.metadata", name) for name in names):
        return " whose ranks' metadata is not a pickle"
    return ": it has .metadata.tmp, so the save did not finish" if ".metadata.tmp" in names else ""


def tar_members(reader: Source, most: int) -> Iterator[tuple[str, int, int]]:
    """Yield (name, offset, length) of the first members of a tar, until a block is not a header."""
    at = 0
    for _ in range(most):
        if at + 512 > reader.size or not is_tar_header(block := reader.read(at, 512)):
            return
        size = _tar_size(block[124:136])
        # Types L, K and x hold a long name or attributes of the next member.
        if block[156:157] not in b"LKxg":
            yield block[:100].partition(b"\0")[0].decode("utf-8", "replace"), at + 512, size
        at += 512 + (size + 511) // 512 * 512


def _tar_size(field: bytes) -> int:
    """Return a size in octal, or in base 256 if its first bit is set."""
    if field[0] & 0x80:
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        return 0


def _way(path: str) -> str:
    from ckptfix.formats.deepspeed import way_out

    words, is_command = way_out(path)
    return f"name one save: {words}" if is_command else words


def folder(path: str) -> Answer:
    """Identify a folder, and say which of its files to name instead."""
    try:
        entries = sorted(islice(as_path(path).iterdir(), _MAX_MEMBERS))
        inner = [entry for entry in entries if entry.is_dir()]
        nested = next((entry for entry in inner if (entry / "data.pkl").is_file()), None)
    except OSError as error:
        return Answer("no-checkpoint", f"a folder that cannot be read ({(error.strerror or str(error)).lower()})")
    names = {entry.name for entry in entries}
    if "data.pkl" in names or nested is not None:
        root = nested if nested is not None else as_path(path)
        parent, name = quoted(str(root.parent)), quoted(root.name)
        hint = f"(cd {parent} && zip -0 -r {quoted(root.name + '.pth')} {name}) makes it one file again"
        return Answer("unzipped-folder", "a folder: a torch checkpoint that was unzipped", hint)
    if ".metadata" in names or any(name.endswith(".distcp") for name in names):
        return Answer("dcp-folder", f"a folder: a distributed checkpoint (DCP){_unfinished(as_path(path), names)}")
    index = next((name for name in sorted(names) if name.endswith(".index.json")), None)
    if index is not None:
        what = f"a folder: a sharded checkpoint of another framework ({printable(index)})"
        return Answer("other-framework", what, "convert it to safetensors with its own library")
    if "_METADATA" in names or any((entry / "_METADATA").is_file() for entry in inner):
        return Answer("other-framework", "a folder: an orbax checkpoint (JAX)", INSTALL.format("orbax"))
    if _is_map(as_path(path) / "checkpoint"):
        hint = "its arrays are in the file checkpoint in it: pass that file"
        return Answer("other-framework", "a folder: an orbax checkpoint (JAX) of before 2024", hint)
    if "saved_model.pb" in names:
        hint = "pass the file variables/variables.index in it"
        return Answer("other-framework", "a folder: a TensorFlow SavedModel", hint)
    from ckptfix.formats.deepspeed import STATES, steps

    if any(name.endswith(STATES) for name in names) or steps(path):
        return Answer("deepspeed-folder", "a folder: a DeepSpeed checkpoint", _way(path))
    steps_inside = [entry for entry in inner if STEP_FOLDER.fullmatch(entry.name)]
    saves = [entry for entry in steps_inside if any(map(MEGATRON_FOLDER.fullmatch, _names(entry)))]
    if saves:
        hint = f"name the folder of one of them: {quoted(str(saves[-1]))}; {_ALL}"
        return Answer("no-checkpoint", f"a folder: a run of Megatron-LM with {plural(len(saves), 'save')}", hint)
    if RANKS_METADATA in names:
        answer = _of_rank_items(path, names)
        if answer is not None:
            return answer
    found = [name for name in sorted(names) if name.endswith(CHECKPOINTS)]
    below = [entry.name for entry in inner if any(_is_likely(name) for name in _names(entry))]
    if found:
        return _of_files(path, found, below)
    if below:
        hint = f"name one of its folders: {quoted(str(as_path(path) / below[0]))}; {_ALL}"
        return Answer("no-checkpoint", f"a folder of folders: {_listed(below)}", hint)
    return Answer("no-checkpoint", "a folder without checkpoints" if names else "an empty folder")


def _of_rank_items(path: str, names: Collection[str]) -> Answer | None:
    """Identify a checkpoint of torch_checkpointing: by its metadata or, if that cannot be read, by its usual names."""
    from ckptfix.formats.foreign.rank_items import consolidates, rank_items

    items = rank_items(path)
    if items:
        item = items[0]
        files, form = list(item.files.values()), item.format
    else:
        usual = [name for name in names if re.fullmatch(r"checkpoint_\d+\.pt", name)]
        files, form = sorted(usual, key=lambda name: (len(name), name)), "torch"
    if not files:
        return None
    what = f"a folder: a checkpoint of torch_checkpointing, with the files of {plural(len(files), 'rank')}"
    if form == "torch":
        joins = command("convert", *(as_path(path) / name for name in files), output="OUT.pth")
        return Answer("no-checkpoint", what, f"`{joins}` joins the files of ranks, if they hold DTensors")
    return Answer("no-checkpoint", f"{what}, each with slices in safetensors", consolidates(path, items[0]))


def _is_map(file: Path) -> bool:
    """Return whether a file begins like a map of MessagePack."""
    try:
        with open_source(str(file)) as reader:
            return mapped(Beginning(str(file), reader.read(0, min(reader.size, 4096)), reader.size))
    except CkptfixError:
        return False


def _of_files(path: str, files: Sequence[str], folders: Sequence[str]) -> Answer:
    """Suggest which file to name in a folder of checkpoint files without one clear model.

    Files that a trainer saves beside a model are not proposed, since they hold no weights.
    """
    names = (*files, *folders)
    named = [name for name in names if kind_of(name).role == "model"]
    likely = named or next(([*own] for kind in (files, folders) if (own := list(filter(_is_unknown, kind)))), [])
    if likely:
        word = "file" if likely[0] in files else "folder"
        hint = f"name a {word}: {quoted(str(as_path(path) / likely[0]))}; {_ALL}"
        return Answer("no-checkpoint", f"a folder; it holds {_listed(list(dict.fromkeys([*likely, *files])))}", hint)
    known = ", ".join(f"{kind_of(name).what} ({printable(name)})" for name in names[:4])
    what = f"a folder without a model; it holds {known}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
    hint = f"name a file to look at it alone: {quoted(str(as_path(path) / files[0]))}; {_ALL}"
    return Answer("no-checkpoint", what, hint)


def _is_unknown(name: str) -> bool:
    return kind_of(name).role == "other"


_ALL = "-r selects all of them (and --out-dir DIR names a folder for what a command writes)"
"""The hint for a folder that holds several checkpoints."""


def _is_likely(name: str) -> bool:
    return name.lower().endswith(CHECKPOINTS) or name == ".metadata"


def _names(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in islice(folder.iterdir(), _MAX_MEMBERS)]
    except OSError:
        return []
