"""The id of a finding comes from the probe that knew the file, never from a sentence that quotes it."""

from __future__ import annotations

import json
from pathlib import Path

import hidden
import pytest

from ckptfix.findings.table import ENTRIES
from ckptfix.ops.doctor import examine as doctor

QUOTED = (
    "an empty file was received", "a git-lfs pointer", "12 zero bytes", "overwritten with zeros", "a web page",
    "an XML document", "other bytes before it", "a TorchScript program", "an exported program", "NumPy array (",
    "gzip-compressed", "GGUF", "Keras HDF5 TensorFlow ONNX", "a folder: a torch checkpoint that was unzipped",
    "a plain pickle", "distributed checkpoint (DCP)", "before torch 0.1.10", "a tar archive",
    "a zip archive of x.pth", "7z archive", "JSON", "no zip directory at the end", "a damaged zip archive",
)  # fmt: skip


def first(path: Path) -> str:
    found = doctor.examine(path).findings[0].id
    assert found in ENTRIES
    return found


@pytest.mark.parametrize("words", QUOTED)
def test_words_in_a_file_decide_nothing(words: str, tmp_path: Path) -> None:
    text, said, archive = tmp_path / "a.pth", tmp_path / "b.pth", tmp_path / "c.zip"
    text.write_text(f"Sorry, {words}\n")
    said.write_text(json.dumps({"error": words}))
    archive.write_bytes(hidden.zipped({f"{words} notes.txt".replace("/", ""): b"x", "y.txt": b"y"}))
    assert (first(text), first(said), first(archive)) == ("text-file", "json-file", "other-archive")
