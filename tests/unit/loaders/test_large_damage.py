"""Checksums of large storages are summed in parts, by several threads: damage in any part is found before a change."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptfix
from ckptfix.errors import DamagedFile
from ckptfix.io.threads import TASK


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, TASK - 1, TASK, TASK + 4096], ids=["first", "end of a part", "next part", "later"])
@pytest.mark.parametrize("assign", [False, True])
def test_a_flipped_bit_anywhere_is_found_before_the_model_changes(tmp_path: Path, at: int, assign: bool) -> None:
    count = (TASK + 8192) // 4
    model = nn.ParameterDict({"a": torch.ones(3), "b": torch.ones(count), "c": torch.ones(5)})
    saved = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    path = tmp_path / "x.pth"
    torch.save(saved, path)
    assert ckptfix.load_into(nn.ParameterDict({k: v.clone() for k, v in model.items()}), path, assign=assign).complete
    with zipfile.ZipFile(path) as archive, open(path, "r+b") as file:
        header = next(info.header_offset for info in archive.infolist() if info.file_size == 4 * count)
        file.seek(header + 26)
        name, extra = (int.from_bytes(file.read(2), "little") for _ in range(2))
        file.seek(header + 30 + name + extra + at)
        file.write(b"\x01")
    with pytest.raises(DamagedFile, match="its checksum is") as caught:
        ckptfix.load_into(model, path, assign=assign)
    assert caught.value.where == "b"
    assert all(bool((value == 1).all()) for value in model.values())
    assert ckptfix.load_into(model, path, assign=assign, verify=False).complete
