"""What the ranks of a job saved each for itself is joined: any mesh, any number of ranks, uneven and empty parts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from compare import assert_same_state
from rank_files import Placed, distributed, flat, group, sharded

import ckptfix
from ckptfix.cli import commands
from ckptfix.errors import CkptfixError, DamagedFile, Refused, UnknownFormat, Unsupported, WouldLoseData
from ckptfix.formats import detect, open_checkpoint
from ckptfix.formats.ranks import format as ranks
from ckptfix.ops.doctor import doctor

State = dict[str, torch.Tensor]
MESHES: dict[str, tuple[tuple[int, ...], dict[str, tuple[str, ...]]]] = {
    "FSDP2 on 1": ((1,), {"w": ("0",), "b": ("0",), "r": ("*",)}),
    "FSDP2 on 3": ((3,), {"w": ("0",), "b": ("0",), "r": ("*",), "c": ("1",), "last": ("2",)}),
    "FSDP2 on 8": ((8,), {"w": ("0",), "b": ("0",), "small": ("0",), "none": ("0",)}),
    "HSDP": ((2, 2), {"w": ("*", "0"), "c": ("*", "1"), "b": ("*", "0"), "r": ("*", "*")}),
    "both along one": ((2, 3), {"w": ("0", "0"), "small": ("0", "0"), "last": ("2", "2")}),
    "two dimensions": ((2, 3), {"w": ("0", "1"), "c": ("1", "0"), "last": ("2", "0")}),
    "FSDP over TP": ((2, 2), {"even": ("s0", "0"), "w": ("0", "1")}),
    "three": ((2, 2, 2), {"w": ("0", "1", "*"), "last": ("0", "1", "2")}),
}


def values() -> State:
    torch.manual_seed(0)
    return {
        "w": torch.randn(7, 5), "b": torch.randn(11), "r": torch.randn(()), "c": torch.randn(4, 9),
        "last": torch.randn(3, 2, 5).to(torch.bfloat16), "small": torch.randn(2), "none": torch.empty(0, 3),
        "even": torch.randn(8, 3),
    }  # fmt: skip


def saved(folder: Path, mesh: str, name: str = "model_rank{}.pt", **plain: Any) -> State:
    """The files of all ranks in `folder`; the whole."""
    folder.mkdir(exist_ok=True)
    shape, how = MESHES[mesh]
    own = values()
    tensors: dict[str, Placed] = {key: (own[key], placed) for key, placed in how.items()}
    tensors["tied"] = next(iter(tensors.values()))
    ranks = torch.Size(shape).numel()
    for rank in range(ranks):
        distributed(folder / name.format(rank), rank, shape, tensors, **plain)
    return {key: whole for key, (whole, _) in tensors.items()} | {
        key: value for key, value in plain.items() if isinstance(value, torch.Tensor)
    }


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_every_part_goes_to_its_place(mesh: str, tmp_path: Path) -> None:
    wanted = saved(tmp_path / "in", mesh, steps=torch.tensor(7))
    paths = files(tmp_path / "in")
    random.Random(0).shuffle(paths)
    sources: list[Any] = [paths, *([tmp_path / "in"] if len(paths) > 1 else [])]
    for number, source in enumerate(sources):
        for suffix in (".pth", ".safetensors"):
            if len(paths) == 1:
                continue
            done = ckptfix.convert(source, tmp_path / f"{number}{suffix}")
            assert (done.exit_code, done.account.lost, done.findings) == (0, (), ())
            found = ckptfix.load_state_dict(tmp_path / f"{number}{suffix}", strip=None)
            assert_same_state(found, wanted)
            first = next(iter(wanted))
            assert found["tied"].data_ptr() == found[first].data_ptr()
    if len(paths) > 1:
        assert_same_state(torch.load(tmp_path / "0.pth", weights_only=True), wanted)


def test_shards_of_fsdp1_say_where_they_belong(tmp_path: Path) -> None:
    local = [sharded(tmp_path / f"rank{rank}.pt", rank) for rank in range(2)]
    done = ckptfix.convert([tmp_path / "rank1.pt", tmp_path / "rank0.pt"], tmp_path / "out.safetensors")
    found = ckptfix.load_state_dict(tmp_path / "out.safetensors", strip=None)
    assert torch.equal(found["fc.weight"], torch.cat([row["fc.weight"] for row in local]))
    assert done.exit_code == 0 and torch.equal(found["fc.bias"], local[0]["fc.bias"])


NAMES = ("model_rank{}.pt", "rank{}.pt", "model_world_size_3_rank_{}.pt", "pytorch_model_fsdp_rank{}.bin",
         "model_final.rank_{}.pth", "Rank-{}.ckpt")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_known_by_the_names_of_its_files(name: str, tmp_path: Path) -> None:
    wanted = saved(tmp_path / "in", "FSDP2 on 3", name)
    assert detect(tmp_path / "in").name == "ranks"
    assert_same_state(ckptfix.load_state_dict(tmp_path / "in", strip=None), wanted)


def test_the_models_files_are_meant_beside_a_trainers_others(tmp_path: Path) -> None:
    wanted = saved(tmp_path / "in", "FSDP2 on 3", "model_world_size_3_rank_{}.pt")
    saved(tmp_path / "in", "FSDP2 on 3", "optim_world_size_3_rank_{}.pt")
    for rank in range(3):
        torch.save({"rng": rank}, tmp_path / "in" / f"extra_state_world_size_3_rank_{rank}.pt")
    (tmp_path / "in" / "fsdp_config.json").write_text("{}")
    assert_same_state(ckptfix.load_state_dict(tmp_path / "in", strip=None), wanted)


def test_other_folders_are_none_of_it(tmp_path: Path) -> None:
    whole, two, alone = tmp_path / "whole", tmp_path / "two", tmp_path / "alone"
    for folder in (whole, two, alone):
        folder.mkdir()
    for rank in range(2):
        torch.save({"w": torch.ones(2)}, whole / f"rank{rank}.pt")
    saved(two, "FSDP2 on 3", "a_rank{}.pt")
    saved(two, "FSDP2 on 3", "b_rank{}.pt")
    sharded(alone / "rank0.pt")
    for folder in (whole, two, alone):
        try:
            assert open_checkpoint(folder).format == "zip"
        except UnknownFormat:
            continue
        assert folder is alone


def test_one_file_alone_is_what_it_was(tmp_path: Path) -> None:
    saved(tmp_path / "in", "FSDP2 on 3")
    for path in files(tmp_path / "in")[1:]:
        path.unlink()
    with pytest.raises(WouldLoseData, match="rank 0 of 3"):
        ckptfix.convert(tmp_path / "in" / "model_rank0.pt", tmp_path / "out.safetensors")


def test_a_rank_that_is_missing_is_named_with_its_rows(tmp_path: Path) -> None:
    saved(tmp_path / "in", "FSDP2 on 3")
    lost = tmp_path / "in" / "model_rank1.pt"
    lost.unlink()
    (found,) = [row for row in doctor(tmp_path / "in").findings if row.id == "missing-rank"]
    assert found.where == str(lost)
    assert "rank 1: model_rank1.pt is missing; it holds w (rows 3 to 5), b (elements 4 to 7)" in found.message
    for write in (
        lambda: ckptfix.convert(tmp_path / "in", tmp_path / "out.pth"),
        lambda: ckptfix.convert(files(tmp_path / "in"), tmp_path / "out.safetensors"),
        lambda: ckptfix.extract(tmp_path / "in", tmp_path / "out.pth"),
        lambda: ckptfix.load_state_dict(tmp_path / "in"),
    ):
        with pytest.raises(CkptfixError):
            write()
    assert not list(tmp_path.glob("out*"))
    lost.write_bytes(files(tmp_path / "in")[0].read_bytes()[:900])
    (found,) = [row for row in doctor(tmp_path / "in").findings if row.id == "missing-rank"]
    assert "cannot be read" in found.message


def test_repair_keeps_what_the_other_ranks_hold(tmp_path: Path) -> None:
    wanted = saved(tmp_path / "in", "FSDP2 on 3", mean=torch.ones(3))
    done = ckptfix.repair(tmp_path / "in", tmp_path / "all.pth")
    assert done.exit_code == 0 and set(wanted) <= set(done.kept)
    (tmp_path / "in" / "model_rank1.pt").unlink()
    done = ckptfix.repair(tmp_path / "in", tmp_path / "out.pth")
    assert done.exit_code == 3 and {"w", "b"} <= {loss.name for loss in done.losses}
    assert "mean" in done.kept
    done = ckptfix.repair(tmp_path / "in", tmp_path / "filled.pth", fill_from=tmp_path / "all.pth")
    assert_same_state(torch.load(tmp_path / "all.pth"), torch.load(tmp_path / "filled.pth"))


def test_a_replica_stands_in_for_a_missing_rank(tmp_path: Path) -> None:
    wanted = saved(tmp_path / "in", "HSDP")
    (tmp_path / "in" / "model_rank2.pt").unlink()
    done = ckptfix.convert(tmp_path / "in", tmp_path / "out.pth")
    assert [row.id for row in done.findings] == ["ranks-differ"] and "in the other files too" in str(done)
    assert_same_state(torch.load(tmp_path / "out.pth"), wanted)


def test_what_is_not_cut_is_taken_from_the_first_and_compared(tmp_path: Path) -> None:
    saved(tmp_path / "in", "FSDP2 on 3", mean=torch.ones(3), steps=torch.tensor(1))
    shape, how = MESHES["FSDP2 on 3"]
    own = values()
    tensors: dict[str, Placed] = {key: (own[key], placed) for key, placed in how.items()}
    tensors["tied"] = tensors["w"]
    distributed(tmp_path / "in" / "model_rank2.pt", 2, shape, tensors, mean=torch.zeros(3), steps=torch.tensor(1))
    done = ckptfix.convert(tmp_path / "in", tmp_path / "out.pth")
    assert done.exit_code == 0
    assert "differs between ranks, so the values of model_rank0.pt were used: mean" in str(done)
    assert torch.equal(torch.load(tmp_path / "out.pth")["mean"], torch.ones(3))


@pytest.mark.parametrize(
    "steps", [lambda n: {"step": n}, lambda n: {"optim": {"state": {"w": {"step": torch.tensor(n)}}}}]
)
def test_a_file_of_another_step_is_named(steps: Callable[[float], dict[str, Any]], tmp_path: Path) -> None:
    saved(tmp_path / "in", "FSDP2 on 3", **steps(3.0))
    saved(tmp_path / "other", "FSDP2 on 3", **steps(9.0))
    assert "other-save" not in [row.id for row in doctor(tmp_path / "in").findings]
    (tmp_path / "other" / "model_rank1.pt").replace(tmp_path / "in" / "model_rank1.pt")
    row = {row.id: row for row in doctor(tmp_path / "in").findings}["other-save"]
    assert "rank 1: model_rank1.pt" in row.message
    assert "step is 9, but 3 in the other ranks' files" in row.message
    with pytest.raises(WouldLoseData, match="model_rank1"):
        ckptfix.convert(tmp_path / "in", tmp_path / "out.pth")
    assert not (tmp_path / "out.pth").exists()


def test_files_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "in", "FSDP2 on 3")
    saved(tmp_path / "other", "FSDP2 on 8")
    (tmp_path / "other" / "model_rank1.pt").replace(tmp_path / "in" / "model_rank1.pt")
    with pytest.raises(DamagedFile, match="model_rank1"):
        open_checkpoint(tmp_path / "in")
    with pytest.raises(Refused, match="belongs to rank 0, as does"):
        ckptfix.convert([tmp_path / "in" / "model_rank0.pt"] * 2, tmp_path / "out.pth")
    torch.save({"w": torch.ones(2)}, tmp_path / "plain.pt")
    with pytest.raises(Refused, match="whole tensors"):
        ckptfix.convert([tmp_path / "plain.pt", tmp_path / "plain.pt"], tmp_path / "out.pth")


FLAT_KEYS = ("_flat_param", "_fsdp_wrapped_module.flat_param", "flat_param_0")


@pytest.mark.sampled(quick=1)
@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("key", FLAT_KEYS)
def test_flat_parameters_are_refused_with_the_way_out(key: str, original: bool, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for rank in range(2):
        flat(folder / f"local_rank{rank}.pt", rank, key, original=original)
    _refused_as_flat(folder, key, tmp_path)


@pytest.mark.parametrize("key", FLAT_KEYS)
def test_flat_parameters_that_are_plain_tensors_are_refused_too(key: str, tmp_path: Path) -> None:
    """As fairscale saves them: torch.save of a rank's part, with no description of the whole."""
    folder = tmp_path / "in"
    folder.mkdir()
    for rank in range(2):
        torch.save({key: torch.ones(5), f"block.{key}": torch.ones(3)}, folder / f"local_rank{rank}.pt")
    _refused_as_flat(folder, key, tmp_path)


