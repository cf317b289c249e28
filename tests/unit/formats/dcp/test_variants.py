"""Folders that torch writes in other ways: metadata of each rank, tensors in safetensors files, transformed items."""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import dcp_ranks
import pytest
import torch
from compare import assert_same
from safetensors.torch import save_file
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_folder
from torch.distributed.checkpoint.state_dict_saver import save
from torch_versions import ALONE

import ckptfix
from ckptfix.errors import DamagedFile, Truncated, Unsupported, WouldLoseData
from ckptfix.formats import open_checkpoint
from ckptfix.formats.dcp.images import Images
from ckptfix.ops.doctor import doctor

Copied = Callable[[str], Path]
BOTH = pytest.mark.parametrize("name", dcp_ranks.VARIANTS)


def load(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def in_order(value: Any) -> Any:
    """Mappings by their keys: each rank's plan has an order of its own."""
    if isinstance(value, list):
        return [in_order(one) for one in value]
    return {key: in_order(value[key]) for key in sorted(value)} if isinstance(value, dict) else value


@BOTH
def test_they_hold_what_the_usual_folder_holds(saved: Path, tmp_path: Path, name: str) -> None:
    done = ckptfix.convert(saved / name, tmp_path / "out.pth")
    assert (done.exit_code, done.account.lost, done.account.left) == (0, (), ())
    assert_same(in_order(load(saved / "fsdp.pt")), in_order(load(tmp_path / "out.pth")))
    assert ckptfix.diff(saved / name, saved / "fsdp").same
    assert {row.severity for row in doctor(saved / name).findings} == {"info"}


@BOTH
def test_they_become_a_folder_that_torch_reads(saved: Path, tmp_path: Path, name: str) -> None:
    done = ckptfix.convert(saved / name, tmp_path / "out", to="dcp")
    assert done.format == "dcp" and (tmp_path / "out" / ".metadata").is_file()
    assert_same(in_order(load(saved / "fsdp.pt")), in_order(dcp_ranks.merged(tmp_path / "out", tmp_path)))


@BOTH
def test_they_are_not_edited(saved: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(Unsupported, match="ckptfix reads it, but does not edit it") as raised:
        ckptfix.add_module(saved / name, tmp_path / "out")
    assert raised.value.hint is not None and "--to dcp" in raised.value.hint
    assert not (tmp_path / "out").exists()


def test_a_rank_without_metadata_is_named_with_its_rows(copied: Copied, tmp_path: Path) -> None:
    folder = copied("fsdp-ranks")
    (folder / "__1.metadata").unlink()
    (row,) = (row for row in doctor(folder).findings if row.id == "missing-rank")
    assert "__1.metadata is missing" in row.message and "model/embed.weight (no chunk holds rows 4 to 7)" in row.message
    with pytest.raises(WouldLoseData, match=r"__1\.metadata"):
        ckptfix.convert(folder, tmp_path / "out.pth")
    done = ckptfix.repair(folder, tmp_path / "out.pth")
    assert done.exit_code == 3
    lost = {loss.name for loss in done.losses}
    kept = load(tmp_path / "out.pth")["model"]
    assert "model/embed.weight" in lost and "model/norm.running_mean" not in lost
    assert "embed.weight" not in kept and "norm.running_mean" in kept


def test_metadata_of_a_rank_that_is_cut_is_named(copied: Copied) -> None:
    folder = copied("fsdp-ranks")
    path = folder / "__2.metadata"
    path.write_bytes(path.read_bytes()[:-40])
    (row,) = (row for row in doctor(folder).findings if row.id == "missing-rank")
    assert "__2.metadata cannot be read" in row.message


def test_a_rank_beyond_measure_makes_no_thousand_findings(copied: Copied) -> None:
    folder = copied("fsdp-ranks")
    (folder / "__2.metadata").rename(folder / "__60000.metadata")
    rows = [row for row in doctor(folder).findings if row.id == "missing-rank"]
    assert len(rows) < 100 and "59,933 more are missing" in rows[-1].message
    (folder / "__60000.metadata").rename(folder / "__70000.metadata")
    with pytest.raises(DamagedFile, match="no job has that many ranks"):
        open_checkpoint(folder)


def change(folder: Path, rank: int, what: Callable[[Any], object]) -> None:
    path = folder / f"__{rank}.metadata"
    metadata = pickle.loads(path.read_bytes())
    what(metadata)
    path.write_bytes(pickle.dumps(metadata))


def test_a_name_that_leads_out_of_the_folder_is_named(copied: Copied, tmp_path: Path) -> None:
    folder = copied("fsdp-ranks")

    def out(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = "../../../etc/passwd"

    change(folder, 2, out)
    (row,) = (row for row in ckptfix.doctor(folder).findings if row.severity == "error")
    assert row.id == "shard-path" and "leads out of its folder" in row.message
    with pytest.raises(WouldLoseData, match="leads out of its folder"):
        ckptfix.convert(folder, tmp_path / "out.pth")


def test_ranks_that_contradict_each_other_are_named(copied: Copied, tmp_path: Path) -> None:
    folder = copied("fsdp-ranks")

    def resized(metadata: Any) -> None:
        metadata.state_dict_metadata["model.few"].size = torch.Size((3, 3))

    change(folder, 2, resized)
    with pytest.raises(WouldLoseData, match=r"model/few.*rank 2 has float32 \[3, 3\]"):
        ckptfix.convert(folder, tmp_path / "out.pth")


def test_what_differs_among_ranks_is_named(saved: Path, tmp_path: Path) -> None:
    done = ckptfix.convert(saved / "own", tmp_path / "out.pth")
    (row,) = (row for row in done.findings if row.id == "ranks-differ")
    assert row.message.endswith("the first rank were used: own, epoch")
    made = load(tmp_path / "out.pth")
    assert set(made) == {"same", "own", "only0", "only1", "epoch"} and made["epoch"] == 0 and not made["own"].any()


@pytest.mark.parametrize("left", [20, 200, -4])
def test_a_safetensors_file_that_was_cut_is_named(copied: Copied, tmp_path: Path, left: int) -> None:
    folder = copied("fsdp-safetensors")
    path = folder / "__2_0.distcp"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises((DamagedFile, WouldLoseData), match=r"__2_0\.distcp"):
        ckptfix.convert(folder, tmp_path / "out.pth")
    assert any(row.severity == "error" for row in doctor(folder).findings)
    done = ckptfix.repair(folder, tmp_path / "out.pth")
    assert done.exit_code == 3 and done.losses


def test_a_header_that_the_file_does_not_hold_is_named(tmp_path: Path) -> None:
    path = tmp_path / "__0_0.distcp"
    save_file({"a": torch.zeros(2)}, path, metadata={"format": "pt"})
    whole = Images().at(str(path), 0)
    assert whole is not None and list(whole.tensors) == ["a"]
    length = int.from_bytes(path.read_bytes()[:8], "little")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(Truncated, match=f"the header should have {length} bytes, and 32 are left"):
        Images().at(str(path), 0)


def test_the_part_of_another_place_is_refused(copied: Copied, tmp_path: Path) -> None:
    folder = copied("fsdp-safetensors")
    said = rb'model.few\": {\"saved_offsets\": '
    for path in folder.glob("*.distcp"):
        path.write_bytes(path.read_bytes().replace(said + b"[1, 0]", said + b"[0, 1]"))
    with pytest.raises(DamagedFile, match=r"is the part at \[0, 1\], but the metadata says \[1, 0\]"):
        ckptfix.convert(folder, tmp_path / "out.pth")


class Deflated(StreamTransformExtension):
    """A transformation of items, as users register them: zlib."""

    @staticmethod
    def registry_name() -> str:
        return "tests.deflated"

    @staticmethod
    def from_descriptor(version: str) -> Deflated:
        return Deflated()

    def get_descriptor(self) -> str:
        return "tests.deflated/1"

    def transform_to(self, output: IO[bytes]) -> Any:
        return _Deflating(output)

    def transform_from(self, input: IO[bytes]) -> Any:
        return io.BytesIO(zlib.decompress(input.read()))


class _Deflating:
    def __init__(self, output: IO[bytes]) -> None:
        self._output, self._made = output, zlib.compressobj()

    def write(self, data: Any) -> int:
        self._output.write(self._made.compress(data))
        return len(data)

    def flush(self) -> None: ...

    def close(self) -> None:
        self._output.write(self._made.flush())


def test_items_that_were_transformed_are_named(tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path / "in", _extensions=[Deflated()])
    save({"weight": torch.ones(300), "epoch": 3}, storage_writer=writer, **ALONE)
    with pytest.raises(Unsupported, match=r"transformed by tests\.deflated/1"):
        ckptfix.convert(tmp_path / "in", tmp_path / "out.pth")
    for verb in (ckptfix.inspect, ckptfix.load_checkpoint):
        with pytest.raises(Unsupported, match=r"tests\.deflated/1"):
            verb(tmp_path / "in")
    assert any("tests.deflated/1" in row.message for row in doctor(tmp_path / "in").findings)
    with pytest.raises(Unsupported) as caught:
        ckptfix.repair(tmp_path / "in", tmp_path / "out.pth")
    assert "_extension_registry" in str(caught.value.hint) and not (tmp_path / "out.pth").exists()


def test_what_the_hint_says_undoes_a_transformation(tmp_path: Path) -> None:
    wanted = {"weight": torch.arange(300.0), "epoch": 3}
    save(wanted, storage_writer=FileSystemWriter(tmp_path / "in", _extensions=[Deflated()]), **ALONE)
    registry = ExtensionRegistry()
    registry.register(Deflated)
    found: dict[str, Any] = {"weight": torch.zeros(300), "epoch": 0}
    load_folder(found, storage_reader=FileSystemReader(tmp_path / "in", _extension_registry=registry), **ALONE)
    save(found, checkpoint_id=tmp_path / "again", **ALONE)
    assert_same(wanted, dict(ckptfix.load_checkpoint(tmp_path / "again")))


@pytest.mark.parametrize("order", ["little", "big"])
def test_items_that_were_compressed_are_inflated(tmp_path: Path, order: str) -> None:
    """An archive tool wrote them again: the same records, deflated; and as a big-endian machine saves them."""
    state: dict[str, Any] = {"weight": torch.randn(40, 30), "turns": torch.randn(5, dtype=torch.complex64), "epoch": 3}
    folder = tmp_path / "in"
    save(state, checkpoint_id=folder, **ALONE)
    said = pickle.loads((folder / ".metadata").read_bytes())
    (data,) = (path for path in folder.iterdir() if path.suffix == ".distcp")
    whole, made = data.read_bytes(), b""
    for index, info in said.storage_data.items():
        item = deflated(whole[info.offset : info.offset + info.length], order if index.fqn != "epoch" else "little")
        said.storage_data[index] = replace(info, offset=len(made), length=len(item))
        made += item
    data.write_bytes(made)
    (folder / ".metadata").write_bytes(pickle.dumps(said))
    for out in (tmp_path / "out.pth", tmp_path / "out.safetensors"):
        ckptfix.convert(folder, out)
        assert all(torch.equal(ckptfix.load_state_dict(out)[name], state[name]) for name in ("weight", "turns"))
    assert not [row for row in doctor(folder).findings if row.severity == "error"]
    data.write_bytes(made.replace(made[2000:2008], b"\xff" * 8))
    with pytest.raises(DamagedFile):
        ckptfix.convert(folder, tmp_path / "damaged.pth")


def deflated(item: bytes, order: str) -> bytes:
    """A torch archive with its records compressed, and its numbers in this byte order."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(item)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            content = order.encode() if name.endswith("/byteorder") else old.read(name)
            if order == "big" and name.endswith("/data/0"):
                content = b"".join(content[at : at + 4][::-1] for at in range(0, len(content), 4))
            new.writestr(name, content)
    return buffer.getvalue()
