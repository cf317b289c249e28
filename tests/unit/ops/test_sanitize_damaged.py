"""sanitize of archives that lack the bytes of a storage: done with losses, each named."""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptfix

W = torch.arange(6.0)


def without_record(path: Path, key: str) -> None:
    """Take the record of a storage out of an archive."""
    with zipfile.ZipFile(path) as archive:
        rows = [(row, archive.read(row)) for row in archive.infolist() if not row.filename.endswith(f"/data/{key}")]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for row, data in rows:
            archive.writestr(row.filename, data)


GONE: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "weights alone are kept": ({"a.weight": W, "b.weight": -W, "epoch": 3}, {"keep_only": "weights"}, {"a.weight"}),
    "nothing changes": ({"a.weight": W, "b.weight": -W}, {}, {"a.weight"}),
    "a class goes": ({"a.weight": W, "b.weight": -W, "args": argparse.Namespace(a=1)}, {}, {"a.weight"}),
    "an older torch": ({"a.weight": W, "b.weight": -W}, {"torch": "1.5"}, {"a.weight"}),
    "every tensor of it": ({"a.weight": W, "b.weight": W, "n": 3}, {"keep_only": "weights"}, {"a.weight", "b.weight"}),
    "a storage by itself": ({"a": W.untyped_storage(), "b": -W, "args": argparse.Namespace(a=1)}, {}, {"a"}),
}


@pytest.mark.parametrize("name", GONE)
def test_tensors_whose_storage_is_gone_are_named_and_the_rest_is_written(tmp_path: Path, name: str) -> None:
    """The output has what the input had, whether or not other values change: done with losses, each named."""
    value, options, lost = GONE[name]
    source, out = tmp_path / "a.pth", tmp_path / "o.pth"
    torch.save(value, source)
    whole = {entry.name for entry in ckptfix.inspect(source).entries}
    without_record(source, "0")
    done = ckptfix.sanitize(source, out, **options)
    assert done.exit_code == 3 and done.written
    named = {row.where for row in done.findings if row.id == "unloadable"}
    assert named == lost
    assert {entry.name for entry in ckptfix.inspect(out).entries} == whole - lost