def _refused_as_flat(folder: Path, key: str, tmp_path: Path) -> None:
    one = folder / "local_rank0.pt"
    way = "consolidate_shard_weights" if key == "flat_param_0" else "FULL_STATE_DICT"
    for source, words in ((folder, "in one row"), (one, "flat parameters")):
        for act in (
            lambda source=source: ckptfix.convert(source, tmp_path / "out.pth"),
            lambda source=source: ckptfix.convert(source, tmp_path / "out.safetensors"),
            lambda source=source: ckptfix.load_into(torch.nn.Linear(2, 2), source),
            lambda source=source: ckptfix.load_state_dict(source),
        ):
            with pytest.raises(WouldLoseData, match=words) as caught:
                act()
            assert way in (caught.value.hint or "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]
    assert "flat-parameters" in {row.id for row in doctor(folder).findings}
    found = {row.id: row for row in doctor(one).findings}
    assert way in str(found["one-rank"].fix) and "bad-call" not in found
    for command in ("ls", "inspect"):
        done = CliRunner().invoke(commands, [command, str(folder)])
        assert "flat-parameters" in done.output or "no file has their names" in done.output


def test_terms_of_a_sum_are_refused(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    for rank in range(2):
        with group(rank):
            mesh = init_device_mesh("cpu", (2,))
            torch.save({"w": DTensor.from_local(torch.ones(2), mesh, [Partial()])}, tmp_path / f"rank{rank}.pt")
    with pytest.raises(Unsupported, match="a term of a sum"):
        open_checkpoint(tmp_path)


def test_a_part_may_be_a_strided_view(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    whole = torch.randn(5, 6)
    for rank in range(2):
        with group(rank):
            mesh = init_device_mesh("cpu", (2,))
            # torch saves no DTensor whose part begins behind the start of its storage.
            local = torch.cat([whole[:, rank * 3 : rank * 3 + 3], torch.zeros(5, 2)], 1)[:, :3]
            part = DTensor.from_local(local, mesh, [Shard(1)], run_check=False)
            assert not part._local_tensor.is_contiguous()
            torch.save({"fc.weight": part}, tmp_path / f"rank{rank}.pt")
    ckptfix.convert(tmp_path, tmp_path / "out.safetensors")
    assert_same_state(ckptfix.load_state_dict(tmp_path / "out.safetensors"), {"fc.weight": whole})


@pytest.mark.slow
def test_every_verb_that_reads_reads_it(tmp_path: Path) -> None:
    wanted = saved(tmp_path / "in", "FSDP2 on 3")
    source = tmp_path / "in"
    found = ckptfix.inspect(source)
    assert (found.format, found.traits["ranks"]) == ("ranks", 3)
    assert not [row for row in doctor(source).findings if row.severity == "error"]
    ckptfix.extract(source, tmp_path / "taken.pth")
    assert_same_state(torch.load(tmp_path / "taken.pth"), wanted)
    ckptfix.sanitize(source, tmp_path / "plain.pth")
    assert_same_state(torch.load(tmp_path / "plain.pth", weights_only=True), wanted)
    ckptfix.slim(source, tmp_path / "slim.pth")
    assert_same_state(torch.load(tmp_path / "slim.pth"), wanted)
    assert ckptfix.diff(source, source).same
    ckptfix.strip_module(source, tmp_path / "stripped.pth")
    assert_same_state(torch.load(tmp_path / "stripped.pth"), wanted)
    ckptfix.to_cpu(source, tmp_path / "cpu.pth")
    assert_same_state(torch.load(tmp_path / "cpu.pth"), wanted)
    ckptfix.add_module(source, tmp_path / "added.pth")
    assert_same_state(torch.load(tmp_path / "added.pth"), {f"module.{key}": value for key, value in wanted.items()})


def test_damaged_bytes_are_found_by_the_checksums_of_the_ranks(tmp_path: Path) -> None:
    wanted = saved(tmp_path / "in", "FSDP2 on 3")
    path = tmp_path / "in" / "model_rank2.pt"
    data = bytearray(path.read_bytes())
    data[data.index(wanted["w"][6:].numpy().tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedFile, match="CRC-32") as caught:
        ckptfix.convert(tmp_path / "in", tmp_path / "out.pth")
    assert caught.value.path == str(path) and not (tmp_path / "out.pth").exists()
    assert "bad-crc" in {row.id for row in doctor(tmp_path / "in").findings}


def cli(*words: object) -> Result:
    return CliRunner().invoke(commands, [str(word) for word in words])


def test_the_command_takes_several_files(tmp_path: Path) -> None:
    wanted = saved(tmp_path / "in", "FSDP2 on 3")
    done = cli("convert", *files(tmp_path / "in"), "-o", tmp_path / "out.pth")
    assert done.exit_code == 0, done.output
    assert_same_state(torch.load(tmp_path / "out.pth"), wanted)
    assert cli("convert", *files(tmp_path / "in")).exit_code == 2
    one = cli("extract", tmp_path / "in" / "model_rank1.pt", tmp_path / "one.pth")
    assert one.exit_code == 2
    (line,) = [line for line in one.output.splitlines() if "ckptfix convert" in line]
    words = line.split("`")[1].replace("OUT.pth", str(tmp_path / "again.pth")).split()
    assert cli(*words[1:]).exit_code == 0
    assert_same_state(torch.load(tmp_path / "again.pth"), wanted)


@pytest.mark.parametrize("where", ["name", "tensors"])
def test_more_ranks_than_any_job_has_are_refused_before_they_are_counted(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "tensors":
        monkeypatch.setattr(ranks, "MOST_RANKS", 1)
    folder = tmp_path / "in"
    folder.mkdir()
    for rank in range(2):
        sharded(folder / (f"model_world_size_200000_rank_{rank}.pt" if where == "name" else f"rank{rank}.pt"), rank)
    with pytest.raises(DamagedFile, match="more than any job has"):
        open_checkpoint(folder)


def test_parts_that_are_views_of_one_storage_keep_their_own_values(tmp_path: Path) -> None:
    """A tie is of parts that are read in the same way: transposed or negated ones begin where the others do."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    locals_of = [torch.randn(3, 3, dtype=torch.complex64) for _ in range(2)]
    views: dict[str, Any] = {
        "w": lambda local: local, "turned": lambda local: local.t(), "negative": torch._neg_view,
        "conjugate": torch.conj, "both": lambda local: local.mH, "again": lambda local: local.mH,
    }  # fmt: skip
    for rank, local in enumerate(locals_of):
        with group(rank, 2):
            mesh: Any = init_device_mesh("cpu", (2,))
            state = {
                name: DTensor.from_local(view(local), mesh, [Shard(0)], shape=torch.Size([6, 3]), stride=(3, 1))
                for name, view in views.items()
            }
            torch.save(state, tmp_path / f"rank{rank}.pt")
    paths = [tmp_path / f"rank{rank}.pt" for rank in range(2)]
    done = ckptfix.convert(paths, tmp_path / "out.pth")
    assert (done.exit_code, done.account.lost) == (0, ())
    found = torch.load(tmp_path / "out.pth", weights_only=True)
    wanted = {name: torch.cat([view(local).resolve_conj().resolve_neg() for local in locals_of])
              for name, view in views.items()}  # fmt: skip
    assert_same_state(found, wanted)
    assert found["both"].data_ptr() == found["again"].data_ptr()
    assert len({value.data_ptr() for value in found.values()}) == 5
