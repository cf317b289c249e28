"""Files that are compressed by zstd and LZ4, which need a package of an extra."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from compare import assert_same

import ckptfix
from ckptfix.errors import DamagedFile, MissingExtra

ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
KINDS = [("zst", ZSTD, b"\x28\xb5\x2f\xfd", "zstd"), ("lz4", "lz4.frame", b"\x04\x22\x4d\x18", "lz4")]


@pytest.mark.parametrize(("suffix", "package", "magic", "extra"), KINDS)
def test_without_the_package_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, package: str, magic: bytes, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    path = tmp_path / f"a.pth.{suffix}"
    path.write_bytes(magic + bytes(99))
    with pytest.raises(MissingExtra) as caught:
        ckptfix.to_cpu(path, tmp_path / "out.pth")
    assert str(path) == caught.value.path and f"pip install 'ckptfix[{extra}]'" in str(caught.value.hint)
    (found,) = ckptfix.doctor(path).findings
    assert found.id == "compressed" and f"ckptfix[{extra}]" in str(found.fix)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("suffix", "package", "magic", "extra"), KINDS)
def test_with_the_package_it_is_read(tmp_path: Path, suffix: str, package: str, magic: bytes, extra: str) -> None:
    pytest.importorskip(package)
    state = {"module.a": torch.randn(200_000), "module.b": torch.randn(200_000)}
    torch.save(state, tmp_path / "a.pth")
    packed = import_module(package).compress((tmp_path / "a.pth").read_bytes())
    path = tmp_path / f"b.pth.{suffix}"
    path.write_bytes(packed)
    (found,) = ckptfix.doctor(path).findings
    assert found.id == "compressed" and "inside is a torch checkpoint" in found.message
    ckptfix.strip_module(path, tmp_path / "out.pth")
    assert_same(torch.load(tmp_path / "out.pth"), {key[7:]: value for key, value in state.items()})
    path.write_bytes(packed[: len(packed) * 3 // 4])
    assert ckptfix.repair(path, tmp_path / "half.pth").exit_code == 3
    path.write_bytes(packed[:12])
    with pytest.raises(DamagedFile, match="none of it can be unpacked"):
        ckptfix.repair(path, tmp_path / "none.pth")
