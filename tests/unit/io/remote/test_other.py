"""Stores whose files are complete when they are closed or committed: an output is whole, or nothing has its name."""

from __future__ import annotations

import errno
import gc
import io
from collections.abc import Iterator
from typing import Any

import pytest

from ckptfix.checkpoint import OutputFile, Plan
from ckptfix.checkpoint.byte_ranges import Derived
from ckptfix.errors import WouldOverwrite, WriteFailed
from ckptfix.io.folders import write_folder
from ckptfix.io.remote import clients, multipart
from ckptfix.io.write import write_plan

spec: Any = pytest.importorskip("fsspec.spec")

STORE: dict[str, bytes] = {}


class _File(spec.AbstractBufferedFile):  # type: ignore[misc]
    """Keeps its blocks to itself until it is closed, as a blob of Azure does; it knows no transaction."""

    def _initiate_upload(self) -> None:
        self.blocks: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.blocks.append(self.buffer.getvalue())
        if final:
            STORE[self.path] = b"".join(self.blocks)
        return True


class _Committed(_File):
    """Gets its name when it is committed, as an object of Google does."""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.blocks.append(self.buffer.getvalue())
        return True

    def commit(self) -> None:
        STORE[self.path] = b"".join(self.blocks)

    def discard(self) -> None:
        self.blocks.clear()


class _Named(io.BytesIO):
    """Has its name as soon as it is opened, as a file of Hadoop does; it knows no commit."""

    def __init__(self, system: Any, path: str, mode: str, block_size: int) -> None:
        super().__init__(STORE[path] if mode == "rb" else b"")
        self.path = path
        STORE.setdefault(path, b"")
        if mode == "wb":
            STORE[path] = b""

    def close(self) -> None:
        if not self.closed:
            STORE[self.path] = self.getvalue()
        super().close()


class _System(spec.AbstractFileSystem):  # type: ignore[misc]
    protocol = "dbfs"
    cachable = False
    files: type[_File | _Named] = _File

    def _open(self, path: str, mode: str = "rb", **more: Any) -> _File | _Named:
        assert more["autocommit"] is False or mode == "rb"
        return self.files(self, path, mode, block_size=1 << 20)

    def info(self, path: str, **more: Any) -> dict[str, Any]:
        if path not in STORE:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(STORE[path]), "type": "file", "etag": str(hash(STORE[path]))}

    def find(self, path: str, *args: Any, **more: Any) -> dict[str, Any]:
        return {name: self.info(name) for name in STORE if name.startswith(f"{path}/")}

    def rm_file(self, path: str) -> None:
        del STORE[path]

    def mv(self, path1: str, path2: str, **more: Any) -> None:
        STORE[path2] = STORE.pop(path1)


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    STORE.clear()
    one = _System()
    monkeypatch.setattr("ckptfix.io.remote.fsspec_store.file_system", lambda name: (one, name.partition("://")[2]))
    monkeypatch.setitem(clients.CLIENTS, "hdfs", clients.CLIENTS["dbfs"])  # without the package that it needs
    return STORE


def _broken() -> Iterator[bytes]:
    yield bytes(3 << 20)
    raise OSError(errno.EIO, "broken")


BROKEN = (Derived(4 << 20, _broken),)


def test_a_folder_is_whole_or_absent(store: dict[str, bytes]) -> None:
    files = [OutputFile.of(f"dbfs://b/out/part{number}", [bytes([number]) * 100]) for number in range(3)]
    bad = OutputFile("dbfs://b/out/bad", BROKEN, 4 << 20)
    with pytest.raises(OSError, match="broken"):
        write_folder(Plan((*files, bad, OutputFile.of("dbfs://b/out/index", [b"index"]))), "dbfs://b/out")
    assert store == {}
    write_folder(Plan((*files, OutputFile.of("dbfs://b/out/index", [b"index"]))), "dbfs://b/out")
    assert list(store) == ["b/out/part0", "b/out/part1", "b/out/part2", "b/out/index"]
    assert store["b/out/part2"] == b"\2" * 100


