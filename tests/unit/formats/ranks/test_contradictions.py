"""Files of ranks that say two things of a tensor, or more than any job has: refused by name, or told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_files import group
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckptfix
from ckptfix.errors import CkptfixError, DamagedFile, Unsupported, WouldLoseData
from ckptfix.formats import open_checkpoint
from ckptfix.formats.ranks import merge

WHOLE = torch.arange(16.0).view(8, 2)
Lie = Callable[[int, Any, Any], None]


def placed(
    folder: Path, locals_: list[torch.Tensor], how: list[Any], mesh: tuple[int, ...], lie: Lie | None = None
) -> None:
    """A file of each rank, with its part of ``w``, of which `lie` changes the mesh and the DTensor first."""
    from torch.distributed.device_mesh import init_device_mesh

    folder.mkdir(exist_ok=True)
    for rank, local in enumerate(locals_):
        with group(rank, len(locals_)):
            on: Any = init_device_mesh("cpu", mesh)
            made = DTensor.from_local(local.clone(), on, how, run_check=False, shape=WHOLE.shape, stride=WHOLE.stride())
            if lie is not None:
                lie(rank, on, made)
            torch.save({"w": made}, folder / f"rank{rank}.pt")


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_copies_of_a_part_are_compared(mesh: tuple[int, ...], tmp_path: Path) -> None:
    """What is replicated is on several ranks, all of it or its parts: the first is taken, and a difference told."""
    how = [Replicate(), Shard(0)] if len(mesh) > 1 else [Replicate()]
    parts = [*WHOLE.chunk(2)] * 2 if len(mesh) > 1 else [WHOLE] * 2
    placed(tmp_path / "in", parts, how, mesh)
    assert not [row.id for row in open_checkpoint(tmp_path / "in").findings]
    placed(tmp_path / "in", [*parts[:-1], parts[-1] + 1], how, mesh)
    done = ckptfix.convert(tmp_path / "in", tmp_path / "out.pth")
    assert [(row.id, row.where) for row in done.findings] == [("ranks-differ", "w")] and "differ" in str(done)
    assert torch.equal(torch.load(tmp_path / "out.pth")["w"], WHOLE)


@pytest.mark.parametrize("stripes", (1, 2, 4))
def test_stripes_that_the_mesh_does_not_make_are_refused(stripes: int, tmp_path: Path) -> None:
    """Each rank has rows here and there: they are not in one piece, as over tensor parallelism."""
    rows = WHOLE.chunk(2 * stripes)
    placed(
        tmp_path / "in", [torch.cat(rows[rank::2]) for rank in range(2)], [_StridedShard(0, split_factor=stripes)], (2,)
    )
    if stripes == 1:
        ckptfix.convert(tmp_path / "in", tmp_path / "out.pth")
        assert torch.equal(torch.load(tmp_path / "out.pth")["w"], WHOLE)
    else:
        with pytest.raises(Unsupported, match=f"split into {stripes} stripes"):
            ckptfix.convert(tmp_path / "in", tmp_path / "out.pth")


def other_shape(rank: int, mesh: Any, made: Any) -> None:
    made._spec.tensor_meta = made._spec.tensor_meta._replace(shape=torch.Size((1 << 62, 2)))


def other_place(rank: int, mesh: Any, made: Any) -> None:
    mesh._coordinate_on_dim = [0]


@pytest.mark.parametrize(
    ("lie", "error", "message"),
    [
        (other_shape, DamagedFile, r"its shape is \[8, 2\], but its metadata has \[4611686018427387904, 2\]"),
        (other_place, WouldLoseData, r"rank1.pt has another rank's part, and lacks w \(rows 4 to 7\)"),
    ],
)
def test_a_dtensor_that_contradicts_itself(lie: Lie, error: type[CkptfixError], message: str, tmp_path: Path) -> None:
    placed(tmp_path / "in", [*WHOLE.chunk(2)], [Shard(0)], (2,), lie)
    with pytest.raises(error, match=message):
        ckptfix.convert(tmp_path / "in", tmp_path / "out.pth")


Box = tuple[list[int], list[int], int]
ROWS: list[Box] = [([0, 0], [4, 2], 0), ([4, 0], [4, 2], 1)]


@pytest.mark.parametrize(
    ("rows", "own", "shape", "message"),
    [
        (ROWS, ROWS, (9, 2), "but its metadata has"),
        (ROWS, ROWS, (1 << 60, 2), "but its metadata has"),
        (ROWS, [ROWS[0], ([2, 0], [4, 2], 1)], (8, 2), "lacks the shard"),
        (ROWS, [([4, 0], [4, 2], 0), ([0, 0], [4, 2], 1)], (8, 2), "lacks the shard"),
        ([ROWS[0], ([3, 0], [4, 2], 1)], None, (8, 2), "2 chunks hold"),
        ([ROWS[0], ([-4, 0], [4, 2], 1)], None, (8, 2), "no valid offsets"),
        ([ROWS[0], ([(1 << 63) - 2, 0], [4, 2], 1)], None, (8, 2), "a shard of"),
        ([ROWS[0], ([0, 0], [4, 2], 1)], None, (8, 2), "two shards have the same position"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_sharded_tensor_that_contradicts_itself(
    rows: list[Box], own: list[Box] | None, shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import shard
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties

    def stated(offsets: list[int], extent: list[int], rank: int) -> Any:
        made = ShardMetadata([0, 0], [4, 2], f"rank:{rank}/cpu")
        made.shard_offsets, made.shard_sizes = offsets, extent
        return made

    (tmp_path / "in").mkdir()
    for rank, local in enumerate(WHOLE.chunk(2)):
        with group(rank):
            good = [stated(*row) for row in ROWS]
            about = ShardedTensorMetadata(good, torch.Size((8, 2)), TensorProperties(torch.float32))
            parts = [shard.Shard(local.clone(), good[rank])]
            made: Any = ShardedTensor._init_from_local_shards_and_global_metadata(parts, about)
            made._metadata.shards_metadata[:] = [stated(*row) for row in rows]
            made._metadata.size = torch.Size(shape)
            made._local_shards[0].metadata = stated(*(own or rows)[rank])
            torch.save({"w": made}, tmp_path / f"in/rank{rank}.pt")
    with pytest.raises(DamagedFile, match=message):
        ckptfix.convert(tmp_path / "in", tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


def test_more_parts_than_any_job_has_are_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placed(tmp_path / "in", [*WHOLE.chunk(4)], [Shard(0)], (4,))
    for rank in (1, 2, 3):
        (tmp_path / f"in/rank{rank}.pt").replace(tmp_path / f"{rank}")
    (tmp_path / "1").replace(tmp_path / "in/rank1.pt")
    monkeypatch.setattr(merge._Budget, "__init__", lambda self: setattr(self, "left", 4 + 2 * merge._NAMED))
    assert "missing-rank" in {row.id for row in open_checkpoint(tmp_path / "in").findings}
    monkeypatch.setattr(merge._Budget, "__init__", lambda self: setattr(self, "left", 4 + merge._NAMED))
    with pytest.raises(DamagedFile, match="more parts than in any real job"):
        open_checkpoint(tmp_path / "in")
