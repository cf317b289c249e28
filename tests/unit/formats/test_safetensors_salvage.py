"""One damaged entry of a safetensors header costs one tensor, whichever byte is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders import safetensors

import ckptfix
from ckptfix.errors import DamagedFile
from ckptfix.formats.safetensors.salvage import salvaged

ROWS = [(f"layers.{index}.weight", "F32", [2, 2], bytes([index]) * 16) for index in range(6)]


@pytest.fixture
def whole() -> bytes:
    return safetensors(ROWS, metadata={"format": "pt", "note": 'a "quoted": {text}'})


def test_each_byte_of_an_entry(whole: bytes, tmp_path: Path) -> None:
    """Whatever a byte becomes, only tensors that are as before are kept, and at most two are lost."""
    first = whole.index(b'"layers.3.weight"')
    last = whole.index(b'"layers.4.weight"')
    path = tmp_path / "in.safetensors"
    before = {name: data for name, _, _, data in ROWS}
    for offset in range(first, last):
        for value in (b"{", b"\xff", b'"', b"x"):
            path.write_bytes(whole[:offset] + value + whole[offset + 1 :])
            header = salvaged(path.as_posix())
            assert header is not None, offset
            found = {row.key: path.read_bytes()[header.data_start :][row.begin : row.stop] for row in header.rows}
            assert len(found) >= 4, (offset, value)
            wrong = {name for name, data in found.items() if before.get(name, data) != data}
            assert not wrong, (offset, value)


@pytest.mark.parametrize("damage", [(b'"dtype"', b'"dty{e"'), (b"[2,2]", b"[x,2]"), (b'"layers.3', b"\x01layers.3")])
def test_repair_and_fix_keep_the_others(damage: tuple[bytes, bytes], whole: bytes, tmp_path: Path) -> None:
    at = whole.index(b'"layers.3.weight"')
    source, dest = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    source.write_bytes(whole[:at] + whole[at:].replace(*damage, 1))
    found = ckptfix.doctor(source)
    assert found.fix is not None and found.fix[1] == "repair"
    done = ckptfix.fix(source, dest)
    assert done.exit_code == 3
    assert [row.where for row in done.findings if row.id == "lost"] == ["layers.3.weight"]
    length = int.from_bytes(dest.read_bytes()[:8], "little")
    header = json.loads(dest.read_bytes()[8 : 8 + length])
    assert header.pop("__metadata__")["note"] == 'a "quoted": {text}'
    assert set(header) == {name for name, *_ in ROWS} - {"layers.3.weight"}


def test_a_wrong_length_is_refused(whole: bytes, tmp_path: Path) -> None:
    """Every place counts from the end of the header, so that nothing can be trusted then."""
    source = tmp_path / "in.safetensors"
    source.write_bytes((int.from_bytes(whole[:8], "little") - 8).to_bytes(8, "little") + whole[8:])
    with pytest.raises(DamagedFile):
        ckptfix.repair(source, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
