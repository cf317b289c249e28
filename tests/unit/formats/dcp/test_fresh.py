"""The pickle of a new `.metadata`: torch unpickles it, and the fast reader reads it."""

from __future__ import annotations

import pickle

from ckptfix.formats.dcp.fresh import BATCH, fresh
from ckptfix.formats.dcp.metadata import Path, SavedChunk, SavedKey, StorageInfo, understood
from ckptfix.formats.dcp.skim import skim


def key(path: Path, dtype: str | None, shape: tuple[int, ...], place: StorageInfo) -> SavedKey:
    part = SavedChunk((0,) * len(shape), shape, place)
    return SavedKey(".".join(map(str, path)), path, dtype, shape, (part,))


def keys() -> list[SavedKey]:
    """Return keys with all shapes of 0 to 5 dimensions, values, odd names, numbers in paths, and large offsets."""
    rows = [
        key(("model", f"layer{number}", "weight"), dtype, shape, StorageInfo("__0_0.distcp", 300 * number, 1 << 20))
        for number, (dtype, shape) in enumerate(
            (dtype, tuple(range(1, 1 + dims)))
            for dtype in ("float32", "bfloat16", "int64", "bool", "complex64")
            for dims in range(6)
        )
    ]
    rows += [
        key(("optimizer", "state", 70_000, name), None, (), StorageInfo(f"__0_{at}.distcp", offset, 1500))
        for at, (name, offset) in enumerate(
            [("step", 0), ("offset", 255), ("torch", 256), ("Size", 65536), ("é\ud800", 1 << 31), ("x" * 300, 1 << 42)]
        )
    ]
    rows += [
        key(("a", "b", "c", "d", number), "float32", (2, 3), StorageInfo("__0_0.distcp", (1 << 33) + number, 1300))
        for number in range(2 * BATCH + 1)
    ]
    return rows


def test_both_readers_read_what_was_meant() -> None:
    rows = keys()
    data = fresh(rows, {row.fqn: row.path for row in rows})
    assert skim(data) is not None
    said = understood(data, "x")
    assert said.saved == rows
    assert not said.wrong and not said.unused
    assert (said.nested, said.version) == (True, "1.0.0")


def test_torch_reads_what_was_meant() -> None:
    rows = keys()
    made = pickle.loads(fresh(rows, {row.fqn: row.path for row in rows}))
    assert list(made.state_dict_metadata) == list(made.planner_data) == [row.fqn for row in rows]
    assert list(made.planner_data.values()) == [row.path for row in rows]
    for row, (index, place) in zip(rows, made.storage_data.items(), strict=True):
        (part,) = row.parts
        assert (index.fqn, index.index) == (row.fqn, None if row.dtype is None else 0)
        assert (place.relative_path, place.offset, place.length) == part.place
        tensor = made.state_dict_metadata[row.fqn]
        if row.dtype is None:
            assert index.offset is None
            continue
        assert str(tensor.properties.dtype) == f"torch.{row.dtype}"
        assert (tensor.size, index.offset) == (row.shape, part.offsets)
        assert [(chunk.offsets, chunk.sizes) for chunk in tensor.chunks] == [(part.offsets, part.sizes)]
    assert made.storage_meta.modules == []


def test_an_empty_one() -> None:
    made = pickle.loads(fresh([], {}))
    assert made.state_dict_metadata == made.planner_data == made.storage_data == {}
    assert understood(fresh([], {}), "x").saved == []
