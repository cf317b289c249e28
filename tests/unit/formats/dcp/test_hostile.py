"""Metadata that is damaged or hostile: refused by name, nothing run, nothing opened outside of the folder."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from watch import watched

import ckptfix
from ckptfix.errors import CkptfixError, DamagedFile, Unsupported
from ckptfix.formats import open_checkpoint
from ckptfix.formats.dcp.ranks import together

Copied = Callable[[str], Path]
Change = Callable[[Any], object]


def metadata_of(folder: Path) -> Metadata:
    found: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return found


def changed(folder: Path, change: Change) -> Path:
    """The folder with other metadata."""
    metadata = metadata_of(folder)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def tensor(shape: tuple[int, ...], *chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> TensorStorageMetadata:
    boxes = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
    return TensorStorageMetadata(TensorProperties(), torch.Size(shape), boxes)


def storage(name: str, metadata: Metadata) -> tuple[MetadataIndex, _StorageInfo]:
    """The first entry of a key."""
    return next((index, info) for index, info in metadata.storage_data.items() if index.fqn == name)


def put(name: str, value: object) -> Change:
    return lambda metadata: metadata.state_dict_metadata.update({name: value})


def path_of(name: str, *path: object) -> Change:
    return lambda metadata: metadata.planner_data.update({name: path})


def place(name: str, **fields: object) -> Change:
    return lambda metadata: storage(name, metadata)[1].__dict__.update(fields)


def without(name: str) -> Change:
    return lambda metadata: metadata.storage_data.pop(storage(name, metadata)[0])


def overlap(metadata: Metadata) -> None:
    info = metadata.storage_data[MetadataIndex(BLOCK, (0, 3))]
    metadata.storage_data[MetadataIndex(BLOCK, (0, 2))] = info
    metadata.state_dict_metadata[BLOCK] = tensor((4, 6), ((0, 0), (4, 3)), ((0, 2), (4, 3)))


BLOCK = "blocks.weight"

HOSTILE: list[tuple[str, Change, str]] = [
    ("too few", put(BLOCK, tensor((7, 6), ((0, 0), (4, 3)), ((4, 0), (3, 3)), ((0, 3), (4, 3)))), "chunks have 33"),
    ("a box outside", put(BLOCK, tensor((3, 7), ((0, 0), (4, 3)), ((4, 0), (3, 3)))), "reaches outside"),
    ("an overlap", lambda metadata: overlap(metadata), "chunks hold"),
    ("another shape", put("plain.weight", tensor((3, 5), ((0, 0), (3, 5)))), "metadata says"),
    ("another rank", put("plain.weight", tensor((15,), ((0,), (15,)))), "lists no item"),
    ("too large", put("plain.weight", tensor((1 << 62, 8), ((0, 0), (1 << 62, 8)))), "is over the limit"),
    ("many bytes", put("plain.weight", tensor((1 << 40, 3), ((0, 0), (1 << 40, 3)))), "needs"),
    ("no item", without("plain.weight"), "lists no item"),
    ("out by dots", place("plain.weight", relative_path="../x"), "leads out of its folder"),
    ("out by a root", place("plain.weight", relative_path="/etc/passwd"), "leads out of its folder"),
    ("a NUL", place("plain.weight", relative_path="a\0b"), "leads out of its folder"),
    ("no such file", place("plain.weight", relative_path="other"), "missing"),
    ("itself", place("plain.weight", relative_path=".metadata", offset=0, length=64), "neither a torch archive"),
    ("behind the end", place("plain.weight", offset=1 << 50), "it should have"),
    ("a negative offset", place("plain.weight", offset=-1), "which is out of range"),
    ("overflow", place("plain.weight", offset=1 << 63, length=1 << 63), "which is out of range"),
    ("another item", place("plain.weight", offset=0, length=100), "no zip directory"),
    ("an extension", place("plain.weight", transform_descriptors=["stream.zstd"]), r"stream\.zstd"),
    ("two at a place", path_of("plain.weight", "blocks.weight"), "two values at the same path"),
    ("below a tensor", path_of("plain.weight", "blocks.weight", "x"), "two values at the same path"),
    ("a long list", path_of("plain.weight", "list", 1 << 40), "names item"),
    ("a negative place", path_of("plain.weight", "list", -1), "an invalid path"),
    ("a long path", path_of("plain.weight", *["a"] * 100_000), "an invalid path"),
    ("a key that is a list", path_of("plain.weight", ["a"]), "an invalid path"),
    ("a value for a tensor", put("plain.weight", BytesStorageMetadata()), "lists no item"),
    ("no metadata", lambda metadata: metadata.__dict__.pop("state_dict_metadata"), "no state_dict_metadata"),
    ("a list of places", lambda metadata: metadata.__dict__.update(storage_data=[1]), "not a mapping"),
    ("keys of bytes", lambda metadata: metadata.state_dict_metadata.update({b"x": 1}), "not a name"),
]


@pytest.mark.sampled(1_000)
@pytest.mark.parametrize(("change", "words"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_hostile_metadata_is_refused(copied: Copied, tmp_path: Path, change: Change, words: str) -> None:
    folder = changed(copied("mesh"), change)
    with pytest.raises(CkptfixError, match=words) as raised:
        ckptfix.convert(folder, tmp_path / "out.pth")
    assert raised.value.path and not (tmp_path / "out.pth").exists()
    ckptfix.doctor(folder)


ONE_ITEM = (
    *("out by dots", "out by a root", "a NUL", "no such file", "itself", "behind the end", "a negative offset"),
    *("overflow", "another item", "a negative place", "a long path", "a key that is a list", "too large", "no item"),
)
"""Rows in which one entry of one key is wrong."""


@pytest.mark.parametrize("name", ["plain.weight", "epoch"])
@pytest.mark.parametrize(
    "fields",
    [
        {"relative_path": "/etc/passwd"}, {"relative_path": "/dev/zero"}, {"relative_path": "../up"},
        {"relative_path": 5}, {"offset": -1}, {"length": -1}, {"offset": 1 << 62}, {"offset": 1 << 63}, {"offset": "0"},
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_place_costs_one_key(copied: Copied, tmp_path: Path, name: str, fields: dict[str, object]) -> None:
    folder = changed(copied("fsdp" if name == "epoch" else "mesh"), place(name, **fields))
    check_one_lost(folder, tmp_path)


@pytest.mark.parametrize("change", [pytest.param(row[1], id=row[0]) for row in HOSTILE if row[0] in ONE_ITEM])
def test_what_is_wrong_with_one_item_costs_one_key(copied: Copied, tmp_path: Path, change: Change) -> None:
    check_one_lost(changed(copied("mesh"), change), tmp_path)


def check_one_lost(folder: Path, tmp_path: Path) -> None:
    """doctor prints a repair, and it does what it says: all but one key are kept, nothing else is opened."""
    diagnosis = ckptfix.doctor(folder)
    assert any("ckptfix repair" in (finding.fix or "") for finding in diagnosis.findings), diagnosis
    with watched("open") as opened:
        result = ckptfix.repair(folder, tmp_path / "out.pth")
    assert result.exit_code == 3 and len(result.losses) == 1 and result.kept
    assert "etc" not in "".join(str(name) for _, (name, *_) in opened if isinstance(name, str) and "passwd" in name)
    assert ckptfix.doctor(tmp_path / "out.pth").exit_code() == 0
    torch.load(tmp_path / "out.pth", weights_only=True)


class Bomb:
    def __reduce__(self) -> Any:
        return print, ("run",)


def test_a_class_that_would_run_code_is_inert(copied: Copied, tmp_path: Path) -> None:
    folder = changed(copied("mesh"), lambda metadata: metadata.__dict__.update(extra=Bomb(), planner_data=None))
    assert ckptfix.convert(folder, tmp_path / "out.pth").tensors == 6


RUNS = ("exec", "compile", "os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen", "socket.connect")


def test_nothing_is_run_and_nothing_else_is_opened(copied: Copied, tmp_path: Path) -> None:
    folder = copied("fsdp")
    ckptfix.convert(folder, tmp_path / "warm.pth")  # imports what it needs
    folder = changed(copied("odd"), lambda metadata: metadata.__dict__.update(extra=Bomb()))
    with watched("open", "import", "pickle.find_class", *RUNS) as seen:
        ckptfix.convert(folder, tmp_path / "out.pth")
    assert {event for event, _ in seen} == {"open"}
    opened = [arguments[0] for _, arguments in seen if isinstance(arguments[0], str)]
    assert opened and {Path(name).parent for name in opened if name != str(tmp_path)} <= {folder, tmp_path}


@pytest.fixture(scope="module")
def mutable(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import shutil

    folder = tmp_path_factory.mktemp("mutants") / "odd"
    shutil.copytree(saved / "odd", folder)
    return folder


@given(data=st.data())
def test_mutants_give_our_errors_alone(mutable: Path, saved: Path, data: st.DataObject) -> None:
    whole = (saved / "odd" / ".metadata").read_bytes()
    mutant = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        mutant[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del mutant[data.draw(st.integers(0, len(mutant) - 1)) :]
    (mutable / ".metadata").write_bytes(mutant)
    out = mutable.with_name("out.pth")
    with contextlib.suppress(CkptfixError):
        ckptfix.convert(mutable, out, dry_run=True)
    with contextlib.suppress(CkptfixError):
        ckptfix.doctor(mutable)


@given(data=st.data())
def test_mutants_of_items_give_our_errors_alone(mutable: Path, saved: Path, data: st.DataObject) -> None:
    (mutable / ".metadata").write_bytes((saved / "odd" / ".metadata").read_bytes())
    whole = (saved / "odd" / "__0_0.distcp").read_bytes()
    mutant = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        mutant[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    (mutable / "__0_0.distcp").write_bytes(mutant)
    with contextlib.suppress(CkptfixError):
        ckptfix.convert(mutable, mutable.with_name("out.pth"), force=True)
    (mutable / "__0_0.distcp").write_bytes(whole)


def test_other_pickles_are_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    others: list[object] = [{}, [1], "text", {"state_dict_metadata": {}}]
    for value in others:
        (tmp_path / "in" / ".metadata").write_bytes(pickle.dumps(value))
        with pytest.raises(DamagedFile, match="no state_dict_metadata"):
            open_checkpoint(tmp_path / "in")


def test_older_and_other_classes_are_understood(copied: Copied, tmp_path: Path) -> None:
    """torch 2.1 has other modules for the same classes, OLMo-core a ``_StorageInfo`` of its own."""
    folder = copied("mesh")
    wanted = ckptfix.convert(folder, tmp_path / "one.pth").plan
    data = (folder / ".metadata").read_bytes()
    assert b"\x8c&torch.distributed.checkpoint.filesystem" in data.replace(b"\x8c'", b"\x8c&")
    metadata = metadata_of(folder)
    del metadata.storage_meta, metadata.version
    raw = pickle.dumps(metadata, protocol=2)
    raw = raw.replace(b"ctorch.distributed.checkpoint.filesystem\n", b"colmo_core.distributed.checkpoint.filesystem\n")
    other = b"ctorch.distributed._shard.sharded_tensor.metadata\nTensorProperties"
    raw = raw.replace(b"ctorch.distributed.checkpoint.metadata\nTensorProperties", other)
    assert other in raw and b"olmo_core" in raw
    (folder / ".metadata").write_bytes(raw)
    assert ckptfix.convert(folder, tmp_path / "two.pth").plan.nbytes == wanted.nbytes
    assert (tmp_path / "one.pth").read_bytes() == (tmp_path / "two.pth").read_bytes()


def test_an_extension_is_refused_whatever_it_is_of(copied: Copied) -> None:
    folder = changed(copied("fsdp"), place("epoch", transform_descriptors=["stream.zstd"]))
    with pytest.raises(Unsupported, match=r"epoch.*stream\.zstd"):
        open_checkpoint(folder)


@pytest.mark.parametrize(("files", "message"), [
    (("__0.metadata", "__1.metadata"), "none of the ranks' metadata can be read"),
    (("__0.metadata",), "not a pickle"),
    (("__9999999.metadata",), "no job has that many ranks"),
])  # fmt: skip
def test_metadata_of_ranks_of_which_none_can_be_read(files: tuple[str, ...], message: str, tmp_path: Path) -> None:
    def read(name: str) -> Any:
        raise DamagedFile("not a pickle", path=name)

    for name in files:
        (tmp_path / name).write_bytes(b"no pickle")
    with pytest.raises(DamagedFile) as caught:
        together(str(tmp_path), read)
    assert message in caught.value.message
