"""Tensors that get other values of the same size stay where they are, whatever lies between them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from builders import safetensors

import ckptfix

GAP = b"\xee" * 8
HALF = struct.pack("<4e", 1, 2, 3, 4)


def spaced(path: Path) -> Path:
    """Two tensors with a gap between them; the last one ends the file."""
    header = {
        "first": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]},
        "last": {"dtype": "F16", "shape": [4], "data_offsets": [16, 24]},
    }
    path.write_bytes(safetensors(header=header, tail=HALF + GAP + HALF))
    return path


@pytest.mark.parametrize("name", ["first", "last"])
def test_a_tensor_stays_in_its_place(tmp_path: Path, name: str) -> None:
    ckptfix.cast(spaced(tmp_path / "in.safetensors"), tmp_path / "out.safetensors", "bfloat16", only=[name])
    data = (tmp_path / "out.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    assert {key: row["data_offsets"] for key, row in header.items()} == {"first": [0, 8], "last": [16, 24]}
    other = {"first": "last", "last": "first"}[name]
    assert (header[name]["dtype"], header[other]["dtype"]) == ("BF16", "F16")
    start = header[other]["data_offsets"][0]
    assert data[8 + length + start :][:8] == HALF


def test_of_a_tensor_that_is_left_out_no_byte_stays(tmp_path: Path) -> None:
    ckptfix.select(spaced(tmp_path / "in.safetensors"), tmp_path / "out.safetensors", drop=["first"])
    data = (tmp_path / "out.safetensors").read_bytes()
    assert data.count(HALF) == 1
    ((key, row),) = json.loads(data[8 : 8 + struct.unpack_from("<Q", data)[0]]).items()
    assert (key, row["data_offsets"][1] - row["data_offsets"][0]) == ("last", 8)