def test_what_is_replaced_stays_when_that_fails(store: dict[str, bytes]) -> None:
    store["b/one"] = b"old"
    plan = Plan((OutputFile("dbfs://b/one", BROKEN, 4 << 20),))
    with pytest.raises(WouldOverwrite):
        write_plan(plan)
    with pytest.raises(OSError, match="broken"):
        write_plan(plan, overwrite=True)
    assert store == {"b/one": b"old"}


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), ConnectionError("broken"), TimeoutError("broken")])
@pytest.mark.parametrize("at", ["write", "close", "commit"])
def test_a_store_that_fails_while_it_is_written_to_is_one_error(
    store: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, error: OSError, at: str
) -> None:
    def fail(*args: Any, **more: Any) -> None:
        raise error

    if at == "commit":
        monkeypatch.setattr(_System, "files", _Committed)
    monkeypatch.setattr(_File if at != "commit" else _Committed, at, fail)
    with pytest.raises(WriteFailed, match="broken") as raised:
        write_plan(Plan((OutputFile.of("dbfs://b/one", [b"data"]),)))
    assert raised.value.path == "dbfs://b/one"
    assert store == {}


def test_a_file_that_has_its_name_when_it_is_opened_is_renamed(
    store: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_System, "files", _Named)
    whole, broken = OutputFile.of("hdfs://b/one", [b"data"]), OutputFile("hdfs://b/one", BROKEN, 4 << 20)
    with pytest.raises(OSError, match="broken"):
        write_plan(Plan((broken,)))
    assert store == {}
    write_plan(Plan((whole,)))
    assert store == {"b/one": b"data"}
    with pytest.raises(OSError, match="broken"):
        write_plan(Plan((broken,)), overwrite=True)
    assert store == {"b/one": b"data"}
    write_plan(Plan((OutputFile.of("hdfs://b/one", [b"new"]),)), overwrite=True)
    assert store == {"b/one": b"new"}

    def late(self: Any, path: str, **more: Any) -> bool:
        return bool(store.setdefault(path, b"theirs")) if any(name.endswith("-tmp") for name in store) else False

    del store["b/one"]
    monkeypatch.setattr(_System, "exists", late)
    with pytest.raises(WouldOverwrite, match="appeared"):
        write_plan(Plan((whole,)))
    assert store == {"b/one": b"theirs"}


@pytest.mark.parametrize("times", [2, 99])
def test_what_a_store_is_asked_before_is_asked_again(
    store: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    monkeypatch.setattr("ckptfix.io.remote.store.FIRST_WAIT", 0.001)
    left = [times]

    def exists(self: Any, path: str, **more: Any) -> bool:
        left[0] -= 1
        if left[0] >= 0:
            raise ConnectionError("broken")
        return path in store

    monkeypatch.setattr(_System, "exists", exists)
    plan = Plan((OutputFile.of("dbfs://b/one", [b"data"]),))
    if times > 2:
        with pytest.raises(WriteFailed, match="6 tries"):
            write_plan(plan)
    else:
        write_plan(plan)
    assert store == ({} if times > 2 else {"b/one": b"data"})


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "step"), [(_File, "close"), (_Committed, "commit")])
def test_a_name_that_cannot_be_given_takes_the_others_back(
    store: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, kind: type[_File], step: str
) -> None:
    given = getattr(kind, step)

    def give(self: Any) -> None:
        if self.path.endswith("part1"):
            raise FileExistsError(self.path)
        given(self)

    monkeypatch.setattr(_System, "files", kind)
    monkeypatch.setattr(kind, step, give)
    files = [OutputFile.of(f"dbfs://b/out/part{number}", [b"data"]) for number in range(3)]
    with pytest.raises(WouldOverwrite, match="appeared"):
        write_folder(Plan(tuple(files)), "dbfs://b/out")
    monkeypatch.undo()
    gc.collect()
    assert store == {}


@pytest.mark.parametrize("kind", [_File, _Committed])
def test_a_stream_is_computed_once(
    store: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, kind: type[_File]
) -> None:
    monkeypatch.setattr(_System, "files", kind)
    monkeypatch.setattr(multipart, "PART", 1000)
    runs = []

    def chunks() -> Iterator[bytes]:
        runs.append(0)
        for number in range(40):
            yield bytes([number]) * 333

    write_plan(Plan((OutputFile("dbfs://b/one", (b"head", Derived(40 * 333, chunks)), 4 + 40 * 333),)))
    assert runs == [0] and store == {"b/one": b"head" + b"".join(bytes([number]) * 333 for number in range(40))}
