"""Items that are like one that was read before: what is said of them is what reading them alone says."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from ckptfix.checkpoint import ByteRange
from ckptfix.errors import CkptfixError
from ckptfix.formats.dcp.items import TensorItem, tensor_item
from ckptfix.formats.dcp.molds import Molds


def archive(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def said(path: Path, offset: int, length: int, molds: Molds) -> TensorItem | str:
    where = ByteRange(str(path), offset, length)
    try:
        return tensor_item(where, "weight", "float32", (50, 60), molds)
    except CkptfixError as error:
        return str(error)


@pytest.fixture
def items(tmp_path: Path) -> tuple[Path, int]:
    """Two items of one shape, one behind the other, and the length of one."""
    first, second = (archive(torch.randn(50, 60)) for _ in range(2))
    assert len(first) == len(second)
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(first + second)
    return path, len(first)


def test_the_second_is_known(items: tuple[Path, int], monkeypatch: pytest.MonkeyPatch) -> None:
    path, length = items
    molds = Molds()
    alone = [said(path, offset, length, Molds()) for offset in (0, length)]
    assert said(path, 0, length, molds) == alone[0]
    monkeypatch.setattr("ckptfix.formats.dcp.items._understood", None)  # it is not called again
    second = said(path, length, length, molds)
    assert isinstance(second, TensorItem) and second == alone[1]
    assert second.check is not None and isinstance(second.data, ByteRange)
    raw = path.read_bytes()
    assert len(torch.frombuffer(bytearray(raw[second.data.offset : second.data.end]), dtype=torch.float32)) == 3000


def test_of_another_value_type_nothing_is_known(items: tuple[Path, int]) -> None:
    path, length = items
    molds = Molds()
    said(path, 0, length, molds)
    where = ByteRange(str(path), length, length)
    with pytest.raises(CkptfixError, match="the metadata says int32"):
        tensor_item(where, "weight", "int32", (50, 60), molds)


@pytest.mark.slow
def test_whatever_byte_is_another(items: tuple[Path, int]) -> None:
    """A byte around the elements is changed: what is said, the error too, is what is said of the item alone."""
    path, length = items
    whole = bytearray(path.read_bytes())
    molds = Molds()
    first = said(path, 0, length, molds)
    assert isinstance(first, TensorItem) and isinstance(first.data, ByteRange)
    elements = range(length + first.data.offset, length + first.data.end)
    changed = [at for at in range(length, 2 * length) if at not in elements][::5]
    differ = 0
    with path.open("r+b", buffering=0) as file:
        for at in changed:
            file.seek(at)
            file.write(bytes([whole[at] ^ 0x55]))
            found = said(path, length, length, molds)
            assert found == said(path, length, length, Molds()), hex(at - length)
            differ += isinstance(found, str)
            file.seek(at)
            file.write(whole[at : at + 1])
    assert differ > 20
